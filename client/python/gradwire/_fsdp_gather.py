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
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PIECE = 512 * BLOCK
_ALIGNED = 8  # elements: so sections of a message, and messages, begin where any float may
# The name since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Part:
    """Of a parameter: the elements that each rank has of it, padding included. exact: they travel as they are."""

    length: int
    exact: bool


class Allocates:
    """Where FSDP's communication takes place: in memory of its own."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Int8Gather(Allocates):
    """Gathers one unit's parameters. FSDP takes it for a torch.distributed.fsdp AllGather. Elements come out as multiples of a
    127th of the largest one of their block, the nearest, the same on all ranks (their own part, too); of a block with one that is
    not finite all are NaN. Inputs of other lengths (parameters that are resharded to fewer ranks between the passes, and are what
    others saw already) or of other types (parameters of several types together) go as they are."""

    def __init__(self, parts: Sequence[Part]):
        self._length = sum(part.length for part in parts)
        # (where it begins among the inputs, where it begins in the message's elements of its kind, length)
        self._exact: list[tuple[int, int, int]] = []
        self._coded: list[tuple[int, int, int]] = []
        self._exact_length = self._coded_length = begin = 0  # lengths of the message's sections, multiples of 8
        for part in parts:
            if part.exact:
                self._exact.append((begin, self._exact_length, part.length))
                self._exact_length += part.length
            else:
                self._coded.append((begin, self._coded_length, part.length))
                self._coded_length += -(-part.length // BLOCK) * BLOCK
            begin += part.length
        self._exact_length += -self._exact_length % _ALIGNED
        self._scales_length = -(-self._coded_length // BLOCK // _ALIGNED) * _ALIGNED

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup,
                 async_op: bool = False) -> dist.Work | None:
        if input_tensor.numel() != self._length or input_tensor.dtype not in _FLOATS or not self._coded_length:
            return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        sent = self.encode(input_tensor)
        received = sent.new_empty(group.size() * sent.numel())
        work = _all_gather(received, sent, group=group, async_op=async_op)
        if async_op:
            return _Gathering(self, work, received, output_tensor)
        self.decode(received, output_tensor)
        return None

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """-> bytes: scales, what is exact, int8; as many on each rank, each a multiple of 8."""
        scales = values.new_zeros(self._scales_length, 1, dtype=torch.float32)
        coded = values.new_zeros(self._coded_length, dtype=torch.int8)
        for begin, at, length in self._coded:
            for first, count, rows in _pieces(length, values.device):
                blocks = values[begin + first : begin + first + count].view(rows, -1).float()
                scale = scales[(at + first) // BLOCK :][:rows]
                # Of not finite elements the scale is not finite, and 0 times infinity is NaN.
                torch.div(blocks.abs().amax(dim=1, keepdim=True), _LARGEST, out=scale)
                into = coded[at + first : at + first + count].view(rows, -1)
                into.copy_((blocks / torch.where(scale > 0, scale, 1)).round_().nan_to_num_())
        exact = values.new_zeros(self._exact_length)
        for begin, at, length in self._exact:
            exact[at : at + length] = values[begin : begin + length]
        return torch.cat([section.view(-1).view(torch.uint8) for section in (scales, exact, coded)])

    def decode(self, received: torch.Tensor, output: torch.Tensor) -> None:
        """received: of all ranks, one behind the other; output: their inputs."""
        size = output.numel() // self._length
        ranks, out = received.view(size, -1), output.view(size, -1)
        sizes = (4 * self._scales_length, self._exact_length * output.element_size(), self._coded_length)
        sections = ranks.split(sizes, dim=1)
        scales, exact, coded = (section.view(t) for section, t in zip(sections, (torch.float32, output.dtype, torch.int8), strict=True))
        for begin, at, length in self._exact:
            out[:, begin : begin + length] = exact[:, at : at + length]
        for begin, at, length in self._coded:
            for first, count, rows in _pieces(length, output.device):
                into = out[:, begin + first : begin + first + count].unflatten(1, (rows, -1))
                into.copy_(coded[:, at + first : at + first + count].unflatten(1, (rows, -1)))
                into.mul_(scales[:, (at + first) // BLOCK :][:, :rows, None])


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

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        self._gather.decode(self._received, self._output)
        return True
