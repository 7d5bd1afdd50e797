"""Lightning: what its DistributedDataParallel reduces travels compressed through parameter-shard servers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

# Two packages have it, which do not take each other's callbacks: this is of the one that the program has imported, or that is there.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning.callbacks import Callback
else:
    try:
        from lightning.pytorch.callbacks import Callback
    except ModuleNotFoundError as error:
        if error.name != "lightning":
            raise
        from pytorch_lightning.callbacks import Callback

from ._callbacks import Shards
from .torch import DDPState

__all__ = ["ThroughShards"]


class ThroughShards(Callback):
    """Registers `gradwire.torch.ddp_hook` once Lightning has wrapped the module, and leaves the job when training ends.

        trainer = lightning.Trainer(..., strategy="ddp", callbacks=[ThroughShards(servers=[...], job="lm")])

    Optimizers, clipping, accumulation and precision stay Lightning's. Arguments are those of `gradwire.torch.DDPState`, which is
    `state` while training lasts. Where training raises, the others go on without this worker. Raises TypeError where the
    strategy's model is no DistributedDataParallel (one process; FSDP, for which see `gradwire.torch.FSDPState`).
    """

    def __init__(self, *, servers: str | Sequence[str], job: str, **options: Any):
        self._shards = Shards(servers, job, options)

    @property
    def state(self) -> DDPState | None:
        return self._shards.state

    def stats(self) -> dict[str, float]:
        """Session.stats() of the training that goes on, or of the last one."""
        return self._shards.stats()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        model = trainer.strategy.model
        self._shards.begin(model, f"ThroughShards: strategy {type(trainer.strategy).__name__} trains a {type(model).__name__}; it takes "
                                  'a DistributedDataParallel: Trainer(strategy="ddp", devices=...), in two processes or more')

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._shards.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._shards.end(drain=False)
