"""A shard server under attack: real, with a bounded address space, and with the job of honest workers beside."""

from __future__ import annotations

import contextlib
import pathlib
import resource
import subprocess
import sys
import time
import types

import grpc

import cluster

_PATIENCE_S = 60.0
_WORKERS = 2
_ENOUGH_ROUNDS = 1_000_000  # more than any test sees


def load_stubs(folder: pathlib.Path) -> types.SimpleNamespace:
    """The services as a stranger has them: made by grpcio from proto/, nothing of Gradwire's own client."""
    protos = sorted((cluster.ROOT / "proto/gradwire/v1").glob("*.proto"))
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{cluster.ROOT / 'proto'}", f"--python_out={folder}",
                    f"--grpc_python_out={folder}", *map(str, protos)], check=True, timeout=_PATIENCE_S)
    (folder / "gradwire/__init__.py").touch()  # before Gradwire's own package, where PYTHONPATH names it
    sys.path.insert(0, str(folder))
    from gradwire.v1 import (job_pb2, operator_pb2, operator_pb2_grpc, peer_pb2, peer_pb2_grpc, replication_pb2,
                             replication_pb2_grpc, worker_pb2, worker_pb2_grpc)

    return types.SimpleNamespace(job=job_pb2, operator=operator_pb2, peer=peer_pb2, replication=replication_pb2,
                                 worker=worker_pb2, Operator=operator_pb2_grpc.OperatorStub, Peer=peer_pb2_grpc.PeerStub,
                                 Replication=replication_pb2_grpc.ReplicationStub, Worker=worker_pb2_grpc.WorkerStub)


class Victim:
    """A server and, once `train` is called, workers whose rounds must go on whatever a stranger does.

    address_space: of the server in bytes: what asks for more than that is refused by the system.
    thread_stack: of each thread of the server in bytes, all of it address space; None: as of this process.
    descriptors: how many files and connections the server may have open; None: as this process.
    durable: with a data directory, so that the server can be started again.
    listen: one address or several, with spaces between; workers take the first, strangers with gRPC the first of theirs.
    """

    def __init__(self, folder: pathlib.Path, flags: tuple = (), *, address_space: int = 4 << 30,
                 thread_stack: int | None = None, descriptors: int | None = None, durable: bool = False, listen: str = "grpc://127.0.0.1:0"):
        self._folder = folder
        self._flags = [*flags, *(["--data-dir", folder / "data"] if durable else [])]
        self._limits = ["prlimit", f"--as={address_space}"]
        if thread_stack is not None:
            self._limits.append(f"--stack={thread_stack}")
        if descriptors is not None:
            self._limits.append(f"--nofile={descriptors}")
        self._listen = listen.split()
        self._ports = folder / "addresses"
        self._log = folder / "server.log"
        self._durability = "interval" if durable else "none"
        self._workers: list[cluster.Worker] = []
        self.process: cluster.Process | None = None

    def __enter__(self) -> Victim:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for one in [*self._workers, self]:
            if one.process is not None:
                one.process.kill()

    def start(self) -> None:
        """At the address that it had before, if any."""
        self._ports.unlink(missing_ok=True)
        listen = [part for address in self._listen for part in ("--listen", address)]
        self.process = cluster.Process(self._log, [*self._limits, cluster.BIN / "gradwire-server", *listen, "--port-file",
                                                   self._ports, "--backend", "cpu", *self._flags])
        deadline = time.monotonic() + _PATIENCE_S
        while not self._ports.exists():
            assert self.process.running, f"the server ended: {self.log[-2000:]}"
            assert time.monotonic() < deadline, "the server does not serve"
            time.sleep(0.005)
        self._listen = self._ports.read_text().split()

    def restart(self) -> None:
        self.process.kill()
        self.start()

    @property
    def address(self) -> str:
        return self._listen[0]

    @property
    def target(self) -> str:
        """HOST:PORT of the first listener."""
        return self.address.split("://")[1]

    @property
    def log(self) -> str:
        return self._log.read_text(errors="backslashreplace")

    @property
    def resident_bytes(self) -> int:
        pages = int(pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    @property
    def threads(self) -> int:
        return len(list(pathlib.Path(f"/proc/{self.process.pid}/task").iterdir()))

    @contextlib.contextmanager
    def channel(self):
        """A connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        target = next(address for address in self._listen if address.startswith("grpc")).split("://")[1]
        with grpc.insecure_channel(target, options=options) as channel:
            yield channel

    def train(self, *flags: object, servers: str | None = None, job: str = "bystander") -> None:
        """Starts a job of honest workers, and returns when its rounds go. `servers`: where they reach its shards."""
        folder = self._folder / job
        folder.mkdir()
        workers = [
            cluster.Worker(folder, index, ["--servers", servers or self.address, "--job", job, "--workers", _WORKERS,
                                           "--rounds", _ENOUGH_ROUNDS, "--pause-ms", 2,
                                           "--durability", self._durability, *flags]) for index in range(_WORKERS)]
        self._workers += workers
        for worker in workers:
            worker.start()
        self._wait_for_rounds(3)

    def assert_unharmed(self, *in_log: str, rounds: int = 5) -> None:
        """The daemon lives, rounds of every job of honest workers go on, and the log says each of `in_log`."""
        assert self.process.running, f"the server died: {self.log[-3000:]}"
        self._wait_for_rounds(rounds)
        for words in in_log:
            assert words in self.log, f"the log does not say {words!r}: {self.log[-3000:]}"

    def rounds_per_s(self, seconds: float) -> float:
        """Of the first honest worker, in the next `seconds`."""
        begin, before = time.monotonic(), self._workers[0].version
        time.sleep(seconds)
        return (self._workers[0].version - before) / (time.monotonic() - begin)

    def _wait_for_rounds(self, rounds: int) -> None:
        wanted = [(worker, worker.version + rounds) for worker in self._workers]
        deadline = time.monotonic() + _PATIENCE_S
        while late := [(worker.index, version) for worker, version in wanted if worker.version < version]:
            for worker in self._workers:
                assert worker.process.running, f"an honest worker ended: {worker.process.log.read_text(errors='backslashreplace')[-2000:]}"
            assert self.process.running, f"the server died: {self.log[-3000:]}"
            assert time.monotonic() < deadline, f"workers have not come to their versions: {late}; {self.log[-3000:]}"
            time.sleep(0.01)


