"""What is run, in which order, and the file of results that makes the study resumable."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "lib"))

from json_lines import append_line, read_lines
from training import Result, Run, Servers, execute

SEEDS = (1, 2, 3)
WORKERS = (2, 8)
DENSITIES = (0.001, 0.01, 0.04)
LOCAL_STEPS = 4
RESIDUAL_DECAY = 0.98  # of pushed steps, as in ShardedOptimizer


class OutOfTime(Exception):
    """The time that the caller gave is used up; what is finished is in the file."""


class Results:
    """Finished runs, a JSON line each. A run that is there is not made again. One process at a time."""

    def __init__(self, path: Path, make: Callable[[Run], Result], deadline: float = float("inf")) -> None:
        self._path = path
        self._make = make
        self._deadline = deadline
        self._known: dict[str, Result] = {}
        self.made = 0
        for entry in read_lines(path):
            run = Run(**entry["run"])
            self._known[self._key(run)] = Result(run, tuple(map(tuple, entry["curve"])), entry["seconds"],
                                                 entry.get("error", ""))

    @staticmethod
    def _key(run: Run) -> str:
        return json.dumps(run.to_dict(), sort_keys=True)

    def find(self, run: Run) -> Result | None:
        return self._known.get(self._key(run))

    def __call__(self, run: Run) -> Result:
        """The result of a run, made now if need be. OutOfTime where there is no time left to make it."""
        known = self.find(run)
        if known is not None:
            return known
        if time.monotonic() > self._deadline:
            raise OutOfTime
        result = self._make(run)
        entry = {"run": run.to_dict(), "curve": result.curve, "seconds": result.seconds}
        if result.error:
            entry["error"] = result.error
        append_line(self._path, entry)
        self._known[self._key(run)] = result
        self.made += 1
        return result

    def __iter__(self) -> Iterator[Result]:
        return iter(self._known.values())


def take_over(path: Path, other: Path) -> None:
    """Adds the runs of another file that this one lacks."""
    mine = {json.dumps(entry["run"], sort_keys=True) for entry in read_lines(path)}
    for entry in read_lines(other):
        if json.dumps(entry["run"], sort_keys=True) not in mine:
            append_line(path, entry)


class Frozen(Results):
    """Results that are there: a run that is missing raises Missing instead of being made."""

    class Missing(Exception):
        pass

    def __init__(self, path: Path) -> None:
        super().__init__(path, self._missing)

    @staticmethod
    def _missing(run: Run) -> Result:
        raise Frozen.Missing


@dataclass(frozen=True)
class Arm:
    """A way to use a codec: what is pushed, and what the shards do with it."""

    name: str
    changes: dict
    centers: dict[str, float]  # where the search for the learning rate begins, by task

    def __hash__(self) -> int:
        return hash(self.name)

    def of(self, run: Run) -> Run:
        return replace(run, **self.changes)


ARMS = {arm.name: arm for arm in (
    Arm("gradient, AdamW", {"push": "gradient", "optimizer": "adamw"}, {"logistic": 0.032, "wide": 0.064, "digits": 0.008, "digits_large": 0.002, "gpt": 0.004}),
    Arm("gradient, SGD", {"push": "gradient", "optimizer": "sgd", "momentum": 0.9},
        {"logistic": 1.024, "wide": 1.024, "digits": 0.032, "digits_large": 0.032, "gpt": 0.128}),
    Arm("step", {"push": "step", "optimizer": "step", "residual_decay": RESIDUAL_DECAY},
        {"logistic": 0.016, "wide": 0.032, "digits": 0.004, "digits_large": 0.001, "gpt": 0.004}),
    Arm("delta", {"push": "delta", "optimizer": "step", "local_steps": LOCAL_STEPS},
        {"logistic": 0.032, "wide": 0.064, "digits": 0.008, "digits_large": 0.002, "gpt": 0.004}),
)}
WITHOUT_MOMENTUM = Arm("gradient, SGD", {"push": "gradient", "optimizer": "sgd"}, ARMS["gradient, SGD"].centers)

DENSE = "dense:values=fp32"
# Give the trajectory of dense:fp32, or all but: they take its learning rate.
FINE = ("dense:values=bf16", "dense:values=fixed32", "dense:values=fixed16", "fp16", "adaptive", "zen")
QUANTIZED = ("onebit", "signsgd", "signum:momentum=0.9", "efsignsgd", "terngrad", "qsgd:bits=4", "linear:bits=4",
             "natural:bits=4", "uniform:bits=4,rounding=nearest", "uniform:bits=4,rounding=stochastic", "thc:bits=4")
LOW_RANK = ("powersgd:rank=1", "powersgd:rank=4")
SPARSE = ("tagc", "topk", "randomk")
FINE_BOTH_WAYS = ("fp16", "dense:values=bf16")
BOTH_WAYS = ("onebit", "signsgd", "efsignsgd", "terngrad", "qsgd:bits=4", "linear:bits=4", "natural:bits=4")
SPARSE_BOTH_WAYS = ("topk", "randomk")
# Magnitudes from which on `threshold` sends, by what is pushed: few to many elements.
THRESHOLDS = {"gradient": (0.003, 0.001, 0.0003), "step": (10.0, 4.0, 1.5), "delta": (0.1, 0.03, 0.01)}
SMALL = "dense:values=fixed16"


@dataclass(frozen=True)
class Case:
    """A codec in an arm: a cell of the study's table, over workers, seeds and tasks."""

    codec: str
    arm: Arm
    update_codec: str = ""
    tuned: bool = True  # else at the learning rate of dense:fp32 in the same arm
    small: str = ""

    def run(self, task: str, lr: float, workers: int = 2, seed: int = 1) -> Run:
        return self.arm.of(Run(task, self.codec, lr=lr, update_codec=self.update_codec, workers=workers, seed=seed,
                               small=self.small))


