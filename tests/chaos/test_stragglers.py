"""Workers that are away while the others go on. One that is stopped for 20 s under a quorum of 3 of 4 comes back by itself,
and in the end all hold the same parameters. One that never saw the update of its last round gets it, also from a server
that was killed after the journal had been cut behind that round."""

from __future__ import annotations

import pathlib
import signal
import time

import pytest

from cluster import WORKERS, Cluster, Setup, describe, run_tool
from proxy import Proxy

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


# The worker that is cut off has sent its frames of round AWAY_AT and has seen nothing of that round.
ABSENCE = Setup(rounds=40, large=True)  # a segment of the journal has few rounds
AWAY_AT, SNAPSHOTS_AT, BACK_AT = 10, (16, 22), 28
AWAY = WORKERS - 1
HOLDS = (AWAY_AT - 1, AWAY_AT, *SNAPSHOTS_AT, BACK_AT)


class Held(Cluster):
    """Workers that wait at the versions of HOLDS, each until it is let go on."""

    def __init__(self, folder: pathlib.Path):
        self._hold = folder / "hold"
        super().__init__(folder, ABSENCE, worker_flags=["--lease-ms", 4000, "--hold", self._hold, "--hold-at", ",".join(map(str, HOLDS))])

    def let_go(self, version: int, workers: range) -> None:
        for worker in workers:
            pathlib.Path(f"{self._hold}-{worker}-{version}").touch()

    def frames_of(self, worker: int) -> list[int]:
        """Per shard."""
        return [int(self._status(job, worker)["frames"]) for job in self._describe()]

    def wait_until_away_is_back(self) -> None:
        """It has asked every shard to start with the round behind the one that is open."""
        def waits(job: dict) -> bool:
            status = self._status(job, AWAY)
            return status is not None and int(status.get("joined_round", 0)) == BACK_AT + 1
        self._wait(lambda: all(waits(job) for job in self._describe()), "the worker does not come back")

    def wait_for(self, workers: range, version: int) -> None:
        self._wait(lambda: min(self.workers[w].version for w in workers) >= version, f"version {version} was not reached")

    def wait_for_frames(self, expected: list[int]) -> None:
        self._wait(lambda: self.frames_of(AWAY) == expected, "its frames do not arrive")

    def _describe(self) -> list[dict]:
        return describe(server.address for server in self.servers)

    @staticmethod
    def _status(job: dict, worker: int) -> dict | None:
        return next((w for w in job.get("workers", []) if w["worker"] == f"worker-{worker}"), None)

    @staticmethod
    def _wait(condition, what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.01)


def run_with_absence(job: Held, killed: bool) -> dict[str, object]:
    """What a row of the table says of the kill. Which rounds are without the worker is the same in every run."""
    everybody, others = range(WORKERS), range(AWAY)
    job.start_servers()
    network = [Proxy(server.address) for server in job.servers]
    job.start_workers(own_servers={AWAY: ",".join(proxy.address for proxy in network)})
    job.wait_for(everybody, AWAY_AT - 1)
    before = job.frames_of(AWAY)
    job.let_go(AWAY_AT - 1, everybody)
    job.wait_for(everybody, AWAY_AT)
    now = job.frames_of(AWAY)
    job.let_go(AWAY_AT, range(AWAY, WORKERS))
    job.wait_for_frames([2 * n - b for b, n in zip(before, now)])
    for proxy in network:
        proxy.cut()
    job.let_go(AWAY_AT, others)  # round AWAY_AT ends with its frames, the next one without it, when its lease is over
    for version in SNAPSHOTS_AT:
        job.wait_for(others, version)
        if killed:
            run_tool("snapshot", "chaos", "--servers", job.addresses)
        job.let_go(version, others)
    job.wait_for(others, BACK_AT)
    told = {}
    if killed:
        told["killed_ns"] = max(server.process.kill() for server in job.servers)
        told["serving"] = max(server.start_again() for server in job.servers)
    for proxy in network:
        proxy.mend()
    job.wait_until_away_is_back()
    job.let_go(BACK_AT, others)
    return told


@pytest.mark.ci
def test_what_is_owed_to_an_absent_worker_outlives_the_cut_of_the_journal(tmp_path, report):
    for folder in ("undisturbed", "killed"):
        (tmp_path / folder).mkdir()
    with Held(tmp_path / "undisturbed") as job:
        run_with_absence(job, killed=False)
        expected = job.finish()
    with Held(tmp_path / "killed") as job:
        told = run_with_absence(job, killed=True)
        report(job, "servers, worker away", "kill -9 behind two snapshots", expected, kills=len(job.servers), **told)
        assert job.workers[AWAY].events()[-1]["skipped_rounds"] == BACK_AT - AWAY_AT
