"""Who is late: for whom the rounds of a job waited, between two looks at its shards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ._waiting import Answer, ask, statuses, waited_for, workers_of

_ASK_MS = 1000


@dataclass(frozen=True)
class Late:
    """Of one worker since the look before, as the shard says where it cost the most."""

    share: float = 0.0  # of the time, in which it alone was awaited
    left_out: int = 0  # frames that came when their round had closed over a quorum


class Lateness:
    """Asks the shards, whose rounds know. `worker`: who looks."""

    def __init__(self, servers: Sequence[str], job: str, worker: str):
        self._servers, self._job, self._worker = list(servers), job, worker
        self._answers: list[Answer] = []
        # By shard, worker and incarnation: when it was seen last, the seconds for which it had been awaited, and its frames.
        self._seen: dict[tuple[int, str, str], tuple[float, float, int]] = {}
        self._looked: dict[int, float] = {}  # by shard, when it answered last
        self.look()

    @property
    def answered(self) -> bool:
        """Whether a shard answered the last look."""
        return bool(statuses(self._answers))

    def look(self) -> dict[str, Late]:
        """Those who were late since the last look; of a shard that did not answer then, since it did. Members that are gone do not
        count."""
        try:
            self._answers, at = ask(self._servers, self._job, _ASK_MS), time.monotonic()
        except RuntimeError:  # there are no threads to ask by
            self._answers = []
            return {}
        late: dict[str, Late] = {}
        for shard, status in enumerate(self._answers):
            if not isinstance(status, dict):
                continue
            before, self._looked[shard] = self._looked.get(shard), at
            for worker in status["workers"]:
                name, key = worker["worker"], (shard, worker["worker"], worker["incarnation"])
                held_up, left_out = int(worker["held_up_ms"]) / 1000, int(worker["not_included_frames"])
                # Who was not there at the look before counts from nothing.
                new = (at, held_up, left_out) if before is None else (before, 0.0, 0)
                then, held_up_then, left_out_then = self._seen.get(key, new)
                self._seen[key] = (at, held_up, left_out)
                share = min(1.0, max(0.0, held_up - held_up_then) / (at - then)) if at > then else 0.0
                known = late.get(name, Late())
                late[name] = Late(max(known.share, share), max(known.left_out, left_out - left_out_then))
        return {name: of for name, of in late.items() if of != Late()}

    def waits_for(self) -> str:
        """Whom or what this worker waited for at the last look; "" where it was itself awaited, or is no longer there, or nobody
        waits (asynchronous rounds)."""
        workers, here = workers_of(self._answers), statuses(self._answers)
        me = workers.get(self._worker)
        if here and (me is None or me["awaited"]):
            return ""
        if here and all(status["rounds"]["open"] for status in here) and not any(worker["awaited"] for worker in workers.values()):
            return ""
        return waited_for(self._servers, self._answers, self._worker)
