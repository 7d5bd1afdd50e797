"""A job of real processes on this machine, to be killed: shard servers with data directories, workers, their logs."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import select
import signal
import subprocess
import time
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("GRADWIRE_BIN", ROOT / "build/release/bin"))
WORKER = BIN.parent / "tests/chaos_worker"

SHARDS = 2
WORKERS = 4
_PATIENCE_S = 120.0


@dataclasses.dataclass(frozen=True)
class Setup:
    """What decides the digest at the end of an undisturbed run."""

    rounds: int
    large: bool = False  # frames of several chunks
    pause_ms: int = 0  # of every worker between two rounds
    optimizer: str = "adamw"
    shards: int = SHARDS
    codec: str = "tagc:density=0.05,bits=2"
    skips: bool = False  # every other round, in which one worker's gradient is not finite


class Process:
    """A program that may die at a failpoint of its own. Its output is kept in a file."""

    def __init__(self, log: pathlib.Path, command: Iterable[object], failpoint: str | None = None):
        self.log = log
        with log.open("ab") as out:
            self._popen = subprocess.Popen([str(c) for c in command], stdout=out, stderr=subprocess.STDOUT,
                                           env={**os.environ, "GRADWIRE_FAILPOINT": failpoint or ""})
        self.ended_ns = 0

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def wait(self, timeout: float = _PATIENCE_S) -> int:
        """The exit code, or minus the signal that ended it."""
        wait_for_any([self], timeout)
        return self._popen.returncode

    def note_end(self) -> None:
        if self.ended_ns == 0 and self._popen.poll() is not None:
            self.ended_ns = time.monotonic_ns()

    def kill(self) -> int:
        """When it was dead, in nanoseconds."""
        if self.running:
            self._popen.kill()
        self._popen.wait()
        self.note_end()
        return self.ended_ns

    @property
    def pid(self) -> int:
        return self._popen.pid


def wait_for_any(processes: Iterable[Process], timeout: float = _PATIENCE_S) -> None:
    """Returns when one of them has ended; AssertionError when none does in time."""
    processes = list(processes)
    poll = select.poll()
    descriptors = [os.pidfd_open(p.pid) for p in processes if p.running]
    try:
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        ended = len(descriptors) < len(processes) or poll.poll(timeout * 1000)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    for process in processes:
        process.note_end()
    assert ended, f"none of {len(processes)} processes ended within {timeout:.0f} s"


class Server:
    """A shard server that keeps its address and data directory when it is started again."""

    def __init__(self, folder: pathlib.Path, name: str, flags: Iterable[object] = (), transport: str = "grpc"):
        self.name = name
        self.data = folder / name
        self.address = ""
        self._anywhere = f"{transport}://127.0.0.1:0"
        self.process: Process | None = None
        self._flags = list(flags)
        self._ports = folder / f"{name}.addresses"
        self._log = folder / f"{name}.log"

    def start(self, failpoint: str | None = None) -> None:
        self._ports.unlink(missing_ok=True)
        self.process = Process(
            self._log, [BIN / "gradwire-server", "--listen", self.address or self._anywhere, "--port-file",
                        self._ports, "--data-dir", self.data, "--backend", "cpu", "--log-level", "warning",
                        "--snapshot-journal-bytes", 1 << 20, *self._flags], failpoint)

    def wait_until_serving(self) -> float:
        """How many seconds that took."""
        begin = time.monotonic()
        while not self._ports.exists():
            assert self.process.running, f"{self.name} ended: {_tail(self._log)}"
            assert time.monotonic() < begin + _PATIENCE_S, f"{self.name} does not serve"
            time.sleep(0.001)
        self.address = self._ports.read_text().split()[0]
        return time.monotonic() - begin

    def start_again(self) -> float:
        self.start()
        return self.wait_until_serving()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="backslashreplace")


class Worker:
    """Started as often as it takes; the log of its rounds goes on."""

    def __init__(self, folder: pathlib.Path, index: int, flags: Iterable[object]):
        self.index = index
        self.process: Process | None = None
        self._flags = list(flags)
        self._rounds = folder / f"worker-{index}.rounds"
        self._log = folder / f"worker-{index}.log"

    def start(self, failpoint: str | None = None) -> None:
        self.process = Process(self._log, [WORKER, "--index", self.index, "--log", self._rounds, *self._flags],
                               failpoint)

    def events(self) -> list[dict]:
        if not self._rounds.exists():
            return []
        lines = self._rounds.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def version(self) -> int:
        return max((e["version"] for e in self.events() if "version" in e), default=0)

    def wait_until_joined(self, times: int) -> dict:
        """How its session of that number began."""
        deadline = time.monotonic() + _PATIENCE_S
        while len(starts := [e for e in self.events() if "start_version" in e]) < times:
            assert self.process.running, self.ended()
            assert time.monotonic() < deadline, f"worker {self.index} does not join"
            time.sleep(0.005)
        return starts[times - 1]

    def finish(self) -> dict:
        code = self.process.wait()
        assert code == 0, self.ended()
        return self.events()[-1]

    def ended(self) -> str:
        """How it did, and what it said at last."""
        return f"worker {self.index} ended with {self.process.wait()} at version {self.version}: {_tail(self._log)}"


class Cluster:
    """The shards and four workers of one job."""

    def __init__(self, folder: pathlib.Path, setup: Setup, durability: str = "fsync", checkpoints: bool = False,
                 worker_flags: Iterable[object] = (), server_flags: Iterable[object] = (), transport: str = "grpc"):
        self.setup = setup
        self.servers = [Server(folder, f"shard-{s}", server_flags, transport) for s in range(setup.shards)]
        self._folder = folder
        self._checkpoints = checkpoints
        self._worker_flags = ["--workers", WORKERS, "--rounds", setup.rounds, "--pause-ms", setup.pause_ms,
                              "--durability", durability, "--optimizer", setup.optimizer, "--codec", setup.codec, *worker_flags]
        if setup.skips:
            self._worker_flags.append("--skips")
        if setup.large:
            self._worker_flags.append("--large")
        self.workers: list[Worker] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        for one in [*self.workers, *self.servers]:
            if one.process is not None:
                one.process.kill()

    @property
    def addresses(self) -> str:
        return ",".join(server.address for server in self.servers)

    def start_servers(self) -> None:
        for server in self.servers:
            if server.process is None:
                server.start()
        for server in self.servers:
            server.wait_until_serving()

    def start_workers(self, failpoints: dict[int, str] | None = None, servers: str | None = None,
                      own_servers: dict[int, str] | None = None) -> None:
        """`own_servers`: addresses that single workers know, instead of `servers`."""
        known = [(own_servers or {}).get(w, servers or self.addresses) for w in range(WORKERS)]
        self.workers = [Worker(self._folder, w, ["--servers", known[w], *self._worker_flags, *self._checkpoint_flags(w)])
                        for w in range(WORKERS)]
        for worker in self.workers:
            worker.start((failpoints or {}).get(worker.index))

    def _checkpoint_flags(self, worker: int) -> list[object]:
        return ["--checkpoint", self._folder / f"worker-{worker}.checkpoint"] if self._checkpoints else []

    def wait_for_version(self, version: int) -> None:
        """Until every worker has it."""
        deadline = time.monotonic() + _PATIENCE_S
        while min(worker.version for worker in self.workers) < version:
            for worker in self.workers:
                assert worker.process.running, f"{worker.ended()}; of the servers' logs:\n{self.logs_of_servers()}"
            assert time.monotonic() < deadline, f"version {version} was not reached"
            time.sleep(0.002)

    def wait_until_killed(self, process: Process) -> int:
        """When that was, in nanoseconds. AssertionError where the workers end before `process` has come to its failpoint."""
        wait_for_any([process, *(w.process for w in self.workers if w.process is not process)])
        process.note_end()
        assert not process.running, "the job ended and nothing came to the failpoint"
        assert process.wait() == -signal.SIGKILL, f"exit code {process.wait()}: {_tail(process.log)}"
        return process.ended_ns

    def logs_of_servers(self) -> str:
        return "\n".join(f"{path.name}: {_tail(path)}" for path in sorted(self._folder.glob("*.log"))
                         if path.name.startswith(("shard-", "one", "two")))

    def rounds_after(self, ns: int) -> float:
        """Seconds from `ns` until a round was over that had not begun by then: two versions later, for the first worker."""
        events = sorted((e["ns"], e["version"]) for w in self.workers for e in w.events() if "version" in e)
        known = max((version for at, version in events if at <= ns), default=0)
        later = [at for at, version in events if at > ns and version >= known + 2]
        return (later[0] - ns) * 1e-9 if later else float("nan")

    def rounds_per_s(self, begin_ns: int, end_ns: int) -> float:
        """Of the first worker, between the two times."""
        ends = [e["ns"] for e in self.workers[0].events() if "version" in e and begin_ns <= e["ns"] <= end_ns]
        return len(ends) / ((end_ns - begin_ns) * 1e-9)

    def finish(self) -> str:
        """The digest that all workers and, per shard, the servers agree on."""
        ends = [worker.finish() for worker in self.workers]
        for end in ends:
            assert end["version"] == self.setup.rounds + 1
            assert end["digest"] == ends[0]["digest"], "replicas differ"
        for shard, job in enumerate(describe(server.address for server in self.servers)):
            assert job["parameters_sha256"] == ends[0]["shard_digests"][shard], f"shard {shard} differs from the workers"
        return ends[0]["digest"]


def _tail(log: pathlib.Path) -> str:
    return log.read_text(errors="backslashreplace")[-2000:]


def describe(addresses: Iterable[str]) -> list[dict]:
    out = run_tool("job", "describe", "chaos", "--digest", "--json", "--servers", ",".join(addresses))
    return [reply["status"] for reply in json.loads(out)]


def run_tool(*arguments: object) -> str:
    done = subprocess.run([BIN / "gradwire", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
