"""A worker is stopped for 20 s under a quorum of 3 of 4: the others go on at their speed, it comes back by itself, and in
the end all hold the same parameters."""

from __future__ import annotations

import signal
import time

from cluster import Cluster, Setup

# At least 26 s, so that the others still train when it is back.
SETUP = Setup(rounds=1300, pause_ms=20)
STOPPED_S = 20


def test_stopped_worker_comes_back(tmp_path, report):
    with Cluster(tmp_path, SETUP, worker_flags=["--quorum", 3]) as job:
        job.start_servers()
        job.start_workers()
        job.wait_for_version(50)
        begin = time.monotonic_ns()
        job.wait_for_version(100)
        stopped = time.monotonic_ns()
        job.workers[3].process.signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        at_return = job.workers[0].version
        job.workers[3].process.signal(signal.SIGCONT)
        returned = time.monotonic_ns()
        before, during = job.rounds_per_s(begin, stopped), job.rounds_per_s(stopped, returned)
        print(f"rounds per second of the others: {before:.1f} before, {during:.1f} while one was stopped")
        assert at_return > 150, "the others waited for it"
        report(job, "worker stopped, 3 of 4", f"SIGSTOP {STOPPED_S} s", None, kills=0,
               **{"rounds per s before": before, "rounds per s during": during})
        end = job.workers[3].events()[-1]
        assert end["skipped_rounds"] > 0
        assert end["not_included"] > 0, "what it sent when it came back went into its residual"
