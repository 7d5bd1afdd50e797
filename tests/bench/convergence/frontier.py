"""Bytes against loss: what a given number of bytes, both ways, costs in loss with 2 to 16 workers.

Every run trains on the same batch, whatever the number of workers, so that losses are at equal work. A point is dominated where
another has no more bytes and no more loss.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import report
from study import DENSE, RESIDUAL_DECAY, SEEDS, Frozen, Results, climb
from tasks import TASKS
from training import Result, Run

NAMES = ("gpt_large", "words")
WORKERS = (16, 8, 4, 2)  # in the order in which they are run
SEARCH = 3  # runs of a search for a learning rate
UNION = "union:values=int4"
# What it is to come to: so many times fewer bytes than fp32 both ways together, at this part of dense AdamW's loss.
AIM_BYTES, AIM_LOSS = 100, 1.01
AIMED = {"dense, AdamW": 1, "top-k int4 both ways, all kept": 1}  # families that say whether it is met, and how many points of each
_CENTERS = {"gpt_large": 0.004, "words": 0.008}  # where searches begin


@dataclass(frozen=True)
class Family:
    """Settings that a line joins. The learning rate is searched for the first, with the first seed and each number of workers."""

    title: str
    points: tuple[tuple[str, Run], ...]  # what differs, and the run without its learning rate


def families(name: str, workers: int) -> list[Family]:
    """The baseline first."""
    def step(codec: str, back: str = "", decay: float = RESIDUAL_DECAY) -> Run:
        return Run(name, codec, "step", "step", update_codec=back, workers=workers, residual_decay=decay)

    def delta(steps: int, density: float) -> Run:
        return Run(name, f"topk:density={density:g},values=int4", "delta", "sgd", update_codec=UNION, workers=workers,
                   local_steps=steps, momentum=0.9, outer_lr=0.7)

    def by_density(title: str, make, densities: tuple[float, ...]) -> Family:
        return Family(title, tuple((f"{100 * d:g} %", make(d)) for d in densities))

    most, some = (0.005, 0.0025, 0.01, 0.00125), (0.005, 0.00125)
    return [
        Family("dense, AdamW", (("", Run(name, DENSE, workers=workers)),)),
        Family("dense, steps", (("", step(DENSE)),)),
        by_density("TAGC", lambda d: step(f"tagc:density={d:g}"), most),
        by_density("TAGC, union int4", lambda d: step(f"tagc:density={d:g}", UNION), most),
        by_density("top-k int4 both ways, all kept", lambda d: step(*2 * (f"topk:density={d:g},values=int4",), decay=1.0),
                   (0.03, 0.01)),
        by_density("top-k int4, union int4", lambda d: step(f"topk:density={d:g},values=int4", UNION), most),
        by_density("top-k int8, union int4", lambda d: step(f"topk:density={d:g},values=int8", UNION), some),
        by_density("top-k int8 both ways", lambda d: step(*2 * (f"topk:density={d:g},values=int8",)), some),
        by_density("deltas of 4 steps, top-k int4, union int4", lambda d: delta(4, 4 * d), some),
        by_density("deltas of 8 steps, top-k int4, union int4", lambda d: delta(8, 8 * d), some),
        Family("1 bit both ways", (("", step("onebit", "onebit")),)),
        Family("THC 4 bits", (("", step("thc:bits=4")),)),
    ]


def run_all(results: Results) -> None:
    """What the aim is about first, all seeds of it; of the rest the aim's number of workers first, and one seed of all before the
    others."""
    for seed in SEEDS:
        for name in NAMES:
            for family in families(name, WORKERS[0]):
                for run in at_their_best(results, family)[: AIMED[family.title]] if family.title in AIMED else ():
                    results(replace(run, seed=seed))
    for seed in SEEDS:
        for workers in WORKERS:
            for name in NAMES:
                for family in families(name, workers):
                    for run in at_their_best(results, family):
                        results(replace(run, seed=seed))


def at_their_best(results: Results, family: Family) -> list[Run]:
    first = family.points[0][1]
    lr = climb(results, first, _CENTERS[first.task], SEARCH)
    return [replace(run, lr=lr) for _, run in family.points]


def entry(runs: list[Result], name: str) -> dict:
    """That of the report, and `times_fewer`: bytes than float32, both ways together."""
    e = report.entry(runs, name)
    pushed, pulled = e["pushed_times_fewer"], e["pulled_times_fewer"]
    return {**e, "times_fewer": 2 / (1 / pushed + 1 / pulled) if pushed and pulled else 0.0}


def collect(results: Results) -> dict:
    """task -> workers -> family -> setting -> entry, with `ratio` to dense AdamW's loss (by seed) and whether it is dominated."""
    found: dict = {}
    for name in NAMES:
        for workers in sorted(WORKERS):
            rows: dict = {}
            for family in families(name, workers):
                try:
                    runs = at_their_best(results, family)
                except Frozen.Missing:
                    continue
                for (setting, _), run in zip(family.points, runs, strict=True):
                    seeds = report.seeds_of(results, run)
                    if seeds:
                        rows.setdefault(family.title, {})[setting] = entry(seeds, name)
            if "dense, AdamW" in rows:
                found.setdefault(name, {})[workers] = _compared(rows)
    return found


