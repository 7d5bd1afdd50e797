"""Bytes against loss: what a given number of bytes, both ways, costs in loss with 2 to 16 workers.

Every run trains on the same batch, whatever the number of workers, so that losses are at equal work. A point is dominated where
another has no more bytes and no more loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import report
from gradwire.torch import DEFAULT_CODEC
from study import DENSE, RESIDUAL_DECAY, SEEDS, SMALL, Frozen, OutOfTime, Results, climb
from tasks import TASKS
from training import Result, Run

NAMES = ("gpt_large", "words")
WORKERS = (16, 8, 4, 2)  # in the order in which they are run
SEARCH = 4  # runs of a search for a learning rate
SEARCHED = {16: 16, 8: 16, 4: 2, 2: 2}  # with how many workers the learning rate is searched that others take as well
STEP_BETA2 = 0.99  # of steps and deltas: a worker preconditions by a small part of the batch
UNION = "union:values=int4"
# What it is to come to: so many times fewer bytes than fp32 both ways together, at this part of the better baseline's loss.
AIM_BYTES, AIM_LOSS = 100, 1.01
BASELINES = {"dense, AdamW": 0.95, "dense, AdamW, beta2 0.99": 0.99}  # beta2
WARM = ",warmup_rounds={rounds},warmup_density=0.2"  # the density falls from 20 %
STEPS_TITLE, GRADIENTS_TITLE = (f"{what}top-k 2 bits both ways, from 20 %" for what in ("", "gradients, "))
DEFAULT_TITLE = "ShardedOptimizer's default"
AIMED = (*BASELINES, STEPS_TITLE, GRADIENTS_TITLE)  # by their first points
AIM_SEEDS = (*SEEDS, 4, 5)  # the learning rate was searched with the first: the others say what it gives
_CENTERS = {"gpt_large": 0.002, "words": 0.008}  # where searches begin; those of steps and deltas at twice as much


@dataclass(frozen=True)
class Family:
    """Settings that a line joins. The learning rate is searched for the first, or for another run, with the first seed."""

    title: str
    points: tuple[tuple[str, Run], ...]  # what differs, and the run without its learning rate
    searched: Run | None = None
    drawn: bool = True  # else it stands in the table alone


def families(name: str, workers: int) -> list[Family]:
    """The baselines first. They push gradients, whose mean is the same for any number of workers: so they have 16."""
    def step(codec: str, back: str = "", decay: float = RESIDUAL_DECAY) -> Run:
        return Run(name, codec, "step", "step", update_codec=back, workers=workers, residual_decay=decay, beta2=STEP_BETA2)

    def by_density(title: str, make, densities: tuple[float, ...], searched: Run | None = None, drawn: bool = True) -> Family:
        return Family(title, tuple((f"{100 * d:g} %", make(d)) for d in densities), searched, drawn)

    def signs(title: str, back: str = "", decay: float = RESIDUAL_DECAY) -> Family:
        """TAGC of 2 bits, at the learning rate of the one that the default is made of."""
        return by_density(title, lambda d: step(f"tagc:density={d:g},bits=2", back, decay), (0.01, 0.0025), step("tagc:density=0.01,bits=2"),
                          drawn=not back and decay == RESIDUAL_DECAY)

    def topk(density: float, values: str = "2bit") -> str:
        return f"topk:density={density:g},values={values}"

    def both_ways(title: str, values: str, densities: tuple[float, ...]) -> Family:
        return by_density(title, lambda d: step(*2 * (topk(d, values),), decay=1.0), densities)

    def gradients(codec: str) -> Run:
        return Run(name, codec, update_codec=codec, workers=workers, beta2=STEP_BETA2)

    def falling(title: str, make) -> Family:
        """By density, each behind rounds in which it falls."""
        return Family(title, tuple((f"{100 * d:g} % behind {rounds}", make(topk(d) + WARM.format(rounds=rounds)))
                                   for d, rounds in ((0.033, 40), (0.01, 100), (0.003, 100))))

    def deltas(steps: int, density: float) -> Run:
        return Run(name, topk(density), "delta", "step", update_codec=topk(density), workers=workers, local_steps=steps, beta2=STEP_BETA2)

    return [
        *(Family(title, (("", Run(name, DENSE, workers=WORKERS[0], beta2=beta2)),)) for title, beta2 in BASELINES.items()),
        Family("dense, steps", (("", step(DENSE)),)),
        both_ways("top-k 2 bits both ways, all kept", "2bit", (0.038, 0.01, 0.003)),
        falling(STEPS_TITLE, lambda codec: step(codec, codec, decay=1.0)),
        by_density("gradients, top-k 2 bits both ways, all kept", lambda d: gradients(topk(d)), (0.038, 0.01)),
        falling(GRADIENTS_TITLE, gradients),
        both_ways("top-k int4 both ways, all kept", "int4", (0.029,)),
        both_ways("top-k int8 both ways, all kept", "int8", (0.021,)),
        by_density("TAGC", lambda d: step(f"tagc:density={d:g}"), (0.01, 0.0025)),
        signs("TAGC of 2 bits"),
        signs("TAGC of 2 bits, 0.9 of the residual kept", decay=0.9),
        signs("TAGC of 2 bits, all kept", decay=1.0),
        signs("TAGC of 2 bits, union 2 bits", "union:values=2bit"),
        Family(DEFAULT_TITLE, (("", replace(step(DEFAULT_CODEC), small=SMALL)),)),
        by_density("TAGC, union int4", lambda d: step(f"tagc:density={d:g}", UNION), (0.01, 0.0025)),
        by_density("top-k 2 bits, union 2 bits", lambda d: step(topk(d), "union:values=2bit"), (0.005, 0.00125)),
        by_density("deltas of 4 steps, top-k 2 bits both ways", lambda d: deltas(4, d), (0.04,)),
        Family("PowerSGD of rank 1", (("", step("powersgd:rank=1")),)),
        Family("1 bit both ways", (("", step("onebit", "onebit")),)),
        Family("THC 4 bits", (("", step("thc:bits=4")),)),
    ]


def stage(*names: str) -> Callable[[Results], None]:
    """What the aim is about first, all seeds of it; then one seed of the rest, most workers first; then the other seeds of what
    is not dominated."""
    def run(results: Results) -> None:
        for seed in AIM_SEEDS:
            for name in names:
                for family in families(name, WORKERS[0]):
                    if family.title in AIMED:
                        results(replace(at_their_best(results, family)[0], seed=seed))
        for workers in WORKERS:
            for name in names:
                for family in families(name, workers):
                    for best in at_their_best(results, family):
                        results(best)
        for seed in SEEDS:
            for workers in WORKERS:
                for name in names:
                    for best, e in points(results, name, workers):
                        if not e["dominated"]:
                            results(replace(best, seed=seed))
    return run


def default_stage(results: Results) -> None:
    """All seeds of ShardedOptimizer's default, with any number of workers."""
    for workers in WORKERS:
        for name in NAMES:
            for family in families(name, workers):
                if family.title == DEFAULT_TITLE:
                    best = at_their_best(results, family)[0]
                    for seed in SEEDS:
                        results(replace(best, seed=seed))


