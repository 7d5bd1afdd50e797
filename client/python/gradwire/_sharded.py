"""An optimizer whose step goes through parameter-shard servers."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from . import _amp, _lifetime
from ._checkpoint import checkpoint_file, kept_checkpoint
from ._errors import FailedPrecondition
from ._job import DEFAULT_CODEC, Group, JobSpec, Rule, TensorSpec, default_update_codec, training_with
from ._masters import Masters, gradient_of, rows_of
from ._place import Staging, check_place, place_of, threads_for
from ._presence import Presence, read_notes
from ._session import Session, join, notes_of
from ._torch_groups import (check_apart, check_fixed, check_options, check_state, check_tensor, fixed_of, looked_at_by_torch, named_groups,
                            roles_of)
from ._trace import Trace
from ._watch import Watch


class ShardedOptimizer(torch.optim.Optimizer):
    """A drop-in torch.optim.Optimizer: step() compresses and pushes the gradients, and applies the update that the shards
    merged from all workers. client/python/README.md says what is different for a loop that was written for torch.optim.
    Each worker needs data of its own (torch's DistributedSampler); with the same data all compute the same gradient.

    params: as for any optimizer; named_parameters() (or the module itself) lets roles and rules see names, which are those that
    the model had before it was wrapped (torch.compile). Every worker builds the same model in the same order with the same
    arguments; the first worker's values start the job.

    push: "step" (the default for tagc, topk, threshold, randomk, onebit, efsignsgd, signum and powersgd, if no
    optimizer is named) sends g/sqrt(v), made with each worker's own second moment (betas[1], eps). "delta" sends what
    the training loop leaves in .grad: how far it came by itself. What a sparse codec does not send of a step or delta
    waits in the residual, times residual_decay (0.98 for "step", 1 for "delta"), for the next one: the residual is the
    momentum. "gradient" (the default otherwise) sends the gradient to an optimizer on the shards: "adamw" (the
    default), "sgd" (the default for dgc, signum and signsgd), "lamb", "lans" or "lion". betas: (0.9, 0.99) for "step"
    and "lion", else (0.9, 0.999). eps: 1e-6 for "lamb" and "lans", else 1e-8. clip_norm: the mean gradient of all
    workers is scaled down to this norm on the shards (not with push="step"). roles: name -> role where the guess is
    wrong; rules: which tensor travels by which codec; without rules, norms, biases and tensors below 1024 elements
    travel dense beside a sparse codec.
    update_codec: what the shards compress the update with on its way back, such as "topk:density=0.001,values=fp16"; they
    keep what it drops for the next step; "": nothing. By default the elements that topk, threshold, randomk or dgc pushed with
    reduced values come back in 4 bits each, or 6, where more than two workers do not push steps. weight_decay is decoupled, except with "sgd".
    Learning rates come from param_groups and travel with each round, so LR schedulers work; all workers must follow the same
    schedule.

    Parameters are float32, bfloat16 or float16. The job's are float32: of 16-bit ones, and of those in another memory format
    (channels_last), masters in float32 lie here and on the shards, and are rounded into the parameters after each step;
    pull="params_bf16" then halves what comes back. Gradients of 16 bits are sent as float32. Sparse ones
    (nn.Embedding(sparse=True)) are taken by their rows: with codec zen or adaptive and a plain optimizer="sgd" a step takes a
    time that grows with these rows; with others, and on a CUDA device, it grows with the tensor.

    Parameters lie in host memory or on CUDA devices: move the model there before the optimizer is made. On one device, with codec
    tagc or dense, gradients are encoded where they are and updates applied where the parameters are. For the rest (other codecs,
    clip_norm, LAMB, LANS, LION with pull="update"; several devices), and with place="host", gradients come to host memory, and
    float32 masters of the parameters lie there; encode_threads is then by default half of the process's cores, up to 8. The logger
    `gradwire` says so. reset_parameters() of a model on a device needs place="host".

    Gradients are sent by step(), as they are then: accumulation, clipping, unscaling and several losses work as with
    any optimizer. overlap=True sends them while backward makes others, for loops with one backward pass per
    step and nothing between that and step(): pass accumulate=N for N backward passes per step, or wrap all but the last
    in no_sync(). With it, what comes after a gradient was sent (clipping, another backward pass, zero_grad()) raises
    gradwire.FailedPrecondition.

    early_updates=True, with overlap=True, applies updates as they come, while backward still runs, to parameters whose gradients
    it has made and sent, as an optimizer in backward does: step() then waits for the last of them alone. For loops in which
    nothing reads a parameter once its gradient is there: no retain_graph or create_graph, no second use as p.detach(). What ends
    between backward() and step() (an exception, Ctrl-C) leaves some parameters a step ahead of others. Parameters in host
    memory, rounds that are not asynchronous.

    unused: torch leaves a parameter without a gradient alone; shards see a gradient of 0. "refuse" (the default): where
    the two differ (weight decay; momentum of gradients before; a first gradient in a later step, which torch's AdamW
    counts anew) step() raises gradwire.FailedPrecondition. "zeros": a missing gradient counts as 0. Parameters that are
    frozen when the optimizer is made are not part of the job.

    Only step() may write into the parameters: where something else wrote into one (load_state_dict, clamp_), the next
    step() raises gradwire.FailedPrecondition before anything is sent, unless reset_parameters() has brought the values
    to the shards and to all workers, or borrowed_parameters() has put the former ones back.

    quorum=k lets a round close over workers that are late, see JobSpec. A worker that was late or away for rounds catches
    up in step(): parameters jump to where the others are, and skipped_rounds says how many rounds step() passed over.
    Advance a learning-rate scheduler by as many, so that it agrees with the other workers'.

    rounds="bounded:S" lets a worker run up to S rounds ahead of the slowest one: step() returns without the last S updates,
    which come with later steps. drain() waits for them; close(), save() and state_dict(checkpoint=True) do so by themselves.

    rounds="async" makes every worker's step a step of the job, and none waits for another: see JobSpec. Learning rates are
    those of a batch of one worker. pull is then "params" (the default) or "params_bf16", else "update" (the default).

    step() raises gradwire.InvalidArgument for a non-finite gradient (nonfinite="sanitize" counts it as 0 instead, "skip"
    skips the step), gradwire.Unavailable when a shard is lost, gradwire.DeadlineExceeded when other workers are slow:
    then call step() again, without another backward pass; a closure is not run again. So after Ctrl-C in step().

    nonfinite="skip" is for loops that scale their loss (fp16 autocast): where a gradient of any worker is not finite,
    all workers and shards skip the step; parameters, moments and residuals stay as they were. A torch.amp.GradScaler on
    every worker works as it stands: all lower their scale together. After step(), `skipped` says whether the step was
    skipped, the same on every worker, and stats()["nonfinite_rounds"] how often. Without a GradScaler, set loss_scale:
    gradients are divided by it as they are sent. With max_workers=1 a GradScaler needs no nonfinite="skip".

    bucket_bytes, slice_bytes, table_bucket_bytes, run_elements: how the parameters are cut for their way, see JobSpec.

    durability: "none", or "fsync", "interval" or "interval:500" (milliseconds) on servers with --data-dir: then a shard
    server that is killed comes back with every version that anyone saw, and step() goes on when it is there.
    on_disk_failure: "wait" or "continue", see JobSpec.

    Only learning rates may change during a job. Any other changed hyper-parameter of a group makes the next step() raise
    gradwire.FailedPrecondition; nothing is ignored.

    state_dict() holds the parameter groups: what else an optimizer has lies on the shards. save() writes a checkpoint of this
    worker to a file: parameters, moments, residuals, the preconditioner, and which version of which job they belong to;
    state_dict(checkpoint=True) holds one, for torch.save. Call either between two steps. To go on from it, make the optimizer
    with resume_from=, such a state or a path. While the shards wait for this worker's next step (the checkpoint was taken after the last step, and this
    worker is back within its lease), that is as if nothing had happened; else parameters come from the shards,
    residuals from the checkpoint: session.resumed tells which of the two. The training loop restores what is its own:
    its place in the data, schedulers, random numbers.

    Where the servers do not have the job of a state (durability "none" and a server was started again, or job= is another
    name), resume_from begins it: parameters, residuals and the preconditioner are those of the state, moments that shards
    kept begin at 0.

    exist: "join" goes on with a job of this name that was trained before, from the shards' parameters, which the logger
    `gradwire` tells; "new" begins it anew unless it has workers; "error" refuses. worker: see gradwire.join; a process that
    is killed and started again takes its place again. An optimizer that was not closed leaves when the interpreter ends, and
    when the same thread makes another one for the job (a cell of a notebook that runs again).

    trace: of which rounds a file shows where their time goes, on this worker and on the shards; see gradwire.Trace.

    load_state_dict() restores the learning rates, and whatever schedulers keep in the groups; it raises ValueError for
    the state of another optimizer and for other hyper-parameters than the job's. Loading the state of another version or
    job warns: parameters and moments live on the shards and stay as they are.
    """

    closed, superseded = True, False  # of a copy, which is in no job

    def __init__(self, params: Any, *, servers: str | Sequence[str], job: str, worker: str | None = None,
                 workers: int = 1, max_workers: int | None = None, push: str | None = None,
                 optimizer: str | None = None, lr: float = 1e-3, momentum: float = 0.0, nesterov: bool = False,
                 betas: tuple[float, float] | None = None, eps: float | None = None, weight_decay: float = 0.0,
                 clip_norm: float = 0.0, residual_decay: float | None = None, codec: str = DEFAULT_CODEC,
                 update_codec: str | None = None, rules: Sequence[Rule] | None = None,
                 roles: dict[str, str] | None = None, nonfinite: str = "refuse", pull: str | None = None,
                 accumulate: int = 1, overlap: bool = False, unused: str = "refuse", lease_ms: int = 10_000, quorum: int = 0,
                 quorum_deviations: float = 0.0, rounds: str = "sync", bucket_bytes: int = 0,
                 slice_bytes: int = 0, table_bucket_bytes: int = 0, run_elements: int = 0, seed: int = 0,
                 durability: str = "none", on_disk_failure: str = "wait",
                 connect_timeout: float = 20.0, start_timeout: float = 600.0,
                 rpc_timeout: float = 10.0, round_timeout: float = 600.0, reconnect_timeout: float = 60.0, backend: str = "auto",
                 place: str = "auto",
                 resume_from: str | os.PathLike[str] | Mapping[str, Any] | None = None, exist: str = "join",
                 encode_threads: int | None = None, trace: Trace | None = None, early_updates: bool = False):
        if accumulate < 1:
            raise ValueError(f"accumulate={accumulate} must be at least 1")
        if early_updates and not overlap:
            raise ValueError("early_updates=True needs overlap=True: without it no gradient is sent before step()")
        check_place(place)
        pull = pull or ("params" if rounds.startswith("async") else "update")
        training = training_with(codec, push, optimizer, betas, eps, residual_decay)
        push, optimizer, betas, eps = training.push, training.optimizer, training.betas, training.eps
        groups, frozen = named_groups(params)
        check_options(groups, lr)
        names = [group.pop("_names") for group in groups]
        roles = roles_of(roles, [name for group in names for name in group], (name for name, _ in frozen))
        for i, group in enumerate(groups):
            if push == "step" and (tuple(group.get("betas", betas)), group.get("eps", eps)) != (tuple(betas), eps):
                raise ValueError(f"parameter group {i} has its own betas or eps: with push='step' all groups share them")
            if optimizer != "sgd" and (group.get("momentum", momentum) or group.get("nesterov", nesterov)):
                raise ValueError(f"momentum and nesterov are options of optimizer='sgd'; this one is {optimizer!r}")
        super().__init__(groups, dict(lr=lr, momentum=momentum, nesterov=nesterov, betas=betas, eps=eps,
                                      weight_decay=weight_decay))
        # Schedulers look here for what they may cycle (OneCycleLR: cycle_momentum), and say so where there is nothing.
        for key in ("momentum", "betas"):
            del self.defaults[key]
        self._params: list[torch.Tensor] = []
        self._names: list[str] = []
        specs: list[TensorSpec] = []
        for g, group in enumerate(self.param_groups):
            for name, p in zip(names[g], group["params"], strict=True):
                check_tensor(f"parameter {name!r}", p)
                specs.append(TensorSpec(name, tuple(p.shape), roles.get(name), g))
                self._params.append(p)
                self._names.append(name)
        check_apart(self._names, self._params)
        self.job = JobSpec(
            name=job, tensors=specs, optimizer=optimizer, clip_norm=clip_norm, push=push, codec=codec,
            update_codec=default_update_codec(codec, push, max_workers or workers, rounds) if update_codec is None else update_codec,
            rules=rules, nonfinite=nonfinite,
            groups=[Group(g["weight_decay"], g["momentum"], g["nesterov"], tuple(g["betas"]), g["eps"])
                    for g in self.param_groups],
            step_beta2=betas[1], step_eps=eps, residual_decay=training.residual_decay, workers=workers,
            max_workers=max_workers or workers, lease_ms=lease_ms, quorum=quorum, quorum_deviations=quorum_deviations,
            rounds=rounds, bucket_bytes=bucket_bytes, slice_bytes=slice_bytes, table_bucket_bytes=table_bucket_bytes,
            run_elements=run_elements, seed=seed, durability=durability, on_disk_failure=on_disk_failure)
        device = place_of(self.job, pull, self._params, place)
        self._masters = Masters(self._params, device)
        self._staging = Staging()
        self._beginning = threading.Lock()
        self._fixed = [fixed_of(g) for g in self.param_groups]
        self._presence = Presence(self.job, self._params, frozen, unused)
        self._accumulate = accumulate
        self._overlap = overlap
        self._sync = True
        self._skipped = 0
        self.skipped_rounds = 0
        self._nonfinite = 0
        self.skipped = False
        self._loss_scale = 1.0
        self._zeros: torch.Tensor | None = None
        self._by_rows: set[int] = set()  # tensors whose gradients came as rows
        self._replacing = False  # reset_parameters() began and has not ended
        self._forget_round()
        self._hooks: list[Any] = []
        self.named, self.closed = worker, False
        self.superseded = False  # closed because this thread made another one for the same job
        addresses = [servers] if isinstance(servers, str) else list(servers)
        with checkpoint_file(resume_from) as checkpoint:
            before = read_notes(*notes_of(checkpoint), checkpoint) if checkpoint else None
            if isinstance(resume_from, Mapping):
                check_state(resume_from, self._fixed)
            _lifetime.close_former(addresses, job, worker)
            self.session: Session = join(addresses, self.job, self._masters.tensors,
                                         worker, pull=pull, connect_timeout=connect_timeout,
                                         start_timeout=start_timeout, rpc_timeout=rpc_timeout,
                                         round_timeout=round_timeout, reconnect_timeout=reconnect_timeout,
                                         backend=backend, resume_from=checkpoint,
                                         exist=exist, trace=trace, early_updates=early_updates,
                                         encode_threads=threads_for(encode_threads, self._params, device))
        try:
            self._masters.publish()
            # Schedulers warn when they are advanced before a step: steps were made, by others or before.
            self._opt_called = self.start_step > 0
            if isinstance(resume_from, Mapping):
                self._load_groups(resume_from)
            if checkpoint and before and self.session.version > 0:
                self._presence.restore(before, checkpoint)
            self._watch = Watch(self._names, self._params, self._checksum_of_memory)
            self._hooks = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(self._params) if overlap]
        except BaseException:
            with contextlib.suppress(Exception):
                self.session.leave(drain=False)
            raise
        _lifetime.note_optimizer(self, addresses, job)

    @property
    def start_step(self) -> int:
        """How many steps the job had made when this optimizer was made, 0 for a job that begins: a loop that counts its steps or
        has a scheduler begins there. With asynchronous rounds they are those of all workers together."""
        return self.session.start_step

    # A round, as this worker sees it ----------------------------------------------------------------------------------

    def _forget_round(self) -> None:
        self._passes = [0] * len(getattr(self, "_params", ()))
        self._ready: dict[int, tuple[torch.Tensor | None, int]] = {}  # gradient as sent, its version counter
        self._rates: list[float] | None = None
        self._stepping = False  # everything was sent
        self._waiting = False  # a step() timed out or was interrupted, and is called again
        self._loss: Any = None  # of its closure
        self._scaling: _amp.Scaling | None = None

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def accumulated(_: torch.Tensor) -> None:
            if index in self._ready:
                raise FailedPrecondition(
                    f"the gradient of {self._names[index]!r} grew after it was sent: make the optimizer without overlap=True, "
                    "or wrap all but the last backward pass of a step in no_sync(), or pass accumulate=N")
            if not self._sync:
                return
            self._passes[index] += 1
            if self._passes[index] >= self._accumulate:
                gradient = self._gradient_of(index)
                self._begin()
                self._send(index, gradient, self._loss_scale)

        return accumulated

    def _begin(self) -> None:
        with self._beginning:  # backward has a thread for each device
            if self._rates is not None:
                return
            check_fixed(self.param_groups, self._fixed)
            self._check_memory()
            rates = self._current_rates()
            self.session.begin_round(rates)
            self._rates = rates

    def _send(self, index: int, gradient: torch.Tensor | None, scale: float) -> None:
        grad = self._params[index].grad
        if grad is None or gradient is None:
            master = self._masters.tensors[index]
            if index in self._by_rows:
                self.session.rows_ready(index, torch.empty(0, dtype=torch.int64), master.new_empty((0, *master.shape[1:])))
            else:
                self.session.tensor_ready(index, self._zero_gradient(master))
            self._ready[index] = (None, 0)
            return
        if gradient.is_sparse:
            self._by_rows.add(index)
            rows, values = rows_of(gradient)
            self.session.rows_ready(index, rows, values if scale == 1.0 else values.mul_(1.0 / scale))
            self._ready[index] = (grad, grad._version)
            return
        if scale != 1.0:
            gradient.mul_(1.0 / scale)
        at_place = gradient if self._masters.tensors[index].is_cuda else self._staging.bring(index, gradient)
        self.session.tensor_ready(index, at_place)
        self._ready[index] = (grad, grad._version)

    def _zero_gradient(self, master: torch.Tensor) -> torch.Tensor:
        elements = master.numel()
        if self._zeros is None or self._zeros.numel() < elements:
            self._zeros = torch.zeros(elements, dtype=torch.float32, device=master.device)
        return self._zeros[:elements]

    def _current_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups]

    def _check_memory(self) -> None:
        self._watch.loan.check_returned()
        if (name := self._watch.replaced()) is not None:
            raise FailedPrecondition(f"the memory of parameter {name!r} was replaced (p.data = ...): the session updates the "
                                     "old one. Make a new optimizer and a new job")
        if (name := self._watch.written()) is not None:
            remedy = "call reset_parameters() on every worker behind it" if self.session.version > 0 else \
                "write them before the optimizer is made"
            raise FailedPrecondition(
                f"{name} was written to outside of step() (load_state_dict, clamp_, init): the shards and the other "
                f"workers do not have these values; {remedy}")

    def _gradient_of(self, index: int) -> torch.Tensor | None:
        """As the session takes it. Before the round begins: what fails here leaves none open."""
        grad = self._params[index].grad
        if grad is None:
            return None
        check_tensor(f"the gradient of {self._names[index]!r}", grad)
        return gradient_of(grad, by_rows=not grad.is_cuda)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Raises where gradients are with the shards already: with overlap=True, or where step() has not ended."""
        if self._rates is not None:
            raise FailedPrecondition(
                "step() timed out or was interrupted, and its round is still open: call step() again" if self._stepping else
                "gradients of this backward pass were sent already (overlap=True) and cannot be discarded: call step() first, or "
                "make the optimizer without overlap=True" if self._overlap else
                "step() was interrupted while it sent gradients: call step() again")
        self._forget_round()
        super().zero_grad(set_to_none)

    def _check_sent(self) -> None:
        """Raises where a gradient or a learning rate was changed after backward sent gradients: torch would still count it."""
        for index, (grad, version) in self._ready.items():
            now = self._params[index].grad
            if now is not grad or (grad is not None and grad._version != version):
                raise FailedPrecondition(
                    f"the gradient of {self._names[index]!r} was changed between backward() and step(), after it was sent "
                    "(gradient clipping?): make the optimizer without overlap=True")
        if self._rates is not None and self._rates != self._current_rates():
            raise FailedPrecondition("a learning rate was changed between backward() and step(), after the round had begun: "
                                     "change it behind step(), or make the optimizer without overlap=True")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Sends the gradients that backward has not sent yet, waits for the update of this round and applies it."""
        _lifetime.check_open(self)
        if not self._waiting:
            self._loss = None
            if closure is not None:
                with torch.enable_grad():
                    self._loss = closure()
        loss = self._loss
        if not self._stepping and not self._send_all():
            self.skipped = True
            self._forget_round()
            return loss
        self._stepping = self._waiting = True
        self._end_round(self._round_closed, self._forget_round)
        return loss

    def _end_round(self, closed: Callable[[], None], lost: Callable[[], None]) -> None:
        """Waits for the round that is open, and calls `closed` behind its end, `lost` where it cannot end. An error may be behind
        its end, too: one of the round (a gradient that was refused), and Ctrl-C. Behind a timeout, and Ctrl-C in the middle, the
        round stays open."""
        rounds = self.session.stats()["steps"]
        try:
            self.session.end_round()
        except BaseException as error:
            if self.session.stats()["steps"] > rounds:
                closed()
            elif isinstance(error, Exception) and not isinstance(error, TimeoutError):
                lost()
            raise
        closed()

    def _round_closed(self) -> None:
        self._masters.publish()
        stats = self.session.stats()
        before, self._skipped = self._skipped, int(stats["skipped_rounds"])
        self.skipped_rounds = self._skipped - before
        before, self._nonfinite = self._nonfinite, int(stats["nonfinite_rounds"])
        self.skipped = self._nonfinite > before
        if not self.skipped or self.job.rounds != "sync":
            self._watch.updated()
        self._presence.note()
        self._watch.note()
        if self._scaling is not None:
            self._scaling.tell(self, self.skipped)
        self._forget_round()

    def send(self) -> None:
        """Sends all gradients now; step() then only waits for the update. For loops that do something else meanwhile: until step()
        returns, gradients, parameters and learning rates stay as they are (parameters change with early_updates=True)."""
        if not self._stepping and self._send_all():
            self._stepping = True

    def reset_parameters(self) -> None:
        """What was written into the parameters becomes the job's: on the shards, and on every worker.

        For model.load_state_dict(), clamp_(), a new init of a layer in mid-job. Every worker calls it, behind the same
        step and with the same values, to the last bit. Gradients, moments and residuals stay, and the step counts of
        optimizers do not move. Not before the first step. gradwire.DeadlineExceeded: others are slow, call it again;
        gradwire.FailedPrecondition: another worker stepped instead, or has other values; this session is over then.
        gradwire.GradwireError with quorum, rounds other than "sync", and codec powersgd.
        """
        if self._rates is not None:
            raise FailedPrecondition("gradients of this step were sent already: call reset_parameters() behind step()")
        self._watch.loan.check_returned()
        if (name := self._watch.replaced()) is not None:
            raise FailedPrecondition(f"the memory of parameter {name!r} was replaced (p.data = ...): the session updates the "
                                     "old one. Write into it instead (p.data.copy_), or make a new optimizer and a new job")
        if not self._replacing:
            self._masters.take()
            self.session.begin_replacement()
            self._replacing = True
        self._end_round(self._replaced, self._not_replaced)

    def _not_replaced(self) -> None:
        self._replacing = False

    def _replaced(self) -> None:
        self._replacing = False
        self._masters.publish()
        self._watch.updated()
        self._watch.accept()

    def _send_all(self) -> bool:
        """Checks all that may still fail, then sends what backward has not sent. False: nothing was sent, for a GradScaler found
        an infinity and no other worker needs to hear of it, or torch only wants to see what an optimizer keeps."""
        if not self._ready and not any(self._current_rates()) and looked_at_by_torch():
            return False
        scale = self._loss_scale
        overflow = False
        if (scaling := _amp.take(self)) is not None or self._overlap or self._rates is None:  # else an interrupted step() goes on
            self._scaling = scaling
        if self._scaling is not None:
            self._scaling.check(self.job, self._overlap)
            scale *= self._scaling.grad_scale
            overflow = self._scaling.found_inf
            if overflow and self.job.nonfinite != "skip":
                return False
        if self._replacing:
            raise FailedPrecondition("reset_parameters() timed out or was interrupted, and its round is still open: call it again")
        self._check_sent()
        self._presence.check()
        gradients = {index: self._gradient_of(index) for index in range(len(self._params)) if index not in self._ready}
        self._begin()
        for index in reversed(range(len(self._params))):
            if overflow and index == 0:  # whatever became of the infinity meanwhile, all skip this step
                poison = torch.full_like(self._masters.tensors[0], math.nan)
                self.session.tensor_ready(0, poison)
                self._ready[0] = (poison, poison._version)
            elif index not in self._ready:
                self._send(index, gradients[index], scale)
        return True

    @contextlib.contextmanager
    def borrowed_parameters(self) -> Iterator[None]:
        """Between two steps, for an evaluation with other values (averaged weights): what is written into the parameters inside is
        undone at the end. Keeps a copy of them meanwhile."""
        if self._rates is not None:
            raise FailedPrecondition("gradients of this step were sent already: borrow the parameters behind step()")
        self._check_memory()
        with self._watch.loan.lend():
            yield

    # What GradScaler.step() hands over while it calls step().
    _step_supports_amp_scaling = True
    grad_scale = _amp.HandedOver()
    found_inf = _amp.HandedOver()

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss of the coming backward passes is multiplied: each .grad is divided by it when sent."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        scale = float(scale)
        if not 0.0 < scale < math.inf:
            raise ValueError(f"loss_scale={scale!r} must be a finite number above 0")
        if self._rates is not None and scale != self._loss_scale:
            raise FailedPrecondition("loss_scale was changed between backward() and step(), after gradients were sent: set "
                                     "it before backward()")
        self._loss_scale = scale

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; nothing is sent."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # State ------------------------------------------------------------------------------------------------------------

    def state_dict(self, *, checkpoint: bool = False) -> dict[str, Any]:
        """The parameter groups, and which version of which job they belong to. checkpoint=True: also what save() writes, for
        resume_from; between two steps, like save()."""
        kept = {"checkpoint": kept_checkpoint(self.save)} if checkpoint else {}
        state = super().state_dict()
        state["gradwire"] = {"job": self.job.name, "version": self.session.version, **kept}
        return state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a checkpoint of this worker for resume_from. Between two steps; replaced at once or not at all."""
        self.drain()
        self.session._save(path, self._presence.notes())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._load_groups(state_dict)
        taken, here = state_dict["gradwire"], {"job": self.job.name, "version": self.session.version}
        if {key: taken[key] for key in here} != here:
            warnings.warn(f"this state is of version {taken['version']} of job {taken['job']!r}; this is version "
                          f"{here['version']} of job {here['job']!r}: learning rates are restored, parameters and moments "
                          "stay as they are. To begin or go on with the parameters of a state, take it by "
                          "state_dict(checkpoint=True) and pass resume_from=state to ShardedOptimizer", stacklevel=2)

    def _load_groups(self, state_dict: Mapping[str, Any]) -> None:
        check_state(state_dict, self._fixed)
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "gradwire"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "session"):
            raise FailedPrecondition("a job's tensors are fixed when it is created: make a new optimizer and a new job")
        super().add_param_group(param_group)

    def stats(self) -> dict[str, float]:
        """Totals of the session: bytes on the wire, deferred elements, seconds spent."""
        return self.session.stats()

    def digest(self) -> str:
        """SHA-256 of the parameters; equal on all workers after the same step (with rounds="bounded:S", after drain())."""
        return self.session.digest()

    def _updates_came(self, before: int) -> bool:
        """Whether the version is no longer `before`; then parameters are those of their masters. Else they are let be: what was
        written into them since is the caller's."""
        if self.session.version == before:
            return False
        self._masters.publish()
        self._watch.updated()
        return True

    def _checksum_of_memory(self) -> int:
        return self.session.checksum() if self._masters.published() else -1  # -1: not what the masters are

    def drain(self) -> None:
        """Between two steps: waits until all that this worker pushed is in the parameters. At once with rounds="sync"."""
        self._watch.loan.check_returned()
        before = self.session.version
        try:
            self.session.drain()
        except Exception:
            self._updates_came(before)
            self._watch.drained()  # some may have come in part
            raise
        if self._updates_came(before):
            self._watch.drained()

    def close(self, drain: bool = True) -> None:
        """Leaves the job, after drain() unless drain=False. The parameters stay as they are then."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.closed = True
        before = self.session.version
        self.session.leave(drain)
        self._updates_came(before)

    def __enter__(self) -> ShardedOptimizer:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        _lifetime.leave_behind(self.close, kind is None)
