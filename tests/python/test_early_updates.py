"""ShardedOptimizer(early_updates=True): updates that are applied while backward still runs."""

import time

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch
from gradwire.torch import ShardedOptimizer


@pytest.mark.parametrize("codec", ["tagc:density=0.05", "dense:values=fp32"])
def test_early_updates_come_before_step_and_compute_the_same(addresses, codec):
    servers = addresses(2)

    def wide():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 128), torch.nn.Tanh(),
                                   torch.nn.Linear(128, 64))

    def trained(early):
        model = wide()
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
        with ShardedOptimizer(model, servers=servers, job=f"early-{early}", codec=codec, lr=1e-2, overlap=True, early_updates=early,
                              bucket_bytes=1 << 14, run_elements=256) as optimizer:
            for step in range(6):
                before = model[0].weight.detach().clone()
                optimizer.zero_grad()
                (model(x) - x).pow(2).mean().backward()
                hangs = time.monotonic() + 60
                while early and step > 0 and torch.equal(model[0].weight, before) and time.monotonic() < hangs:
                    time.sleep(0.001)
                if early or step == 0:
                    assert step == 0 or not torch.equal(model[0].weight, before)
                else:
                    time.sleep(0.05)
                    assert torch.equal(model[0].weight, before), "it was not asked for"
                optimizer.step()
                assert not torch.equal(model[0].weight, before)
        return [p.detach().clone() for p in model.parameters()]

    for late, early in zip(trained(False), trained(True), strict=True):
        assert torch.equal(late, early)


def test_early_updates_are_refused_where_they_cannot_be(addresses):
    with pytest.raises(ValueError, match="early_updates=True needs overlap=True"):
        ShardedOptimizer(torch.nn.Linear(4, 4), servers=addresses(1), job="early", early_updates=True)
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="LocalSGD"):
        gradwire.torch.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), model, every=2, servers=addresses(1), job="early",
                                overlap=True, early_updates=True)
    with pytest.raises(gradwire.InvalidArgument, match="asynchronous rounds"):
        ShardedOptimizer(torch.nn.Linear(4, 4), servers=addresses(1), job="early", rounds="async", overlap=True, early_updates=True)
