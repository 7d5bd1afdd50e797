"""What a job is, in plain Python types. Every worker passes the same one; shards refuse a difference."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Sequence
from typing import Any

from . import _core

ROLES = ("embedding", "attention", "mlp", "norm", "bias", "head", "other")
# 1 % of the elements as a sign each, after 40 rounds in which the density falls from 5 %.
DEFAULT_CODEC = "tagc:density=0.01,bits=2,warmup_rounds=40,warmup_density=0.05"
_SMALL = "dense:values=fixed16"  # what travels dense beside a codec that is not
_OPTIMIZERS = ("none", "sgd", "adamw", "lamb", "lans", "lion", "step")
_PUSHES = ("gradient", "step", "delta")
_POLICIES = ("refuse", "sanitize", "skip")
_DURABILITIES = ("none", "interval", "fsync")
_DISK_FAILURES = ("wait", "continue")
_ROUNDS = ("sync", "bounded", "async")


def _choice(field: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{field}={value!r} must be one of {', '.join(map(repr, allowed))}")
    return value.upper()


def _whole(field: str, value: Any, least: int, bits: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{field}={value!r} must be a whole number")
    number = operator.index(value)
    if not least <= number < 1 << bits:
        raise ValueError(f"{field}={number} must be from {least} to {(1 << bits) - 1}")
    return number


def _real(field: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{field}={value!r} must be a finite number")
    return number


def _not_zero(field: str, value: float) -> None:
    if value == 0:
        raise ValueError(f"{field}=0 is not supported; use a small number, such as 1e-30")


def _durability(durability: str, on_disk_failure: str) -> dict[str, Any]:
    level, colon, interval_ms = durability.partition(":")
    if colon and (level != "interval" or not interval_ms.isdecimal() or not 1 <= int(interval_ms) <= 600_000):
        raise ValueError(f"durability={durability!r}: only 'interval' takes a number, of milliseconds from 1 to 600000: "
                         "'interval:500'")
    return {"level": "DURABILITY_" + _choice("durability", level, _DURABILITIES),
            "interval_ms": int(interval_ms or 0),
            "on_failure": "DISK_FAILURE_" + _choice("on_disk_failure", on_disk_failure, _DISK_FAILURES)}


def _rounds(rounds: str) -> dict[str, Any]:
    mode, colon, staleness = rounds.partition(":")
    most = {"bounded": 16, "async": 256}.get(mode, 0)
    if (mode == "bounded" and not colon) or (colon and not (staleness.isdecimal() and 1 <= int(staleness) <= most)):
        raise ValueError(f"rounds={rounds!r}: 'bounded' takes the number of rounds that a worker may be ahead, from 1 to 16: "
                         "'bounded:2'; 'async' may take how many versions old a contribution may be, from 1 to 256: "
                         "'async:64'; 'sync' takes none")
    return {"mode": "ROUNDS_" + _choice("rounds", mode, _ROUNDS), "staleness": int(staleness or 0)}


@dataclasses.dataclass
class TensorSpec:
    """A named parameter. `role`: one of ROLES, or None to derive it from name and shape."""

    name: str
    shape: Sequence[int]
    role: str | None = None
    group: int = 0

    def _dict(self) -> dict[str, Any]:
        d: dict[str, Any] = {"name": self.name,
                             "shape": [_whole(f"shape of tensor {self.name!r}", n, 0, 64) for n in self.shape],
                             "group": _whole(f"group of tensor {self.name!r}", self.group, 0, 32)}
        if self.role is not None:
            d["role"] = "ROLE_" + _choice(f"role of tensor {self.name!r}", self.role, ROLES)
        return d


@dataclasses.dataclass
class Rule:
    """Tensors that match every condition travel by `codec`, and back by `update_codec`; the first matching rule counts."""

    codec: str
    pattern: str = ""  # glob over the name
    roles: Sequence[str] = ()
    max_elements: int = 0
    update_codec: str = ""

    def _dict(self) -> dict[str, Any]:
        return {"codec": self.codec, "update_codec": self.update_codec, "pattern": self.pattern,
                "max_elements": _whole("max_elements of a rule", self.max_elements, 0, 64),
                "roles": ["ROLE_" + _choice("role of a rule", r, ROLES) for r in self.roles]}


@dataclasses.dataclass
class Group:
    """Hyper-parameters of one parameter group. The learning rate travels with every round instead."""

    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def _dict(self, optimizer: str) -> dict[str, Any]:
        if len(self.betas) != 2:
            raise ValueError(f"betas={self.betas!r} must be two numbers")
        if optimizer in ("adamw", "lamb", "lans", "lion"):
            _not_zero("betas[0]", self.betas[0])
            _not_zero("betas[1]", self.betas[1])
        if optimizer in ("adamw", "lamb", "lans"):
            _not_zero("eps", self.eps)
        return {"weight_decay": _real("weight_decay", self.weight_decay), "momentum": _real("momentum", self.momentum),
                "nesterov": bool(self.nesterov), "beta1": _real("betas[0]", self.betas[0]),
                "beta2": _real("betas[1]", self.betas[1]), "epsilon": _real("eps", self.eps)}


def default_push(codec: str, optimizer: str | None) -> str:
    """What workers push by this codec; an optimizer that was asked for, other than "step", gets gradients."""
    steps = optimizer in (None, "step") and _core.training_defaults(codec)["push_steps"]
    return "step" if steps else "gradient"


def default_optimizer(codec: str, push: str) -> str:
    """What the shards do with what workers push."""
    if push != "gradient":
        return "step"
    return "sgd" if _core.training_defaults(codec)["gradients_to_sgd"] else "adamw"


def default_update_codec(codec: str, push: str, workers: int, rounds: str = "sync") -> str:
    """What the shards send back by: the elements that a sparse codec of reduced values pushed, in fewer bits. workers: the most that
    there can be. Of what all workers say alike, so not of what each pulls."""
    if rounds.startswith("async") or not _core.training_defaults(codec)["union_back"]:
        return ""
    # A second moment of the gradients of many wants more digits.
    return "union:values=int4" if push == "step" or workers <= 2 else "union:values=int6"


def residual_decay_of(push: str, residual_decay: float | None) -> float:
    """What the caller said, or what goes with what is pushed."""
    if residual_decay is not None:
        return residual_decay
    return 0.98 if push == "step" else 1.0


@dataclasses.dataclass(frozen=True)
class Training:
    """How a codec is trained with."""

    push: str
    optimizer: str
    betas: tuple[float, float]
    eps: float
    residual_decay: float


def training_with(codec: str, push: str | None, optimizer: str | None, betas: tuple[float, float] | None, eps: float | None,
                  residual_decay: float | None) -> Training:
    """What the caller said, and what goes with it where that is None."""
    push = push or default_push(codec, optimizer)
    optimizer = optimizer or default_optimizer(codec, push)
    steps = push == "step"
    return Training(push, optimizer, betas or ((0.9, 0.99) if steps or optimizer == "lion" else (0.9, 0.999)),
                    (1e-6 if optimizer in ("lamb", "lans") else 1e-8) if eps is None else eps,
                    residual_decay_of(push, residual_decay))


def default_rules(codec: str, dense_roles: Sequence[str] = ()) -> list[Rule]:
    """With a sparse codec, norms, biases and tensors below 1024 elements travel dense, as 16-bit fixed point.

    dense_roles: what else does, with any codec that is not dense itself. ("attention", "embedding") is the layer-selective
    compression of TAGC: ShardedOptimizer(..., rules=default_rules(codec, ("attention", "embedding"))). Roles come from names
    as torch.nn.Transformer, nanoGPT and Hugging Face's models have them (guess_role); `roles=` sets others right.
    """
    small_dense = _core.training_defaults(codec)["small_dense"]
    roles = [*(("norm", "bias") if small_dense else ()), *dense_roles]
    rules = [Rule(_SMALL, roles=roles)] if roles else []
    return [*rules, Rule(_SMALL, max_elements=1023)] if small_dense else rules


@dataclasses.dataclass
class JobSpec:
    """A training run. `tensors` in forward order.

    push: "gradient" (the shards run the optimizer), "step" (gradients preconditioned by each worker's second moment;
    use optimizer="step") or "delta" (how far the training loop came by itself). residual_decay: what waits in the residual
    of a sparse codec is multiplied by this before the next step or delta is added; above 0, at most 1.
    optimizer: one of "none", "sgd", "adamw", "lamb", "lans", "lion", "step"; "lamb" and "lans" step by layer, with the
    norms of whole tensors, on however many shards these lie. clip_norm: the mean of all tensors is scaled down to this
    norm before it is applied (0: it is not). For "lamb", "lans" and clip_norm, shard servers must reach each other at
    the addresses that workers use. workers: how many must join before the first round, and the most there can be unless
    max_workers says otherwise. rules: None stands for default_rules(codec).
    bucket_bytes: of float32, over all shards; 0 is 4 MiB, and where all elements travel (dense, thc ...) a 32nd of the model if
    that is less, 512 KiB at least. On a slow link a round takes as long as its bytes and, once more, one bucket; on a fast one
    each bucket costs its ends a little of their cores: say 4 MiB where all elements travel at 10 Gbit/s or more.
    table_bucket_bytes: the same of tables (zen); 0 is bucket_bytes, and where that is 0 a 16th of the tables, 4 to 64 MiB.
    slice_bytes: where there are so many shards that their shares of a bucket are smaller, about how much of it lies on one of
    them together (embeddings and heads a 16th, where all elements travel a 64th): each slice is a frame each way in a round.
    0: a bucket lies on all shards, but where bucket_bytes is 0 and the codec sends few elements it is 1 MiB. To go on with a
    job from before there was slice_bytes, or table_bucket_bytes, say its bucket_bytes; with one by zen that was made before it
    chose its run, say "zen:run=16" and its table_bucket_bytes, as `gradwire job describe --json` tells them.
    update_codec: the codec by which shards compress what they send back, for example "topk:density=0.001,values=fp16";
    they keep what it drops for the next round. "" sends the mean as it is. A rule has an update_codec of its own.
    nonfinite: what becomes of a gradient with infinities or NaN: "refuse" (an error names the element, and this worker leaves
    the buckets of that tensor to the others), "sanitize" (such elements count as 0) or "skip" (the step is skipped by all
    workers and on all shards, as with a GradScaler; stats()["nonfinite_rounds"] counts). "skip" needs rounds="sync" and an
    optimizer.
    durability: "fsync" (no version is seen before it is on the shards' disks), "interval" (written at once, synced every
    second) or "interval:500" (every 500 ms; up to so much is lost with the power, nothing with the process), or "none" (a
    shard that dies takes the job with it). Other than with "none", every shard server needs --data-dir. on_disk_failure:
    rounds "wait" until the disk is well, or "continue" without it, which the job's status tells.
    quorum: a round may close with this many workers when the others are late (0: it waits for all). How long a round
    waits is learned from how late workers usually are: median + quorum_deviations (0: 6) times the median deviation,
    and at most as long as the quorum itself took. What comes too late is sent again with the next round; a worker that
    is rounds behind catches up in end_round() and counts them in stats()["skipped_rounds"].
    rounds: "sync", or "bounded:S" (1 to 16): end_round() waits for all rounds but the last S, so that a worker may be
    up to S rounds ahead of the slowest; gradients are then computed on parameters that lack at most S updates, and
    every round still merges all workers. Not together with a quorum or optimizer="none". "async": nobody waits for
    anybody. Every contribution is a step of its own, on whatever the parameters are by then, so a job makes as many
    steps as all workers together; two runs differ. A contribution that was computed on parameters more than S versions
    old ("async:S", 1 to 256; without it 8 per worker, at least 32) comes with the next round instead. Workers pull
    parameters: join with pull="params" or "params_bf16".
    """

    name: str
    tensors: Sequence[TensorSpec]
    optimizer: str = "adamw"
    groups: Sequence[Group] = (Group(),)
    push: str = "gradient"
    step_beta2: float = 0.999
    step_eps: float = 1e-8
    residual_decay: float = 1.0
    codec: str = "dense:values=fp32"
    rules: Sequence[Rule] | None = None
    nonfinite: str = "refuse"
    workers: int = 1
    max_workers: int = 0
    lease_ms: int = 10_000
    bucket_bytes: int = 0
    slice_bytes: int = 0
    table_bucket_bytes: int = 0
    run_elements: int = 0
    seed: int = 0
    durability: str = "none"
    on_disk_failure: str = "wait"
    quorum: int = 0
    quorum_deviations: float = 0.0
    rounds: str = "sync"
    update_codec: str = ""
    clip_norm: float = 0.0

    def to_json(self) -> str:
        """The job in protobuf's JSON form."""
        rules = default_rules(self.codec) if self.rules is None else self.rules
        workers = _whole("workers", self.workers, 1, 32)
        max_workers = _whole("max_workers", self.max_workers, 0, 32) or workers
        if max_workers < workers:
            raise ValueError(f"max_workers={max_workers} must not be below workers={workers}")
        if self.push == "step":
            _not_zero("step_beta2", self.step_beta2)
            _not_zero("step_eps", self.step_eps)
        if self.push != "gradient":
            _not_zero("residual_decay", self.residual_decay)
        elif self.residual_decay != 1 and math.isfinite(self.residual_decay):
            raise ValueError(f"residual_decay={self.residual_decay!r} is for push='step' and 'delta': what waits of a "
                             "gradient is never forgotten; leave it out")
        return json.dumps({
            "name": self.name,
            "tensors": [t._dict() for t in self.tensors],
            "optimizer": {"kind": "OPTIMIZER_" + _choice("optimizer", self.optimizer, _OPTIMIZERS),
                          "groups": [g._dict(self.optimizer) for g in self.groups]},
            "clip_norm": _real("clip_norm", self.clip_norm),
            "push": "PUSH_" + _choice("push", self.push, _PUSHES),
            "step": {"beta2": _real("step_beta2", self.step_beta2), "epsilon": _real("step_eps", self.step_eps),
                     "residual_decay": _real("residual_decay", self.residual_decay)},
            "rules": [r._dict() for r in rules],
            "codec": self.codec,
            "update_codec": self.update_codec,
            "nonfinite": "NONFINITE_" + _choice("nonfinite", self.nonfinite, _POLICIES),
            "min_workers": workers,
            "max_workers": max_workers,
            "lease_ms": _whole("lease_ms", self.lease_ms, 0, 32),
            "bucket_bytes": _whole("bucket_bytes", self.bucket_bytes, 0, 64),
            "slice_bytes": _whole("slice_bytes", self.slice_bytes, 0, 64),
            "table_bucket_bytes": _whole("table_bucket_bytes", self.table_bucket_bytes, 0, 64),
            "run_elements": _whole("run_elements", self.run_elements, 0, 32),
            "seed": _whole("seed", self.seed, 0, 64),
            "durability": _durability(self.durability, self.on_disk_failure),
            "rounds": {**_rounds(self.rounds), "quorum": _whole("quorum", self.quorum, 0, 32),
                       "deviations": _real("quorum_deviations", self.quorum_deviations)},
        })
