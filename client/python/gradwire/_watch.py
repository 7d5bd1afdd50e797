"""Writes into parameters that do not go through the job: a replica would differ from the shards for good."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Watch:
    """Of the parameters of one optimizer. Updates of the session do not count: they pass torch by."""

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]):
        self._names = names
        self._parameters = parameters
        self.accept()

    def accept(self) -> None:
        """What the parameters hold now is right."""
        self._addresses = [p.data_ptr() for p in self._parameters]
        self._versions = [p._version for p in self._parameters]

    def replaced(self) -> str | None:
        """A parameter that lies elsewhere than it did."""
        for name, p, address in zip(self._names, self._parameters, self._addresses, strict=True):
            if p.data_ptr() != address:
                return name
        return None

    def written(self) -> str | None:
        """A parameter that torch wrote into, perhaps what was there before."""
        for name, p, version in zip(self._names, self._parameters, self._versions, strict=True):
            if p._version != version:
                return name
        return None
