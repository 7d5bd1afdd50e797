"""The convergence study (tests/bench/convergence) at a tiny scale: real servers and codecs, resumed, searched, shown."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from conftest import ROOT, server_binary

torch = pytest.importorskip("torch")

STUDY = ROOT / "tests/bench/convergence"
sys.path.insert(0, str(STUDY))

import study
import training
from study import ARMS, DENSE, Case, Results
from tasks import Gpt, task, training_batch
from training import Result, Run

STEPS = 20


@pytest.fixture
def servers(monkeypatch):
    if not server_binary().exists():
        pytest.skip(f"{server_binary()} is not built")
    monkeypatch.setenv("GRADWIRE_BIN", str(server_binary().parent))
    with training.Servers() as servers:
        yield servers


def fake(run):
    """A parabola over the logarithm of the learning rate, with its minimum at 0.01."""
    return Result(run, ((1, 1 + math.log(run.lr / 0.01) ** 2, 100, 200),), 0.0)


@pytest.mark.parametrize("workers", [2, 8])
def test_each_worker_of_the_gpt_has_gradients_of_its_own_parameters(workers):
    gpt = task("gpt")
    scale = np.linspace(1, 1.1, workers, dtype=np.float32)
    parameters = [scale.reshape(-1, *[1] * p.ndim) * p for p in gpt.initial(3)]
    found = gpt.gradients(parameters, 3, 5)
    for w in range(workers):
        inputs, targets = training_batch(gpt.corpus.train, 3, w, 5, gpt.batch // workers, gpt.CONFIG.context_tokens)
        model = Gpt(gpt.CONFIG, 0)
        for p, values in zip(model.parameters(), parameters, strict=True):
            p.data = torch.from_numpy(values[w])
        model.loss(inputs, targets).backward()
        for p, g in zip(model.parameters(), found, strict=True):
            np.testing.assert_allclose(g[w], p.grad.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("run", [
    Run("logistic", DENSE, lr=0.03, steps=STEPS),
    Run("logistic", "topk:density=0.01,values=fp16", "step", "step", lr=0.03, steps=STEPS,
        update_codec="topk:density=0.01,values=fp16", small=study.SMALL),
    Run("logistic", "onebit", "delta", "step", lr=0.03, steps=STEPS, local_steps=4),
    Run("logistic", "powersgd:rank=1", lr=0.03, steps=STEPS),
])
def test_runs_learn_through_real_servers(servers, run, workers):
    result = training.execute(replace(run, workers=workers), servers)
    assert not result.error
    assert [p[0] for p in result.curve] == list(range(2, STEPS + 1, 2))
    assert result.loss < 0.97 * math.log(16)  # of guessing: the first parameters are zeros
    rounds = STEPS // run.local_steps
    dense = 4 * task("logistic").elements * (rounds + 1)
    assert 0 < result.pushed_bytes < (1.05 if run.codec == DENSE else 0.1) * dense
    assert (result.pushed_bytes > 0.9 * dense) == (run.codec == DENSE)
    small_updates = bool(run.update_codec) or run.codec.startswith("powersgd")
    assert (result.pulled_bytes < 0.2 * dense) == small_updates
    assert training.execute(replace(run, workers=workers), servers).curve[-1][:2] == result.curve[-1][:2]  # repeatable


def test_a_run_that_diverges_says_so(servers):
    result = training.execute(Run("logistic", DENSE, optimizer="sgd", momentum=0.9, lr=1e38, steps=STEPS), servers)
    assert result.error and result.loss == float("inf")


def test_finished_runs_are_not_made_again(tmp_path):
    path = tmp_path / "results.jsonl"
    made = []

    def make(run):
        made.append(run)
        return fake(run)

    runs = [Run("logistic", "onebit", lr=lr) for lr in (0.1, 0.2)]
    first = [Results(path, make)(run) for run in runs]
    assert made == runs
    with open(path, "a") as file:
        file.write('{"run":{"task":"logistic","codec":"oneb')  # killed in the middle of a line
    again = Results(path, make)
    assert [again(run) for run in runs] == first and len(made) == 2
    with pytest.raises(study.OutOfTime):
        Results(path, make, deadline=0)(replace(runs[0], seed=2))
    again(replace(runs[0], seed=2))
    assert len(made) == 3
    assert Results(path, make).find(replace(runs[0], seed=2)) == fake(replace(runs[0], seed=2))
    assert len(list(Results(path, make))) == 3


def test_the_search_ends_where_both_neighbours_are_worse(tmp_path):
    results = Results(tmp_path / "results.jsonl", fake)
    for begin in (0.0101, 0.08, 0.001):
        best = study.climb(results, Run("logistic", "onebit"), begin)
        assert 0.01 / 2**0.5 <= best <= 0.01 * 2**0.5
    assert study.climb(results, Run("logistic", "onebit"), 0.16, upwards=True) == 0.16


def test_every_case_is_a_job_that_servers_take(servers):
    """Codecs, arms and rules of the whole grid, and what settles the defaults: one round each."""
    runs = [case.run("logistic", 1e-3) for case in study.cases()]
    runs += [run for _, run in study.variants("logistic")]
    runs += [run for part in study.two_way_runs("logistic") for _, run in part]
    for run in {replace(run, lr=1e-3, steps=run.local_steps): None for run in runs}:
        result = training.execute(run, servers)
        assert not result.error, (run, result.error)


def test_the_tables_and_plots_show_what_there_is(tmp_path):
    path = tmp_path / "results.jsonl"
    results = Results(path, fake)
    cases = [Case(DENSE, ARMS["gradient, AdamW"]), Case("onebit", ARMS["step"], "onebit")]
    for case in cases + [Case(DENSE, ARMS["step"])]:
        study.repeat(results, case, "logistic", 2, (1, 2))
    done = subprocess.run(
        [sys.executable, STUDY / "convergence_bench.py", "--json", tmp_path / "c.json", "--results", path],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert "onebit both ways" in done.stdout
    figures = json.loads((tmp_path / "c.json").read_text())
    entry = figures["grid"]["logistic"]["2"]["codecs"]["onebit both ways"]["step"]
    assert entry["seeds"] == 2 and entry["pushed_bytes_per_step"] == pytest.approx(100 / 300)
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")


def test_the_aim_is_judged_by_seeds_that_had_no_part_in_the_search():
    import frontier

    def entry(fewer, *ratios):
        return {"times_fewer": fewer, "ratios": ratios, "ratio": sum(ratios) / len(ratios), "seeds": len(ratios)}

    few = {"few bytes": {"": entry(99, 0.9, 0.9, 0.9)}, "one seed": {"": entry(200, 0.9)}}
    assert frontier.verdict(few) == ("no run of three seeds has so few bytes", False)
    text, met = frontier.verdict(few | {"lucky": {"1 %": entry(101, 0.90, 1.02, 1.03)}})
    assert not met and text.startswith("lucky 1 %, 101x: 0.983 in the mean of 3 seeds, 1.025 of those")
    text, met = frontier.verdict(few | {"lucky": {"": entry(101, 0.90, 1.02, 1.03)}, "good": {"": entry(150, 1.10, 1.00, 1.01)}})
    assert met and text.startswith("good")
