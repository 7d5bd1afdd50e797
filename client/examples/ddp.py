"""DistributedDataParallel whose gradients travel compressed through shard servers.

PYTHONPATH=build/release/python .venv/bin/torchrun --nproc-per-node=2 client/examples/ddp.py grpc://127.0.0.1:7070
"""

import sys

import torch
import torch.distributed as dist
from gradwire.torch import DDPState, ddp_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # stays yours
teacher = torch.nn.Linear(64, 10)  # the same everywhere
data = torch.Generator().manual_seed(rank)  # of this worker's own

with DDPState(model, servers=sys.argv[1:], job="ddp-example") as state:
    model.register_comm_hook(state, ddp_hook)
    for step in range(101):
        inputs = torch.randn(64, 64, generator=data)
        loss = torch.nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {state.stats()['pushed_bytes'] / 1e3:.0f} kB pushed")
dist.destroy_process_group()
