"""The study's tables, its JSON and its plots, from whatever results there are."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import study
from study import ARMS, DENSE, SEEDS, WORKERS, Case, Frozen, Results
from tasks import TASKS, task
from training import Result, Run

FP32_BYTES = 4
# Shown in the plots.
SHOWN = (
    (DENSE, "gradient, AdamW", "", "dense, AdamW", "#222222"),
    (DENSE, "gradient, SGD", "", "dense, SGD", "#888888"),
    ("tagc:density=0.01", "step", "", "TAGC 1 %, steps", "#0b7a75"),
    ("topk:density=0.01", "gradient, AdamW", "", "top-k 1 %, gradients to AdamW", "#c8553d"),
    ("dgc:density=0.01", "gradient, SGD", "", "DGC 1 %, SGD", "#7b2d8b"),
    ("thc:bits=4", "gradient, AdamW", "", "THC 4 bits, AdamW", "#1f5fa8"),
    ("onebit", "gradient, AdamW", "onebit", "1-bit both ways, AdamW", "#d99a00"),
    ("topk:density=0.01,values=fp16", "step", "topk:density=0.01,values=fp16", "top-k 1 % both ways, steps", "#4fae4a"),
)


def seeds_of(results: Results, run: Run, seeds: Iterable[int] = SEEDS) -> list[Result]:
    """What is there of a run with any of these seeds."""
    return [r for r in (results.find(replace(run, seed=seed)) for seed in seeds) if r is not None]


def mean(runs: list[Result]) -> float:
    return statistics.fmean(r.loss for r in runs)


def spread(runs: list[Result]) -> float:
    return statistics.stdev(r.loss for r in runs) if len(runs) > 1 else 0.0


def case_entry(results: Results, case: Case, name: str, workers: int) -> dict | None:
    """Loss and bytes of a cell of the grid; None where it was not run."""
    try:
        most = study.GPT_SEARCH if name == "gpt" and case.codec != DENSE else 9
        lr = study.learning_rate(results, case, name, workers, most)
    except Frozen.Missing:
        return None
    runs = seeds_of(results, case.run(name, lr, workers))
    return entry(runs, name) if runs else None


def entry(runs: list[Result], name: str) -> dict:
    run, model = runs[0].run, task(name)
    good = [r for r in runs if not r.error]
    rounds = run.total_steps
    per_step = {way: statistics.fmean(getattr(r, f"{way}_bytes") / rounds for r in good) if good else None
                for way in ("pushed", "pulled")}
    return {
        "run": {k: v for k, v in run.to_dict().items() if k != "seed"}, "lr": run.lr, "seeds": len(runs),
        "loss": mean(runs), "by_seed": {str(r.run.seed): r.loss for r in runs}, "spread": spread(good), "errors": [r.error for r in runs if r.error],
        **{f"{way}_bytes_per_step": value for way, value in per_step.items()},
        **{f"{way}_times_fewer": FP32_BYTES * model.elements / value if value else None for way, value in per_step.items()},
        "curves": {str(r.run.seed): r.curve for r in runs},
    }


def baselines(results: Results, name: str, workers: int) -> dict[str, dict]:
    found = {arm: case_entry(results, Case(DENSE, ARMS[arm]), name, workers) for arm in ("gradient, AdamW", "gradient, SGD")}
    return {arm: e for arm, e in found.items() if e}


def label(codec: str, update_codec: str) -> str:
    short = codec.replace("values=", "").replace("rounding=", "").replace("density=", "").replace("momentum=0.9", "0.9")
    return short + (" both ways" if update_codec else "")


def ratio(e: dict, baselines: dict[str, dict]) -> float:
    """To the better baseline, over the seeds that both have."""
    found = []
    for b in baselines.values():
        seeds = e["by_seed"].keys() & b["by_seed"].keys()
        if seeds:
            found.append((len(seeds), sum(e["by_seed"][s] for s in seeds) / sum(b["by_seed"][s] for s in seeds)))
    return max(found, default=(0, float("nan")))[1]


def grid_table(results: Results) -> dict:
    """task -> workers -> codec -> arm -> entry; `ratio`: its loss relative to the better dense baseline, by the same seeds."""
    table: dict = {}
    for name in ARMS["step"].centers:  # those of the frontier have none
        for workers in WORKERS:
            dense = baselines(results, name, workers)
            if not dense:
                continue
            rows: dict = {}
            for case in study.cases():
                e = case_entry(results, case, name, workers)
                if e:
                    rows.setdefault(label(case.codec, case.update_codec), {})[case.arm.name] = {**e, "ratio": ratio(e, dense)}
            table.setdefault(name, {})[workers] = {"baselines": dense, "codecs": rows}
    return table


def variant_table(results: Results, name: str, variants: list[tuple[str, Run]], tune) -> dict:
    found = {}
    for what, run in variants:
        try:
            best = tune(run)
        except Frozen.Missing:
            continue
        found[what] = entry(seeds_of(results, best), name)
    return found


def collect(results: Results) -> dict:
    """All figures of the study but the frontier's."""
    grid = grid_table(results)
    settled = {name: variant_table(results, name, study.variants(name), lambda run: study.variant_at_its_best(results, run))
               for name in ("logistic", "digits", "gpt")}
    two_way = {}
    for name in ("wide", "digits_large", "gpt"):
        dense, compressed = study.two_way_runs(name)
        two_way[name] = {which: variant_table(results, name, runs, lambda run: study.two_way_tuned(results, run))
                         for which, runs in (("uncompressed", dense), ("compressed", compressed))}
    return {"name": "convergence", "grid": grid, "settled": settled, "two_way": two_way}