def cases() -> list[Case]:
    """The grid."""
    found = []
    for arm in ARMS.values():
        found.append(Case(DENSE, arm))
        found += [Case(codec, arm, tuned=False) for codec in FINE]
        found += [Case(codec, arm, codec, tuned=False) for codec in FINE_BOTH_WAYS]
        for codec in QUANTIZED:
            own_momentum = codec.startswith("signum") and arm.name == "gradient, SGD"
            found.append(Case(codec, WITHOUT_MOMENTUM if own_momentum else arm))
        found += [Case(codec, arm) for codec in LOW_RANK]
        found += [Case(codec, arm, codec) for codec in BOTH_WAYS]
        found += [Case(f"{codec}:density={d:g}", arm, small=SMALL) for codec in SPARSE for d in DENSITIES]
        found += [Case(f"{codec}:density={d:g},values=fp16", arm, f"{codec}:density={d:g},values=fp16", small=SMALL)
                  for codec in SPARSE_BOTH_WAYS for d in DENSITIES]
        found += [Case(f"threshold:value={t:g}", arm, small=SMALL) for t in THRESHOLDS[arm.changes["push"]]]
        if arm.changes["push"] == "gradient":
            mine = WITHOUT_MOMENTUM if arm.name == "gradient, SGD" else arm
            found += [Case(f"dgc:density={d:g}", mine, small=SMALL) for d in DENSITIES]
    return found


def center(case: Case, task: str) -> float:
    """Where to begin the search: signs are as large as steps, whatever the gradient."""
    signs = case.codec.split(":")[0] in ("signsgd", "signum") and case.arm.name == "gradient, SGD"
    return ARMS["step"].centers[task] / 4 if signs else case.arm.centers[task]


