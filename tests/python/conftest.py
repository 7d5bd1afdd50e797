"""Fixtures: shard servers as real processes. GRADWIRE_BIN names the folder of gradwire-server."""

import os
import pathlib
import socket
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def server_binary() -> pathlib.Path:
    return pathlib.Path(os.environ.get("GRADWIRE_BIN", ROOT / "build/release/bin")) / "gradwire-server"


class Server:
    """One gradwire-server process."""

    def __init__(self, folder: pathlib.Path, name: str, *flags: str):
        self._port_file = folder / f"{name}.addresses"
        self._log_path = folder / f"{name}.log"
        self._flags = flags
        self._log = open(self._log_path, "wb")
        self._start("grpc://127.0.0.1:0")

    def _start(self, listen: str) -> None:
        self._port_file.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [server_binary(), "--listen", listen, "--port-file", self._port_file,
             *([] if "--log-level" in self._flags else ["--log-level", "warning"]), *self._flags], stdout=self._log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 30
        while not self._port_file.exists():
            assert self.process.poll() is None, self._log_path.read_text()
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.02)
        self.address = self._port_file.read_text().split()[0]

    def log(self) -> str:
        return self._log_path.read_text()

    def kill_and_restart(self) -> None:
        """SIGKILL, then another process at the same address."""
        self.process.kill()
        self.process.wait()
        self._start(self.address)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture
def servers(tmp_path):
    """Starts shard servers: servers(2) returns two of them; with durable=True they have data directories, server.data."""
    if not server_binary().exists():
        pytest.skip(f"{server_binary()} is not built")
    running = []

    def start(count: int = 1, durable: bool = False) -> list[Server]:
        new = []
        for name in (f"server-{len(running) + i}" for i in range(count)):
            data = tmp_path / f"{name}-data"
            new.append(Server(tmp_path, name, *(["--data-dir", data] if durable else [])))
            new[-1].data = data
        running.extend(new)
        return new

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def addresses(servers):
    """Addresses of new shard servers: addresses(2)."""
    return lambda count=1: [server.address for server in servers(count)]


@pytest.fixture
def closed_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
