"""The hook for DistributedDataParallel against plain DistributedDataParallel doing the same."""

import copy
import functools
import gc
import os
import pathlib
import pickle
import re
import subprocess
import sys
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import ROOT

torch = pytest.importorskip("torch")
gradwire = pytest.importorskip("gradwire")
gradwire_torch = pytest.importorskip("gradwire.torch")
from gradwire._callbacks import Shards

WORKER = pathlib.Path(__file__).with_name("ddp_worker.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def run(out, *flags, processes=2):
    """ddp_worker.py as torchrun would start it. Returns the first code of an end that is not 0, else 0, and what all said; the
    others are ended with it."""
    store = out.with_suffix(f".store-{len(list(out.parent.iterdir()))}")
    workers = [subprocess.Popen([sys.executable, WORKER, "--out", out, "--store", store, *map(str, flags)],
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                env={**ENVIRONMENT, "RANK": str(rank), "WORLD_SIZE": str(processes)})
               for rank in range(processes)]
    end = time.monotonic() + 120
    codes = [None]
    while None in codes and not any(codes) and time.monotonic() < end:
        time.sleep(0.05)
        codes = [worker.poll() for worker in workers]
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
    said = "".join(worker.communicate()[0] for worker in workers)
    return next((code for code in codes if code), "no end" if None in codes else 0), said


def trained(out, *flags, processes=2):
    """Trains in a way that flags choose; returns what each process saved."""
    code, said = run(out, *flags, processes=processes)
    assert code == 0, said
    return [torch.load(out.with_suffix(f".{rank}"), weights_only=True) for rank in range(processes)]


@pytest.fixture
def train(tmp_path):
    runs = iter(range(100))
    return lambda *flags, **how: trained(tmp_path / f"run-{next(runs)}", *flags, **how)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Plain DistributedDataParallel, with the same flags."""
    return functools.cache(lambda *flags, **how: trained(tmp_path_factory.mktemp("plain") / "run", *flags, **how))


def assert_same_trajectory(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        for name, value in theirs["net"].items():
            torch.testing.assert_close(mine["net"][name], value, rtol=0, atol=1e-6)


STEPS = ("--push", "step", "--sgd", "--lr", 4e-3)


def assert_trains_as_well(train, plain, addresses, codec="", flags=(), at_most=1.02, **times_fewer):
    """With the codec (empty: the default one) as with none, for so many times fewer bytes each way."""
    found = train("--servers", *addresses(2), "--codec", codec, "--steps", 300, *flags)[0]
    dense = plain("--steps", 300)[0]

    def last(run):
        return sum(run["losses"][-50:]) / 50

    assert last(found) <= at_most * last(dense)
    elements = sum(value.numel() for value in found["net"].values())
    for way, times in times_fewer.items():
        assert found["stats"][f"{way}_bytes"] < 300 * 4 * elements / times


def example(name, servers):
    """What it prints, with two processes."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                           ROOT / "client/examples" / name, *servers], capture_output=True, text=True, timeout=120,
                          env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("accumulate", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_dense_goes_the_way_of_all_reduce(train, plain, addresses, accumulate):
    flags = ("--accumulate", accumulate) if accumulate > 1 else ()
    found = train("--servers", *addresses(2), *flags)
    assert_same_trajectory(found, plain(*flags))
    assert all(torch.equal(found[0]["net"][name], value) for name, value in found[1]["net"].items()), "replicas differ"
    assert found[0]["stats"]["pushed_bytes"] > 0


@pytest.mark.slow
def test_an_optimizer_with_sharded_state_works_as_it_stands(train, plain, addresses):
    assert_same_trajectory(train("--servers", *addresses(2), "--zero"), plain("--zero"))


def test_processes_of_a_host_send_one_frame(train, plain, addresses):
    found = train("--servers", *addresses(1), "--per-host", 2, processes=4)
    assert_same_trajectory(found, plain(processes=4))
    assert [bool(process["stats"]) for process in found] == [True, False, True, False]


@pytest.mark.slow
def test_the_default_trains_as_well_for_fewer_bytes(train, plain, addresses):
    assert_trains_as_well(train, plain, addresses, pushed=7)


def test_steps_are_those_of_adam_without_momentum(train, plain, addresses):
    """Of one worker, so that the mean of steps is the step."""
    found = train("--servers", *addresses(1), "--push", "step", "--sgd", processes=1)
    assert_same_trajectory(found, plain("--beta1", 0, "--beta2", 0.99, "--weight-decay", 0, processes=1))


@pytest.mark.slow
def test_a_sparse_codec_that_pushes_steps_trains_as_well(train, plain, addresses):
    assert_trains_as_well(train, plain, addresses, "tagc:density=0.01", STEPS, at_most=1.01, pushed=30)


def test_wrappers_do_not_keep_equal_models_apart(train, plain, addresses):
    assert_same_trajectory(train("--servers", *addresses(1), "--wrapped"), plain())


def test_names_without_what_torch_puts_before_them():
    from gradwire._ddp import plain_name
    from gradwire._fsdp_units import _names_of

    assert plain_name("module._orig_mod.h.0.weight") == "h.0.weight"
    assert plain_name("h._orig_mod.0.bias") == "h.0.bias"
    assert plain_name("_fsdp_wrapped_module.h.0._fsdp_wrapped_module._checkpoint_wrapped_module.bias") == "h.0.bias"
    unit = "_fsdp_wrapped_module.h.0._checkpoint_wrapped_module"
    assert _names_of(["", unit]) == {"": "(root)", unit: "h.0"}
    assert plain_name("encoder.module.weight") == "encoder.module.weight", "a part of the model has that name"
    assert plain_name("submodule.module_list.0.weight") == "submodule.module_list.0.weight"


def test_a_gradient_that_is_not_finite_spoils_the_step_of_all_as_after_all_reduce(train, plain, addresses):
    found = train("--servers", *addresses(1), "--nan-at", 3, "--scaler")
    expected = plain("--nan-at", 3, "--scaler")
    assert [process["scale"] for process in found] == [process["scale"] for process in expected]
    assert found[0]["scale"] < 2.0**16, "the step was skipped"
    # The worker's own loss is not a number in that step.
    assert_same_trajectory(found[:1], expected[:1])


@pytest.mark.parametrize(("workers", "huge"), [(1, 3e5), (3, 2e5), (3, -2e5)])
def test_a_gradient_that_sums_cannot_hold_spoils_the_step_of_all(addresses, caplog, workers, huge):
    from gradwire._job import TensorSpec
    from gradwire._means import MeanExchange, grid_limit

    assert grid_limit(workers) == {1: 2**18, 3: 174762.65625}[workers]
    servers = addresses(1)

    def work(worker):
        mean = torch.zeros(4)
        exchange = MeanExchange([TensorSpec("w", (4,))], [mean], servers=servers, job="huge", codec="dense:fp32", rules=None,
                                workers=workers, worker=f"w{worker}", bucket_bytes=0, lease_ms=10_000, nonfinite="spread",
                                seed=0)
        spoilt = []
        with exchange.session:
            for value in (huge if worker == 0 else 3.0, 1e5):
                gradient = torch.tensor([1.0, 2.0, value, 4.0])
                exchange.begin()
                exchange.look(gradient)
                exchange.send(0, gradient)
                spoilt.append(exchange.end())
        return spoilt, mean.tolist()

    with ThreadPoolExecutor(workers) as pool:
        assert list(pool.map(work, range(workers))) == [([True, False], [1, 2, 1e5, 4])] * workers
    assert f"of worker w0 has a magnitude of {abs(huge):g}" in caplog.text


def test_or_comes_out_of_backward(tmp_path, addresses):
    code, said = run(tmp_path / "run", "--servers", *addresses(1), "--nan-at", 3, "--nonfinite", "refuse")
    assert code != 0
    assert re.search(r"InvalidArgument.*tensor '\d\.(weight|bias)'.*nan", said), said


def test_a_backward_behind_close_is_refused_on_every_process(train, addresses):
    found = train("--servers", *addresses(1), "--steps", 2, "--per-host", 2, "--behind-close")
    assert all("closed" in process["refused"] for process in found)


@pytest.mark.slow
def test_processes_that_were_killed_are_started_again_and_go_on(tmp_path, addresses):
    out, servers = tmp_path / "run", addresses(2)
    assert run(out, "--servers", *servers, "--die-at", 8)[0] == 9
    found = trained(out, "--servers", *servers, "--again")
    assert found[0]["begin"] == found[1]["begin"] >= 8
    assert all(torch.equal(found[0]["net"][name], value) for name, value in found[1]["net"].items())
    assert found[0]["losses"][-1] < 2.2, "it learned"


@pytest.mark.slow
def test_channels_last(train, plain, addresses):
    assert_same_trajectory(train("--servers", *addresses(2), "--images"), plain("--images"))


@pytest.mark.parametrize("type_", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_parameters_of_16_bits(train, plain, addresses, type_):
    """Means are rounded once here, as sums of two are there."""
    flags = ("--parameters", type_, "--sgd", "--lr", 0.2)
    found, expected = train("--servers", *addresses(2), *flags), plain(*flags)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=0.01)
        assert all(value.dtype == getattr(torch, type_) for value in mine["net"].values())
    assert all(torch.equal(found[0]["net"][name], value) for name, value in found[1]["net"].items()), "replicas differ"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--fsdp",), ("--fsdp", "--wrapper")], ids=["DDP", "FSDP2", "FSDP1"])
def test_torchrun_starts_a_killed_process_again_and_the_loss_goes_on(train, tmp_path, addresses, flags):
    servers, steps = addresses(2), 200
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
                           WORKER, "--out", tmp_path / "torchrun", "--store", tmp_path / "store", "--die-at", "42", "--steps", str(steps), *flags, "--servers", *servers],
                          capture_output=True, text=True, timeout=180, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    found = [torch.load(tmp_path / f"torchrun.{rank}", weights_only=True) for rank in range(2)]
    undisturbed = train("--servers", *servers, "--job", "undisturbed", "--steps", steps, *flags)[0]
    assert found[0]["begin"] == found[1]["begin"] >= 40
    assert all(torch.equal(found[0]["net"][name], value) for name, value in found[1]["net"].items())

    def mean(losses):
        return sum(losses) / len(losses)

    assert mean(found[0]["losses"][:10]) < mean(undisturbed["losses"][:10]) * 0.95, "it does not begin anew"
    assert mean(found[0]["losses"][-50:]) < mean(undisturbed["losses"][-50:]) * 1.1, "other batches"


@pytest.mark.parametrize("flags", [("--alone",), pytest.param(("--unused", "--idle"), marks=pytest.mark.slow),
                                   pytest.param(("--static",), marks=pytest.mark.slow)])
def test_options_of_distributed_data_parallel(train, plain, addresses, flags):
    """A group of processes of its own; parameters that are looked for, and not used; a static graph."""
    found, expected = train("--servers", *addresses(1), *flags), plain(*flags)
    if "--alone" in flags:
        assert found[0]["losses"] != found[1]["losses"]
        for one, same in zip(found, expected, strict=True):
            assert_same_trajectory([one], [same])
    else:
        assert_same_trajectory(found, expected)


@pytest.fixture
def group(tmp_path):
    """One process that is a process group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
class TestOneProcess:
    def wrapped(self, net=None):
        return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3) if net is None else net)

    def test_sparse_gradients_are_refused(self, addresses):
        model = self.wrapped(torch.nn.Embedding(10, 4, sparse=True))
        with gradwire_torch.DDPState(model, servers=addresses(1), job="sparse") as state:
            model.register_comm_hook(state, gradwire_torch.ddp_hook)
            with pytest.raises(TypeError, match="codec zen"):
                model(torch.tensor([1, 2])).sum().backward()

    def test_a_hook_that_was_forgotten_is_told(self, addresses, caplog):
        model = self.wrapped()
        with gradwire_torch.DDPState(model, servers=addresses(1), job="forgotten"):
            model(torch.ones(2, 4)).sum().backward()
        assert "register_comm_hook" in caplog.text
        caplog.clear()
        with gradwire_torch.DDPState(model, servers=addresses(1), job="used") as state:
            model.register_comm_hook(state, gradwire_torch.ddp_hook)
            model(torch.ones(2, 4)).sum().backward()
        assert not caplog.text

    @pytest.mark.parametrize("codec", ["thc:bits=4", "topk:density=0.2"])
    def test_nothing_of_a_skipped_step_comes_with_a_later_one(self, addresses, codec):
        model = self.wrapped(torch.nn.Linear(4, 3))

        def largest(*scale):
            model.zero_grad()
            (model(torch.ones(2, 4)) * torch.tensor(scale)).sum().backward()
            return torch.cat([p.grad.flatten() for p in model.parameters()]).abs().max()

        with gradwire_torch.DDPState(model, servers=addresses(1), job="skipped", codec=codec) as state:
            model.register_comm_hook(state, gradwire_torch.ddp_hook)
            for _ in range(3):
                assert 0 < largest(1e-3, 1e-3, 1e-3) < 0.1
            assert torch.isnan(largest(1e3, 1e3, float("inf")))
            for _ in range(3):
                assert largest(0.0, 0.0, 0.0) < 0.1

    def test_what_training_leaves_is_freed(self, addresses):
        model, shards = self.wrapped(), Shards(addresses(1), "freed", {})
        shards.begin(model, "")
        model(torch.ones(2, 4)).sum().backward()
        shards.end()
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None

    def test_models_with_hooks_are_copied(self, addresses):
        model = self.wrapped()
        with gradwire_torch.DDPState(model, servers=addresses(1), job="copied") as state:
            model.register_comm_hook(state, gradwire_torch.ddp_hook)
            average = torch.optim.swa_utils.AveragedModel(model)
            average.update_parameters(model)
            copy.deepcopy(model)
            pickled = pickle.loads(pickle.dumps(Shards("grpc://127.0.0.1:1", "pickled", {"codec": "fp16"})))
            assert pickled._options == {"servers": "grpc://127.0.0.1:1", "job": "pickled", "codec": "fp16"}
            model(torch.ones(2, 4)).sum().backward()
        for averaged, parameter in zip(average.parameters(), model.parameters(), strict=True):
            assert torch.equal(averaged, parameter)

    def test_a_part_may_be_called_module(self, addresses):
        net = torch.nn.Module()
        net.weight, net.module = torch.nn.Parameter(torch.ones(4)), torch.nn.Linear(4, 3)
        net.forward = lambda x: net.module(x * net.weight)
        with gradwire_torch.DDPState(self.wrapped(net), servers=addresses(1), job="module") as state:
            assert len({tensor.name for tensor in state.session.job.tensors}) == 4, "with that of what is not finite"

    def test_what_fsdp_has_sharded_is_refused_by_who_takes_whole_parameters(self):
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        def refused(model):
            with pytest.raises(TypeError, match="FSDPState"):
                gradwire_torch.ShardedOptimizer(model.named_parameters(), servers="grpc://127.0.0.1:1", job="sharded")
            with pytest.raises(TypeError, match="FSDPState"):
                gradwire_torch.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, every=2, servers="grpc://127.0.0.1:1", job="sharded")

        refused(fully_shard(torch.nn.Linear(4, 3), mesh=torch.distributed.init_device_mesh("cpu", (1,))))
        for original in (False, True):
            with warnings.catch_warnings(action="ignore"):  # of one process
                refused(FullyShardedDataParallel(torch.nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=original))

    def test_who_sends_all_gradients_anyway_hears_of_it(self, addresses):
        with pytest.warns(UserWarning, match="pass the module inside"), \
                gradwire_torch.ShardedOptimizer(self.wrapped(), servers=addresses(1), job="both"):
            pass


def test_what_is_needed_is_said():
    with pytest.raises(gradwire.FailedPrecondition, match="init_process_group"):
        gradwire_torch.DDPState(torch.nn.Linear(2, 2), servers="grpc://127.0.0.1:1", job="no group")


def test_what_may_be_pushed_is_said():
    from gradwire._means import MeanExchange

    with pytest.raises(ValueError, match="push='delta' must be 'gradient' or 'step'"):
        MeanExchange.check("spread", "delta")
    with pytest.raises(ValueError, match="step_beta2=0.9 is for push='step'"):
        MeanExchange.check("spread", "gradient", step_beta2=0.9)
    with pytest.raises(ValueError, match="step_beta2=1 must be above 0, and below 1"):
        MeanExchange.check("spread", "step", step_beta2=1)
    with pytest.raises(ValueError, match="residual_decay=2 must be above 0, and at most 1"):
        MeanExchange.check("spread", "step", residual_decay=2)


@pytest.mark.slow
def test_example(addresses):
    printed = example("ddp.py", addresses(2))
    assert re.search(r"step 100: loss [01]\.\d+, \d+ kB pushed", printed), printed
