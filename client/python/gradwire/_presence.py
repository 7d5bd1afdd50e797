"""Parameters without a gradient. torch leaves them as they are; shards, which know one rule for all elements of a round, see
a gradient of 0: where the two differ, step() raises instead of training something else."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

import torch

from ._errors import DataLoss, FailedPrecondition
from ._job import JobSpec

logger = logging.getLogger("gradwire")

_HAD, _STEPS = "had_gradients", "steps"  # notes of checkpoints: 0 or 1 for each parameter; a number
POLICIES = ("refuse", "zeros")
_ZEROS = ("or pass unused='zeros', which counts a missing gradient as 0 as zero_grad(set_to_none=False) does (the mean of "
          "several workers is then that of DistributedDataParallel)")


Before = tuple[list[bool], int]  # which parameters had a gradient (empty: not known), and in how many steps


def read_notes(notes: Mapping[str, str], tensors: int, checkpoint: str) -> Before:
    """What a checkpoint of a job with this many tensors says, for Presence.restore. Raises DataLoss where that cannot be
    what an optimizer wrote."""
    if _HAD not in notes:
        return [], 1
    had = notes[_HAD]
    steps = notes.get(_STEPS, str(int("1" in had)))  # older checkpoints do not count their steps
    if len(had) != tensors or had.strip("01") or not re.fullmatch("[0-9]{1,18}", steps):
        raise DataLoss(
            f"checkpoint {checkpoint!r} was changed: its notes, {_HAD} {had[:64]!r} of {len(had)} characters and {_STEPS} "
            f"{steps[:64]!r}, are not a 0 or 1 for each of its {tensors} parameters and a number. Resume from another one that "
            "an optimizer saved, or leave resume_from out to start from what the shards hold")
    return [digit == "1" for digit in had], int(steps)


class Presence:
    """Which parameters of one optimizer had gradients, in the steps since it was made and in those that a checkpoint tells of."""

    def __init__(self, job: JobSpec, parameters: Sequence[torch.Tensor], frozen: Sequence[tuple[str, torch.Tensor]],
                 policy: str):
        if policy not in POLICIES:
            raise ValueError(f"unused={policy!r} must be one of {', '.join(map(repr, POLICIES))}")
        self._job = job
        self._parameters = parameters
        self._frozen = frozen
        self._policy = policy
        self._had = [False] * len(parameters)  # whether each had a gradient in some step
        self._steps = 0

    def notes(self) -> dict[str, str]:
        """For a checkpoint, and `read_notes`."""
        return {_HAD: "".join("01"[had] for had in self._had), _STEPS: str(self._steps)}

    def restore(self, before: Before, checkpoint: str) -> None:
        """Takes over what a checkpoint tells of the steps before it, from which the shards go on."""
        had, self._steps = before
        if len(had) == len(self._had):
            self._had = had
            return
        self._had = [True] * len(self._had)
        if self._policy == "refuse":
            logger.warning("checkpoint %r does not say which parameters had gradients, as those of ShardedOptimizer.save() and "
                           "state_dict(checkpoint=True) do: all are taken to have had one. Where some had none, pass unused='zeros'", checkpoint)

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
        """Whether a gradient of 0 after others changes the parameter or its moments."""
        if self._job.optimizer == "sgd":
            return self._job.groups[self._job.tensors[index].group].momentum != 0
        return self._job.push == "step" or self._job.optimizer not in ("step", "none")

    def _counts_steps(self) -> bool:
        return self._job.push == "step" or self._job.optimizer in ("adamw", "lamb", "lans")

    def _name(self, index: int) -> str:
        return self._job.tensors[index].name
