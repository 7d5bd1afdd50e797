"""Local steps: workers train by themselves for a while, then the shards take the mean of how far they came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _core
from ._session import Session
from ._sharded import ShardedOptimizer


class LocalSGD:
    """Lets a torch optimizer take `every` steps by itself between two rounds, in which all workers' progress is averaged
    (DiLoCo, Douillard et al. 2023; with a sparse codec SparseLoCo's): bytes per step fall by that factor.

        optimizer = LocalSGD(torch.optim.AdamW(model.parameters(), lr=4e-4), model, every=32, servers=[...], job="lm", workers=2)

    optimizer: any of torch's; its state stays on this worker, and so does its learning rate: give the schedulers that one.
    model: the module, for the names of its parameters. All parameters of the optimizer take part, as float32 in host memory or
    on one CUDA device (codecs tagc or dense there).

    In a round each worker sends how far it came since the last one (push="delta"), by `codec`; the shards step by the mean with
    `lr`, `momentum` and `nesterov`, and every worker goes on from where that leads. What a sparse codec does not send waits,
    times residual_decay, for the next round, and is momentum enough: by default lr=1, no momentum and residual_decay=0.95 for
    those (SparseLoCo), lr=0.7 and a Nesterov momentum of 0.9 for the others (DiLoCo; made for hundreds of local steps: with few,
    rounds go the same way, and it overshoots).

    overlap=True: a round travels while the next local steps are made, and its update is added when the following round begins
    (at the end: in close()). Nobody waits for the network unless a round takes longer than `every` steps; updates come one
    round late.

    Other arguments are ShardedOptimizer's: workers, quorum, update_codec, durability ... `outer` is that optimizer, of
    parameters that only rounds change. Its errors come out of step(). Workers call step() equally often, or the others wait.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, every: int, servers: Any, job: str,
                 codec: str = "topk:density=0.05,values=int8", lr: float | None = None, momentum: float | None = None,
                 nesterov: bool | None = None, residual_decay: float | None = None, overlap: bool = False, **options: Any):
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        names = {id(p): name for name, p in model.named_parameters()}
        self.optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        unknown = sum(id(p) not in names for p in self._parameters)
        if unknown:
            raise ValueError(f"{unknown} of {len(self._parameters)} parameters of the optimizer are none of the model's")
        self._every, self._overlap = every, overlap
        self._steps = 0  # since the last round
        sparse = _core.training_defaults(codec)["small_dense"]
        momentum = (0.0 if sparse else 0.9) if momentum is None else momentum
        shared = [(names[id(p)], torch.nn.Parameter(p.detach().clone())) for p in self._parameters]
        self.outer = ShardedOptimizer(
            shared, servers=servers, job=job, push="delta", optimizer="sgd", codec=codec,
            lr=(1.0 if sparse else 0.7) if lr is None else lr, momentum=momentum,
            nesterov=momentum > 0 if nesterov is None else nesterov,
            residual_decay=(0.95 if sparse else 1.0) if residual_decay is None else residual_decay, **options)
        self._shared = [p for _, p in shared]
        self._sent = False  # a round is on its way
        with torch.no_grad():
            for p, start in zip(self._parameters, self._shared, strict=True):
                p.copy_(start)
        # Where each parameter stood when its progress was counted last.
        self._begin = [p.detach().clone() for p in self._parameters]

    @torch.no_grad()
    def _progress(self) -> list[torch.Tensor]:
        return [begin - p for begin, p in zip(self._begin, self._parameters, strict=True)]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the local optimizer; every `every`-th of them a round, too."""
        loss = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        self._steps += 1
        if self._steps >= self._every:  # more: the round timed out
            self.synchronize()
        return loss

    def synchronize(self) -> None:
        """A round now: all workers call it at the same place. Called again after gradwire.DeadlineExceeded, it goes on waiting."""
        if self._overlap:
            self._settle()
        if not self._sent:
            self._send()
        if not self._overlap:
            self._settle()
        self._steps = 0

    def _send(self) -> None:
        for shared, moved in zip(self._shared, self._progress(), strict=True):
            shared.grad = moved
        self.outer.send()
        self._sent = True
        for begin, p in zip(self._begin, self._parameters, strict=True):
            begin.copy_(p.detach())

    def _settle(self) -> None:
        """Waits for the round on its way; local progress since it was sent is kept."""
        if not self._sent:
            return
        try:
            self.outer.step()
        except TimeoutError:
            raise  # the round is still open
        except Exception:
            self._sent = False
            raise
        self._sent = False
        progress = self._progress()
        with torch.no_grad():
            for p, begin, shared, moved in zip(self._parameters, self._begin, self._shared, progress, strict=True):
                torch.sub(shared, moved, out=p)
                begin.copy_(shared)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The local optimizer's."""
        return self.optimizer.param_groups

    @property
    def session(self) -> Session:
        return self.outer.session

    def stats(self) -> dict[str, float]:
        return self.outer.stats()

    def close(self, drain: bool = True) -> None:
        """Leaves the job, with the last round's update in the parameters unless drain=False."""
        if drain:
            self._settle()
        self.outer.close(drain)

    def __enter__(self) -> LocalSGD:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self.close(drain=kind is None)
