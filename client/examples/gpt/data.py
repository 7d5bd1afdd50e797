"""Training text of the main demo: the Python standard library's own sources, as bytes.

Needs no download. The split is by file, decided by a hash of the relative path, so it does not depend on the order
or the number of files. What a worker sees is a pure function of (seed, worker, step).
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
VALIDATION_ONE_IN = 20
MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Corpus:
    """Bytes of both splits as uint8 tensors, and the number of files in each."""

    train: Tensor
    validation: Tensor
    train_files: int
    validation_files: int


def _path_hash(relative: str) -> int:
    return int.from_bytes(hashlib.sha256(relative.encode()).digest()[:8], "little")


def load_corpus(root: Path | None = None, max_bytes: int = MAX_BYTES) -> Corpus:
    """Reads *.py below root (default: this interpreter's standard library) in order of a hash of the path.

    Files are separated by a zero byte. Stops at max_bytes. Raises ValueError where there is too little text.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    relatives = sorted(
        (
            path.relative_to(root).as_posix()
            for path in root.rglob("*.py")
            if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
        ),
        key=lambda relative: (_path_hash(relative), relative),
    )
    splits: dict[str, list[bytes]] = {"train": [], "validation": []}
    total = 0
    for relative in relatives:
        text = (root / relative).read_bytes()
        if not text or total + len(text) > max_bytes:
            continue
        total += len(text)
        # The bits that order the files must not decide the split: use others of the same hash.
        is_validation = (_path_hash(relative) & 0xFFFFFFFF) % VALIDATION_ONE_IN == 0
        splits["validation" if is_validation else "train"].append(text + b"\0")
    joined = {name: b"".join(parts) for name, parts in splits.items()}
    if len(joined["train"]) < 1 << 20 or len(joined["validation"]) < 1 << 16:
        raise ValueError(f"{root}: only {total} bytes of Python source; the demo needs 1 MiB or more")
    return Corpus(
        train=torch.frombuffer(bytearray(joined["train"]), dtype=torch.uint8),
        validation=torch.frombuffer(bytearray(joined["validation"]), dtype=torch.uint8),
        train_files=len(splits["train"]),
        validation_files=len(splits["validation"]),
    )


def windows(text: Tensor, starts: Tensor, context_tokens: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets, both int64 [len(starts), context_tokens]."""
    rows = text[starts[:, None] + torch.arange(context_tokens + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def training_batch(
    text: Tensor, seed: int, worker: int, step: int, sequences: int, context_tokens: int
) -> tuple[Tensor, Tensor]:
    """The batch of one worker at one step: random windows keyed by (seed, worker, step) only."""
    random = np.random.Generator(np.random.Philox(key=[(seed << 32) | worker, step]))
    starts = random.integers(0, len(text) - context_tokens - 1, size=sequences)
    return windows(text, torch.from_numpy(starts), context_tokens)


def validation_batch(text: Tensor, count: int, context_tokens: int) -> tuple[Tensor, Tensor]:
    """`count` windows spread evenly over the validation text; the same for every run."""
    starts = torch.arange(count) * (len(text) - context_tokens - 1) // count
    return windows(text, starts, context_tokens)
