"""One run of the study: real shard servers, one session per worker, the codecs of the product.

All workers of a run live in one process and one thread: each begins its round and hands over its gradients, which travel
at once, and only then is the end of the round awaited. So nothing is simulated but the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import gradwire
from gradwire import Group, JobSpec, Rule, TensorSpec, join
from tasks import Task, task

SHARDS = 2
EVALUATIONS = 10
JOBS_PER_SERVER = 200  # then new servers, so that finished jobs do not pile up


@dataclass(frozen=True)
class Run:
    """Everything that decides the outcome of a run. Whatever has its default is left out of the results file."""

    task: str
    codec: str
    push: str = "gradient"  # gradient, step, delta
    optimizer: str = "adamw"  # on the shards: adamw, sgd, lamb, lans, lion; step for pushed steps, step or sgd for deltas
    lr: float = 1e-3  # delta: of the workers' local AdamW
    update_codec: str = ""
    workers: int = 2
    seed: int = 1
    steps: int = 0  # 0: the task's
    momentum: float = 0.0  # of sgd on the shards
    beta2: float = 0.95  # of AdamW, and of the preconditioner of pushed steps
    residual_decay: float = 1.0
    small: str = ""  # codec both ways of norms, biases and tensors below 1024 elements; empty: as the rest
    dense_roles: str = ""  # roles that travel as dense:fixed16, separated by commas
    local_steps: int = 1  # delta: steps per round
    outer_lr: float = 1.0  # delta: of the shards' optimizer
    decay_to: float = 0.1  # the learning rate falls linearly to this part of it; it rises over the first 5 % of the steps

    def to_dict(self) -> dict:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)
                if f.default is dataclasses.MISSING or getattr(self, f.name) != f.default}

    @property
    def total_steps(self) -> int:
        return self.steps or task(self.task).steps


@dataclass(frozen=True)
class Result:
    """What a run gave: the curve has (steps, held-out loss, bytes that a worker pushed, bytes that it pulled)."""

    run: Run
    curve: tuple[tuple[int, float, int, int], ...]
    seconds: float
    error: str = ""

    @property
    def loss(self) -> float:
        return float("inf") if self.error else self.curve[-1][1]

    @property
    def pushed_bytes(self) -> int:
        return self.curve[-1][2]

    @property
    def pulled_bytes(self) -> int:
        return self.curve[-1][3]


def learning_rate(run: Run, step: int) -> float:
    """Of a step, from 0."""
    steps = run.total_steps
    warm = max(1, round(0.05 * steps))
    return run.lr * min((step + 1) / warm, 1 - (1 - run.decay_to) * max(0, step + 1 - warm) / max(1, steps - warm))


class Servers:
    """Shard servers on this machine, as processes; `addresses()` starts new ones now and then."""

    def __init__(self, shards: int = SHARDS) -> None:
        self._shards = shards
        self._stack = contextlib.ExitStack()
        self._addresses: list[str] = []
        self._jobs = 0

    def addresses(self) -> list[str]:
        if not self._addresses or self._jobs >= JOBS_PER_SERVER:
            self.close()
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-")))
            self._addresses = [self._start(folder, shard) for shard in range(self._shards)]
            self._jobs = 0
        self._jobs += 1
        return self._addresses

    def _start(self, folder: Path, shard: int) -> str:
        binary = Path(os.environ["GRADWIRE_BIN"]) / "gradwire-server"
        port_file, log = folder / f"{shard}.address", folder / f"{shard}.log"
        with open(log, "w") as out:
            process = subprocess.Popen(
                [binary, "--listen", "tcp://127.0.0.1:0", "--port-file", port_file, "--max-jobs", str(2 * JOBS_PER_SERVER),
                 "--log-level", "warning"], stdout=out, stderr=subprocess.STDOUT)
        self._stack.callback(self._stop, process)
        deadline = time.monotonic() + 30
        while not (port_file.exists() and port_file.read_text().strip()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the shard server did not start:\n{log.read_text()}")
            time.sleep(0.02)
        return port_file.read_text().split()[0]

    @staticmethod
    def _stop(process: subprocess.Popen) -> None:
        process.kill()
        process.wait()

    def close(self) -> None:
        self._stack.close()
        self._addresses = []

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def job_of(run: Run, model: Task, name: str) -> JobSpec:
    """The job that the workers of a run join."""
    rules = []
    if run.dense_roles:
        rules.append(Rule("dense:values=fixed16", roles=tuple(run.dense_roles.split(","))))
    if run.small:
        back = "" if run.small.startswith("dense:values=fixed") else run.small if run.update_codec else ""
        rules += [Rule(run.small, roles=("norm", "bias"), update_codec=back),
                  Rule(run.small, max_elements=1023, update_codec=back)]
    return JobSpec(
        name=name, tensors=[TensorSpec(t.name, t.shape, t.role) for t in model.tensors], optimizer=run.optimizer,
        groups=[Group(momentum=run.momentum, nesterov=run.push == "delta" and run.momentum > 0, betas=(0.9, run.beta2),
                      eps=1e-6 if run.optimizer in ("lamb", "lans") else 1e-8)],
        push=run.push, step_beta2=run.beta2, residual_decay=run.residual_decay, codec=trained_codec(run),
        update_codec=run.update_codec, rules=rules, workers=run.workers, seed=run.seed)


def trained_codec(run: Run) -> str:
    """TAGC by itself has in this study what it had when its results were made: as many bits as cells of 8 or 16 have room for."""
    if not run.codec.startswith("tagc") or "bits=" in run.codec or "cells=" in run.codec:
        return run.codec
    return f"{run.codec},cells={8 if run.workers <= 4 else 16}"


class LocalAdam:
    """Each worker's own AdamW (Loshchilov and Hutter 2019, without decay) between two rounds of pushed deltas."""

    def __init__(self, memory: list[np.ndarray], beta2: float) -> None:
        self._m = [np.zeros_like(p) for p in memory]
        self._v = [np.zeros_like(p) for p in memory]
        self._beta2 = beta2
        self._t = 0

    def step(self, parameters: list[np.ndarray], gradients: list[np.ndarray], lr: float) -> None:
        self._t += 1
        first, second = 1 - 0.9**self._t, 1 - self._beta2**self._t
        for p, g, m, v in zip(parameters, gradients, self._m, self._v, strict=True):
            m += 0.1 * (g - m)
            v += (1 - self._beta2) * (g * g - v)
            p -= lr / first * m / (np.sqrt(v / second) + 1e-8)