STAGES = {"frontier": stage(*NAMES), **{f"frontier-{name}": stage(name) for name in NAMES}, "frontier-default": default_stage}


def at_their_best(results: Results, family: Family) -> list[Run]:
    first = family.searched or family.points[0][1]
    center = _CENTERS[first.task] * (1 if first.push == "gradient" else 2)
    lr = climb(results, replace(first, workers=SEARCHED[first.workers]), center, SEARCH)
    return [replace(run, lr=lr) for _, run in family.points]


def entry(runs: list[Result], name: str) -> dict:
    """That of the report, and `times_fewer`: bytes than float32, both ways together."""
    e = report.entry(runs, name)
    pushed, pulled = e["pushed_times_fewer"], e["pulled_times_fewer"]
    return {**e, "times_fewer": 2 / (1 / pushed + 1 / pulled) if pushed and pulled else 0.0}


def points(results: Results, name: str, workers: int) -> list[tuple[Run, dict]]:
    """Runs that are there, the first seed's, and their entries, with `ratio` to the better baseline's loss and `dominated`."""
    found: list[tuple[Run, dict]] = []
    for family in families(name, workers):
        try:
            runs = at_their_best(results, family)
        except (Frozen.Missing, OutOfTime):
            continue
        for (setting, _), run in zip(family.points, runs, strict=True):
            seeds = report.seeds_of(results, run, AIM_SEEDS)
            if seeds:
                found.append((run, {**entry(seeds, name), "family": family.title, "setting": setting}))
    baselines = [e for _, e in found if e["family"] in BASELINES]
    if not baselines:
        return []
    dense = min(baselines, key=lambda e: (-e["seeds"], e["loss"]))
    for _, e in found:
        e["baseline"] = dense["family"]
        e["ratios"] = [loss / dense["by_seed"][seed] for seed, loss in e["by_seed"].items() if seed in dense["by_seed"]]
        e["ratio"] = statistics.fmean(e["ratios"])
    for _, e in found:
        e["dominated"] = any(o is not e and o["times_fewer"] >= e["times_fewer"] and o["ratio"] <= e["ratio"] for _, o in found)
    return found


