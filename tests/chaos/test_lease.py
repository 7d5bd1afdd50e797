"""Two servers of one shard, and an etcd that says which of them is primary: the primary dies or stands still while four
workers train, its standby takes over by itself, and the digest at the end is that of a run in which nothing happened."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable

import pytest

from cluster import Cluster, Process, Server, Setup, describe, run_tool
from test_promotion import PLACES, SETUP

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="there is no etcd: deploy/bootstrap --chaos installs it")

TTL_MS = 2000
LONG = Setup(rounds=1500, pause_ms=5)
_PATIENCE_S = 60.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_until(what: str, done: Callable[[], bool]) -> float:
    """How many seconds that took."""
    begin = time.monotonic()
    while not done():
        assert time.monotonic() < begin + _PATIENCE_S, what
        time.sleep(0.005)
    return time.monotonic() - begin


class Etcd:
    """Keeps its data and port when it is started again."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        # In memory where there is room: it syncs every change, and a busy disk takes longer than a lease waits.
        room = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free >= 1 << 29
        self._data = tempfile.TemporaryDirectory(prefix=f"gradwire-etcd-{os.getpid()}-", dir="/dev/shm" if room else folder)
        self._port = free_port()
        self._peer = free_port()
        self.process: Process | None = None

    @property
    def lease(self) -> str:
        return f"etcd://127.0.0.1:{self._port}/chaos/shard-0"

    def start(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._port, self._peer))
        self.process = Process(
            self._folder / "etcd.log",
            ["etcd", "--data-dir", self._data.name, "--listen-client-urls", client, "--advertise-client-urls", client,
             "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"])


class Pair(Cluster):
    """Shard 0 are two servers with a lease, and the workers know both."""

    def __init__(self, folder: pathlib.Path, setup: Setup):
        super().__init__(folder, setup)
        self.etcd = Etcd(folder)
        addresses = [f"grpc://127.0.0.1:{free_port()}" for _ in range(2)]
        self.pair = []
        for name, own, other in (("one", *addresses), ("two", *reversed(addresses))):
            server = Server(folder, name, ["--name", name, "--follow", other, "--lease", self.etcd.lease, "--lease-ttl-ms",
                                           TTL_MS])
            server.address = own
            self.pair.append(server)
        self.primary, self.standby = self.pair
        self.servers[0] = self.primary

    def start(self, failpoint: str | None = None) -> None:
        """Until the standby is in sync."""
        self.etcd.start()
        self.primary.start(failpoint)
        self.start_servers()
        wait_until("nobody takes the lease", lambda: serves(self.primary))
        self.standby.start_again()
        self.start_workers(servers=f"{self.primary.address}|{self.standby.address},{self.servers[1].address}")
        self.wait_for_version(2)
        self.wait_until_in_sync()

    def wait_until_in_sync(self) -> None:
        wait_until("the standby does not come into sync", lambda: in_sync(self.primary))

    def wait_until_taken_over(self) -> float:
        """How many seconds that took."""
        took = wait_until("the standby does not take over", lambda: serves(self.standby))
        self.primary, self.standby = self.standby, self.primary
        self.servers[0] = self.primary
        return took

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        for one in (*self.pair, self.etcd):
            if one.process is not None:
                one.process.kill()


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_standby_takes_over_where_the_primary_died(place, tmp_path, undisturbed, report):
    with Pair(tmp_path, SETUP) as job:
        job.start(f"{place.name}:{place.hit}")
        killed = job.wait_until_killed(job.primary.process)
        serving = job.wait_until_taken_over()
        report(job, "primary, standby by lease", place, undisturbed(SETUP), killed_ns=killed, serving=serving)


def test_each_takes_over_from_the_other_again_and_again(tmp_path, undisturbed, report):
    kills = 4
    with Pair(tmp_path, LONG) as job:
        job.start()
        serving = 0.0
        for _ in range(kills):
            job.wait_for_version(max(w.version for w in job.workers) + 20)
            killed = job.primary.process.kill()
            serving = max(serving, job.wait_until_taken_over())
            job.standby.start_again()
            job.wait_until_in_sync()
        report(job, "primary, standby by lease", "kill -9", undisturbed(LONG), killed_ns=killed, serving=serving, kills=kills)


@pytest.mark.ci
def test_primary_that_stood_still_finds_itself_replaced(tmp_path, undisturbed, report):
    with Pair(tmp_path, LONG) as job:
        job.start()
        job.wait_for_version(60)
        frozen = job.primary
        frozen.process.signal(signal.SIGSTOP)
        stopped = time.monotonic_ns()
        serving = job.wait_until_taken_over()
        job.wait_for_version(max(w.version for w in job.workers) + 20)
        frozen.process.signal(signal.SIGCONT)
        wait_until("it does not find out", lambda: "this server is fenced" in frozen.log)
        assert not serves(frozen)
        job.wait_until_in_sync()
        assert job.standby is frozen and not serves(frozen)
        report(job, "primary, standby by lease", "SIGSTOP", undisturbed(LONG), killed_ns=stopped, serving=serving, kills=0)


def test_without_etcd_nobody_serves_and_with_it_the_job_goes_on(tmp_path, undisturbed, report):
    with Pair(tmp_path, LONG) as job:
        job.start()
        job.wait_for_version(60)
        job.etcd.process.kill()
        wait_until("it serves without a lease", lambda: not serves(job.primary))
        assert not serves(job.standby)
        started = time.monotonic_ns()
        job.etcd.start()
        serving = wait_until("nobody takes the lease", lambda: any(serves(server) for server in job.pair))
        if serves(job.standby):
            job.wait_until_taken_over()
        report(job, "etcd, from its start on", "kill -9", undisturbed(LONG), killed_ns=started, serving=serving)


def serves(server: Server) -> bool:
    status = shard(server)
    return status is not None and not status.get("following") and not status.get("fenced")


def shard(server: Server) -> dict | None:
    try:
        return json.loads(run_tool("shard", "describe", "--json", "--servers", server.address))[0].get("status")
    except (AssertionError, subprocess.TimeoutExpired):
        return None


def in_sync(server: Server) -> bool:
    return any(follower["in_sync"] for follower in describe([server.address])[0]["followers"])
