"""Draws the way of every slice of one round from traces (`--trace`), one panel for each on the same scale of time: a row is a slice, in
the order in which they are encoded.

  .venv/bin/python tests/bench/training/trace_picture.py OUT.svg TITLE=TRACE.json [TITLE=TRACE.json ...]
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

COLORS = {"encode": "#1f5fa8", "to the shard": "#9fc3e8", "at the shard": "#c8553d", "back": "#f0c0a8", "applied": "#0b7a75"}
WIDTH, LEFT, ROW, HEAD = 960, 24, 3.2, 34
TRACED = 1  # of the rounds in a trace: the first may begin within one


@dataclass
class Slice:
    """Milliseconds from the beginning of the round: (begin, end) by what happens."""

    parts: dict[str, tuple[float, float]]


def slices_of(path: Path) -> tuple[list[Slice], float]:
    """Of a round, and when it ended."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    number = sorted({e["args"]["round"] for e in events})[TRACED]
    events = [e for e in events if e["args"]["round"] == number]
    begin = min(e["ts"] for e in events if e["cat"] == "worker")
    found: dict[tuple[int, int], dict[str, tuple[float, float]]] = defaultdict(dict)
    end = 0.0
    for event in sorted(events, key=lambda e: e["ts"]):
        at = (event["ts"] - begin) / 1e3
        until = at + event["dur"] / 1e3
        if event["cat"] == "worker":
            end = max(end, until)
        if "bucket" in event["args"]:
            of = found[event["args"]["shard"], event["args"]["bucket"]]
            before = of.get(event["name"], (at, until))
            of[event["name"]] = (min(before[0], at), max(before[1], until))
    slices = []
    for of in found.values():
        parts = {"encode": of["encode"], "to the shard": (of["encode"][1], of["merge"][1]), "at the shard": (of["merge"][1], of["apply"][1]),
                 "back": (of["apply"][1], of["received"][1])}
        if applied := [of[name] for name in ("decode", "step") if name in of]:
            parts["applied"] = (min(a for a, _ in applied), max(b for _, b in applied))
        slices.append(Slice(parts))
    return sorted(slices, key=lambda s: s.parts["encode"]), end


def main() -> None:
    if len(sys.argv) < 3 or "=" not in "".join(sys.argv[2:]):
        sys.exit(__doc__)
    panels = [(title, *slices_of(Path(path))) for title, _, path in (text.partition("=") for text in sys.argv[2:])]
    longest = max(end for _, _, end in panels)
    scale = (WIDTH - 2 * LEFT) / longest
    body, top = [], 30.0
    for title, slices, end in panels:
        body.append(f'<text x="{LEFT}" y="{top + 12}">{title}: {end:.0f} ms</text>')
        height = ROW * len(slices)
        y = top + HEAD - 12
        tick = 10 ** len(str(int(longest / 5))) / 2
        for mark in range(int(longest / tick) + 1):
            x = LEFT + mark * tick * scale
            body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + height:.1f}" stroke="#dddddd"/>')
            body.append(f'<text x="{x:.1f}" y="{y + height + 12:.1f}" text-anchor="middle" fill="#777777">{mark * tick:.0f}</text>')
        for row, one in enumerate(slices):
            for part, (a, b) in one.parts.items():
                body.append(f'<rect x="{LEFT + a * scale:.1f}" y="{y + ROW * row:.1f}" width="{max(0.4, (b - a) * scale):.1f}" '
                            f'height="{ROW - 0.6:.1f}" fill="{COLORS[part]}"/>')
        top = y + height + 20
    legend = "".join(f'<rect x="{LEFT + 130 * i}" y="8" width="10" height="10" fill="{color}"/><text x="{LEFT + 14 + 130 * i}" y="17">{part}</text>'
                     for i, (part, color) in enumerate(COLORS.items()))
    Path(sys.argv[1]).write_text(f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top:.0f}" font-family="sans-serif" '
                                 f'font-size="11"><rect width="100%" height="100%" fill="white"/>{legend}{"".join(body)}</svg>\n')


if __name__ == "__main__":
    main()
