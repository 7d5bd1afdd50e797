"""gradwire.torch.ShardedOptimizer against torch.optim, and everything a training loop does to an optimizer."""

import concurrent.futures
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import gradwire.torch
from gradwire.torch import ShardedOptimizer


class Model(torch.nn.Module):
    """Small, with a norm, a tied weight and a layer that is not always used."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(16, 24, bias=False)
        self.mlp = torch.nn.Linear(24, 24)
        self.norm = torch.nn.LayerNorm(24)
        self.unused = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(24, 16, bias=False)
        self.head.weight = torch.nn.Parameter(self.head.weight.detach().clone())

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.mlp(self.embed(x)))))


_SEED = threading.Lock()  # the default generator is one for all threads, and threads play workers


def seeded(seed, make):
    """What `make` initializes from the default generator, seeded."""
    with _SEED:
        torch.manual_seed(seed)
        return make()


def make_model(seed=0):
    return seeded(seed, Model)


def batch(step, worker=0):
    generator = torch.Generator().manual_seed(1000 * step + worker)
    x = torch.randn(32, 16, generator=generator)
    return x, torch.roll(x, 1, dims=1)


def loss_of(model, step, worker=0):
    x, y = batch(step, worker)
    return torch.nn.functional.mse_loss(model(x), y)


def in_parallel(count, body):
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return [f.result() for f in [pool.submit(body, i) for i in range(count)]]


def assert_close(a, b, tolerance=1e-6):
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("overlap", [True, False])
def test_one_worker_follows_adamw(addresses, overlap):
    model, reference = make_model(), make_model()
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 30)
    with ShardedOptimizer(model.named_parameters(), servers=addresses(2), job="adamw", lr=1e-3, weight_decay=0.05,
                          codec="dense:values=fp32", overlap=overlap) as ours:
        ours_schedule, their_schedule = schedule(ours), schedule(theirs)
        for step in range(30):
            for m, o, s in ((model, ours, ours_schedule), (reference, theirs, their_schedule)):
                o.zero_grad()
                for p in m.unused.parameters():  # torch skips parameters without gradient; ours sends zeros
                    p.grad = torch.zeros_like(p)
                loss_of(m, step).backward()
                o.step()
                s.step()
    assert_close(model, reference)


def test_two_workers_follow_adamw_on_the_mean(addresses):
    servers = addresses(2)
    reference = make_model()
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(20):
        theirs.zero_grad()
        ((loss_of(reference, step, 0) + loss_of(reference, step, 1)) / 2).backward()
        theirs.step()
    models = [make_model(), make_model()]

    def work(worker):
        with ShardedOptimizer(models[worker], servers=servers, job="mean", worker=f"w{worker}", workers=2, lr=1e-3,
                              codec="dense:values=fp32") as optimizer:
            for step in range(20):
                optimizer.zero_grad()
                loss_of(models[worker], step, worker).backward()
                optimizer.step()
            return optimizer.digest()

    first, second = in_parallel(2, work)
    assert first == second
    assert_close(models[0], reference, 1e-5)


def test_clipped_by_the_norm_of_all_tensors(addresses):
    model, reference = make_model(), make_model()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    with ShardedOptimizer(model.named_parameters(), servers=addresses(2), job="clip", optimizer="sgd", lr=0.1,
                          codec="dense:values=fp32", clip_norm=0.05) as ours:
        for step in range(20):
            ours.zero_grad()
            loss_of(model, step).backward()
            ours.step()
            theirs.zero_grad()
            loss_of(reference, step).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            theirs.step()
    assert_close(model, reference, 2e-6)


@pytest.mark.parametrize("optimizer", ["lamb", "lans", "lion"])
def test_layerwise_optimizers_learn_the_same_on_two_shards_as_on_one(addresses, optimizer):
    models = []
    for shards in (1, 2):
        models.append(make_model())
        with ShardedOptimizer(models[-1].named_parameters(), servers=addresses(shards), job=f"{optimizer}-{shards}",
                              optimizer=optimizer, lr=3e-3, codec="topk:density=0.2", weight_decay=0.01,
                              unused="zeros") as ours:
            before = loss_of(models[-1], 0).item()
            for step in range(60):
                ours.zero_grad()
                loss_of(models[-1], step).backward()
                ours.step()
            assert loss_of(models[-1], 0).item() < 0.9 * before
    assert_close(*models, tolerance=0)


def test_clipping_is_not_for_preconditioned_steps(addresses):
    with pytest.raises(gradwire.InvalidArgument, match="clip_norm"):
        ShardedOptimizer(make_model().named_parameters(), servers=addresses(1), job="steps", push="step", clip_norm=1.0)


def test_groups_keep_their_own_rates_and_decay(addresses):
    def groups(model):
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        return [{"params": decay, "weight_decay": 0.1, "lr": 2e-3}, {"params": rest, "weight_decay": 0.0}]

    model, reference = make_model(), make_model()
    theirs = torch.optim.AdamW(groups(reference), lr=1e-3)
    with ShardedOptimizer(groups(model), servers=addresses(1), job="groups", lr=1e-3,
                          codec="dense:values=fp32") as ours:
        for step in range(10):
            for m, o in ((model, ours), (reference, theirs)):
                o.zero_grad()
                for p in m.unused.parameters():
                    p.grad = torch.zeros_like(p)
                loss_of(m, step).backward()
                o.step()
    assert_close(model, reference)


def test_accumulation_does_not_push_twice(addresses):
    model, reference = make_model(), make_model()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05)
    with ShardedOptimizer(model, servers=addresses(1), job="accumulate", optimizer="sgd", lr=0.05, accumulate=2,
                          overlap=True, codec="dense:values=fp32") as ours:
        for step in range(5):
            for m, o in ((model, ours), (reference, theirs)):
                o.zero_grad()
                loss_of(m, step, 0).backward()
                loss_of(m, step, 1).backward()
                o.step()
        assert ours.stats()["steps"] == 5
    assert_close(model, reference)


def test_no_sync_and_its_misuse(addresses):
    model, reference = make_model(), make_model()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    with ShardedOptimizer(model, servers=addresses(1), job="nosync", optimizer="sgd", lr=0.05, momentum=0.9,
                          unused="zeros", overlap=True, codec="dense:values=fp32") as ours:
        for step in range(5):
            ours.zero_grad()
            with ours.no_sync():
                loss_of(model, step, 0).backward()
            loss_of(model, step, 1).backward()
            ours.step()
            theirs.zero_grad()
            loss_of(reference, step, 0).backward()
            loss_of(reference, step, 1).backward()
            theirs.step()
        assert_close(model, reference)
        ours.zero_grad()
        loss_of(model, 9).backward()
        with pytest.raises(gradwire.FailedPrecondition, match="no_sync"):
            loss_of(model, 9).backward()


def test_closure_and_state_dict(addresses):
    model = make_model()
    with ShardedOptimizer(model, servers=addresses(1), job="closure", lr=1e-3) as optimizer:
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        first = optimizer.step(closure).item()
        for _ in range(20):
            last = optimizer.step(closure).item()
        assert last < first
        state = optimizer.state_dict()
        assert state["gradwire"]["job"] == "closure" and state["gradwire"]["version"] == 22
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 1e-3


def test_nonfinite_loss(addresses):
    model = make_model()
    with ShardedOptimizer(model, servers=addresses(2), job="nan", lr=1e-3) as optimizer:
        (loss_of(model, 0) * float("nan")).backward()
        with pytest.raises(gradwire.InvalidArgument, match="non-finite"):
            optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(3):  # the refused step was to calibrate the job, so it takes one more to get going
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("codec", ["dense:values=fp32", "tagc:density=0.2"])
def test_scaled_losses_skip_the_steps_that_overflow(addresses, codec):
    servers = addresses(2)
    largest = 3000.0  # of a scaled gradient; what is larger overflows, as it would in float16

    def train(worker):
        model = make_model()

        def overflow(grad):
            return torch.where(grad.abs() > largest, torch.full_like(grad, float("inf")), grad)

        for p in model.parameters():
            p.register_hook(overflow)
        scale, good, scales, losses, last = 2.0 ** 17, 0, [], [], None
        with ShardedOptimizer(model.named_parameters(), servers=servers, job="amp", worker=f"w{worker}", workers=2,
                              codec=codec, lr=3e-3, nonfinite="skip") as optimizer:
            for step in range(80):
                optimizer.loss_scale = scale
                optimizer.zero_grad()
                loss = loss_of(model, step, worker)
                (loss * scale * (2.0 if worker == step % 2 else 1.0)).backward()  # they do not overflow alike
                before = [p.detach().clone() for p in model.parameters()]
                optimizer.step()
                changed = any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
                assert not (optimizer.skipped and changed)
                if optimizer.skipped:
                    scale, good = scale / 2, 0
                elif (good := good + 1) == 10:
                    scale, good = scale * 2, 0
                scales.append(scale)
                losses.append(loss.item())
            assert all(torch.isfinite(p).all() for p in model.parameters())
            assert optimizer.stats()["nonfinite_rounds"] > 1
            last = optimizer.digest()
        return scales, sum(losses[:5]), sum(losses[-5:]), last

    (scales, first, end, digest), other = in_parallel(2, train)
    assert scales == other[0] and digest == other[3]
    assert min(scales) < 2.0 ** 17 and any(b > a for a, b in zip(scales, scales[1:]))
    assert end < 0.8 * first


def test_the_loss_scale_is_checked(addresses):
    model = make_model()
    with ShardedOptimizer(model, servers=addresses(1), job="scale", lr=1e-3, nonfinite="skip",
                          overlap=True) as optimizer:
        for bad in (0.0, -1.0, float("inf"), float("nan")):
            with pytest.raises(ValueError, match="loss_scale"):
                optimizer.loss_scale = bad
        optimizer.loss_scale = 4.0
        (loss_of(model, 0) * 4.0).backward()
        with pytest.raises(gradwire.FailedPrecondition, match="before backward"):
            optimizer.loss_scale = 2.0
        optimizer.step()
        assert not optimizer.skipped
        reference = make_model()
        loss_of(reference, 0).backward()
        for p, r in zip(model.parameters(), reference.parameters(), strict=True):
            if r.grad is not None:
                torch.testing.assert_close(p.grad, r.grad)


def test_pushed_steps_train_with_few_bytes(addresses):
    servers = addresses(2)
    torch.manual_seed(1)
    weight = torch.randn(128, 64) / 8

    def work(worker):
        model = seeded(5, lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128)))
        generator = torch.Generator().manual_seed(worker)
        losses = []
        with ShardedOptimizer(model, servers=servers, job="sparse", worker=f"w{worker}", workers=2, lr=1e-3,
                              codec="tagc:density=0.02") as optimizer:
            for _ in range(200):
                x = torch.randn(64, 64, generator=generator)
                loss = torch.nn.functional.mse_loss(model(x), torch.relu(x @ weight.T))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            elements = sum(p.numel() for p in model.parameters())
            return losses, optimizer.digest(), optimizer.stats()["pushed_bytes"] / 200 / (4 * elements)

    results = in_parallel(2, work)
    assert results[0][1] == results[1][1]
    for losses, _, ratio in results:
        assert sum(losses[-10:]) < 0.3 * sum(losses[:10])
        assert ratio < 0.06


def test_what_cannot_be_sharded_is_named(addresses):
    model = make_model()
    model.mlp.double()
    with pytest.raises(TypeError, match="mlp.weight.*float64"):
        ShardedOptimizer(model.named_parameters(), servers=["grpc://127.0.0.1:1"], job="double")


def test_zero_grad_after_a_failed_backward_forgets_it(addresses):
    model = torch.nn.Linear(8, 4)
    with gradwire.torch.ShardedOptimizer(model, servers=addresses(1), job="j", codec="dense:fp32", lr=0.1) as optimizer:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        (model.weight * 2).sum().backward()  # nobody calls step()
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert optimizer.session.version == 3  # calibration and two rounds


def test_replaced_parameter_memory_is_an_error(addresses):
    model = torch.nn.Linear(8, 4)
    with gradwire.torch.ShardedOptimizer(model, servers=addresses(1), job="j", codec="dense:fp32", lr=0.1) as optimizer:
        model.weight.data = model.weight.data.clone()
        model(torch.ones(2, 8)).sum().backward()
        with pytest.raises(gradwire.FailedPrecondition, match="memory of parameter 'weight' was replaced"):
            optimizer.step()


def test_huge_gradient_is_refused_once_and_training_goes_on(addresses):
    model = torch.nn.Linear(8, 4, bias=False)
    with gradwire.torch.ShardedOptimizer(model, servers=addresses(1), job="j", lr=0.1) as optimizer:
        (model.weight.sum() * 1e9).backward()
        with pytest.raises(gradwire.InvalidArgument, match="huge element"):
            optimizer.step()
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        assert not torch.equal(before, model.weight)


def test_how_parameters_are_cut_goes_to_the_job(addresses):
    table, other = torch.nn.Embedding(4096, 8, sparse=True), torch.nn.Linear(64, 64)
    options = {"codec": "zen", "optimizer": "sgd", "run_elements": 256, "bucket_bytes": 4096, "exist": "new"}
    buckets = []
    for more in ({}, {"table_bucket_bytes": 1 << 17}, {"slice_bytes": 1024}):
        with ShardedOptimizer(torch.nn.ModuleList([table, other]), servers=addresses(2), job="cut", **options, **more) as optimizer:
            assert {name: getattr(optimizer.job, name) for name in more} == more
            buckets.append(optimizer.session.buckets)
    assert buckets[1] < buckets[0]  # the table is one


def test_frozen_parameters_are_said_to_be_frozen():
    model = torch.nn.Linear(8, 4).requires_grad_(False)
    with pytest.raises(ValueError, match="all 2 parameters are frozen"):
        ShardedOptimizer(model, servers=["grpc://127.0.0.1:1"], job="frozen")
    with pytest.raises(ValueError, match="empty list"):
        ShardedOptimizer([], servers=["grpc://127.0.0.1:1"], job="frozen")


def test_changed_hyper_parameters_are_not_ignored(addresses):
    model = torch.nn.Linear(8, 4)
    with ShardedOptimizer(model, servers=addresses(1), job="j", codec="dense:fp32", lr=0.1, overlap=False) as optimizer:
        model(torch.ones(2, 8)).sum().backward()
        for key, value in (("weight_decay", 0.5), ("betas", (0.5, 0.9)), ("eps", 1e-3), ("momentum", 0.9)):
            before = optimizer.param_groups[0][key]
            optimizer.param_groups[0][key] = value
            with pytest.raises(gradwire.FailedPrecondition, match=f"{key} of parameter group 0 is .* was created with"):
                optimizer.step()
            optimizer.param_groups[0][key] = before
        optimizer.param_groups[0]["betas"] = list(optimizer.param_groups[0]["betas"])  # as JSON gives it back
        optimizer.step()
        assert optimizer.session.version == 2


def test_hyper_parameters_that_cannot_count_are_refused():
    model = torch.nn.Linear(8, 4)
    servers = ["grpc://127.0.0.1:1"]
    with pytest.raises(ValueError, match="momentum and nesterov"):
        ShardedOptimizer(model, servers=servers, job="j", momentum=0.9)
    with pytest.raises(ValueError, match="group 1 has its own betas or eps"):
        ShardedOptimizer([{"params": [model.weight]}, {"params": [model.bias], "betas": (0.5, 0.6)}], servers=servers,
                         job="j")


def test_state_round_trip(addresses, tmp_path):
    model = torch.nn.Linear(8, 4)
    servers = addresses(1)
    with ShardedOptimizer(model, servers=servers, job="first", codec="dense:fp32", lr=0.1, weight_decay=0.01) as first:
        schedule = torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)
        for _ in range(2):
            first.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            first.step()
            schedule.step()
        torch.save(first.state_dict(), tmp_path / "optimizer.pt")
        assert "checkpoint" not in first.state_dict()["gradwire"]  # what lies on the shards stays there
        first.param_groups[0]["lr"] = 7.0
        first.load_state_dict(torch.load(tmp_path / "optimizer.pt"))  # the same version: no warning
        assert first.param_groups[0]["lr"] == 0.025
    state = torch.load(tmp_path / "optimizer.pt")
    with ShardedOptimizer(model, servers=servers, job="second", codec="dense:fp32", lr=0.1,
                          weight_decay=0.01) as second:
        with pytest.warns(UserWarning, match="version 3 of job 'first'.*version 0 of job 'second'"):
            second.load_state_dict(state)
        assert second.param_groups[0]["lr"] == 0.025 and second.param_groups[0]["initial_lr"] == 0.1
        model(torch.ones(2, 8)).sum().backward()
        second.step()
        state["param_groups"][0]["weight_decay"] = 0.5
        with pytest.raises(ValueError, match="weight_decay of parameter group 0 is 0.5"):
            second.load_state_dict(state)
        with pytest.raises(ValueError, match="not a state_dict"):
            second.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
        assert second.param_groups[0]["weight_decay"] == 0.01


def train(optimizer, model, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return optimizer.digest()


# Pushing steps, gradients to AdamW, and these in two rounds a step.
@pytest.mark.parametrize("codec", ["tagc:density=0.1", "dense:fp32", "powersgd:rank=2"])
@pytest.mark.parametrize("kept", ["state_dict", "file"])
def test_resumed_training_is_that_which_never_stopped(addresses, tmp_path, codec, kept):
    version_of = lambda steps: 2 * steps if codec.startswith("powersgd") else steps + 1
    model = make_model()
    with ShardedOptimizer(model, servers=addresses(2), job="resumed", codec=codec, lr=1e-2) as optimizer:
        undisturbed = train(optimizer, model, range(8))
    servers = addresses(2)
    model = make_model()
    with ShardedOptimizer(model, servers=servers, job="resumed", codec=codec, lr=1e-2) as optimizer:
        train(optimizer, model, range(5))
        if kept == "file":
            optimizer.save(tmp_path / "worker.checkpoint")
        else:
            torch.save(optimizer.state_dict(checkpoint=True), tmp_path / "optimizer.pt")
    source = tmp_path / "worker.checkpoint" if kept == "file" else torch.load(tmp_path / "optimizer.pt")
    model = make_model(seed=1)  # whatever it holds is overwritten
    with ShardedOptimizer(model, servers=servers, job="resumed", codec=codec, lr=1e-2, resume_from=source) as optimizer:
        assert optimizer.session.resumed and optimizer.session.version == version_of(5)
        assert train(optimizer, model, range(5, 8)) == undisturbed
        train(optimizer, model, range(8, 11))
    with ShardedOptimizer(model, servers=servers, job="resumed", codec=codec, lr=1e-2,
                          resume_from=tmp_path / "worker.checkpoint" if kept == "file" else None) as optimizer:
        assert not optimizer.session.resumed and optimizer.session.version == version_of(11)  # the shards' parameters
        train(optimizer, model, range(11, 12))


def test_what_cannot_be_resumed_from_is_said(addresses, tmp_path):
    model = make_model()
    path = tmp_path / "worker.checkpoint"
    servers = addresses(1)
    with ShardedOptimizer(model, servers=servers, job="resumed", lr=1e-2, overlap=True) as optimizer:
        train(optimizer, model, range(1))
        optimizer.save(path)
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        with pytest.raises(gradwire.FailedPrecondition, match="round 2 is open"):
            optimizer.save(path)
        with pytest.raises(gradwire.FailedPrecondition, match="round 2 is open"):
            optimizer.state_dict(checkpoint=True)
        state = optimizer.state_dict()
        optimizer.step()

    def resume(source, job="resumed", servers=servers, **more):
        ShardedOptimizer(model, servers=servers, job=job, lr=1e-2, resume_from=source, **more)

    with pytest.raises(ValueError, match=r"not taken by state_dict\(checkpoint=True\).*leave resume_from out"):
        resume(state)
    with pytest.raises(ValueError, match="no state_dict.. of a ShardedOptimizer"):
        resume(torch.optim.AdamW(model.parameters()).state_dict())
    with pytest.raises(gradwire.NotFound, match="nothing.checkpoint"):
        resume(tmp_path / "nothing.checkpoint")
    with pytest.raises(gradwire.FailedPrecondition, match="worker 'someone'|of 'someone'"):
        resume(path, worker="someone")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(gradwire.DataLoss, match="damaged"):
        resume(path)


def test_quorum_goes_on_without_a_late_worker_which_comes_back(addresses):
    servers = addresses(2)
    slow = 2

    def train(worker):
        model = make_model()
        with ShardedOptimizer(model.named_parameters(), servers=servers, job="quorum", worker=f"w{worker}", workers=3,
                              quorum=2, lr=1e-3, codec="tagc:density=0.2") as optimizer:
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
            skipped = 0
            for step in range(40):
                optimizer.zero_grad()
                loss_of(model, step, worker).backward()
                if worker == slow and step in (20, 30):
                    time.sleep(1.0)
                optimizer.step()
                skipped += optimizer.skipped_rounds
                for _ in range(1 + optimizer.skipped_rounds):
                    schedule.step()
            stats = optimizer.stats()
            assert stats["skipped_rounds"] == skipped
            return stats

    stats = in_parallel(3, train)
    assert stats[slow]["not_included_frames"] > 0
    assert all(s["steps"] == 40 for s in stats)


def test_bounded_staleness_agrees_when_it_is_over(addresses):
    servers = addresses(2)

    def work(worker):
        model = make_model()
        with ShardedOptimizer(model.named_parameters(), servers=servers, job="bounded", worker=f"w{worker}", workers=2,
                              rounds="bounded:2", lr=1e-3, codec="tagc:density=0.2") as optimizer:
            for step in range(20):
                optimizer.zero_grad()
                loss_of(model, step, worker).backward()
                optimizer.step()
            optimizer.drain()
            assert optimizer.session.version == 21
            assert optimizer.state_dict(checkpoint=True)["gradwire"]["checkpoint"].numel() > 0
            return optimizer.digest()

    assert len(set(in_parallel(2, work))) == 1


def test_asynchronous_training_learns(addresses):
    servers = addresses(2)

    def work(worker):
        model = make_model()
        with ShardedOptimizer(model.named_parameters(), servers=servers, job="async", worker=f"w{worker}", workers=2,
                              rounds="async", lr=5e-3, codec="tagc:density=0.2") as optimizer:
            losses = []
            for step in range(60):
                optimizer.zero_grad()
                loss = loss_of(model, step, worker)
                loss.backward()
                losses.append(float(loss))
                optimizer.step()
            assert optimizer.session.version > 60
            return sum(losses[-5:]) / sum(losses[:5])

    assert all(ratio < 0.95 for ratio in in_parallel(2, work))


def test_quorum_above_the_workers_is_refused(addresses):
    with pytest.raises(gradwire.InvalidArgument, match="quorum = 3 is above max_workers = 2"):
        ShardedOptimizer(make_model(), servers=addresses(1), job="quorum", workers=2, quorum=3)
    with pytest.raises(ValueError, match="quorum"):
        ShardedOptimizer(make_model(), servers=addresses(1), job="quorum", quorum=-1)
