"""Parameters without a gradient: they stay as they are under torch, and a checkpoint says which they were."""

import copy

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch
from test_torch import assert_close, seeded
from test_training_loop import LR, sharded


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = seeded(0, lambda: (torch.nn.Linear(4, 4), torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)))

    def forward(self, x, head):
        return (self.first if head == 0 else self.second)(torch.tanh(self.body(x)))


def head_loss(model, step, head):
    return model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step)), head).square().mean()


def train_heads(model, optimizer, heads):
    for step, head in enumerate(heads):
        optimizer.zero_grad()
        head_loss(model, step, head).backward()
        optimizer.step()


@pytest.mark.parametrize(("theirs", "ours", "heads"), [
    (torch.optim.AdamW, {}, [0, 0, 0, 0]),  # never used, no decay: as torch's
    (torch.optim.SGD, {"optimizer": "sgd"}, [0, 1, 0, 1]),  # SGD forgets, and counts no steps
])
def test_unused_parameters_stay_as_they_are(addresses, theirs, ours, heads):
    model, reference = TwoHeads(), TwoHeads()
    train_heads(reference, theirs(reference.parameters(), lr=LR, weight_decay=0.0), heads)
    with sharded(model, addresses(2), **ours) as optimizer:
        train_heads(model, optimizer, heads)
    assert_close(model, reference)


@pytest.mark.parametrize(("options", "heads", "message"), [
    ({"weight_decay": 0.1}, [0], "second.* has no gradient in this step.*would let it decay.*weight_decay=0.*unused='zeros'"),
    ({}, [0, 1], "second.* has its first gradient in step 2.*unused='zeros'|first.*momentum goes on.*unused='zeros'"),
    ({"optimizer": "sgd", "momentum": 0.9}, [0, 1], "first.* had one before.*momentum goes on.*unused='zeros'"),
])
def test_unused_parameters_that_would_change_are_an_error(addresses, options, heads, message):
    model = TwoHeads()
    with sharded(model, addresses(1), **options) as optimizer:
        train_heads(model, optimizer, heads[:-1])
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(gradwire.FailedPrecondition, match=message):
            train_heads(model, optimizer, heads[-1:])
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("as_file", [False, True])
def test_unused_parameters_are_remembered_by_a_state(addresses, tmp_path, as_file):
    servers, model = addresses(1), TwoHeads()
    with sharded(model, servers) as optimizer:
        train_heads(model, optimizer, [0, 0])
        saved = tmp_path / "state" if as_file else optimizer.state_dict(checkpoint=True)
        if as_file:
            optimizer.save(saved)
    with sharded(model, servers, resume_from=saved) as optimizer:
        with pytest.raises(gradwire.FailedPrecondition, match="first.* has no gradient in this step and had one before"):
            train_heads(model, optimizer, [1])
        optimizer.zero_grad()
        (head_loss(model, 2, 0) + head_loss(model, 2, 1)).backward()
        with pytest.raises(gradwire.FailedPrecondition, match="second.* has its first gradient in step 3 of this optimizer"):
            optimizer.step()
        train_heads(model, optimizer, [0])


def test_steps_without_any_gradient_are_remembered_by_a_file(addresses, tmp_path):
    servers, model = addresses(1), TwoHeads()
    with sharded(model, servers) as optimizer:
        optimizer.save(tmp_path / "none")
    with sharded(model, servers, resume_from=tmp_path / "none") as optimizer:
        optimizer.step()
        optimizer.step()
        optimizer.save(tmp_path / "state")
    with sharded(model, addresses(1), resume_from=tmp_path / "none") as optimizer:
        train_heads(model, optimizer, [0])
    with sharded(model, servers, resume_from=tmp_path / "state") as optimizer:
        with pytest.raises(gradwire.FailedPrecondition, match="has its first gradient in step 3 of this optimizer"):
            train_heads(model, optimizer, [0])


@pytest.mark.parametrize("notes", [{"had_gradients": "11111"}, {"had_gradients": "1111110"}, {"had_gradients": "11111x"},
                                   {"had_gradients": ""}, {"had_gradients": "111111", "steps": "-1"}])
