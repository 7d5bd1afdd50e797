"""LocalSGD against the same algorithm in plain torch."""

import contextlib
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import references
from conftest import ROOT

torch = pytest.importorskip("torch")
gradwire = pytest.importorskip("gradwire")
from gradwire import _core
from gradwire.torch import LocalSGD
from test_torch import in_parallel, seeded
from test_training_loop import fail_next_round

EVERY, ROUNDS, LR, OUTER = 4, 5, 0.01, dict(lr=0.7, momentum=0.9, nesterov=True)
DILOCO = dict(codec="dense:fp32")
MEAN = dict(lr=1.0, momentum=0.0)  # for few local steps, whose rounds go the same way


def model_of(width=24):
    return seeded(0, lambda: torch.nn.Sequential(torch.nn.Linear(12, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)))


def batches(worker):
    generator = torch.Generator().manual_seed(100 + worker)
    while True:
        inputs = torch.randn(16, 12, generator=generator)
        yield inputs, inputs[:, :3] * 2


def backward(model, batch):
    model.zero_grad()
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    return loss.item()


def train(model, addresses, worker=0, workers=1, steps=EVERY * ROUNDS, defaults=DILOCO, pause=0.0, waits=None, **options):
    """A worker; returns its losses and what was told of its session. pause: before each step of worker 1. waits: who had to call
    again."""
    losses, data = [], batches(worker)
    local = torch.optim.AdamW(model.parameters(), lr=LR)
    with LocalSGD(local, model, every=EVERY, servers=addresses, job="local", workers=workers, worker=f"w{worker}",
                  **defaults, **options) as optimizer:
        for _ in range(steps):
            losses.append(backward(model, next(data)))
            if worker == 1:
                time.sleep(pause)
            try:
                optimizer.step()
            except gradwire.DeadlineExceeded:
                waits.append(worker)
                patiently(optimizer.synchronize)
        stats = optimizer.stats()
    return losses, stats


def patiently(wait):
    for _ in range(100):
        with contextlib.suppress(gradwire.DeadlineExceeded):
            return wait()
    raise AssertionError("no end")


def parameters_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain_mean(progress):
    return [torch.stack(moved).mean(0) for moved in zip(*progress, strict=True)]


def reference(workers, late=False, mean=plain_mean, outer_options=OUTER):
    """Every worker's parameters after the same rounds. late: updates come one round late, as overlap=True has them. mean: of
    progress[worker][tensor]."""
    models = [model_of() for _ in range(workers)]
    local = [torch.optim.AdamW(m.parameters(), lr=LR) for m in models]
    data = [batches(w) for w in range(workers)]
    shared = [torch.nn.Parameter(p.detach().clone()) for p in models[0].parameters()]
    outer = torch.optim.SGD(shared, **outer_options)
    begin = [[p.detach().clone() for p in m.parameters()] for m in models]
    waiting = None  # the progress of all workers that is on its way

    def update(progress):
        for s, gradient in zip(shared, mean(progress), strict=True):
            s.grad = gradient
        outer.step()

    with torch.no_grad():
        for _ in range(ROUNDS):
            for m, o, d in zip(models, local, data):
                for _ in range(EVERY):
                    with torch.enable_grad():
                        backward(m, next(d))
                    o.step()
            progress = [[b - p for b, p in zip(begin[w], m.parameters())] for w, m in enumerate(models)]
            kept = progress if late else [[torch.zeros_like(s) for s in shared]] * workers
            if not late:
                update(progress)
            elif waiting is not None:
                update(waiting)
            if late and waiting is None:  # the first round: nothing has come yet
                kept = None
            waiting = progress
            for w, m in enumerate(models):
                for i, p in enumerate(m.parameters()):
                    if kept is not None:
                        p.copy_(shared[i] - kept[w][i])
                    begin[w][i].copy_(p)
        if late:
            update(waiting)
            for m in models:
                for p, s in zip(m.parameters(), shared):
                    p.copy_(s)
    return [parameters_of(m) for m in models]


