"""Models that torch.compile has compiled, in the job of those that it has not. Dynamo and AOTAutograd are real; but for one test the
graphs that they make run in eager mode."""

import pytest

torch = pytest.importorskip("torch")
gradwire = pytest.importorskip("gradwire")
from gradwire.torch import LocalSGD, ShardedOptimizer
from test_ddp import assert_same_trajectory, plain, train  # noqa: F401  fixtures
from test_torch import in_parallel, seeded

STEPS = 12


@pytest.fixture(autouse=True)
def fresh():
    """What torch.compile imports, it cannot import in two threads at once; what it has compiled for one test serves the next."""
    torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1)).sum().backward()
    torch._dynamo.reset()


class Net(torch.nn.Module):
    """One of our own: Dynamo leaves torch's containers alone where they compile in place."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = torch.nn.Linear(12, 24), torch.nn.Linear(24, 3)

    def forward(self, inputs):
        return self.out(torch.tanh(self.hidden(inputs)))


def model_of():
    return seeded(0, Net)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compiled(model, how, backend="aot_eager"):
    if how == "in place":
        model.compile(backend=backend)
        return model
    return torch.compile(model, backend=backend)  # another module, of the names _orig_mod.out.weight ...


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
    servers, before = addresses(2), graphs()

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
    assert graphs() > before


@pytest.mark.slow
def test_a_model_that_inductor_has_compiled(addresses):
    model, reference = model_of(), model_of()
    before = graphs()
    called = compiled(model, "wrapped", "inductor")
    with ShardedOptimizer(called, servers=addresses(1), job="inductor", lr=1e-2, codec="dense:fp32", overlap=True) as optimizer:
        steps(called, optimizer, 0)
    assert graphs() > before
    steps(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0), 0)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


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
    found = train("--servers", *addresses(1), "--compile", *flags)
    assert_same_trajectory(found, plain(*flags))
    assert [process["graphs"] > 0 for process in found] == [False, True]
