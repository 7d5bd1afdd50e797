"""What `training` trains, and how it may do as if: a model whose passes sleep and give gradients that were recorded."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[3] / "client/examples/gpt"))

from data import load_corpus, training_batch, validation_batch
from model import Gpt, GptConfig
from recommender import Recommender

# name: configuration, sequences per worker and step
GPTS = {
    "gpt-1m": (GptConfig(), 8),
    "gpt-5m": (GptConfig(width=256, layers=6), 4),
    "gpt-25m": (GptConfig(width=512, layers=8, heads=8), 2),
    "gpt-deep": (GptConfig(width=64, layers=48), 4),  # 2.4 million parameters in 291 tensors
}
RECOMMENDER = "recommender"
MODELS = (*GPTS, RECOMMENDER)
VALIDATION_WINDOWS = 128
RECORDED_STEPS = 2
FORWARD_SHARE = 1 / 3  # of a step's computing


class Text:
    """A byte-level GPT on the text of the Python library. The same seed gives the same model on every worker."""

    plain_sgd = False  # AdamW

    def __init__(self, name: str, seed: int):
        config, self._sequences = GPTS[name]
        self._seed, self._context = seed, config.context_tokens
        self.module = Gpt(config, seed)
        self.units: list[nn.Module] = list(self.module.blocks)  # what FSDP gathers in one piece
        corpus = load_corpus()
        self._train = corpus.train
        self._held_out = validation_batch(corpus.validation, VALIDATION_WINDOWS, self._context)

    def batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        return training_batch(self._train, self._seed, worker, step, self._sequences, self._context)

    def loss(self, forward: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(forward(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def held_out(self, forward: Callable[..., Any]) -> float:
        return self.loss(forward, self._held_out).item()


Task = Text | Recommender


def make(name: str, seed: int, sparse: bool) -> Task:
    """sparse: embeddings that are drawn from large tables have sparse gradients."""
    return Recommender(seed, sparse) if name == RECOMMENDER else Text(name, seed)


class _Part:
    """A module whose passes take `seconds` and give the recorded gradients of its parameters, one step after the other."""

    def __init__(self, module: nn.Module, seconds: float, recorded: list[list[Tensor]]):
        self.module, self.seconds, self._recorded = module, seconds, recorded
        self._step = 0

    def __call__(self, x: Tensor, *_: Any) -> Tensor:
        return _Pass.apply(x, self, *self.module.parameters())

    def gradients(self) -> list[Tensor]:
        self._step += 1
        return self._recorded[self._step % len(self._recorded)]


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: _Part, *parameters: Tensor) -> Tensor:
        time.sleep(part.seconds * FORWARD_SHARE)
        ctx.part = part
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.part.seconds * (1 - FORWARD_SHARE))
        return gradient, None, *ctx.part.gradients()


def replay(task: Task, seconds: float, worker: int) -> None:
    """From here on a step of `task` takes `seconds`, next to no processor, and gives gradients that its first batches gave.

    Names, shapes and units stay: loops that wrap the module see what they see of the real one.
    """
    module = task.module
    recorded: list[dict[str, Tensor]] = []
    for step in range(RECORDED_STEPS):
        task.loss(module, task.batch(worker, step)).backward()
        recorded.append({name: p.grad for name, p in module.named_parameters()})
        module.zero_grad()
    total = sum(p.numel() for p in module.parameters())
    parts = list(_parts(module, task.units))
    for prefix, part in parts:
        names = [f"{prefix}.{name}" for name, _ in part.named_parameters()]
        share = sum(p.numel() for p in part.parameters()) / total
        part.forward = _Part(part, seconds * share, [[r[name] for name in names] for r in recorded])

    def forward(x: Tensor) -> Tensor:
        for _, part in parts:
            x = part(x)
        return x

    module.forward = forward
    task.loss = lambda forward, batch: forward(torch.zeros(1, requires_grad=True)).sum()


def _parts(module: nn.Module, units: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have all parameters between them, in the order of the forward pass."""
    for name, child in module.named_children():
        if any(unit in set(child.modules()) - {child} for unit in units):
            for inner, unit in child.named_children():
                yield f"{name}.{inner}", unit
        else:
            yield name, child
