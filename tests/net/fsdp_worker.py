"""A rank of test_fsdp_overlap.py: fsdp_worker.py STORE TRACE SERVER: some steps of FSDP over shards, one of which TRACE shows."""

from __future__ import annotations

import os
import sys

import gradwire
import torch
import torch.distributed as dist
from gradwire.torch import FSDPState
from torch.distributed.fsdp import fully_shard

UNITS, WIDTH = 4, 512

store, trace, *servers = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(os.environ["RANK"]), world_size=2)
model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)))
mesh = dist.init_device_mesh("cpu", (2,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with FSDPState(model, servers=servers, job="overlap", trace=gradwire.Trace(trace, first_round=3)):
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(32, WIDTH)).square().mean().backward()
        optimizer.step()
