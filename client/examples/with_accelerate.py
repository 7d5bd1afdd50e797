"""Hugging Face Accelerate: what its DistributedDataParallel reduces travels compressed through shard servers.

torchrun --nproc-per-node=2 client/examples/with_accelerate.py grpc://127.0.0.1:7070
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from gradwire.torch import DDPState, ddp_hook

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
set_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
inputs = torch.randn(8192, 64)
labels = torch.nn.Linear(64, 10)(inputs).argmax(1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=32, shuffle=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)  # stays yours
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=256)
model, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)

with DDPState(model, servers=sys.argv[1:], job="accelerate-example") as state:
    model.register_comm_hook(state, ddp_hook)  # the line that changes
    for epoch in range(2):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        pushed = state.stats()["pushed_bytes"]
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, {pushed / 1e3:.0f} kB pushed")
accelerator.end_training()
