"""The NumPy session: exchange, errors, digests, lost workers and shards."""

import concurrent.futures
import contextlib
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
from gradwire._lifetime import leave_behind


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


@pytest.mark.parametrize(("codec", "update_codec"), [
    ("dense:values=fp32", ""), ("dense:values=fixed16", ""), ("tagc:density=0.05", ""),
    ("topk:density=0.05,values=fp16", "topk:density=0.05,values=fp16"), ("dense:values=fp32", "onebit")])
def test_two_workers_agree(addresses, codec, update_codec):
    servers = addresses(2)
    job = make_job("agree", codec=codec, update_codec=update_codec, workers=2)

    def work(index):
        parameters = make_parameters()
        rng = np.random.default_rng(10 + index)
        with gradwire.join(servers, job, parameters, f"worker-{index}") as session:
            for _ in range(20):
                session.exchange([rng.standard_normal(p.shape, dtype=np.float32) for p in parameters], lr=0.01)
            assert session.version == 21
            stats = session.stats()
            assert stats["steps"] == 20 and stats["pushed_bytes"] > 0 and stats["pulled_bytes"] > 0
            if codec.startswith(("tagc", "topk")):  # norm.weight travels dense
                assert 0.9 < stats["selected_elements"] / (20 * 0.05 * 4000) < 1.1
            else:
                assert stats["selected_elements"] == 0
            if update_codec:  # 4040 parameters of 4 bytes, 20 times
                assert stats["pulled_bytes"] < 4040 * 4 * 20 / 4
            return session.digest(), parameters

    (first, a), (second, b) = in_parallel(2, work)
    assert first == second
    for x, y, start in zip(a, b, make_parameters(), strict=True):
        np.testing.assert_array_equal(x, y)
        assert not np.array_equal(x, start)


def test_bounded_staleness_lets_a_worker_run_ahead(addresses):
    servers = addresses(2)
    job = make_job("bounded", codec="tagc:density=0.2", workers=2, rounds="bounded:3", lease_ms=60_000)

    def step(session, rng):
        session.exchange([rng.standard_normal(p.shape, dtype=np.float32) for p in make_parameters()], lr=0.01)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        a, b = [f.result() for f in [pool.submit(gradwire.join, servers, job, make_parameters(), f"w{i}")
                                     for i in range(2)]]
        rngs = [np.random.default_rng(i) for i in range(2)]
        for f in [pool.submit(step, session, rng) for session, rng in zip((a, b), rngs, strict=True)]:
            f.result()  # rounds 0 and 1
        a.drain()
        for _ in range(3):
            step(a, rngs[0])
        assert a.version == 2, "the other one has pushed nothing more"
        with pytest.raises(gradwire.DeadlineExceeded):
            a.drain(0.05)
        for _ in range(3):
            step(b, rngs[1])
        a.drain()
        b.drain()
        assert a.version == b.version == 5
        assert a.digest() == b.digest() and a.checksum() == b.checksum()
        step(a, rngs[0])
        a.leave(drain=False)
        b.leave()


@pytest.mark.parametrize("rounds", ["bounded", "bounded:0", "bounded:17", "bounded:two", "async:0", "async:257", "sync:1",
                                    "fast", ""])
def test_unknown_rounds_are_refused(rounds):
    with pytest.raises(ValueError, match="rounds="):
        make_job("rounds", rounds=rounds).to_json()


def test_asynchronous_workers_wait_for_nobody(addresses):
    servers = addresses(2)
    job = make_job("async", codec="tagc:density=0.2", workers=2, rounds="async:4", lease_ms=60_000)
    with pytest.raises(gradwire.InvalidArgument, match="use pull params"):
        gradwire.join(servers, job, make_parameters(), "w0")
    with gradwire.join(servers, job, make_parameters(), "w0", pull="params") as a:
        with gradwire.join(servers, job, make_parameters(), "w1", pull="params_bf16") as b:
            rng = np.random.default_rng(1)
            for _ in range(10):
                a.exchange([rng.standard_normal(p.shape, dtype=np.float32) for p in make_parameters()], lr=0.01)
            assert a.version == 11
            assert b.version == 0, "it has pushed and pulled nothing"
            b.exchange([rng.standard_normal(p.shape, dtype=np.float32) for p in make_parameters()], lr=0.01)
            assert b.version >= 11


def test_bounded_staleness_has_no_quorum(addresses):
    with pytest.raises(gradwire.InvalidArgument, match="rounds.quorum"):
        gradwire.join(addresses(1), make_job("both", rounds="bounded:2", quorum=1, workers=2), make_parameters(), "w0")


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
    with pytest.raises(gradwire.InvalidArgument, match="update_codec.*use topk"):
        gradwire.join(server, make_job("fit", update_codec="tagc"), parameters)
    with pytest.raises(ValueError, match="optimizer"):
        gradwire.join(server, make_job("fit", optimizer="magic"), parameters)
    with gradwire.join(server, job, parameters) as session:
        with pytest.raises(ValueError, match=r"norm.weight.*shape \[3\]"):
            session.exchange([parameters[0], np.ones(3, np.float32), parameters[2]], lr=0.1)
        with pytest.raises(gradwire.FailedPrecondition):
            session.end_round()


