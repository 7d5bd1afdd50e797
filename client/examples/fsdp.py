"""A fully sharded model (FSDP2) whose gradients travel compressed through shard servers.

torchrun --nproc-per-node=2 client/examples/fsdp.py grpc://127.0.0.1:7070
"""

import sys

import torch
import torch.distributed as dist
from gradwire.torch import FSDPState
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # stays yours, and each rank's state its own
teacher = torch.nn.Linear(64, 10)  # the same everywhere
data = torch.Generator().manual_seed(dist.get_rank())  # of this worker's own

with FSDPState(model, servers=sys.argv[1:], job="fsdp-example") as state:
    for step in range(101):
        inputs = torch.randn(64, 64, generator=data)
        loss = torch.nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 == 0:
            stats = state.stats()
            print(f"step {step}: loss {loss.item():.3f}, {stats['pushed_bytes'] / 1e3:.0f} kB pushed, "
                  f"{stats['pulled_bytes'] / 1e3:.0f} kB pulled")
dist.destroy_process_group()
