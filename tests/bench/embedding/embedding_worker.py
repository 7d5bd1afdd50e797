"""One worker of the benchmark `embedding`: trains a table of embeddings for some steps, and prints what they took as JSON.
argv[1]: its settings, as JSON. It stops before the first step, behind those that do not count and behind the last, and says so by a
line of JSON, until it is given a line: so that memory can be looked at while nobody steps."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

SYSTEMS = ("ddp", "ddp sparse", "zen")
LAWS = ("even", "zipf")
LR = 1e-4  # a row that words are drawn by often comes hundreds of times in a batch
WARM_STEPS = 2  # that do not count: a job's first step makes two rounds, DistributedDataParallel's remakes its buckets
TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class Settings:
    system: str
    rows: int  # of the table
    width: int
    drawn: int  # rows of a worker's batch
    law: str  # by which they are drawn
    steps: int  # that count
    worker: int
    workers: int
    servers: list[str]
    run_elements: int
    bucket_bytes: int
    master: str
    port: int
    interface: str


def link_bytes(interface: str) -> tuple[int, int]:
    """What the host has sent and received, with headers."""
    counters = Path("/sys/class/net") / interface / "statistics"
    return int((counters / "tx_bytes").read_text()), int((counters / "rx_bytes").read_text())


def stop() -> None:
    """Until the benchmark has looked. What was freed goes back to the system first, or steps could take it without growing."""
    ctypes.CDLL(None).malloc_trim(0)
    print(json.dumps({"stopped": True}), flush=True)
    sys.stdin.readline()


@contextlib.contextmanager
def opened(settings: Settings, table: nn.Embedding) -> Iterator[tuple[Callable, torch.optim.Optimizer]]:
    """The module as the loop calls it, and the optimizer."""
    if settings.system == "zen":
        import gradwire
        from gradwire.torch import ShardedOptimizer

        codec = f"zen:run={settings.run_elements}" if settings.run_elements else "zen"
        with ShardedOptimizer(table, servers=settings.servers, job="embedding", worker=f"worker-{settings.worker}",
                              workers=settings.workers, codec=codec, push="gradient", optimizer="sgd",
                              lr=LR, bucket_bytes=settings.bucket_bytes, rules=[gradwire.Rule(codec)],
                              start_timeout=TIMEOUT.total_seconds(), round_timeout=TIMEOUT.total_seconds(),
                              rpc_timeout=120.0) as optimizer:
            yield table, optimizer
        return
    os.environ.update(GLOO_SOCKET_IFNAME=settings.interface, MASTER_ADDR=settings.master, MASTER_PORT=str(settings.port))
    dist.init_process_group("gloo", rank=settings.worker, world_size=settings.workers, timeout=TIMEOUT)
    dense = settings.system == "ddp"  # whose gradient is its bucket: a table less
    yield nn.parallel.DistributedDataParallel(table, gradient_as_bucket_view=dense), torch.optim.SGD(table.parameters(), lr=LR)
    dist.destroy_process_group()


def draw(settings: Settings, random: torch.Generator) -> torch.Tensor:
    if settings.law == "even":
        return torch.randint(settings.rows, (settings.drawn,), generator=random)
    at = torch.rand(settings.drawn, generator=random, dtype=torch.float64)
    return (torch.exp(at * math.log(settings.rows + 1)) - 1).long().clamp_(max=settings.rows - 1)  # row k about as often as 1 / (k + 1)


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = nn.Embedding(settings.rows, settings.width, sparse=settings.system != "ddp")
    random = torch.Generator().manual_seed(1 + settings.worker)
    batches = [draw(settings, random) for _ in range(WARM_STEPS + settings.steps)]
    touched = sum(rows.unique().numel() for rows in batches) / len(batches)
    seconds, before = [], (0, 0)
    with opened(settings, table) as (forward, optimizer):
        stop()
        for step, rows in enumerate(batches):
            if step == WARM_STEPS:
                stop()
                before = link_bytes(settings.interface)
            begin = time.perf_counter()
            optimizer.zero_grad()
            forward(rows).square().sum().backward()
            optimizer.step()
            if step >= WARM_STEPS:
                seconds.append(time.perf_counter() - begin)
        after = link_bytes(settings.interface)
        stop()
    sent, received = ((now - then) / settings.steps for now, then in zip(after, before, strict=True))
    total = sum(rows.sum(dtype=torch.float64).item() for rows in table.weight.detach().split(1 << 18))  # in parts: it copies
    print(json.dumps({"seconds": seconds, "sent_bytes": sent, "received_bytes": received, "touched": touched, "sum": total}))


if __name__ == "__main__":
    main()
