"""Fully sharded data parallel over shard servers: their means in the place of reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
except ImportError:  # an older torch: FSDPState says so
    FSDPModule = None  # type: ignore[assignment,misc]

from ._ddp import plain_name
from ._errors import FailedPrecondition
from ._job import Rule, TensorSpec
from ._means import MeanExchange
from ._session import Session

# Of a bucket where the caller does not say. Where two ranks' parts meet in one, both pull it: that is to be a small share.
_MIN_BUCKET_BYTES, _MAX_BUCKET_BYTES, _SHARE = 16 << 10, 4 << 20, 8


class FSDPState:
    """Reduces the gradients of a model that went through `fully_shard` (FSDP2) over shard servers.

        fully_shard(block) ...; fully_shard(model)
        state = FSDPState(model, servers=[...], job="lm")

    Each unit's gradients go to the shards, compressed, as backward makes them, in the place of its reduce-scatter; before
    backward() returns each rank has the means of its own part, and pulls no others. The all-gathers of parameters, the optimizer,
    its state and the loop stay as they are. What a codec does not send waits in a residual on this rank: as many float32 as the
    whole model has parameters. Gradients are kept until backward ends.

    model: the root module, with a mesh of one dimension. The tensors of the job are named "unit.rank": of each unit
    (the name of the module that fully_shard was given, or "root") and rank the part that the rank owns, a vector; `rules` may
    name them, as in Rule("dense:fp32", "root.*"). codec: the default sends four bits per element; sparse codecs are made for an
    optimizer on the shards (see DDPState). "dense:fp32" gives plain FSDP's trajectory up to the rounding of sums. bucket_bytes 0:
    an eighth of a rank's part, at most 4 MiB. nonfinite, seed, lease_ms, worker and what goes on to gradwire.join: as for DDPState,
    also what holds for processes that are started again.

    Accumulate gradients with model.set_requires_gradient_sync(False), as without Gradwire, so that they travel once.
    Gradients are reduced as float32 or bfloat16 (MixedPrecisionPolicy.reduce_dtype), by FSDP's default factor. Errors of a round come
    out of backward(). Close it, or use it in a `with`, when training ends; then FSDP reduces by itself again.
    """

    def __init__(self, model: torch.nn.Module, *, servers: str | Sequence[str], job: str, codec: str = "thc:bits=4",
                 rules: Sequence[Rule] | None = None, worker: str | None = None, bucket_bytes: int = 0,
                 lease_ms: int = 10_000, nonfinite: str = "spread", seed: int = 0, **joining: Any):
        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise RuntimeError(f"FSDPState needs FSDPModule.set_custom_reduce_scatter, which torch {torch.__version__} does not have")
        if not isinstance(model, FSDPModule):
            raise TypeError(f"FSDPState: {type(model).__name__} did not go through torch.distributed.fsdp.fully_shard; for "
                            "DistributedDataParallel there is DDPState")
        MeanExchange.check_nonfinite(nonfinite)
        rank, size = dist.get_rank(), dist.get_world_size()
        self._units = [_Unit(self, plain_name(name) or "root", module, size) for name, module in _units_of(model)]
        self._units = [unit for unit in self._units if unit.length]
        if not self._units:
            raise ValueError("all parameters are frozen (requires_grad=False): there is nothing to reduce")
        device = self._units[0].parameters[0].to_local().device
        tensors: list[TensorSpec] = []
        means: list[torch.Tensor | None] = []
        for owner in range(size):  # a rank's parts lie together, so that it pulls few buckets
            for unit in self._units:
                unit.index[owner] = len(tensors)
                tensors.append(TensorSpec(f"{unit.name}.{owner}", (unit.length,)))
                means.append(unit.mean if owner == rank else None)
        if bucket_bytes == 0:
            part = 4 * sum(unit.length for unit in self._units)
            bucket_bytes = min(max(part // _SHARE, _MIN_BUCKET_BYTES), _MAX_BUCKET_BYTES)
        self._exchange: MeanExchange | None = MeanExchange(
            tensors, means, servers=servers, job=job, codec=codec, rules=rules, workers=size, worker=worker,
            bucket_bytes=bucket_bytes, lease_ms=lease_ms, nonfinite=nonfinite, seed=seed, device=device, **joining)
        self._open = False
        for unit in self._units:
            unit.install()

    @property
    def session(self) -> Session | None:
        """None once this is closed."""
        return None if self._exchange is None else self._exchange.session

    def _send(self, unit: _Unit, gradients: torch.Tensor) -> None:
        exchange = self._exchange
        if exchange is None:
            raise FailedPrecondition("FSDPState: it was closed in the middle of a backward()")
        if not self._open:
            self._open = True
            exchange.begin()
            # Behind FSDP's own, in which the last units are reduced.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]
        exchange.look(gradients)
        for owner, part in enumerate(gradients.view(-1, unit.length)):
            exchange.send(unit.index[owner], part)

    def _end(self) -> None:
        missing = [unit.name for unit in self._units if not unit.outputs]
        if missing:
            self.close(drain=False)
            raise FailedPrecondition(f"FSDPState: backward() gave no gradients to {', '.join(missing)}: every unit must have "
                                     "some in each, for what its residual holds would be lost; freeze its parameters before "
                                     "FSDPState is made, or let it take part in the loss")
        assert self._exchange is not None
        spoilt = self._exchange.end()
        self._open = False
        for unit in self._units:
            if spoilt:
                unit.mean.fill_(float("nan"))
            unit.deliver()

    def stats(self) -> dict[str, float]:
        """Session.stats(); empty once it is closed."""
        return {} if self.session is None else self.session.stats()

    def close(self, drain: bool = True) -> None:
        """Leaves the job. From then on FSDP reduces by itself."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        for unit in self._units:
            unit.uninstall()
        exchange.session.leave(drain)

    def __enter__(self) -> FSDPState:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.close(drain=kind is None)


