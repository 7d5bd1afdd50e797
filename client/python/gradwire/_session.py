"""Sessions: a worker's membership in a job."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _core, _entry, _identity, _lifetime, _waiting
from ._errors import DeadlineExceeded, FailedPrecondition
from ._job import JobSpec
from ._trace import Trace


_DLPACK_HOST = (1, 3)  # kDLCPU, and kDLCUDAHost: pinned memory of the host


def device_of(value: Any) -> tuple[int, int] | None:
    """Type and number, as DLPack names them, of the device that an array lies on; None: in host memory."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack_device__"):
        return None
    kind, index = value.__dlpack_device__()
    return None if int(kind) in _DLPACK_HOST else (int(kind), int(index))


def as_array(value: Any, what: str) -> np.ndarray:
    """A NumPy view of an array, a CPU tensor or anything else that DLPack describes on the host; shares its memory."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach") and hasattr(value, "numpy") and value.device.type == "cpu":
        if not value.is_contiguous():
            raise ValueError(f"{what} must be contiguous")
        return value.detach().numpy()
    device = device_of(value)
    if device is not None:
        raise TypeError(f"{what} lies on a device (DLPack type {device[0]}, number {device[1]}), the parameters of this "
                        "session in host memory: move one of them")
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return np.from_dlpack(value)
    raise TypeError(f"{what} must be a NumPy array, a torch tensor or a DLPack array, not {type(value).__name__}")


def _export(value: Any, stream: int) -> object:
    """The DLPack capsule of an array on a device; `stream` waits for the work that makes its values, the host does not."""
    if hasattr(value, "detach"):
        value = value.detach()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.is_cuda:
        with torch.cuda.device(value.device):  # torch exports tensors of its current device
            return value.__dlpack__(stream=stream)
    return value.__dlpack__(stream=stream)


_MAX_SECONDS = 1e9
_NOTE = "note."  # before the names of notes, in the metadata of a checkpoint
_PATIENCE_MS = 1000  # shorter waits are not watched


def _milliseconds(name: str, seconds: float, least: float = 0.001) -> int:
    """Whole milliseconds; ValueError that names the argument unless it is a finite number in range."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number of seconds, not {type(seconds).__name__}")
    if not least <= seconds <= _MAX_SECONDS:  # false for nan
        raise ValueError(f"{name}={seconds!r} must be a number of seconds from {least:g} to {_MAX_SECONDS:g}")
    return int(seconds * 1000)


