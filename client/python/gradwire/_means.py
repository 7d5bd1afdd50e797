"""Gradients of one process in, means over all of them out: what DistributedDataParallel's and FSDP's hooks share."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ._job import JobSpec, Rule, TensorSpec, default_rules, default_update_codec, residual_decay_of
from ._place import Staging, check_place, host_copy, place_of, threads_for
from ._session import Session, join

logger = logging.getLogger("gradwire")

_BAD = "gradwire.nonfinite"  # the tensor beside the model's that says whether a gradient cannot be summed


def grid_limit(workers: int) -> float:
    """From this magnitude on a worker's gradient does not fit into the sums of so many: GridLimitBits in kernels/math/grid.h, the
    smallest gradient_limit_bits() of all codecs. The session would count such an element as 0."""
    share = 2.0**19 / workers
    limit = np.float32(share)
    return min(2.0**18, float(limit if float(limit) <= share else np.nextafter(limit, np.float32(0))))


class MeanExchange:
    """A session whose shards keep no parameters. Of `tensors`, `means` has where each mean goes; None: it is not wanted.

    nonfinite: "spread" says with each step whether a gradient of any worker was not finite, or too large for sums; "refuse"
    raises InvalidArgument on the worker whose gradient it was. Means that lie on a GPU where the session is in host memory (`place`) are
    copied there.
    """

    def __init__(self, tensors: Sequence[TensorSpec], means: Sequence[torch.Tensor | None], *, servers: str | Sequence[str],
                 job: str, codec: str, rules: Sequence[Rule] | None, workers: int, worker: str | None, bucket_bytes: int,
                 lease_ms: int, nonfinite: str, seed: int, push: str = "gradient", step_beta2: float | None = None,
                 residual_decay: float | None = None, update_codec: str | None = None, place: str = "auto", encode_threads: int | None = None, **joining: Any):
        check_place(place)
        tensors, means = list(tensors), list(means)
        rules = default_rules(codec) if rules is None else list(rules)
        self._limit = grid_limit(workers)
        self._remedy = ("what is divided by its own second moment has no scale: scale the loss down" if push == "step" else
                        "a GradScaler skips such steps and lowers its scale; without one, look at the loss and the learning rate")
        self._told = False
        spreads = nonfinite == "spread"
        if spreads:
            tensors.append(TensorSpec(_BAD, (1,)))
            rules = [Rule("dense:fp32", _BAD), *rules]
        self._last = len(tensors) - 1
        back = default_update_codec(codec, push, workers) if update_codec is None else update_codec
        spec = JobSpec(name=job, tensors=tensors, optimizer="none", codec=codec, update_codec=back, rules=rules, workers=workers,
                       max_workers=workers, bucket_bytes=bucket_bytes, lease_ms=lease_ms, seed=seed, push=push,
                       step_beta2=0.99 if step_beta2 is None else step_beta2,
                       residual_decay=residual_decay_of(push, residual_decay),
                       nonfinite="refuse" if nonfinite == "refuse" else "sanitize")
        given = [m for m in means if m is not None]
        at = place_of(spec, "mean", given, place)
        self._staging = None if at.type == "cuda" else Staging()
        self._landed = []  # means on a GPU, and where the session writes them
        for i, mean in enumerate(means):
            if mean is not None and mean.device != at:
                means[i] = host_copy(mean)
                self._landed.append((mean, means[i]))
        self._spoilt = False  # a gradient of this step cannot be summed, here
        self._bad: torch.Tensor | None = None  # 1 where a gradient of this step cannot be summed; its mean tells all
        if spreads:
            self._bad = torch.zeros(1, dtype=torch.float32, device=at)
            self._any_bad = torch.zeros(1, dtype=torch.float32, device=at)
            means.append(self._any_bad)
        # Not into a job that goes on: whoever came first would be in a round that the others are not in, and wait for them.
        self.session: Session = join(servers, spec, means, worker, pull="mean", exist="new",
                                     encode_threads=threads_for(encode_threads, given, at), **joining)

    @staticmethod
    def check(nonfinite: str, push: str, step_beta2: float | None = None, residual_decay: float | None = None) -> None:
        """What every process refuses, also those that others speak for."""
        if nonfinite not in ("spread", "refuse"):
            raise ValueError(f"nonfinite={nonfinite!r} must be 'spread' or 'refuse'")
        if push not in ("gradient", "step"):
            raise ValueError(f"push={push!r} must be 'gradient' or 'step'")
        for name, value in (("step_beta2", step_beta2), ("residual_decay", residual_decay)):
            if value is not None and push == "gradient":
                raise ValueError(f"{name}={value!r} is for push='step'")
        if step_beta2 is not None and not 0 < step_beta2 < 1:
            raise ValueError(f"step_beta2={step_beta2!r} must be above 0, and below 1")
        if residual_decay is not None and not 0 < residual_decay <= 1:
            raise ValueError(f"residual_decay={residual_decay!r} must be above 0, and at most 1")

    def begin(self) -> None:
        self._spoilt = False
        self.session.begin_round(0.0)

    def look(self, gradients: torch.Tensor) -> None:
        """Notes whether they can be summed; from the first that cannot on they become 0, for this step is nobody's, and must not
        wait in a residual for the next one. Before they are sent."""
        if self._bad is None:
            return
        if not self._spoilt:
            if (gradients.abs() < self._limit).all():  # false for NaN
                return
            self._spoilt = True
            self._bad.fill_(1)
            self._tell(gradients)
        gradients.zero_()

    def _tell(self, gradients: torch.Tensor) -> None:
        """Once, where it is their size alone that sums cannot hold."""
        if self._told or not torch.isfinite(gradients).all():
            return
        self._told = True
        logger.warning("job %r: a gradient of worker %s has a magnitude of %g, and sums hold those below %.9g: all gradients of "
                       "this step are NaN on every worker, and those of later steps like it; %s", self.session.job.name,
                       self.session.worker, gradients.abs().max().item(), self._limit, self._remedy)

    def send(self, index: int, gradient: torch.Tensor) -> None:
        self.session.tensor_ready(index, gradient if self._staging is None else self._staging.bring(index, gradient))

    def end(self) -> bool:
        """Waits for the means. Whether a gradient of any worker could not be summed."""
        if self._bad is not None:
            self.session.tensor_ready(self._last, self._bad)
        self.session.end_round()
        for mean, landed in self._landed:
            mean.copy_(landed)
        if self._bad is None:
            return False
        self._bad.zero_()
        return bool(self._any_bad > 0)
