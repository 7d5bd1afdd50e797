"""A shard server for each test."""

import os
import pathlib
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("GRADWIRE_BIN", ROOT / "build/release/bin"))


@pytest.fixture
def server(tmp_path):
    ports = tmp_path / "addresses"
    process = subprocess.Popen([BIN / "gradwire-server", "--listen", "grpc://127.0.0.1:0", "--port-file", ports])
    try:
        end = time.monotonic() + 30
        while not ports.exists():
            assert process.poll() is None and time.monotonic() < end, "the server did not come up"
            time.sleep(0.02)
        yield ports.read_text().split()[0]
    finally:
        process.kill()
        process.wait()
