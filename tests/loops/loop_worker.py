"""A small classifier in somebody's loop: loop_worker.py OUT LOOP MODE PRECISION STEPS [SERVER...]

LOOP: ddp, fsdp, sharded (ShardedOptimizer), local (LocalSGD, 4 steps a round), accelerate, accelerate-sharded (a ShardedOptimizer in
it), trainer, lightning. MODE: "plain", AdamW over
DistributedDataParallel or FSDP; "dense", the same through shards by dense:fp32; "tagc", steps of which TAGC sends 1 %; "default", of local: its own. OUT.<rank>
gets the losses of all batches in turn, the parameters and what the session counted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from gradwire.torch import DDPState, FSDPState, LocalSGD, ShardedOptimizer, ddp_hook

BATCH, INPUTS, CLASSES = 32, 64, 10
TAGC = "tagc:density=0.01"
RATE = 4e-3  # AdamW's best of 1e-3, 2e-3, 4e-3 and 8e-3 over 300 steps, by which TAGC is judged; its own was not searched

out, loop, mode, precision, count, *servers = sys.argv[1:]
steps, plain, bf16 = int(count), mode == "plain", precision == "bf16"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
shards: dict[str, Any] = {"servers": servers, "job": f"{loop}-{mode}"} | ({"codec": TAGC, "push": "step"} if mode == "tagc" else {"codec": "dense:fp32"})
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
    return (torch.optim.SGD if mode == "tagc" else torch.optim.AdamW)(parameters, lr=RATE)


def batches() -> Iterator[Any]:
    sampler = torch.utils.data.DistributedSampler(data, size, rank, shuffle=False)
    return iter(torch.utils.data.DataLoader(data, BATCH, sampler=sampler))


def train(model: torch.nn.Module, optimizer: Any) -> None:
    for inputs, labels in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(inputs, labels)["loss"]
        loss.backward()
        optimizer.step()


def with_ddp(net: Net) -> dict[str, float]:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(net)
    with contextlib.nullcontext() if plain else DDPState(model, **shards) as state:
        if state is not None:
            model.register_comm_hook(state, ddp_hook)
        train(model, optimizer_of(model.parameters()))
        return {} if state is None else state.stats()


def with_fsdp(net: Net) -> dict[str, float]:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (size,))
    for unit in (net.layers[0], net.layers[2], net):
        fully_shard(unit, mesh=mesh)
    with contextlib.nullcontext() if plain else FSDPState(net, **shards) as state:
        train(net, optimizer_of(net.parameters()))
        return {} if state is None else state.stats()


def sharded(net: Net) -> ShardedOptimizer:
    return ShardedOptimizer(net, workers=size, overlap=True, lr=RATE, weight_decay=0.01, **{"push": "gradient"} | shards)


def with_sharded(net: Net) -> dict[str, float]:
    if plain:
        return with_ddp(net)
    with sharded(net) as optimizer:
        train(net, optimizer)
        return optimizer.stats()


def with_local(net: Net) -> dict[str, float]:
    if plain:
        return with_ddp(net)
    how = {key: shards[key] for key in ("servers", "job")} | {"default": {}, "dense": {"codec": shards["codec"], "lr": 1.0, "momentum": 0.0},
                                                              "tagc": {"codec": TAGC, "residual_decay": 1.0}}[mode]
    with LocalSGD(torch.optim.AdamW(net.parameters(), lr=RATE), net, every=4, workers=size, **how) as optimizer:
        train(net, optimizer)
        return optimizer.stats()


def with_accelerate(net: Net) -> dict[str, float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if bf16 else "no")
    model, optimizer, loader = accelerator.prepare(net, optimizer_of(net.parameters()), torch.utils.data.DataLoader(data, BATCH))
    with contextlib.nullcontext() if plain else DDPState(model, **shards) as state:
        if state is not None:
            model.register_comm_hook(state, ddp_hook)
        for inputs, labels in loader:
            accelerator.backward(model(inputs, labels)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        counted = {} if state is None else state.stats()
    accelerator.wait_for_everyone()  # gloo may hang where another process has torn its group down
    accelerator.end_training()
    return counted


def with_sharded_accelerate(net: Net) -> dict[str, float]:
    """The model is not prepared: DistributedDataParallel around it would sum what the shards sum."""
    if plain:
        return with_accelerate(net)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    with sharded(net) as made:
        optimizer, loader = accelerator.prepare(made, torch.utils.data.DataLoader(data, BATCH))
        for inputs, labels in loader:
            accelerator.backward(net(inputs, labels)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        counted = made.stats()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return counted


def with_trainer(net: Net) -> dict[str, float]:
    from gradwire.transformers import ThroughShards
    from transformers import Trainer, TrainingArguments

    optimizer = optimizer_of(net.parameters())
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    # A step has no scale, so none is clipped.
    arguments = TrainingArguments(f"{out}.trainer", per_device_train_batch_size=BATCH, max_steps=steps, max_grad_norm=0.0, bf16=bf16,
                                  report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True)
    samples = [{"inputs": inputs, "labels": label} for inputs, label in data]
    trainer = Trainer(net, arguments, train_dataset=samples, optimizers=(optimizer, constant))
    callback = ThroughShards(trainer, **shards)
    if not plain:
        trainer.add_callback(callback)
    trainer.train()
    return callback.stats()


def with_lightning(net: Net) -> dict[str, float]:
    import lightning
    from gradwire.lightning import ThroughShards
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.net(*batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.parameters())

    callback = ThroughShards(**shards)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=size, strategy=DDPStrategy(process_group_backend="gloo"),
                                precision="bf16-mixed" if bf16 else "32-true", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, callbacks=[] if plain else [callback])
    trainer.fit(Module(), torch.utils.data.DataLoader(data, BATCH))
    return callback.stats()


torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
teacher = torch.nn.Linear(INPUTS, CLASSES)
samples = torch.randn(steps * BATCH * size, INPUTS)
data = torch.utils.data.TensorDataset(samples, teacher(samples).argmax(1))
trained = Net()
counted = {"ddp": with_ddp, "fsdp": with_fsdp, "sharded": with_sharded, "local": with_local, "accelerate": with_accelerate,
           "accelerate-sharded": with_sharded_accelerate, "trainer": with_trainer, "lightning": with_lightning}[loop](trained)
parameters = {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for name, p in trained.named_parameters()}
torch.save({"losses": losses, "counted": counted, "parameters": parameters}, f"{out}.{rank}")
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
