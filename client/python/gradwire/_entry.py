"""How a worker gets into a job: what becomes of one that exists, how long it waits for a place, what its checkpoint begins."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import _core
from ._errors import AlreadyExists, ResourceExhausted, Unavailable, from_code
from ._job import JobSpec
from ._waiting import Answer, ask, missing, statuses, unreachable, workers_of

logger = logging.getLogger("gradwire")

EXIST = ("join", "new", "error")
_PAUSE_SECONDS = 0.25
_RENEWALS = 2  # a server that had not run for a while lengthens leases, too
_ENDING_SECONDS = 5.0  # how long a process that was told to end may take
_GONE_CODES = (0, 5, 9)  # deleted, not there, in use or changed meanwhile: clear() looks again


def check_exist(exist: str) -> None:
    if exist not in EXIST:
        raise ValueError(f"exist={exist!r} must be one of {', '.join(map(repr, EXIST))}")


class Leases:
    """Which members are alive: those whose lease was renewed while somebody looked."""

    def __init__(self) -> None:
        # By name and incarnation: when the lease ends at the latest, as it was seen last. An answer may be old when it comes.
        self._ends: dict[tuple[str, str], float] = {}
        self._renewed: dict[tuple[str, str], int] = {}  # how often it was seen to end later than that

    def alive(self, answers: Sequence[Answer], asked: float, names: Sequence[str]) -> bool:
        """Whether all of these members are alive. False: one may be gone, its place will be free. asked: time.monotonic()
        before the answers came."""
        now, all_alive = time.monotonic(), True
        for name, worker in workers_of(answers).items():
            if name in names:
                left, key = int(worker["lease_left_ms"]) / 1000, (name, worker["incarnation"])
                if asked + left > self._ends.setdefault(key, now + left):
                    self._ends[key] = now + left
                    self._renewed[key] = self._renewed.get(key, 0) + 1
                all_alive = all_alive and self._renewed.get(key, 0) >= _RENEWALS
        return all_alive


def _versions(answers: Sequence[Answer]) -> list[int]:
    return [int(status["version"]) for status in statuses(answers)]


def reachable(servers: Sequence[str], job: str, timeout: float) -> list[Answer]:
    """The job on every shard; waits for servers that do not answer."""
    end = time.monotonic() + timeout
    while True:
        answers = ask(servers, job)
        silent = unreachable(answers)
        if not silent:
            return answers
        if time.monotonic() >= end:
            raise Unavailable(silent[0])
        time.sleep(_PAUSE_SECONDS)


def clear(servers: Sequence[str], job: str, timeout: float, doomed: Callable[[dict[str, Any]], bool], why: str) -> None:
    """Deletes the job on the shards whose status is `doomed`, once the leases of members that are gone have ended."""
    end = time.monotonic() + timeout
    leases = Leases()
    told = False
    while True:
        asked = time.monotonic()
        answers = reachable(servers, job, timeout)
        old = [(server, a) for server, a in zip(servers, answers, strict=True) if isinstance(a, dict) and doomed(a)]
        if not old:
            return
        members = sorted(workers_of([a for _, a in old]))
        if members and (leases.alive(answers, asked, members) or time.monotonic() >= end):
            raise AlreadyExists(f"job {job!r} is at version {max(_versions(answers))} and has workers: {', '.join(members)}. "
                                f"{why}: stop them first, or use another name")
        if members and not told:
            logger.warning("job %r: %s; waits for the leases of workers that may be gone: %s", job, why, ", ".join(members))
            told = True
        for server, status in old:
            if int(status["joined"]) > 0:
                continue
            code, message = _core.delete_unused_job(server, job, int(status["version"]), 10_000)
            if code not in _GONE_CODES:
                raise from_code(code, message)
            if code == 0:
                logger.info("job %r, version %s, was deleted on %s: %s", job, status["version"], server, why)
        time.sleep(_PAUSE_SECONDS if members else 0)


def settle_existing(servers: Sequence[str], job: str, exist: str, connect_timeout: float, start_timeout: float,
                    check_file: Callable[[], None]) -> None:
    """Carries out exist="new" and "error", before the job is joined. check_file raises where the checkpoint, if there is one,
    cannot begin the job."""
    if exist == "join":
        return
    answers = reachable(servers, job, connect_timeout)
    if exist == "error":
        if max(_versions(answers), default=0) > 0:
            raise AlreadyExists(f"job {job!r} exists on the servers and is at version {max(_versions(answers))}, with workers: "
                                f"{', '.join(sorted(workers_of(answers))) or 'none'}; exist='error' refuses to go on with it")
        return
    if statuses(answers):
        check_file()
    # A job that nobody has trained may be that of another worker, which begins just now.
    clear(servers, job, start_timeout,
          lambda status: int(status["version"]) > 0 or (int(status["joined"]) == 0 and int(status["unused_s"]) >= 2),
          "exist='new' begins anew")


def begins_anew(servers: Sequence[str], job: JobSpec, version: int, connect_timeout: float, start_timeout: float,
                check_file: Callable[[], None]) -> bool:
    """Whether a checkpoint of this version has to begin the job: the servers do not have it, or lost part of it.
    check_file: see settle_existing."""
    answers = reachable(servers, job.name, connect_timeout)
    if missing(answers):
        return True
    here = statuses(answers)
    if len(here) < len(servers) and job.durability == "none":
        check_file()
        clear(servers, job.name, start_timeout, lambda status: int(status["version"]) > 0,
              f"{len(servers) - len(here)} of {len(servers)} shards lost it, and a checkpoint begins it anew")
        return True
    # A job that nobody has trained: another worker has begun it with its own checkpoint.
    return version > 0 and len(here) == len(servers) and max(_versions(answers)) == 0


def patiently(take: Callable[[], Any], timeout: float) -> Any:
    """What `take` returns. Where another process of this host has the name, waits a little for its end."""
    end = time.monotonic() + min(timeout, _ENDING_SECONDS)
    while True:
        try:
            return take()
        except AlreadyExists:
            if time.monotonic() >= end:
                raise
            time.sleep(_PAUSE_SECONDS)


def admitted(make: Callable[[], Any], failed: Callable[[], None], servers: Sequence[str], job: JobSpec, worker: str,
             timeout: float) -> Any:
    """What `make` returns, which joins; `failed` is called between two tries. Where the name or all places are taken, this
    waits for members that may be gone."""
    end = time.monotonic() + timeout
    leases = Leases()
    told = free = False
    while True:
        try:
            return make()
        except (AlreadyExists, ResourceExhausted) as refused:
            failed()
            asked = time.monotonic()
            answers = ask(servers, job.name)
            named = isinstance(refused, AlreadyExists)
            full = any(int(s["joined"]) >= (job.max_workers or job.workers) for s in statuses(answers))
            if not (named or full):
                if free:
                    raise  # the servers have no memory, or no room for another job
                free = True  # or a place became free since
                continue
            free = False
            # A member that has left meanwhile has made room.
            holders = [name for name in sorted(workers_of(answers)) if name == worker or not named]
            alive = bool(holders) and leases.alive(answers, asked, holders)
            if alive or time.monotonic() >= end:
                raise type(refused)(f"{refused} (alive: {', '.join(holders)})") from None
            if not told and holders:
                logger.warning("job %r: worker %s waits for a place, of members that may be gone: %s", job.name, worker,
                               ", ".join(holders))
                told = True
            time.sleep(_PAUSE_SECONDS)


def tell_start(core: Any, servers: Sequence[str], job: str, worker: str, keeps: bool) -> None:
    """Says where a worker comes in that does not begin the job."""
    if core.start_version == 0 or core.resumed:
        return
    others = sorted(name for name in workers_of(ask(servers, job)) if name != worker)
    replaced = "; the parameters that it came with were replaced by those of the shards" if keeps else ""
    where = f"step {core.start_step} (start_step; version {core.start_version})"
    if others:
        logger.warning("job %r: worker %s comes in at %s, beside %s%s", job, worker, where, ", ".join(others), replaced)
    else:
        logger.warning("job %r was trained before: worker %s goes on with it, the first, from %s%s. To begin anew, or to be "
                       "refused, pass exist='new' or exist='error'", job, worker, where, replaced)