def _compared(rows: dict) -> dict:
    dense = rows["dense, AdamW"][""]["by_seed"]
    entries = [e for settings in rows.values() for e in settings.values()]
    for e in entries:
        e["ratios"] = [loss / dense[seed] for seed, loss in e["by_seed"].items() if seed in dense]
        e["ratio"] = statistics.fmean(e["ratios"])
    for e in entries:
        e["dominated"] = any(o is not e and o["times_fewer"] >= e["times_fewer"] and o["ratio"] <= e["ratio"] for o in entries)
    return rows


def lines(found: dict) -> list[str]:
    text = []
    for name, by_workers in found.items():
        for workers, rows in by_workers.items():
            dense = rows["dense, AdamW"][""]
            text.append(f"\nfrontier: {TASKS[name].title}, {workers} workers; dense AdamW {dense['loss']:.4f} "
                        f"({dense['seeds']} seeds, lr {dense['lr']:g})")
            text.append(f"{'':<50}{'both ways':>10}{'push':>8}{'pull':>8} fewer   loss / dense AdamW's, least to most of the seeds")
            for family, settings in rows.items():
                for setting, e in settings.items():
                    told = "" if e["dominated"] else "frontier"
                    pushed, pulled = (e[f"{way}_times_fewer"] or 0 for way in ("pushed", "pulled"))
                    text.append(f"{f'{family} {setting}':<50}{e['times_fewer']:>9.0f}x{pushed:>7.0f}x{pulled:>7.0f}x"
                                f"{e['ratio']:>10.3f}  {min(e['ratios']):.3f} to {max(e['ratios']):.3f}  {told}")
    return text


def plot(found: dict, path: Path) -> None:
    """Loss against times fewer bytes, a row per task, a column per number of workers; bars are the least and most of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gradwire"})
    import matplotlib.pyplot as plt

    names = [name for name in NAMES if name in found]
    if not names:
        return
    columns = sorted({workers for name in names for workers in found[name]})
    figure, axes = plt.subplots(len(names), len(columns), figsize=(4.2 * len(columns), 3.4 * len(names)), squeeze=False)
    colors = plt.get_cmap("tab20").colors
    order = [family.title for family in families(names[0], 2)]
    for row, name in zip(axes, names):
        for axis, workers in zip(row, columns):
            for family, settings in found[name].get(workers, {}).items():
                at = sorted(settings.values(), key=lambda e: e["times_fewer"])
                middle = [e["ratio"] for e in at]
                bars = [[m - min(e["ratios"]) for m, e in zip(middle, at)], [max(e["ratios"]) - m for m, e in zip(middle, at)]]
                axis.errorbar([e["times_fewer"] for e in at], middle, yerr=bars, marker="o", markersize=3, linewidth=1, capsize=2,
                              color=colors[order.index(family)], label=family)
            axis.axhline(AIM_LOSS, color="#999999", linewidth=0.8, linestyle=":")
            axis.axvline(AIM_BYTES, color="#999999", linewidth=0.8, linestyle=":")
            axis.set_xscale("log")
            axis.set_title(f"{name}, {workers} workers", fontsize=9, loc="left")
            axis.grid(alpha=0.3)
        row[0].set_ylabel("loss / dense AdamW's")
    for axis in axes[-1]:
        axis.set_xlabel("times fewer bytes than fp32, both ways")
    by_title = {t: h for axis in axes.flat for h, t in zip(*axis.get_legend_handles_labels())}
    figure.legend(by_title.values(), by_title.keys(), loc="lower center", ncols=4, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
