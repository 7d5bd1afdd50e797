"""`python -m gradwire demo`: shard servers and workers on this machine, in a minute, with nothing but NumPy."""

from __future__ import annotations

import argparse
import concurrent.futures
import threading
from collections.abc import Callable, Sequence

import numpy as np

from ._cluster import local_cluster
from ._errors import GradwireError
from ._job import JobSpec, TensorSpec
from ._session import join

_INPUTS, _HIDDEN, _CLASSES, _BATCH = 64, 512, 10, 128
_SHAPES = {"hidden.weight": (_INPUTS, _HIDDEN), "out.weight": (_HIDDEN, _CLASSES)}
_LINES = 5


def _batch(rng: np.random.Generator, teacher: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    inputs = rng.standard_normal((_BATCH, _INPUTS), dtype=np.float32)
    return inputs, (inputs @ teacher).argmax(1)


def _loss_and_gradients(parameters: list[np.ndarray], inputs: np.ndarray,
                        labels: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """Cross entropy of two layers with a ReLU between them."""
    hidden, out = parameters
    active = np.maximum(inputs @ hidden, 0)
    logits = active @ out
    logits -= logits.max(1, keepdims=True)
    likely = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    loss = float(-np.log(likely[np.arange(len(labels)), labels]).mean())
    likely[np.arange(len(labels)), labels] -= 1
    likely /= len(labels)
    back = (likely @ out.T) * (active > 0)
    return loss, [inputs.T @ back, active.T @ likely]


def _train(worker: int, servers: Sequence[str], workers: int, steps: int, codec: str,
           stopped: threading.Event) -> dict[str, float]:
    rng = np.random.default_rng(worker)
    teacher = np.random.default_rng(1000).standard_normal((_INPUTS, _CLASSES), dtype=np.float32)
    start = np.random.default_rng(2000)  # the same on every worker
    parameters = [start.standard_normal(shape, dtype=np.float32) / np.sqrt(np.float32(shape[0]))
                  for shape in _SHAPES.values()]
    job = JobSpec("demo", [TensorSpec(name, shape) for name, shape in _SHAPES.items()], optimizer="adamw", codec=codec,
                  workers=workers)
    loss = 0.0
    with join(servers, job, parameters, f"worker-{worker}") as session:
        for step in range(steps):
            if stopped.is_set():
                break
            loss, gradients = _loss_and_gradients(parameters, *_batch(rng, teacher))
            session.exchange(gradients, lr=2e-3)  # compressed, summed on the shards, stepped there and here
            if worker == 0 and (step % max(steps // _LINES, 1) == 0 or step == steps - 1):
                print(f"step {step:5d}: loss {loss:.3f}", flush=True)
        return session.stats()


def _demo(shards: int, workers: int, steps: int, codec: str) -> None:
    elements = sum(int(np.prod(shape)) for shape in _SHAPES.values())
    with local_cluster(shards) as cluster:
        print(f"shards at {' '.join(cluster.servers)}; workers: {workers}; {elements:,} parameters; {codec}")
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            stopped = threading.Event()
            running = [pool.submit(_train, w, cluster.servers, workers, steps, codec, stopped) for w in range(workers)]
            try:
                stats = [worker.result() for worker in running]
            finally:
                stopped.set()
    dense = 4 * elements * steps
    pushed = sum(s["pushed_bytes"] for s in stats) / workers
    pulled = sum(s["pulled_bytes"] for s in stats) / workers
    print(f"each worker pushed {pushed / 1e3:,.0f} kB and pulled {pulled / 1e3:,.0f} kB; as float32 it would be {dense / 1e3:,.0f} kB "
          f"each way ({2 * dense / (pushed + pulled):.1f} times as much)")


def _up_to(most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {most:,}")
        return int(text)

    return number


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gradwire")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train a small model through shard servers on this machine",
                               description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    demo.add_argument("--shards", type=_up_to(32), default=2, help="servers")
    demo.add_argument("--workers", type=_up_to(32), default=2, help="each a thread with a session of its own")
    demo.add_argument("--steps", type=_up_to(1_000_000), default=300)
    demo.add_argument("--codec", default="tagc:density=0.01", help="of what the workers push")
    given = parser.parse_args(arguments)
    try:
        _demo(given.shards, given.workers, given.steps, given.codec)
    except KeyboardInterrupt:
        return 130
    except (GradwireError, FileNotFoundError, ValueError) as error:
        parser.exit(1, f"python -m gradwire: {error}\n")
    return 0
