"""A loop that torchrun starts again: restart_worker.py OUT LOOP STEPS DIE [SERVER...]

LOOP: sharded (ShardedOptimizer), local (LocalSGD, 4 steps a round), own (ShardedOptimizer over shards in the workers' processes, which keep
what they have beside OUT). DIE: the step behind which rank 1 is killed when it runs for the first time; or, as "20+0.03", so many seconds
later, whatever it then does. Batches are those of a step and a rank, so that a run that was disturbed can be told from one that was not by its
bits. OUT.<rank> gets the first step of the last start, the losses from there on, and the parameters.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from gradwire.torch import LocalSGD, ShardedOptimizer, own_shards

INPUTS, CLASSES = 32, 8

out, loop, count, die, *servers = sys.argv[1:]
rank, size, restarts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
die_behind, _, later = die.partition("+")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(INPUTS, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))
teacher = torch.nn.Linear(INPUTS, CLASSES)
dist.init_process_group("gloo", init_method=f"file://{out}.store-{restarts}", rank=rank, world_size=size)
losses = []
with contextlib.ExitStack() as stack:
    shards: dict[str, Any] = {"servers": servers, "job": "restart", "workers": size, "codec": "dense:fp32"}
    if loop == "own":
        shards |= {"servers": stack.enter_context(own_shards(data_dir=f"{out}.shard-{rank}")), "durability": "interval"}
    optimizer: ShardedOptimizer | LocalSGD
    if loop == "local":
        optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.2), model, every=4, **shards)
    else:
        optimizer = ShardedOptimizer(model, push="gradient", lr=1e-2, overlap=True, **shards)
    stack.enter_context(optimizer)
    begin = optimizer.start_step
    for step in range(begin, int(count)):
        data = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(64, INPUTS, generator=data)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if rank == 1 and not restarts and step == int(die_behind):
            if later:
                threading.Timer(float(later), os._exit, [9]).start()
            else:
                os._exit(9)
torch.save({"begin": begin, "losses": losses, "parameters": [p.detach() for p in model.parameters()]}, f"{out}.{rank}")
dist.barrier()
dist.destroy_process_group()