def number(value: float) -> str:
    return "-" if value is None or value != value else f"{value:.4f}" if value < 100 else "diverged"


def grid_lines(grid: dict) -> list[str]:
    """Ratios to the best dense baseline: rows are codecs, columns arms, for each task and number of workers."""
    lines = []
    for name, by_workers in grid.items():
        for workers, part in by_workers.items():
            lines.append(f"\n{TASKS[name].title}, {workers} workers; held-out loss of dense:fp32: " + ", ".join(
                f"{arm} {e['loss']:.4f} +- {e['spread']:.4f} ({e['seeds']} seeds, lr {e['lr']:g})"
                for arm, e in part["baselines"].items()))
            lines.append(f"{'loss relative to the better one':<44}" + "".join(f"{arm:>18}" for arm in ARMS)
                         + f"{'push':>9}{'pull':>9} fewer bytes than fp32")
            for codec, arms in part["codecs"].items():
                cells = "".join(f"{_ratio(arms.get(arm)):>18}" for arm in ARMS)
                shown = arms.get("step") or next(iter(arms.values()))
                lines.append(f"{codec:<44}{cells}{_times(shown['pushed_times_fewer']):>9}{_times(shown['pulled_times_fewer']):>9}")
    return lines


def _ratio(e: dict | None) -> str:
    if e is None:
        return ""
    return "diverged" if e["ratio"] > 100 else f"{e['ratio']:.3f}"


def _times(value: float | None) -> str:
    return f"{value:.1f}x" if value else "-"


def variant_lines(title: str, found: dict) -> list[str]:
    if not found:
        return []
    lines = [f"\n{title}", f"{'':<58}{'loss':>9}{'spread':>9}{'lr':>10}{'push':>9}{'pull':>9} fewer bytes than fp32"]
    for what, e in found.items():
        lines.append(f"{what:<58}{number(e['loss']):>9}{e['spread']:>9.4f}{e['lr']:>10.4g}"
                     f"{_times(e['pushed_times_fewer']):>9}{_times(e['pulled_times_fewer']):>9}")
    return lines


def text(report: dict) -> str:
    lines = grid_lines(report["grid"])
    for name, found in report["settled"].items():
        lines += variant_lines(f"one thing changed at a time: {TASKS[name].title}, 2 workers", found)
    for name, parts in report["two_way"].items():
        for which, found in parts.items():
            lines += variant_lines(f"top-k 0.1 % both ways, fp16 values: {TASKS[name].title}, {which}", found)
    return "\n".join(lines)


def plot(report: dict, path: Path) -> None:
    """Held-out loss over steps and over bytes pushed, a row per task, 2 workers, the mean of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gradwire", "path.simplify": True})
    import matplotlib.pyplot as plt

    names = [name for name in ("logistic", "digits", "gpt") if 2 in report["grid"].get(name, {})]
    if not names:
        return
    figure, axes = plt.subplots(len(names), 2, figsize=(10, 3.2 * len(names)), squeeze=False)
    for row, name in zip(axes, names):
        codecs = report["grid"][name][2]["codecs"]
        for codec, arm, back, title, color in SHOWN:
            e = codecs.get(label(codec, back), {}).get(arm)
            if e is None or e["errors"]:
                continue
            curves = list(e["curves"].values())
            loss = [statistics.fmean(p[1] for p in points) for points in zip(*curves)]
            for axis, column in zip(row, (0, 2)):
                axis.plot([p[column] for p in curves[0]], loss, color=color, label=title, linewidth=1.4)
        row[0].set_ylabel("held-out loss (nats)")
        row[0].set_title(TASKS[name].title, fontsize=9, loc="left")
        row[0].set_xlabel("steps")
        row[1].set_xlabel("bytes that a worker pushed")
        row[1].set_xscale("log")
        for axis in row:
            axis.grid(alpha=0.3)
    handles, titles = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="lower center", ncols=4, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
