"""What a job is, in plain Python types. Every worker passes the same one; shards refuse a difference."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

ROLES = ("embedding", "attention", "mlp", "norm", "bias", "head", "other")
_OPTIMIZERS = ("none", "sgd", "adamw", "step")
_PUSHES = ("gradient", "step", "delta")
_POLICIES = ("refuse", "sanitize")


def _choice(field: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{field}={value!r} must be one of {', '.join(map(repr, allowed))}")
    return value.upper()


@dataclasses.dataclass
class TensorSpec:
    """A named parameter. `role`: one of ROLES, or None to derive it from name and shape."""

    name: str
    shape: Sequence[int]
    role: str | None = None
    group: int = 0

    def _dict(self) -> dict[str, Any]:
        d: dict[str, Any] = {"name": self.name, "shape": [int(n) for n in self.shape], "group": self.group}
        if self.role is not None:
            d["role"] = "ROLE_" + _choice(f"role of tensor {self.name!r}", self.role, ROLES)
        return d


@dataclasses.dataclass
class Rule:
    """Tensors that match every condition travel by `codec`; the first matching rule counts."""

    codec: str
    pattern: str = ""  # glob over the name
    roles: Sequence[str] = ()
    max_elements: int = 0

    def _dict(self) -> dict[str, Any]:
        return {"codec": self.codec, "pattern": self.pattern, "max_elements": self.max_elements,
                "roles": ["ROLE_" + _choice("role of a rule", r, ROLES) for r in self.roles]}


@dataclasses.dataclass
class Group:
    """Hyper-parameters of one parameter group. The learning rate travels with every round instead."""

    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def _dict(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay, "momentum": self.momentum, "nesterov": self.nesterov,
                "beta1": self.betas[0], "beta2": self.betas[1], "epsilon": self.eps}


def sparse(codec: str) -> bool:
    """Does this codec send a few elements per step and keep the rest?"""
    return codec.split(":", 1)[0] == "tagc"


def default_rules(codec: str) -> list[Rule]:
    """With a sparse codec, norms, biases and tensors below 1024 elements travel dense, as 16-bit fixed point."""
    if not sparse(codec):
        return []
    return [Rule("dense:values=fixed16", roles=("norm", "bias")), Rule("dense:values=fixed16", max_elements=1023)]


@dataclasses.dataclass
class JobSpec:
    """A training run. `tensors` in forward order.

    push: "gradient" (the shards run the optimizer), "step" (gradients preconditioned by each worker's second moment;
    use optimizer="step") or "delta". workers: how many must join before the first round, and the most there can be
    unless max_workers says otherwise. rules: None stands for default_rules(codec).
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
    run_elements: int = 0
    seed: int = 0

    def to_json(self) -> str:
        """The job in protobuf's JSON form."""
        rules = default_rules(self.codec) if self.rules is None else self.rules
        return json.dumps({
            "name": self.name,
            "tensors": [t._dict() for t in self.tensors],
            "optimizer": {"kind": "OPTIMIZER_" + _choice("optimizer", self.optimizer, _OPTIMIZERS),
                          "groups": [g._dict() for g in self.groups]},
            "push": "PUSH_" + _choice("push", self.push, _PUSHES),
            "step": {"beta2": self.step_beta2, "epsilon": self.step_eps, "residual_decay": self.residual_decay},
            "rules": [r._dict() for r in rules],
            "codec": self.codec,
            "nonfinite": "NONFINITE_" + _choice("nonfinite", self.nonfinite, _POLICIES),
            "min_workers": self.workers,
            "max_workers": self.max_workers or self.workers,
            "lease_ms": self.lease_ms,
            "bucket_bytes": self.bucket_bytes,
            "run_elements": self.run_elements,
            "seed": self.seed,
        })
