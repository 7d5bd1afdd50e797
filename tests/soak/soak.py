"""Random faults, several at a time, over whole jobs of real processes: kills and pauses of servers and workers, cut
connections, flipped bits, full disks. Each schedule follows from its seed, and must end with the parameters of a run in
which nothing happened, to the last bit, with nobody having waited longer than its timeout says.

    tests/run soak [--seeds=100]                  all schedules
    .venv/bin/python tests/soak/soak.py --first=7 --seeds=1 --keep=FOLDER      one again, its logs kept
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "chaos"))
import cluster
from proxy import Proxy

SETUPS = {
    "tagc": cluster.Setup(rounds=120, pause_ms=20),
    "tagc-sketch": cluster.Setup(rounds=120, pause_ms=20, codec="tagc:density=0.05,form=sketch"),
    "lans+clip+skips": cluster.Setup(rounds=90, pause_ms=20, optimizer="lans", skips=True),
    "powersgd": cluster.Setup(rounds=121, pause_ms=15, codec="powersgd:rank=2"),
    "topk": cluster.Setup(rounds=120, pause_ms=20, codec="topk:density=0.05"),
}
_LEASE_MS = 30_000  # longer than any fault: whoever is gone comes back as a member
_ROUND_TIMEOUT_S = 120  # of chaos_worker
_FAULTS_BEGIN_S, _FAULTS_END_S = 0.3, 3.5
_DISK_BYTES = 48 << 20


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: str  # kill-server, kill-worker, stop-server, stop-worker, cut, flip, full-disk
    target: int  # server or worker; of cut and flip: the server whose network it is
    begin_s: float
    seconds: float
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.target} at {self.begin_s:.2f} s for {self.seconds:.2f} s"


@dataclasses.dataclass(frozen=True)
class Schedule:
    seed: int
    setup: str
    transport: str
    durability: str
    faults: tuple[Fault, ...]


def schedule_of(seed: int, disks: bool) -> Schedule:
    """A function of the seed alone, and of whether disks can be filled here."""
    rng = random.Random(seed)
    kinds = ["kill-server", "kill-worker", "stop-server", "stop-worker", "cut", "flip", "flip", *(["full-disk"] if disks else [])]
    faults = []
    for _ in range(rng.randint(4, 9)):
        kind = rng.choice(kinds)
        count = cluster.WORKERS if kind.endswith("worker") else cluster.SHARDS
        faults.append(Fault(kind, rng.randrange(count), rng.uniform(_FAULTS_BEGIN_S, _FAULTS_END_S), rng.uniform(0.0, 1.5),
                            rng.getrandbits(32)))
    return Schedule(seed, rng.choice(list(SETUPS)), rng.choice(["grpc", "tcp"]), rng.choice(["fsync", "interval"]),
                    tuple(sorted(faults, key=lambda fault: fault.begin_s)))


class Disks:
    """A small disk for each server, which can be full. Only root can make such; else there is nothing here."""

    def __init__(self, folder: pathlib.Path, wanted: bool):
        self._folder = folder
        self._mounted: list[pathlib.Path] = []
        self.full: set[int] = set()
        self._wanted = wanted

    def __enter__(self) -> Disks:
        for shard in range(cluster.SHARDS if self._wanted else 0):
            path = self._folder / f"shard-{shard}"
            path.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", path], check=True)
            self._mounted.append(path)
        return self

    def __exit__(self, *exc: object) -> None:
        for path in self._mounted:
            subprocess.run(["umount", "-l", path], check=False)

    def fill(self, shard: int) -> None:
        self.full.add(shard)
        with contextlib.suppress(OSError), (self._mounted[shard] / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1 << 20))
        with contextlib.suppress(OSError), (self._mounted[shard] / "filler").open("ab", buffering=0) as filler:
            while filler.write(bytes(512)):
                pass

    def free(self, shard: int) -> None:
        self.full.discard(shard)
        (self._mounted[shard] / "filler").unlink(missing_ok=True)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False)
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=False)
        return mounted.returncode == 0


class Run:
    """One schedule: begins and ends faults, and starts again what it killed."""

    def __init__(self, job: cluster.Cluster, network: list[Proxy], disks: Disks, schedule: Schedule):
        self._job, self._network, self._disks, self._schedule = job, network, disks, schedule
        self._holds: collections.Counter[tuple[str, int]] = collections.Counter()  # of faults under way, by kind and target

    def go(self) -> None:
        begin = time.monotonic()
        steps = sorted([(f.begin_s, n, True) for n, f in enumerate(self._schedule.faults)] +
                       [(f.begin_s + f.seconds, n, False) for n, f in enumerate(self._schedule.faults)])
        for at, number, begins in steps:
            while (left := begin + at - time.monotonic()) > 0:
                self._keep_servers()
                time.sleep(min(left, 0.05))
            (self._begin if begins else self._end)(self._schedule.faults[number])
        self._finish(time.monotonic())

    def _process(self, fault: Fault) -> cluster.Process:
        return (self._job.workers if fault.kind.endswith("worker") else self._job.servers)[fault.target].process

    def _begin(self, fault: Fault) -> None:
        self._holds[fault.kind, fault.target] += 1
        match fault.kind:
            case "kill-server":
                self._process(fault).kill()
            case "kill-worker":
                if self._process(fault).running:
                    self._process(fault).kill()
                else:
                    self._holds[fault.kind, fault.target] -= 1  # it has finished
            case "stop-server" | "stop-worker":
                self._process(fault).signal(signal.SIGSTOP)
            case "cut":
                self._network[fault.target].cut()
            case "flip":
                self._network[fault.target].flip(fault.seed)
            case "full-disk":
                self._disks.fill(fault.target)

    def _end(self, fault: Fault) -> None:
        key = fault.kind, fault.target
        if self._holds[key] == 0:
            return
        self._holds[key] -= 1
        if self._holds[key]:
            return
        match fault.kind:
            case "kill-worker":
                self._job.workers[fault.target].start()
            case "stop-server" | "stop-worker":
                self._process(fault).signal(signal.SIGCONT)
            case "cut":
                self._network[fault.target].mend()
            case "full-disk":
                self._disks.free(fault.target)
        self._keep_servers()

    def _keep_servers(self) -> None:
        """As what supervises servers does; one that finds its disk full as it starts may end."""
        for shard, server in enumerate(self._job.servers):
            if server.process.running or self._holds["kill-server", shard] or shard in self._disks.full:
                continue
            server.start()

    def _finish(self, faults_ended: float) -> None:
        deadline = faults_ended + _ROUND_TIMEOUT_S
        while any(worker.process.running for worker in self._job.workers):
            self._keep_servers()
            for worker in self._job.workers:
                assert worker.process.running or worker.process.wait() == 0, (
                    f"worker {worker.index} ended: {worker.process.log.read_text(errors='backslashreplace')[-1500:]}")
            assert time.monotonic() < deadline, "workers still wait: " + str([w.version for w in self._job.workers])
            time.sleep(0.05)


def longest_wait_s(job: cluster.Cluster) -> float:
    """Between two rounds of one worker."""
    waits = [0.0]
    for worker in job.workers:
        times = [event["ns"] for event in worker.events() if "version" in event]
        waits += [(b - a) * 1e-9 for a, b in zip(times, times[1:])]
    return max(waits)


@contextlib.contextmanager
def kept(folder: pathlib.Path | None, seed: int):
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="gradwire-soak-") as made:
            yield pathlib.Path(made)
    else:
        path = folder / str(seed)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        yield path


def run(schedule: Schedule, digest: str, disks_wanted: bool, folder: pathlib.Path) -> dict:
    row = {"seed": schedule.seed, "setup": schedule.setup, "transport": schedule.transport, "durability": schedule.durability,
           "faults": [str(fault) for fault in schedule.faults]}
    begin = time.monotonic()
    with Disks(folder, disks_wanted) as disks, cluster.Cluster(
            folder, SETUPS[schedule.setup], durability=schedule.durability, checkpoints=True, transport=schedule.transport,
            worker_flags=["--lease-ms", _LEASE_MS]) as job:
        job.start_servers()
        network = [Proxy(server.address) for server in job.servers]
        job.start_workers(servers=",".join(proxy.address for proxy in network))
        try:
            job.wait_for_version(2)  # each worker has a checkpoint: from here on a killed one loses nothing
            Run(job, network, disks, schedule).go()
            row["ended"] = "same" if job.finish() == digest else "DIFFERS"
        except AssertionError as error:
            row["ended"] = f"FAILED: {error}"
        row["longest_wait_s"] = round(longest_wait_s(job), 2)
        row["flipped"] = sum(proxy.flipped for proxy in network)
    row["seconds"] = round(time.monotonic() - begin, 1)
    return row


def undisturbed(setup: str) -> str:
    with tempfile.TemporaryDirectory(prefix="gradwire-soak-") as folder, cluster.Cluster(
            pathlib.Path(folder), SETUPS[setup], worker_flags=["--lease-ms", _LEASE_MS]) as job:
        job.start_servers()
        job.start_workers()
        return job.finish()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="how many schedules (default 100: about half an hour on 2 cores)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default 0)")
    parser.add_argument("--keep", type=pathlib.Path, help="folder in which logs of the runs are left")
    parser.add_argument("--json", type=pathlib.Path, default=cluster.ROOT / "build/tests/soak.json", help="the rows are left here")
    options = parser.parse_args()
    disks = os.geteuid() == 0 and can_mount()
    if not disks:
        print("disks are never full here: only root can mount a small one")
    digests: dict[str, str] = {}
    rows = []
    for seed in range(options.first, options.first + options.seeds):
        schedule = schedule_of(seed, disks)
        if schedule.setup not in digests:
            digests[schedule.setup] = undisturbed(schedule.setup)
        with kept(options.keep, seed) as folder:
            rows.append(run(schedule, digests[schedule.setup], disks, folder))
        row = rows[-1]
        print("{seed:4}  {setup:16} {transport:4} {durability:8} {count} faults, {flipped} flipped; {seconds:5.1f} s, longest wait "
              "{longest_wait_s:5.2f} s: {ended}".format(count=len(row["faults"]), **row), flush=True)
        if row["ended"] != "same":
            print("      " + "\n      ".join(row["faults"]), flush=True)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"name": "soak", "rows": rows}, indent=1) + "\n")
    failed = sum(row["ended"] != "same" for row in rows)
    print(f"longest wait of a worker: {max(row['longest_wait_s'] for row in rows):.2f} s")
    print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
