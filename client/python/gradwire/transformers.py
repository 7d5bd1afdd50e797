"""The Hugging Face Trainer: what its DistributedDataParallel reduces travels compressed through parameter-shard servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from .torch import DDPState, ddp_hook

__all__ = ["ThroughShards"]


class ThroughShards(TrainerCallback):
    """Registers `gradwire.torch.ddp_hook` once the Trainer has wrapped the model, and leaves the job when training ends.

        trainer.add_callback(ThroughShards(trainer, servers=[...], job="lm"))

    The optimizer, clipping, accumulation and precision stay the Trainer's. Arguments are those of `gradwire.torch.DDPState`,
    which is `state` while training lasts. Raises TypeError where the Trainer's model is no DistributedDataParallel (one process;
    FSDP, for which see `gradwire.torch.FSDPState`).
    """

    def __init__(self, trainer: Any, *, servers: str | Sequence[str], job: str, **options: Any):
        self.state: DDPState | None = None
        self._trainer = trainer
        self._options = {"servers": servers, "job": job, **options}
        self._stats: dict[str, float] = {}

    def stats(self) -> dict[str, float]:
        """Session.stats() of the training that goes on, or of the last one."""
        return self._stats if self.state is None else self.state.stats()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self._trainer.model_wrapped
        if not hasattr(model, "register_comm_hook"):
            raise TypeError(f"ThroughShards: the Trainer trains a {type(model).__name__}; it takes a DistributedDataParallel: start "
                            "with torchrun and two processes or more")
        self.state = DDPState(model, **self._options)
        model.register_comm_hook(self.state, ddp_hook)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.state is not None:
            mine, self._stats, self.state = self.state, self.state.stats(), None
            mine.close()
