"""Shards in the workers' own processes: no server to start.

torchrun --nproc-per-node=2 client/examples/own.py
"""

import torch
import torch.distributed as dist
from gradwire.torch import ShardedOptimizer, own_shards

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
teacher = torch.nn.Linear(64, 10)  # the same everywhere
data = torch.Generator().manual_seed(dist.get_rank())  # of this worker's own

with own_shards() as servers, ShardedOptimizer(model, servers=servers, job="own-example", lr=1e-2, overlap=True,
                                               workers=dist.get_world_size()) as optimizer:
    for step in range(201):
        inputs = torch.randn(64, 64, generator=data)
        loss = torch.nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {optimizer.stats()['pushed_bytes'] / 1e3:.0f} kB pushed")
dist.destroy_process_group()
