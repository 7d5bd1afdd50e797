"""The NumPy session: exchange, errors, digests, lost workers and shards."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import gradwire


def make_job(name, **options):
    tensors = [gradwire.TensorSpec("embed.weight", (50, 40)), gradwire.TensorSpec("norm.weight", (40,)),
               gradwire.TensorSpec("head.weight", (40, 50))]
    return gradwire.JobSpec(name, tensors, **options)


def make_parameters(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s, dtype=np.float32) for s in ((50, 40), (40,), (40, 50))]


def in_parallel(count, body):
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return [f.result() for f in [pool.submit(body, i) for i in range(count)]]


@pytest.mark.parametrize("codec", ["dense:values=fp32", "dense:values=fixed16", "tagc:density=0.05"])
def test_two_workers_agree(addresses, codec):
    servers = addresses(2)
    job = make_job("agree", codec=codec, workers=2)

    def work(index):
        parameters = make_parameters()
        rng = np.random.default_rng(10 + index)
        with gradwire.join(servers, job, parameters, f"worker-{index}") as session:
            for _ in range(20):
                session.exchange([rng.standard_normal(p.shape, dtype=np.float32) for p in parameters], lr=0.01)
            assert session.version == 21
            stats = session.stats()
            assert stats["steps"] == 20 and stats["pushed_bytes"] > 0 and stats["pulled_bytes"] > 0
            return session.digest(), parameters

    (first, a), (second, b) = in_parallel(2, work)
    assert first == second
    for x, y, start in zip(a, b, make_parameters(), strict=True):
        np.testing.assert_array_equal(x, y)
        assert not np.array_equal(x, start)


def test_gradients_by_name_and_overlapping_calls(addresses):
    job = make_job("named", optimizer="sgd", codec="dense:values=fp32")
    parameters = make_parameters()
    start = [p.copy() for p in parameters]
    with gradwire.join(addresses(1)[0], job, parameters) as session:
        ones = {t.name: np.ones(t.shape, np.float32) for t in job.tensors}
        session.exchange(ones, lr=0.5)
        session.begin_round(0.5)
        for name in reversed(ones):
            session.tensor_ready(name, ones[name])
        session.end_round(timeout=30)
    for p, s in zip(parameters, start, strict=True):
        np.testing.assert_allclose(p, s - 1.0, rtol=0, atol=1e-6)


def test_later_worker_gets_the_parameters(addresses):
    servers = addresses(2)
    job = make_job("second", max_workers=2)
    first = make_parameters(1)
    with gradwire.join(servers, job, first, "a") as one:
        one.exchange([np.ones_like(p) for p in first], lr=0.1)
        digest = one.digest()
    second = make_parameters(2)
    with gradwire.join(servers, job, second, "b") as two:
        assert two.start_version == 2
        assert two.digest() == digest
        two.exchange([np.ones_like(p) for p in second], lr=0.1)


def test_nonfinite_gradient_names_tensor_and_index(addresses):
    parameters = make_parameters()
    with gradwire.join(addresses(1), make_job("nan"), parameters) as session:
        gradients = [np.ones_like(p) for p in parameters]
        gradients[1][7] = np.nan
        with pytest.raises(gradwire.InvalidArgument, match="norm.weight.*index 7") as error:
            session.exchange(gradients, lr=0.1)
        assert error.value.code == "INVALID_ARGUMENT"
        gradients[1][7] = 1
        session.exchange(gradients, lr=0.1)


def test_arrays_that_do_not_fit_are_refused_by_name(addresses):
    server = addresses(1)
    job = make_job("fit")
    parameters = make_parameters()
    with pytest.raises(TypeError, match="'embed.weight'.*float32"):
        gradwire.join(server, job, [parameters[0].astype(np.float64), *parameters[1:]])
    with pytest.raises(ValueError, match="'head.weight'.*contiguous"):
        gradwire.join(server, job, [*parameters[:2], np.ones((50, 40), np.float32).T])
    with pytest.raises(ValueError, match=r"norm.weight.*shape \[3\]"):
        gradwire.join(server, job, [parameters[0], np.ones(3, np.float32), parameters[2]])
    with pytest.raises(gradwire.InvalidArgument, match="codec"):
        gradwire.join(server, make_job("fit", codec="zip"), parameters)
    with pytest.raises(ValueError, match="optimizer"):
        gradwire.join(server, make_job("fit", optimizer="magic"), parameters)
    with gradwire.join(server, job, parameters) as session:
        with pytest.raises(ValueError, match=r"norm.weight.*shape \[3\]"):
            session.exchange([parameters[0], np.ones(3, np.float32), parameters[2]], lr=0.1)
        with pytest.raises(gradwire.FailedPrecondition):
            session.end_round()


def test_server_that_is_not_there(closed_port):
    begin = time.monotonic()
    with pytest.raises(gradwire.Unavailable, match=str(closed_port)):
        gradwire.join(f"grpc://127.0.0.1:{closed_port}", make_job("none"), make_parameters(), connect_timeout=1)
    assert time.monotonic() - begin < 15


def test_lost_shard_is_unavailable(servers):
    running = servers(2)
    parameters = make_parameters()
    session = gradwire.join([s.address for s in running], make_job("gone"), parameters)
    gradients = [np.ones_like(p) for p in parameters]
    session.exchange(gradients, lr=0.1)
    running[1].process.kill()
    with pytest.raises(gradwire.Unavailable, match=running[1].address):
        for _ in range(3):
            session.exchange(gradients, lr=0.1)
    with pytest.raises(gradwire.Unavailable):
        session.exchange(gradients, lr=0.1)


KILLED = textwrap.dedent("""
    import sys, time
    import numpy as np
    import gradwire
    sys.path.insert(0, sys.argv[1])
    from test_session import make_job, make_parameters
    parameters = make_parameters()
    session = gradwire.join(sys.argv[2:], make_job("killed", workers=2, lease_ms=1000), parameters, "victim")
    gradients = [np.ones_like(p) for p in parameters]
    for _ in range(3):
        session.exchange(gradients, lr=0.01)
    session.begin_round(0.01)
    session.tensor_ready(2, gradients[2])
    print("in the middle", flush=True)
    time.sleep(60)
