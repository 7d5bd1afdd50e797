"""The tables of `training` and its JSON, from whatever runs there are."""

from __future__ import annotations

import statistics

import aims
import plan
from measuring import FinishedRuns
from plan import ALONE, BARE, Grid


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def title(system: str) -> str:
    return f"{plan.TAGC}, beginning" if system == plan.BEGINNING else system


def collect(runs: FinishedRuns, grids: list[Grid]) -> dict:
    """grid -> cells -> system -> figures. What was not run is missing."""
    report = {"name": "training", "losses": _losses(runs), "machines": sorted({o.machine for _, o in runs}),
              "grids": {grid.name: {"title": grid.title, "model": grid.model, "compute_ms": grid.compute_ms,
                                    "shards": grid.shards, "together": grid.together, "systems": grid.systems,
                                    "cells": [c for cell in grid.cells() if (c := _cell(runs, grid, *cell))]}
                        for grid in grids}}
    if scaling := report["grids"].get("scaling"):
        scaling["scaling"] = _scaling(scaling["cells"])
    report["aims"] = aims.judge(report)
    return report


def _losses(runs: FinishedRuns) -> dict:
    """model -> system -> figures."""
    found: dict[str, dict] = {}
    for model, system in plan.LEARNERS:
        best = plan.best_rate(runs, model, system)
        if best is not None:
            outcome = runs.find(best)
            found.setdefault(model, {})[system] = {
                "loss": plan.loss_of(runs, best), "lr": best.lr, "searched": plan.next_rate(runs, model, system) is None,
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
    for system, row in rows.items():
        baseline = next((s for s in (plan.baseline(system), ALONE) if "ms" in rows.get(s, {})), None)
        if baseline is not None and "ms" in row:
            row["baseline"] = baseline
            row["not_computing_ms"] = row["ms"] - rows[baseline]["ms"]
    return {"workers": workers, "link": link, "systems": rows}


def _scaling(cells: list[dict]) -> dict:
    """What a worker by itself takes for a step, as many of which run, over what a system takes: 1 is perfect."""
    factors: dict[str, list[dict]] = {}
    for cell in cells:
        for system, row in cell["systems"].items():
            if "baseline" in row and system not in (ALONE, BARE):
                factor = cell["systems"][row["baseline"]]["ms"] / row["ms"]
                factors.setdefault(system, []).append({"workers": cell["workers"], "factor": factor, "baseline": row["baseline"]})
    return factors


def _mark(system: str, figures: dict) -> str:
    """Of what is compared with a worker that has an optimizer, because one without was not timed beside it."""
    return "*" if figures.get("baseline") == ALONE and plan.baseline(system) == BARE else ""


def lines(report: dict) -> list[str]:
    text = [f"training on {' and '.join(report['machines']) or 'no machine yet'}"]
    for name, grid in report["grids"].items():
        computing = f"{grid['compute_ms']:g} ms of sleep" if grid["compute_ms"] else "as it is"
        text.append(f"\n{name}: {grid['title']}; {grid['model']}, computing {computing}; "
                    f"{grid['shards'] or 'as many'} shards{'' if grid['shards'] else ' as workers'}, "
                    f"{'on the hosts of workers' if grid['together'] else 'on hosts of their own'}")
        for cell in grid["cells"]:
            losses = report["losses"].get(grid["model"], {}) if cell["workers"] == plan.LEARNING_WORKERS else {}
            text += _cell_lines(cell, losses)
            text += [aims.line(aim) for aim in report["aims"]
                     if (aim["grid"], aim.get("workers"), aim.get("link")) == (name, cell["workers"], cell["link"])]
        if grid.get("scaling"):
            text += _scaling_lines(grid["scaling"], [aim for aim in report["aims"] if aim["grid"] == name and "link" not in aim])
        if any(_mark(system, row) for cell in grid["cells"] for system, row in cell["systems"].items()):
            text.append(f"  * beside `{ALONE}`, whose optimizer is on the worker: there is no run of `{BARE}` yet")
    for model, losses in report["losses"].items():
        text.append(f"\nlosses after {plan.LEARNING_STEPS} steps of {model}, 2 workers")
        for system, e in sorted(losses.items(), key=lambda item: item[1]["loss"]):
            text.append(f"  {system:<46}{e['loss']:>8.4f}  learning rate {e['lr']:g}"
                        f"{'' if e['searched'] else ', not all neighbours tried'}{'  ' + e['error'] if e['error'] else ''}")
        text += [aims.line(aim) for aim in report["aims"] if (aim["grid"], aim.get("model")) == ("losses", model)]
    return text


def _cell_lines(cell: dict, losses: dict) -> list[str]:
    text = [f"  {cell['workers']} workers, {cell['link']}:",
            f"    {'':<44}{'ms/step':>9}{'quartiles':>15}{'not computing':>15}{'of DDP':>8}{'sent KB':>10}{'received':>10}{'loss':>8}"]
    try:
        ddp = aims.ddp_ms(cell["systems"])
    except ValueError:
        ddp = None
    for system, row in cell["systems"].items():
        if "ms" not in row:
            text.append(f"    {title(system):<44}{row['error']}")
            continue
        low, high = row["quartiles_ms"]
        waiting = f"{row['not_computing_ms']:.0f}{_mark(system, row)}" if "not_computing_ms" in row else "-"
        ratio = f"{row['ms'] / ddp:.3f}" if ddp else "-"
        loss = f"{losses[system]['loss']:.3f}" if system in losses else "-"
        failed = f"  a turn failed: {row['error']}" if "error" in row else ""
        text.append(f"    {title(system):<44}{row['ms']:>9.0f}{f'{low:.0f} to {high:.0f}':>15}{waiting:>15}{ratio:>8}"
                    f"{row['sent_bytes'] / 1e3:>10.1f}{row['received_bytes'] / 1e3:>10.1f}{loss:>8}{failed}")
    return text


def _scaling_lines(scaling: dict, judged: list[dict]) -> list[str]:
    text = ["  scaling factors by workers:"]
    for system, factors in scaling.items():
        text.append(f"    {title(system):<46}" + "  ".join(f"{f['workers']}: {f['factor']:.3f}{_mark(system, f)}" for f in factors))
    return text + [aims.line(aim) for aim in judged]