def climb(results: Results, run: Run, begin: float, most: int = 9, factor: float = 2.0, upwards: bool = False) -> float:
    """The best learning rate of a grid by `factor`, from `begin` on, to where the neighbours are worse."""
    tried: dict[float, float] = {}

    def loss(lr: float) -> float:
        lr = float(f"{lr:.6g}")
        if lr not in tried:
            tried[lr] = results(replace(run, lr=lr)).loss
        return tried[lr]

    best = begin
    loss(best)
    while len(tried) < most:
        neighbours = sorted((best * factor, best / factor)[: 1 if upwards else 2], key=loss)
        if not loss(neighbours[0]) < loss(best):
            break
        best = neighbours[0]
    return float(f"{best:.6g}")


def learning_rate(results: Results, case: Case, task: str, workers: int = 2, most: int = 9) -> float:
    """Searched with 2 workers and the first seed, from where it is best for dense:fp32 in the same arm.

    What workers precondition by gradients of their own shrinks in the mean of many, so with more workers that of steps and
    deltas is searched upwards from there.
    """
    if workers > 2:
        lr = learning_rate(results, case, task, 2, most)
        if case.arm.changes["push"] == "gradient":
            return lr
        return climb(results, case.run(task, lr, workers), lr, upwards=True)
    if task == "gpt" and case.update_codec in BOTH_WAYS:  # a shorter search: that of the same codec one way
        return learning_rate(results, replace(case, update_codec=""), task, workers, most)
    dense = Case(DENSE, ARMS[case.arm.name])
    begin = center(case, task)
    if case != dense and begin == case.arm.centers[task]:
        begin = learning_rate(results, dense, task)
    return climb(results, case.run(task, begin), begin, most) if case.tuned else begin


def repeat(results: Results, case: Case, task: str, workers: int, seeds: tuple[int, ...], most: int = 9) -> list[Result]:
    lr = learning_rate(results, case, task, workers, most)
    return [results(case.run(task, lr, workers, seed)) for seed in seeds]


def grid(results: Results, workers: int, seeds: tuple[int, ...], among: list[Case] | None = None) -> None:
    """The two small tasks; without `among` every codec in every arm."""
    for name in ("logistic", "digits"):
        for case in cases() if among is None else among:
            repeat(results, case, name, workers, seeds)


GPT_SEARCH = 3  # runs of the GPT in a search for a learning rate
GPT_DELTA = ("onebit", "efsignsgd", "qsgd:bits=4", "thc:bits=4", "tagc:density=0.01", "topk:density=0.01")


def core_cases() -> list[Case]:
    """Every codec at its default, in the arms that can win."""
    found = []
    for case in cases():
        dense, name = case.codec == DENSE, case.codec.split(":")[0]
        if "density" in case.codec and case.codec != TINY and "density=0.01" not in case.codec.split(":")[1].split(","):
            continue
        if name == "threshold" and case.codec not in ("threshold:value=0.001", "threshold:value=4"):
            continue
        wanted = {"gradient, AdamW": True, "gradient, SGD": dense or name in ("dgc", "signum", "signsgd"),
                  "step": dense or case.tuned, "delta": dense or case.codec in GPT_DELTA and not case.update_codec}
        if wanted[case.arm.name]:
            found.append(case)
    return found


def gpt(results: Results) -> None:
    """With a shorter search for the learning rate, and one seed of all but the baselines."""
    for case in core_cases():
        dense = case.codec == DENSE
        repeat(results, case, "gpt", 2, SEEDS if dense else SEEDS[:1], 9 if dense else GPT_SEARCH)


def gpt_grid(results: Results, workers: int, seeds: tuple[int, ...], among: list[Case]) -> None:
    for case in among:
        repeat(results, case, "gpt", workers, seeds, 9 if case.codec == DENSE else GPT_SEARCH)