""")


def test_worker_killed_in_the_middle_of_a_push(addresses):
    servers = addresses(2)
    folder = str(pathlib.Path(__file__).parent)
    job = make_job("killed", workers=2, lease_ms=1000)
    victim = subprocess.Popen([sys.executable, "-c", KILLED, folder, *servers], stdout=subprocess.PIPE,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        parameters = make_parameters()
        with gradwire.join(servers, job, parameters, "survivor") as session:
            gradients = [np.ones_like(p) for p in parameters]
            for _ in range(3):
                session.exchange(gradients, lr=0.01)
            assert victim.stdout.readline()
            victim.send_signal(signal.SIGKILL)
            begin = time.monotonic()
            session.exchange(gradients, lr=0.01)  # ends with the victim's lease
            assert time.monotonic() - begin < 10
            session.exchange(gradients, lr=0.01)

            # It joins again at a round boundary: the survivor keeps stepping meanwhile.
            again = make_parameters(3)
            target = []

            def rejoin():
                with gradwire.join(servers, job, again, "victim") as second:
                    target.append(second.start_version + 5)
                    return run(second)

            def run(s):
                while not target or s.version < target[0]:
                    s.exchange(gradients, lr=0.01)
                return s.digest()

            digests = in_parallel(2, lambda i: run(session) if i == 0 else rejoin())
            assert digests[0] == digests[1]
    finally:
        victim.kill()
        victim.wait()


def test_wrong_shape_is_refused_by_name(addresses):
    job = gradwire.JobSpec("j", [gradwire.TensorSpec("w", (2, 3))], optimizer="sgd")
    with pytest.raises(ValueError, match=r"the parameter 'w' has shape \[3, 2\], the tensor has \[2, 3\]"):
        gradwire.join(addresses(1), job, [np.zeros((3, 2), np.float32)])
    with gradwire.join(addresses(1), job, [np.zeros((2, 3), np.float32)]) as session:
        with pytest.raises(ValueError, match=r"the gradient of 'w' has shape \[3, 2\]"):
            session.exchange([np.zeros((3, 2), np.float32)], 0.1)
        session.exchange([np.ones((2, 3), np.float32)], 0.1)
