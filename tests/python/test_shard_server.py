"""A shard server in this process: ShardServer, and own_shards over it."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import gradwire
from conftest import ROOT, server_binary
from test_session import in_parallel, make_job, make_parameters

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def train(servers, job, count=5, worker="w", scale=1.0):
    """The digest at the end."""
    parameters = make_parameters()
    with gradwire.join(servers, job, parameters, worker, round_timeout=60) as session:
        for step in range(count):
            session.exchange([np.full_like(p, scale * (step + 1)) for p in parameters], lr=0.01)
        return session.digest()


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
@pytest.mark.parametrize("codec", ["dense:fp32", "tagc:density=0.1", "thc:bits=4"])
def test_the_bits_are_those_of_a_daemon(addresses, transport, codec):
    expected = train(addresses(2), make_job("bits", codec=codec))
    with gradwire.ShardServer(f"{transport}://127.0.0.1:0") as one, gradwire.ShardServer(f"{transport}://127.0.0.1:0") as two:
        assert train([*one.addresses, *two.addresses], make_job("bits", codec=codec)) == expected


def connections(address):
    """How many there are to it, in this network namespace."""
    port = f":{int(address.rsplit(':', 1)[1]):04X}"
    lines = [line for family in ("tcp", "tcp6") for line in pathlib.Path("/proc/net", family).read_text().splitlines()]
    return sum(line.split()[2].endswith(port) for line in lines)


def test_what_travels_within_a_process_crosses_no_network(addresses):
    (daemon,) = addresses(1)
    for servers, expected in (([daemon], True), (None, False)):
        with gradwire.ShardServer("tcp://127.0.0.1:0") as server:
            servers = servers or server.addresses
            with gradwire.join(servers, make_job("within"), make_parameters(), "w") as session:
                session.exchange([np.ones_like(p) for p in make_parameters()], lr=0.01)
                assert (connections(servers[0]) > 0) == expected


def test_others_reach_it_by_the_network():
    with gradwire.ShardServer(flags=["--listen", "tcp://127.0.0.1:0"]) as server:
        assert [address.split(":")[0] for address in server.addresses] == ["grpc", "tcp"]
        job = make_job("both", workers=3)
        program = ("import sys, gradwire; sys.path.insert(0, sys.argv[1]); from test_shard_server import *; "
                   "print(train([sys.argv[2]], make_job('both', workers=3), worker=sys.argv[2].split(':')[0]))")
        others = [subprocess.Popen([sys.executable, "-c", program, os.path.dirname(__file__), address], env=ENVIRONMENT,
                                   stdout=subprocess.PIPE, text=True) for address in server.addresses]
        digest = train(server.addresses[:1], job)
        assert [other.communicate(timeout=60)[0].strip() for other in others] == [digest, digest]


def test_it_waits_until_workers_have_left():
    server, job = gradwire.ShardServer(), make_job("slow")
    joined, stopped = threading.Event(), threading.Event()

    def work(worker):
        if worker == 1:
            joined.wait(30)
            server.stop()
            return stopped.set()
        parameters = make_parameters()
        with gradwire.join(server.addresses, job, parameters, "w") as session:
            joined.set()
            for _ in range(10):
                time.sleep(0.05)
                session.exchange([np.ones_like(p) for p in parameters], lr=0.01)
            assert not stopped.is_set()

    in_parallel(2, work)
    assert stopped.is_set()
    server.stop()  # nothing more


def test_it_does_not_wait_for_ever():
    server = gradwire.ShardServer()
    session = gradwire.join(server.addresses, make_job("stays"), make_parameters(), "w")
    begin = time.monotonic()
    server.stop(wait=0.2)
    assert 0.1 < time.monotonic() - begin < 30
    with pytest.raises(gradwire.Unavailable):
        session.leave(drain=False)


def test_an_exception_ends_it_at_once():
    with pytest.raises(KeyError), gradwire.ShardServer() as server:
        session = gradwire.join(server.addresses, make_job("raises"), make_parameters(), "w")
        raise KeyError
    host, port = server.addresses[0].removeprefix("grpc://").split(":")
    with socket.socket() as free:
        free.bind((host, int(port)))
    with pytest.raises(gradwire.Unavailable):
        session.leave(drain=False)


def test_a_data_directory_is_gone_on_with(tmp_path):
    job, ends = make_job("kept", durability="fsync"), []
    for _ in range(2):
        with gradwire.ShardServer(data_dir=tmp_path) as server, \
                gradwire.join(server.addresses, job, make_parameters(), "w") as session:
            ends.append(session.version)
            session.exchange([np.ones_like(p) for p in make_parameters()], lr=0.01)
    assert ends[1] == ends[0] + 2


def test_a_daemon_may_come_in_its_place(tmp_path):
    job, parameters = make_job("moves", durability="fsync"), make_parameters()
    server = gradwire.ShardServer("tcp://127.0.0.1:0", data_dir=tmp_path)
    with gradwire.join(server.addresses, job, parameters, "w") as session:
        session.exchange([np.ones_like(p) for p in parameters], lr=0.01)
        before = session.version
        server.stop(0)
        daemon = subprocess.Popen([server_binary(), "--listen", server.addresses[0], "--data-dir", tmp_path])
        try:
            session.exchange([np.ones_like(p) for p in parameters], lr=0.01)
            assert session.version == before + 1
            session.leave()
        finally:
            daemon.kill()
            daemon.wait()


def test_what_it_refuses(capfd):
    with pytest.raises(ValueError, match="flags='--max-jobs=1': a list of flags, each a string"):
        gradwire.ShardServer(flags="--max-jobs=1")
    with pytest.raises(ValueError, match="has printed why"):
        gradwire.ShardServer(flags=["--no-such-flag"])
    assert "--no-such-flag" in capfd.readouterr().err
    with pytest.raises(ValueError, match='scheme "http" is not known'):
        gradwire.ShardServer("http://127.0.0.1:0")
    with pytest.raises(ValueError, match="--port-file is for other processes"):
        gradwire.ShardServer(flags=["--port-file", "/nowhere"])
    with gradwire.ShardServer() as server, pytest.raises(gradwire.Unavailable, match="in use"):
        gradwire.ShardServer(server.addresses[0])


ENDS = """
import os, sys, numpy as np, gradwire
sys.path.insert(0, sys.argv[1])
from conftest import ROOT, server_binary
from test_session import make_job, make_parameters
server = gradwire.ShardServer("tcp://127.0.0.1:0")
session = gradwire.join(server.addresses, make_job("ends"), make_parameters(), "w")
session.exchange([np.ones_like(p) for p in make_parameters()], lr=0.01)
if (child := os.fork()) == 0:
    assert gradwire._core.describe_job(server.addresses, "ends", 5000)[0][0] == 0  # over the network
    server.stop()  # it is the parent's
    sys.exit(7)
