"""The Hugging Face Trainer: what its DistributedDataParallel reduces travels compressed through parameter-shard servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from ._callbacks import Shards
from .torch import DDPState

__all__ = ["ThroughShards"]


class ThroughShards(TrainerCallback):
    """Registers `gradwire.torch.ddp_hook` once the Trainer has wrapped the model, and leaves the job when training ends.

        trainer.add_callback(ThroughShards(trainer, servers=[...], job="lm"))

    The optimizer, clipping, accumulation and precision stay the Trainer's. Arguments are those of `gradwire.torch.DDPState`,
    which is `state` while training lasts. The Trainer does not tell its callbacks where training raises: a process that goes on
    then calls close(), or the others wait for it. Raises TypeError where the Trainer's model is no DistributedDataParallel (one
    process; FSDP, for which see `gradwire.torch.FSDPState`).
    """

    def __init__(self, trainer: Any, *, servers: str | Sequence[str], job: str, **options: Any):
        self._trainer, self._shards = trainer, Shards(servers, job, options)

    @property
    def state(self) -> DDPState | None:
        return self._shards.state

    def stats(self) -> dict[str, float]:
        """Session.stats() of the training that goes on, or of the last one."""
        return self._shards.stats()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self._trainer.model_wrapped
        self._shards.begin(model, f"ThroughShards: the Trainer trains a {type(model).__name__}; it takes a DistributedDataParallel: start "
                                  "with torchrun and two processes or more")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._shards.end()

    def close(self) -> None:
        """Leaves the job, if this is in one."""
        self._shards.end(drain=False)
