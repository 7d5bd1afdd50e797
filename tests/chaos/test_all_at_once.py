"""Every process of the job dies at the same moment, as when a rack loses power (what the disks had synced is there), again
and again: servers come back from their data directories, workers from their checkpoints, to the digest of a run in which
nothing died."""

from __future__ import annotations

import signal

import pytest

from cluster import Cluster, Setup

SETUP = Setup(rounds=150, pause_ms=2)
KILLED_AT = (20, 45, 70, 95, 120)  # versions that every worker has by then


@pytest.mark.ci
def test_everything_killed_and_back(tmp_path, undisturbed, report):
    with Cluster(tmp_path, SETUP, checkpoints=True) as job:
        job.start_servers()
        job.start_workers()
        serving = 0.0
        for n, version in enumerate(KILLED_AT):
            job.wait_for_version(version)
            processes = [one.process for one in (*job.servers, *job.workers)]
            for process in processes:
                process.signal(signal.SIGKILL)
            killed = max(process.kill() for process in processes)
            for server in job.servers:
                server.start()
            for worker in job.workers:
                worker.start()
            serving = max(serving, *(server.wait_until_serving() for server in job.servers))
            assert all(worker.wait_until_joined(n + 2)["resumed"] for worker in job.workers)
        report(job, "everything at once", "kill -9", undisturbed(SETUP), killed_ns=killed, serving=serving,
               kills=len(KILLED_AT) * len(processes))
