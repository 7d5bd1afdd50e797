"""Loops as they are written for torch.optim: each trains as plain torch does, or says what to do."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch
from gradwire import _watch
from gradwire.torch import ShardedOptimizer
from test_torch import assert_close, in_parallel, seeded

LR = 0.05


def network(seed=0):
    return seeded(seed, lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)))


def loss_of(model, step, worker=0):
    generator = torch.Generator().manual_seed(100 * step + worker)
    x = torch.randn(16, 6, generator=generator)
    return torch.nn.functional.mse_loss(model(x.to(model[0].weight.dtype)).float(), x[:, :3] * 2)


def sharded(model, servers, job="loop", **options):
    return ShardedOptimizer(model, servers=servers, job=job, codec="dense:values=fp32", **{"lr": LR, **options})


def as_torch(addresses, body, ours=None, theirs=torch.optim.AdamW, **options):
    """Runs the loop `body(model, optimizer)` on both; their parameters must agree."""
    model, reference = network(), network()
    body(reference, theirs(reference.parameters(), lr=LR, weight_decay=0.0, **options))
    with sharded(model, addresses(2), **options, **(ours or {})) as optimizer:
        body(model, optimizer)
    assert_close(model, reference)


# Several losses, and gradients that change behind backward() ----------------------------------------------------------


def test_gradients_of_another_loss_are_discarded_by_zero_grad(addresses):
    """A GAN: the generator's loss leaves gradients in the discriminator."""

    def train(servers):
        generator, discriminator = network(1), network(2)
        discriminator[0] = torch.nn.Linear(3, 8)
        if servers is None:
            of_g = torch.optim.AdamW(generator.parameters(), lr=LR, weight_decay=0.0)
            of_d = torch.optim.AdamW(discriminator.parameters(), lr=LR, weight_decay=0.0)
        else:
            of_g, of_d = sharded(generator, servers, "g"), sharded(discriminator, servers, "d")
        for step in range(5):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            of_d.zero_grad()
            (discriminator(generator(x).detach()).square().mean() - discriminator(x[:, :3]).mean()).backward()
            of_d.step()
            of_g.zero_grad()
            discriminator(generator(x)).mean().backward()
            of_g.step()
        return generator, discriminator

    for ours, theirs in zip(train(addresses(1)), train(None), strict=True):
        assert_close(ours, theirs)


def test_clipped_gradients_are_those_that_count(addresses):
    def body(model, optimizer):
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()

    as_torch(addresses, body, theirs=torch.optim.SGD, ours={"optimizer": "sgd"})


def test_gradients_accumulate_over_backward_passes(addresses):
    def body(model, optimizer):
        for step in range(5):
            optimizer.zero_grad()
            for part in range(3):
                (loss_of(model, step, part) / 3).backward()
            optimizer.step()

    as_torch(addresses, body)


def test_what_comes_too_late_behind_an_overlapping_backward_is_an_error(addresses):
    model = network()
    with sharded(model, addresses(1), overlap=True) as optimizer:
        loss_of(model, 0).backward()
        with pytest.raises(gradwire.FailedPrecondition, match="call step\\(\\) first.*without overlap=True"):
            optimizer.zero_grad()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        for _ in range(2):
            with pytest.raises(gradwire.FailedPrecondition, match="clipping.*without overlap=True"):
                optimizer.step()


# Parameter groups -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "message"), [({"maximize": True}, "maximize=True.*negate the loss"),
                                                 ({"amsgrad": True}, "amsgrad=True"), ({"dampening": 0.5}, "dampening=0.5")])
def test_options_of_a_group_that_shards_do_not_know_are_refused(addresses, option, message):
    model = network()
    with pytest.raises(ValueError, match="group 1 has " + message):
        sharded([{"params": model[0].parameters()}, {"params": model[2].parameters(), **option}], ["grpc://127.0.0.1:1"])
    with sharded(model, addresses(1)) as optimizer:
        loss_of(model, 0).backward()
        optimizer.param_groups[0].update(option)
        with pytest.raises(gradwire.FailedPrecondition, match="of parameter group 0 is .*created with False"):
            optimizer.step()
        optimizer.param_groups[0].update(dict.fromkeys(option, False))
        optimizer.step()


