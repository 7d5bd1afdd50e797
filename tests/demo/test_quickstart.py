"""The quickstart's training loop, a few steps, end to end: real servers, real workers, the real report."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "client/examples/gpt"))
    import quickstart

    return quickstart


def test_trains_each_way_and_reports(quickstart, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "client/examples/gpt/quickstart.py"),
            *("--fast", "--steps", "16", "--runs", "dense", "steps", "tagc", "--out", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=1200,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["runs"]) == {"dense", "steps", "tagc"}
    for run in report["runs"].values():
        assert run["steps"] == 16 and run["workers"] == 2 and run["shards"] == 2
        assert run["curves"]["1"][-1]["val_loss"] < 5.0  # untrained: ln 256 = 5.55
    dense, tagc = report["runs"]["dense"], report["runs"]["tagc"]
    assert tagc["push_bytes_per_step"] < dense["push_bytes_per_step"] / 10
    assert (tmp_path / "report.html").stat().st_size > 20_000
    assert report["untried"] == quickstart.untried((quickstart.DENSE, quickstart.STEPS, quickstart.TAGC), 16)
    assert html.escape(report["untried"]) in (tmp_path / "report.html").read_text()
    for sentence in quickstart.conclusions(report):
        assert html.escape(sentence) in (tmp_path / "report.html").read_text()
        assert sentence in done.stdout


def children_of(parent: int) -> list[Path]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if int((process / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent:
                found.append(process)
    return found


def test_killed_it_leaves_nobody_behind(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "client/examples/gpt/quickstart.py", "--fast", "--runs", "dense", "--out", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert any(b"step" in line for line in process.stdout)  # it trains
        children = children_of(process.pid)
        assert len(children) >= 4  # servers and workers
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    left = [child.name for child in children if child.exists()]
    for child in left:
        os.kill(int(child), signal.SIGKILL)
    assert left == []


def test_conclusions_say_what_the_table_says(quickstart) -> None:
    def run(title: str, losses: list[float], compression: float, seconds: float) -> dict:
        return {"title": title, "val_loss": sum(losses) / len(losses), "val_loss_by_seed": dict(enumerate(losses)),
                "push_compression": compression, "pull_compression": 1.0, "seconds_per_step": seconds}

    dense = run("dense", [2.0, 2.1], 1.0, 0.2)
    other = run("TAGC", [1.9, 2.11], 55.4, 0.1)
    same = run("dense again", [2.0, 2.1], 1.0, 0.2)
    said = quickstart.conclusions({"runs": {"dense": dense, "tagc": other, "again": same}})
    assert said == [
        "TAGC: a validation loss 2.2% below that of dense training (1 of 2 seeds lower); 55 times fewer bytes pushed and as many "
        "bytes pulled; a step took 0.50 of dense's time on this machine, where no network is in between",
        "dense again: a validation loss level with that of dense training (0 of 2 seeds lower); as many bytes pushed and as many "
        "bytes pulled; a step took 1.00 of dense's time on this machine, where no network is in between",
    ]
    assert quickstart.conclusions({"runs": {"tagc": other}}) == []


def test_runs_take_the_best_of_one_grid(quickstart, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[tuple[str, float, float]] = []

    def execute(run, seed: int, plan):
        tried.append((run.name, run.betas[1], run.lr))
        return quickstart.Outcome(run, seed, [{"val_loss": abs(run.lr - 0.003) + (0.99 - run.betas[1])}])

    monkeypatch.setattr(quickstart, "execute", execute)
    monkeypatch.setattr(quickstart, "SWEEP", tmp_path / "sweep.json")
    runs = (quickstart.DENSE, quickstart.STEPS)
    plan = quickstart.Plan(steps=400, seeds=(1,), runs=runs)
    assert "8 of dense, 8 of steps" in quickstart.untried(runs, 400)
    quickstart.sweep(plan, (0.003,), (0.99,))
    assert "7 of dense, 7 of steps" in quickstart.untried(runs, 400)
    quickstart.sweep(plan, quickstart.RATES, quickstart.BETA2S)
    assert quickstart.untried(runs, 400) == ""
    assert len(tried) == len(set(tried)) == 16, "what is in the table is not run again"
    for run in runs:
        best = quickstart.tuned(run, 380)
        assert (best.lr, best.betas) == (0.003, (0.9, 0.99))
    assert quickstart.tuned(quickstart.TAGC, 400) == quickstart.TAGC, "it was not swept"


def test_what_the_sweep_lacks_is_said(quickstart) -> None:
    grid = {(f"{beta2:g}", f"{rate:g}") for beta2 in quickstart.BETA2S for rate in quickstart.RATES}
    for steps, runs in ((400, quickstart.USUAL), (120, quickstart.FAST)):
        table = json.loads(quickstart.SWEEP.read_text())[str(steps)]
        lacks = {}
        for run in runs:
            tried = {(beta2, rate) for beta2, losses in table.get(run.name, {}).items() for rate in losses}
            lacks[run.name] = len(grid - tried)
        said = re.findall(r"(\d+) of (\w+)", quickstart.untried(runs, steps))
        assert said == [(str(count), name) for name, count in lacks.items() if count]


def test_rates_that_the_quickstart_names_were_tried(quickstart) -> None:
    for run in quickstart.USUAL:
        losses = quickstart.losses_of(run, 400)
        assert (run.betas[1], run.lr) in losses, f"{run.name}: the sweep has not tried what is named"
        best = quickstart.tuned(run, 400)
        assert losses[best.betas[1], best.lr] == min(losses.values())
