"""A worker's checkpoint as a tensor, which torch.save can write beside everything else, and as the file that a session reads."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch


def kept_checkpoint(save: Callable[[pathlib.Path], None]) -> torch.Tensor:
    """What `save` writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "checkpoint"
        save(path)
        return torch.from_numpy(np.fromfile(path, np.uint8))


@contextlib.contextmanager
def checkpoint_file(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> Iterator[str | None]:
    """The path of a checkpoint, which is a file or lies in a state_dict(checkpoint=True)."""
    if not isinstance(source, Mapping):
        yield None if source is None else os.fspath(source)
        return
    checkpoint = source.get("gradwire", {}).get("checkpoint")
    if checkpoint is None:
        if "gradwire" in source:
            raise ValueError("resume_from: this state has no checkpoint, for it was not taken by state_dict(checkpoint=True). Where "
                             "the servers have its job, leave resume_from out: training goes on from there, and load_state_dict() "
                             "restores learning rates")
        raise ValueError("resume_from: this is no state_dict() of a ShardedOptimizer")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "checkpoint"
        path.write_bytes(checkpoint.cpu().numpy().tobytes())
        yield str(path)
