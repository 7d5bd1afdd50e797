"""Snapshots in a module: parameters.safetensors has what was trained, a module's state_dict() more than that."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import torch

from ._torch_groups import plain_names


_NUMBERED = ": its parameters have no names, and were perhaps given to the optimizer in another order than the module's, or not " \
    "all: safetensors.torch.load_file(path) gives them by their number among what the optimizer was given"


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The float32 tensors of a file, by name."""
    with open(path, "rb") as file:
        content = file.read()
    begin = 8 + int.from_bytes(content[:8], "little")
    if not 8 < begin <= len(content):
        raise ValueError(f"{os.fspath(path)!r} is no safetensors file")
    tensors = {}
    for name, entry in json.loads(content[8:begin]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "F32":
            raise ValueError(f"tensor {name!r} of {os.fspath(path)!r} is {entry['dtype']}, not F32")
        first, last = entry["data_offsets"]
        tensors[name] = np.frombuffer(content[begin + first:begin + last], "<f4").reshape(entry["shape"])
    return tensors


def load_parameters(module: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Copies parameters.safetensors of a snapshot into a module, in place.

    The file has every trained parameter once: what a ShardedOptimizer was given, without frozen parameters and buffers, and
    tied parameters under the first of their names. So `module.load_state_dict` may miss some, and with strict=False it would
    take the file of another model. Here each tensor of the file must have its parameter, and each parameter that requires
    gradients its tensor: else ValueError names it, and nothing is changed. Parameters that the optimizer was given without names go by their number
    among those it was given, which is right only where these were all of the module's in their order: give it the module, or
    named_parameters().
    """
    tensors = read_safetensors(path)
    named = dict(module.named_parameters(remove_duplicate=False))
    numbered = bool(tensors) and all(name.startswith("param.") for name in tensors) and not named.keys() & tensors.keys()
    if numbered:
        named = {f"param.{i}": p for i, p in enumerate(module.parameters())}
    if not tensors.keys() <= named.keys():  # one of them is without what torch.compile puts before names
        of_file, of_module = plain_names(tensors), plain_names(named)
        tensors = {of_file[name]: values for name, values in tensors.items()}
        named = {of_module[name]: p for name, p in named.items()}
    targets: list[tuple[Any, np.ndarray]] = []
    for name, values in tensors.items():
        if name not in named:
            raise ValueError(f"the snapshot has a parameter {name!r}, the module has none of this name")
        if tuple(named[name].shape) != values.shape:
            raise ValueError(f"parameter {name!r} is {list(values.shape)} in the snapshot and {list(named[name].shape)} in "
                             "the module" + (_NUMBERED if numbered else ""))
        targets.append((named[name], values))
    loaded = {id(parameter) for parameter, _ in targets}
    for name, parameter in named.items():
        if parameter.requires_grad and id(parameter) not in loaded:
            raise ValueError(f"parameter {name!r} requires gradients and is not in the snapshot" + (_NUMBERED if numbered else
                             ": freeze it, or load it from elsewhere first and set requires_grad afterwards"))
    with torch.no_grad():
        for parameter, values in targets:
            parameter.copy_(torch.from_numpy(values.copy()))
