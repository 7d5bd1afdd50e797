"""The tables of `training`, its JSON and its plots, from whatever runs there are."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import plan
from measuring import FinishedRuns
from plan import ALONE, DDP, POWER_SGD, Grid
from systems import System

COLORS = ("#222222", "#888888", "#b08030", "#d9b060", "#0b7a75", "#c8553d", "#1f5fa8", "#7b2d8b", "#4fae4a", "#d99a00",
          "#5f9ea0", "#a0522d")


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def collect(runs: FinishedRuns, grids: list[Grid]) -> dict:
    """grid -> cells -> system -> figures. What was not run is missing."""
    return {"name": "training", "losses": _losses(runs), "machines": sorted({o.machine for _, o in runs}),
            "grids": {grid.name: {"title": grid.title, "model": grid.model, "compute_ms": grid.compute_ms,
                                  "shards": grid.shards, "together": grid.together,
                                  "cells": [c for cell in grid.cells() if (c := _cell(runs, grid, *cell))]}
                      for grid in grids}}


def _losses(runs: FinishedRuns) -> dict:
    found = {}
    for system in plan.LEARNERS:
        best = plan.best_rate(runs, system)
        if best is not None:
            outcome = runs.find(best)
            found[system] = {"loss": plan.loss_of(runs, best), "lr": best.lr, "searched": plan.next_rate(runs, system) is None,
                             "curve": outcome.curve, "error": outcome.error}
    return found


def _cell(runs: FinishedRuns, grid: Grid, workers: int, link: str) -> dict | None:
    rows: dict[str, dict] = {}
    for system in grid.systems:
        found = [o for turn in range(grid.turns) if (o := runs.find(grid.run(system, workers, link, turn))) is not None]
        good = [o for o in found if not o.error]
        errors = [o.error for o in found if o.error]
        if not good:
            if errors:
                rows[system] = {"error": errors[0]}
            continue
        seconds = [s for o in good for s in o.seconds]
        low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        rows[system] = {"ms": 1e3 * median(seconds), "quartiles_ms": [1e3 * low, 1e3 * high], "turns": len(good),
                        "sent_bytes": median([o.sent_bytes for o in good]),
                        "received_bytes": median([o.received_bytes for o in good]), "parameters": good[0].parameters}
        if errors:
            rows[system]["error"] = errors[0]
    if not rows:
        return None
    alone = rows.get(ALONE, {}).get("ms")
    for row in rows.values():
        if alone is not None and "ms" in row:
            row["not_computing_ms"] = row["ms"] - alone
    return {"workers": workers, "link": link, "systems": rows}


@dataclass(frozen=True)
class Aim:
    """What is wanted of a system in a cell: `value` of the cell's rows, at least or at most `bound`."""

    text: str
    grid: str
    system: str
    bound: float
    least: bool
    value: Callable[[dict], float]

    def found(self, cell: dict) -> float | None:
        try:
            return self.value(cell["systems"])
        except (KeyError, ValueError, ZeroDivisionError):  # something was not measured
            return None


def _times_faster(system: str, than: str) -> Callable[[dict], float]:
    return lambda rows: rows[than]["ms"] / rows[system]["ms"]


def _ddp_ms(rows: dict) -> float:
    """With the buckets that suit it best."""
    return min(row["ms"] for system, row in rows.items() if system == DDP or system.startswith("ddp buckets") if "ms" in row)


def _waiting(system: str, to: str) -> Callable[[dict], float]:
    return lambda rows: max(0.0, rows[system]["not_computing_ms"]) / max(0.0, rows[to]["not_computing_ms"])


def aims() -> Iterator[Aim]:
    for system in plan.GRADWIRE[1:]:
        yield Aim("times faster than DDP", "slow", system, 5, True, lambda rows, s=system: _ddp_ms(rows) / rows[s]["ms"])
        yield Aim("not computing, of PowerSGD 1's", "slow", system, 0.5, False, _waiting(system, POWER_SGD))
    for grid in ("dense", "fast", "own"):
        yield Aim("of DDP's step", grid, "sharded dense:fp32", 1.05, False,
                  lambda rows: rows["sharded dense:fp32"]["ms"] / _ddp_ms(rows))
    for loop in ("fsdp", "zero2"):
        for codec, bound in (("tagc:density=0.2 int8", 1.15), ("thc:bits=6 int8", 2), ("tagc:density=0.01,bits=2 int8", 2)):
            system = f"{loop}-hook {codec}"
            yield Aim(f"times faster than {loop}", "fsdp", system, bound, True, _times_faster(system, loop))
    for system in ("fsdp-hook tagc:density=0.2", "fsdp-hook tagc:density=0.2 int8"):
        yield Aim("times faster than fsdp", "share", system, 1.15, True, _times_faster(system, "fsdp"))


SCALING_AIM = 0.95


