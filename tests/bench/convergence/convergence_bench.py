"""Convergence study: every codec with every push kind against dense AdamW and SGD, on three small models and real data.

Figures come from a file of finished runs, a line each: what is missing is run, what is there is not. The repository has
those of the last whole study (results.jsonl.xz), so that the command only prints and plots unless told otherwise.

  tests/bench/run convergence [--minutes=N] [--fresh] [--stages=grid,two_way,...] [--results=FILE]
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
from pathlib import Path

import torch

import frontier
import report
import study

STAGES = {**study.STAGES, **frontier.STAGES}
ARCHIVE = Path(__file__).with_name("results.jsonl.xz")


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/bench/run convergence", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the figures go; the plots lie beside it")
    parser.add_argument("--results", type=Path, help="file of finished runs (default: beside --json)")
    parser.add_argument("--fresh", action="store_true", help="begin without the repository's finished runs")
    parser.add_argument("--minutes", type=float, default=0.0, help="time for runs that are missing (default 0: only show)")
    parser.add_argument("--stages", default=",".join((*study.STAGES, "frontier")), help=f"which, in this order: {', '.join(STAGES)} (default %(default)s)")
    parser.add_argument("--add", type=Path, action="append", default=[], help="a file of finished runs of another process, which are taken over")
    parser.add_argument("--archive", action="store_true", help="keep the finished runs in the repository")
    args = parser.parse_args()
    unknown = set(args.stages.split(",")) - set(STAGES)
    if unknown:
        parser.error(f"there is no stage {', '.join(sorted(unknown))}: {', '.join(STAGES)}")
    torch.set_num_threads(1)
    path = args.results or args.json.with_suffix(".jsonl")
    if not path.exists() and not args.fresh and ARCHIVE.exists():
        path.write_bytes(lzma.decompress(ARCHIVE.read_bytes()))
    for other in args.add:
        study.take_over(path, other)
    if args.minutes > 0:
        study.run_study(path, [STAGES[name] for name in args.stages.split(",")], 60 * args.minutes)
    results = study.Frozen(path)
    figures = report.collect(results) | {"frontier": frontier.collect(results)}
    figures["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    print("\n".join([report.text(figures), *frontier.lines(figures["frontier"])]))
    args.json.write_text(json.dumps(figures, indent=1) + "\n")
    report.plot(figures, args.json.with_suffix(".svg"))
    frontier.plot(figures["frontier"], args.json.with_name("frontier.svg"))
    print(f"\nfigures: {args.json}; runs: {path}; plots: {args.json.with_suffix('.svg')}")
    if args.archive:
        ARCHIVE.write_bytes(lzma.compress(path.read_bytes(), preset=9))


if __name__ == "__main__":
    main()