@pytest.mark.parametrize("overlap", [False, True])
def test_rounds_are_those_of_diloco(addresses, overlap):
    servers, found = addresses(2), [model_of(), model_of()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda w: train(found[w], servers, w, 2, overlap=overlap), range(2)))
    for model, expected in zip(found, reference(2, late=overlap)):
        torch.testing.assert_close(parameters_of(model), expected, rtol=0, atol=1e-5)
    assert torch.equal(parameters_of(found[0]), parameters_of(found[1])), "replicas differ"


@pytest.mark.parametrize(("overlap", "decay"), [(False, None), (False, 0.5), (True, None)])
def test_rounds_of_a_sparse_codec_are_those_of_sparseloco(addresses, overlap, decay):
    """The defaults: lr=1, no momentum, and what waits times 0.95."""
    servers, found = addresses(2), [model_of(), model_of()]
    options = {"codec": "topk:density=0.1", "rules": [], "overlap": overlap} | ({} if decay is None else {"residual_decay": decay})
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda w: train(found[w], servers, w, 2, defaults=options), range(2)))
    shapes = {name: tuple(p.shape) for name, p in model_of().named_parameters()}
    codec = references.TopK(shapes, 2, 0, 1 << 20, density=0.1, decay=0.95 if decay is None else decay)

    def mean(progress):
        means = codec.step([[p.double().numpy().ravel() for p in of_worker] for of_worker in progress])
        return [torch.from_numpy(m).float().reshape(s) for m, s in zip(means, shapes.values(), strict=True)]

    expected = reference(2, overlap, mean, {"lr": 1.0})
    for model, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(parameters_of(model), wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(expected[0], reference(2, overlap)[0], atol=1e-2), "another algorithm"


EVERY_CODEC = ["adaptive", "dense:bf16", "efsignsgd", "fp16", "linear:bits=4", "natural:bits=4", "onebit", "powersgd:rank=2", "qsgd:bits=4",
               "randomk:density=0.2", "signsgd", "signum:momentum=0", "tagc:density=0.05", "terngrad", "thc:bits=4",
               "threshold:value=0.001", "topk:density=0.05,values=int4", "uniform:bits=4", "zen"]


def test_no_codec_is_left_out():
    assert {codec.partition(":")[0] for codec in EVERY_CODEC} == set(_core.codec_names()) - {"dgc"}, "dgc's own momentum is of gradients"


@pytest.mark.parametrize("codec", EVERY_CODEC)
def test_every_codec_trains(addresses, codec):
    servers = addresses(2)
    overlap = codec.startswith(("tagc", "thc"))
    how = {"codec": codec, "overlap": overlap} | MEAN | ({"lr": 0.01} if codec.startswith("sign") else {})  # signs have no size

    def work(worker):
        model = model_of(64)
        losses, stats = train(model, servers, worker, 2, EVERY * 40, how)
        return losses, stats, parameters_of(model)

    (losses, stats, mine), (_, _, other) = in_parallel(2, work)
    assert torch.equal(mine, other), "replicas differ"
    assert sum(losses[-20:]) < 0.1 * sum(losses[:20])
    assert stats["pushed_bytes"] > 0


@pytest.mark.parametrize("codec", ["dense:fp32", "topk:density=0.1,values=int8"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_quorum_does_not_wait_for_who_is_late(addresses, codec, overlap):
    servers, slept, rounds = addresses(2), 1.5, 40

    def work(worker):
        model, data, losses, behind, longest = model_of(), batches(worker), [], 0, 0.0
        local = torch.optim.AdamW(model.parameters(), lr=LR)
        with LocalSGD(local, model, every=EVERY, servers=servers, job="quorum", workers=3, worker=f"w{worker}", quorum=2,
                      codec=codec, overlap=overlap, **MEAN) as optimizer:
            for step in range(EVERY * rounds):
                losses.append(backward(model, next(data)))
                time.sleep(0.002)
                if worker == 2 and step == EVERY * rounds // 2:
                    time.sleep(slept)
                begin = time.monotonic()
                optimizer.step()
                longest = max(longest, time.monotonic() - begin)
                behind += optimizer.outer.skipped_rounds if step % EVERY == EVERY - 1 else 0
        return losses, behind, longest, optimizer.stats()

    found = in_parallel(3, work)
    assert found[2][1] > 0 and found[2][3]["skipped_rounds"] == found[2][1], "rounds went on without it"
    for losses, _, longest, _ in found[:2]:
        assert longest < slept, "nobody waited for it"
    for losses, *_ in found:
        assert sum(losses[-20:]) < 0.2 * sum(losses[:20])


def test_a_round_that_timed_out_goes_on(addresses):
    servers, found, waits = addresses(1), [model_of(), model_of()], []
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda w: train(found[w], servers, w, 2, pause=0.15, waits=waits, round_timeout=(0.2, 60)[w]), range(2)))
    assert 0 in waits
    for model, expected in zip(found, reference(2)):
        torch.testing.assert_close(parameters_of(model), expected, rtol=0, atol=1e-5)


def test_sparse_progress_trains_for_few_bytes(addresses):
    losses, stats = train(model_of(512), addresses(1), steps=EVERY * 60, defaults={})
    assert sum(losses[-20:]) < 0.1 * sum(losses[:20])
    assert stats["steps"] == 60, "a round every fourth step"
    assert stats["pushed_bytes"] < 60 * 4 * 12 * 512 / 5


def test_what_does_not_fit_is_said():
    model = model_of()
    local = torch.optim.AdamW(model.parameters(), lr=LR)
    with pytest.raises(ValueError, match="every=0"):
        LocalSGD(local, model, every=0, servers="grpc://127.0.0.1:1", job="j")
    with pytest.raises(ValueError, match="rounds='bounded:2'.*overlap=True"):
        LocalSGD(local, model, every=1, servers="grpc://127.0.0.1:1", job="j", rounds="bounded:2")
    with pytest.raises(ValueError, match="4 of 4 parameters of the optimizer are none of the model's"):
        LocalSGD(local, model_of(), every=1, servers="grpc://127.0.0.1:1", job="j")


def local_sgd(model, servers, every=2, workers=1, worker=0, local=None, **options):
    local = torch.optim.SGD(model.parameters(), lr=0.1) if local is None else local
    return LocalSGD(local, model, every=every, servers=servers, job="short", workers=workers, worker=f"w{worker}",
                    **{"codec": "dense:fp32", "lr": 1.0, "momentum": 0.0, **options})


def steps(model, optimizer, count, worker=0):
    data = batches(worker)
    for _ in range(count):
        backward(model, next(data))
        optimizer.step()


def written(model, value=2.0):
    state = {name: torch.full_like(p, value) for name, p in model.state_dict().items()}
    model.load_state_dict(state)
    return parameters_of(model)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_loaded_is_no_progress_of_a_worker(addresses, overlap):
    servers = addresses(1)

    def work(worker):
        model = model_of()
        with local_sgd(model, servers, workers=2, worker=worker, overlap=overlap) as optimizer:
            steps(model, optimizer, 3, worker)
            loaded = written(model)
            for call in (optimizer.step, optimizer.synchronize):
                with pytest.raises(gradwire.FailedPrecondition, match="'0.weight' was written.*reset_parameters"):
                    call()
            optimizer.reset_parameters()
            assert torch.equal(parameters_of(model), loaded)
            steps(model, optimizer, 2, worker)
        assert 0 < (parameters_of(model) - loaded).abs().max() < 1.9
        return parameters_of(model)

    with ThreadPoolExecutor(2) as pool:
        assert torch.equal(*pool.map(work, range(2)))


def test_what_is_loaded_before_the_first_round_comes_too_late(addresses):
    model = model_of()
    with local_sgd(model, addresses(1)) as optimizer:
        before = parameters_of(model)
        written(model)
        with pytest.raises(gradwire.FailedPrecondition, match="before LocalSGD is made"):
            optimizer.step()
        assert not torch.equal(parameters_of(model), before)


def test_what_a_hook_of_the_local_optimizer_writes_is_progress(addresses):
    model = model_of()
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    with local_sgd(model, addresses(1), local=local) as optimizer:
        local.register_step_post_hook(torch.no_grad()(lambda *_: model[0].weight.clamp_(-0.1, 0.1)))
        steps(model, optimizer, 5)
    assert model[0].weight.abs().max() <= 0.1


@pytest.mark.parametrize("late", ["unfrozen", "added"])
def test_a_parameter_that_would_train_alone_is_refused(addresses, late):
    model = model_of()
    if late == "unfrozen":
        model[0].weight.requires_grad_(False)
    local = torch.optim.SGD(model.parameters() if late == "unfrozen" else model[2].parameters(), lr=0.1)
    with local_sgd(model, addresses(1), local=local) as optimizer:
        steps(model, optimizer, 3)
        if late == "unfrozen":
            model[0].weight.requires_grad_(True)
        else:
            local.add_param_group({"params": list(model[0].parameters())})
        before = parameters_of(model)
        with pytest.raises(gradwire.FailedPrecondition, match="trains parameter '0.weight', which was frozen or not there"):
            optimizer.step()
        assert torch.equal(parameters_of(model), before)
        optimizer.close(drain=False)


@pytest.mark.parametrize("overlap", [False, True])
def test_close_brings_the_last_steps_together(addresses, overlap):
    servers = addresses(1)

    def work(worker):
        model = model_of()
        with local_sgd(model, servers, every=3, workers=2, worker=worker, overlap=overlap) as optimizer:
            steps(model, optimizer, 5, worker)
        optimizer.close()
        return parameters_of(model)

    with ThreadPoolExecutor(2) as pool:
        assert torch.equal(*pool.map(work, range(2)))


def test_an_exception_begins_no_round(addresses):
    model = model_of()
    with pytest.raises(KeyError), local_sgd(model, addresses(1)) as optimizer:
        steps(model, optimizer, 3)
        raise KeyError
    assert optimizer.outer.closed and optimizer.stats()["steps"] == 1


def test_close_leaves_also_where_the_last_round_fails(addresses):
    model = model_of()
    optimizer = local_sgd(model, addresses(1))
    steps(model, optimizer, 3)
    written(model)
    with pytest.raises(gradwire.FailedPrecondition, match="reset_parameters"):
        optimizer.close()
    assert optimizer.outer.closed


@pytest.mark.parametrize("when", ["while it waits", "behind its end"])
def test_ctrl_c_in_a_round_makes_none_twice(addresses, when):
    model, reference = model_of(), model_of()
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for count in (1, 1, 2):
        steps(reference, theirs, count)
    with local_sgd(model, addresses(1)) as optimizer:
        steps(model, optimizer, 1)
        fail_next_round(optimizer.outer, KeyboardInterrupt, when)
        with pytest.raises(KeyboardInterrupt):
            steps(model, optimizer, 1)
        if when == "while it waits":
            optimizer.synchronize()
        steps(model, optimizer, 2)
        assert optimizer.stats()["steps"] == 2
    torch.testing.assert_close(parameters_of(model), parameters_of(reference), rtol=0, atol=1e-6)


@pytest.mark.parametrize("nonfinite", ["skip", "sanitize"])
def test_progress_that_is_not_finite_heals(addresses, nonfinite):
    servers, models, spoilt = addresses(1), [model_of() for _ in range(2)], [False, False]

    def run(worker):
        data, local = batches(worker), torch.optim.SGD(models[worker].parameters(), lr=LR)

        def spoil(*_):
            if worker == 1 and not spoilt[1]:
                spoilt[1] = True
                with torch.no_grad():
                    models[1][0].bias[3] = float("nan")

        local.register_step_post_hook(spoil)
        with LocalSGD(local, models[worker], every=EVERY, servers=servers, job="heals", workers=2, worker=f"w{worker}",
                      nonfinite=nonfinite, **DILOCO) as optimizer:
            for _ in range(3 * EVERY):
                backward(models[worker], next(data))
                optimizer.step()

    in_parallel(2, run)
    for model in models:
        assert parameters_of(model).isfinite().all()


def test_a_worker_that_is_started_again_knows_its_step(addresses):
    servers = addresses(1)
    train(model_of(), servers, steps=EVERY * 3)
    model = model_of()
    with LocalSGD(torch.optim.SGD(model.parameters(), lr=LR), model, every=EVERY, servers=servers, job="local", worker="w0",
                  **DILOCO) as optimizer:
        assert optimizer.start_step == EVERY * 3


def test_names_are_those_of_the_model_that_was_compiled(addresses):
    model = model_of()
    wrapped = torch.nn.ModuleDict({"_orig_mod": model})  # as torch.compile names it
    with local_sgd(wrapped, addresses(1)) as optimizer:
        assert [t.name for t in optimizer.outer.job.tensors] == [name for name, _ in model.named_parameters()]


def test_example(addresses):
    servers = addresses(2)
    workers = [subprocess.Popen([sys.executable, ROOT / "client/examples/local.py", str(w), *servers], stdout=subprocess.PIPE,
                                text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) for w in range(2)]
    told = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert re.search(r"step 400: loss [01]\.\d+, \d+ kB pushed", told[0]), told


def test_who_steps_the_local_optimizer_makes_the_rounds(addresses):
    model, data = model_of(), batches(0)
    local = torch.optim.SGD(model.parameters(), lr=LR)
    with LocalSGD(local, model, every=EVERY, servers=addresses(1), job="by-itself", **DILOCO) as optimizer:
        for _ in range(2):
            for _ in range(EVERY):
                backward(model, next(data))
                local.step()
            optimizer.synchronize()
        assert optimizer.stats()["steps"] == 2
        for _ in range(EVERY):
            backward(model, next(data))
            local.step()
        with pytest.raises(gradwire.FailedPrecondition, match=f"has made {EVERY} steps by itself"):
            local.step()


def test_what_is_written_between_steps_that_others_make_is_no_progress(addresses):
    model, data = model_of(), batches(0)
    local = torch.optim.SGD(model.parameters(), lr=LR)
    with local_sgd(model, addresses(1), every=2, local=local) as optimizer:
        for _ in range(3):
            backward(model, next(data))
            local.step()
            if optimizer._steps == 2:
                optimizer.synchronize()
        written(model)
        backward(model, next(data))
        with pytest.raises(gradwire.FailedPrecondition, match="would count as this worker's progress"):
            local.step()
        optimizer.reset_parameters()
        local.step()


def test_an_optimizer_around_another_is_told_which_to_pass(addresses):
    class Around(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    model = model_of()
    with pytest.raises(TypeError, match=r"LocalSGD\(optimizer\.optimizer"):
        local_sgd(model, addresses(1), local=Around(torch.optim.SGD(model.parameters(), lr=LR)))


def test_parameters_are_borrowed_for_an_evaluation(addresses):
    def train(servers, borrows):
        model, data = model_of(), batches(0)
        with LocalSGD(torch.optim.SGD(model.parameters(), lr=LR), model, every=EVERY, servers=servers, job=f"borrows-{borrows}", **DILOCO) as optimizer:
            for _ in range(2 * EVERY):
                backward(model, next(data))
                optimizer.step()
                if borrows:
                    with optimizer.borrowed_parameters(), torch.no_grad():
                        for p in model.parameters():
                            p.zero_()
        return [p.detach() for p in model.parameters()]

    servers = addresses(1)
    for one, other in zip(train(servers, True), train(servers, False), strict=True):
        assert torch.equal(one, other)


def test_one_that_was_not_closed_is_made_anew(addresses):
    """In a notebook, around the same optimizer."""
    model, data, servers = model_of(), batches(0), addresses(1)
    local = torch.optim.SGD(model.parameters(), lr=LR)
    former = LocalSGD(local, model, every=EVERY, servers=servers, job="former", **DILOCO)
    with LocalSGD(local, model, every=EVERY, servers=servers, job="anew", **DILOCO) as optimizer:
        for _ in range(3 * EVERY):
            backward(model, next(data))
            optimizer.step()
        assert optimizer.stats()["steps"] == 3
    former.close(drain=False)
