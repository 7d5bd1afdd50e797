"""Jobs that are made, joined and asked for so that the server, or the job beside, would have to pay for it."""

from __future__ import annotations

import statistics
import threading
import time

import grpc
import pytest

import stranger

_ELEMENTS = 1 << 21  # 8 MiB of parameters
_MIB = 1 << 20


def _spec(rpc, name: str, elements: int = _ELEMENTS, **fields):
    spec = rpc.job.JobSpec(name=name, bucket_bytes=max(4 << 20, 4 * elements), min_workers=1, max_workers=4,
                           lease_ms=600_000, **fields)
    spec.tensors.add(name="t", shape=[elements])
    if not spec.optimizer.kind:
        spec.optimizer.kind = rpc.job.OPTIMIZER_SGD
    return spec


def _initialized(rpc, channel, spec, **how) -> stranger.Stranger:
    worker = stranger.Stranger(rpc, channel, spec, **how)
    worker.join()
    worker.open_push()
    assert worker.initialize(0, spec.tensors[0].shape[0]).outcome == rpc.worker.PUSH_INCLUDED
    return worker


def test_one_frame_that_asks_for_a_thousand_answers(victim, rpc):
    server = victim()
    server.train()
    with server.channel() as channel:
        worker = _initialized(rpc, channel, _spec(rpc, "prey"))
        worker.abstain(0, 0, (rpc.worker.PULL_PARAMS_F32, rpc.worker.PULL_PARAMS_BF16) * 500)
        ended = worker.acks.get(timeout=60)
        assert isinstance(ended, grpc.RpcError) and ended.code() == grpc.StatusCode.INVALID_ARGUMENT, ended
    server.assert_unharmed("push stream refused: INVALID_ARGUMENT: a frame asks 1000 times for answers")
    assert server.resident_bytes < 512 * _MIB


def test_many_streams_of_one_member_that_nobody_reads(victim, rpc):
    server = victim()
    server.train()
    with server.channel() as channel:
        worker = _initialized(rpc, channel, _spec(rpc, "prey"))
        kinds = (rpc.worker.PULL_PARAMS_F32, rpc.worker.PULL_PARAMS_BF16, rpc.worker.PULL_STATE)
        pulls, over = [], threading.Event()

        def requests(kind):
            for _ in range(8):
                yield rpc.worker.PullRequest(open=worker.identity, kind=kind, version=0, bucket_end=1)
            over.wait()

        for i in range(200):
            pulls.append(worker.stub.Pull(requests(kinds[i % 3])))
        for _ in range(20):
            assert server.process.running and server.resident_bytes < 1024 * _MIB
            time.sleep(0.1)
        over.set()
        for pull in pulls:
            pull.cancel()
    server.assert_unharmed("streams open, at most 16 may be")


def test_a_job_of_thousands_of_shards_that_exchange_norms(victim, rpc):
    server = victim()
    server.train()
    with server.channel() as channel:
        for name in ("prey-1", "prey-2", "prey-3"):
            spec = _spec(rpc, name, 64 * 4096, clip_norm=1.0, run_elements=64)  # a run for each shard
            worker = stranger.Stranger(rpc, channel, spec, shard_count=4096, shards=("grpc://127.0.0.1:1",) * 4096)
            worker.join()
            worker.open_push()
            assert worker.initialize(0, 64).outcome == rpc.worker.PUSH_INCLUDED
            for round_ in (0, 1):
                worker.abstain(0, round_)
        for _ in range(30):
            assert server.process.running and server.threads < 200
            time.sleep(0.1)
    server.assert_unharmed("at grpc://127.0.0.1:1 cannot be told of norms, and the round waits for it")


