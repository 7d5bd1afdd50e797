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

    def __init__(self, folder: pathlib.Path, name: str):
        port_file = folder / f"{name}.addresses"
        self._log = open(folder / f"{name}.log", "wb")
        self.process = subprocess.Popen(
            [server_binary(), "--listen", "grpc://127.0.0.1:0", "--port-file", port_file, "--log-level", "warning"],
            stdout=self._log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 30
        while not port_file.exists():
            assert self.process.poll() is None, (folder / f"{name}.log").read_text()
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.02)
        self.address = port_file.read_text().split()[0]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture
def servers(tmp_path):
    """Starts shard servers: servers(2) returns two of them."""
    if not server_binary().exists():
        pytest.skip(f"{server_binary()} is not built")
    running = []

    def start(count: int = 1) -> list[Server]:
        new = [Server(tmp_path, f"server-{len(running) + i}") for i in range(count)]
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
