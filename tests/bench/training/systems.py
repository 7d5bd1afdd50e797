"""The loops that `training` compares: what people use, and the same through shard servers.

  alone [without optimizer]   a worker by itself, which exchanges nothing; without: gradients are made, and no step is taken
  ddp [fp16|powersgd-R [begins-N]]   DistributedDataParallel over gloo, with torch's communication hook of that name;
                           begins: PowerSGD's first N steps are dense, in the place of 2
  ddp buckets-M            the same with buckets of M MiB in the place of torch's 25
  ddp sparse               the same where tables have sparse gradients, whose rows gloo gathers from all workers (recommender)
  fsdp, zero2              fully_shard over gloo, a unit per block (its reduce-scatter blocks backward);
                           zero2: parameters stay gathered until backward has used them
  ddp-hook CODEC [both]    DistributedDataParallel whose hook is Gradwire's (DDPState); sparse codecs push steps, which
                           torch's SGD takes; both: as below
  fsdp-hook, zero2-hook CODEC [int8]   the same with reduce-scatter through the shards (FSDPState); int8: parameters are gathered
                           so, which is its default
  sharded CODEC [both] [early] [params] [own] [buckets-M]   ShardedOptimizer; both: the update comes back by the same codec; early:
                           it is applied while backward still runs; params: parameters come back in its place; own: worker i
                           has shard i in its process; buckets: of M MiB in the place of the job's default.
                           Codec zen: of embeddings, whose gradients are sparse then (recommender); all else is dense:fp32
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

from models import Task

BETAS = (0.9, 0.95)  # of AdamW, wherever it runs
TRACED_ROUNDS = 3
POWER_SGD_BEGINS = 2  # step, torch's least: so it takes the same way from the first counted step on
ONE_BUCKET_MIB = 1 << 10  # the hook starts collectives from callbacks: of two buckets they may cross, which gloo does not forgive
_HOOKED = re.compile(r"ddp-hook \S+( both)?|(fsdp|zero2)-hook \S+( int8)?")
_SHARDED = re.compile(r"sharded \S+( both)?( early)?( params)?( own)?( buckets-[1-9]\d*)?|local-[1-9]\d* \S+( both)?")
_TORCH = re.compile(r"alone( without optimizer)?|fsdp|zero2|"
                    r"ddp( fp16| powersgd-[1-9]\d*( begins-([2-9]|[1-9]\d+))?| buckets-[1-9]\d*| sparse)?")
_SPARSE_GRADIENTS = re.compile(r"alone( without optimizer)?|ddp sparse|sharded zen\b.*")
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
    def own_shards(self) -> bool:
        """In the workers' processes; else servers are started for them."""
        return self.loop == "sharded" and "own" in self.words

    @property
    def bucket_mib(self) -> int:
        """Of its buckets; 0: as many as torch or the job chooses."""
        return next((int(word.removeprefix("buckets-")) for word in self.words if word.startswith("buckets-")), 0)

    @property
    def period(self) -> int:
        """Steps after which a loop does the same again."""
        return int(self.loop.removeprefix("local-")) if self.loop.startswith("local-") else 1

    @property
    def pushes_steps(self) -> bool:
        return _STEPS.match(self.name) is not None

    @property
    def sparse_gradients(self) -> bool:
        """Of the tables, where a model has some."""
        return _SPARSE_GRADIENTS.fullmatch(self.name) is not None

    def open(self, task: Task, place: Place, lr: float) -> contextlib.AbstractContextManager[tuple[Callable[..., Any], Any]]:
        """What to call for a forward pass, and the optimizer."""
        makers = {"alone": _alone, "ddp": _ddp, "fsdp": _fsdp, "zero2": _fsdp, "ddp-hook": _ddp_hook, "fsdp-hook": _fsdp_hook,
                  "zero2-hook": _fsdp_hook, "sharded": _sharded}
        return makers.get(self.loop, _local)(self, task, place, lr)


@contextlib.contextmanager
def _group(place: Place) -> Iterator[None]:
    os.environ.update(MASTER_ADDR=place.master, MASTER_PORT=str(place.port))
    if place.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    dist.init_process_group("gloo", rank=place.worker, world_size=place.workers, timeout=datetime.timedelta(minutes=10))
    yield
    dist.barrier()
    dist.destroy_process_group()


def _optimizer(system: System, task: Task, lr: float) -> torch.optim.Optimizer:
    """The task's, on the worker; with steps that the shards merge, one that takes them as they are."""
    parameters = task.module.parameters()
    if task.plain_sgd or system.pushes_steps:
        return torch.optim.SGD(parameters, lr=lr)
    return torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=0.0)


