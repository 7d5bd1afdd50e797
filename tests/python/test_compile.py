"""Models that torch.compile has compiled, in the job of those that it has not: Dynamo and AOTAutograd are real, the code that they
make runs in eager mode."""

import pytest

torch = pytest.importorskip("torch")
gradwire = pytest.importorskip("gradwire")
from gradwire.torch import LocalSGD, ShardedOptimizer
from test_ddp import assert_same_trajectory, plain, train  # noqa: F401  fixtures
from test_torch import in_parallel, seeded

STEPS = 12


@pytest.fixture(autouse=True, scope="module")
def imported():
    """What torch.compile imports, it cannot import in two threads at once."""
    torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1)).sum().backward()


def model_of():
    return seeded(0, lambda: torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3)))


def compiled(model, how):
    if how == "in place":
        model.compile(backend="aot_eager")
        return model
    return torch.compile(model, backend="aot_eager")  # another module, of the names _orig_mod.0.weight ...


def steps(model, optimizer, worker):
    generator = torch.Generator().manual_seed(worker)
    for _ in range(STEPS):
        inputs = torch.randn(16, 12, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), inputs[:, :3] * 2).backward()
        optimizer.step()


@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"overlap": True, "early_updates": True, "codec": "dense:fp32"}],
                         ids=["default", "overlap", "early"])
def test_a_compiled_model_trains_as_the_model_itself(addresses, how, options):
    servers = addresses(2)

    def run(job):
        def work(worker):
            model = model_of()
            called = compiled(model, how) if worker == 1 and job == "compiled" else model
            with ShardedOptimizer(called, servers=servers, job=job, worker=f"w{worker}", workers=2, lr=1e-2, **options) as optimizer:
                steps(called, optimizer, worker)
            return torch.cat([p.detach().flatten() for p in model.parameters()])

        first, second = in_parallel(2, work)
        assert torch.equal(first, second), "replicas differ"
        return first

    torch.testing.assert_close(run("compiled"), run("eager"), rtol=1e-5, atol=1e-6)


def test_local_steps_of_a_compiled_model(addresses):
    servers = addresses(1)

    def run(job, how=None):
        model = model_of()
        called = compiled(model, how) if how else model
        with LocalSGD(torch.optim.SGD(called.parameters(), lr=0.05), called, every=3, servers=servers, job=job) as optimizer:
            steps(called, optimizer, 0)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.testing.assert_close(run("compiled", "wrapped"), run("eager"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flags", [(), pytest.param(("--fsdp",), marks=pytest.mark.slow)], ids=["DDP", "FSDP"])
def test_hooks_of_a_compiled_model(train, plain, addresses, flags):  # noqa: F811
    assert_same_trajectory(train("--servers", *addresses(1), "--compile", *flags), plain(*flags))
