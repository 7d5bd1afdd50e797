"""Who a worker is: a name that no two processes share, and that a process gets again when it was killed and started again.

In this order: GRADWIRE_WORKER; torchrun's RANK, where its WORLD_SIZE fits the job's workers; the name of the pod in
Kubernetes; the host's name. The last two are numbered among the processes of the host (or pod) that are workers of the same
job: a number is a byte of a file that is locked, and the kernel unlocks it when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import secrets
import socket
import stat
import tempfile
import threading

from ._errors import AlreadyExists, FailedPrecondition

try:
    import fcntl
except ImportError:  # a system without these locks: names have the process's number
    fcntl = None  # type: ignore[assignment]

_MAX_BASE = 100  # characters; servers take names of 128
_MOST_PROCESSES = 4096  # of a host: so many numbers are tried for the name in a checkpoint
_lock = threading.RLock()  # its holder may take it again: a garbage collection can release a name
_held: set[tuple[str, int]] = set()  # by this process: (job and name, 0), or ("", byte of the file)
_file: int | None = None


def _lock_file() -> int:
    """Opened once and never closed: closing any descriptor of a file ends all locks that the process has on it."""
    global _file
    if _file is None:
        path = os.path.join(tempfile.gettempdir(), f"gradwire-workers-{os.getuid()}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            os.close(fd)
            raise OSError(f"{path} belongs to somebody else")
        _file = fd
    return _file


def _host() -> str:
    """The host's name and a token of its lock file: containers may share the name and not the file."""
    fd = _lock_file()
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0)
    try:
        token = os.pread(fd, 6, 0)
        if len(token) < 6:
            token = secrets.token_hex(3).encode()
            os.pwrite(fd, token, 0)
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, 0)
    return f"{socket.gethostname()[-_MAX_BASE:]}-{token.decode('ascii', 'replace')}"


def _from_environment(workers: tuple[int, int]) -> str | None:
    """A name that whoever started this process chose. workers: how many the job has, at least and at most."""
    if named := os.environ.get("GRADWIRE_WORKER"):
        return named
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    # Otherwise several torchruns share the job, and their ranks repeat.
    if rank.isdecimal() and (not world or (world.isdecimal() and workers[0] <= int(world) <= workers[1])):
        return f"rank-{rank}"
    return None


class Name:
    """A worker's name, until `release`."""

    def __init__(self, text: str, key: tuple[str, int]):
        self.text = text
        self._key = key
        self._process = os.getpid()

    def release(self) -> None:
        with _lock:
            if self._key not in _held:
                return
            _held.discard(self._key)
            if self._key[1] and self._process == os.getpid():
                with contextlib.suppress(OSError):
                    fcntl.lockf(_lock_file(), fcntl.LOCK_UN, 1, self._key[1])


def _take_in_process(base: str, scope: str) -> Name:
    for number in itertools.count(1):
        text = base if number == 1 else f"{base}-{number}"
        key = (f"{scope}\0{text}", 0)
        if key not in _held:
            _held.add(key)
            return Name(text, key)
    raise AssertionError


def _not_this_worker(wanted: str, why: str) -> str:
    return (f"the checkpoint of resume_from is worker {wanted!r}'s, {why}: two workers would go on as one. Each worker resumes "
            "from a state of its own; one that has none leaves resume_from out, and starts from the parameters of the shards")


def _take_on_host(base: str, scope: str, wanted: str | None) -> Name:
    for number in range(1, _MOST_PROCESSES) if wanted else itertools.count(1):
        text = base if number == 1 else f"{base}-{number}"
        if wanted not in (None, text):
            continue
        digest = hashlib.sha256(f"{scope}\0{base}\0{number}".encode()).digest()
        key = ("", 64 + int.from_bytes(digest[:7], "little"))
        free = key not in _held
        try:
            if free:
                fcntl.lockf(_lock_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, key[1])
        except BlockingIOError:
            free = False  # another process has it
        if free:
            _held.add(key)
            return Name(text, key)
        if wanted is not None:
            raise AlreadyExists(_not_this_worker(wanted, "which lives on this host"))
    if wanted is None:
        raise AssertionError
    return _take_once(wanted, scope)  # the name was given on another host


def _take_once(wanted: str, scope: str) -> Name:
    key = (f"{scope}\0{wanted}", 0)
    if key in _held:
        raise AlreadyExists(_not_this_worker(wanted, "which lives in this process"))
    _held.add(key)
    return Name(wanted, key)


def take_name(job: str, workers: tuple[int, int], wanted: str | None = None) -> Name:
    """The first name of this process that is free in this job; or `wanted`, the name in a checkpoint. AlreadyExists while
    another worker of this host has that name, FailedPrecondition where the environment names this process otherwise."""
    with _lock:
        if chosen := _from_environment(workers):
            if wanted is None:
                return _take_in_process(chosen, job)
            if not re.fullmatch(re.escape(chosen) + r"(-\d+)?", wanted):
                raise FailedPrecondition(_not_this_worker(wanted, f"this one is {chosen!r} (GRADWIRE_WORKER, RANK)"))
            return _take_once(wanted, job)
        try:
            if fcntl is None:
                raise OSError("no locks")
            pod = os.environ.get("HOSTNAME", "") if "KUBERNETES_SERVICE_HOST" in os.environ else ""
            return _take_on_host(re.sub(r"[^A-Za-z0-9._-]", "-", pod[-_MAX_BASE:] or _host()), job, wanted)
        except OSError:  # no place for the file, or no locks there
            if wanted is not None:
                return _take_once(wanted, job)
            return _take_in_process(f"{socket.gethostname()[-_MAX_BASE:]}-{os.getpid()}", job)
