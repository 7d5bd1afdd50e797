"""The loops that `training` compares: what people use, and the same through shard servers.

  alone [without optimizer]   a worker by itself, which exchanges nothing; without: gradients are made, and no step is taken
  ddp [fp16|powersgd-R [begins-N]]   DistributedDataParallel over gloo, with torch's communication hook of that name;
                           begins: PowerSGD's first N steps are dense, in the place of 2
  ddp buckets-M            the same with buckets of M MiB in the place of torch's 25
  fsdp, zero2              fully_shard over gloo, a unit per block (its reduce-scatter blocks backward);
                           zero2: parameters stay gathered until backward has used them
  ddp-hook CODEC [both]    DistributedDataParallel whose hook is Gradwire's (DDPState); sparse codecs push steps, which
                           torch's SGD takes; both: as below
  fsdp-hook, zero2-hook CODEC [int8]   the same with reduce-scatter through the shards (FSDPState); int8: parameters are gathered
                           so, which is its default
  sharded CODEC [both] [early] [params]   ShardedOptimizer; both: the update comes back by the same codec; early: it is applied
                           while backward still runs; params: parameters come back in its place
  local-H CODEC [both]     LocalSGD with H local steps a round, overlapped with the next
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

BETAS = (0.9, 0.95)  # of AdamW, wherever it runs
TRACED_ROUNDS = 3
POWER_SGD_BEGINS = 2  # step, torch's least: so it takes the same way from the first counted step on
ONE_BUCKET_MIB = 1 << 10  # the hook starts collectives from callbacks: of two buckets they may cross, which gloo does not forgive
_HOOKED = re.compile(r"ddp-hook \S+( both)?|(fsdp|zero2)-hook \S+( int8)?")
_SHARDED = re.compile(r"sharded \S+( both)?( early)?( params)?|local-[1-9]\d* \S+( both)?")
_TORCH = re.compile(r"alone( without optimizer)?|fsdp|zero2|ddp( fp16| powersgd-[1-9]\d*( begins-([2-9]|[1-9]\d+))?| buckets-[1-9]\d*)?")
# The codec of a loop can do without the optimizer's second moment: its learning rate is another.
_STEPS = re.compile(r"sharded (tagc|topk|threshold|randomk|onebit|efsignsgd|signum|powersgd)\b|\w+-hook (tagc|topk|threshold|randomk)\b")


@dataclass(frozen=True)
class Place:
    """Where a worker is. servers: empty for loops without; master: host of rank 0; interface: of gloo, empty: its default."""

    worker: int
    workers: int
    servers: list[str]
    master: str
    port: int
    interface: str
    bucket_bytes: int  # of jobs; 0: their default
    trace: str  # a file for three rounds of a job; empty: none
    traced_round: int  # the first of them


@dataclass(frozen=True)
class System:
    """A loop by its name, as above; ValueError for others."""

    name: str

    def __post_init__(self) -> None:
        if not any(pattern.fullmatch(self.name) for pattern in (_HOOKED, _SHARDED, _TORCH)):
            raise ValueError(f"there is no system {self.name!r}:{__doc__.split(':', 1)[1]}")

    @property
    def words(self) -> list[str]:
        return self.name.split()

    @property
    def loop(self) -> str:
        return self.words[0]

    @property
    def uses_shards(self) -> bool:
        return not _TORCH.fullmatch(self.name)

    @property
    def period(self) -> int:
        """Steps after which a loop does the same again."""
        return int(self.loop.removeprefix("local-")) if self.loop.startswith("local-") else 1

    @property
    def pushes_steps(self) -> bool:
        return _STEPS.match(self.name) is not None

    def open(self, model: torch.nn.Module, units: list[torch.nn.Module], place: Place,
             lr: float) -> contextlib.AbstractContextManager[tuple[Callable[..., Any], Any]]:
        """What to call for a forward pass, and the optimizer."""
        makers = {"alone": _alone, "ddp": _ddp, "fsdp": _fsdp, "zero2": _fsdp, "ddp-hook": _ddp_hook, "fsdp-hook": _fsdp_hook,
                  "zero2-hook": _fsdp_hook, "sharded": _sharded}
        return makers.get(self.loop, _local)(self, model, units, place, lr)


@contextlib.contextmanager
def _group(place: Place) -> Iterator[None]:
    os.environ.update(MASTER_ADDR=place.master, MASTER_PORT=str(place.port))
    if place.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    dist.init_process_group("gloo", rank=place.worker, world_size=place.workers, timeout=datetime.timedelta(minutes=10))
    yield
    dist.barrier()
    dist.destroy_process_group()


def _adamw(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=0.0)


def _own_optimizer(system: System, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr) if system.pushes_steps else _adamw(model, lr)


def _options(place: Place, system: System) -> dict[str, Any]:
    """Of a job on shard servers."""
    import gradwire

    codec = system.words[1]
    more = {"update_codec": codec} if "both" in system.words else {}
    if system.loop.endswith("-hook") and system.pushes_steps:
        more["push"] = "step"
    trace = gradwire.Trace(place.trace, place.traced_round, TRACED_ROUNDS) if place.trace else None
    return {"servers": place.servers, "job": "training", "worker": f"worker-{place.worker}", "codec": codec,
            "bucket_bytes": place.bucket_bytes, "trace": trace, **more}


class _NoOptimizer(torch.optim.Optimizer):
    """Lets gradients go, as those do whose optimizer is on the shards."""

    def __init__(self, model: torch.nn.Module):
        super().__init__(model.parameters(), {})

    def step(self, closure=None):
        pass


@contextlib.contextmanager
def _alone(system, model, units, place, lr):
    yield model, _NoOptimizer(model) if "without" in system.words else _adamw(model, lr)


def _wrapped(model: torch.nn.Module, **options: Any) -> torch.nn.parallel.DistributedDataParallel:
    """Its tables of angles are the same everywhere: they need not travel before every forward pass."""
    return torch.nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False, **options)


@contextlib.contextmanager
def _ddp(system, model, units, place, lr):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    with _group(place):
        option, *more = system.words[1:] or [""]
        options = {}
        if option.startswith("buckets-"):
            options = {"bucket_cap_mb": int(option.removeprefix("buckets-"))}
        elif option.startswith("powersgd-"):
            options = {"bucket_cap_mb": ONE_BUCKET_MIB}
        wrapped = _wrapped(model, **options)
        if option == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif option.startswith("powersgd-"):
            begins = int(more[0].removeprefix("begins-")) if more else POWER_SGD_BEGINS
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=int(option.removeprefix("powersgd-")),
                                                start_powerSGD_iter=begins)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        yield wrapped, _adamw(model, lr)


def _fully_sharded(system: System, model: torch.nn.Module, units: list[torch.nn.Module], place: Place) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (place.workers,))
    whole = system.loop.startswith("fsdp")
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=whole)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if whole else False)


@contextlib.contextmanager
def _fsdp(system, model, units, place, lr):
    with _group(place):
        _fully_sharded(system, model, units, place)
        yield model, _adamw(model, lr)


@contextlib.contextmanager
def _ddp_hook(system, model, units, place, lr):
    from gradwire.torch import DDPState, ddp_hook

    with _group(place):
        wrapped = _wrapped(model)
        with DDPState(wrapped, **_options(place, system)) as state:
            wrapped.register_comm_hook(state, ddp_hook)
            yield wrapped, _own_optimizer(system, model, lr)


@contextlib.contextmanager
def _fsdp_hook(system, model, units, place, lr):
    from gradwire.torch import FSDPState

    with _group(place):
        _fully_sharded(system, model, units, place)
        gather = "int8" if system.words[-1] == "int8" else "exact"
        with FSDPState(model, gather=gather, **_options(place, system)):
            yield model, _own_optimizer(system, model, lr)


@contextlib.contextmanager
def _sharded(system, model, units, place, lr):
    from gradwire.torch import ShardedOptimizer

    own = {} if system.pushes_steps else {"betas": BETAS}
    with ShardedOptimizer(model, workers=place.workers, lr=lr, overlap=True, pull="params" if "params" in system.words else "update",
                          early_updates="early" in system.words, **own, **_options(place, system)) as optimizer:
        yield model, optimizer


@contextlib.contextmanager
def shared_parameters(model: torch.nn.Module, optimizer: Any) -> Iterator[None]:
    """In it the model has what all workers agreed on last: those of local steps have each gone on from there by itself."""
    shared = getattr(optimizer, "outer", None)
    if shared is None:
        yield
        return
    own = [p.detach().clone() for p in model.parameters()]
    agreed = [p for group in shared.param_groups for p in group["params"]]
    with torch.no_grad():
        for p, value in zip(model.parameters(), agreed, strict=True):
            p.data.copy_(value)  # unseen by LocalSGD, which would take it for progress
        yield
        for p, value in zip(model.parameters(), own, strict=True):
            p.data.copy_(value)


@contextlib.contextmanager
def _local(system, model, units, place, lr):
    from gradwire.torch import LocalSGD

    with LocalSGD(_adamw(model, lr), model, every=system.period, overlap=True, workers=place.workers,
                  **_options(place, system)) as optimizer:
        yield model, optimizer