class DlpackArray:
    """An array of another library: it has DLPack and nothing else."""

    def __init__(self, array, device=(1, 0)):
        self.array = array
        self.device = device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


def test_gradients_of_other_libraries_come_by_dlpack(addresses):
    server = addresses(1)
    results = []
    for wrap in (lambda g: g, DlpackArray):
        parameters = make_parameters()
        with gradwire.join(server, make_job(f"dlpack-{len(results)}"), parameters) as session:
            session.exchange([wrap(np.full_like(p, 0.5)) for p in parameters], lr=0.1)
            session.begin_round(lr=0.1)
            for i, p in enumerate(parameters):
                session.tensor_ready(i, wrap(np.full_like(p, 0.25)))
            session.end_round()
            results.append(session.digest())
            with pytest.raises(TypeError, match="'head.weight' lies on a device .DLPack type 2, number 1"):
                session.exchange([*parameters[:2], DlpackArray(parameters[2], (2, 1))], lr=0.1)
            with pytest.raises(TypeError, match="'embed.weight' must be a NumPy array.*not list"):
                session.exchange([[1.0], *parameters[1:]], lr=0.1)
    assert results[0] == results[1]


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


def test_a_server_that_stood_still_beyond_a_lease_keeps_its_workers(servers):
    server, = servers(1)
    job = make_job("frozen", workers=2, lease_ms=1000)
    with contextlib.ExitStack() as both:
        workers = in_parallel(2, lambda i: gradwire.join([server.address], job, make_parameters(), f"w{i}"))
        for worker in workers:
            both.enter_context(worker)
        gradients = [np.ones_like(p) for p in make_parameters()]
        for stopped_s in (0.0, 1.6, 1.6):
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(stopped_s)
            server.process.send_signal(signal.SIGCONT)
            time.sleep(0.3)  # leases would end now
            in_parallel(2, lambda i: workers[i].exchange(gradients, lr=0.01))
        assert "no longer waited for" not in server.log()


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


JOINING = textwrap.dedent("""
    import signal
    import sys
    import numpy as np
    import gradwire
    sys.path.insert(0, sys.argv[1])
    from test_session import make_job, make_parameters
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background hands on that it ignores it
    print("joining", flush=True)
    try:
        gradwire.join(sys.argv[2], make_job("interrupted"), make_parameters(), connect_timeout=600)
    except KeyboardInterrupt:
        print("interrupted")
""")


