"""Fixtures: what `cmake --install` leaves, and servers of the programs under test."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("GRADWIRE_BIN", ROOT / "build/release/bin")).parent
# Of an outsider: nothing in it leads to this repository.
OUTSIDE = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "GRADWIRE_BIN")}


def run(*command: object, cwd: pathlib.Path | None = None, timeout: float = 1500, **environment: str) -> str:
    """Runs a command as an outsider; returns what it printed."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, env={**OUTSIDE, **environment}, timeout=timeout,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-6000:]}"
    return done.stdout


@contextlib.contextmanager
def serving(program: pathlib.Path, folder: pathlib.Path, shards: int = 2) -> Iterator[list[str]]:
    """The addresses of shard servers, which end well when they are told to."""
    files = [folder / f"addresses-{shard}" for shard in range(shards)]
    for file in files:
        file.unlink(missing_ok=True)
    servers = [subprocess.Popen([program, "--listen", "grpc://127.0.0.1:0", "--port-file", file], env=OUTSIDE)
               for file in files]
    try:
        deadline = time.monotonic() + 30
        for server, file in zip(servers, files):
            while not file.exists():
                assert server.poll() is None and time.monotonic() < deadline, f"{program} did not come up"
                time.sleep(0.02)
        yield [file.read_text().strip() for file in files]
        for server in servers:
            server.send_signal(signal.SIGTERM)
        assert [server.wait(30) for server in servers] == [0] * shards
    finally:
        for server in servers:
            server.kill()
            server.wait()


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An installed Gradwire, moved once: nothing in it may know where it was."""
    folder = tmp_path_factory.mktemp("install")
    run("cmake", "--install", BUILD, "--prefix", folder / "first")
    return (folder / "first").rename(folder / "prefix")