def _options(place: Place, system: System) -> dict[str, Any]:
    """Of a job on shard servers."""
    import gradwire

    codec = system.words[1]
    more = {"update_codec": codec} if "both" in system.words else {}
    if system.loop.endswith("-hook") and system.pushes_steps:
        more["push"] = "step"
    trace = gradwire.Trace(place.trace, place.traced_round, TRACED_ROUNDS) if place.trace else None
    return {"servers": place.servers, "job": "training", "worker": f"worker-{place.worker}", "codec": codec,
            "bucket_bytes": system.bucket_mib << 20 or place.bucket_bytes, "trace": trace, **more}


class _NoOptimizer(torch.optim.Optimizer):
    """Lets gradients go, as those do whose optimizer is on the shards."""

    def __init__(self, model: torch.nn.Module):
        super().__init__(model.parameters(), {})

    def step(self, closure=None):
        pass


@contextlib.contextmanager
def _alone(system, task, place, lr):
    yield task.module, _NoOptimizer(task.module) if "without" in system.words else _optimizer(system, task, lr)


def _wrapped(model: torch.nn.Module, **options: Any) -> torch.nn.parallel.DistributedDataParallel:
    """Its tables of angles are the same everywhere: they need not travel before every forward pass."""
    return torch.nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False, **options)


@contextlib.contextmanager
def _ddp(system, task, place, lr):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    with _group(place):
        option, *more = system.words[1:] or [""]
        options = {}
        if system.bucket_mib:
            options = {"bucket_cap_mb": system.bucket_mib}
        elif option.startswith("powersgd-"):
            options = {"bucket_cap_mb": ONE_BUCKET_MIB}
        wrapped = _wrapped(task.module, **options)
        if option == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif option.startswith("powersgd-"):
            begins = int(more[0].removeprefix("begins-")) if more else POWER_SGD_BEGINS
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=int(option.removeprefix("powersgd-")),
                                                start_powerSGD_iter=begins)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        yield wrapped, _optimizer(system, task, lr)


def _fully_sharded(system: System, task: Task, place: Place) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (place.workers,))
    whole = system.loop.startswith("fsdp")
    for unit in task.units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=whole)
    fully_shard(task.module, mesh=mesh, reshard_after_forward=None if whole else False)


@contextlib.contextmanager
def _fsdp(system, task, place, lr):
    with _group(place):
        _fully_sharded(system, task, place)
        yield task.module, _optimizer(system, task, lr)


@contextlib.contextmanager
def _ddp_hook(system, task, place, lr):
    from gradwire.torch import DDPState, ddp_hook

    with _group(place):
        wrapped = _wrapped(task.module)
        with DDPState(wrapped, **_options(place, system)) as state:
            wrapped.register_comm_hook(state, ddp_hook)
            yield wrapped, _optimizer(system, task, lr)


@contextlib.contextmanager
def _fsdp_hook(system, task, place, lr):
    from gradwire.torch import FSDPState

    with _group(place):
        _fully_sharded(system, task, place)
        gather = "int8" if system.words[-1] == "int8" else "exact"
        with FSDPState(task.module, gather=gather, **_options(place, system)):
            yield task.module, _optimizer(system, task, lr)


def _own_server(system: System, place: Place) -> contextlib.AbstractContextManager[Any]:
    import gradwire

    return gradwire.ShardServer(place.servers[place.worker]) if system.own_shards else contextlib.nullcontext()


@contextlib.contextmanager
def _sharded(system, task, place, lr):
    import gradwire
    from gradwire.torch import ShardedOptimizer

    options = _options(place, system)
    if task.plain_sgd:
        options["optimizer"] = "sgd"
    elif not system.pushes_steps:
        options["betas"] = BETAS
    if system.sparse_gradients:
        options |= {"codec": "dense:fp32", "rules": [gradwire.Rule(options["codec"], roles=("embedding",))]}
    with _own_server(system, place), ShardedOptimizer(task.module, workers=place.workers, lr=lr, overlap=True,
                          pull="params" if "params" in system.words else "update", early_updates="early" in system.words,
                          **options) as optimizer:
        yield task.module, optimizer


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
def _local(system, task, place, lr):
    from gradwire.torch import LocalSGD

    with LocalSGD(_optimizer(system, task, lr), task.module, every=system.period, overlap=True, workers=place.workers,
                  **_options(place, system)) as optimizer:
        yield task.module, optimizer
