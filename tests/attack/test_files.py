"""Other users of the machine: links where the server writes, files that they might read, ports that they might reach."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import stat
import subprocess
import time

import pytest

import cluster

_PATIENCE_S = 60.0
_PORT = 7070  # the default's


def modes(folder: pathlib.Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


def test_port_file_follows_no_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("do not touch")
    for name in ("addresses", "addresses.tmp"):
        (tmp_path / name).symlink_to(precious)
    process = cluster.Process(tmp_path / "log", [cluster.BIN / "gradwire-server", "--listen", "grpc://127.0.0.1:0",
                                                 "--port-file", tmp_path / "addresses", "--backend", "cpu"])
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while (tmp_path / "addresses").is_symlink():
            assert process.running, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, "the port file is not written"
            time.sleep(0.01)
        assert (tmp_path / "addresses").read_text().startswith("grpc://127.0.0.1:")
        assert precious.read_text() == "do not touch"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["addresses", "addresses.tmp", "log", "precious"]
    finally:
        process.kill()


def test_nobody_else_reads_parameters(tmp_path, victim):
    server = victim(durable=True)
    server.train()
    server.restart()
    server.assert_unharmed()
    found = modes(tmp_path / "data")
    assert any(name.endswith(".journal") for name in found)
    assert "LINEAGE" in found
    for name, mode in found.items():
        assert mode in (0o600, 0o700), f"{name} has mode {mode:o}"


@pytest.mark.parametrize("taken", [False, True])
def test_listens_on_this_machine_alone_unless_told(tmp_path, taken):
    help_text = subprocess.run([cluster.BIN / "gradwire-server", "--help"], capture_output=True, text=True, check=True,
                               timeout=_PATIENCE_S).stdout
    assert "Default grpc://127.0.0.1:7070" in " ".join(help_text.split())
    with contextlib.ExitStack() as stack:
        if taken:
            with contextlib.suppress(OSError):  # another program has it: as good
                stack.enter_context(socket.create_server(("127.0.0.1", _PORT)))
        process = cluster.Process(tmp_path / "log", [cluster.BIN / "gradwire-server", "--port-file",
                                                     tmp_path / "addresses", "--backend", "cpu"])
        stack.callback(process.kill)
        deadline = time.monotonic() + _PATIENCE_S
        while process.running and not (tmp_path / "addresses").exists():
            assert time.monotonic() < deadline, "the server does not serve"
            time.sleep(0.01)
        if process.running:
            assert (tmp_path / "addresses").read_text().split() == [f"grpc://127.0.0.1:{_PORT}"]
        else:  # another program of this machine has the port: the server says which address it would have
            log = (tmp_path / "log").read_text()
            assert "cannot start" in log and f"grpc://127.0.0.1:{_PORT}" in log, log
        assert not (taken and process.running), "two programs have one port"
