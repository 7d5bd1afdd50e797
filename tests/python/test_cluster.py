"""Servers of one's own: local_cluster, and the demo on them."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import gradwire
from gradwire._demo import _loss_and_gradients
from conftest import server_binary
from test_session import make_job, make_parameters

pytestmark = pytest.mark.skipif(not server_binary().exists(), reason=f"{server_binary()} is not built")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def steps(cluster, job, count):
    with gradwire.join(cluster.servers, job, make_parameters(), "w") as session:
        begin = session.version
        for _ in range(count):
            session.exchange([np.ones_like(p) for p in make_parameters()], lr=0.01)
        return begin, session.version


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_servers_live_as_long_as_the_with(transport):
    with gradwire.local_cluster(3, transport=transport) as cluster:
        assert len(set(cluster.servers)) == 3 and all(s.startswith(f"{transport}://127.0.0.1:") for s in cluster.servers)
        assert steps(cluster, make_job("job"), 3)[1] > 0
        assert "job created" in cluster.log(2)
        servers = [process.pid for process in cluster._processes]
        assert all(map(alive, servers))
    assert not any(map(alive, servers))
    cluster.stop()


def test_a_data_directory_is_gone_on_with(tmp_path):
    job, end = make_job("kept", durability="fsync"), 0
    for _ in range(2):
        with gradwire.local_cluster(2, data_dir=tmp_path / "not" / "there") as cluster:
            before = end
            begin, end = steps(cluster, job, 4)
            assert begin == before
    assert end > 4


OWNER = """
import os, sys, time
import gradwire
cluster = gradwire.local_cluster(2)
print(cluster._logs[0].parent, *(process.pid for process in cluster._processes), flush=True)
{end}
"""
FORKED = """
if os.fork() == 0:  # as a DataLoader's worker, which outlives its parent
    print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", ["sys.exit()", "time.sleep(60)", FORKED])
def test_servers_end_with_the_process_that_started_them(end):
    owner = subprocess.Popen([sys.executable, "-c", OWNER.format(end=end)], stdout=subprocess.PIPE, env=ENVIRONMENT)
    folder, *servers = owner.stdout.readline().decode().split()
    servers = [int(pid) for pid in servers]
    assert len(servers) == 2
    child = int(owner.stdout.readline()) if end == FORKED else None
    if end != "sys.exit()":
        owner.send_signal(signal.SIGKILL)
    owner.wait(30)
    until = time.monotonic() + 30
    while (any(map(alive, servers)) or os.path.exists(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    if child is not None:
        os.kill(child, signal.SIGKILL)
    assert not any(map(alive, servers))
    assert not os.path.exists(folder)


def test_a_cluster_that_nobody_refers_to_runs():
    servers = gradwire.local_cluster(1).servers
    cluster, = (c for c in gradwire._cluster._running if c.servers == servers)
    assert steps(cluster, make_job("job"), 2)[1] > 0
    cluster.stop()
    cluster.stop()


FORK = """
import os, sys
import gradwire
cluster = gradwire.local_cluster(1)
if os.fork() == 0:
    print("child", flush=True)
    sys.exit()
os.wait()
print("alive" if cluster._processes[0].poll() is None and cluster.log(0) else "ended")
"""


def test_a_fork_that_ends_ends_no_server():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.stdout == "child\nalive\n", done.stdout + done.stderr


JOINS = """
import os
import gradwire, numpy
with gradwire.local_cluster(1) as cluster:
    def join(name):
        job = gradwire.JobSpec(name=name, tensors=[gradwire.TensorSpec("w", (100,))])
        return gradwire.join(cluster.servers, job, [numpy.zeros(100, numpy.float32)], "w")
    session = join("first")
    if (child := os.fork()) == 0:
        try:
            join("second")
        except gradwire.FailedPrecondition as error:
            print("spawn" in str(error), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    session.leave()
"""


def test_a_fork_of_a_worker_is_refused():
    done = subprocess.run([sys.executable, "-c", JOINS], capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert done.stdout == "True\n", done.stdout + done.stderr


def test_a_server_that_cannot_start_is_told():
    with pytest.raises(gradwire.Unavailable, match="(?s)shard server 0 ended.*--no-such-flag"):
        gradwire.local_cluster(2, flags=["--no-such-flag"])
    with pytest.raises(ValueError, match="at least one"):
        gradwire.local_cluster(0)
    with pytest.raises(ValueError, match="a list of flags"):
        gradwire.local_cluster(flags="--spin-us=0")
    with pytest.raises(ValueError, match="'grpc' or 'tcp'"):
        gradwire.local_cluster(transport="udp")


def test_gradients_of_the_demo():
    rng = np.random.default_rng(0)
    parameters = [rng.standard_normal((5, 7)), rng.standard_normal((7, 3))]
    inputs, labels = rng.standard_normal((11, 5)), rng.integers(0, 3, 11)
    _, gradients = _loss_and_gradients(parameters, inputs, labels)
    for parameter, gradient in zip(parameters, gradients):
        at, far = (2, 1), 1e-6
        parameter[at] += far
        above, _ = _loss_and_gradients(parameters, inputs, labels)
        parameter[at] -= 2 * far
        below, _ = _loss_and_gradients(parameters, inputs, labels)
        parameter[at] += far
        assert gradient[at] == pytest.approx((above - below) / (2 * far), rel=1e-5)


def demo(*flags):
    return subprocess.run([sys.executable, "-m", "gradwire", "demo", *flags], capture_output=True, text=True, timeout=120,
                          env=ENVIRONMENT)


def test_demo():
    done = demo("--steps", "150")
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses[-1] < 0.5 * losses[0]
    assert float(re.search(r"\((\d+\.\d) times as much\)", done.stdout).group(1)) > 50
    refused = demo("--codec", "nonsense")
    assert refused.returncode == 1 and "unknown codec 'nonsense'" in refused.stderr


def test_the_demo_can_be_interrupted():
    process = subprocess.Popen([sys.executable, "-m", "gradwire", "demo", "--steps", "1000000"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's "&" ignores it
    while "step" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=30)[1]
    assert process.returncode == 130
