"""Lightning: what its DistributedDataParallel reduces travels compressed through parameter-shard servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:  # the package of Lightning's trainer alone
    from pytorch_lightning.callbacks import Callback

from .torch import DDPState, ddp_hook

__all__ = ["ThroughShards"]


class ThroughShards(Callback):
    """Registers `gradwire.torch.ddp_hook` once Lightning has wrapped the module, and leaves the job when training ends.

        trainer = lightning.Trainer(..., strategy="ddp", callbacks=ThroughShards(servers=[...], job="lm"))

    Optimizers, clipping, accumulation and precision stay Lightning's. Arguments are those of `gradwire.torch.DDPState`, which is
    `state` while training lasts. Where training raises, the others go on without this worker. Raises TypeError where the
    strategy's model is no DistributedDataParallel (one process; FSDP, for which see `gradwire.torch.FSDPState`).
    """

    def __init__(self, *, servers: str | Sequence[str], job: str, **options: Any):
        self.state: DDPState | None = None
        self._options = {"servers": servers, "job": job, **options}
        self._stats: dict[str, float] = {}

    def stats(self) -> dict[str, float]:
        """Session.stats() of the training that goes on, or of the last one."""
        return self._stats if self.state is None else self.state.stats()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        model = trainer.strategy.model
        if not hasattr(model, "register_comm_hook"):
            raise TypeError(f"ThroughShards: strategy {type(trainer.strategy).__name__} trains a {type(model).__name__}; it takes a "
                            'DistributedDataParallel: Trainer(strategy="ddp", devices=...) under torchrun or Lightning\'s launcher')
        self.state = DDPState(model, **self._options)
        model.register_comm_hook(self.state, ddp_hook)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._leave(drain=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(drain=False)

    def _leave(self, drain: bool) -> None:
        if self.state is not None:
            state, self._stats, self.state = self.state, self.state.stats(), None
            state.close(drain)
