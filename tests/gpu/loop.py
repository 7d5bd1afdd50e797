"""A GPT-2 of 124 M parameters on one GPU: how long a step takes with AdamW, through shard servers on loopback, and, two processes on
the GPU, with DistributedDataParallel over gloo and with the same through shard servers. Bound by no link: what is seen is what
Gradwire itself costs. tests/gpu/run runs it; the last lines are JSON."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import gradwire
import torch
import torch.distributed as dist
from gradwire.torch import DDPState, ShardedOptimizer, ddp_hook
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

WIDTH, HEADS, LAYERS, WORDS, CONTEXT, BATCH = 768, 12, 12, 50304, 1024, 4
WARM_UP, STEPS = 4, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.words(words) + self.places.weight[: words.shape[1]])))


def step_ms(model: nn.Module, step: Callable[[], Any], zero_grad: Callable[[], Any]) -> list[float]:
    taken = []
    for _ in range(WARM_UP + STEPS):
        words = torch.randint(0, WORDS, (BATCH, CONTEXT + 1), device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(words[:, :-1])
        cross_entropy(logits.float().flatten(0, 1), words[:, 1:].flatten()).backward()
        step()
        zero_grad()
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - begin))
    return taken[WARM_UP:]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


def alone(servers: list[str], options: dict[str, Any] | None) -> dict[str, float]:
    torch.manual_seed(0)
    model = Gpt().cuda()
    if options is None:
        optimizer = adamw(model)
        return {"ms": statistics.median(step_ms(model, optimizer.step, optimizer.zero_grad))}
    with ShardedOptimizer(model, servers=servers, job=f"alone-{time.time_ns()}", lr=1e-4, **options) as optimizer:
        taken = step_ms(model, optimizer.step, optimizer.zero_grad)
        stats = optimizer.stats()
    rounds = stats["steps"]
    return {"ms": statistics.median(taken), "encode_ms": 1e3 * stats["encode_seconds"] / rounds,
            "apply_ms": 1e3 * stats["apply_seconds"] / rounds,
            "pushed_mb": (stats["pushed_bytes"] - stats["start_bytes"]) / rounds / 1e6, "pulled_mb": stats["pulled_bytes"] / rounds / 1e6}


def of_two(rank: int, store: str, servers: list[str], options: dict[str, Any] | None, found: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt().cuda())
    with contextlib.ExitStack() as stack:
        if options is not None:
            state = stack.enter_context(DDPState(model, servers=servers, job=os.path.basename(store), **options))
            model.register_comm_hook(state, ddp_hook)
        optimizer = adamw(model)
        taken = step_ms(model, optimizer.step, optimizer.zero_grad)
    if rank == 0:
        found.put({"ms": statistics.median(taken)})
    dist.barrier()
    dist.destroy_process_group()


def two(servers: list[str], options: dict[str, Any] | None) -> dict[str, float]:
    context = torch.multiprocessing.get_context("spawn")
    found = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/two-{time.time_ns()}"
        processes = [context.Process(target=of_two, args=(rank, store, servers, options, found)) for rank in range(2)]
        for process in processes:
            process.start()
        try:
            return found.get(timeout=120)
        finally:
            for process in processes:
                process.join(10)
                process.kill()


CASES = [
    ("AdamW, no servers", alone, None),
    ("tagc 1 % (5 % first)", alone, {}),
    ("tagc 1 % (5 % first), overlap", alone, {"overlap": True}),
    ("tagc 1 % (5 % first), in host memory", alone, {"place": "host"}),
    ("topk 1 %, int8, in host memory", alone, {"codec": "topk:density=0.01,values=int8"}),
    ("dense:bf16", alone, {"codec": "dense:bf16", "pull": "params_bf16"}),
    ("two: DDP, gloo", two, None),
    ("two: hook, thc 4 bits, in host memory", two, {}),
    ("two: hook, tagc 1 %", two, {"codec": "tagc:density=0.01"}),
]


def main() -> None:
    rows = []
    for name, run, options in CASES:
        if len(sys.argv) > 1 and not any(part in name for part in sys.argv[1:]):
            continue
        with gradwire.local_cluster(shards=4) as cluster:
            row = {"case": name, **run(cluster.servers, options)}
        rows.append(row)
        print(f"{name:40s}" + "".join(f"{key:>12s} {value:8.1f}" for key, value in row.items() if key != "case"), flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
