"""Where a worker takes its largest elements from: all of a tensor, each chunk of it (SparseLoCo), or each chunk of its cosine transform
(DeMo). Not the product: the choice alone, with NumPy in one process, of steps with a residual, whose values travel as float32; tensors
below 1,024 elements travel whole. Prints held-out losses relative to uncompressed steps; takes some minutes a line.

  .venv/bin/python tests/bench/convergence/chunks.py [--tasks=gpt_large,words] [--workers=4] [--densities=0.01,0.0025] [--rates=0.002,0.004,0.008]
                                                     [--seeds=1]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "build/release/python"))

import numpy as np
import torch

from study import RESIDUAL_DECAY
from tasks import Task, task
from training import Run, learning_rate

BETA2, EPSILON, SMALL = 0.99, 1e-8, 1024
CHUNK, SIDE = 4096, 64  # elements of a chunk, and of a side of a transformed one

Choose = Callable[[np.ndarray, float], np.ndarray]  # [elements of one tensor, shaped], density -> the same, zero but for what is sent


def largest(rows: np.ndarray, density: float) -> np.ndarray:
    """Of each row its largest magnitudes."""
    count = max(1, round(density * rows.shape[1]))
    kept = np.argpartition(np.abs(rows), -count, axis=1)[:, -count:]
    sent = np.zeros_like(rows)
    np.put_along_axis(sent, kept, np.take_along_axis(rows, kept, axis=1), axis=1)
    return sent


def of_tensor(values: np.ndarray, density: float) -> np.ndarray:
    return largest(values.reshape(1, -1), density).reshape(values.shape)


def of_chunks(values: np.ndarray, density: float) -> np.ndarray:
    flat = values.reshape(-1)
    whole = flat.size // CHUNK * CHUNK
    sent = np.zeros_like(flat)
    if whole:
        sent[:whole] = largest(flat[:whole].reshape(-1, CHUNK), density).reshape(-1)
    if whole < flat.size:
        sent[whole:] = largest(flat[whole:].reshape(1, -1), density)
    return sent.reshape(values.shape)


def cosines(n: int) -> np.ndarray:
    """The orthonormal DCT-II: a row for each frequency."""
    k, i = np.arange(n)[:, None], np.arange(n)[None]
    rows = np.sqrt(2 / n) * np.cos(np.pi * (2 * i + 1) * k / (2 * n))
    rows[0] /= math.sqrt(2)
    return rows.astype(np.float32)


def of_cosines(values: np.ndarray, density: float) -> np.ndarray:
    """As DeMo: blocks whose sides are the largest divisors up to SIDE."""
    matrix = values.reshape(values.shape[0], -1) if values.ndim > 1 else values.reshape(1, -1)
    sides = [max(d for d in range(1, SIDE + 1) if n % d == 0) for n in matrix.shape]
    left, right = map(cosines, sides)
    counts = [n // side for n, side in zip(matrix.shape, sides, strict=True)]
    blocks = matrix.reshape(counts[0], sides[0], counts[1], sides[1]).transpose(0, 2, 1, 3)
    turned = largest((left @ blocks @ right.T).reshape(counts[0] * counts[1], -1), density).reshape(blocks.shape)
    return (left.T @ turned @ right).transpose(0, 2, 1, 3).reshape(values.shape)


CHOICES: dict[str, Choose] = {"all of a tensor": of_tensor, "chunks": of_chunks, "cosines of chunks": of_cosines}


def train(model: Task, choose: Choose | None, density: float, workers: int, lr: float, seed: int) -> float:
    """The held-out loss at the end; infinite where it diverges."""
    run = Run(model.name, "dense:fp32", lr=lr, workers=workers, seed=seed)
    initial = model.initial(seed)
    parameters = [np.repeat(p[None], workers, 0) for p in initial]
    squares = [np.zeros_like(p) for p in parameters]
    residual = [np.zeros_like(p) for p in parameters]
    for step in range(run.total_steps):
        rate, correct = learning_rate(run, step), 1 - BETA2 ** (step + 1)
        for p, g, v, r in zip(parameters, model.gradients(parameters, seed, step), squares, residual, strict=True):
            v += (1 - BETA2) * (g * g - v)
            pushed = g / (np.sqrt(v / correct) + EPSILON)
            if choose is not None and p[0].size >= SMALL:
                r += pushed
                pushed = np.stack([choose(r[w], density) for w in range(workers)])
                r -= pushed
                r *= RESIDUAL_DECAY
            p -= rate * pushed.mean(0)
    loss = model.held_out([p[0] for p in parameters])
    return loss if np.isfinite(loss) else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="gpt_large,words")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--densities", default="0.01,0.0025")
    parser.add_argument("--rates", default="0.002,0.004,0.008", help="learning rates, of which the best counts")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rates, seeds = [float(lr) for lr in args.rates.split(",")], range(1, args.seeds + 1)

    def best(model: Task, choose: Choose | None, density: float) -> tuple[float, float]:
        return min((float(np.mean([train(model, choose, density, args.workers, lr, seed) for seed in seeds])), lr) for lr in rates)

    for model in map(task, args.tasks.split(",")):
        baseline, lr = best(model, None, 1.0)
        print(f"{model.name}, {args.workers} workers: uncompressed steps {baseline:.4f} (learning rate {lr:g})", flush=True)
        for density in map(float, args.densities.split(",")):
            for title, choose in CHOICES.items():
                loss, lr = best(model, choose, density)
                print(f"  {density:.2%} of {title:<18} {loss:.4f}, {loss / baseline:.3f} (learning rate {lr:g})", flush=True)


if __name__ == "__main__":
    main()
