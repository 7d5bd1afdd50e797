"""Fully sharded data parallel over shard servers: their means in the place of reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._errors import FailedPrecondition
from ._job import Rule, TensorSpec
from ._means import MeanExchange
from ._session import Session
from ._torch_groups import plain_name

# Of a bucket where the caller does not say. Where two ranks' parts meet in one, both pull it: that is to be a small share.
_MIN_BUCKET_BYTES, _MAX_BUCKET_BYTES, _SHARE = 16 << 10, 4 << 20, 8
_FINAL = "_root_post_backward_final_callback"  # of FSDP's states: runs behind the last reduction of a backward()


class FSDPState:
    """Reduces the gradients of a model that went through `fully_shard` (FSDP2) over shard servers.

        fully_shard(block) ...; fully_shard(model)
        state = FSDPState(model, servers=[...], job="lm")

    Each unit's gradients go to the shards, compressed, as backward makes them, in the place of its reduce-scatter; before
    backward() returns each rank has the means of its own part, and pulls no others. The all-gathers of parameters, the optimizer,
    its state and the loop stay as they are. What a codec does not send waits in a residual on this rank: as many float32 as the
    whole model has parameters; with push="step" the second moment takes as many again. Gradients are kept until backward ends.

    model: the root module, sharded over all processes (two or more), with a mesh of one dimension. The tensors of the job are
    named "unit.rank": of each unit (the name of the module that fully_shard was given; the model itself is "(root)") and rank
    the part that the rank owns, a vector; `rules` may name them, as in Rule("dense:fp32", "head.*"). codec: the default sends four
    bits per element; with sparse codecs take push="step" and torch.optim.SGD (see DDPState). "dense:fp32" gives plain FSDP's
    trajectory up to the rounding of sums. bucket_bytes 0: an eighth of a rank's part, at most 4 MiB. push, step_beta2,
    residual_decay, nonfinite, seed, lease_ms, worker and what goes on to gradwire.join: as for DDPState, also what holds for
    processes that are started again.

    Accumulate gradients with model.set_requires_gradient_sync(False), as without Gradwire, so that they travel once, and
    with push="step" are one step. Gradients are reduced as float32 or bfloat16 (MixedPrecisionPolicy.reduce_dtype), by
    FSDP's default factor. Hooks that see reduced gradients in backward (register_post_accumulate_grad_hook, set_all_reduce_hook) are refused: these come at its end.

    Errors of a round come out of backward(), and are the end of it: start again from your checkpoint. Close it, or use it in a
    `with`, when training ends, outside of backward(); then FSDP reduces by itself again.
    """

    def __init__(self, model: torch.nn.Module, *, servers: str | Sequence[str], job: str, codec: str = "thc:bits=4",
                 rules: Sequence[Rule] | None = None, worker: str | None = None, bucket_bytes: int = 0,
                 lease_ms: int = 10_000, nonfinite: str = "spread", seed: int = 0, push: str = "gradient",
                 step_beta2: float | None = None, residual_decay: float | None = None, **joining: Any):
        MeanExchange.check(nonfinite, push, step_beta2, residual_decay)
        states = list(_states_of(model))
        if any(_FINAL in vars(state) for _, _, state in states):
            raise FailedPrecondition("another FSDPState reduces this model's gradients: close() it first")
        self._units = [unit for state in states for unit in _units_of(*state) if unit.length]
        if not self._units:
            raise ValueError("all parameters are frozen (requires_grad=False): there is nothing to reduce")
        mesh = self._units[0].mesh
        rank, size = mesh.get_local_rank(), mesh.size()
        if size == 1:
            raise ValueError("FSDPState: there is one process, which has nothing to reduce: leave FSDPState out")
        tensors: list[TensorSpec] = []
        means: list[torch.Tensor | None] = []
        for owner in range(size):  # a rank's parts lie together, so that it pulls few buckets
            for unit in self._units:
                unit.index.append(len(tensors))
                # A vector, of which the guess would be that it is a bias, which sparse codecs send whole.
                tensors.append(TensorSpec(f"{unit.name}.{owner}", (unit.length,), "other"))
                means.append(unit.mean if owner == rank else None)
        if bucket_bytes == 0:
            part = 4 * sum(unit.length for unit in self._units)
            bucket_bytes = min(max(part // _SHARE, _MIN_BUCKET_BYTES), _MAX_BUCKET_BYTES)
        self._exchange: MeanExchange | None = MeanExchange(
            tensors, means, servers=servers, job=job, codec=codec, rules=rules, workers=size, worker=worker,
            bucket_bytes=bucket_bytes, lease_ms=lease_ms, nonfinite=nonfinite, seed=seed, push=push, step_beta2=step_beta2,
            residual_decay=residual_decay, **joining)
        self._open = False
        self._failed = ""  # what ended it
        for unit in self._units:
            unit.install(self)
        # Of all states: FSDP takes that of the one whose output backward comes to first, which may manage no parameters.
        # A callback of ours would end with the innermost backward(), which a reentrant checkpoint makes.
        self._states = [state for _, _, state in states]
        for state in self._states:
            setattr(state, _FINAL, self._behind(getattr(state, _FINAL)))
        self._watch = model.register_forward_pre_hook(self._check_ended)

    @property
    def session(self) -> Session | None:
        """None once this is closed."""
        return None if self._exchange is None else self._exchange.session

    def reduce(self, unit: _Unit, output: torch.Tensor, gradients: torch.Tensor, op: Any) -> None:
        """In the place of a unit's reduce-scatter."""
        if self._failed or self._exchange is None:
            raise FailedPrecondition(f"FSDPState: it has ended ({self._failed or 'closed'}): close it, and make a new one")
        try:
            if unit.output is not None:
                raise FailedPrecondition(f"FSDPState: {unit.name} was reduced twice, in one backward() or because an earlier one "
                                         "failed")
            unit.check(gradients, op)
            if not self._open:
                self._exchange.begin()
                self._open = True
            unit.take(output, gradients, self._exchange)
        except BaseException as error:
            self._failed = str(error) or type(error).__name__
            raise

    def _behind(self, final: Callable[[], None]) -> Callable[[], None]:
        def end() -> None:
            final()
            self.end_backward()

        return end

    def _check_ended(self, model: torch.nn.Module, inputs: object) -> None:
        if self._open and torch.is_grad_enabled():
            self._failed = self._failed or "a backward() did not come to its end"
            raise FailedPrecondition(f"FSDPState: it has ended ({self._failed}): no means were delivered; close it, and make a new one")

    def end_backward(self) -> None:
        """Behind the last reduction of a backward()."""
        if not self._open or self._failed or self._exchange is None:
            return
        try:
            missing = [unit.name for unit in self._units if unit.output is None]
            if missing:
                raise FailedPrecondition(f"FSDPState: backward() gave no gradients to {', '.join(missing)}: every unit must "
                                         "have some in each, for what its residual holds would be lost; freeze its parameters "
                                         "before FSDPState is made, or let it take part in the loss")
            spoilt = self._exchange.end()
            self._open = False
            for unit in self._units:
                unit.deliver(spoilt)
        except BaseException as error:
            self._failed = str(error) or type(error).__name__
            raise

    def stats(self) -> dict[str, float]:
        """Session.stats(); empty once it is closed."""
        return {} if self.session is None else self.session.stats()

    def close(self, drain: bool = True) -> None:
        """Leaves the job. From then on FSDP reduces by itself."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        try:
            self._watch.remove()
            for state in self._states:
                delattr(state, _FINAL)
            for unit in self._units:
                unit.uninstall()
        finally:
            exchange.session.leave(drain and not self._open)

    def __enter__(self) -> FSDPState:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.close(drain=kind is None)


def _states_of(model: torch.nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Name, module and FSDP's state of each call of fully_shard."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # before 2.6
        FSDPModule = object
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(f"FSDPState needs torch 2.9 or later (FSDPModule.set_custom_reduce_scatter); this is {torch.__version__}")
    if not isinstance(model, FSDPModule):
        raise TypeError(f"FSDPState: {type(model).__name__} did not go through torch.distributed.fsdp.fully_shard; for "
                        "DistributedDataParallel there is DDPState")
    seen = set()
    for name, module in model.named_modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        if state is None or id(state) in seen:  # one of several that fully_shard was given together
            continue
        seen.add(id(state))
        _check_has(state, _FINAL)
        yield plain_name(name) or "(root)", module, state


def _units_of(name: str, module: Any, state: Any) -> Iterator[_Unit]:
    groups = _groups_of(state)
    if len(groups) > 1:
        raise ValueError(f"FSDPState: {name} has parameters on {len(groups)} meshes; one is supported")
    for group in groups:
        _check_has(group, "_reduce_scatter_comm", "_all_reduce_hook", "fsdp_params")
        yield _Unit(name, module, group)


def _check_has(one: Any, *names: str) -> None:
    """What FSDP does not promise, and FSDPState needs."""
    for name in names:
        if not hasattr(one, name):
            raise RuntimeError(f"FSDPState does not know the FSDP of torch {torch.__version__}: {type(one).__name__} has no {name}")


def _groups_of(state: Any) -> list[Any]:
    """What FSDP reduces for a module together: a list in newer torch, one or None up to 2.11."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


