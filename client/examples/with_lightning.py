"""Lightning: what its DistributedDataParallel reduces travels compressed through shard servers.

torchrun --nproc-per-node=2 client/examples/with_lightning.py grpc://127.0.0.1:7070
"""

import sys

import lightning
import torch
from gradwire.lightning import ThroughShards
from lightning.pytorch.strategies import DDPStrategy


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
shards = ThroughShards(servers=sys.argv[1:], job="lightning-example")
trainer = lightning.Trainer(max_epochs=2, accelerator="auto", devices=2, strategy=DDPStrategy(process_group_backend="gloo"),
                            gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                            callbacks=[shards])  # the line that changes
trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=32, shuffle=True))
if trainer.is_global_zero:
    print(f"loss {trainer.callback_metrics['loss']:.3f}, {shards.stats()['pushed_bytes'] / 1e3:.0f} kB pushed")