class Session:
    """Made by `join`. Use it from one thread at a time; `tensor_ready` may be called from any."""

    def __init__(self, core: _core.Session, job: JobSpec, worker: str, parameters: Sequence[Any] = (),
                 device: _core.Device | None = None, servers: Sequence[str] = (), round_timeout: float = 600.0):
        self._core = core
        self._servers = list(servers)
        self._round_timeout_ms = _milliseconds("round_timeout", round_timeout)
        self._release_name: Callable[[], object] = lambda: None  # where `join` did not choose the name
        self._quiet_until = 0.0  # before this time no wait is logged
        self.worker = worker
        self.job = job
        self._device = device
        self._parameters = [p for p in parameters if p is not None] if device is not None else []
        self._index = {t.name: i for i, t in enumerate(job.tensors)}

    def exchange(self, gradients: Sequence[Any] | Mapping[str, Any], lr: float | Sequence[float]) -> None:
        """One whole round. `gradients`: in the job's order, or by name; unchanged until this returns."""
        if isinstance(gradients, Mapping):
            missing = [t.name for t in self.job.tensors if t.name not in gradients]
            if missing:
                raise ValueError(f"no gradient was given for tensor {missing[0]!r}")
            gradients = [gradients[t.name] for t in self.job.tensors]
        names = [t.name for t in self.job.tensors]
        arrays = [self._borrow(g, f"the gradient of {names[i] if i < len(names) else i!r}")
                  for i, g in enumerate(gradients)]
        self._await_caller()
        rates = self._rates(lr)
        self._patiently(lambda first: self._core.exchange(arrays, rates, first), self._core.end_round, -1)

    def begin_round(self, lr: float | Sequence[float]) -> None:
        """Opens a round and asks for its update."""
        self._core.begin_round(self._rates(lr))

    def begin_replacement(self) -> None:
        """In the place of begin_round and tensor_ready: end_round then makes what the parameters hold the job's parameters.

        Every worker calls this in the same step, with the same values. Moments and residuals stay, and optimizers do not
        count the round. Not before the first step. gradwire.GradwireError for jobs whose workers do not go in step
        (quorum, bounded, async) and codec powersgd.
        """
        self._core.begin_replacement()

    def tensor_ready(self, tensor: int | str, gradient: Any) -> None:
        """The gradient of one tensor is complete; returns at once. It must not change until `end_round` returns.

        On a device the work that is in the current stream now completes the gradient; the host does not wait for that work.
        """
        index = self._index[tensor] if isinstance(tensor, str) else tensor
        self._core.tensor_ready(index, self._borrow(gradient, f"the gradient of {tensor!r}"))

    def rows_ready(self, tensor: int | str, rows: Any, values: Any) -> None:
        """The gradient of one tensor is complete, and 0 but for `rows` (int64, ascending, each once) along its first dimension,
        whose `values` (float32, C-contiguous) are a tensor of as many rows. In host memory; neither may change until
        `end_round` returns. The same is sent as by tensor_ready. With a codec that sends all that is not 0 ("zen",
        "adaptive") the work grows with these rows.
        """
        index = self._index[tensor] if isinstance(tensor, str) else tensor
        what = f"the gradient of {tensor!r}"
        self._core.rows_ready(index, np.asarray(rows), as_array(values, what))

    def end_round(self, timeout: float | None = None) -> None:
        """Waits until every update is applied; the parameters change meanwhile (with early_updates before, too). After DeadlineExceeded call it again.

        With bounded staleness s (JobSpec.rounds) this returns once all but the last s rounds are applied. On a device the
        parameters change after the work that is in the current stream now, and have changed when this returns.
        """
        self._await_caller()
        end = self._core.end_round
        self._patiently(end, end, -1 if timeout is None else _milliseconds("timeout", timeout, 0))

    def drain(self, timeout: float | None = None) -> None:
        """Between two rounds: waits until all rounds that this worker pushed are applied (see end_round)."""
        self._await_caller()
        drain = self._core.drain
        self._patiently(drain, drain, -1 if timeout is None else _milliseconds("timeout", timeout, 0))

    def _patiently(self, begin: Callable[[int], None], go_on: Callable[[int], None], timeout_ms: int) -> None:
        """Calls `begin`, and `go_on` when a second was not enough; the logger `gradwire` then tells what is waited for."""
        limit_ms = self._round_timeout_ms if timeout_ms < 0 else timeout_ms
        first_ms = min(limit_ms, _PATIENCE_MS)
        try:
            try:
                begin(first_ms)
                return
            except DeadlineExceeded:
                if limit_ms <= first_ms:
                    raise
            watch = _waiting.Waiting("round", self._servers, self.job.name, self.worker, self._core.take_notices,
                                     first_ms / 1000, self._quiet_until)
            try:
                with watch:
                    go_on(limit_ms - first_ms)
            except DeadlineExceeded as error:
                answers = _waiting.ask(self._servers, self.job.name)
                raise DeadlineExceeded(f"{error}. Waits for {_waiting.waited_for(self._servers, answers, self.worker)}") from None
            finally:
                if watch.told_at:
                    self._quiet_until = watch.told_at + _waiting.LONGEST_SECONDS
        finally:
            _waiting.tell(self._core.take_notices())

    def stats(self) -> dict[str, float]:
        """Totals since the join: bytes on the wire, deferred elements, seconds spent. "members": workers of the job, as the latest
        heartbeat told (three in a lease)."""
        return self._core.stats()

    def digest(self) -> str:
        """SHA-256 of the parameters in the job's order."""
        return self._core.digest()

    def checksum(self) -> int:
        """CRC-32C of the same, in a twelfth of the time: to see whether somebody has written there."""
        return self._core.checksum()

    def shard_digests(self) -> list[str]:
        """Per shard, as `gradwire job describe --digest` reports it."""
        return self._core.shard_digests()

    @property
    def version(self) -> int:
        """The version of the parameters in memory; the updates of as many rounds are in them."""
        return self._core.version

    @property
    def start_version(self) -> int:
        """The version of the parameters at which this session joined."""
        return self._core.start_version

    @property
    def start_step(self) -> int:
        """How many steps the job had made when this session joined: a training loop takes up its schedule there. With
        asynchronous rounds they are those of all workers together."""
        return self._core.start_step

    @property
    def resumed(self) -> bool:
        """Whether this session goes on exactly where the checkpoint of `resume_from` stood."""
        return self._core.resumed

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a checkpoint for `resume_from` of `join`: parameters, moments, residuals, who this worker is.

        Between two rounds; drains first. The file at `path` is replaced at once or not at all, and synced to disk.
        """
        self._save(path, {})

    def _save(self, path: str | os.PathLike[str], notes: dict[str, str]) -> None:
        """As save, with notes that notes_of finds in the file."""
        self.drain()
        self._core.save(os.fspath(path), notes)

    @property
    def buckets(self) -> int:
        return self._core.buckets

    def leave(self, drain: bool = True) -> None:
        """Ends the membership; the other workers go on without this one. drain: calls drain first."""
        try:
            if drain:
                self._await_caller()
            self._core.leave(drain)
        finally:
            self._release_name()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        _lifetime.leave_behind(self.leave, kind is None)

    def _borrow(self, gradient: Any, what: str) -> object:
        if self._device is None:
            return as_array(gradient, what)
        if device_of(gradient) is None:
            raise TypeError(f"{what} lies in host memory, the parameters of this session on a device: move one of them")
        return _export(gradient, self._device.stream)

    def _await_caller(self) -> None:
        """Lets a session on a device wait, before it changes parameters, for what the caller's stream has to do with them."""
        if self._device is not None and self._parameters:
            _export(self._parameters[0], self._device.stream)

    @staticmethod
    def _rates(lr: float | Sequence[float]) -> list[float]:
        return [float(lr)] if np.ndim(lr) == 0 else [float(x) for x in lr]  # type: ignore[arg-type, union-attr]