def test_ctrl_c_ends_a_join_that_waits(closed_port):
    folder = str(pathlib.Path(__file__).parent)
    process = subprocess.Popen([sys.executable, "-c", JOINING, folder, f"grpc://127.0.0.1:{closed_port}"],
                               stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        assert process.stdout.readline() == "joining\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        assert out == "interrupted\n" and process.returncode == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1, 0, 0.0001, 1e300])
@pytest.mark.parametrize("name", ["connect_timeout", "start_timeout", "rpc_timeout", "round_timeout", "reconnect_timeout"])
def test_impossible_timeouts_are_named(name, seconds):
    with pytest.raises(ValueError, match=f"{name}=.*from 0.001 to 1e\\+09"):
        gradwire.join("inproc://nobody", make_job("j"), make_parameters(), **{name: seconds})


@pytest.mark.parametrize("threads", [0, -1, 65])
def test_impossible_numbers_of_threads_are_named(threads):
    with pytest.raises(ValueError, match=f"encode_threads={threads} must lie between 1 and 64"):
        gradwire.join("inproc://nobody", make_job("j"), make_parameters(), encode_threads=threads)


def test_timeouts_must_be_numbers(addresses):
    with pytest.raises(TypeError, match="rpc_timeout must be a number of seconds, not str"):
        gradwire.join("inproc://nobody", make_job("j"), make_parameters(), rpc_timeout="10")
    parameters = make_parameters()
    with gradwire.join(addresses(1), make_job("j"), parameters, rpc_timeout=np.float32(5)) as session:
        session.begin_round(0.1)
        with pytest.raises(ValueError, match="timeout=nan"):
            session.end_round(timeout=float("nan"))
        for i, p in enumerate(parameters):
            session.tensor_ready(i, np.ones_like(p))
        session.end_round(timeout=30)


@pytest.mark.parametrize("options, message", [
    ({"workers": -1}, "workers=-1 must be from 1 to 4294967295"), ({"workers": 0}, "workers=0 must be from 1"),
    ({"max_workers": -2}, "max_workers=-2 must be from 0"), ({"workers": 3, "max_workers": 2}, "not be below workers=3"),
    ({"lease_ms": -1}, "lease_ms=-1"), ({"bucket_bytes": 1 << 64}, "bucket_bytes=18446744073709551616"),
    ({"run_elements": -1}, "run_elements=-1"), ({"seed": -1}, "seed=-1"),
    ({"residual_decay": float("nan")}, "residual_decay=nan must be a finite"),
    ({"residual_decay": 0.9}, "residual_decay=0.9 is for push='step' and 'delta'"),
    ({"push": "delta", "residual_decay": 0}, "residual_decay=0 is not supported"),
    ({"groups": [gradwire.Group(eps=float("inf"))]}, "eps=inf must be a finite"),
    ({"groups": [gradwire.Group(betas=(0, 0.9))]}, r"betas\[0\]=0 is not supported"),
    ({"groups": [gradwire.Group(betas=(0.9,))]}, "must be two numbers"),
])
def test_impossible_jobs_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        gradwire.join("inproc://nobody", make_job("j", **options), make_parameters())


def test_whole_numbers_must_be_whole():
    with pytest.raises(TypeError, match="workers=1.5 must be a whole number"):
        make_job("j", workers=1.5).to_json()
    assert '"min_workers": 2' in make_job("j", workers=np.int64(2)).to_json()


def default_name(job):
    name = gradwire._identity.take_name(job, (1, 2))
    name.release()
    return name.text


def test_two_sessions_of_one_process_get_two_names(addresses):
    servers = addresses(1)
    job = make_job("names", workers=2)
    sessions = in_parallel(2, lambda _: gradwire.join(servers, job, make_parameters()))
    names = {s.worker for s in sessions}
    assert len(names) == 2
    in_parallel(2, lambda i: sessions[i].exchange([np.ones_like(p) for p in make_parameters()], lr=0.1))
    assert [s.version for s in sessions] == [2, 2]
    for session in sessions:
        session.leave()
    assert default_name("names") in names


def test_a_failed_join_frees_its_name(closed_port, addresses):
    before = default_name("j")
    with pytest.raises(gradwire.Unavailable):
        gradwire.join(f"grpc://127.0.0.1:{closed_port}", make_job("j"), make_parameters(), connect_timeout=0.1)
    assert default_name("j") == before
    session = gradwire.join(addresses(1), make_job("j"), make_parameters())
    assert session.worker == before and default_name("j") != before
    del session
    assert default_name("j") == before


def test_gradients_by_rows_are_those_given_whole(addresses):
    def work(name, by_rows):
        parameters = make_parameters()
        rng = np.random.default_rng(3)
        with gradwire.join(addresses(2), make_job(name, codec="zen", optimizer="sgd"), parameters, "w") as session:
            for _ in range(5):
                session.begin_round(0.1)
                for tensor in ("head.weight", "embed.weight"):
                    shape = parameters[0 if tensor == "embed.weight" else 2].shape
                    rows = np.flatnonzero(rng.random(shape[0]) < 0.2)
                    values = rng.standard_normal((len(rows), shape[1]), dtype=np.float32)
                    if by_rows:
                        session.rows_ready(tensor, rows, values)
                        continue
                    whole = np.zeros(shape, np.float32)
                    whole[rows] = values
                    session.tensor_ready(tensor, whole)
                session.rows_ready(1, np.arange(40), np.ones(40, np.float32))  # a row of a vector is an element
                session.end_round()
            return session.digest()

    assert work("rows", True) == work("whole", False)


def test_rows_that_do_not_fit_are_refused_and_the_round_goes_on(addresses):
    parameters = make_parameters()
    with gradwire.join(addresses(1), make_job("misfits", codec="zen", optimizer="sgd"), parameters, "w") as session:
        session.begin_round(0.1)
        one = np.ones((1, 40), np.float32)
        for rows, values, error, words in [
                ([7], one.astype(np.float64), TypeError, "must be float32"),
                (np.array([7], np.int32), one, TypeError, "rows .* must be an array of int64"),
                (np.array([[7]]), one, ValueError, "of one dimension"),
                ([7, 8], one, ValueError, r"values of shape \[1, 40\] for 2 rows, where \[2, 40\] is expected"),
                ([7], np.ones((1, 39), np.float32), ValueError, r"\[1, 40\] is expected"),
                ([50], one, gradwire.InvalidArgument, "row 50 .* rows 0 to 50, exclusive"),
                ([8, 7], np.ones((2, 40), np.float32), gradwire.InvalidArgument, "rows must ascend, each of them once")]:
            with pytest.raises(error, match=words):
                session.rows_ready("embed.weight", rows, values)
        session.rows_ready("embed.weight", [7], one)
        with pytest.raises(gradwire.FailedPrecondition, match="ready twice"):
            session.rows_ready("embed.weight", [7], one)
        session.tensor_ready("norm.weight", np.zeros(40, np.float32))
        session.rows_ready("head.weight", np.zeros(0, np.int64), np.zeros((0, 50), np.float32))
        session.end_round()
    expected = make_parameters()
    expected[0][7] -= np.float32(0.1)
    for found, wanted in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_no_failure_to_leave_replaces_an_exception(caplog):
    def lost(drain):
        raise gradwire.Unavailable("the shard is lost")

    leave_behind(lost, drain=False)
    assert "the shard is lost" in caplog.text
    with pytest.raises(gradwire.Unavailable):
        leave_behind(lost, drain=True)