def gpt_finalists(results: Results) -> None:
    """Densities and seeds of what is in question for the defaults, and 8 workers."""
    names = [DENSE] + [f"{codec}:density={d:g}" for codec in ("tagc", "topk") for d in DENSITIES]
    chosen = [case for case in cases() if case.codec in names and not case.update_codec
              and (case.arm.name in ("gradient, AdamW", "step") or case.codec == DENSE and case.arm.name == "gradient, SGD")]
    for case in chosen:
        repeat(results, case, "gpt", 2, SEEDS, 9 if case.codec == DENSE else GPT_SEARCH)
    for case in chosen:
        if case.codec in (DENSE, TAGC):
            repeat(results, case, "gpt", 8, SEEDS[:1], 9 if case.codec == DENSE else GPT_SEARCH)


# What settles the defaults: one thing changed at a time, each at a learning rate of its own.
TOPK, TAGC, TINY = "topk:density=0.01", "tagc:density=0.01", "topk:density=0.001,values=fp16"
WARM = ",warmup_rounds=40,warmup_density=0.05"


def variants(task: str) -> list[tuple[str, Run]]:
    """(what differs, run without its learning rate)."""
    def step(codec: str, both_ways: bool = False, **changes: object) -> Run:
        base = dict(push="step", optimizer="step", residual_decay=RESIDUAL_DECAY, small=SMALL)
        return Run(task, codec, update_codec=TINY if both_ways else "", **{**base, **changes})

    found: list[tuple[str, Run]] = []
    sparse = [("top-k 1 %", TOPK, False), ("TAGC 1 %", TAGC, False), ("top-k 0.1 % both ways", TINY, True)]
    for name, codec, both in sparse[: 1 if task == "gpt" else 3]:
        found += [(f"{name}, residual decay {d:g}", step(codec, both, residual_decay=d)) for d in (0.9, 0.98, 1.0)]
        found += [(f"{name}, beta2 {b:g}", step(codec, both, beta2=b)) for b in (0.99, 0.999)]
        found += [(f"{name}, small tensors as the rest", step(codec, both, small=""))]
        found += [(f"{name}, density falls from 5 %", step(codec + WARM, both))]
        if task != "logistic":
            found += [(f"{name}, head dense", step(codec, both, dense_roles="head"))]
        if task == "gpt":
            found += [(f"{name}, embedding dense", step(codec, both, dense_roles="embedding"))]
    for name, codec in (("dense", DENSE), ("top-k 1 %", TOPK))[: 0 if task == "gpt" else 2]:
        small = "" if codec == DENSE else SMALL
        for steps in (1, 4, 8):
            found.append((f"{name}, delta of {steps} steps", Run(task, codec, "delta", "step", local_steps=steps, small=small)))
        found.append((f"{name}, delta of 4 steps, outer Nesterov 0.9 at 0.7",
                      Run(task, codec, "delta", "sgd", local_steps=4, momentum=0.9, outer_lr=0.7, small=small)))
    if task == "gpt":
        return found + [(f"{name}, LION", Run(task, codec, optimizer="lion", small=SMALL if codec == TOPK else ""))
                        for name, codec in (("dense", DENSE), ("top-k 1 %", TOPK), ("1-bit", "onebit"), ("THC 4 bits", "thc:bits=4"))]
    found.append(("dense, AdamW with beta2 0.999", Run(task, DENSE, beta2=0.999)))
    for name, codec in (("dense", DENSE), ("top-k 1 %", TOPK), ("1-bit", "onebit"), ("EF-SignSGD", "efsignsgd"),
                        ("SignSGD", "signsgd"), ("QSGD 4 bits", "qsgd:bits=4"), ("THC 4 bits", "thc:bits=4"),
                        ("DGC 1 %", "dgc:density=0.01")):
        small = SMALL if codec in (TOPK, "dgc:density=0.01") else ""
        for optimizer, momentum in (("sgd", 0.0), ("sgd", 0.9), ("adamw", 0.0), ("lamb", 0.0), ("lans", 0.0), ("lion", 0.0)):
            if codec.startswith("dgc") and momentum:
                continue
            label = "SGD with momentum 0.9" if momentum else {"sgd": "SGD", "adamw": "AdamW"}.get(optimizer, optimizer.upper())
            found.append((f"{name}, {label}", Run(task, codec, "gradient", optimizer, momentum=momentum, small=small)))
    return found


