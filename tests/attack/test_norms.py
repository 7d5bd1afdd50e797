"""Strangers that would have the shards of a job look for each other elsewhere."""

from __future__ import annotations

import contextlib
import socket

import grpc
import pytest

import stranger
import victim as victims


@pytest.fixture
def elsewhere():
    """A port of the stranger's, and whether anybody has called there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)

        def called() -> bool:
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                return True
            return False

        yield f"grpc://127.0.0.1:{listener.getsockname()[1]}", called


def _bystander(rpc, channel):
    return rpc.Operator(channel).DescribeJob(rpc.operator.DescribeJobRequest(job="bystander"), timeout=20).spec


@pytest.mark.ci
def test_joins_that_are_refused_move_no_shard(tmp_path, rpc, elsewhere):
    address, called = elsewhere
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    with victims.Victim(tmp_path / "0") as first, victims.Victim(tmp_path / "1") as second:
        first.train("--optimizer", "lans", servers=f"{first.address},{second.address}")
        for server in (first, second):
            with server.channel() as channel:
                spec = _bystander(rpc, channel)
                other = type(spec)()
                other.CopyFrom(spec)
                other.clip_norm += 1
                for wanted in (spec, other):
                    for incarnation in range(1, 20):
                        worker = stranger.Stranger(rpc, channel, wanted, incarnation=incarnation, shard_count=2,
                                                   shards=(address, address))
                        with pytest.raises(grpc.RpcError) as refused:
                            worker.join()
                        assert refused.value.code() != grpc.StatusCode.DEADLINE_EXCEEDED
        first.assert_unharmed("Join refused: ", rounds=30)
        second.assert_unharmed("Join refused: ")
        assert not called(), "a shard looked for the other one where a stranger said"