def _header_of(path: str) -> tuple[dict[str, str], int]:
    """A checkpoint's metadata, and how many tensors its job has; nothing for a file that is no checkpoint, of which joining
    says more."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), 100_000_000)))
        return {str(key): str(value) for key, value in header["__metadata__"].items()}, int(header["steps"]["shape"][0])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        return {}, 0


def _checkpoint_of(path: str) -> dict[str, str]:
    """Which worker wrote a checkpoint, of which job and version; nothing for a file that is no checkpoint."""
    found, _ = _header_of(path)
    wanted = ("worker", "job", "version")
    whole = all(key in found for key in wanted) and re.fullmatch("[0-9a-f]{16}", found["version"])
    return {key: found[key] for key in wanted} if whole else {}


def notes_of(path: str) -> tuple[dict[str, str], int]:
    """A checkpoint's notes by name, and how many tensors its job has; nothing for a file that is no checkpoint."""
    metadata, tensors = _header_of(path)
    return {key[len(_NOTE):]: value for key, value in metadata.items() if key.startswith(_NOTE)}, tensors


_joined_in = 0  # the process in which this, or the one that it is a fork of, joined first


def _check_process() -> None:
    """A fork has the transports of its parent without their threads: it would wait for ever."""
    global _joined_in
    _joined_in = _joined_in or os.getpid()
    if _joined_in != os.getpid():
        raise FailedPrecondition("this process is a fork of one that has joined a job, or tried to, and cannot join one itself: "
                                 "start workers by multiprocessing.get_context('spawn'), or fork before the first session is made")


