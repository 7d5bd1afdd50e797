"""DistributedDataParallel over shard servers: a communication hook in the place of all-reduce."""

# Without `from __future__ import annotations`: DistributedDataParallel looks at those of the hook.
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _lifetime
from ._errors import FailedPrecondition
from ._job import Rule, TensorSpec
from ._means import MeanExchange
from ._session import Session
from ._torch_groups import check_tensor, plain_name, plain_names, roles_of

logger = logging.getLogger("gradwire")


class DDPState:
    """What `ddp_hook` needs: a worker's place in a job whose shards take the mean of gradients.

        state = DDPState(model, servers=[...], job="lm")
        model.register_comm_hook(state, ddp_hook)

    Compressed gradients go to the shards as backward makes them, and their means come back before backward() returns: what
    all-reduce does, for as many bytes as the codec takes. The optimizer, its state and the loop stay as they are. What a codec
    does not send waits in a residual on this worker.

    model: the DistributedDataParallel, or the module in it; its parameters that require gradients, by name without the
    prefixes of wrappers. Those of 16 bits, or in another memory format (channels_last), are sent as a copy in float32, and their
    means rounded once. codec, update_codec, rules, roles: as for ShardedOptimizer. The default sends four bits per element.
    codec="dense:fp32" gives DistributedDataParallel's own trajectory up to the rounding of sums.

    push: what travels. "gradient"; or "step", for sparse codecs (tagc, topk ...): an optimizer that divides by its own second
    moment, as AdamW does, loses by means of which most elements are 0 in most steps. So each worker divides its gradients
    first (step_beta2, 0.99, is that of the second moment), what backward() leaves in `.grad` is the mean of such steps, and

        optimizer = torch.optim.SGD(model.parameters(), lr=4e-3, weight_decay=0.01)

    takes the place of AdamW, at once to twice its learning rate. Leave clip_grad_norm_ and GradScaler out: a step has no scale.
    Accumulate in no_sync() alone: else steps are added, and the next one is made of them. residual_decay (0.98): what waits in a
    sparse codec's residual is multiplied by this in every round.

    local_group: a process group of the processes of one host (each host has as many): their gradients are reduced first, the
    group's first process speaks for them with the shards, and the means are broadcast within the host. All of them make a
    DDPState with it. workers: how many speak with the shards; by default the size of DistributedDataParallel's process group (of the world, if
    `model` is the module in it) over that of the host's. Models of process groups of their own need a job of their own each.

    find_unused_parameters: where no process used a parameter, DistributedDataParallel drops its mean, and with it what its residual
    sent: leave that option out, or take a dense codec, where parts of a model take turns.

    nonfinite: "spread" (the default): where a gradient of any worker is not finite, or too large for the shards' sums (2^18, from
    3 workers on 2^19 / workers, which the log tells), all gradients of that step are NaN on every worker, so that a GradScaler on
    each skips it, as after all-reduce. What others had sent in it has left their residuals, and what they had not comes with later
    steps: with a GradScaler, whose scale changes there, take codec "dense:fp32", which keeps nothing.
    "refuse": backward() raises gradwire.InvalidArgument, which names the tensor, on that worker.

    Processes that are started again, by torchrun or by hand, begin the job anew, with residuals of 0, once the leases of those
    before have ended (lease_ms): the model and the optimizer come from your checkpoint, as without Gradwire.

    On a CUDA device gradients are encoded where they are by codec tagc or dense; for others, and with place="host", they come to
    host memory first.

    Errors of a round (gradwire.Unavailable, DeadlineExceeded) come out of backward(). `session` is None on processes that others
    speak for. Other arguments are those of gradwire.join and JobSpec. Close it, or use it in a `with`, when training ends: the
    others go on without this worker, and a backward() behind that raises gradwire.FailedPrecondition.
    """

    def __init__(self, model: torch.nn.Module, *, servers: str | Sequence[str], job: str,
                 codec: str = "thc:bits=4", rules: Sequence[Rule] | None = None,
                 roles: dict[str, str] | None = None, workers: int | None = None, worker: str | None = None,
                 local_group: dist.ProcessGroup | None = None, bucket_bytes: int = 0, lease_ms: int = 10_000,
                 nonfinite: str = "spread", seed: int = 0, push: str = "gradient", step_beta2: float | None = None,
                 residual_decay: float | None = None, update_codec: str | None = None, **joining: Any):
        if not dist.is_initialized():
            raise FailedPrecondition("DDPState: torch.distributed is not initialized: call init_process_group() first, as "
                                     "DistributedDataParallel wants it too")
        self._group = local_group
        self._group_size = 1 if local_group is None else dist.get_world_size(local_group)
        self._leader = None if local_group is None else dist.get_global_rank(local_group, 0)
        if workers is None:
            outer = getattr(model, "_orig_mod", model)  # as torch.compile wraps it
            world = dist.get_world_size(outer.process_group if isinstance(outer, torch.nn.parallel.DistributedDataParallel) else None)
            workers, odd = divmod(world, self._group_size)
            if odd:
                raise ValueError(f"local_group has {self._group_size} of {world} processes: each host needs as many")
        ignored = set(map(plain_name, getattr(model, "parameters_to_ignore", ())))  # of DistributedDataParallel
        plain = plain_names(name for name, _ in model.named_parameters())
        named = [(plain[name], p) for name, p in model.named_parameters() if p.requires_grad and plain_name(name) not in ignored]
        if not named:
            raise ValueError("all parameters are frozen (requires_grad=False): there is nothing to reduce")
        for name, p in named:
            check_tensor(f"parameter {name!r}", p)
        roles = roles_of(roles, [name for name, _ in named], plain.values())
        MeanExchange.check(nonfinite, push, step_beta2, residual_decay)
        self._index = {id(p): i for i, (_, p) in enumerate(named)}
        self._pending: list[tuple[dist.GradBucket, torch.futures.Future[torch.Tensor]]] = []
        self._means = [torch.zeros(p.shape, dtype=torch.float32, device=p.device) for _, p in named]
        self._closed = False
        self._hooked = False  # as far as it knows
        self._exchange: MeanExchange | None = None  # of who speaks with the shards, until it is closed
        if self._leader is None or dist.get_rank() == self._leader:
            tensors = [TensorSpec(name, tuple(p.shape), roles.get(name)) for name, p in named]
            self._exchange = MeanExchange(
                tensors, self._means, servers=servers, job=job, codec=codec, rules=rules, workers=workers, worker=worker,
                bucket_bytes=bucket_bytes, lease_ms=lease_ms, nonfinite=nonfinite, seed=seed, push=push, step_beta2=step_beta2,
                residual_decay=residual_decay, update_codec=update_codec, **joining)

    @property
    def session(self) -> Session | None:
        return None if self._exchange is None else self._exchange.session

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook: the mean of a bucket over all workers. Buckets of a step come in order, the same on every process."""
        if self._closed:
            raise FailedPrecondition("DDPState: it was closed, and DistributedDataParallel still calls its hook: close it when "
                                     "training ends, or wrap the module in DistributedDataParallel anew, which then reduces by "
                                     "itself or with the hook of a new DDPState")
        buffer = bucket.buffer()
        self._hooked = True
        if buffer.is_sparse:
            raise TypeError("DDPState: a gradient is sparse (nn.Embedding(sparse=True)), and hooks send all elements: make the table "
                            "without sparse=True, or train it by ShardedOptimizer with codec zen, which sends its rows")
        if self._group is not None:
            dist.reduce(buffer, self._leader, group=self._group)
        if self._exchange is not None:
            if not self._pending:
                self._exchange.begin()
            if self._group is not None:
                buffer.div_(self._group_size)
            self._exchange.look(buffer)
            for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                self._exchange.send(self._index_of(p), gradient.to(torch.float32).contiguous())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else [])
        self._pending.append((bucket, future))
        if bucket.is_last():
            self._end()
        return future

    def _end(self) -> None:
        pending, self._pending = self._pending, []
        spoilt = self._exchange is not None and self._exchange.end()
        for bucket, future in pending:
            if self._exchange is not None:
                for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                    gradient.copy_(self._means[self._index_of(p)])
                if spoilt:
                    bucket.buffer().fill_(float("nan"))
            if self._group is not None:
                dist.broadcast(bucket.buffer(), self._leader, group=self._group)
            future.set_result(bucket.buffer())

    def _index_of(self, parameter: torch.Tensor) -> int:
        index = self._index.get(id(parameter))
        if index is None:
            raise FailedPrecondition("DistributedDataParallel reduces a parameter that was not there when DDPState was made: "
                                     "make it behind everything that adds or replaces parameters (.to()), and freeze what is not "
                                     "trained before the module is wrapped in DistributedDataParallel")
        return index

    def stats(self) -> dict[str, float]:
        """Session.stats(); empty on processes that others speak for."""
        return {} if self.session is None else self.session.stats()

    def close(self, drain: bool = True) -> None:
        """Leaves the job; the other workers go on without this one."""
        self._closed = True
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            if drain and not self._hooked:
                logger.warning("job %r: DDPState is closed and has reduced nothing: model.register_comm_hook(state, ddp_hook) makes "
                               "DistributedDataParallel use it", exchange.session.job.name)
            exchange.session.leave(drain)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, as copy.deepcopy(model) makes one with its hooks: it is in no job."""
        return {"_closed": True, "_exchange": None, "_group": None, "_pending": []}

    def __enter__(self) -> "DDPState":
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        _lifetime.leave_behind(self.close, kind is None)


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: `model.register_comm_hook(DDPState(model, ...), ddp_hook)`."""
    return state.reduce(bucket)