def collect(results: Results) -> dict:
    """task -> workers -> family -> setting -> entry."""
    found: dict = {}
    for name in NAMES:
        for workers in sorted(WORKERS):
            of_workers = points(results, name, workers)
            if all(e["family"] in BASELINES for _, e in of_workers):  # which are the same for any number
                continue
            for _, e in of_workers:
                found.setdefault(name, {}).setdefault(workers, {}).setdefault(e["family"], {})[e["setting"]] = e
    return found


def verdict(rows: dict) -> tuple[str, bool]:
    """Of the aim: what comes nearest to it among what has at least three seeds, and whether it is met, in the mean of those that had
    no part in the search for the learning rate."""
    near = {f"{family} {setting}": e for family, by in rows.items() for setting, e in by.items()
            if e["times_fewer"] >= AIM_BYTES and e["seeds"] >= len(SEEDS)}
    if not near:
        return "no run of three seeds has so few bytes", False
    name = min(near, key=lambda name: statistics.fmean(near[name]["ratios"][1:]))
    best, rest = near[name], statistics.fmean(near[name]["ratios"][1:])
    return (f"{name}, {best['times_fewer']:.0f}x: {best['ratio']:.3f} in the mean of {best['seeds']} seeds, {rest:.3f} of those without "
            "the one of the search"), rest <= AIM_LOSS


def lines(found: dict) -> list[str]:
    text = []
    for name, by_workers in found.items():
        for workers, rows in by_workers.items():
            dense = next(e for by in rows.values() for e in by.values() if e["family"] == e["baseline"])
            text.append(f"\nfrontier: {TASKS[name].title}, {workers} workers; {dense['family']} {dense['loss']:.4f} "
                        f"({dense['seeds']} seeds, lr {dense['lr']:g})")
            text.append(f"{'':<50}{'both ways':>10}{'push':>8}{'pull':>8} fewer   loss / that, least to most of the seeds")
            for family, settings in rows.items():
                for setting, e in settings.items():
                    told = "" if e["dominated"] else "frontier"
                    pushed, pulled = (e[f"{way}_times_fewer"] or 0 for way in ("pushed", "pulled"))
                    text.append(f"{f'{family} {setting}':<50}{e['times_fewer']:>9.0f}x{pushed:>7.0f}x{pulled:>7.0f}x"
                                f"{e['ratio']:>10.3f}  {min(e['ratios']):.3f} to {max(e['ratios']):.3f}  {told}")
            if workers == WORKERS[0]:
                nearest, met = verdict(rows)
                text.append(f"aim, {AIM_BYTES}x fewer bytes at {AIM_LOSS} of the loss: {'met' if met else 'missed'} by {nearest}")
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
    figure, axes = plt.subplots(len(names), len(columns), figsize=(max(9, 4.2 * len(columns)), 3.4 * len(names)), squeeze=False)
    colors = plt.get_cmap("tab20").colors
    order = [family.title for family in families(names[0], 2) if family.drawn]
    for row, name in zip(axes, names):
        for axis, workers in zip(row, columns):
            for family, settings in found[name].get(workers, {}).items():
                if family not in order:
                    continue
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
        row[0].set_ylabel("loss / uncompressed AdamW's")
    for axis in axes[-1]:
        axis.set_xlabel("times fewer bytes than fp32, both ways")
    by_title = {t: h for axis in axes.flat for h, t in zip(*axis.get_legend_handles_labels())}
    figure.legend(by_title.values(), by_title.keys(), loc="lower center", ncols=3, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