def lines(report: dict) -> list[str]:
    text = [f"training on {' and '.join(report['machines']) or 'no machine yet'}"]
    for name, grid in report["grids"].items():
        computing = f"{grid['compute_ms']:g} ms of sleep" if grid["compute_ms"] else "as it is"
        text.append(f"\n{name}: {grid['title']}; {grid['model']}, computing {computing}; "
                    f"{grid['shards'] or 'as many'} shards{'' if grid['shards'] else ' as workers'}, "
                    f"{'on the hosts of workers' if grid['together'] else 'on hosts of their own'}")
        for cell in grid["cells"]:
            of_these = grid["model"] == plan.MODEL and cell["workers"] == plan.LEARNING_WORKERS
            text += _cell_lines(cell, report["losses"] if of_these else {})
            for aim in aims():
                value = aim.found(cell) if aim.grid == name else None
                if value is not None:
                    met = value >= aim.bound if aim.least else value <= aim.bound
                    text.append(f"    {aim.system}: {value:.2f} {aim.text}, aim {'>=' if aim.least else '<='} {aim.bound:g}: "
                                f"{'met' if met else 'missed'}")
        if name == "scaling":
            text += _scaling_lines(grid["cells"])
    if report["losses"]:
        text.append(f"\nlosses after {plan.LEARNING_STEPS} steps of {plan.MODEL}, 2 workers")
        for system, e in sorted(report["losses"].items(), key=lambda item: item[1]["loss"]):
            text.append(f"  {system:<46}{e['loss']:>8.4f}  learning rate {e['lr']:g}"
                        f"{'' if e['searched'] else ', not all neighbours tried'}{'  ' + e['error'] if e['error'] else ''}")
    return text


def _cell_lines(cell: dict, losses: dict) -> list[str]:
    text = [f"  {cell['workers']} workers, {cell['link']}:",
            f"    {'':<44}{'ms/step':>9}{'quartiles':>15}{'not computing':>15}{'of DDP':>8}{'sent KB':>10}{'received':>10}{'loss':>8}"]
    try:
        ddp = _ddp_ms(cell["systems"])
    except ValueError:
        ddp = None
    for system, row in cell["systems"].items():
        if "ms" not in row:
            text.append(f"    {system:<44}{row['error']}")
            continue
        low, high = row["quartiles_ms"]
        waiting = f"{row['not_computing_ms']:.0f}" if "not_computing_ms" in row else "-"
        ratio = f"{row['ms'] / ddp:.3f}" if ddp else "-"
        loss = f"{losses[system]['loss']:.3f}" if system in losses else "-"
        failed = f"  a turn failed: {row['error']}" if "error" in row else ""
        text.append(f"    {system:<44}{row['ms']:>9.0f}{f'{low:.0f} to {high:.0f}':>15}{waiting:>15}{ratio:>8}"
                    f"{row['sent_bytes'] / 1e3:>10.1f}{row['received_bytes'] / 1e3:>10.1f}{loss:>8}{failed}")
    return text


def _scaling_lines(cells: list[dict]) -> list[str]:
    """What a worker by itself takes for a step, as many of which run, over what a system takes: 1 is perfect."""
    text = [f"  scaling factors by workers, aim >= {SCALING_AIM:g} through shards:"]
    for system in {system: None for cell in cells for system in cell["systems"] if system != ALONE}:
        factors = [(cell["workers"], cell["systems"][ALONE]["ms"] / cell["systems"][system]["ms"]) for cell in cells
                   if all("ms" in cell["systems"].get(s, {}) for s in (ALONE, system))]
        if factors:
            judged = "met" if min(factor for _, factor in factors) >= SCALING_AIM else "missed"
            text.append(f"    {system:<46}" + "  ".join(f"{workers}: {factor:.3f}" for workers, factor in factors)
                        + (f"  {judged}" if System(system).uses_shards else ""))
    return text


def plot(report: dict, json: Path) -> list[Path]:
    """Milliseconds of a step for each grid, and loss against time for each link where losses are known. Returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gradwire"})
    import matplotlib.pyplot as plt

    made = []

    def save(figure, what: str) -> None:
        path = json.with_name(f"training-{what}.svg")
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        made.append(path)

    for name, grid in report["grids"].items():
        cells = [cell for cell in grid["cells"] if any("ms" in row for row in cell["systems"].values())]
        if not cells:
            continue
        figure, axes = plt.subplots(1, len(cells), figsize=(4.5 * len(cells) + 1.5, 4.2), squeeze=False, sharey=True)
        for axis, cell in zip(axes[0], cells, strict=True):
            rows = {system: row for system, row in cell["systems"].items() if "ms" in row}
            computing = rows.get(ALONE, {}).get("ms", 0)
            order = list(reversed(rows))
            axis.barh(order, [min(rows[s]["ms"], computing) for s in order], color="#bbbbbb", label="computing")
            axis.barh(order, [max(0, rows[s]["ms"] - computing) for s in order],
                      left=[min(rows[s]["ms"], computing) for s in order], color="#c8553d", label="not computing")
            axis.set_title(f"{cell['workers']} workers, {cell['link']}", fontsize=9, loc="left")
            axis.set_xlabel("ms per step")
            axis.grid(alpha=0.3, axis="x")
            axis.tick_params(labelsize=7)
        axes[0][0].legend(frameon=False, fontsize=8)
        save(figure, name)
        if name in ("slow", "fast") and report["losses"]:
            figure, axes = plt.subplots(1, len(cells), figsize=(5 * len(cells), 4.2), squeeze=False, sharey=True)
            for axis, cell in zip(axes[0], cells, strict=True):
                known = [s for s in cell["systems"] if s in report["losses"] and "ms" in cell["systems"][s]]
                for color, system in zip(COLORS, known):
                    seconds = cell["systems"][system]["ms"] / 1e3
                    curve = report["losses"][system]["curve"]
                    axis.plot([step * seconds for step, _ in curve], [loss for _, loss in curve], color=color, linewidth=1.2,
                              label=system)
                axis.set_xscale("log")
                axis.set_title(f"{cell['workers']} workers, {cell['link']}", fontsize=9, loc="left")
                axis.set_xlabel("seconds")
                axis.grid(alpha=0.3)
            axes[0][0].set_ylabel("validation loss, nats per byte")
            axes[0][0].legend(frameon=False, fontsize=7)
            save(figure, f"{name}-loss")
    return made
