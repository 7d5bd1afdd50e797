"""A rank of test_fsdp_overlap.py: fsdp_worker.py FSDP1|FSDP2 STORE TRACE SERVER: some steps over shards, one of which TRACE shows."""

from __future__ import annotations

import os
import sys

import gradwire
import torch
import torch.distributed as dist
from gradwire.torch import FSDPState
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

UNITS, WIDTH = 4, 512

generation, store, trace, *servers = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(os.environ["RANK"]), world_size=2)
model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)))
if generation == "FSDP1":
    on_host = {"use_orig_params": True, "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(torch.nn.Sequential(*(FullyShardedDataParallel(layer, **on_host) for layer in model)), **on_host)
else:
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with FSDPState(model, servers=servers, job="overlap", trace=gradwire.Trace(trace, first_round=3)):
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(32, WIDTH)).square().mean().backward()
        optimizer.step()
