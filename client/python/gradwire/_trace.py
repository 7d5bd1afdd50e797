"""Which rounds a session traces."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Trace:
    """Where the time of some rounds goes, for `trace=` of `join` and ShardedOptimizer.

    The file `path` shows what this worker and every shard did to each bucket, and when: open it in
    https://ui.perfetto.dev, or read it as JSON (Chrome's trace event format). It is written one round after the last one
    traced, or when the session is left before. first_round: of the job, counted from 0; the first step is rounds 0 and 1.
    rounds: 1 to 1000. Each worker writes a file of its own: give each another path, and all the same rounds.
    """

    path: str | os.PathLike[str]
    first_round: int = 2
    rounds: int = 1