class _Unit:
    """What one call of fully_shard manages. FSDP takes it for a torch.distributed.fsdp ReduceScatter."""

    def __init__(self, name: str, module: Any, group: Any):
        self.name = name
        self.index: list[int] = []  # of the job's tensors, by rank
        self.output: torch.Tensor | None = None  # which FSDP takes for reduced
        self._module, self._group = module, group
        # In FSDP's order, which is that of the flat gradients.
        self._parameters = [p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad]
        self._lengths = []  # of each parameter's part, padded
        for p in self._parameters:
            if p.device_mesh.ndim != 1:
                raise ValueError(f"FSDPState: {name} is sharded over a mesh of {p.device_mesh.ndim} dimensions; one is supported")
            if getattr(p.placements[0], "dim", None) != 0:
                raise ValueError(f"FSDPState: a parameter of {name} is placed as {p.placements[0]}; only Shard(dim=0) is supported")
            if p.device_mesh.size() != dist.get_world_size():
                raise ValueError(f"FSDPState: {name} is sharded over {p.device_mesh.size()} of {dist.get_world_size()} processes; "
                                 "it must be all")
            self._lengths.append(-(-p.shape[0] // p.device_mesh.size()) * p.shape[1:].numel())
        self.length = sum(self._lengths)
        if self.length:
            self.mesh = self._parameters[0].device_mesh
            self.mean = torch.zeros(self.length, dtype=torch.float32, device=self._parameters[0].to_local().device)
        self._inputs: torch.Tensor | None = None  # in use until the round ends

    def install(self, owner: FSDPState) -> None:
        self._owner = owner
        self._before = self._group._reduce_scatter_comm
        self._module.set_custom_reduce_scatter(self)

    def uninstall(self) -> None:
        self._module.set_custom_reduce_scatter(self._before)
        self.output = self._inputs = None

    def check(self, gradients: torch.Tensor, op: Any) -> None:
        if op != dist.ReduceOp.AVG or gradients.dtype not in (torch.float32, torch.bfloat16):
            raise FailedPrecondition(f"FSDPState: {self.name} reduces {gradients.dtype} by {op}: means of float32 or bfloat16 are "
                                     "supported (MixedPrecisionPolicy(reduce_dtype=torch.float32), no gradient_divide_factor)")
        if gradients.numel() != self.length * len(self.index):
            raise FailedPrecondition(f"FSDPState: {gradients.numel()} gradients of {self.name} were reduced, "
                                     f"{self.length * len(self.index)} are in the job: some parameter has none, was frozen or "
                                     "unfrozen; make FSDPState behind that, and let all parameters of a unit take part in the loss")
        if self._group._all_reduce_hook is not None or any(
                getattr(p, "_post_accumulate_grad_hooks", None) for p in self._parameters):
            raise FailedPrecondition(f"FSDPState: {self.name} has a hook that sees reduced gradients in backward(), which come at "
                                     "its end: do what it does behind backward()")

    def take(self, output: torch.Tensor, gradients: torch.Tensor, exchange: MeanExchange) -> None:
        output.zero_()  # to which the means are added, wherever FSDP has put it by then
        self.output, self._inputs = output, gradients.float()
        exchange.look(self._inputs)
        for index, part in zip(self.index, self._inputs.view(-1, self.length), strict=True):
            exchange.send(index, part)

    def deliver(self, spoilt: bool) -> None:
        """The means to where FSDP has put the reduced gradients: the output itself, or what it was cast or added to."""
        self.output = self._inputs = None
        if spoilt:
            self.mean.fill_(float("nan"))
        begin = 0
        for p, length in zip(self._parameters, self._lengths, strict=True):
            gradient = p.grad.to_local()
            gradient.add_(self.mean[begin : begin + gradient.numel()].view_as(gradient))
            begin += length

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any,
                 async_op: bool = False) -> None:
        self._owner.reduce(self, output_tensor, input_tensor, op)
