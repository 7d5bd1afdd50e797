"""What FSDP reduces together, and when it has reduced all: of `fully_shard` (FSDP2) and of FullyShardedDataParallel (FSDP1). Both
promise a place for another reduction; what else is needed they have, and this looks whether it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ._errors import FailedPrecondition
from ._fsdp_gather import Allocates, Int8Gather, Part
from ._torch_groups import plain_name

_FINAL = "_root_post_backward_final_callback"  # of FSDP2's states
_ITERATION = "next_iter"  # of what FSDP1 knows of the order of units
_REDUCED = (torch.float32, torch.bfloat16)

# Called with the unit, where its reduced part goes, and its gradients of all ranks' parts.
Reduce = Callable[["Unit", torch.Tensor, torch.Tensor], None]


class Unit:
    """What FSDP manages together. Of its gradients each rank owns a part of `length` elements."""

    def __init__(self, name: str, length: int, rank: int, device: torch.device):
        self.name, self.length, self.rank = name, length, rank
        self.mean = torch.zeros(length, dtype=torch.float32, device=device)
        self.index: list[int] = []  # of the job's tensors, by rank

    def install(self, reduce: Reduce) -> None:
        """From here on FSDP calls `reduce` in the place of a reduce-scatter."""
        raise NotImplementedError

    def uninstall(self) -> None:
        raise NotImplementedError

    def add(self, mean: torch.Tensor) -> None:
        """To where FSDP has put the reduced gradients."""
        raise NotImplementedError

    def check(self, gradients: torch.Tensor) -> None:
        if gradients.dtype not in _REDUCED:
            raise FailedPrecondition(f"FSDPState: {self.name} reduces {gradients.dtype}: means of float32 or bfloat16 are supported "
                                     "(reduce_dtype=torch.float32 of its policy of mixed precision)")
        if gradients.numel() != self.length * len(self.index):
            raise FailedPrecondition(f"FSDPState: {gradients.numel()} gradients of {self.name} were reduced, "
                                     f"{self.length * len(self.index)} are in the job: some parameter has none, was frozen or "
                                     "unfrozen; make FSDPState behind that, and let all parameters of a unit take part in the loss")


@dataclass
class Sharded:
    """A model that FSDP has sharded over all processes. units: those that have something to reduce. ends: objects and the name of
    their method that FSDP calls behind the last reduction of a backward(), which may be set on the object. gathered: units whose
    parameters another than FSDP may gather."""

    units: list[Unit]
    ends: list[tuple[Any, str]]
    gathered: list[_GroupUnit]

    def __post_init__(self) -> None:
        for one, name in self.ends:
            _check_has(one, name)
            if name in vars(one):
                raise FailedPrecondition("another FSDPState reduces this model's gradients: close() it first")
        self.units = [unit for unit in self.units if unit.length]
        if not self.units:
            raise ValueError("all parameters are frozen (requires_grad=False): there is nothing to reduce")


def sharded(model: torch.nn.Module) -> Sharded:
    """ValueError, TypeError, RuntimeError and FailedPrecondition say what FSDPState cannot do."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):
        return _of_wrappers(model, FullyShardedDataParallel)
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # before 2.6
        FSDPModule = None
    if FSDPModule is None or not isinstance(model, FSDPModule):
        raise TypeError(f"FSDPState: {type(model).__name__} did not go through torch.distributed.fsdp.fully_shard, nor is it a "
                        "FullyShardedDataParallel; for DistributedDataParallel there is DDPState")
    if not hasattr(FSDPModule, "set_custom_reduce_scatter") or not hasattr(FSDPModule, "set_custom_all_gather"):
        raise RuntimeError("FSDPState behind fully_shard needs torch 2.9 or later (FSDPModule.set_custom_reduce_scatter); this is "
                           f"{torch.__version__}")
    return _of_groups(model, FSDPModule)


def _check_has(one: Any, *names: str) -> None:
    """What FSDP does not promise, and FSDPState needs."""
    for name in names:
        if not hasattr(one, name):
            raise RuntimeError(f"FSDPState does not know the FSDP of torch {torch.__version__}: {type(one).__name__} has no {name}")