def test_a_parameter_of_two_groups_is_refused_as_by_torch():
    model = network()
    groups = [{"params": model.parameters()}, {"params": model[0].parameters(), "lr": 0.5}]
    with pytest.raises(ValueError, match="'param.4' is in parameter group 0 and in group 1"):
        sharded(groups, ["grpc://127.0.0.1:1"])


def test_parameters_that_share_memory_are_refused(addresses):
    model = torch.nn.ModuleDict({"in": torch.nn.Linear(4, 6, bias=False), "out": torch.nn.Linear(4, 6, bias=False),
                                 "empty": torch.nn.Linear(4, 0)})
    model["out"].weight.data = model["in"].weight.data
    with pytest.raises(ValueError, match="'(in|out).weight' and '(in|out).weight' share memory"):
        sharded(model, ["grpc://127.0.0.1:1"], connect_timeout=0.1)
    model["out"].weight = model["in"].weight
    with sharded(model, addresses(1), unused="zeros") as optimizer:
        model["out"](torch.ones(1, 4)).sum().backward()
        optimizer.step()


# Schedulers -----------------------------------------------------------------------------------------------------------


def test_one_cycle_without_momentum(addresses):
    def body(model, optimizer):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8, cycle_momentum=False)
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            schedule.step()

    as_torch(addresses, body)


def test_a_script_that_runs_again_takes_up_its_schedule(addresses):
    """start_step; and torch does not warn that the scheduler was advanced before the first step of this optimizer."""
    servers, steps = addresses(2), 6

    def train(model, optimizer, first, last):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        for _ in range(first):
            schedule.step()
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            schedule.step()
        return model

    reference = network()
    train(reference, torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.0), 0, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for first, last in ((0, 2), (2, steps)):
            model = network(first)
            with sharded(model, servers) as optimizer:
                assert optimizer.start_step == first
                train(model, optimizer, first, last)
    assert_close(model, reference)


def test_a_step_of_two_rounds_is_one_step(addresses):
    servers, model = addresses(1), network()
    for first in (0, 3):
        with ShardedOptimizer(model, servers=servers, job="two", codec="powersgd:rank=1", lr=LR) as optimizer:
            assert optimizer.start_step == first
            for step in range(3):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()


def test_cycling_momentum_is_refused_when_the_scheduler_is_made(addresses):
    model = network()
    with sharded(model, addresses(1)) as optimizer:
        with pytest.raises(ValueError, match="cycle_momentum"):
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
        with pytest.raises(ValueError, match="cycle_momentum"):
            torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1)
        optimizer.param_groups[0]["betas"] = (0.95, 0.999)
        loss_of(model, 0).backward()
        with pytest.raises(gradwire.FailedPrecondition, match="betas of parameter group 0.*cycle_momentum=False"):
            optimizer.step()


# Writes from outside --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["load_state_dict", "clamp_", "init", "data"])
def test_writes_from_outside_are_noticed(addresses, write):
    model = network()
    saved = copy.deepcopy(network(7).state_dict())
    with sharded(model, addresses(1)) as optimizer:
        with torch.no_grad():
            if write == "load_state_dict":
                model.load_state_dict(saved)
            elif write == "clamp_":
                model[0].weight.clamp_(-0.01, 0.01)
            elif write == "init":
                torch.nn.init.zeros_(model[2].bias)
            else:  # past torch's version counters
                model[0].weight.data.clamp_(-0.01, 0.01)
        loss_of(model, 0).backward()
        for _ in range(2):
            with pytest.raises(gradwire.FailedPrecondition, match="was written to outside of step"):
                optimizer.step()
        assert optimizer.session.version == 0


def test_weights_that_are_clipped_by_their_data_are_noticed_soon(addresses):
    model = network()
    with sharded(model, addresses(1)) as optimizer:
        with pytest.raises(gradwire.FailedPrecondition, match="through p.data"):
            for step in range(50_000):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
                for p in model.parameters():
                    p.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("workers", [1, 2])
