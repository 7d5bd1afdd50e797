"""Servers that get no thread and no memory for what a stranger asks, and peers behind a network that flips bits."""

from __future__ import annotations

import contextlib
import pathlib
import re
import resource
import threading
import time

import grpc
import pytest

import stranger
from proxy import Proxy
from standby import Standby

_MIB = 1 << 20


def _address_space(pid: int) -> int:
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def no_more_address_space(server, spare: int):
    """What asks for more than `spare` bytes is refused by the system."""
    pid = server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (_address_space(pid) + spare, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, before)


@pytest.mark.ci
@pytest.mark.parametrize("scheme", ["grpc", "tcp"])
def test_threads_that_do_not_start_are_refusals(victim, rpc, scheme):
    # There is memory for everything but a thread's stack.
    server = victim(durable=True, listen=f"{scheme}://127.0.0.1:0 grpc://127.0.0.1:0", address_space=256 << 30,
                    thread_stack=1 << 30)
    server.train()
    refused = 0
    with server.channel() as channel, no_more_address_space(server, 512 * _MIB):
        for number in range(40):
            spec = rpc.job.JobSpec(name=f"prey-{number}", clip_norm=1.0, min_workers=1, max_workers=4, lease_ms=600_000,
                                   optimizer=rpc.job.OptimizerSpec(kind=rpc.job.OPTIMIZER_SGD),
                                   tensors=[rpc.job.TensorSpec(name="t", shape=[1 << 16])])
            worker = stranger.Stranger(rpc, channel, spec, shard_count=2, shards=("grpc://127.0.0.1:1",) * 2)
            try:
                worker.join(timeout=20)
            except grpc.RpcError as error:
                assert error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE), error
                refused += 1
        standbys = [Standby(rpc, channel, name=f"standby-{n}") for n in range(6)]
        for standby in standbys:
            standby.follow_beside()
        assert server.process.running
    for standby in standbys:
        standby.end()
    assert refused > 0, "there was room for every one of them"
    server.assert_unharmed("Join refused: RESOURCE_EXHAUSTED")


def test_memory_of_jobs_without_frames_is_counted(victim, rpc):
    limit, jobs = 64 * _MIB, 60
    server = victim("--memory-limit-bytes", limit)
    server.train()
    before = server.resident_bytes
    refused = 0
    with server.channel() as channel:
        for number in range(jobs):
            spec = rpc.job.JobSpec(name=f"prey-{number}", optimizer=rpc.job.OptimizerSpec(kind=rpc.job.OPTIMIZER_ADAMW),
                                   run_elements=64, bucket_bytes=4 * _MIB,
                                   tensors=[rpc.job.TensorSpec(name="t", shape=[4 << 20])])
            try:
                rpc.Operator(channel).CreateJob(rpc.operator.CreateJobRequest(spec=spec, shard_count=4096), timeout=60)
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error
                assert "(--memory-limit-bytes) are taken by other jobs" in error.details(), error
                refused += 1
    assert server.resident_bytes < before + 4 * limit
    server.assert_unharmed("CreateJob refused: RESOURCE_EXHAUSTED")
    made = re.findall(r"job prey-\d+ created: .* up to (\d+) bytes .*shard map (\d+)", server.log)
    assert len(made) + refused == jobs
    assert sum(int(total) for total, _ in made) < limit
    # Parameters, sums and frames of all sixty would have had room: what is refused here is what their shard maps take.
    assert refused > 0 and sum(int(total) - int(shard_map) for total, shard_map in made) * jobs < limit / 2 * len(made)


def test_large_jobs_do_not_hold_the_join_of_another(victim, rpc):
    server = victim()
    server.train()
    made = []

    def create(number: int) -> None:
        spec = rpc.job.JobSpec(name=f"large-{number}", optimizer=rpc.job.OptimizerSpec(kind=rpc.job.OPTIMIZER_SGD),
                               run_elements=64, tensors=[rpc.job.TensorSpec(name="t", shape=[16 << 20])])
        with server.channel() as channel:
            rpc.Operator(channel).CreateJob(rpc.operator.CreateJobRequest(spec=spec, shard_count=4096), timeout=120)
        made.append(number)

    creators = [threading.Thread(target=create, args=(n,), daemon=True) for n in range(6)]
    for creator in creators:
        creator.start()
    time.sleep(0.2)
    with server.channel() as channel:
        spec = rpc.job.JobSpec(name="small", optimizer=rpc.job.OptimizerSpec(kind=rpc.job.OPTIMIZER_SGD), min_workers=1,
                               max_workers=4, lease_ms=600_000, tensors=[rpc.job.TensorSpec(name="t", shape=[8])])
        stranger.Stranger(rpc, channel, spec).join(timeout=20)
    server.assert_unharmed()
    for creator in creators:
        creator.join(120)
        assert not creator.is_alive()
    assert len(made) == len(creators), f"of the large jobs only {sorted(made)} were made"
    server.assert_unharmed("job small created", *(f"job large-{number} created" for number in made))


@pytest.mark.parametrize("scheme", ["grpc", "tcp"])
def test_a_network_that_flips_bits_ends_no_worker(victim, scheme):
    server = victim(durable=True, listen=f"{scheme}://127.0.0.1:0")
    network = Proxy(server.address)
    server.train(servers=network.address)
    for seed in range(8):
        network.flip(seed)
        server.assert_unharmed(rounds=20)
    assert network.flipped == 8
    server.assert_unharmed("is back, incarnation")
