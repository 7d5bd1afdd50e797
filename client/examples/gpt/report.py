"""Writes the quickstart's report: report.json, plots, and one self-contained report.html."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"dense": "#444444", "steps": "#8a6fb0", "tagc": "#0b7a75", "tagc_gradient": "#c8553d"}

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; width: 100%; }
th, td { padding: .4rem .7rem; text-align: right; border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
.note { color: #555; font-size: .9rem; }
"""


def plot(report: dict, path: Path, horizontal: str, label: str, log: bool) -> None:
    """Validation loss over `horizontal` of the curves: one thin line per seed, the mean marked."""
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=130)
    for name, run in report["runs"].items():
        color = COLORS.get(name, None)
        for i, curve in enumerate(run["curves"].values()):
            x = [point[horizontal] for point in curve]
            y = [point["val_loss"] for point in curve]
            axes.plot(x, y, color=color, linewidth=1.6 if i == 0 else 0.9, alpha=1 if i == 0 else 0.5,
                      label=run["title"] if i == 0 else None, marker="o" if i == 0 else None, markersize=3)
    if log:
        axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("validation loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def table(report: dict) -> str:
    columns = ("run", "lr", "beta2", "validation loss", "per seed", "s / step", "push KiB / step", "pull KiB / step", "push ratio",
               "pull ratio", "deferred")
    rows = []
    for run in report["runs"].values():
        seeds = ", ".join(f"{loss:.3f}" for loss in run["val_loss_by_seed"].values())
        rows.append((
            f"{run['title']} ({run['codec']})", f"{run['lr']:g}", f"{run['beta2']:g}", f"{run['val_loss']:.4f}", seeds, f"{run['seconds_per_step']:.3f}",
            f"{run['push_bytes_per_step'] / 1024:,.1f}", f"{run['pull_bytes_per_step'] / 1024:,.1f}",
            f"{run['push_compression']:.1f}x", f"{run['pull_compression']:.1f}x", f"{run['deferred_fraction']:.4%}",
        ))
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def conclusions(report: dict) -> list[str]:
    """What the numbers say of each run beside dense training, a sentence each; none where there was no dense run."""
    dense = report["runs"].get("dense")
    if dense is None:
        return []
    return [f"{run['title']}: {_conclusion(run, dense)}" for name, run in report["runs"].items() if name != "dense"]


def _conclusion(run: dict, dense: dict) -> str:
    share = run["val_loss"] / dense["val_loss"] - 1
    level = "level with" if abs(share) < 0.0005 else f"{abs(share):.1%} {'below' if share < 0 else 'above'}"
    losses, others = run["val_loss_by_seed"], dense["val_loss_by_seed"]
    both = losses.keys() & others.keys()
    lower = sum(losses[seed] < others[seed] for seed in both)
    time = run["seconds_per_step"] / dense["seconds_per_step"]
    return (
        f"a validation loss {level} that of dense training ({lower} of {len(both)} seeds lower); "
        f"{_bytes(run['push_compression'])} pushed and {_bytes(run['pull_compression'])} pulled; "
        f"a step took {time:.2f} of dense's time on this machine, where no network is in between"
    )


def _bytes(compression: float) -> str:
    return f"{compression:.0f} times fewer bytes" if compression >= 1.5 else "as many bytes"


def write_report(report: dict, out: Path) -> None:
    """Leaves report.json, loss_steps.png, loss_bytes.png and report.html in `out`."""
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(report, out / "loss_steps.png", "step", "training steps", log=False)
    plot(report, out / "loss_bytes.png", "pushed_bytes", "bytes pushed by one worker (log scale)", log=True)
    images = "".join(
        f'<img alt="{title}" src="data:image/png;base64,{base64.b64encode((out / name).read_bytes()).decode()}">'
        for name, title in (("loss_steps.png", "loss over steps"), ("loss_bytes.png", "loss over bytes"))
    )
    first = next(iter(report["runs"].values()))
    sentences = "".join(f"<p>{html.escape(sentence)}.</p>" for sentence in conclusions(report))
    (out / "report.html").write_text(
        "<!doctype html><html lang=en><meta charset=utf-8><title>Gradwire quickstart</title>"
        f"<style>{STYLE}</style>"
        f"<h1>Gradwire quickstart</h1><p>A byte-level GPT of {first['parameters']:,} parameters, trained on the source "
        f"text of the Python standard library by {first['workers']} workers through {first['shards']} shards, "
        f"{first['steps']} steps, {len(first['curves'])} seed(s). Every run starts from the same parameters and sees "
        f"the same data.</p>{table(report)}{sentences}{images}"
        "<p class=note>Bytes are those of all frames, headers counted, as the shards received and sent them, per "
        "worker and step over the whole model. Ratios are against float32. Deferred elements could not be decoded in "
        "their round and arrived in a later one. After every run each worker's parameters were compared with the "
        f"shards' by SHA-256. {html.escape(report['untried'])}</p></html>\n"
    )
