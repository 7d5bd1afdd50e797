"""Workers that take 16 steps by themselves between two rounds, which travel while the next steps are made.

python client/examples/local.py 0 grpc://127.0.0.1:7070 & python client/examples/local.py 1 grpc://127.0.0.1:7070
"""

import sys

import torch
from gradwire.torch import LocalSGD

worker, servers = int(sys.argv[1]), sys.argv[2:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
teacher = torch.nn.Linear(64, 10)  # the same everywhere
data = torch.Generator().manual_seed(worker)  # of this worker's own
local = torch.optim.AdamW(model.parameters(), lr=1e-3)

with LocalSGD(local, model, every=16, servers=servers, job="local-example", workers=2, worker=f"worker-{worker}",
              overlap=True) as optimizer:
    for step in range(401):
        inputs = torch.randn(64, 64, generator=data)
        loss = torch.nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if worker == 0 and step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {optimizer.stats()['pushed_bytes'] / 1e3:.0f} kB pushed")
