"""What the callbacks of training frameworks have in common: a DDPState while training lasts, and a hook that stays."""

# Without `from __future__ import annotations`: DistributedDataParallel looks at those of the hook.
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from . import _lifetime
from ._errors import FailedPrecondition
from .torch import DDPState, ddp_hook


class Shards:
    """Where a callback's DistributedDataParallel sends its gradients. One thread at a time."""

    def __init__(self, servers: str | Sequence[str], job: str, options: dict[str, Any]):
        self.state: DDPState | None = None
        self._options = {"servers": servers, "job": job, **options}
        # A hook can be registered once, and a trainer trains twice. Weak: what has the hook keeps this, where no collector sees it.
        self._hooked: weakref.ref[Any] | None = None
        self._stats: dict[str, float] = {}

    def begin(self, model: Any, otherwise: str) -> None:
        """Joins the job. Raises TypeError, which says what to do `otherwise`, where `model` is no DistributedDataParallel."""
        self.end(drain=False)  # of a training that raised
        ddp = getattr(model, "_orig_mod", model)  # as torch.compile wraps it
        if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
            raise TypeError(otherwise)

        self.state = DDPState(ddp, **self._options)
        try:
            if self._hooked is None or self._hooked() is not ddp:
                ddp.register_comm_hook(self, _hook)
                self._hooked = weakref.ref(ddp)
            self.state._hooked = True
        except BaseException:
            self.end(drain=False)
            raise

    def end(self, drain: bool = True) -> None:
        """Leaves the job, if this is in one."""
        if self.state is not None:
            state, self._stats, self.state = self.state, self.state.stats(), None
            _lifetime.leave_behind(state.close, drain)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, as copy.deepcopy(model) makes one with its hooks: it is in no job."""
        return {**vars(self), "state": None, "_hooked": None, "_stats": {}}

    def stats(self) -> dict[str, float]:
        return self._stats if self.state is None else self.state.stats()


def _hook(shards: Shards, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if shards.state is None:
        raise FailedPrecondition("ThroughShards: training has ended, and this worker has left its job: train through the trainer again")
    return ddp_hook(shards.state, bucket)