def _units_of(model: torch.nn.Module) -> list[tuple[str, FSDPModule]]:
    """With their names; those that backward reaches first come last."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]


class _Unit:
    """What one call of fully_shard manages, and the communication that FSDP is given for it."""

    def __init__(self, state: FSDPState, name: str, module: FSDPModule, size: int):
        self.name = name
        self._state = state
        self._module = module
        self.parameters = [p for p in _own_parameters(module) if isinstance(p, DTensor) and p.requires_grad]
        self._lengths = []  # of each parameter's part, padded
        for p in self.parameters:
            if p.device_mesh.ndim != 1:
                raise ValueError(f"FSDPState: {name} is sharded over a mesh of {p.device_mesh.ndim} dimensions; one is supported")
            if p.placements[0].dim != 0:
                raise ValueError(f"FSDPState: a parameter of {name} is sharded along dimension {p.placements[0].dim}; only "
                                 "dimension 0 is supported")
            if p.device_mesh.size() != size:
                raise ValueError(f"FSDPState: {name} is sharded over {p.device_mesh.size()} of {size} processes; it must be all")
            rows = -(-p.shape[0] // size)
            self._lengths.append(rows * (p.numel() // p.shape[0]))
        self.length = sum(self._lengths)
        self.mean = torch.zeros(self.length, device=self.parameters[0].to_local().device if self.parameters else None)
        self.index: dict[int, int] = {}  # of the job's tensors, by rank
        self.outputs: list[torch.Tensor] = []  # which FSDP takes for reduced
        self._inputs: list[torch.Tensor] = []  # in use until the round ends

    def install(self) -> None:
        self._module.set_custom_reduce_scatter(_Comm(self))

    def uninstall(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

        self._module.set_custom_reduce_scatter(DefaultReduceScatter())

    def reduce(self, output: torch.Tensor, gradients: torch.Tensor, op: Any) -> None:
        if op != dist.ReduceOp.AVG or gradients.dtype not in (torch.float32, torch.bfloat16):
            raise FailedPrecondition(f"FSDPState: {self.name} reduces {gradients.dtype} by {op}: means of float32 or bfloat16 are "
                                     "supported (MixedPrecisionPolicy(reduce_dtype=torch.float32), no gradient_divide_factor)")
        if gradients.numel() != self.length * len(self.index):
            raise FailedPrecondition(f"FSDPState: {gradients.numel()} gradients of {self.name} were reduced, {self.length * len(self.index)} "
                                     "are in the job: some parameter has none, was frozen or unfrozen; make FSDPState behind "
                                     "that, and let all parameters of a unit take part in the loss")
        if self.outputs:
            raise FailedPrecondition(f"FSDPState: {self.name} was reduced twice in one backward()")
        output.zero_()  # to which the means are added, wherever FSDP has put it by then
        self.outputs.append(output)
        self._inputs.append(gradients.float())
        self._state._send(self, self._inputs[-1])

    def deliver(self) -> None:
        """The means to where FSDP has put the reduced gradients: the output itself, or what it was cast or added to."""
        output = self.outputs.pop()
        self._inputs.clear()
        begin = 0
        for p, length in zip(self.parameters, self._lengths, strict=True):
            gradient = p.grad.to_local()
            gradient.add_(self.mean[begin : begin + gradient.numel()].view_as(gradient))
            begin += length
        del output


class _Comm:
    """torch.distributed.fsdp's ReduceScatter."""

    def __init__(self, unit: _Unit):
        self._unit = unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any,
                 async_op: bool = False) -> None:
        self._unit.reduce(output_tensor, input_tensor, op)


def _own_parameters(module: Any) -> list[torch.nn.Parameter]:
    """Those that fully_shard manages with this module: what no nested one does; shared ones once."""
    nested = {id(p) for child in module.modules() if child is not module and isinstance(child, FSDPModule)
              for p in child.parameters()}
    return [p for p in module.parameters() if id(p) not in nested]
