"""The all-gathers of `fully_shard` in fewer bytes: matrices as int8, as ZeRO++ gathers them (arXiv 2306.10209, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

FORMATS = ("exact", "int8")
BLOCK = 128  # consecutive elements that share a float32 scale
_LARGEST = 127
_PIECE = 512 * BLOCK


@dataclass(frozen=True)
class Part:
    """Of a parameter: the elements that each rank has of it, padding included. exact: they travel as they are."""

    length: int
    exact: bool


class Int8Gather:
    """Gathers one unit's parameters. FSDP takes it for a torch.distributed.fsdp AllGather. Elements come out as multiples of a
    127th of the largest one of their block, the nearest, the same on all ranks (their own part, too); of a block with one that is
    not finite all are NaN. Inputs that are not made of `parts`, or not of floats (a tensor's own all-gather), go as they are."""

    def __init__(self, parts: Sequence[Part]):
        self._length = sum(part.length for part in parts)
        # (where it begins among the inputs, where it begins in the message's elements of its kind, length)
        self._exact: list[tuple[int, int, int]] = []
        self._coded: list[tuple[int, int, int]] = []
        self._exact_length = self._coded_length = begin = 0
        for part in parts:
            if part.exact:
                self._exact.append((begin, self._exact_length, part.length))
                self._exact_length += part.length
            else:
                self._coded.append((begin, self._coded_length, part.length))
                self._coded_length += -(-part.length // BLOCK) * BLOCK
            begin += part.length

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup,
                 async_op: bool = False) -> dist.Work | None:
        if input_tensor.numel() != self._length or not input_tensor.dtype.is_floating_point or not self._coded_length:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        sent = self.encode(input_tensor)
        received = sent.new_empty(group.size() * sent.numel())
        work = dist.all_gather_into_tensor(received, sent, group=group, async_op=async_op)
        pending = _Gathering(self, work, received, output_tensor)
        if async_op:
            return pending
        pending.decode()
        return None

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """-> bytes: scales, what is exact, int8; as many on each rank, a multiple of 4."""
        scales = values.new_zeros(self._coded_length // BLOCK, 1, dtype=torch.float32)
        coded = values.new_zeros(self._coded_length, dtype=torch.int8)
        for begin, at, length in self._coded:
            for first, count, rows in _pieces(length, values.device):
                blocks = values[begin + first : begin + first + count].view(rows, -1).float()
                scale = scales[(at + first) // BLOCK :][:rows]
                # Of not finite elements the scale is not finite, and 0 times infinity is NaN.
                torch.div(blocks.abs().amax(dim=1, keepdim=True), _LARGEST, out=scale)
                into = coded[at + first : at + first + count].view(rows, -1)
                into.copy_((blocks / torch.where(scale > 0, scale, 1)).round_().nan_to_num_())
        exact = [values[begin : begin + length] for begin, _, length in self._exact]
        return torch.cat([t.reshape(-1).view(torch.uint8) for t in (scales, *exact, self._filler(values), coded)])

    def decode(self, received: torch.Tensor, output: torch.Tensor) -> None:
        """received: of all ranks, one behind the other; output: their inputs."""
        size = output.numel() // self._length
        ranks, out = received.view(size, -1), output.view(size, -1)
        scales_end = 4 * (self._coded_length // BLOCK)
        exact_end = scales_end + self._exact_length * output.element_size()
        scales = ranks[:, :scales_end].view(torch.float32)
        for begin, at, length in self._exact:
            first = scales_end + at * output.element_size()
            out[:, begin : begin + length] = ranks[:, first : first + length * output.element_size()].view(output.dtype)
        coded = ranks[:, exact_end + self._filler(output).numel() * output.element_size() :].view(torch.int8)
        for begin, at, length in self._coded:
            for first, count, rows in _pieces(length, output.device):
                into = out[:, begin + first : begin + first + count].unflatten(1, (rows, -1))
                into.copy_(coded[:, at + first : at + first + count].unflatten(1, (rows, -1)))
                into.mul_(scales[:, (at + first) // BLOCK :][:, :rows, None])

    def _filler(self, values: torch.Tensor) -> torch.Tensor:
        """Behind what is exact, so that scales lie where a float32 may on every rank."""
        return values.new_zeros(-self._exact_length % 4)


def _pieces(length: int, device: torch.device) -> Iterator[tuple[int, int, int]]:
    """Of a parameter's elements: (first, how many, in how many blocks), such that a processor's cache holds them. The last block
    may be short."""
    whole = length - length % BLOCK
    step = _PIECE if device.type == "cpu" else max(whole, 1)
    for first in range(0, whole, step):
        count = min(step, whole - first)
        yield first, count, count // BLOCK
    if whole < length:
        yield whole, length - whole, 1


class _Gathering(dist.Work):
    """What FSDP waits for; then the parameters are there."""

    def __init__(self, gather: Int8Gather, work: Any, received: torch.Tensor, output: torch.Tensor):
        super().__init__()
        self._gather, self._work, self._received, self._output = gather, work, received, output

    def decode(self) -> None:
        self._gather.decode(self._received, self._output)

    def wait(self, timeout: Any = None) -> bool:
        if self._work is not None:
            self._work.wait()
        self.decode()
        return True
