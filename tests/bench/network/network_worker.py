"""One worker of the benchmark `network`: trains the byte-level GPT some steps, by DistributedDataParallel over gloo or
through shard servers, and prints the seconds of each step as JSON. argv[1]: its settings, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client/examples/gpt"))

from data import load_corpus, training_batch
from model import Gpt, GptConfig

LR = 1e-3
SEED = 1


@dataclass(frozen=True)
class Settings:
    """`way`: "alone" (no exchange), "ddp", or the codec of a job."""

    way: str
    worker: int
    workers: int
    steps: int
    sequences: int  # per worker and step
    width: int
    layers: int
    servers: list[str]
    master: str  # of DDP: address of worker 0
    interface: str
    trace: str  # a file; empty: none
    bucket_bytes: int  # of the job; 0: its default


@contextlib.contextmanager
def trained_alone(model: Gpt, settings: Settings):
    yield model, torch.optim.AdamW(model.parameters(), lr=LR)


@contextlib.contextmanager
def trained_by_ddp(model: Gpt, settings: Settings):
    os.environ.update(MASTER_ADDR=settings.master, MASTER_PORT="29500", GLOO_SOCKET_IFNAME=settings.interface)
    torch.distributed.init_process_group("gloo", rank=settings.worker, world_size=settings.workers)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    yield wrapped, torch.optim.AdamW(model.parameters(), lr=LR)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def trained_by_shards(model: Gpt, settings: Settings):
    import gradwire
    import gradwire.torch

    # Three steps from the middle of the run.
    trace = gradwire.Trace(settings.trace, 1 + settings.steps // 2, 3) if settings.trace else None
    with gradwire.torch.ShardedOptimizer(model, servers=settings.servers, job="network", worker=f"worker-{settings.worker}",
                                         workers=settings.workers, codec=settings.way, lr=LR, overlap=True,
                                         bucket_bytes=settings.bucket_bytes, trace=trace) as optimizer:
        yield model, optimizer


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    config = GptConfig(width=settings.width, layers=settings.layers)
    model = Gpt(config, SEED)
    corpus = load_corpus()
    way = {"alone": trained_alone, "ddp": trained_by_ddp}.get(settings.way, trained_by_shards)
    seconds = []
    with way(model, settings) as (forward, optimizer):
        for step in range(settings.steps):
            inputs, targets = training_batch(corpus.train, SEED, settings.worker, step, settings.sequences,
                                             config.context_tokens)
            begin = time.perf_counter()
            optimizer.zero_grad()
            logits = forward(inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": seconds, "loss": loss.item(), "parameters": sum(p.numel() for p in model.parameters())}))


if __name__ == "__main__":
    main()
