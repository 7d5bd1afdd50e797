"""Parameter groups of torch.optim as a job sees them: which tensors, and which hyper-parameters the job fixes."""

from __future__ import annotations

import re
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ._errors import FailedPrecondition

# What torch puts before the names of parameters when it wraps a module: equal models have equal names.
_INSIDE = "_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
_WRAPPERS = re.compile(rf"^((module|{_INSIDE})\.)+|(?<=\.)({_INSIDE})\.")


def plain_name(name: str) -> str:
    return _WRAPPERS.sub("", name)


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """The plain name of each; or each as it is, where two would become one: a part of the model may be called "module"."""
    plain = {name: plain_name(name) for name in names}
    return plain if len(set(plain.values())) == len(plain) else {name: name for name in plain}


def roles_of(roles: Mapping[str, str] | None, names: Sequence[str], others: Iterable[str] = ()) -> dict[str, str]:
    """Roles by plain name. Raises where one is of none of `names`, nor of `others`, which are not in the job."""
    known = {*names, *others}
    plain = {name if name in known else plain_name(name): role for name, role in (roles or {}).items()}
    if unknown := [name for name in plain if name not in known]:
        raise ValueError(f"roles: no parameter is called {unknown[0]!r}; the first one is {names[0]!r}")
    return plain


def _check_order(params: Any) -> None:
    if isinstance(params, set | frozenset):
        raise TypeError("parameters must be in an order that all workers have, and sets have none: pass a list, or better "
                        "named_parameters()")


def named_groups(params: Any) -> tuple[list[dict[str, Any]], list[tuple[str, torch.Tensor]]]:
    """Parameter groups with tensors and plain names, from any of the forms that torch.optim takes, or a module; and the frozen
    parameters, which are in none of them."""
    if isinstance(params, torch.nn.Module):
        warn_of_ddp(params)
        params = params.named_parameters()
    _check_order(params)
    if isinstance(params, torch.Tensor):
        raise TypeError("params must be an iterable of tensors, named tensors or groups, not one tensor")
    entries = list(params)
    if not entries:
        raise ValueError("the optimizer got an empty list of parameters")
    groups = [dict(g) for g in entries] if isinstance(entries[0], dict) else [{"params": entries}]
    count = 0
    seen: dict[int, int] = {}  # the group of each tensor, by id
    frozen: list[tuple[str, torch.Tensor]] = []
    for number, group in enumerate(groups):
        members = group["params"]
        _check_order(members)
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        names, tensors = [], []
        for member in members:
            name, tensor = member if isinstance(member, tuple) else (f"param.{count}", member)
            count += 1
            if seen.get(id(tensor), number) != number:
                raise ValueError(f"parameter {name!r} is in parameter group {seen[id(tensor)]} and in group {number}: leave it "
                                 "in one of them")
            if id(tensor) in seen:  # tied parameters are sent once
                continue
            if not tensor.requires_grad:  # and frozen ones not at all
                frozen.append((name, tensor))
                continue
            seen[id(tensor)] = number
            names.append(name)
            tensors.append(tensor)
        group["params"] = tensors
        group["_names"] = names
    if not seen:
        raise ValueError(f"all {count} parameters are frozen (requires_grad=False): there is nothing to train")
    plain = plain_names([*(name for group in groups for name in group["_names"]), *(name for name, _ in frozen)])
    for group in groups:
        group["_names"] = [plain[name] for name in group["_names"]]
    return groups, [(plain[name], tensor) for name, tensor in frozen]


# What a job fixes when it is created. Learning rates are not among them: they travel with every round.
_FIXED = ("momentum", "nesterov", "betas", "eps", "weight_decay")
# Options of torch's optimizers that those of the shards do not have.
_UNKNOWN = ("maximize", "amsgrad", "dampening")
_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)


def fixed_of(group: dict[str, Any]) -> dict[str, Any]:
    fixed = {key: tuple(group[key]) if key == "betas" else group[key] for key in _FIXED}
    return fixed | {key: group.get(key) or False for key in _UNKNOWN}