def join(servers: str | Sequence[str], job: JobSpec, parameters: Sequence[Any | None], worker: str | None = None, *,
         pull: str = "update", connect_timeout: float = 20.0, start_timeout: float = 600.0, rpc_timeout: float = 10.0,
         round_timeout: float = 600.0, reconnect_timeout: float = 60.0, backend: str = "auto",
         resume_from: str | os.PathLike[str] | None = None, exist: str = "join", encode_threads: int = 1,
         trace: Trace | None = None, early_updates: bool = False) -> Session:
    """Joins a job and brings `parameters` to its current version, in place.

    servers: address of each shard, the same list on every worker. parameters: one float32 C-contiguous array per tensor of
    the job (where the means are written, for pull="mean"), which the session updates in place: NumPy arrays, torch
    tensors or anything else with DLPack, all in host memory or all on one CUDA device. On a device the gradients lie there
    as well, residuals and moments too, and tensors travel by tagc or dense codecs. For pull="mean" None says that this
    worker does not want the mean of a tensor: it pushes its gradients, and of a bucket (JobSpec.bucket_bytes) in which it wants
    none pulls a few bytes.
    The first worker's values start the job. Timeouts are in seconds, from 0.001 to 1e9; reconnect_timeout: how long a shard that
    cannot be reached is tried again before training ends with Unavailable. Give it more where a durable shard comes back slowly
    (its pod moves, its journal is long). Ctrl-C is heard while this waits: the job is left again.

    worker: unique in the job. By default GRADWIRE_WORKER, torchrun's RANK, the pod's name or the host's with a number: a
    process that was killed and is started again has its former name, and takes its former place. Where the name or all
    places of the job are taken, this waits within start_timeout for members that may be gone; if all are alive it raises
    ResourceExhausted or AlreadyExists. A session that was not left leaves when the interpreter ends.

    exist: what becomes of a job that was trained before. "join" goes on with it, from the shards' parameters, and the
    logger `gradwire` says so; "new" deletes it and begins anew, unless it has workers (AlreadyExists); "error" raises
    AlreadyExists. The workers of one run come one after another, so a job that nobody has trained yet is joined whatever
    exist says.

    resume_from: a file of Session.save. Where the shards wait for the round that came next, this worker goes on with it,
    and nothing is lost or counted twice; where they went on without it, it starts from their parameters with the residuals
    of the file (see Session.resumed). The worker is then by default the one that wrote the file; where another worker takes
    it, this raises AlreadyExists or FailedPrecondition: each resumes from a file of its own. Where the servers do not
    have the job (durability none, and a server was started again; or another name), the file begins it: with its parameters
    and, where nothing but names differs, this worker's residuals and preconditioner; moments of the shards begin at 0.

    encode_threads, 1 to 64: threads that encode gradients in host memory, of jobs with more than 16384 elements. What is
    sent has the same bits with any number; more than one pays where steps wait for encoding and backward leaves cores free.
    trace: of which rounds a file shows where their time goes; see Trace.
    early_updates: updates are applied as they come, not only in end_round, to tensors of buckets that were sent: for loops that
    read no parameter between its tensor_ready and end_round. Not with asynchronous rounds, nor on a device.

    While this waits, and while rounds do, the logger `gradwire` tells for whom.
    """
    if not 1 <= encode_threads <= 64:
        raise ValueError(f"encode_threads={encode_threads} must lie between 1 and 64")
    _entry.check_exist(exist)
    _check_process()
    milliseconds = {f"{name}_ms": _milliseconds(name, value)
                    for name, value in (("connect_timeout", connect_timeout), ("start_timeout", start_timeout),
                                        ("rpc_timeout", rpc_timeout), ("round_timeout", round_timeout),
                                        ("reconnect_timeout", reconnect_timeout))}
    servers = [servers] if isinstance(servers, str) else list(servers)
    names = [t.name for t in job.tensors]
    places = {device_of(p) for p in parameters if p is not None}
    if len(places) > 1:
        raise ValueError("the parameters lie in several places; a session takes them in host memory or on one device: "
                         "use a job and a session for each")
    place = next(iter(places), None)
    device = None if place is None else _core.Device(*place)
    job_json = job.to_json()
    checkpoint = "" if resume_from is None else os.fspath(resume_from)
    traced = trace or Trace("")

    def arrays() -> list[Any]:  # anew for each attempt: a capsule can be taken once
        if device is not None:
            return [None if p is None else _export(p, device.stream) for p in parameters]
        return [None if p is None else as_array(p, f"the parameter {names[i] if i < len(names) else i!r}")
                for i, p in enumerate(parameters)]

    def check_file() -> None:  # before shards lose the job that the file is to begin anew
        if checkpoint:
            _core.check_checkpoint(checkpoint, job_json)

    memory = arrays()
    before = _checkpoint_of(checkpoint) if checkpoint else {}
    _entry.settle_existing(servers, job.name, exist, connect_timeout, start_timeout, check_file)
    anew = bool(before) and _entry.begins_anew(servers, job, int(before["version"], 16), connect_timeout, start_timeout,
                                               check_file)
    taken, name = None, worker
    if not name:
        wanted = None if anew else before.get("worker")
        taken = _entry.patiently(lambda: _identity.take_name(job.name, (job.workers, job.max_workers or job.workers), wanted),
                                 start_timeout)
        name = taken.text
    begin = time.monotonic()

    def attempt() -> _core.Session:
        left = max(0.001, start_timeout - (time.monotonic() - begin))
        return _core.Session(servers=servers, job_json=job_json, worker=name, pull=pull, memory=memory or arrays(),
                             backend=backend, resume_from=checkpoint, device=device, resume_anew=anew,
                             encode_threads=encode_threads, early_updates=early_updates, trace_path=os.fspath(traced.path),
                             trace_first_round=traced.first_round, trace_rounds=traced.rounds,
                             **{**milliseconds, "start_timeout_ms": int(left * 1000)})

    try:
        with _waiting.Waiting("joining", servers, job.name, name):
            core = _entry.admitted(attempt, memory.clear, servers, job, name, start_timeout)
    except BaseException:
        if taken is not None:
            taken.release()
        raise
    session = Session(core, job, name, parameters, device, servers, round_timeout)
    if taken is not None:
        session._release_name = weakref.finalize(session, taken.release)
    _lifetime.note_session(session)
    _waiting.tell(core.take_notices())
    _entry.tell_start(core, servers, job.name, name, pull != "mean")
    return session