def test_parameters_that_are_loaded_in_mid_job_are_brought_to_all(addresses, workers):
    """As torch: the optimizer goes on with its moments and step counts from the loaded parameters."""
    saved = network(7).state_dict()

    def train(model, optimizer, worker, reset):
        for step in range(8):
            if step == 3:
                model.load_state_dict(saved)
                reset()
            elif step == 5:
                with torch.no_grad():
                    model[0].weight.clamp_(-0.02, 0.02)
                    model[2].bias.data.fill_(0.25)
                reset()
            optimizer.zero_grad()
            sum(loss_of(model, step, w) for w in range(workers)).div(workers).backward() if worker is None else \
                loss_of(model, step, worker).backward()
            optimizer.step()

    reference = network()
    train(reference, torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.0), None, lambda: None)
    servers = addresses(2)

    def one(worker):
        model = network()
        with sharded(model, servers, worker=f"w{worker}", workers=workers) as optimizer:
            train(model, optimizer, worker, optimizer.reset_parameters)
            assert not optimizer.skipped
            return model, optimizer.digest()

    ended = in_parallel(workers, one)
    assert len({digest for _, digest in ended}) == 1
    for model, _ in ended:
        assert_close(model, reference)


def test_error_of_a_write_names_the_remedy_and_the_remedy_works(addresses):
    model = network()
    with sharded(model, addresses(1)) as optimizer:
        loss_of(model, 0).backward()
        optimizer.step()
        model.load_state_dict(network(7).state_dict())
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        with pytest.raises(gradwire.FailedPrecondition, match=r"call reset_parameters\(\) on every worker"):
            optimizer.step()
        optimizer.reset_parameters()
        optimizer.step()
        assert optimizer.session.version == 4


def test_reset_parameters_refuses_what_it_cannot_do(addresses):
    model = network()
    with sharded(model, addresses(1)) as optimizer:
        with pytest.raises(gradwire.FailedPrecondition, match="before the first step"):
            optimizer.reset_parameters()
        loss_of(model, 0).backward()
        optimizer.step()
        with torch.no_grad():
            kept = model[0].weight[1, 2].item()
            model[0].weight[1, 2] = float("nan")
        with pytest.raises(gradwire.InvalidArgument, match="tensor '0.weight', element 8"):
            optimizer.reset_parameters()
        with torch.no_grad():
            model[0].weight[1, 2] = kept
        optimizer.reset_parameters()
        optimizer.step()
    with sharded(network(), addresses(1), "late", rounds="bounded:1") as optimizer:
        with pytest.raises(gradwire.GradwireError, match="rounds.mode bounded"):
            optimizer.reset_parameters()


def test_workers_that_reset_to_other_parameters_are_told(addresses):
    servers = addresses(1)

    def one(worker):
        model = network()
        optimizer = sharded(model, servers, worker=f"w{worker}", workers=2)
        loss_of(model, 0, worker).backward()
        optimizer.step()
        model.load_state_dict(network(worker).state_dict())
        try:
            optimizer.reset_parameters()
            return "reset"
        except gradwire.FailedPrecondition as error:
            return str(error)
        finally:
            optimizer.close(drain=False)

    ended = in_parallel(2, one)
    assert sum("the same values, to the last bit" in text for text in ended) == 1, ended


def test_what_is_written_back_is_no_harm(addresses):
    """Averaged weights that are swapped in for an evaluation, and out again."""
    model = network()
    with sharded(model, addresses(1)) as optimizer:
        saved = copy.deepcopy(model.state_dict())
        model.load_state_dict(network(7).state_dict())
        model.load_state_dict(saved)
        loss_of(model, 0).backward()
        optimizer.step()