assert os.waitpid(child, 0)[1] == 7 << 8
session.exchange([np.ones_like(p) for p in make_parameters()], lr=0.01)
print("still there")
"""


def test_it_says_what_is_wrong_and_nothing_else(capfd):
    with gradwire.ShardServer() as server:
        train(server.addresses, make_job("silent"))
        assert capfd.readouterr() == ("", "")
        with pytest.raises(gradwire.FailedPrecondition):
            train(server.addresses, make_job("silent", codec="thc:bits=4"))
    told = capfd.readouterr()
    assert told.out == "" and "[warning] Join refused" in told.err
    with gradwire.ShardServer(flags=["--log-level", "info"]) as server:
        train(server.addresses, make_job("told"))
    told = capfd.readouterr()
    assert told.out == "" and "[info] job told created" in told.err


def test_a_process_may_fork_and_end_without_a_word():
    ran = subprocess.run([sys.executable, "-c", ENDS, os.path.dirname(__file__)], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "still there\n"), ran.stderr
    assert not re.search("Error|terminate|Fatal", ran.stderr), ran.stderr


TORCH = """
import os, sys, time, torch, torch.distributed as dist
import gradwire
from gradwire.torch import ShardedOptimizer, own_shards
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
data = torch.Generator().manual_seed(rank)
with own_shards(transport=sys.argv[1]) as servers:
    assert len(set(servers)) == size and all(s.startswith(f"{sys.argv[1]}://127.0.0.1:") for s in servers), servers
    with ShardedOptimizer(model, servers=servers, job="own", workers=size, lr=1e-2, codec="dense:fp32", push="gradient") as optimizer:
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=data)).square().mean().backward()
            optimizer.step()
        if rank == 0:
            torch.save(model.state_dict(), sys.argv[2])
    if rank == 1:
        time.sleep(1)  # rank 0 has left its job
        assert gradwire._core.describe_job(servers[:1], "own", 5000)[0][0] == 0, "its shard has ended"
dist.destroy_process_group()
"""

FAILS = """
import torch.distributed as dist
from gradwire import _own_shards
from gradwire.torch import own_shards
try:
    with own_shards():
        pass
except RuntimeError as error:
    assert "init_process_group" in str(error)
dist.init_process_group("gloo")
try:
    with own_shards(host="192.0.2.77" if dist.get_rank() else None):
        raise AssertionError
except RuntimeError as error:
    assert str(error).startswith("shards did not come up: rank 1: ") and "192.0.2.77" in str(error), error
    print("refused", flush=True)
alone = [dist.new_group([rank]) for rank in range(2)]
try:
    with own_shards(process_group=alone[1 - dist.get_rank()]):
        raise AssertionError
except ValueError as error:
    assert "not in process_group" in str(error)
_own_shards._network, _own_shards._host_for_others = dist.get_rank, lambda: f"127.0.0.{2 + dist.get_rank()}"
with own_shards() as servers:
    assert [server.split(":")[1] for server in servers] == ["//127.0.0.2", "//127.0.0.3"], servers
dist.barrier()
dist.destroy_process_group()
"""


def torchrun(tmp_path, program, *arguments):
    script = tmp_path / "program.py"
    script.write_text(program)
    ran = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, *arguments],
                         env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_own_shards_train_as_torch_does(tmp_path, transport):
    torch = pytest.importorskip("torch")
    torchrun(tmp_path, TORCH, transport, str(tmp_path / "model"))
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    data = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for _ in range(5):
        optimizer.zero_grad()
        for generator in data:
            (model(torch.randn(8, 64, generator=generator)).square().mean() / 2).backward()
        optimizer.step()
    for name, value in torch.load(tmp_path / "model").items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-6)


def test_own_shards_says_on_every_rank_why_one_did_not_come_up(tmp_path):
    pytest.importorskip("torch")
    assert torchrun(tmp_path, FAILS).count("refused") == 2


def test_the_example_trains():
    pytest.importorskip("torch")
    ran = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", ROOT / "client/examples/own.py"],
                         env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", ran.stdout)]
    assert len(losses) == 3 and losses[2] < 0.6 * losses[0], ran.stdout
