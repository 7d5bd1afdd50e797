"""What client/python/README.md says about saving and going on, as it is written there."""

import pytest

torch = pytest.importorskip("torch")

from gradwire.torch import LocalSGD
from test_training_loop import loss_of, network, sharded


def warmed_up(optimizer):
    parts = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [4])


SCHEDULES = {"cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
             "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
             "warm-up": warmed_up}


def train(model, optimizer, schedule, steps):
    rates = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("others_went_on", [0, 2])
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.filterwarnings("ignore:this state is of version")
def test_a_schedule_goes_on_with_a_state(addresses, make, others_went_on):
    servers, model = addresses(1), network()
    expected = train(model, (undisturbed := torch.optim.SGD(model.parameters(), lr=0.05)), make(undisturbed), range(10))
    model = network()
    with sharded(model, servers) as optimizer:
        schedule = make(optimizer)
        train(model, optimizer, schedule, range(5))
        state = {"optimizer": optimizer.state_dict(checkpoint=True), "schedule": schedule.state_dict()}
        train(model, optimizer, schedule, range(5, 5 + others_went_on))
    with sharded(model, servers, resume_from=state["optimizer"]) as optimizer:
        schedule = make(optimizer)
        schedule.load_state_dict(state["schedule"])
        optimizer.load_state_dict(state["optimizer"])
        for _ in range(schedule.last_epoch, optimizer.start_step):
            schedule.step()
        steps = range(optimizer.start_step, 10)
        assert steps.start == 5 + others_went_on
        assert train(model, optimizer, schedule, steps) == pytest.approx(expected[steps.start:])


def test_local_steps_go_on_with_a_state(addresses):
    servers = addresses(1)

    def make(model, job, resume_from=None):
        local = torch.optim.AdamW(model.parameters(), lr=0.01)
        return local, LocalSGD(local, model, every=2, servers=servers, job=job, codec="dense:fp32", resume_from=resume_from)

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    model = network()
    with make(model, "undisturbed")[1] as optimizer:
        expected = train(model, optimizer, range(8))
    model = network()
    local, optimizer = make(model, "resumed")
    with optimizer:
        train(model, optimizer, range(4))
        state = {"outer": optimizer.outer.state_dict(checkpoint=True), "local": local.state_dict()}
    model = network(seed=1)
    local, optimizer = make(model, "resumed", state["outer"])
    local.load_state_dict(state["local"])
    with optimizer:
        assert all(torch.equal(p, q) for p, q in zip(train(model, optimizer, range(4, 8)), expected, strict=True))
