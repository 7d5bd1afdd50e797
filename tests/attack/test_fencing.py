"""Strangers that want a healthy server to believe that it was replaced, or its standbys to stop its rounds."""

from __future__ import annotations

import threading
import time

import grpc
import pytest

import victim as victims
from standby import Standby

LARGE = (1 << 63) + 5
EPOCHS = (LARGE, (1 << 64) - 1, (7 << 32) + 1)
_PATIENCE_S = 60.0


def refused(call, *arguments) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments, timeout=20)
    assert error.value.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN), error.value
    return error.value.code()


def shard(rpc, channel):
    return rpc.Operator(channel).DescribeShard(rpc.operator.DescribeShardRequest(), timeout=20)


def resume(rpc, job: str, epoch: int, lineage: int):
    spec = rpc.job.JobSpec(name=job, tensors=[rpc.job.TensorSpec(name="weight", shape=[8])])
    spec.optimizer.kind = rpc.job.OPTIMIZER_SGD
    return rpc.worker.JoinRequest(identity=rpc.worker.WorkerIdentity(job=job, worker="stranger", incarnation=7), spec=spec,
                                  shard_count=1, resume=True, known_epoch=epoch, known_lineage=lineage)


def fence_in_every_way(rpc, channel) -> None:
    """What anybody can say who does not know the key of the lineage."""
    lineage = shard(rpc, channel).lineage
    worker, replication = rpc.Worker(channel), rpc.Replication(channel)
    for epoch in EPOCHS:
        for known in (0, 77, lineage):
            for job in ("bystander", "no-such-job"):
                refused(worker.Join, resume(rpc, job, epoch, known))
        for key in (b"", b"k" * 16, lineage.to_bytes(8, "little") * 2, b"k" * (1 << 20)):
            for name in ("stranger", "n" * 5000, "a\nfenced 9 b"):
                request = rpc.replication.FenceRequest(server_epoch=epoch, name=name, lineage_key=key)
                assert refused(replication.Fence, request) in (grpc.StatusCode.PERMISSION_DENIED,
                                                               grpc.StatusCode.INVALID_ARGUMENT)
        # Its streams end, or follow like any other: it is the caller's own matter.
        standby = Standby(rpc, channel, known_epoch=epoch, lineage=lineage)
        assert standby.follow().code() == grpc.StatusCode.UNAVAILABLE
    assert not shard(rpc, channel).fenced


@pytest.mark.ci
def test_strangers_cannot_fence_a_server(victim, rpc):
    server = victim(durable=True)
    server.train()
    with server.channel() as channel:
        fence_in_every_way(rpc, channel)
    server.assert_unharmed("Fence refused: PERMISSION_DENIED", "Join refused: UNAVAILABLE", "has replaced this one")
    server.restart()
    with server.channel() as channel:
        assert not shard(rpc, channel).fenced
    server.assert_unharmed()


def test_epoch_of_a_server_without_a_directory_says_nothing_of_one_with(tmp_path, rpc):
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with victims.Victim(tmp_path / "first") as first, first.channel() as channel:
        address = first.address
        before = shard(rpc, channel)
    with victims.Victim(tmp_path / "second", durable=True, listen=address) as server:
        with server.channel() as channel:
            for epoch in (before.server_epoch, *EPOCHS):
                assert refused(rpc.Worker(channel).Join,
                               resume(rpc, "job", epoch, before.lineage)) == grpc.StatusCode.NOT_FOUND
            assert not shard(rpc, channel).fenced
        server.assert_unharmed("Join refused: NOT_FOUND")
        server.train()
        server.restart()
        with server.channel() as channel:
            assert not shard(rpc, channel).fenced
        server.assert_unharmed()


@pytest.mark.ci
def test_standbys_are_bounded(victim, rpc):
    server = victim("--max-standbys", 3, durable=True)
    server.train()
    before = server.threads
    with server.channel() as channel:
        standbys = [Standby(rpc, channel, name=f"standby-{n}") for n in range(400)]
        ends: list = []
        threads = [threading.Thread(target=lambda s=s: ends.append(s.follow()), daemon=True) for s in standbys]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _PATIENCE_S
        while len(ends) < len(standbys) - 3:
            assert time.monotonic() < deadline, f"{len(ends)} streams ended"
            time.sleep(0.05)
        assert server.threads < before + 50
        codes = {end.code() for end in ends}
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes, codes
        server.assert_unharmed("--max-standbys is 3")
        for standby in standbys:
            standby.end()
    server.assert_unharmed()


def test_standby_that_reads_nothing_takes_no_memory(victim, rpc):
    limit = 1 << 20
    server = victim("--standby-queue-bytes", limit, durable=True)
    server.train("--large")
    with server.channel() as channel:
        idle = [Standby(rpc, channel, name=f"idle-{n}") for n in range(4)]
        before = server.resident_bytes
        deadline = time.monotonic() + _PATIENCE_S
        while "it cannot keep up" not in server.log:
            assert time.monotonic() < deadline, "the standbys are not dropped"
            for standby in idle:
                standby.beat()
            time.sleep(0.1)
        server.assert_unharmed("it cannot keep up", rounds=20)
        # What the transport holds for each of the streams comes to it.
        assert server.resident_bytes < before + (256 << 20)


@pytest.mark.ci
def test_standby_that_falls_silent_again_and_again_does_not_hold_the_rounds(victim, rpc):
    server = victim("--follower-timeout-ms", 500, durable=True)
    server.train()
    with server.channel() as channel:
        first = Standby(rpc, channel, name="first", takes=True)
        reader = first.follow_beside()
        assert first.in_sync.wait(_PATIENCE_S)
        first.fall_silent()
        reader.join(_PATIENCE_S)
        assert not reader.is_alive(), "it is not dropped"
        server.assert_unharmed("rounds begin to wait for no standby during the next")
        # Again: it takes every record, and is not waited for.
        for name in ("second", "third"):
            again = Standby(rpc, channel, name=name, takes=True)
            again.follow_beside()
            deadline = time.monotonic() + _PATIENCE_S
            while again.records < 20:
                assert time.monotonic() < deadline, f"{again.records} records came"
                time.sleep(0.01)
            job = rpc.Operator(channel).DescribeJob(rpc.operator.DescribeJobRequest(job="bystander"), timeout=20)
            assert [f.in_sync for f in job.followers if f.follower == name] == [False]
            again.fall_silent()
            server.assert_unharmed(rounds=20)
            again.end()
