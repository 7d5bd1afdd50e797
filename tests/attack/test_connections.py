"""Connections in numbers, idle or half spoken: they cost the server what it has set aside for strangers, nobody else."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import time

import pytest

import cluster

_DESCRIPTORS = 1024
_CROWD = 1100
_MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_descriptors():
    """This process holds the other ends."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < _CROWD + 200:
        pytest.skip(f"this process may have {hard} descriptors only")


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _table()


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ _CRC[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


_PREFACE = struct.pack("<8sHH", b"GWIRETCP", 2, 2)
_PREFACE += struct.pack("<I", _crc32c(_PREFACE))


def _packet(kind: int, control: bytes, body: bytes = b"", announced: int | None = None) -> bytes:
    """As proto/TCP.md says; kinds 1 (CALL), 3 (OPEN), 4 (MESSAGE)."""
    check = _crc32c(control if kind == 4 else control + body)
    header = struct.pack("<BBHIII", kind, 0, 0, len(control), len(body) if announced is None else announced, check)
    return header + struct.pack("<I", _crc32c(header)) + control + body


def _connect(server) -> socket.socket:
    host, port = server.target.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20)


def _serves(server, rpc) -> None:
    """A stranger's call is answered."""
    if server.address.startswith("grpc"):
        deadline = time.monotonic() + 60
        while True:
            try:
                with server.channel() as channel:
                    rpc.Operator(channel).DescribeShard(rpc.operator.DescribeShardRequest(), timeout=5)
                return
            except Exception:
                assert time.monotonic() < deadline, f"it does not answer any more: {server.log[-2000:]}"
    with _connect(server) as one:
        one.sendall(_PREFACE + _packet(1, b"gradwire.v1.Operator/DescribeShard"))
        assert len(one.recv(64)) > 0


@pytest.mark.parametrize("scheme", ["grpc", "tcp"])
def test_more_connections_than_descriptors(victim, rpc, scheme):
    server = victim(descriptors=_DESCRIPTORS, durable=True, listen=f"{scheme}://127.0.0.1:0")
    server.train()
    with contextlib.ExitStack() as stack:
        for _ in range(_CROWD):
            with contextlib.suppress(OSError):
                stack.enter_context(_connect(server))
        server.assert_unharmed()  # rounds go on, and their journal
        _serves(server, rpc)
        server.train(job="newcomer")  # needs a directory and a journal of its own
        cluster.run_tool("snapshot", "bystander", "--servers", server.address)
        server.assert_unharmed("job newcomer created", "job bystander: snapshot of version")
    _serves(server, rpc)
    server.assert_unharmed()


@pytest.mark.ci
def test_idle_callers_make_room(victim, rpc):
    server = victim("--max-connections", "100", listen="tcp://127.0.0.1:0")
    server.train()
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            one = stack.enter_context(_connect(server))
            one.sendall(_PREFACE + _packet(1, b"gradwire.v1.Operator/DescribeShard"))
            assert len(one.recv(64)) > 0, "it was refused"
        server.assert_unharmed()


def test_half_sent_messages(victim):
    limit = 64 * _MIB
    server = victim("--receive-limit-bytes", str(limit), listen="tcp://127.0.0.1:0")
    server.train()
    before = server.resident_bytes
    half = _packet(4, b"", announced=7 * _MIB) + bytes(4 * _MIB)
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            one = stack.enter_context(_connect(server))
            with contextlib.suppress(OSError):
                one.sendall(_PREFACE + _packet(3, b"gradwire.v1.Worker/Push") + half)
        server.assert_unharmed("--receive-limit-bytes")
        assert server.resident_bytes - before < 4 * limit