@pytest.mark.ci
def test_an_upload_that_is_larger_than_its_job(victim, rpc):
    server = victim()
    server.train()
    with server.channel() as channel:
        worker = stranger.Stranger(rpc, channel, _spec(rpc, "prey", 1 << 16))
        worker.join()
        worker.open_push()
        worker.learn_digest(0)
        segments = tuple(stranger.zeros_segment(0, 1 << 16) for _ in range(8))
        for number in range(64):  # 2 MiB each, of a bucket of 256 KiB
            worker.send(worker.chunk(stranger.INITIALIZE, 0, 0, 0, segments, number))
        refused = worker.acks.get(timeout=60)
        assert refused.outcome == rpc.worker.PUSH_REFUSED and "take at most" in refused.message, refused
    server.assert_unharmed("[warning] refused: ", "take at most")
    assert server.resident_bytes < 512 * _MIB


def test_names_that_take_long_to_match(victim, rpc):
    server = victim()
    server.train()
    spec = rpc.job.JobSpec(name="prey", optimizer=rpc.job.OptimizerSpec(kind=rpc.job.OPTIMIZER_SGD))
    for i in range(6000):
        spec.tensors.add(name="a" * 200 + str(i), shape=[1])
    for i in range(1000):
        spec.rules.add(pattern="*a*a*a*a*a*a*a*a*b" + str(i), codec="dense:fp32")
    with server.channel() as channel:
        with pytest.raises(grpc.RpcError) as refused:
            rpc.Operator(channel).CreateJob(rpc.operator.CreateJobRequest(spec=spec, shard_count=1), timeout=60)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, refused.value
    assert "comparisons" in refused.value.details()
    server.assert_unharmed("CreateJob refused: INVALID_ARGUMENT", "comparisons")


def test_digests_for_many_callers(victim, rpc):
    server = victim()
    server.train("--large")  # every round has other parameters, and their digest is work
    asking, over = threading.Event(), threading.Event()
    answers: set[str] = set()

    def ask(job: str) -> None:
        with server.channel() as channel:
            while not over.is_set():
                if not asking.wait(0.05):
                    continue
                request = rpc.operator.DescribeJobRequest(job=job, digest=True)
                answers.add(rpc.Operator(channel).DescribeJob(request, timeout=60).parameters_sha256)
                over.wait(0.02)  # what is measured is not how fast callers can call

    with server.channel() as channel:
        _initialized(rpc, channel, _spec(rpc, "prey", 4 * _ELEMENTS))
    callers = [threading.Thread(target=ask, args=(job,)) for job in ("prey", "bystander") * 4]
    for caller in callers:
        caller.start()
    alone, beside = [], []
    for _ in range(7):  # in turns: a machine that others use is slow in both
        alone.append(server.rounds_per_s(1.0))
        asking.set()
        beside.append(server.rounds_per_s(1.0))
        asking.clear()
    over.set()
    for caller in callers:
        caller.join()
    assert len(answers) > 10, "nobody was answered"
    assert statistics.median(beside) > statistics.median(alone) / 2, f"rounds a second: {alone}, with callers {beside}"
    server.assert_unharmed()


def test_memory_of_a_job_that_is_gone_goes_back(victim, rpc):
    server = victim()
    spec = rpc.job.JobSpec(name="prey", optimizer=rpc.job.OptimizerSpec(kind=rpc.job.OPTIMIZER_SGD), lease_ms=600_000,
                           bucket_bytes=4 * _ELEMENTS)
    for i in range(24):
        spec.tensors.add(name=f"t{i}", shape=[_ELEMENTS])
    with server.channel() as channel:
        operator = rpc.Operator(channel)
        worker = stranger.Stranger(rpc, channel, spec)
        worker.join()
        worker.open_push()
        before = server.resident_bytes
        for bucket in range(24):
            worker.upload(bucket, _ELEMENTS, unfinished=True)
        worker.learn_digest(0)  # behind them
        held = server.resident_bytes
        assert held > before + 100 * _MIB
        operator.DeleteJob(rpc.operator.DeleteJobRequest(job="prey"), timeout=60)
        deadline = time.monotonic() + 60
        while server.resident_bytes > before + (held - before) / 2:
            assert time.monotonic() < deadline, f"{server.resident_bytes} of {held} bytes stay, {before} were there before"
            time.sleep(0.1)
        assert operator.DescribeShard(rpc.operator.DescribeShardRequest(), timeout=60).memory_bytes == 0
    server.assert_unharmed("job prey deleted")
