"""Where the tensors of a session lie: beside the caller's, or in host memory, where a GPU has no kernels for the job."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch

from . import _core
from ._job import JobSpec

logger = logging.getLogger("gradwire")
HOST = torch.device("cpu")


def check_place(place: str) -> None:
    if place not in ("auto", "host"):
        raise ValueError(f"place={place!r} must be 'auto' or 'host'")


def place_of(job: JobSpec, pull: str, tensors: Sequence[torch.Tensor], place: str = "auto") -> torch.device:
    """The device of the session for these tensors. Of several GPUs it is none."""
    devices = {t.device for t in tensors}
    if place == "host" or devices == {HOST}:
        return HOST
    if len(devices) > 1:
        why = f"job {job.name!r}: the parameters lie on {' and '.join(sorted(map(str, devices)))}"
    elif not (why := _core.why_not_on_gpu(job.to_json(), pull)):
        return devices.pop()
    logger.info("gradients come to host memory and are encoded there: %s", why)
    return HOST


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous float32 in host memory, which a GPU copies from and to without a stop on the way."""
    copy = torch.empty(tensor.shape, dtype=torch.float32, device=HOST, pin_memory=tensor.is_cuda)  # whatever torch's default is
    return copy.copy_(tensor)


class Staging:
    """Gradients on their way to a session in host memory: a copy of each, until the round ends."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}

    def bring(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient`, or where it lies on a GPU a copy of it, which is there on return."""
        if not gradient.is_cuda:
            return gradient
        copy = self._copies.get(index)
        if copy is None or copy.shape != gradient.shape:
            copy = self._copies[index] = host_copy(gradient)
            return copy
        return copy.copy_(gradient)


def threads_for(chosen: int | None, tensors: Sequence[torch.Tensor], at: torch.device) -> int:
    """What was chosen, else one: beside a backward on the CPU more are in its way. Where a GPU does that, half of the cores that
    each process of this host has, up to eight."""
    if chosen is not None:
        return chosen
    if at != HOST or not any(t.is_cuda for t in tensors):
        return 1
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))  # of torchrun
    return max(1, min(8, len(os.sched_getaffinity(0)) // (2 * processes)))
