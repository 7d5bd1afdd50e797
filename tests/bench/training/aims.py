"""What is wanted of the figures of `training`, and which of it is met."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import plan
from plan import DDP, DENSE, GRIDS, OWN_DENSE, POWER_SGD
from systems import System

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
SCALING_AIM = 0.95
AS_GOOD = 1.005  # of another's loss


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


@dataclass(frozen=True)
class LossAim:
    """A system's loss, at most `bound` times the least one of `others`: of plan.MODEL."""

    text: str
    system: str
    bound: float
    others: tuple[str, ...]


def _times_faster(system: str, than: str) -> Callable[[dict], float]:
    return lambda rows: rows[than]["ms"] / rows[system]["ms"]


def ddp_ms(rows: dict) -> float:
    """With the buckets that suit it best."""
    return min(row["ms"] for system, row in rows.items() if system == DDP or system.startswith("ddp buckets") if "ms" in row)


def _waiting(system: str, to: str) -> Callable[[dict], float]:
    return lambda rows: max(0.0, rows[system]["not_computing_ms"]) / max(0.0, rows[to]["not_computing_ms"])


def time_aims() -> Iterator[Aim]:
    for system in plan.GRADWIRE:
        yield Aim("times faster than DDP", "slow", system, 5, True, lambda rows, s=system: ddp_ms(rows) / rows[s]["ms"])
        yield Aim("not computing, of PowerSGD 1's", "slow", system, 0.5, False, _waiting(system, POWER_SGD))
    for grid in ("dense", "dense-computing", "dense-cores", "slow", "fast"):
        for system in (DENSE[0], OWN_DENSE):
            yield Aim("of DDP's step", grid, system, 1.05, False, lambda rows, s=system: rows[s]["ms"] / ddp_ms(rows))
    for loop in ("fsdp", "zero2"):
        for codec, bound in (("tagc:density=0.2,cells=8 int8", 1.15), ("thc:bits=6 int8", 2), ("tagc:density=0.01,bits=2 int8", 2)):
            system = f"{loop}-hook {codec}"
            yield Aim(f"times faster than {loop}", "fsdp", system, bound, True, _times_faster(system, loop))
    for system in ("fsdp-hook tagc:density=0.2,cells=8", "fsdp-hook tagc:density=0.2,cells=8 int8"):
        yield Aim("times faster than fsdp", "share", system, 1.15, True, _times_faster(system, "fsdp"))


def loss_aims() -> Iterator[LossAim]:
    for codec in ("tagc:density=0.2", "tagc:density=0.2 int8", "thc:bits=6 int8"):
        yield LossAim("of FSDP's loss", f"fsdp-hook {codec}", AS_GOOD, ("fsdp",))
    for system in plan.GRADWIRE:
        yield LossAim("of PowerSGD 1's loss, with the better beginning", system, 1, (POWER_SGD, plan.POWER_SGD_LATER))


def judge(report: dict) -> list[dict]:
    """Every aim of the report's grids, and those of losses, with its figure (None: there is none) and what came of it."""
    judged = []
    for name, grid in report["grids"].items():
        for cell in grid["cells"]:
            where = {"grid": name, "workers": cell["workers"], "link": cell["link"]}
            for aim in time_aims():
                if aim.grid == name and aim.system in grid["systems"]:
                    figure = aim.found(cell)
                    missing = NOT_MEASURED if figure is None else ""
                    judged.append(_judged(aim.text, aim.system, where, figure, aim.bound, aim.least, missing))
        for system, factors in grid.get("scaling", {}).items():
            if System(system).uses_shards:
                missing = NOT_MEASURED if {f["workers"] for f in factors} != set(GRIDS[name].workers) else ""
                least = min(f["factor"] for f in factors)
                judged.append(_judged("scaling factor, the least", system, {"grid": name}, least, SCALING_AIM, True, missing))
    return judged + [_judged_loss(aim, report["losses"].get(plan.MODEL, {})) for aim in loss_aims()]


def _judged(name: str, system: str, where: dict, figure: float | None, bound: float, least: bool, missing: str) -> dict:
    """missing: what is, without which an aim is not met; what was measured may be enough to miss it."""
    missed = figure is not None and not (figure >= bound if least else figure <= bound)
    return {"name": name, "system": system, **where, "figure": figure, "bound": bound, "at_least": least,
            "verdict": MISSED if missed else missing or MET}


def _judged_loss(aim: LossAim, losses: dict) -> dict:
    """Others count as missing while their learning rate is searched: it would flatter to compare with a worse one."""
    known = [losses[other]["loss"] for other in aim.others if other in losses]
    missing = [s for s in (aim.system, *aim.others) if s not in losses or (s != aim.system and not losses[s]["searched"])]
    figure = losses[aim.system]["loss"] / min(known) if aim.system in losses and known else None
    return _judged(aim.text, aim.system, {"grid": "losses", "model": plan.MODEL}, figure, aim.bound, False,
                   f"no loss yet of {' and '.join(missing)}" if missing else "")


def line(judged: dict) -> str:
    figure = "-" if judged["figure"] is None else f"{judged['figure']:.{2 if 'link' in judged else 4}f}"
    return (f"    {judged['system']}: {figure} {judged['name']}, aim {'>=' if judged['at_least'] else '<='} {judged['bound']:g}: "
            f"{judged['verdict']}")