@pytest.mark.parametrize("between", ["drain", "save", "state_dict"])
def test_updates_that_a_drain_brings_are_no_writes(addresses, tmp_path, monkeypatch, between):
    monkeypatch.setattr(_watch, "_COST", 0)  # a checksum behind every step,
    monkeypatch.setattr(_watch, "_COST_OF_LONG", 0)  # also behind one that took long
    servers = addresses(1)

    def one(worker):
        model = network()
        with sharded(model, servers, worker=f"w{worker}", workers=2, rounds="bounded:2") as optimizer:
            for step in range(12):
                optimizer.zero_grad()
                loss_of(model, step, worker).backward()
                optimizer.step()
                if step % 4 == 3:
                    getattr(optimizer, between)(*([tmp_path / f"{worker}"] if between == "save" else []))
            loss_of(model, 12, worker).backward()
            optimizer.step()
            model[2].bias.data.add_(1)
            with pytest.raises(gradwire.FailedPrecondition, match="through p.data"):
                optimizer.step()

    in_parallel(2, one)


# Loss scaling ---------------------------------------------------------------------------------------------------------


def overflow_at(model, limit):
    """Gradients above `limit` overflow, as they would in float16."""
    for p in model.parameters():
        p.register_hook(lambda grad: torch.where(grad.abs() > limit, torch.full_like(grad, float("inf")), grad))


def scaler_of(enabled=True):
    return torch.amp.GradScaler("cpu", init_scale=2.0 ** 18, growth_interval=4, enabled=enabled)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("nonfinite", ["refuse", "skip"])
def test_a_grad_scaler_works_as_it_stands(addresses, clip, nonfinite):
    scales = []

    def body(model, optimizer):
        overflow_at(model, 3e4)
        scaler = scaler_of()
        seen = []
        for step in range(16):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        assert any(b < a for a, b in zip(seen, seen[1:])) and any(b > a for a, b in zip(seen, seen[1:]))
        scales.append(seen)

    as_torch(addresses, body, ours={"nonfinite": nonfinite})
    assert scales[0] == scales[1]


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scalers_of_two_workers_go_alike(addresses, unscale):
    """Only one of them overflows at a time; plain torch with the mean of both gradients is the measure."""
    limit = 3e4
    reference, seen = network(), []
    theirs, scaler = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=0.0), scaler_of()
    for step in range(16):
        theirs.zero_grad()
        grads = []
        for worker in range(2):
            loss = scaler.scale(loss_of(reference, step, worker)) * (4.0 if worker == step % 2 else 1.0)
            grads.append([torch.where(g.abs() > limit, torch.full_like(g, float("inf")), g)
                          for g in torch.autograd.grad(loss, list(reference.parameters()))])
        for p, a, b in zip(reference.parameters(), *grads, strict=True):
            p.grad = (a + b) / 2
        scaler.step(theirs)
        scaler.update()
        seen.append(scaler.get_scale())
    assert min(seen) < 2.0 ** 18 and any(b > a for a, b in zip(seen, seen[1:]))
    servers = addresses(2)

    def work(worker):
        model, scales, skipped = network(), [], 0
        overflow_at(model, limit)
        own = scaler_of()
        with sharded(model, servers, worker=f"w{worker}", workers=2, nonfinite="skip") as optimizer:
            for step in range(16):
                optimizer.zero_grad()
                (own.scale(loss_of(model, step, worker)) * (4.0 if worker == step % 2 else 1.0)).backward()
                if unscale:
                    own.unscale_(optimizer)
                own.step(optimizer)
                own.update()
                skipped += optimizer.skipped
                scales.append(own.get_scale())
            assert optimizer.stats()["nonfinite_rounds"] == skipped > 1
            return model, scales, optimizer.digest()

    (first, scales, digest), other = in_parallel(2, work)
    assert scales == other[1] == seen and digest == other[2]
    assert_close(first, reference, 1e-5)


def test_what_a_grad_scaler_needs_is_said(addresses):
    model = network()
    with sharded(model, addresses(1), max_workers=2) as optimizer:  # another worker may come
        scaler = scaler_of()
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(gradwire.FailedPrecondition, match="needs nonfinite='skip'"):
            scaler.step(optimizer)
        optimizer.zero_grad()  # what the scaler handed over does not stay
        loss_of(model, 0).backward()
        optimizer.step()
        scaler = scaler_of(enabled=False)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.session.version == 3
    with sharded(model, addresses(1), "overlap", overlap=True) as optimizer:
        scaler = scaler_of()
        scaler.scale(loss_of(model, 0)).backward()
        with pytest.raises(gradwire.FailedPrecondition, match="overlap=True.*still scaled"):
            scaler.step(optimizer)


