"""Float32 masters of parameters that a session cannot take as they lie: 16-bit ones, those in another memory format, and those on
a GPU in jobs whose sessions are in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._place import host_copy


class Masters:
    """What the session of one optimizer updates. A float32 parameter is its own master; any other has one here, which is
    copied into it behind every step, rounded."""

    def __init__(self, parameters: Sequence[torch.Tensor], device: torch.device):
        self._parameters = [p.detach() for p in parameters]
        self.tensors = [self._master_of(p, device) for p in self._parameters]
        self._apart = [(p, m) for p, m in zip(self._parameters, self.tensors, strict=True) if p is not m]

    @staticmethod
    def _master_of(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
        if parameter.device != device:
            return host_copy(parameter)
        if parameter.dtype == torch.float32 and parameter.is_contiguous():
            return parameter
        return parameter.to(torch.float32, memory_format=torch.contiguous_format, copy=True)

    def publish(self) -> None:
        """The masters have changed: so do the parameters. Torch's version counters do not see it, as with float32 ones, see Versions."""
        for parameter, master in self._apart:
            parameter.data.copy_(master)

    def take(self) -> None:
        """The parameters were written to: so are the masters. Where a value is what its master rounds to, the master stays."""
        for parameter, master in self._apart:
            here = master.to(parameter.device)
            written = parameter.ne(here.to(parameter.dtype))
            master.copy_(torch.where(written, parameter, here))

    def published(self) -> bool:
        """Whether the parameters hold what publish() wrote."""
        return all(torch.equal(parameter, master.to(parameter.device, parameter.dtype)) for parameter, master in self._apart)


def gradient_of(grad: torch.Tensor, by_rows: bool = False) -> torch.Tensor:
    """`grad` as the session takes it: dense, contiguous float32; itself where it is that. `by_rows`: a gradient that is sparse
    along its first dimension stays so, coalesced."""
    if grad.is_sparse and by_rows and grad.sparse_dim() == 1:
        grad = grad.to(torch.float32).coalesce()
        rows = grad.indices()[0]
        if bool((rows[1:] <= rows[:-1]).any()):  # it was only said to be coalesced
            grad = torch.sparse_coo_tensor(grad.indices(), grad.values(), grad.shape).coalesce()
        return grad
    if grad.is_sparse:
        grad = grad.to_dense()
    return grad.to(torch.float32).contiguous()


def rows_of(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a sparse gradient of gradient_of, and their values."""
    return grad.indices()[0].contiguous(), grad.values().contiguous()