# Learning rates that searches of variants begin at, as multiples of the arm's own.
_BEGIN = {("gradient", "sgd", 0.0): ("gradient, SGD", 8.0), ("gradient", "sgd", 0.9): ("gradient, SGD", 1.0),
          ("gradient", "adamw", 0.0): ("gradient, AdamW", 1.0), ("gradient", "lamb", 0.0): ("gradient, AdamW", 2.0),
          ("gradient", "lans", 0.0): ("gradient, AdamW", 2.0), ("gradient", "lion", 0.0): ("step", 0.25),
          ("step", "step", 0.0): ("step", 2.0), ("delta", "step", 0.0): ("delta", 1.0), ("delta", "sgd", 0.9): ("delta", 0.5)}


def tuned(results: Results, run: Run, most: int = 9, factor: float = 2.0, begin: float = 0.0) -> Run:
    """The run at its best learning rate, from a search with the first seed."""
    arm, times = _BEGIN[run.push, run.optimizer, run.momentum]
    begin = begin or ARMS[arm].centers[run.task] * times
    if run.codec.startswith("signs") and run.optimizer == "sgd":
        begin = ARMS["step"].centers[run.task] / 4
    return replace(run, lr=climb(results, run, begin, most, factor))


def variant_at_its_best(results: Results, run: Run) -> Run:
    return tuned(results, run, GPT_SEARCH if run.task == "gpt" else 9)


def settle(results: Results, task: str, seeds: tuple[int, ...], push: str = "") -> None:
    """With `push` only the variants that push this."""
    for seed in seeds:
        for _, run in variants(task):
            if push and run.push != push:
                continue
            results(replace(variant_at_its_best(results, run), seed=seed))


# Top-k 0.1 % both ways with fp16 values against no compression: ways to come within 0.5 % of its loss.
def two_way_runs(task: str) -> tuple[list[tuple[str, Run]], list[tuple[str, Run]]]:
    """Uncompressed ones, and compressed ones."""
    dense = [("AdamW", Run(task, DENSE)), ("SGD with momentum 0.9", Run(task, DENSE, optimizer="sgd", momentum=0.9))]

    if task == "wide":
        dense += [("AdamW, beta2 0.999", Run(task, DENSE, beta2=0.999)),
                  ("steps, beta2 0.999", Run(task, DENSE, "step", "step", beta2=0.999))]

    def both(push: str, optimizer: str, codec: str = TINY, back: str = TINY, **changes: object) -> Run:
        return Run(task, codec, push, optimizer, update_codec=back, **changes)

    compressed = {
        "gradients, AdamW": both("gradient", "adamw"),
        "steps, residual decay 1": both("step", "step"),
        "steps, residual decay 1, beta2 0.999": both("step", "step", beta2=0.999),
        "steps, residual decay 0.98": both("step", "step", residual_decay=0.98),
        "steps, small tensors dense": both("step", "step", small=SMALL),
        "steps, density falls from 5 %": both("step", "step", TINY + WARM),
        "gradients, SGD with momentum 0.9": both("gradient", "sgd", momentum=0.9),
        "gradients, SGD": both("gradient", "sgd"),
        "gradients, LANS (CLAN)": both("gradient", "lans"),
        "DGC, SGD": both("gradient", "sgd", "dgc:density=0.001,values=fp16"),
        "deltas of 4 steps": both("delta", "step", local_steps=4),
    }
    # As many bytes per step, in fewer rounds.
    for rounds_of, density in {"digits_large": ((10, 0.018),), "gpt": ((8, 0.0125),)}.get(task, ()):
        codec = f"topk:density={density:g},values=fp16"
        compressed[f"deltas of {rounds_of} steps, top-k {density:.4g} per round"] = both(
            "delta", "step", codec, codec, local_steps=rounds_of)
    kept = {"wide": (0, 2), "digits_large": (0, 1, 3, 11)}.get(task, range(len(compressed)))
    return dense, [list(compressed.items())[i] for i in kept]


