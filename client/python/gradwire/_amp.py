"""torch.amp.GradScaler: what it hands to an optimizer that unscales by itself, and what it is told after the step.

GradScaler.step() sets `grad_scale` (None once unscale_() was called) and `found_inf`, of this worker's gradients. Whether a
step is skipped is agreed on by all workers, so the scaler's own record of infinities is set to what they agreed before its
update() reads it: all scales change alike.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ._errors import FailedPrecondition
from ._job import JobSpec


class Scaling:
    """What a GradScaler says of one step."""

    def __init__(self, grad_scale: Any, found_inf: Any, scaler: torch.amp.GradScaler | None):
        self.grad_scale = 1.0 if grad_scale is None else float(grad_scale)
        self.found_inf = float(found_inf) > 0
        self._scaler = scaler

    def check(self, job: JobSpec, overlap: bool) -> None:
        """Before anything is sent: whether all workers can agree."""
        if overlap:
            raise FailedPrecondition("with overlap=True gradients were sent during backward, still scaled: make the optimizer "
                                     "without it to use a GradScaler")
        if alone(job):
            return
        if job.nonfinite != "skip":
            raise FailedPrecondition("a GradScaler with several workers needs nonfinite='skip': pass it to ShardedOptimizer, on "
                                     "every worker, so that where the gradient of one overflows all of them skip that step")
        if self._scaler is None:
            raise FailedPrecondition("found_inf was not set by the step() of a torch.amp.GradScaler, which could be told when "
                                     "another worker's gradient overflows: use that, or loss_scale and skipped of the optimizer")

    def tell(self, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
        """The scaler's update() lowers the scale where the step was skipped, whosever gradient overflowed."""
        if self._scaler is None:
            return
        for found in self._scaler._found_inf_per_device(optimizer).values():
            found.fill_(1.0 if skipped else 0.0)


def alone(job: JobSpec) -> bool:
    """Whether no other worker can be in the job, so that nothing needs to be agreed on."""
    return (job.max_workers or job.workers) == 1


class HandedOver:
    """An attribute of an optimizer that GradScaler.step() sets, and deletes when it is done; read once, by take()."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> Any:
        if optimizer is None:
            return self
        value = optimizer.__dict__.get(self._name)
        if value is None:
            raise AttributeError(f"{self._name} is there while a GradScaler calls step()")
        return value

    def __set__(self, optimizer: Any, value: Any) -> None:
        optimizer.__dict__[self._name] = value
        scaler = sys._getframe(1).f_locals.get("self")
        optimizer.__dict__["_scaler"] = scaler if isinstance(scaler, torch.amp.GradScaler) else None

    def __delete__(self, optimizer: Any) -> None:
        optimizer.__dict__.pop(self._name, None)


def take(optimizer: Any) -> Scaling | None:
    """What a GradScaler handed over for this step; None where none called step(). Taking removes it: a scaler multiplies by
    what it finds, also by what a failed step() has left."""
    grad_scale, found_inf, scaler = (optimizer.__dict__.pop(name, None) for name in ("grad_scale", "found_inf", "_scaler"))
    return None if found_inf is None else Scaling(grad_scale, found_inf, scaler)
