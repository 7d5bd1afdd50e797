"""What a worker waits for, in the log: logging.getLogger("gradwire").

Nothing is asked while rounds go on. Where a wait takes longer, a thread asks the servers who is missing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from . import _core

logger = logging.getLogger("gradwire")

FIRST_SECONDS = 5.0  # how long a wait is before the first line about it
LONGEST_SECONDS = 60.0  # between two lines
_POLL_SECONDS = 0.5
_ASK_MS = 2000
_NOT_FOUND, _UNREACHABLE = 5, (4, 14)

# Per shard: its status, or (code, message).
Answer = dict[str, Any] | tuple[int, str]


def ask(servers: Sequence[str], job: str, timeout_ms: int = _ASK_MS) -> list[Answer]:
    """DescribeJob on every shard."""
    answers = _core.describe_job(list(servers), job, timeout_ms)
    return [json.loads(text) if code == 0 else (code, text) for code, text in answers]


def statuses(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [answer for answer in answers if isinstance(answer, dict)]


def missing(answers: Sequence[Answer]) -> bool:
    """Whether no shard has the job."""
    return all(isinstance(answer, tuple) and answer[0] == _NOT_FOUND for answer in answers)


def unreachable(answers: Sequence[Answer]) -> list[str]:
    return [answer[1] for answer in answers if isinstance(answer, tuple) and answer[0] in _UNREACHABLE]


def workers_of(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Members by name. One that any shard awaits counts as awaited, one whose connection to any shard is gone as gone."""
    workers: dict[str, dict[str, Any]] = {}
    for status in statuses(answers):
        for worker in status["workers"]:
            known = workers.setdefault(worker["worker"], dict(worker))
            known["awaited"] = known["awaited"] or worker["awaited"]
            known["connected"] = known["connected"] and worker["connected"]
            known["lease_left_ms"] = max(int(known["lease_left_ms"]), int(worker["lease_left_ms"]))
    return workers


def _named(worker: dict[str, Any]) -> str:
    if worker["connected"]:
        return f"{worker['worker']} (no frame yet)"
    return f"{worker['worker']} (its connection is gone; it counts for {max(0, int(worker['lease_left_ms'])) / 1000:.1f} s more)"


def waited_for(servers: Sequence[str], answers: Sequence[Answer], me: str) -> str:
    """Whom or what the rounds of a job wait for."""
    said = [f"shard {i} at {servers[i]}, which " + ("does not answer" if answer[0] in _UNREACHABLE else f"says: {answer[1]}")
            for i, answer in enumerate(answers) if isinstance(answer, tuple)]
    here = statuses(answers)
    closed = [status for status in here if not status["rounds"]["open"]]
    workers = workers_of(answers)
    for status in closed[:1]:
        least = int(status["spec"]["min_workers"])
        if int(status["joined"]) < least:
            said.append(f"workers: {status['joined']} of {least} have joined ({', '.join(sorted(workers)) or 'nobody'}; start the "
                        "others with the same job and servers)")
        elif not status["initialized"]:
            said.append("the initial parameters, which one of the workers sends: " + ", ".join(sorted(workers)))
    said += [_named(worker) for name, worker in sorted(workers.items()) if worker["awaited"] and name != me]
    if said:
        return ", ".join(said)
    mine = workers.get(me)
    return "this worker's own frames" if mine is not None and mine["awaited"] else "the servers, which have what they need"


def round_of(answers: Sequence[Answer]) -> str:
    rounds = [int(status["rounds"]["open_round"]) for status in statuses(answers)]
    return f"round {min(rounds)}" if rounds else "the round"


def tell(notices: Sequence[str]) -> None:
    """What a session wants people to know."""
    for text in notices:
        usual = "is back after" in text or "' left;" in text
        logger.log(logging.INFO if usual else logging.WARNING, "%s", text)


class Waiting:
    """A context that logs what its wait is for: first after FIRST_SECONDS, then in ever longer intervals."""

    def __init__(self, what: str, servers: Sequence[str], job: str, worker: str,
                 notices: Callable[[], Sequence[str]] | None = None, waited: float = 0.0, quiet_until: float = 0.0):
        self._what, self._servers, self._job, self._worker = what, servers, job, worker
        self._notices = notices
        self._begin = time.monotonic() - waited
        self._due = max(self._begin + FIRST_SECONDS, quiet_until)
        self._pause = 2 * FIRST_SECONDS
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradwire-watch")
        self.told_at = 0.0  # when the last line was written; 0: none was

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        # A wait in a daemon thread is not ended when the interpreter ends: this thread ends by itself then.
        while not self._over.wait(_POLL_SECONDS) and threading.main_thread().is_alive():
            if self._notices is not None:
                tell(self._notices())
            if time.monotonic() < self._due:
                continue
            answers = ask(self._servers, self._job)
            if self._over.is_set():
                return
            waited = time.monotonic() - self._begin
            what = round_of(answers) if self._what == "round" else self._what
            logger.warning("job %r: %s waits for %s, %.0f s", self._job, what,
                           waited_for(self._servers, answers, self._worker), waited)
            self.told_at = time.monotonic()
            self._due = self.told_at + self._pause
            self._pause = min(2 * self._pause, LONGEST_SECONDS)
