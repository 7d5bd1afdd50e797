"""A small classifier in somebody's loop: loop_worker.py OUT LOOP MODE [SERVER...]

MODE: "plain", AdamW over DistributedDataParallel; "steps", SGD of the steps of which TAGC sends 1 %. OUT.<rank> gets the losses
of all batches in turn and what the session counted.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from gradwire.torch import DDPState, ddp_hook

STEPS, BATCH, INPUTS, CLASSES = 300, 32, 64, 10
STEPS_OF_TAGC = {"codec": "tagc:density=0.01", "push": "step"}

out, loop, mode, *servers = sys.argv[1:]
plain = mode == "plain"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
losses: list[float] = []


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(INPUTS, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(),
                                          torch.nn.LayerNorm(128), torch.nn.Linear(128, CLASSES))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), labels)
        losses.append(loss.item())
        return {"loss": loss}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3) if plain else torch.optim.SGD(parameters, lr=4e-3)


def with_accelerate() -> dict[str, float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net()
    model, optimizer, batches = accelerator.prepare(net, optimizer_of(net.parameters()), torch.utils.data.DataLoader(data, BATCH))
    state = None if plain else DDPState(model, servers=servers, job=loop, **STEPS_OF_TAGC)
    if state is not None:
        model.register_comm_hook(state, ddp_hook)
    for inputs, labels in batches:
        accelerator.backward(model(inputs, labels)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    counted = {} if state is None else state.stats()
    if state is not None:
        state.close()
    accelerator.end_training()
    return counted


def with_trainer() -> dict[str, float]:
    from gradwire.transformers import ThroughShards
    from transformers import Trainer, TrainingArguments

    net = Net()
    optimizer = optimizer_of(net.parameters())
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    # A step has no scale, so none is clipped.
    arguments = TrainingArguments(f"{out}.trainer", per_device_train_batch_size=BATCH, max_steps=STEPS, max_grad_norm=0.0,
                                  report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True)
    trainer = Trainer(net, arguments, train_dataset=[{"inputs": inputs, "labels": label} for inputs, label in data], optimizers=(optimizer, constant))
    shards = ThroughShards(trainer, servers=servers, job=loop, **STEPS_OF_TAGC)
    if not plain:
        trainer.add_callback(shards)
    trainer.train()
    return shards.stats()


def with_lightning() -> dict[str, float]:
    import lightning
    from gradwire.lightning import ThroughShards
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.net(*batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.parameters())

    shards = ThroughShards(servers=servers, job=loop, **STEPS_OF_TAGC)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=size, strategy=DDPStrategy(process_group_backend="gloo"),
                                logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                callbacks=[] if plain else [shards])
    trainer.fit(Module(), torch.utils.data.DataLoader(data, BATCH))
    return shards.stats()


torch.manual_seed(1)
teacher = torch.nn.Linear(INPUTS, CLASSES)
samples = torch.randn(STEPS * BATCH * size, INPUTS)
data = torch.utils.data.TensorDataset(samples, teacher(samples).argmax(1))
counted = {"accelerate": with_accelerate, "trainer": with_trainer, "lightning": with_lightning}[loop]()
elements = sum(p.numel() for p in Net().parameters())
torch.save({"losses": losses, "counted": counted, "elements": elements}, f"{out}.{rank}")