def test_a_file_with_notes_that_no_optimizer_made_is_refused(addresses, tmp_path, notes):
    servers, model = addresses(1), TwoHeads()
    with sharded(model, servers, unused="zeros") as optimizer:
        train_heads(model, optimizer, [0, 0])
        optimizer.session._save(tmp_path / "state", notes)
        with pytest.raises(gradwire.DataLoss, match="/state' was changed: its notes, had_gradients.*leave resume_from out"):
            sharded(model, servers, resume_from=tmp_path / "state")
        train_heads(model, optimizer, [0])  # it was not closed for the other one


def test_a_file_may_begin_a_job_of_fewer_parameters(addresses, tmp_path, caplog):
    servers, model = addresses(1), TwoHeads()
    with sharded(model, servers) as optimizer:
        train_heads(model, optimizer, [0, 0])
        optimizer.save(tmp_path / "state")
    model.second.requires_grad_(False)
    with sharded(model, servers, "fewer", resume_from=tmp_path / "state") as optimizer:
        train_heads(model, optimizer, [0])
    assert "does not say" not in caplog.text


@pytest.mark.parametrize("as_file", [False, True])
def test_a_file_that_does_not_say_which_parameters_had_gradients_is_told(addresses, tmp_path, caplog, as_file):
    servers, model = addresses(1), TwoHeads()
    with sharded(model, servers) as optimizer:
        train_heads(model, optimizer, [0, 0])
        optimizer.session.save(saved := tmp_path / "state")
        if not as_file:  # a state of before, when a file had no notes
            saved = optimizer.state_dict()
            saved["gradwire"] |= {"checkpoint": torch.frombuffer(bytearray((tmp_path / "state").read_bytes()), dtype=torch.uint8),
                                  "had_gradients": [True] * 4 + [False] * 2}
    with sharded(model, servers, resume_from=saved) as optimizer:
        assert "does not say which parameters had gradients" in caplog.text
        with pytest.raises(gradwire.FailedPrecondition, match="has no gradient in this step and had one before"):
            train_heads(model, optimizer, [0])
    caplog.clear()
    with sharded(model, servers, resume_from=saved, unused="zeros") as optimizer:
        train_heads(model, optimizer, [0])
    assert "does not say" not in caplog.text


def test_unused_parameters_may_count_as_zeros(addresses):
    model, reference = TwoHeads(), TwoHeads()
    theirs = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.1)
    for p in reference.parameters():
        p.grad = torch.zeros_like(p)
    for step, head in enumerate([0, 1, 1, 0]):
        theirs.zero_grad(set_to_none=False)
        head_loss(reference, step, head).backward()
        theirs.step()
    with sharded(model, addresses(2), weight_decay=0.1, unused="zeros") as optimizer:
        train_heads(model, optimizer, [0, 1, 1, 0])
    assert_close(model, reference)
    with pytest.raises(ValueError, match="unused='ignore' must be one of"):
        sharded(model, ["grpc://127.0.0.1:1"], unused="ignore")


def test_a_parameter_that_is_unfrozen_later_is_not_forgotten(addresses):
    model = TwoHeads()
    model.second.requires_grad_(False)
    with sharded(model, addresses(1)) as optimizer:
        train_heads(model, optimizer, [0, 0])
        model.second.requires_grad_(True)
        with pytest.raises(gradwire.FailedPrecondition, match="'second.weight' was frozen when the optimizer was made"):
            train_heads(model, optimizer, [1])
        model.second.requires_grad_(False)
        train_heads(model, optimizer, [0])

    def thaw(model, optimizer):  # what the message says
        model.second.requires_grad_(False)
        train_heads(model, optimizer, [0, 0])
        model.second.requires_grad_(True)
        train_heads(model, optimizer, [1, 1])

    model, reference = TwoHeads(), TwoHeads()
    thaw(reference, torch.optim.SGD(reference.parameters(), lr=LR))
    with sharded(model, addresses(1), "thaw", optimizer="sgd", unused="zeros") as optimizer:
        thaw(model, optimizer)
    assert_close(model, reference)


def test_missing_gradients_are_float32_whatever_the_default_type(addresses):
    model = TwoHeads()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with sharded(model, addresses(1), unused="zeros") as optimizer:
            for step in range(2):
                optimizer.zero_grad()
                model(torch.ones(8, 4, dtype=torch.float32), 0).square().mean().backward()
                optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
