"""What loops do with an optimizer beside stepping: evaluate with other weights, keep it, copy it, go back through an old graph."""

import copy

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch
from test_training_loop import LR, as_torch, loss_of, network, sharded


@pytest.mark.parametrize("type_", [torch.float32, torch.bfloat16])
def test_parameters_are_borrowed_for_an_evaluation(addresses, type_):
    def train(servers, borrows):
        model = network().to(type_)
        with sharded(model, servers, f"borrows-{borrows}") as optimizer:
            optimizer._watch._due = float("inf")  # no checksum behind any step
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
                if borrows:
                    with optimizer.borrowed_parameters(), torch.no_grad():
                        for p in model.parameters():
                            p.fill_(step)
                        assert model(torch.ones(1, 6, dtype=type_)).shape == (1, 3)
            return optimizer.digest()

    servers = addresses(1)
    assert train(servers, True) == train(servers, False)


@pytest.mark.parametrize("type_", [torch.float32, torch.bfloat16])
def test_a_backward_through_a_graph_of_before_a_step_is_refused_as_by_torch(addresses, type_):
    model = network().to(type_)
    with sharded(model, addresses(1)) as optimizer:
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()


def test_looking_at_the_state_makes_no_step(addresses):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

    model = network()
    with sharded(model, addresses(1)) as optimizer:
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        version = optimizer.session.version
        with pytest.warns(UserWarning, match="get_model_state_dict"):
            get_state_dict(model, optimizer)
        assert optimizer.session.version == version and optimizer.param_groups[0]["lr"] == LR
        loss_of(model, 1).backward()
        optimizer.step()
        assert optimizer.session.version == version + 1
        assert set(get_model_state_dict(model)) == set(model.state_dict())


def test_a_rate_of_0_is_one(addresses):
    """At the begin of a warm-up."""
    def body(model, optimizer):
        for step in range(4):
            optimizer.param_groups[0]["lr"] = LR * step
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    as_torch(addresses, body)


def test_a_copy_of_an_optimizer_is_in_no_job(addresses):
    with sharded(network(), addresses(1)) as optimizer:
        copied = copy.deepcopy(optimizer)
        with pytest.raises(gradwire.FailedPrecondition, match="a copy of a ShardedOptimizer"):
            copied.step()


def test_what_an_evaluation_does_meanwhile_does_not_go_out(addresses, tmp_path):
    """It fails, saves, steps."""
    model = network()
    with sharded(model, addresses(1)) as optimizer:
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer._watch._due, optimizer._watch._checksum = float("inf"), None
        before = optimizer.digest()
        with pytest.raises(KeyError), optimizer.borrowed_parameters():
            model[0].weight.data.zero_()
            for forbidden in (optimizer.step, optimizer.reset_parameters, lambda: optimizer.save(tmp_path / "kept")):
                with pytest.raises(gradwire.FailedPrecondition, match="borrowed_parameters"):
                    forbidden()
            raise KeyError
        assert optimizer.digest() == before
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()


def test_parameters_may_be_views_of_one_tensor(addresses):
    """They share a version counter."""
    first, second = map(torch.nn.Parameter, torch.ones(2, 4))
    with sharded([first, second], addresses(1)) as optimizer:
        optimizer._watch._due, optimizer._watch._checksum = float("inf"), None
        for _ in range(3):
            optimizer.zero_grad()
            (first * second).sum().backward()
            optimizer.step()


def test_parameters_have_an_order_and_rates_a_sign():
    model = network()
    for unordered in (set(model.parameters()), [{"params": set(model.parameters())}]):
        with pytest.raises(TypeError, match="sets have none"):
            sharded(unordered, "grpc://127.0.0.1:1")
    with pytest.raises(ValueError, match="must not be negative"):
        sharded(model, "grpc://127.0.0.1:1", lr=-1.0)
