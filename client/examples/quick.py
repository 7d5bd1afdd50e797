"""Trains a small model through shard servers: python quick.py grpc://localhost:7070 [more servers]"""
import os
import sys

import torch

import gradwire.torch

rank, workers = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun has them
torch.manual_seed(0)  # the same model on every worker
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
inputs = torch.randn(512, 64)[rank::workers]  # of the data, each worker has its part
targets = inputs[:, :1] * inputs[:, 1:2]
with gradwire.torch.ShardedOptimizer(model, servers=sys.argv[1:], job=f"quick-{workers}", workers=workers,
                                     codec="tagc:density=0.05", lr=3e-3, overlap=True) as optimizer:
    for step in range(optimizer.start_step, 100):  # a worker that is started again comes in where the job is
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()   # gradients leave while backward still runs
        optimizer.step()  # applies the update that the shards merged
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    print(f"loss {loss.item():.4f}, pushed {optimizer.stats()['pushed_bytes']:.0f} bytes")
