"""Training over slow links: DistributedDataParallel, its hooks and FSDP over gloo against the same loops through shard servers.

Workers and shard servers are hosts of their own: network namespaces whose links token buckets limit each way (needs root).
Systems take turns; the seconds of a step are medians over workers, turns and steps. "not computing" is what a step takes
beyond that of a worker by itself, as many of which run at a time; where shards have the optimizer, of one that has none. Bytes are
those of a worker's link, with headers. Losses are of the same model, two workers, a search of learning rates by factors of 2, and
do not depend on links. Models are GPTs, and a recommender with large tables of embeddings.

  tests/bench/run training                                 # shows and plots the finished runs: the repository's, and one's own
  tests/bench/run training --minutes=60 [--fresh]          # makes those that are missing, or all of them again
  tests/bench/run training --minutes=30 --grids=recommender,losses   # one grid, and the losses of its model
  tests/bench/run training --list                          # grids, and what systems there are
  tests/bench/run training --minutes=20 --systems="ddp;sharded dense:fp32" --links=100M,none   # a grid of your own
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import figures
import measuring
import models
import plan
import plots
import systems
from measuring import FinishedRuns
from plan import GRIDS, LEARNERS, Grid

sys.path.insert(0, str(measuring.ROOT / "tests/net"))

from hosts import why_not

ARCHIVE = Path(__file__).with_name("results.jsonl.xz")
OWN = "own"


def make_times(runs: FinishedRuns, grids: list[Grid], deadline: float, trace: Path | None) -> None:
    for grid in grids:
        for run in grid.runs():
            if runs.find(run) is not None:
                continue
            if time.monotonic() > deadline:
                return
            told = f"{run.system}, {run.workers} workers, {run.link}, turn {run.turn + 1}"
            print(f"  {told} ...", end=" ", file=sys.stderr, flush=True)
            where = ""
            if trace is not None and run.turn == 0:
                trace.mkdir(parents=True, exist_ok=True)
                name = f"{run.system.replace(' ', '-').replace(':', '_')}-{run.link}-of-{run.workers}"
                where = str(trace.resolve() / f"{name}-{{worker}}.json")
            outcome = runs.make(run, where)
            print(outcome.error or f"{1e3 * figures.median(outcome.seconds):.0f} ms", file=sys.stderr)


def make_losses(runs: FinishedRuns, models_of_grids: set[str], deadline: float) -> None:
    """models_of_grids: none stands for all."""
    for model, system in LEARNERS:
        if models_of_grids and model not in models_of_grids:
            continue
        while (run := plan.next_rate(runs, model, system)) is not None:
            if time.monotonic() > deadline:
                return
            print(f"  {model}, {system}, learning rate {run.lr:g} ...", end=" ", file=sys.stderr, flush=True)
            outcome = runs.make(run)
            print(outcome.error or f"loss {plan.loss_of(runs, run):.4f}", file=sys.stderr)
            if runs.find(run) is None:
                break


def own_grid(args: argparse.Namespace) -> Grid:
    return Grid(OWN, "as told", tuple(args.systems.split(";")), tuple(args.links.split(",")),
                tuple(map(int, args.workers.split(","))), args.compute_ms, args.turns, args.periods, args.model, args.shards,
                args.together, args.scheme, args.congestion, args.bucket_bytes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/bench/run training", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the figures go; the plots lie beside it")
    parser.add_argument("--list", action="store_true", help="print grids and systems")
    parser.add_argument("--results", type=Path, help="file of one's own finished runs (default: beside --json)")
    parser.add_argument("--fresh", action="store_true", help="with --minutes: begin without any finished runs; removes one's own")
    parser.add_argument("--archive", action="store_true", help="keep all finished runs in the repository")
    parser.add_argument("--minutes", type=float, default=0.0, help="time for runs that are missing (default 0: only show)")
    parser.add_argument("--grids", default=",".join([*GRIDS, "losses"]),
                        help="which, in this order; losses are made of the models of the others, alone of all (default %(default)s)")
    own = parser.add_argument_group("a grid of your own, in the place of --grids")
    own.add_argument("--systems", help="separated by ';'")
    own.add_argument("--links", default="100M,1G,none", help="of each host, each way, in bit/s (default %(default)s)")
    own.add_argument("--workers", default="2")
    own.add_argument("--model", default=plan.MODEL, choices=models.MODELS)
    own.add_argument("--compute-ms", type=float, default=0.0, help="a sleep in the place of computing; 0: it computes")
    own.add_argument("--turns", type=int, default=3)
    own.add_argument("--periods", type=int, default=9, help="measured each turn; a step, or the local steps of a round")
    own.add_argument("--shards", type=int, default=0, help="default: as many as workers")
    own.add_argument("--together", action="store_true", help="shard i on the host of worker i; else on hosts of their own")
    own.add_argument("--scheme", default="tcp", choices=["tcp", "grpc"])
    own.add_argument("--congestion", default="cubic", help="control of TCP on all hosts (default %(default)s)")
    own.add_argument("--bucket-bytes", type=int, default=0, help="of jobs on shard servers; 0: their default")
    own.add_argument("--trace", type=Path, help="a folder: traces of three steps of each system through shards that is run")
    args = parser.parse_args()
    if args.fresh and args.minutes <= 0:
        parser.error("--fresh makes runs, for which it needs time: add --minutes=N, or leave it out to see the finished runs")
    unknown = set(args.grids.split(",")) - {*GRIDS, "losses"}
    if unknown:
        parser.error(f"there is no grid {', '.join(sorted(unknown))}: {', '.join([*GRIDS, 'losses'])}")
    try:
        for name in (args.systems or "").split(";"):
            if name:
                systems.System(name)
        for link in args.links.split(","):
            measuring.rate_of(link)
    except ValueError as error:
        parser.error(str(error))
    return args


def show_list() -> None:
    for grid in GRIDS.values():
        print(f"{grid.name}: {grid.title}; {', '.join(grid.links)}; {', '.join(map(str, grid.workers))} workers")
        for system in grid.systems:
            print(f"  {system}")
    for model in dict.fromkeys(model for model, _ in LEARNERS):
        print(f"losses: {plan.LEARNING_STEPS} steps of {model}, 2 workers, learning rates by factors of 2")
    print()
    print(systems.__doc__)


def main() -> None:
    args = parse()
    if args.list:
        show_list()
        return
    path = args.results or args.json.with_suffix(".jsonl")
    chosen = args.grids.split(",")
    grids = [own_grid(args)] if args.systems else [GRIDS[name] for name in chosen if name in GRIDS]
    reason = why_not() if args.minutes > 0 and grids else None
    if reason is not None:
        sys.exit(f"tests/bench/run training: {reason}")
    if args.fresh:
        path.unlink(missing_ok=True)
    runs = FinishedRuns(path, None if args.fresh else ARCHIVE)
    if args.minutes > 0:
        deadline = time.monotonic() + 60 * args.minutes
        make_times(runs, grids, deadline, args.trace)
        if "losses" in chosen and not args.systems:
            make_losses(runs, {grid.model for grid in grids}, deadline)
    found = figures.collect(runs, grids)
    print("\n".join(figures.lines(found)))
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    drawn = plots.plot(found, args.json)
    print(f"\nfigures: {args.json}; own runs: {path}" + (f"; plots: {', '.join(map(str, drawn))}" if drawn else ""))
    if args.archive:
        FinishedRuns(path, ARCHIVE).keep(ARCHIVE)


if __name__ == "__main__":
    main()
