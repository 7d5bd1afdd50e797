"""What `training` measures by itself: grids of links and workers for the time of a step, and one search of learning rates per
model and system for its loss. A loss does not depend on the link, as all systems but local steps wait for each other in every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gradwire.torch import DEFAULT_CODEC
from measuring import LOOPBACK, FinishedRuns, Run
from models import RECOMMENDER
from systems import System

MODEL = "gpt-5m"
DDP, ALONE, BARE = "ddp", "alone", "alone without optimizer"
POWER_SGD, POWER_SGD_4 = "ddp powersgd-1", "ddp powersgd-4"
BEGINNING_STEPS = 40  # of the default codec, in which its density falls, and dense ones of the PowerSGD beside it
POWER_SGD_LATER, POWER_SGD_4_LATER = (f"{system} begins-{BEGINNING_STEPS}" for system in (POWER_SGD, POWER_SGD_4))
TORCH = (DDP, "ddp buckets-4", "ddp fp16", POWER_SGD, POWER_SGD_4)
TOPK = "sharded topk:density=0.03,values=int4 both"
TAGC = "sharded tagc:density=0.01,bits=2"  # ShardedOptimizer's default behind its denser beginning
EARLY = f"{TAGC} early"
BEGINNING = f"sharded {DEFAULT_CODEC}"  # the runs that grids time have 9 steps, so all of them lie in it
DENSE = ("sharded dense:fp32", "ddp-hook dense:fp32")
GRADWIRE = (TAGC, TOPK, "sharded topk:density=0.001,values=fp16 both", "ddp-hook thc:bits=4", "ddp-hook powersgd:rank=1",
            "ddp-hook tagc:density=0.01,cells=8", "ddp-hook topk:density=0.03,values=int4 both", "local-16 topk:density=0.05,values=int8 both")
COMPARED = (ALONE, BARE, *TORCH, *DENSE, BEGINNING, *GRADWIRE)
HOOKED = ("thc:bits=6 int8", "tagc:density=0.2,cells=8 int8", "tagc:density=0.2,cells=8", "tagc:density=0.01,bits=2 int8")
OWN_BITS = ("ddp-hook tagc:density=0.01", "fsdp-hook tagc:density=0.2", "fsdp-hook tagc:density=0.2 int8")  # in no grid of times yet
FSDP = tuple(name for loop in ("fsdp", "zero2") for name in (loop, *(f"{loop}-hook {codec}" for codec in HOOKED)))
OWN_DENSE = f"{DENSE[0]} own"
_ALL_ELEMENTS = (ALONE, BARE, DDP, "ddp buckets-4", DENSE[0], OWN_DENSE)
MODELS_SYSTEMS = (ALONE, BARE, DDP, "ddp buckets-4", POWER_SGD, DENSE[0], TAGC)  # that other models are timed with
BY_ROWS = (DDP, "ddp sparse", "sharded zen")  # of a recommender
# Times do not depend on these; losses are searched from here, by factors of 2.
STEPS_FIRST_RATE, ADAMW_FIRST_RATE, RECOMMENDER_FIRST_RATE = 4e-3, 2e-3, 4.0
TIMED_RATE = 1e-3
LEARNING_WORKERS, LEARNING_STEPS, EVALUATE_EVERY = 2, 320, 16
MOST_RATES = 5


@dataclass(frozen=True)
class Grid:
    """Cells of links and workers, in each of which all systems take turns."""

    name: str
    title: str
    systems: tuple[str, ...]
    links: tuple[str, ...]
    workers: tuple[int, ...] = (2,)
    compute_ms: float = 0
    turns: int = 2
    periods: int = 6  # of a system, measured each turn
    model: str = MODEL
    shards: int = 0  # 0: as many as workers
    together: bool = False  # shard i runs on the host of worker i
    scheme: str = "tcp"
    congestion: str = "cubic"
    bucket_bytes: int = 0

    def cells(self) -> Iterator[tuple[int, str]]:
        return ((workers, link) for workers in self.workers for link in self.links)

    def run(self, system: str, workers: int, link: str, turn: int) -> Run:
        return Run(system=system, model=self.model, workers=workers, link=link, compute_ms=self.compute_ms,
                   steps=self.periods * System(system).period, lr=TIMED_RATE, turn=turn, shards=self.shards or workers,
                   together=self.together, scheme=self.scheme, congestion=self.congestion, bucket_bytes=self.bucket_bytes)

    def runs(self) -> Iterator[Run]:
        """In the order in which they are made: all cells once, then again, the systems backwards every other time."""
        for turn in range(self.turns):
            for workers, link in self.cells():
                for system in self.systems if turn % 2 == 0 else reversed(self.systems):
                    yield self.run(system, workers, link, turn)


GRIDS = {grid.name: grid for grid in (
    Grid("dense", "all elements travel, computing replaced by 100 ms", _ALL_ELEMENTS,
         ("100M", "1G", "none"), compute_ms=100, turns=3),
    Grid("dense-computing", "all elements travel, computing as it is", _ALL_ELEMENTS, ("100M",), turns=4, periods=8),
    # More than the links the cores bind here: processes of one row differ by a fifth, for as long as they live.
    # In the first eight rounds gradients learn to wait for each other.
    Grid("dense-cores", "all elements travel, computing as it is, faster links", _ALL_ELEMENTS, ("1G", "none"), turns=8, periods=24),
    Grid("slow", "slow links, computing replaced by 100 ms", COMPARED, ("10M", "50M"), compute_ms=100),
    Grid("fast", "faster links, computing as it is", COMPARED, ("200M", "1G", "none")),
    Grid("fast-fsdp", "fully sharded, computing as it is", ("fsdp", "fsdp-hook thc:bits=6 int8"), ("200M", "1G", "none")),
    Grid("fsdp", "fully sharded, computing replaced by 100 ms", (ALONE, *FSDP, "fsdp-hook dense:fp32"), ("50M", "200M", "1G"),
         compute_ms=100),
    Grid("share", "fully sharded, computing replaced by 500 ms, so that synchronising takes FSDP the share of TAGC's authors",
         (ALONE, *(system for system in FSDP if system.startswith("fsdp"))), ("1G",), compute_ms=500),
    Grid("scaling", "more workers at 1 Gbit/s, computing replaced by 300 ms",
         (ALONE, BARE, DDP, "ddp buckets-4", POWER_SGD, TAGC, EARLY, TOPK, "ddp-hook thc:bits=4"), ("1G",), (1, 2, 4, 8), 300,
         together=True),
    Grid("workers", "more workers on slower links, computing replaced by 300 ms",
         (ALONE, BARE, "ddp buckets-4", POWER_SGD, TAGC, TOPK), ("50M", "200M"), (4, 8), 300, together=True),
    Grid("large", "25 million parameters, computing replaced by 300 ms", MODELS_SYSTEMS, ("200M", "1G"), compute_ms=300, model="gpt-25m"),
    Grid("deep", "291 small tensors, computing replaced by 100 ms", MODELS_SYSTEMS, ("50M", "1G"), compute_ms=100, model="gpt-deep"),
    Grid(RECOMMENDER, "tables of which a batch touches few rows, computing as it is", (ALONE, BARE, *BY_ROWS), ("50M", "200M", "1G"),
         model=RECOMMENDER),
)}
# Other buckets compute the same, and so does zero2. What the aims are about comes first.
_LEARNERS = {
    MODEL: (DDP, POWER_SGD, POWER_SGD_LATER, TAGC, "fsdp", *(f"fsdp-hook {codec}" for codec in HOOKED), *GRADWIRE,
            *(s for s in TORCH if "buckets" not in s), POWER_SGD_4_LATER, DENSE[0], *OWN_BITS, "fsdp-hook thc:bits=4",
            "fsdp-hook thc:bits=4 int8", "fsdp-hook dense:fp32 int8"),
    RECOMMENDER: BY_ROWS,
}
LEARNERS = tuple(dict.fromkeys((model, system) for model, systems in _LEARNERS.items() for system in systems))
# Learners whose steps take another time behind their beginning: what is timed as the one, and as the other.
PHASES = {TAGC: (BEGINNING, TAGC), POWER_SGD_LATER: (DDP, POWER_SGD), POWER_SGD_4_LATER: (DDP, POWER_SGD_4)}


def learning_run(model: str, system: str, lr: float) -> Run:
    return Run(system=BEGINNING if system == TAGC else system, model=model, workers=LEARNING_WORKERS, link=LOOPBACK, compute_ms=0,
               steps=LEARNING_STEPS, lr=lr, evaluate_every=EVALUATE_EVERY)


def baseline(system: str) -> str:
    """What a worker by itself has to do in this loop: where shards have the optimizer, it has none."""
    return BARE if system == BARE or System(system).loop == "sharded" else ALONE


def first_rate(model: str, system: str) -> float:
    if model == RECOMMENDER:
        return RECOMMENDER_FIRST_RATE
    return STEPS_FIRST_RATE if System(system).pushes_steps else ADAMW_FIRST_RATE


def loss_of(runs: FinishedRuns, run: Run) -> float | None:
    """At the end; infinite for a run that failed or diverged; None: it was not made."""
    outcome = runs.find(run)
    if outcome is None:
        return None
    last = outcome.curve[-1][1] if outcome.curve else float("inf")
    return last if last == last else float("inf")


def next_rate(runs: FinishedRuns, model: str, system: str) -> Run | None:
    """The learning rate to try next: neighbours of the best one, by factors of 2; None: both are there, or enough are."""
    first = first_rate(model, system)
    tried = {e: loss for e in range(-MOST_RATES, MOST_RATES + 1)
             if (loss := loss_of(runs, learning_run(model, system, first * 2.0**e))) is not None}
    if not tried:
        return learning_run(model, system, first)
    best = min(tried, key=tried.get)
    missing = [e for e in (best - 1, best + 1) if e not in tried]
    return learning_run(model, system, first * 2.0 ** missing[0]) if missing and len(tried) < MOST_RATES else None


def best_rate(runs: FinishedRuns, model: str, system: str) -> Run | None:
    """Of those that were tried; None: none was."""
    among = [(loss_of(runs, run), run.lr) for run, _ in runs if run == learning_run(model, system, run.lr)]
    return learning_run(model, system, min(among)[1]) if among else None
