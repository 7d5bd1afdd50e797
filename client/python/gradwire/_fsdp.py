"""Fully sharded data parallel over shard servers: their means in the place of reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _lifetime
from ._errors import FailedPrecondition
from ._fsdp_gather import FORMATS
from ._fsdp_units import Sharded, Unit, sharded
from ._job import Rule, TensorSpec
from ._means import MeanExchange
from ._session import Session

# Of a bucket where the caller does not say. Where two ranks' parts meet in one, both pull it: that is to be a small share.
_MIN_BUCKET_BYTES, _MAX_BUCKET_BYTES, _SHARE = 16 << 10, 4 << 20, 8


def _gather_of(found: Sharded, gather: str | None, codec: str) -> str:
    """What FSDPState's `gather` comes to, on all processes."""
    if gather == "int8" and not found.gathered:
        raise ValueError('FSDPState: gather="int8" needs fully_shard (FSDP2): FullyShardedDataParallel has no place for it')
    if gather == "int8" and any(unit.gathered_by_others for unit in found.gathered):
        raise ValueError('FSDPState: gather="int8" would take the place of what set_custom_all_gather, or a tensor with '
                         "fsdp_pre_all_gather, has put there")
    if gather is None:
        free = found.gathered and not any(unit.gathered_by_others for unit in found.gathered)
        gather = "int8" if free and not codec.startswith("dense") else "exact"
    told = torch.tensor([FORMATS.index(gather), -FORMATS.index(gather)], device=found.units[0].mean.device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    if told.sum() != 0:
        raise FailedPrecondition(f'FSDPState: gather="{gather}" is what this process would do, and others would not: all must be told '
                                 "the same, with the same codec, by the same version of gradwire")
    return gather


def _check_roles(rules: Sequence[Rule] | None) -> None:
    """A rule for a role that no unit has would change nothing, and nobody would hear of it."""
    for rule in rules or ():
        if missed := [role for role in rule.roles if role not in ("norm", "bias", "other")]:  # default_rules() have the first two
            raise ValueError(f"FSDPState: a unit of FSDP has tensors of many roles, so no rule finds those of role {missed[0]!r}: let "
                             "FSDP take such modules by themselves (fully_shard(block.attn)), and name them: "
                             f"Rule({rule.codec!r}, '*.attn.*')")


class FSDPState:
    """Reduces the gradients of a fully sharded model over shard servers.

        fully_shard(block) ...; fully_shard(model)       # FSDP2; or FSDP1: model = FullyShardedDataParallel(model, ...)
        state = FSDPState(model, servers=[...], job="lm")

    Each unit's gradients go to the shards, compressed, as backward makes them, in the place of its reduce-scatter; before
    backward() returns each rank has the means of its own part, and pulls no others. The optimizer, its state, checkpoints and the
    loop stay as they are. What a codec does not send waits in a residual on this rank: as many float32 as the
    whole model has parameters; with push="step" the second moment takes as many again. Gradients are kept until backward ends.

    model: the root module, sharded over all processes (two or more), with a mesh of one dimension, or as FULL_SHARD or
    SHARD_GRAD_OP. The tensors of the job are named "unit.rank": of each unit (the name of the module that fully_shard or
    FullyShardedDataParallel was given; the model itself is "(root)") and rank the part that the rank owns, a vector; `rules` may
    name them, as in Rule("dense:fp32", "head.*"), not by role: a unit has tensors of many. codec: the default sends six bits per
    element; with sparse codecs take push="step" and torch.optim.SGD (see DDPState). "dense:fp32" gives plain FSDP's trajectory up
    to the rounding of sums.
    bucket_bytes 0: an eighth of a rank's part, at most 4 MiB. update_codec, push, step_beta2, residual_decay, nonfinite, seed,
    lease_ms, worker and what goes on to gradwire.join: as for DDPState, also what holds for processes that are started again.

    gather: how parameters travel between ranks. "int8": FSDP2's all-gathers take a quarter of float32's bytes, half of bfloat16's:
    forward and backward pass, and evaluation, see matrices as int8, each 128 consecutive elements of a rank's part with the scale of
    their largest; a rank's own part, which the optimizer changes and checkpoints hold, stays as exact as it was, and vectors travel
    exactly. What FSDP gathers of several types together, or gathers again from fewer ranks (reshard_after_forward=N), goes as it is.
    "exact": FSDP's own. By default int8 with fully_shard and a codec that is not dense, unless another all-gather is there.

    Accumulate gradients with model.set_requires_gradient_sync(False), or no_sync(), as without Gradwire, so that they travel
    once, and with push="step" are one step. Gradients are reduced as float32 or bfloat16 (reduce_dtype of MixedPrecisionPolicy or
    MixedPrecision), by FSDP's default factor. What sees reduced gradients in backward (set_all_reduce_hook, FSDP2's
    register_post_accumulate_grad_hook, optimizers that step there) is refused: they come at its end. So is a unit that is reduced
    twice in a backward(): FSDP1 does so with several reentrant checkpoints in one unit.

    Errors of a round come out of backward(), and are the end of it: start again from your checkpoint. Close it, or use it in a
    `with`, when training ends, outside of backward(); then FSDP reduces by itself again.
    """

    def __init__(self, model: torch.nn.Module, *, servers: str | Sequence[str], job: str, codec: str = "thc:bits=6",
                 rules: Sequence[Rule] | None = None, worker: str | None = None, bucket_bytes: int = 0,
                 lease_ms: int = 10_000, nonfinite: str = "spread", seed: int = 0, push: str = "gradient",
                 step_beta2: float | None = None, residual_decay: float | None = None, update_codec: str | None = None,
                 gather: str | None = None, **joining: Any):
        MeanExchange.check(nonfinite, push, step_beta2, residual_decay)
        _check_roles(rules)
        if gather not in (None, *FORMATS):
            raise ValueError(f"FSDPState: gather={gather!r} is not one of {', '.join(FORMATS)}")
        found = sharded(model)
        gather = _gather_of(found, gather, codec)
        self._units, self._gathered, self._ends = found.units, found.gathered, found.ends
        rank, size = self._units[0].rank, dist.get_world_size()
        tensors: list[TensorSpec] = []
        means: list[torch.Tensor | None] = []
        for owner in range(size):  # a rank's parts lie together, so that it pulls few buckets
            for unit in self._units:
                unit.index.append(len(tensors))
                # A vector, of which the guess would be that it is a bias, which sparse codecs send whole.
                tensors.append(TensorSpec(f"{unit.name}.{owner}", (unit.length,), "other"))
                means.append(unit.mean if owner == rank else None)
        if bucket_bytes == 0:
            part = 4 * sum(unit.length for unit in self._units)
            bucket_bytes = min(max(part // _SHARE, _MIN_BUCKET_BYTES), _MAX_BUCKET_BYTES)
        self._exchange: MeanExchange | None = MeanExchange(
            tensors, means, servers=servers, job=job, codec=codec, rules=rules, workers=size, worker=worker,
            bucket_bytes=bucket_bytes, lease_ms=lease_ms, nonfinite=nonfinite, seed=seed, push=push, step_beta2=step_beta2,
            residual_decay=residual_decay, update_codec=update_codec, **joining)
        self._inputs: dict[Unit, torch.Tensor] | None = None  # of the round that is open, in use until it ends
        self._failed = ""  # what ended it
        for unit in self._units:
            unit.install(self._reduce)
        if gather == "int8":
            for gathered in self._gathered:
                gathered.gather_as_int8()
        for one, name in self._ends:
            setattr(one, name, self._behind(getattr(one, name)))
        self._watch = model.register_forward_pre_hook(self._check_ended)

    @property
    def session(self) -> Session | None:
        """None once this is closed."""
        return None if self._exchange is None else self._exchange.session

    def _reduce(self, unit: Unit, output: torch.Tensor, gradients: torch.Tensor) -> None:
        if self._failed or self._exchange is None:
            raise FailedPrecondition(f"FSDPState: it has ended ({self._failed or 'closed'}): close it, and make a new one")
        try:
            if self._inputs is not None and unit in self._inputs:
                raise FailedPrecondition(f"FSDPState: {unit.name} was reduced twice, in one backward() or because an earlier one "
                                         "failed: put what one loss needs through one forward pass (torch.cat of both batches)")
            unit.check(gradients)
            if self._inputs is None:
                self._exchange.begin()
                self._inputs = {}
            output.zero_()  # to which the means are added, wherever FSDP has put it by then
            inputs = self._inputs[unit] = gradients.float()
            self._exchange.look(inputs)
            for index, part in zip(unit.index, inputs.view(-1, unit.length), strict=True):
                self._exchange.send(index, part)
        except BaseException as error:
            self._failed = str(error) or type(error).__name__
            raise

    def _behind(self, end: Callable[[], None]) -> Callable[[], None]:
        def then() -> None:
            end()
            self._end_backward()

        return then

    def _check_ended(self, model: torch.nn.Module, inputs: object) -> None:
        if self._inputs is not None and torch.is_grad_enabled():
            self._failed = self._failed or "a backward() did not come to its end"
            raise FailedPrecondition(f"FSDPState: it has ended ({self._failed}): no means were delivered; close it, and make a new one")

    def _end_backward(self) -> None:
        """Behind the last reduction of a backward()."""
        if self._inputs is None or self._failed or self._exchange is None:
            return
        try:
            missing = [unit.name for unit in self._units if unit not in self._inputs]
            if missing:
                raise FailedPrecondition(f"FSDPState: backward() gave no gradients to {', '.join(missing)}: every unit must "
                                         "have some in each, for what its residual holds would be lost; freeze its parameters "
                                         "before FSDPState is made, or let it take part in the loss")
            spoilt = self._exchange.end()
            self._inputs = None
            for unit in self._units:
                unit.add(unit.mean.fill_(float("nan")) if spoilt else unit.mean)
        except BaseException as error:
            self._failed = str(error) or type(error).__name__
            raise

    def stats(self) -> dict[str, float]:
        """Session.stats(); empty once it is closed."""
        return {} if self.session is None else self.session.stats()

    def close(self, drain: bool = True) -> None:
        """Leaves the job. From then on FSDP reduces by itself."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        inside, self._inputs = self._inputs is not None, None
        try:
            self._watch.remove()
            for one, name in self._ends:
                delattr(one, name)
            for gathered in self._gathered:
                gathered.gather_as_before()
            for unit in self._units:
                unit.uninstall()
        finally:
            exchange.session.leave(drain and not inside)

    def __enter__(self) -> FSDPState:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        _lifetime.leave_behind(self.close, kind is None)
