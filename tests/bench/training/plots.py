"""The plots of `training`, from the figures of its report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import plan
from aims import SCALING_AIM
from figures import title
from models import RECOMMENDER
from systems import System

COLORS = ("#222222", "#888888", "#b08030", "#d9b060", "#0b7a75", "#c8553d", "#1f5fa8", "#7b2d8b", "#4fae4a", "#d99a00",
          "#5f9ea0", "#a0522d", "#e377c2", "#6b8e23", "#9fc3e8", "#ff7f50", "#2f4f4f", "#b8a0d0")
WITH_LOSSES = ("slow", "fast", "fsdp", "share", RECOMMENDER)  # grids of models and workers that learn

Subplots = Callable[..., tuple[Any, Any]]


def plot(report: dict, json: Path) -> list[Path]:
    """Milliseconds of a step for each grid, scaling factors, and loss against time for each link. Returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gradwire"})
    import matplotlib.pyplot as plt

    made = []

    def save(figure: Any, what: str) -> None:
        path = json.with_name(f"training-{what}.svg")
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        made.append(path)

    for name, grid in report["grids"].items():
        cells = [cell for cell in grid["cells"] if any("ms" in row for row in cell["systems"].values())]
        if not cells:
            continue
        save(_steps(cells, plt.subplots), name)
        if grid.get("scaling"):
            save(_scaling(grid["scaling"], plt.subplots), f"{name}-factor")
        losses = report["losses"].get(grid["model"], {})
        if name in WITH_LOSSES and losses:
            what = "held-out loss, nats per click" if grid["model"] == RECOMMENDER else "validation loss, nats per byte"
            save(_losses(cells, losses, what, plt.subplots), f"{name}-loss")
    return made


def _steps(cells: list[dict], subplots: Subplots) -> Any:
    figure, axes = subplots(1, len(cells), figsize=(4.5 * len(cells) + 1.5, 4.2), squeeze=False, sharey=True)
    for axis, cell in zip(axes[0], cells, strict=True):
        rows = {title(system): row for system, row in reversed(cell["systems"].items()) if "ms" in row}
        waiting = [min(row["ms"], max(0, row.get("not_computing_ms", row["ms"]))) for row in rows.values()]
        computing = [row["ms"] - wait for row, wait in zip(rows.values(), waiting, strict=True)]
        axis.barh(list(rows), computing, color="#bbbbbb", label="computing")
        axis.barh(list(rows), waiting, left=computing, color="#c8553d", label="not computing")
        axis.set_title(f"{cell['workers']} workers, {cell['link']}", fontsize=9, loc="left")
        axis.set_xlabel("ms per step")
        axis.grid(alpha=0.3, axis="x")
        axis.tick_params(labelsize=7)
    axes[0][0].legend(frameon=False, fontsize=8)
    return figure


def _scaling(scaling: dict, subplots: Subplots) -> Any:
    figure, axis = subplots(figsize=(7, 4.2))
    for color, (system, factors) in zip(COLORS, scaling.items()):
        axis.plot([f["workers"] for f in factors], [f["factor"] for f in factors], color=color, linewidth=1.2, marker="o", markersize=3,
                  linestyle="-" if System(system).uses_shards else "--", label=title(system))
    axis.axhline(SCALING_AIM, color="#999999", linewidth=0.8, linestyle=":", label=f"aim through shards, {SCALING_AIM:g}")
    workers = sorted({f["workers"] for factors in scaling.values() for f in factors})
    axis.set_xscale("log", base=2)
    axis.set_xticks(workers, [str(n) for n in workers])
    axis.set_xlabel("workers")
    axis.set_ylabel("scaling factor")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=7)
    return figure


def _phases(system: str) -> tuple[str, str]:
    return plan.PHASES.get(system, (system, system))


def _losses(cells: list[dict], losses: dict, what: str, subplots: Subplots) -> Any:
    """A beginning whose steps were not timed is dashed: they are drawn as long as later ones."""
    figure, axes = subplots(1, len(cells), figsize=(5 * len(cells), 4.6), squeeze=False, sharey=True)
    untimed = False
    timed = {system for cell in cells for system, row in cell["systems"].items() if "ms" in row}
    drawn = dict(zip((s for s in losses if _phases(s)[1] in timed), COLORS))
    for axis, cell in zip(axes[0], cells, strict=True):
        seconds = {system: row["ms"] / 1e3 for system, row in cell["systems"].items() if "ms" in row}
        for system, color in drawn.items():
            early, late = _phases(system)
            if late not in seconds:
                continue
            first, then = seconds.get(early, seconds[late]), seconds[late]
            points = [(min(step, plan.BEGINNING_STEPS) * first + max(0, step - plan.BEGINNING_STEPS) * then, loss)
                      for step, loss in losses[system]["curve"]]
            begun = 0
            if early not in seconds:
                untimed = True
                begun = sum(step <= plan.BEGINNING_STEPS for step, _ in losses[system]["curve"])
                axis.plot(*zip(*points[: begun + 1]), color=color, linewidth=1.2, linestyle="--")
            axis.plot(*zip(*points[begun:]), color=color, linewidth=1.2, label=title(system))
        axis.set_xscale("log")
        axis.set_title(f"{cell['workers']} workers, {cell['link']}", fontsize=9, loc="left")
        axis.set_xlabel("seconds")
        axis.grid(alpha=0.3)
    if untimed:
        axes[0][0].plot([], [], color="#222222", linewidth=1.2, linestyle="--", label="a beginning, drawn as long as later steps")
    axes[0][0].set_ylabel(what)
    axes[0][0].legend(frameon=False, fontsize=7)
    return figure