def _check_processes() -> None:
    if dist.get_world_size() == 1:
        raise ValueError("FSDPState: there is one process, which has nothing to reduce: leave FSDPState out")


def _names_of(modules: Iterable[str]) -> dict[str, str]:
    """The plain name of each; or each as it is, where two would have one: a part of the model may be called "module"."""
    plain = {module: plain_name(module + ".").rstrip(".") or "(root)" for module in modules}
    return plain if len(set(plain.values())) == len(plain) else {module: module or "(root)" for module in plain}


def _check_ranks(name: str, ranks: int) -> None:
    if ranks != dist.get_world_size():
        raise ValueError(f"FSDPState: {name} is sharded over {ranks} of {dist.get_world_size()} processes; it must be all")


def _of_groups(model: torch.nn.Module, kind: Any) -> Sharded:
    """fully_shard. Ends are those of all states: FSDP takes that of the one whose output backward comes to first, which may manage
    no parameters. A callback of ours would end with the innermost backward(), which a reentrant checkpoint makes."""
    _check_processes()
    units: list[_GroupUnit] = []
    states: dict[int, Any] = {}
    modules = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    names = _names_of(modules)
    for raw, module in modules.items():
        state = module._get_fsdp_state()
        if state is None or id(state) in states:  # one of several that fully_shard was given together
            continue
        states[id(state)] = state
        name = names[raw]
        groups = _groups_of(state)
        if len(groups) > 1:
            raise ValueError(f"FSDPState: {name} has parameters on {len(groups)} meshes; one is supported")
        units += [_GroupUnit.of(name, module, group) for group in groups]
    return Sharded([*units], [(state, _FINAL) for state in states.values()], units)


