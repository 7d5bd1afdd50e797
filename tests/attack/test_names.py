"""Names that are more than names: new lines for the log, commands for the terminal, or megabytes."""

from __future__ import annotations

import grpc
import pytest

from standby import Standby

FORGED = "[2030-01-01 00:00:00.000] [error] all is lost"
BAD = [f"a\n{FORGED}", "a\x1b[2J", "a\x9b31mb", "a\u202eb", "a\x00b", "n" * 100_000]


def expect_refused_everywhere(rpc, channel, bad):
    worker = rpc.Worker(channel)
    # First: of what is refused with one code the log tells one in a while.
    assert Standby(rpc, channel, name=bad).follow().code() == grpc.StatusCode.INVALID_ARGUMENT
    expect_refused(lambda: worker.Join(join(rpc, bad, "weight"), timeout=20))
    expect_refused(lambda: worker.Join(join(rpc, "other", bad), timeout=20))
    expect_refused(lambda: worker.Join(join(rpc, "other", "weight", worker=bad), timeout=20))
    expect_refused(lambda: worker.Join(join(rpc, "other", "weight", codec=bad), timeout=20))
    identity = rpc.worker.WorkerIdentity(job=bad, worker=bad, incarnation=1)
    expect_refused(lambda: list(worker.Push(iter([rpc.worker.PushMessage(open=identity)]), timeout=20)))
    expect_refused(lambda: list(worker.Pull(iter([rpc.worker.PullRequest(open=identity)]), timeout=20)))
    expect_refused(lambda: rpc.Operator(channel).DeleteJob(rpc.operator.DeleteJobRequest(job=bad), timeout=20))
    fence = rpc.replication.FenceRequest(server_epoch=1 << 40, name=bad)
    expect_refused(lambda: rpc.Replication(channel).Fence(fence, timeout=20))


@pytest.mark.ci
def test_names_reach_no_log_and_no_status_as_they_are(victim, rpc):
    server = victim(durable=True)
    server.train()
    with server.channel() as channel:
        for bad in BAD:
            expect_refused_everywhere(rpc, channel, bad)
        jobs = rpc.Operator(channel).ListJobs(rpc.operator.ListJobsRequest(), timeout=20).jobs
        assert {job.job for job in jobs} <= {"bystander", "other"}
    server.assert_unharmed("standby refused: INVALID_ARGUMENT", "push stream refused: NOT_FOUND")
    lines = server.log.split("\n")
    assert not [line for line in lines if line.startswith(FORGED)]
    assert max(map(len, lines)) < 20_000
    for line in lines:
        assert line.isprintable(), repr(line)


def join(rpc, job: str, tensor: str, worker: str = "stranger", codec: str = ""):
    spec = rpc.job.JobSpec(name=job, codec=codec, tensors=[rpc.job.TensorSpec(name=tensor, shape=[8])])
    spec.optimizer.kind = rpc.job.OPTIMIZER_SGD
    return rpc.worker.JoinRequest(identity=rpc.worker.WorkerIdentity(job=job, worker=worker, incarnation=7), spec=spec,
                                  shard_count=1)


def expect_refused(call) -> None:
    """With a message that is short and can be shown."""
    with pytest.raises(grpc.RpcError) as error:
        call()
    assert error.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND,
                                  grpc.StatusCode.PERMISSION_DENIED), error.value
    assert len(error.value.details()) < 4000
    assert error.value.details().isprintable(), error.value.details()