def check_options(groups: Sequence[dict[str, Any]], lr: float) -> None:
    """`lr`: of groups that have none."""
    for i, group in enumerate(groups):
        if float(rate := group.get("lr", lr)) < 0:
            raise ValueError(f"parameter group {i} has lr={float(rate)!r}, which must not be negative")
        for key in _UNKNOWN:
            if group.get(key):
                raise ValueError(f"parameter group {i} has {key}={group[key]!r}, which the optimizers of the shards do not know: "
                                 "leave it out" + (", and negate the loss" if key == "maximize" else ""))


def differences(groups: Sequence[dict[str, Any]], fixed: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What in `groups` is not what the job was created with."""
    for i, (group, wanted) in enumerate(zip(groups, fixed, strict=True)):
        for key, value in fixed_of(group).items():
            if value != wanted[key]:
                yield f"{key} of parameter group {i} is {value!r}; the job was created with {wanted[key]!r}"


def check_state(state_dict: Mapping[str, Any], fixed: Sequence[dict[str, Any]]) -> None:
    """Of load_state_dict()."""
    if state_dict.get("gradwire") is None:
        raise ValueError("this is not a state_dict() of a ShardedOptimizer: the state of another optimizer cannot be brought to the "
                         "shards")
    groups = state_dict["param_groups"]
    if len(groups) != len(fixed):
        raise ValueError(f"the state has {len(groups)} parameter groups; this optimizer has {len(fixed)}")
    for difference in differences(groups, fixed):
        raise ValueError(f"in the state, {difference}. Make the optimizer with the values of the state, for a new job")


def check_fixed(groups: Sequence[dict[str, Any]], fixed: Sequence[dict[str, Any]]) -> None:
    for difference in differences(groups, fixed):
        raise FailedPrecondition(f"{difference}. Only learning rates can change during a job: set it back, or make a new "
                                 "optimizer and a new job. A scheduler that cycles momentum (OneCycleLR, CyclicLR) needs "
                                 "cycle_momentum=False")


def warn_of_ddp(model: torch.nn.Module) -> None:
    """For those who exchange gradients or progress by themselves."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        warnings.warn("the model is a DistributedDataParallel, which sends all gradients between its processes too, uncompressed: pass "
                      "the module inside, or let ddp_hook do the work (DDPState)", stacklevel=3)


def looked_at_by_torch() -> bool:
    """Whether torch.distributed.checkpoint's get_state_dict() makes this step, with gradients and rates of 0, to see what an optimizer
    keeps. Warns then."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    if frame is None:
        return False
    warnings.warn("get_state_dict() and set_state_dict() of torch.distributed.checkpoint do not know a ShardedOptimizer, and what they save of "
                  "it cannot be loaded: save and load it by state_dict() and load_state_dict(), and the model by get_model_state_dict()",
                  stacklevel=3)
    return True


def check_whole(what: str, parameter: torch.Tensor) -> None:
    """FSDP leaves a part of each parameter on each rank, and those of one rank would take the place of the others'."""
    if any(hasattr(parameter, mark) for mark in ("placements", "_is_flat_param", "_fsdp_flattened")):
        raise TypeError(f"{what} is a part of one that FSDP has sharded ({type(parameter).__name__}): FSDPState(model, ...) takes such a "
                        "model through the shards, whose optimizer is one of torch's")


def check_tensor(what: str, tensor: torch.Tensor) -> None:
    """For what is converted to float32 here, and from it."""
    check_whole(what, tensor)
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{what} lies on {tensor.device}; Gradwire takes CPU and CUDA tensors")
    if tensor.dtype not in _CONVERTED:
        raise TypeError(f"{what} is {tensor.dtype}; Gradwire takes float32, bfloat16 and float16")


def check_apart(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Each parameter is one of its own on the shards: where two share memory, the updates of both would go there."""
    end, before = 0, ""
    for begin, size, name in sorted((t.data_ptr(), t.numel() * t.element_size(), n) for n, t in zip(names, tensors, strict=True)):
        if size and begin < end:
            raise ValueError(f"parameters {before!r} and {name!r} share memory (weights tied by p.data = ...): tie them as one "
                             "Parameter, decoder.weight = encoder.weight, before the optimizer is made")
        if size:
            end, before = begin + size, name
