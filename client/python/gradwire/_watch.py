"""Writes into parameters that do not go through the job: a replica would differ from the shards for good."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ._errors import FailedPrecondition

# After a checksum there is none for so many times the time that it took. One worker's delays those of all: the longer, the rarer.
_COST, _COST_OF_LONG = 100, 1000
_LONG = 1e-3  # seconds


class Versions:
    """Finds the writes that torch's version counters show, and makes them show those of a session."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]):
        self._names, self._parameters = names, parameters
        self.accept()

    def accept(self) -> None:
        """What was written until now is right."""
        self._versions = [p._version for p in self._parameters]

    def updated(self) -> None:
        """The session has written into the parameters. A backward pass through a graph of before raises, as behind any optimizer's
        step; what others wrote stays to be found."""
        right = [p._version == version for p, version in zip(self._parameters, self._versions, strict=True)]
        for p in self._parameters:  # some may share a counter: views of one tensor
            torch.autograd.graph.increment_version(p)
        self._versions = [p._version if so else version for p, so, version in zip(self._parameters, right, self._versions, strict=True)]

    def written(self) -> str | None:
        """The name of a parameter that was written into since."""
        for name, p, version in zip(self._names, self._parameters, self._versions, strict=True):
            if p._version != version:
                return name
        return None


class Loan:
    """Lets parameters have other values for a while. `returned` is called when they have their own again."""

    def __init__(self, parameters: Sequence[torch.Tensor], returned: Callable[[], None]):
        self._parameters, self._returned = parameters, returned
        self._out = False

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        """What is written meanwhile is undone at the end."""
        kept = [p.detach().clone() for p in self._parameters]
        self._out = True
        try:
            yield
        finally:
            with torch.no_grad():
                for p, before in zip(self._parameters, kept, strict=True):
                    p.copy_(before)
            self._out = False
            self._returned()

    def check_returned(self) -> None:
        if self._out:
            raise FailedPrecondition("inside of borrowed_parameters() the values are not those of the job: do this behind it")


class Watch:
    """Finds writes into the parameters of one optimizer. Torch's version counters show those that go through torch, not those
    through p.data or NumPy; to find the latter, a checksum is taken behind a step and compared before the next one, for about a
    hundredth of the time, of large models a thousandth."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], checksum: Callable[[], int]):
        self._names = names
        self._parameters = parameters
        self._versions = Versions(names, parameters)
        self._make_checksum = checksum
        self._due = 0.0
        self.loan = Loan(parameters, self._accept_returned)
        self.accept()

    def accept(self) -> None:
        """What the parameters hold now is right."""
        self._addresses = [p.data_ptr() for p in self._parameters]
        self._versions.accept()
        self._checksum: int | None = None
        self.note()

    def note(self) -> None:
        """A step was made: takes a checksum, if one is due."""
        begin = time.monotonic()
        if begin < self._due:
            return
        self._checksum = self._make_checksum()
        end = time.monotonic()
        took = 2 * (end - begin)  # written() takes one as well
        self._due = end + took * (_COST if took < 2 * _LONG else _COST_OF_LONG)

    def updated(self) -> None:
        self._versions.updated()

    def _accept_returned(self) -> None:
        if self.replaced() is None:  # else the next step says so
            self.accept()

    def drained(self) -> None:
        """Updates came between two steps: drops the checksum, which is of what was before them."""
        self._checksum = None

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
        if self._checksum is None:
            return written
        if self._make_checksum() != self._checksum:
            return written or "a parameter (through p.data or NumPy)"
        self._versions.accept()  # the former values were written back
        self._checksum = None
        return None
