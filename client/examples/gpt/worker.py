"""One training worker of the demo: a process that trains a byte-level GPT through Gradwire's shard servers.

Reads its settings as JSON from argv[1], prints one JSON object per line: progress, then the result.
Started by quickstart.py; every setting is a field of WorkerSettings.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

import torch

from data import load_corpus, training_batch, validation_batch
from model import Gpt, GptConfig

import gradwire.torch

VALIDATION_WINDOWS = 256


@dataclass(frozen=True)
class WorkerSettings:
    """What one worker does. The job's fields are the same on every worker of a run."""

    servers: list[str]
    job: str
    worker: int
    workers: int
    seed: int
    steps: int
    sequences: int  # per worker and step
    lr: float
    warmup_steps: int  # of the learning rate
    clip_norm: float  # of each worker's gradient
    push: str  # "gradient" or "step"
    optimizer: str  # "adamw" or "step"
    codec: str
    update_codec: str  # of the way back; empty: none
    residual_decay: float | None
    betas: tuple[float, float]
    weight_decay: float
    evaluations: int  # of the validation loss, evenly spread over the run
    backend: str  # of the worker's arithmetic


def learning_rate(settings: WorkerSettings, step: int) -> float:
    """Linear warm-up, then constant; step counts from 0."""
    return settings.lr * min(1.0, (step + 1) / max(1, settings.warmup_steps))


def parameter_groups(model: Gpt, weight_decay: float) -> list[dict]:
    """Weight decay on matrices only, as usual."""
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


@torch.no_grad()
def validation_loss(model: Gpt, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean cross entropy in nats per byte over all windows, 32 at a time."""
    losses = [
        model.loss(inputs[i : i + 32], targets[i : i + 32]).item() * len(inputs[i : i + 32])
        for i in range(0, len(inputs), 32)
    ]
    return sum(losses) / len(inputs)


def emit(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def train(settings: WorkerSettings) -> None:
    torch.set_num_threads(1)
    config = GptConfig()
    model = Gpt(config, settings.seed)
    corpus = load_corpus()
    validation = validation_batch(corpus.validation, VALIDATION_WINDOWS, config.context_tokens)
    optimizer = gradwire.torch.ShardedOptimizer(
        parameter_groups(model, settings.weight_decay),
        servers=settings.servers,
        job=settings.job,
        worker=f"worker-{settings.worker}",
        workers=settings.workers,
        push=settings.push,
        optimizer=settings.optimizer,
        codec=settings.codec,
        update_codec=settings.update_codec,
        residual_decay=settings.residual_decay,
        # Both ways at 0.1 %, norms that travel dense would be two fifths of all bytes.
        rules=[] if settings.update_codec else None,
        backend=settings.backend,
        lr=settings.lr,
        betas=settings.betas,
        overlap=False,  # gradients are clipped between backward() and step()
        seed=settings.seed,
    )
    evaluate_at = {round((i + 1) * settings.steps / settings.evaluations) for i in range(settings.evaluations)}
    started = optimizer.session.stats()  # initial parameters have travelled; they are not counted below
    train_losses: list[float] = []
    seconds = 0.0
    for step in range(settings.steps):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        inputs, targets = training_batch(
            corpus.train, settings.seed, settings.worker, step, settings.sequences, config.context_tokens
        )
        loss = model.loss(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        seconds += time.perf_counter() - begin
        train_losses.append(loss.item())
        if settings.worker == 0 and step + 1 in evaluate_at:
            recent = train_losses[-50:]
            stats = optimizer.session.stats()
            emit(
                step=step + 1,
                train_loss=sum(recent) / len(recent),
                val_loss=validation_loss(model, *validation),
                seconds_per_step=seconds / (step + 1),
                pushed_bytes=stats["pushed_bytes"] - started["pushed_bytes"],
                pulled_bytes=stats["pulled_bytes"] - started["pulled_bytes"],
            )
    emit(
        done=True,
        worker=settings.worker,
        seconds_per_step=seconds / settings.steps,
        stats=optimizer.session.stats(),
        shard_digests=optimizer.session.shard_digests(),
        parameters=sum(p.numel() for p in model.parameters()),
    )
    optimizer.close()


if __name__ == "__main__":
    train(WorkerSettings(**json.loads(sys.argv[1])))
