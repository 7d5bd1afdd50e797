"""Leaving: sessions that are still members when the interpreter ends, and optimizers whose notebook cell runs again.

Where a worker ends without leaving, the others wait for it until its lease ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ._errors import FailedPrecondition

logger = logging.getLogger("gradwire")

_lock = threading.RLock()
_sessions: weakref.WeakSet[Any] = weakref.WeakSet()
_optimizers: list[tuple[weakref.ref[Any], tuple[int, int, str, tuple[str, ...]]]] = []


def _key(servers: Sequence[str], job: str) -> tuple[int, int, str, tuple[str, ...]]:
    return os.getpid(), threading.get_ident(), job, tuple(servers)


def leave_behind(close: Callable[[bool], None], drain: bool) -> None:
    """Calls close(drain). Not to drain is for what ends with an exception, which no failure to leave replaces."""
    if drain:
        close(True)
        return
    try:
        close(False)
    except Exception as error:
        logger.warning("leaving behind an exception failed, and the others wait until this worker's lease has ended: %s", error)


def note_session(session: Any) -> None:
    """From now on the session leaves when the interpreter ends, unless it has left or was garbage-collected before."""
    session._process = os.getpid()
    with _lock:
        _sessions.add(session)


def note_optimizer(optimizer: Any, servers: Sequence[str], job: str) -> None:
    """From now on the optimizer is closed when this thread makes another one for the same job."""
    with _lock:
        _optimizers[:] = [entry for entry in _optimizers if entry[0]() is not None]
        _optimizers.append((weakref.ref(optimizer), _key(servers, job)))


def close_former(servers: Sequence[str], job: str, worker: str | None) -> None:
    """Closes the optimizers that this thread has made before for this job, with the same `worker` (or both without).

    One thread cannot train two workers of a job, whose steps wait for each other: it has given the former one up.
    """
    key = _key(servers, job)
    with _lock:
        former = [optimizer for reference, of in _optimizers if of == key and (optimizer := reference()) is not None]
    for optimizer in former:
        if not optimizer.closed and optimizer.named == worker:
            logger.info("worker %s leaves job %r: this thread makes another optimizer for it", optimizer.session.worker,
                        job)
            optimizer.superseded = True
            optimizer.close(drain=False)


def check_open(optimizer: Any) -> None:
    """Of step()."""
    if not hasattr(optimizer, "job"):
        raise FailedPrecondition("this is a copy of a ShardedOptimizer, and in no job: state_dict(checkpoint=True) is what can be kept")
    if optimizer.closed:
        raise FailedPrecondition(
            f"this optimizer has left job {optimizer.job.name!r}: " +
            ("this thread made another one for the same job. Optimizers that are used side by side need a job= of their own"
             if optimizer.superseded else "it was closed. Make another one"))


def _leave_all() -> None:
    with _lock:
        sessions = [s for s in _sessions if s._process == os.getpid()]
    for session in sessions:
        try:
            session.leave(drain=False)
        except Exception as error:  # the others leave as well
            logger.debug("leaving at exit: %s", error)


atexit.register(_leave_all)