class Workers:
    """The sessions of a run. `memory[i]` is [workers, *shape]; row w belongs to worker w's session."""

    def __init__(self, run: Run, model: Task, servers: list[str], name: str) -> None:
        initial = model.initial(run.seed)
        self.memory = [np.repeat(p[None], run.workers, 0) for p in initial]
        job = job_of(run, model, name)
        self._stack = contextlib.ExitStack()
        self.sessions: list[gradwire.Session] = []
        self._first = True
        self._rounds_in_pairs = run.codec.startswith("powersgd")
        # Joining waits until all have come.
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(run.workers) as pool:
            joins = [pool.submit(join, servers, job, [m[w] for m in self.memory], f"w{w}", round_timeout=60.0,
                                 start_timeout=60.0) for w in range(run.workers)]
            self.sessions = [j.result() for j in joins]
        self._start = [s.stats() for s in self.sessions]  # initial parameters have travelled; they do not count

    def exchange(self, pushed: list[np.ndarray], lr: float) -> None:
        """One round: row w of each array is what worker w pushes."""
        for w, session in enumerate(self.sessions):
            session.begin_round(lr)
            for i in reversed(range(len(pushed))):
                session.tensor_ready(i, pushed[i][w])
        # The first round is preceded by one that calibrates, with PowerSGD each by one for the other factor: all sessions
        # have to go on before any can end.
        waiting = list(self.sessions)
        for timeout in itertools.repeat(0.002 if self._first or self._rounds_in_pairs else None):
            waiting = [s for s in waiting if not self._ended(s, timeout)]
            if not waiting:
                break
        self._first = False

    @staticmethod
    def _ended(session: gradwire.Session, timeout: float | None) -> bool:
        try:
            session.end_round(timeout)
        except gradwire.DeadlineExceeded:
            if timeout is None:
                raise
            return False
        return True

    def bytes(self) -> tuple[int, int]:
        """Pushed and pulled by one worker on average: frames with their headers, that of the calibration too."""
        stats = [s.stats() for s in self.sessions]
        return tuple(round(sum(s[key] - start[key] for s, start in zip(stats, self._start)) / len(stats))
                     for key in ("pushed_bytes", "pulled_bytes"))

    def close(self) -> None:
        for session in self.sessions:
            with contextlib.suppress(gradwire.GradwireError):
                session.leave(drain=False)


_names = itertools.count()


@contextlib.contextmanager
def _workers(run: Run, model: Task, servers: Servers) -> Iterator[Workers]:
    workers = Workers(run, model, servers.addresses(), f"study-{next(_names)}")
    try:
        yield workers
    finally:
        workers.close()


def execute(run: Run, servers: Servers) -> Result:
    """Trains once. A run whose gradients stop being finite ends there, with an error instead of a loss."""
    model = task(run.task)
    began = time.perf_counter()
    curve: list[tuple[int, float, int, int]] = []
    evaluate_at = {round((i + 1) * run.total_steps / EVALUATIONS) for i in range(EVALUATIONS)}
    error = ""
    with _workers(run, model, servers) as workers, np.errstate(all="ignore"):
        adam = LocalAdam(workers.memory, run.beta2) if run.push == "delta" else None
        local = [m.copy() for m in workers.memory] if adam else []
        try:
            for step in range(run.total_steps):
                lr = learning_rate(run, step)
                if adam is None:
                    workers.exchange(model.gradients(workers.memory, run.seed, step), lr)
                else:
                    adam.step(local, model.gradients(local, run.seed, step), lr)
                    if (step + 1) % run.local_steps == 0:
                        workers.exchange([m - p for m, p in zip(workers.memory, local)], run.outer_lr)
                        for p, m in zip(local, workers.memory):
                            p[...] = m
                if step + 1 in evaluate_at:
                    loss = model.held_out([m[0] for m in workers.memory])
                    if not np.isfinite(loss):
                        raise gradwire.InvalidArgument("the loss is not finite")
                    curve.append((step + 1, round(loss, 5), *workers.bytes()))
        except gradwire.InvalidArgument as e:  # a gradient that is not finite, or too large to be added
            error = str(e).split(":")[0][:100] or "diverged"
    return Result(run, tuple(curve), round(time.perf_counter() - began, 2), error)