def test_advice_for_a_gradient_that_is_not_finite(addresses):
    model = network()
    with sharded(model, addresses(1)) as optimizer:
        (loss_of(model, 0) * float("inf")).backward()
        with pytest.raises(gradwire.InvalidArgument, match="non-finite element.*nonfinite=\"skip\"") as raised:
            optimizer.step()
        assert "sanitize" not in str(raised.value)


# A step() that does not end as it should ------------------------------------------------------------------------------


def fail_next_round(optimizer, error, when):
    end = optimizer.session.end_round

    def fail():
        del optimizer.session.end_round
        if when == "behind its end":
            end()
        raise error

    optimizer.session.end_round = fail


@pytest.mark.parametrize("rounds", ["sync", "bounded:2"])
@pytest.mark.parametrize("when", ["while it waits", "behind its end"])
def test_ctrl_c_in_step_loses_no_round_and_makes_none_twice(addresses, when, rounds):
    model, reference = network().to(torch.bfloat16), network().to(torch.bfloat16)

    def train(model, optimizer, interrupted):
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step == interrupted:
                fail_next_round(optimizer, KeyboardInterrupt, when)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
                if when == "behind its end":
                    continue
                with pytest.raises(gradwire.FailedPrecondition, match="interrupted.*call step"):
                    optimizer.zero_grad()
            optimizer.step()
        optimizer.drain()
        return optimizer.digest()

    servers = addresses(1)
    with sharded(model, servers, "interrupted", rounds=rounds) as ours, sharded(reference, servers, "not", rounds=rounds) as theirs:
        digests = train(model, ours, 2), train(reference, theirs, None)
        assert ours.stats()["steps"] == 5
        assert ours._masters.published()
    if rounds == "sync":  # which updates a gradient lacks is not the same in two runs of others
        assert digests[0] == digests[1]
        assert_close(model, reference, tolerance=0)


def test_ctrl_c_in_reset_parameters(addresses):
    model = network()
    with sharded(model, addresses(1)) as optimizer:
        loss_of(model, 0).backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight.fill_(2.0)
        fail_next_round(optimizer, KeyboardInterrupt, "behind its end")
        with pytest.raises(KeyboardInterrupt):
            optimizer.reset_parameters()
        optimizer.step()
        assert (model[0].weight - 2.0).abs().max() < 0.5


def test_a_closure_runs_once_in_a_step_that_is_called_again(addresses):
    model, losses = network(), []
    with sharded(model, addresses(1)) as optimizer:
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, len(losses))
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
        fail_next_round(optimizer, gradwire.DeadlineExceeded("others are slow"), "while it waits")
        with pytest.raises(gradwire.DeadlineExceeded):
            optimizer.step(closure)
        assert optimizer.step(closure).item() == losses[1] and len(losses) == 2
        assert optimizer.step(closure).item() == losses[2] and optimizer.stats()["steps"] == 3


# A constructor that fails, in a cell of a notebook that then runs again -----------------------------------------------


def test_a_state_of_other_hyper_parameters_is_refused_before_the_job_is_joined(addresses):
    servers, model = addresses(1), network()
    with sharded(model, servers) as optimizer:
        loss_of(model, 0).backward()
        optimizer.step()
        state = optimizer.state_dict(checkpoint=True)
    state["param_groups"][0]["weight_decay"] = 0.5
    with pytest.raises(ValueError, match="weight_decay of parameter group 0 is 0.5"):
        sharded(model, ["grpc://127.0.0.1:1"], resume_from=state)


def test_whoever_fails_behind_joining_has_left(addresses, monkeypatch):
    servers, model = addresses(1), network()
    with monkeypatch.context() as patched:
        patched.setattr(_watch.Watch, "accept", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError) as kept:  # with its traceback, as IPython keeps it
            sharded(model, servers, lease_ms=60_000)
    with sharded(model, servers, lease_ms=60_000, start_timeout=5.0) as optimizer:
        loss_of(model, 0).backward()
        optimizer.step()
    assert kept.tb
