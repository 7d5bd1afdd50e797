"""Parameters without a gradient. torch leaves them as they are; shards, which know one rule for all elements of a round, see
a gradient of 0: where that is not the same, step() raises instead of training something else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._errors import FailedPrecondition
from ._job import JobSpec

POLICIES = ("refuse", "zeros")
_ZEROS = ("or pass unused='zeros', which counts a missing gradient as 0 as zero_grad(set_to_none=False) does (the mean of "
          "several workers is then that of DistributedDataParallel)")


class Presence:
    """Of the parameters of one optimizer. Knows the steps since it was made, and those that a state tells of."""

    def __init__(self, job: JobSpec, parameters: Sequence[torch.Tensor], frozen: Sequence[tuple[str, torch.Tensor]],
                 policy: str):
        if policy not in POLICIES:
            raise ValueError(f"unused={policy!r} must be one of {', '.join(map(repr, POLICIES))}")
        self._job = job
        self._parameters = parameters
        self._frozen = frozen
        self._policy = policy
        self._had = [False] * len(parameters)  # a gradient, in some step
        self._steps = 0

    def had(self) -> list[bool]:
        """Per parameter: whether it had a gradient so far. For a state, and `restore`."""
        return list(self._had)

    def restore(self, had: Sequence[bool]) -> None:
        """The shards go on from the steps before."""
        self._had = list(had)
        self._steps = 1

    def check(self) -> None:
        """Before anything of a step is sent. Raises FailedPrecondition where the step would not be torch's."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise FailedPrecondition(
                    f"parameter {name!r} was frozen when the optimizer was made, so the job does not have it, and it requires a "
                    "gradient now: make a new optimizer and a new job. To unfreeze parameters later, let them require gradients "
                    "until the optimizer is made, and pass unused='zeros'")
        if self._policy == "zeros":
            return
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                self._check_missing(index)
            elif not self._had[index] and self._steps > 0 and self._counts_steps():
                raise FailedPrecondition(
                    f"parameter {self._name(index)!r} has its first gradient in step {self._steps + 1} of this optimizer: torch "
                    f"counts its steps from there (bias correction), the shards count those of the job. Give it a gradient from "
                    f"the first step on, {_ZEROS}")

    def note(self) -> None:
        """A step was made."""
        self._steps += 1
        for index, parameter in enumerate(self._parameters):
            self._had[index] = self._had[index] or parameter.grad is not None

    def _check_missing(self, index: int) -> None:
        group = self._job.groups[self._job.tensors[index].group]
        name = self._name(index)
        if group.weight_decay != 0:
            raise FailedPrecondition(
                f"parameter {name!r} has no gradient in this step: torch would leave it as it is, the shards would let it decay "
                f"(weight_decay={group.weight_decay!r}). Put it into a group with weight_decay=0, freeze it "
                f"(requires_grad=False) before the optimizer is made, {_ZEROS}")
        if self._had[index] and self._remembers(index):
            raise FailedPrecondition(
                f"parameter {name!r} has no gradient in this step and had one before: torch would leave it as it is, on the shards "
                f"its momentum goes on. Give it a gradient in every step, {_ZEROS}")

    def _remembers(self, index: int) -> bool:
        """A gradient of 0 behind others changes the parameter or its moments."""
        if self._job.optimizer == "sgd":
            return self._job.groups[self._job.tensors[index].group].momentum != 0
        return self._job.push == "step" or self._job.optimizer not in ("step", "none")

    def _counts_steps(self) -> bool:
        return self._job.push == "step" or self._job.optimizer in ("adamw", "lamb", "lans")

    def _name(self, index: int) -> str:
        return self._job.tensors[index].name
