"""Calls that no Gradwire client makes, and that any program can make."""

from __future__ import annotations

import grpc
import pytest


@pytest.mark.ci
def test_garbage_is_refused_and_rounds_go_on(victim, rpc):
    server = victim()
    server.train()
    with server.channel() as channel:
        for path in ("/gradwire.v1.Worker/Join", "/gradwire.v1.Operator/CreateJob", "/gradwire.v1.Replication/Fence",
                     "/gradwire.v1.Peer/Exchange", "/gradwire.v1.Worker/NoSuchMethod"):
            call = channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
            for garbage in (b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f", bytes(1 << 20)):
                with pytest.raises(grpc.RpcError) as refused:
                    call(garbage, timeout=20)
                assert refused.value.code() != grpc.StatusCode.DEADLINE_EXCEEDED, path
    server.assert_unharmed("Join refused: INVALID_ARGUMENT: 64 bytes are not a gradwire.v1.JoinRequest")


def test_streams_that_end_before_they_begin(victim, rpc):
    server = victim()
    server.train()
    with server.channel() as channel:
        worker = rpc.Worker(channel)
        for _ in range(50):
            with pytest.raises(grpc.RpcError):
                list(worker.Push(iter([rpc.worker.PushMessage(frame=b"GWFR" + bytes(60))]), timeout=20))
            with pytest.raises(grpc.RpcError):
                list(worker.Pull(iter([rpc.worker.PullRequest(kind=rpc.worker.PULL_UPDATE, bucket_end=1 << 31)]), timeout=20))
    server.assert_unharmed("push stream refused: INVALID_ARGUMENT: the first message of a Push stream must carry")
