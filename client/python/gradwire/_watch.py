"""Writes into parameters that do not go through the job: a replica would differ from the shards for good."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

_COST = 100  # after a digest there is none for this many times the time that it took


class Versions:
    """Finds the writes that torch's version counters show."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]):
        self._names, self._parameters = names, parameters
        self.accept()

    def accept(self) -> None:
        """What was written until now is right."""
        self._versions = [p._version for p in self._parameters]

    def written(self) -> str | None:
        """The name of a parameter that was written into since."""
        for name, p, version in zip(self._names, self._parameters, self._versions, strict=True):
            if p._version != version:
                return name
        return None


class Watch:
    """Finds writes into the parameters of one optimizer. Torch's version counters show those that go through torch. The
    session's updates pass the counters by, as do writes through p.data or NumPy; to find the latter, a digest is taken
    behind a step and compared before the next one, for about a hundredth of the time."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], digest: Callable[[], str]):
        self._names = names
        self._parameters = parameters
        self._versions = Versions(names, parameters)
        self._make_digest = digest
        self._due = 0.0
        self.accept()

    def accept(self) -> None:
        """What the parameters hold now is right."""
        self._addresses = [p.data_ptr() for p in self._parameters]
        self._versions.accept()
        self._digest: str | None = None
        self.note()

    def note(self) -> None:
        """A step was made: takes a digest, if one is due."""
        begin = time.monotonic()
        if begin < self._due:
            return
        self._digest = self._make_digest()
        end = time.monotonic()
        self._due = end + 2 * _COST * (end - begin)  # twice: written() takes one as well

    def drained(self) -> None:
        """Updates came between two steps: drops the digest, which is of what was before them."""
        self._digest = None

    def replaced(self) -> str | None:
        """The name of a parameter that lies elsewhere than it did."""
        for name, p, address in zip(self._names, self._parameters, self._addresses, strict=True):
            if p.data_ptr() != address:
                return name
        return None

    def written(self) -> str | None:
        """Before a step: what was written into since the one before, as the subject of a sentence."""
        name = self._versions.written()
        written = None if name is None else f"parameter {name!r}"
        if self._digest is None:
            return written
        if self._make_digest() != self._digest:
            return written or "a parameter (through p.data or NumPy)"
        self._versions.accept()  # the former values were written back
        self._digest = None
        return None
