"""Trains a small model through shard servers: python quick.py grpc://localhost:7070 [more servers]"""
import sys

import torch

import gradwire.torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
inputs = torch.randn(512, 64)
targets = inputs[:, :1] * inputs[:, 1:2]
with gradwire.torch.ShardedOptimizer(model, servers=sys.argv[1:], job="quick", codec="tagc:density=0.05",
                                     lr=3e-3, overlap=True) as optimizer:
    for step in range(100):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()   # gradients leave while backward still runs
        optimizer.step()  # applies the update that the shards merged
    print(f"loss {loss.item():.4f}, pushed {optimizer.stats()['pushed_bytes'] / 100:.0f} bytes per step")
