"""A recommender that `training` trains: will this be clicked? Large tables of embeddings, of which a batch touches few rows, as rows
are drawn as words are (row k as often as 1 / k), and a small net on top. Clicks are those of a planted teacher, which draws them
by chances that depend on every row and on every pair of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

TABLES, ROWS, WIDTH = 4, 100_000, 32
HIDDEN = (128, 64)
EXAMPLES = 1024  # per worker and step
HELD_OUT_EXAMPLES = 1 << 14
FIRST_WEIGHTS = 0.01  # standard deviation of the tables'
GAIN = 32.0  # behind the tables: their rows, which few examples move, go GAIN^2 times as fast at the net's learning rate
FACTORS = 4  # of the teacher for each row
TEACHER, HELD_OUT = 1 << 16, 1 << 17  # in the place of a worker, where random numbers are drawn


def _random(seed: int, who: int, step: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[(seed << 32) | who, step]))


class _Net(nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(ROWS, WIDTH, sparse=sparse) for _ in range(TABLES))
        for table in self.embeddings:
            nn.init.normal_(table.weight, std=FIRST_WEIGHTS)
        widths = (TABLES * WIDTH, *HIDDEN)
        layers = [layer for before, behind in zip(widths, HIDDEN) for layer in (nn.Linear(before, behind), nn.ReLU())]
        self.mlp = nn.Sequential(*layers, nn.Linear(HIDDEN[-1], 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(GAIN * torch.cat([table(ids[:, i]) for i, table in enumerate(self.embeddings)], dim=1)).squeeze(1)


class Recommender:
    """The same seed gives the same net, teacher and batches on every worker. sparse: tables have sparse gradients."""

    plain_sgd = True  # it takes sparse gradients, and is the same on workers and on shards

    def __init__(self, seed: int, sparse: bool):
        torch.manual_seed(seed)
        self.module = _Net(sparse)
        self.units: list[nn.Module] = []
        self._seed = seed
        random = _random(seed, TEACHER)
        self._of_rows = random.standard_normal((TABLES, ROWS), dtype=np.float32)
        self._factors = random.standard_normal((TABLES, ROWS, FACTORS), dtype=np.float32) / (2 * FACTORS**0.5)
        self._held_out = self._examples(_random(seed, HELD_OUT), HELD_OUT_EXAMPLES)

    def _examples(self, random: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
        """Rows of each table, and whether they were clicked."""
        ids = (np.exp(random.random((count, TABLES)) * np.log(ROWS + 1)) - 1).astype(np.int64).clip(max=ROWS - 1)
        tables = range(TABLES)
        factors = [self._factors[i, ids[:, i]] for i in tables]
        pairs = sum((factors[i] * factors[j]).sum(axis=1) for i in tables for j in range(i))
        chance = 1 / (1 + np.exp(-sum(self._of_rows[i, ids[:, i]] for i in tables) - pairs))
        return torch.from_numpy(ids), torch.from_numpy((random.random(count) < chance).astype(np.float32))

    def batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        return self._examples(_random(self._seed, worker, step), EXAMPLES)

    def loss(self, forward: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, clicks = batch
        return nn.functional.binary_cross_entropy_with_logits(forward(ids), clicks)

    @torch.no_grad()
    def held_out(self, forward: Callable[..., Any]) -> float:
        return self.loss(forward, self._held_out).item()