def _groups_of(state: Any) -> list[Any]:
    """What FSDP2 reduces for a module together: a list in newer torch, one or None up to 2.11."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


class _GroupUnit(Allocates, Unit):
    """What one call of fully_shard manages. FSDP takes it for a torch.distributed.fsdp ReduceScatter."""

    def __init__(self, name: str, module: Any, group: Any, parameters: list[Any], lengths: list[int]):
        first = parameters[0] if parameters else None
        self._gather_before: Any = None
        # In FSDP's order, frozen ones too. Vectors, as biases and scales of norms, are few, and next to no others of their size.
        self._parts = [Part(p._sharded_param_data.numel(), exact=p.sharded_param.ndim < 2) for p in group.fsdp_params]
        super().__init__(name, sum(lengths), first.device_mesh.get_local_rank() if first is not None else 0,
                         first.to_local().device if first is not None else torch.device("cpu"))
        self._module, self._group = module, group
        self._parameters, self._lengths = parameters, lengths
        self._op: Any = None  # by which FSDP wants the gradients reduced that are being looked at

    @staticmethod
    def of(name: str, module: Any, group: Any) -> _GroupUnit:
        _check_has(group, "_reduce_scatter_comm", "_all_gather_comm", "_all_reduce_hook", "fsdp_params")
        for p in group.fsdp_params:
            _check_has(p, "_sharded_param_data", "_sharded_local_tensor")
        # In FSDP's order, which is that of the flat gradients.
        parameters = [p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad]
        for p in parameters:
            if p.device_mesh.ndim != 1:
                raise ValueError(f"FSDPState: {name} is sharded over a mesh of {p.device_mesh.ndim} dimensions; one is supported")
            if getattr(p.placements[0], "dim", None) != 0:
                raise ValueError(f"FSDPState: a parameter of {name} is placed as {p.placements[0]}; only Shard(dim=0) is supported")
            _check_ranks(name, p.device_mesh.size())
        # Of each parameter's part, padded.
        lengths = [-(-p.shape[0] // p.device_mesh.size()) * p.shape[1:].numel() for p in parameters]
        return _GroupUnit(name, module, group, parameters, lengths)

    def install(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._before = self._group._reduce_scatter_comm
        self._module.set_custom_reduce_scatter(self)

    def uninstall(self) -> None:
        self._module.set_custom_reduce_scatter(self._before)

    @property
    def gathered_by_others(self) -> bool:
        """By whom the user, or another library, has put there; or tensors say themselves what of them is gathered."""
        return type(self._group._all_gather_comm).__name__ != "DefaultAllGather" or any(
            hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in self._group.fsdp_params)

    def gather_as_int8(self) -> None:
        """From here on FSDP gathers its parameters so."""
        self._gather_before = self._group._all_gather_comm
        self._gather_by(Int8Gather(self._parts))

    def gather_as_before(self) -> None:
        if isinstance(self._group._all_gather_comm, Int8Gather):
            self._gather_by(self._gather_before)

    def _gather_by(self, gather: Any) -> None:
        self._module.reshard()  # what was gathered otherwise
        self._module.set_custom_all_gather(gather)

    def check(self, gradients: torch.Tensor) -> None:
        super().check(gradients)
        if self._op != dist.ReduceOp.AVG:
            raise FailedPrecondition(f"FSDPState: {self.name} reduces by {self._op}; means are supported (no gradient_divide_factor)")
        if self._group._all_reduce_hook is not None or any(
                getattr(p, "_post_accumulate_grad_hooks", None) for p in self._parameters):
            raise FailedPrecondition(f"FSDPState: {self.name} has a hook that sees reduced gradients in backward(), which come at "
                                     "its end: do what it does behind backward()")

    def add(self, mean: torch.Tensor) -> None:
        begin = 0
        for p, length in zip(self._parameters, self._lengths, strict=True):
            gradient = p.grad.to_local()
            gradient.add_(mean[begin : begin + gradient.numel()].view_as(gradient))
            begin += length

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any,
                 async_op: bool = False) -> None:
        self._op = op
        self._reduce(self, output_tensor, input_tensor)


def _of_wrappers(model: Any, kind: Any) -> Sharded:
    """FullyShardedDataParallel. Its root has the end."""
    _check_processes()
    if not model.check_is_root():
        raise TypeError("FSDPState: it takes the outermost FullyShardedDataParallel; this one is inside another")
    _check_has(model, "_exec_order_data")
    wrapped = {name: module for name, module in model.named_modules() if isinstance(module, kind) and module._handle is not None}
    names = _names_of(wrapped)
    units: list[Unit] = [_FlatUnit.of(names[name], module) for name, module in wrapped.items()]
    return Sharded(units, [(model._exec_order_data, _ITERATION)], [])


class _FlatUnit(Unit):
    """The flat parameter of a FullyShardedDataParallel."""

    def __init__(self, name: str, module: Any):
        flat = module._handle.flat_param
        _check_has(flat, "_sharded_size")
        super().__init__(name, flat._sharded_size.numel() if flat.requires_grad else 0, module.process_group.rank(), flat.device)
        self._module = module

    @staticmethod
    def of(name: str, module: Any) -> _FlatUnit:
        from torch.distributed.fsdp import ShardingStrategy

        _check_has(module, "_comm_hook", "_comm_hook_state", "sharding_strategy", "process_group")
        if module.sharding_strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            raise ValueError(f"FSDPState: {name} has {module.sharding_strategy}; FULL_SHARD and SHARD_GRAD_OP are supported (what is "
                             "not sharded at all has DistributedDataParallel and DDPState)")
        _check_ranks(name, module.process_group.size())
        if module._comm_hook is not None:
            raise FailedPrecondition(f"FSDPState: {name} has a communication hook: if it is another FSDPState's, close() that first")
        return _FlatUnit(name, module)

    def install(self, reduce: Reduce) -> None:
        # register_comm_hook would give one hook to all of them, which is not told whose gradients it gets.
        self._module._comm_hook_state = reduce
        self._module._comm_hook = self._hook

    def uninstall(self) -> None:
        self._module._comm_hook = self._module._comm_hook_state = None

    def _hook(self, reduce: Reduce, gradients: torch.Tensor, output: torch.Tensor) -> None:
        reduce(self, output, gradients)

    def check(self, gradients: torch.Tensor) -> None:
        super().check(gradients)
        if getattr(self._module._handle, "_has_optim_in_backward", False):
            raise FailedPrecondition(f"FSDPState: {self.name} has an optimizer that steps in backward(), where means are not yet there")

    def add(self, mean: torch.Tensor) -> None:
        flat = self._module._handle.flat_param
        (flat._cpu_grad if hasattr(flat, "_cpu_grad") else flat._saved_grad_shard).add_(mean)
