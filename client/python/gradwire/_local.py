"""Local steps: workers train by themselves for a while, then the shards take the mean of how far they came."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import _core, _lifetime
from ._errors import FailedPrecondition
from ._session import Session
from ._sharded import ShardedOptimizer
from ._torch_groups import check_whole, plain_names, warn_of_ddp
from ._watch import Loan, Versions


# Whose hooks a local optimizer has: one that was not closed may have been made anew.
_around: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[LocalSGD]] = weakref.WeakKeyDictionary()


class LocalSGD:
    """Lets a torch optimizer take `every` steps by itself between two rounds, in which all workers' progress is averaged
    (DiLoCo, Douillard et al. 2023; with a sparse codec SparseLoCo's): bytes per step fall by that factor.

        optimizer = LocalSGD(torch.optim.AdamW(model.parameters(), lr=4e-4), model, every=32, servers=[...], job="lm", workers=2)

    optimizer: any of torch's; its state stays on this worker, and so does its learning rate: give the schedulers that one.
    model: the module, for the names of its parameters. All parameters of the optimizer take part; on CUDA devices as with
    ShardedOptimizer.

    In a round each worker sends how far it came since the last one (push="delta"), by `codec`; the shards step by the mean with
    `lr`, `momentum` and `nesterov`, and every worker goes on from where that leads. What a sparse codec does not send waits,
    times residual_decay, for the next round, and is momentum enough: by default lr=1, no momentum and residual_decay=0.95 for
    those (SparseLoCo), lr=0.7 and a Nesterov momentum of 0.9 for the others (DiLoCo; made for hundreds of local steps: with few,
    rounds go the same way, and it overshoots). Where rounds are few, too, residual_decay=1 keeps what would be lost: 75 rounds of
    1 % came to 0.99 of the loss of AdamW at its best rate with it, to 1.45 without (at half that rate).

    overlap=True: a round travels while the next local steps are made, and its update is added when the following round begins
    (at the end: in close()). Nobody waits for the network unless a round takes longer than `every` steps; updates come one
    round late.

    What is written into the parameters outside of the local optimizer's step (load_state_dict, init) would count as progress of
    this worker: the next step() raises gradwire.FailedPrecondition, unless reset_parameters() has made it the job's, or
    borrowed_parameters() has put the former values back. What belongs
    to each step, such as clamp_, goes into a hook of the local optimizer (register_step_post_hook). step() raises as well where
    that optimizer trains parameters that were frozen, or not there, when this was made. Who steps the local optimizer itself (a
    GradScaler, a framework) calls synchronize() behind every `every`-th step.

    Other arguments are ShardedOptimizer's: workers, quorum, update_codec, durability ... but not rounds="bounded:S", which
    overlap=True is for. `outer` is that optimizer, of parameters that only rounds change. Its errors come out of step(). Workers
    call step() equally often, or the others wait: also before close(), which begins a last round where steps were made since the
    one before.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, every: int, servers: Any, job: str,
                 codec: str = "topk:density=0.05,values=int8", lr: float | None = None, momentum: float | None = None,
                 nesterov: bool | None = None, residual_decay: float | None = None, overlap: bool = False, **options: Any):
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        if options.get("early_updates"):
            raise ValueError("early_updates: rounds of LocalSGD do not lie in a backward pass. Pass overlap=True, which hides them")
        if (rounds := str(options.get("rounds", "sync"))).startswith("bounded"):
            raise ValueError(f"rounds={rounds!r}: LocalSGD would go on without its own progress of the last rounds. Pass "
                             "overlap=True, which lets a round travel while the next steps are made")
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise TypeError(f"optimizer: {type(optimizer).__name__} is around another one and takes no hooks of its own (as Accelerate's "
                            "is): pass the one inside, LocalSGD(optimizer.optimizer, ...)")
        warn_of_ddp(model)
        plain = plain_names(name for name, _ in model.named_parameters())
        self._names = names = {id(p): plain[name] for name, p in model.named_parameters()}
        self.optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        unknown = sum(id(p) not in names for p in self._parameters)
        if unknown:
            raise ValueError(f"{unknown} of {len(self._parameters)} parameters of the optimizer are none of the model's")
        for p in self._parameters:
            check_whole(f"parameter {names[id(p)]!r}", p)
        self._every, self._overlap = every, overlap
        self._steps = 0  # of the local optimizer since the last round
        self._inside = False  # step()
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
        self._versions = Versions([name for name, _ in shared], self._parameters)
        self._loan = Loan(self._parameters, self._versions.accept)
        if optimizer in _around and (former := _around[optimizer]()) is not None:
            former._remove_hooks()
        _around[optimizer] = weakref.ref(self)
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._behind)]

    @property
    def start_step(self) -> int:
        """The local step at which this worker begins: 0, or where the job is when it is started again."""
        return self.outer.start_step * self._every

    @torch.no_grad()
    def _progress(self) -> list[torch.Tensor]:
        return [begin - p for begin, p in zip(self._begin, self._parameters, strict=True)]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the local optimizer; every `every`-th of them a round, too."""
        self._check()
        self._inside = True
        try:
            loss = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        finally:
            self._inside = False
            self._versions.accept()
        self._steps += 1
        if self._steps >= self._every:  # more: the round timed out
            self.synchronize()
        return loss

    def _before(self, *_: Any) -> None:
        if self._inside:
            return
        self._check()
        if self._steps >= self._every:
            raise FailedPrecondition(
                f"the local optimizer has made {self._steps} steps by itself, and no round, with every={self._every}: call step() of "
                "LocalSGD in its place, or synchronize() behind every such number of steps")

    def _behind(self, *_: Any) -> None:
        self._versions.accept()
        self._steps += not self._inside

    def _check(self) -> None:
        """Raises where something else than the local optimizer's steps on the shared parameters would count, or not count."""
        self._loan.check_returned()
        if (name := self._versions.written()) is not None:
            remedy = "call reset_parameters() on every worker behind it" if self.session.version > 0 or self._sent else \
                "write it before LocalSGD is made"
            raise FailedPrecondition(
                f"parameter {name!r} was written to outside of the local optimizer's step (load_state_dict, init): it would count "
                f"as this worker's progress; {remedy}. What belongs to each step (clamp_) goes into a hook "
                "that is there before LocalSGD is made: optimizer.register_step_post_hook")
        shared = {id(p) for p in self._parameters}
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            if p.requires_grad and id(p) not in shared:
                name = self._names.get(id(p))
                raise FailedPrecondition(
                    f"the local optimizer trains {'a new parameter' if name is None else f'parameter {name!r}'}, which was frozen or "
                    "not there when LocalSGD was made: each worker would train it alone. Make LocalSGD anew behind that, for a new "
                    "job")

    def synchronize(self) -> None:
        """A round now: all workers call it at the same place. Called again after gradwire.DeadlineExceeded, it goes on waiting."""
        self._check()
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
        self._wait()
        progress = self._progress()
        with torch.no_grad():
            for p, begin, shared, moved in zip(self._parameters, self._begin, self._shared, progress, strict=True):
                # Where this worker's own progress is not finite (a round that was skipped, sanitized) the shared value stands.
                torch.where(moved.isfinite(), shared - moved, shared, out=p)
                begin.copy_(shared)
        self._versions.accept()

    def _wait(self) -> None:
        try:
            self.outer.step()
        except BaseException:
            self._sent = self.outer._stepping  # by a timeout or Ctrl-C the round is still open
            if not self._sent and not self._overlap:
                self._steps = 0
            raise
        self._sent = False

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """What was written into the parameters becomes the job's, on the shards and on every worker, as with
        ShardedOptimizer.reset_parameters: every worker calls it, behind the same step and with the same values. Local steps since
        the last round, and the update of a round on its way, are gone."""
        self._loan.check_returned()
        if self._sent:
            self._wait()
        if not self.outer._replacing:
            for p, shared in zip(self._parameters, self._shared, strict=True):
                shared.copy_(p)
        self.outer.reset_parameters()
        for p, begin, shared in zip(self._parameters, self._begin, self._shared, strict=True):
            p.copy_(shared)
            begin.copy_(shared)
        self._steps = 0
        self._versions.accept()

    @contextlib.contextmanager
    def borrowed_parameters(self) -> Iterator[None]:
        """As ShardedOptimizer's: what is written inside is undone at its end, and is nobody's progress."""
        self._check()
        with self._loan.lend():
            yield

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
        """Leaves the job. Unless drain=False, what this worker did is in the parameters then: where it made steps since the last
        round, all workers make a last one here, and its update has come."""
        self._remove_hooks()
        try:
            if drain and not self.outer.closed:
                if self._steps:
                    self.synchronize()
                elif self._sent:
                    self._check()
                self._settle()
        except BaseException:
            self.outer.close(drain=False)
            raise
        self.outer.close(drain)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> LocalSGD:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        _lifetime.leave_behind(self.close, kind is None)