def two_way_tuned(results: Results, run: Run) -> Run:
    """The best learning rate to a factor of sqrt(2)."""
    rough = tuned(results, run, most=6)
    return tuned(results, rough, most=3, factor=2**0.5, begin=rough.lr)


def two_way(results: Results, task: str) -> None:
    for runs in two_way_runs(task):
        best = sorted((two_way_tuned(results, run) for _, run in runs), key=lambda r: results(r).loss)[:3]
        for seed in SEEDS[1:]:
            for run in best:
                results(replace(run, seed=seed))


# In the order of what matters most, should time run out.
STAGES: dict[str, Callable[[Results], None]] = {
    "grid": lambda results: grid(results, 2, SEEDS[:1]),
    "settle_logistic": lambda results: settle(results, "logistic", SEEDS[:1]),
    "gpt": gpt,
    "settle_gpt": lambda results: settle(results, "gpt", SEEDS[:1]),
    "settle_digits": lambda results: settle(results, "digits", SEEDS[:1]),
    "settle_steps": lambda results: [settle(results, task, SEEDS, "step") for task in ("logistic", "digits", "gpt")],
    "core_workers": lambda results: grid(results, 8, SEEDS[:1], core_cases()),
    "core_seeds": lambda results: grid(results, 2, SEEDS, core_cases()),
    "two_way_digits": lambda results: two_way(results, "digits_large"),
    "two_way_local": lambda results: [two_way_tuned(results, run) for task in ("digits_large", "gpt")
                                      for what, run in two_way_runs(task)[1] if "per round" in what],
    "two_way_wide": lambda results: two_way(results, "wide"),
    "gpt_finalists": gpt_finalists,
    "core_workers_seeds": lambda results: grid(results, 8, SEEDS, core_cases()),
    "settle_seeds": lambda results: [settle(results, task, SEEDS) for task in ("logistic", "digits", "gpt")],
    "two_way_gpt": lambda results: two_way(results, "gpt"),
    "seeds": lambda results: grid(results, 2, SEEDS),
    "workers": lambda results: grid(results, 8, SEEDS[:1]),
    "workers_seeds": lambda results: grid(results, 8, SEEDS),
    "gpt_grid": lambda results: gpt_grid(results, 2, SEEDS[:1], cases()),
    "gpt_workers": lambda results: gpt_grid(results, 8, SEEDS[:1], core_cases()),
    "gpt_seeds": lambda results: gpt_grid(results, 2, SEEDS, cases()),
    "gpt_workers_seeds": lambda results: gpt_grid(results, 8, SEEDS, cases()),
}


def run_study(path: Path, stages: list[Callable[[Results], None]], seconds: float = float("inf")) -> Results:
    """Runs what is missing. Stops early, without an error, when the time is used up."""
    with Servers() as servers:
        results = Results(path, lambda run: _told(execute(run, servers)), time.monotonic() + seconds)
        try:
            for stage in stages:
                stage(results)
        except OutOfTime:
            print(f"stopped after {seconds / 60:.0f} minutes with {results.made} new runs; the same command goes on")
        return results


def _told(result: Result) -> Result:
    r = result.run
    loss = result.error or f"{result.loss:.4f}"
    print(f"{r.task:<9} {r.codec:<34} {'both ways' if r.update_codec else '':<10} {r.push:<9} {r.optimizer:<6} "
          f"{r.workers} workers seed {r.seed} lr {r.lr:<9g} {loss}  {result.seconds:.1f} s", flush=True)
    return result
