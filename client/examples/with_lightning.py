"""Lightning: what its DistributedDataParallel reduces travels compressed through shard servers.

torchrun --nproc-per-node=2 client/examples/with_lightning.py grpc://127.0.0.1:7070
"""

import sys

import lightning
import torch
from gradwire.torch import DDPState, ddp_hook
from lightning.pytorch.strategies import DDPStrategy


class ThroughShards(lightning.Callback):
    """Registers the hook once Lightning has wrapped the module, and leaves the job when training ends."""

    def __init__(self, **where):
        self.where = where

    def on_train_start(self, trainer, module):
        self.state = DDPState(trainer.strategy.model, **self.where)
        trainer.strategy.model.register_comm_hook(self.state, ddp_hook)

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            loss, pushed = trainer.callback_metrics["loss"], self.state.stats()["pushed_bytes"]
            print(f"loss {loss:.3f}, {pushed / 1e3:.0f} kB pushed")
        self.state.close()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)  # stays yours


lightning.seed_everything(0)
inputs = torch.randn(8192, 64)
data = torch.utils.data.TensorDataset(inputs, torch.nn.Linear(64, 10)(inputs).argmax(1))
trainer = lightning.Trainer(max_epochs=2, accelerator="auto", devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
                            gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                            callbacks=ThroughShards(servers=sys.argv[1:], job="lightning-example"))
trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=32, shuffle=True))
