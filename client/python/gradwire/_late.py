"""Who is late: for whom the rounds of a job waited, between two looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ._waiting import Answer, ask, statuses, waited_for, workers_of

_ASK_MS = 1000


@dataclass(frozen=True)
class Late:
    """Of one worker, since the look before."""

    held_up: float = 0.0  # seconds for which rounds waited for it alone
    left_out: int = 0  # frames that came when their round had closed over a quorum

    def __bool__(self) -> bool:
        return self.held_up > 0 or self.left_out > 0


class Lateness:
    """Asks the shards, whose rounds know. `worker`: who looks."""

    def __init__(self, servers: Sequence[str], job: str, worker: str):
        self._servers, self._job, self._worker = list(servers), job, worker
        self._answers: list[Answer] = []
        self._before: dict[str, Late] | None = None
        self.look()

    def look(self) -> dict[str, Late]:
        """Those who were late since the last look that a shard answered. Members that are there no more do not count."""
        self._answers = ask(self._servers, self._job, _ASK_MS)
        if not statuses(self._answers):
            return {}
        now = {name: Late(int(of["held_up_ms"]) / 1000, int(of["not_included_frames"])) for name, of in workers_of(self._answers).items()}
        before, self._before = self._before, now
        if before is None:
            return {}
        # One that was started again counts from 0.
        since = {name: Late(max(0.0, late.held_up - known.held_up), max(0, late.left_out - known.left_out))
                 for name, late in now.items() for known in (before.get(name, Late()),)}
        return {name: late for name, late in since.items() if late}

    def waits_for(self) -> str:
        """Whom or what the open round lacked at the last look; "" where who looks is no longer there."""
        if statuses(self._answers) and self._worker not in workers_of(self._answers):
            return ""
        return waited_for(self._servers, self._answers, self._worker)
