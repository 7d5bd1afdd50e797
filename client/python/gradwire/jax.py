"""JAX: a gradient transformation of optax's form whose step is made by parameter-shard servers."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import io_callback

from ._errors import FailedPrecondition
from ._job import DEFAULT_CODEC, Group, JobSpec, Rule, TensorSpec, default_update_codec, training_with
from ._session import Session, join

__all__ = ["ShardedState", "ShardedTransformation"]


@atexit.register
def _finish() -> None:
    """Steps that the main thread dispatched run, before sessions end with the interpreter. What failed was told by JAX."""
    with contextlib.suppress(Exception):
        jax.effects_barrier()


class ShardedState(NamedTuple):
    """What is carried from step to step; moments lie on the shards."""

    count: Any  # steps of the job so far


class ShardedTransformation:
    """What optax.adamw(...) is to one process, for all workers of a job: init(params) joins it, update(gradients, state, params)
    compresses and pushes the gradients, waits for the update that the shards merged from all workers, and returns what is to be
    added to the parameters. update() works under jit, as an ordered callback; init() does not.

        optimizer = ShardedTransformation(servers=[...], job="lm", learning_rate=1e-3, workers=2)
        state = optimizer.init(params)
        params = optimizer.parameters(params)  # the job's: its first worker's, or where it is by now
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        params = optax.apply_updates(params, updates)

    learning_rate: a number, or a schedule: what it gives for the number of steps of the job so far. Other arguments are those of
    gradwire.torch.ShardedOptimizer, whose docstring says more. The job's parameters are float32 and lie in host memory, once more
    (16-bit leaves have float32 masters there); the first worker's start the job. update() is a step of all workers, and adds it to
    the job's parameters: it raises where the caller's are others, as behind a restart without parameters(), with values of a
    checkpoint, or where something around this one drops or gathers updates (optax.MultiSteps: gather gradients before update()).
    Gradients and updates go through host memory. One init() for each of these. An error in update() ends the training and leaves
    the job: JAX raises it as its own, with the text of gradwire's; `close` leaves the job, as does the end of the interpreter,
    behind the steps that were dispatched.
    """

    def __init__(self, *, servers: str | Sequence[str], job: str, learning_rate: float | Callable[[int], float] = 1e-3,
                 workers: int = 1, max_workers: int | None = None, worker: str | None = None, push: str | None = None,
                 optimizer: str | None = None, momentum: float = 0.0, nesterov: bool = False,
                 betas: tuple[float, float] | None = None, eps: float | None = None, weight_decay: float = 0.0,
                 clip_norm: float = 0.0, residual_decay: float | None = None, codec: str = DEFAULT_CODEC, update_codec: str | None = None,
                 rules: Sequence[Rule] | None = None, nonfinite: str = "refuse", quorum: int = 0, lease_ms: int = 10_000,
                 durability: str = "none", seed: int = 0, **joining: Any):
        self._servers = servers
        self._rate = learning_rate if callable(learning_rate) else lambda count: learning_rate
        training = training_with(codec, push, optimizer, betas, eps, residual_decay)
        back = default_update_codec(codec, training.push, max_workers or workers) if update_codec is None else update_codec
        group = Group(weight_decay, momentum, nesterov, training.betas, training.eps)
        self._make_job: Callable[[list[TensorSpec]], JobSpec] = lambda tensors: JobSpec(
            name=job, tensors=tensors, optimizer=training.optimizer, clip_norm=clip_norm, push=training.push, codec=codec,
            update_codec=back, rules=rules, nonfinite=nonfinite, groups=[group], step_beta2=training.betas[1],
            step_eps=training.eps, residual_decay=training.residual_decay, workers=workers, max_workers=max_workers or workers,
            lease_ms=lease_ms, quorum=quorum, seed=seed, durability=durability)
        self._worker, self._joining = worker, joining
        self._memory: list[np.ndarray] = []  # the session's parameters
        self._scales: list[float] = []  # of each the largest magnitude, before or behind the last step
        self.session: Session | None = None

    def init(self, params: Any) -> ShardedState:
        """Joins the job. Not under jit: the parameters must be there."""
        if self.session is not None:
            raise FailedPrecondition("this transformation has joined its job already: make another one, for a job of its own")
        named, _ = jax.tree_util.tree_flatten_with_path(params)
        if any(isinstance(leaf, jax.core.Tracer) for _, leaf in named):
            raise TypeError("ShardedTransformation.init() joins a job with the parameters' values: call it outside of jit")
        for path, leaf in named:
            if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) or leaf.dtype.itemsize > 4:
                raise TypeError(f"parameter {_name(path)!r} is {leaf.dtype}; Gradwire takes float32, bfloat16 and float16")
        self._memory = [np.array(leaf, np.float32, order="C") for _, leaf in named]
        self._scales = [0.0] * len(self._memory)
        tensors = [TensorSpec(_name(path), tuple(leaf.shape)) for path, leaf in named]
        self.session = join(self._servers, self._make_job(tensors), self._memory, self._worker, **self._joining)
        return ShardedState(jax.numpy.asarray(self.session.start_step, jax.numpy.int32))

    def parameters(self, params: Any) -> Any:
        """The job's parameters, in the form of `params`, behind the steps that this thread dispatched. Not under jit."""
        if self.session is None:
            raise FailedPrecondition("this transformation is in no job: call init(params) first")
        leaves, tree = jax.tree_util.tree_flatten(params)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise TypeError("ShardedTransformation.parameters() gives values: call it outside of jit")
        jax.effects_barrier()
        # Copies: JAX may take NumPy's memory as it is, which the session writes to.
        return tree.unflatten(jax.numpy.asarray(new.copy(), old.dtype) for new, old in zip(self._memory, leaves, strict=True))

    def update(self, updates: Any, state: ShardedState, params: Any = None) -> tuple[Any, ShardedState]:
        """A step of the job. `updates`: the gradients of this worker's batch."""
        if params is None:
            raise ValueError("ShardedTransformation.update() needs the parameters: update(gradients, state, params)")
        leaves, tree = jax.tree_util.tree_flatten(params)
        gradients = tree.flatten_up_to(updates)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        steps = io_callback(self._step, shapes, gradients, leaves, state.count, ordered=True)
        return tree.unflatten(steps), ShardedState(state.count + 1)

    def _step(self, gradients: list[Any], parameters: list[Any], count: Any) -> list[np.ndarray]:
        if self.session is None:
            raise FailedPrecondition("this transformation is in no job: call init(params) first, and update() before close()")
        try:
            before = [_largest(here) for here in self._memory]
            self._scales = [max(last, now) for last, now in zip(self._scales, before, strict=True)]
            self._check_parameters([np.asarray(p) for p in parameters])
            self.session.exchange([np.asarray(g, np.float32, order="C") for g in gradients], float(self._rate(int(count))))
            self._scales = before
        except BaseException:  # nobody waits for one whose training has ended
            session, self.session = self.session, None
            with contextlib.suppress(Exception):
                session.leave(drain=False)
            raise
        # Of what the caller has: what it rounds away in one step comes with the next.
        return [(new - np.asarray(old, np.float32)).astype(old.dtype) for new, old in zip(self._memory, parameters, strict=True)]

    def _check_parameters(self, parameters: list[np.ndarray]) -> None:
        """Whether they are the job's, but for what adding a step to them rounds: as much as the larger of both ends has it."""
        assert self.session is not None
        for tensor, here, scale, given in zip(self.session.job.tensors, self._memory, self._scales, parameters, strict=True):
            apart = np.abs(given.astype(np.float32) - here)[np.isfinite(here)].max(initial=0.0)
            kind = jax.numpy.finfo(given.dtype)
            if not apart <= 16 * float(kind.eps) * scale + 2 * float(kind.smallest_subnormal):
                raise FailedPrecondition(
                    f"update() was given parameters that are not the job's: {tensor.name!r} is {apart:.3g} apart. Begin with "
                    "params = transformation.parameters(params) behind init(); values of a checkpoint belong before it. Nothing "
                    "around this transformation may drop, scale or gather its updates (optax.MultiSteps, lookahead)")

    def close(self) -> None:
        """Waits for the steps that this thread dispatched, and leaves the job."""
        if self.session is None:
            return
        try:
            jax.effects_barrier()
        finally:
            if self.session is not None:
                self.session.leave()
                self.session = None


def _largest(values: np.ndarray) -> float:
    """Of what is finite."""
    return float(np.abs(values)[np.isfinite(values)].max(initial=0.0))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "params"
