"""Sessions: a worker's membership in a job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import _core
from ._job import JobSpec


def as_array(value: Any, what: str) -> np.ndarray:
    """A NumPy view of an array or a CPU tensor, sharing its memory."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        if value.device.type != "cpu":
            raise TypeError(f"{what} lies on {value.device}; Gradwire takes CPU tensors: move it with .cpu()")
        if not value.is_contiguous():
            raise ValueError(f"{what} must be contiguous")
        return value.detach().numpy()
    raise TypeError(f"{what} must be a NumPy array or a CPU torch tensor, not {type(value).__name__}")


def default_worker_name() -> str:
    """Host and process: unique unless one process joins a job twice."""
    return f"{socket.gethostname()}-{os.getpid()}"[-128:]


class Session:
    """Made by `join`. Use it from one thread at a time; `tensor_ready` may be called from any."""

    def __init__(self, core: _core.Session, job: JobSpec):
        self._core = core
        self.job = job
        self._index = {t.name: i for i, t in enumerate(job.tensors)}

    def exchange(self, gradients: Sequence[Any] | Mapping[str, Any], lr: float | Sequence[float]) -> None:
        """One whole round. `gradients`: in the job's order, or by name; unchanged until this returns."""
        if isinstance(gradients, Mapping):
            missing = [t.name for t in self.job.tensors if t.name not in gradients]
            if missing:
                raise ValueError(f"no gradient was given for tensor {missing[0]!r}")
            gradients = [gradients[t.name] for t in self.job.tensors]
        names = [t.name for t in self.job.tensors]
        arrays = [as_array(g, f"the gradient of {names[i] if i < len(names) else i!r}")
                  for i, g in enumerate(gradients)]
        self._core.exchange(arrays, self._rates(lr))

    def begin_round(self, lr: float | Sequence[float]) -> None:
        """Opens a round and asks for its update."""
        self._core.begin_round(self._rates(lr))

    def tensor_ready(self, tensor: int | str, gradient: Any) -> None:
        """The gradient of one tensor is complete; returns at once. It must not change until `end_round` returns."""
        index = self._index[tensor] if isinstance(tensor, str) else tensor
        self._core.tensor_ready(index, as_array(gradient, f"the gradient of {tensor!r}"))

    def end_round(self, timeout: float | None = None) -> None:
        """Waits until every update is applied; from here on parameters change. After DeadlineExceeded call it again."""
        self._core.end_round(-1 if timeout is None else int(timeout * 1000))

    def stats(self) -> dict[str, float]:
        """Totals since the join: bytes on the wire, deferred elements, seconds spent."""
        return self._core.stats()

    def digest(self) -> str:
        """SHA-256 of the parameters in the job's order."""
        return self._core.digest()

    def shard_digests(self) -> list[str]:
        """Per shard, as `gradwire describe --digest` reports it."""
        return self._core.shard_digests()

    @property
    def version(self) -> int:
        """Of the parameters in memory: the number of the next round."""
        return self._core.version

    @property
    def start_version(self) -> int:
        return self._core.start_version

    @property
    def buckets(self) -> int:
        return self._core.buckets

    def leave(self) -> None:
        """Ends the membership; the other workers go on without this one."""
        self._core.leave()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()

    @staticmethod
    def _rates(lr: float | Sequence[float]) -> list[float]:
        return [float(lr)] if isinstance(lr, (int, float)) else [float(x) for x in lr]


def join(servers: str | Sequence[str], job: JobSpec, parameters: Sequence[Any], worker: str | None = None, *,
         pull: str = "update", connect_timeout: float = 20.0, start_timeout: float = 600.0, rpc_timeout: float = 10.0,
         round_timeout: float = 600.0, backend: str = "auto") -> Session:
    """Joins a job and brings `parameters` to its current version, in place.

    servers: address of each shard, the same list on every worker. parameters: one float32 C-contiguous NumPy array or
    CPU tensor per tensor of the job (where the means are written, for pull="mean"); the session updates them in place.
    The first worker's values start the job. Timeouts are in seconds.
    """
    servers = [servers] if isinstance(servers, str) else list(servers)
    names = [t.name for t in job.tensors]
    memory = [as_array(p, f"the parameter {names[i] if i < len(names) else i!r}") for i, p in enumerate(parameters)]
    core = _core.Session(servers=servers, job_json=job.to_json(), worker=worker or default_worker_name(), pull=pull,
                         memory=memory, connect_timeout_ms=int(connect_timeout * 1000),
                         start_timeout_ms=int(start_timeout * 1000), rpc_timeout_ms=int(rpc_timeout * 1000),
                         round_timeout_ms=int(round_timeout * 1000), backend=backend)
    return Session(core, job)
