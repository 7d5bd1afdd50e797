"""One worker of the benchmark `training`: trains some steps and prints what they took as JSON. argv[1]: Settings, as JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from models import make, replay
from systems import Place, System, shared_parameters

WARM_STEPS = 0.05  # of all, in which the learning rate rises
LAST_RATE = 0.1  # of the highest


@dataclass(frozen=True)
class Settings:
    system: str
    model: str
    compute_ms: float  # a sleep in the place of computing; 0: it computes
    place: Place
    steps: int
    skipped_steps: int  # at the beginning, that are not measured
    lr: float
    seed: int
    evaluate_every: int  # steps; 0: never


def learning_rate(settings: Settings, step: int) -> float:
    warm = max(1, round(WARM_STEPS * settings.steps))
    if step < warm:
        return settings.lr * (step + 1) / warm
    return settings.lr * (1 - (1 - LAST_RATE) * (step - warm) / max(1, settings.steps - warm))


def link_bytes(interface: str) -> tuple[int, int]:
    """What the host has sent and received, with headers."""
    if not interface:
        return 0, 0
    counters = Path("/sys/class/net") / interface / "statistics"
    return int((counters / "tx_bytes").read_text()), int((counters / "rx_bytes").read_text())


def main() -> None:
    told = json.loads(sys.argv[1])
    settings = Settings(**{**told, "place": Place(**told["place"])})
    place = settings.place
    torch.set_num_threads(1)
    system = System(settings.system)
    task = make(settings.model, settings.seed, system.sparse_gradients)
    if settings.compute_ms:
        replay(task, settings.compute_ms / 1e3, place.worker)
    parameters = sum(p.numel() for p in task.module.parameters())
    seconds, curve, before = [], [], (0, 0)
    with system.open(task, place, settings.lr) as (forward, optimizer):
        for step in range(settings.steps):
            if step == settings.skipped_steps:
                before = link_bytes(place.interface)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(settings, step)
            batch = task.batch(place.worker, step)
            begin = time.perf_counter()
            optimizer.zero_grad()
            task.loss(forward, batch).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
            if settings.evaluate_every and (step + 1) % settings.evaluate_every == 0:
                # The module itself: DistributedDataParallel's forward would wait for the others.
                with shared_parameters(task.module, optimizer):
                    curve.append((step + 1, task.held_out(task.module)))
        after = link_bytes(place.interface)
    if curve and system.period > 1:  # its last round ended with the optimizer
        curve[-1] = (settings.steps, task.held_out(task.module))
    measured = settings.steps - settings.skipped_steps
    sent, received = ((now - then) / measured for now, then in zip(after, before, strict=True))
    print(json.dumps({"seconds": seconds[settings.skipped_steps:], "curve": curve, "parameters": parameters,
                      "sent_bytes": sent, "received_bytes": received}))


if __name__ == "__main__":
    main()
