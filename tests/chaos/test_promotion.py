"""A primary dies while four workers train; its standby is promoted and the workers go on there: the digest at the end is
that of a run in which nothing died."""

from __future__ import annotations

import json
import time

import pytest

from cluster import Cluster, Server, Setup, describe, run_tool
from test_servers import Place

SETUP = Setup(rounds=300, pause_ms=5)
# Late enough for the standby to be in sync.
PLACES = [Place("push.chunk_merged", 4000), Place("round.before_journal", 1000), Place("journal.sync.before", 250),
          Place("journal.sync.after", 250), Place("version.before_visible", 1000), Place("version.after_visible", 1001),
          Place("answer.before_chunk", 4001)]


class Pair(Cluster):
    """Shard 0 has a standby, and the workers know both."""

    def __init__(self, folder):
        super().__init__(folder, SETUP)
        self.primary = self.servers[0]
        self.standby: Server | None = None
        self._folder = folder

    def start(self, failpoint: str | None = None) -> None:
        """Until the standby is in sync."""
        self.primary.start(failpoint)
        self.start_servers()
        self.standby = Server(self._folder, "standby", ["--follow", self.primary.address])
        self.standby.start_again()
        self.start_workers(servers=f"{self.primary.address}|{self.standby.address},{self.servers[1].address}")
        self.wait_for_version(2)
        while not any(follower["in_sync"] for follower in describe([self.primary.address])[0]["followers"]):
            time.sleep(0.01)

    def promote(self) -> float:
        """How many seconds that took."""
        begin = time.monotonic()
        run_tool("promote", self.standby.address)
        self.servers[0] = self.standby
        return time.monotonic() - begin

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        for server in (self.primary, self.standby):
            if server is not None:
                server.process.kill()


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_promoted_where_the_primary_died(place, tmp_path, undisturbed, report):
    with Pair(tmp_path) as job:
        job.start(f"{place.name}:{place.hit}")
        killed = job.wait_until_killed(job.primary.process)
        serving = job.promote()
        report(job, "primary, standby promoted", place, undisturbed(SETUP), killed_ns=killed, serving=serving)


@pytest.mark.ci
def test_promoted_after_kill_9_and_the_old_primary_is_fenced(tmp_path, undisturbed, report):
    with Pair(tmp_path) as job:
        job.start()
        job.wait_for_version(60)
        killed = job.primary.process.kill()
        serving = job.promote()
        job.primary.start_again()
        report(job, "primary, standby promoted", "kill -9", undisturbed(SETUP), killed_ns=killed, serving=serving)
        while not shard(job.primary)["fenced"]:
            time.sleep(0.01)


def shard(server: Server) -> dict:
    return json.loads(run_tool("shard", "describe", "--json", "--servers", server.address))[0]["status"]
