"""What the study trains: three small models on real data that packages ship. Nothing is downloaded.

A task computes the gradients of all workers at once: `parameters[i]` is an array [workers, *shape] whose row w is the
memory of worker w's session, so that every worker's gradient is of its own parameters, local steps included.
What a worker sees is a pure function of (seed, worker, step); the global batch is the same for any number of workers.
"""

from __future__ import annotations

import functools
import io
import math
import sys
import sysconfig
import tokenize
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[3] / "client/examples/gpt"))  # has a `report`, too

from data import load_corpus, training_batch, validation_batch
from model import Gpt, GptConfig, role_of


@dataclass(frozen=True)
class Tensor:
    """One parameter of a model."""

    name: str
    shape: tuple[int, ...]
    role: str


def indices(seed: int, worker: int, step: int, count: int, below: int) -> np.ndarray:
    """Which examples a worker takes at a step."""
    return np.random.Generator(np.random.Philox(key=[(seed << 32) | worker, step])).integers(0, below, count)


class Task:
    """A model, its data and its loss. Not thread-safe."""

    name: str
    title: str
    tensors: list[Tensor]
    batch: int  # examples per step, all workers together
    steps: int  # of a run, where the plan does not say otherwise

    def initial(self, seed: int) -> list[np.ndarray]:
        """One float32 array per tensor."""
        raise NotImplementedError

    def gradients(self, parameters: list[np.ndarray], seed: int, step: int) -> list[np.ndarray]:
        """Of each worker's mean loss over its part of the batch; shapes as `parameters`."""
        raise NotImplementedError

    def held_out(self, parameters: list[np.ndarray]) -> float:
        """Mean cross entropy in nats of one worker's parameters, on examples that no worker sees."""
        raise NotImplementedError

    @property
    def elements(self) -> int:
        return sum(math.prod(t.shape) for t in self.tensors)


# Lines of the standard library -----------------------------------------------------------------------------------------

LINES_PER_EXAMPLE = 5
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data",
                      "encodings", "lib2to3", "__phello__"})


def _words(text: str) -> list[list[str]]:
    """The identifiers and keywords of each line that has any."""
    lines: dict[int, list[str]] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                lines.setdefault(token.start[0], []).append(token.string)
    except (tokenize.TokenError, SyntaxError):
        return []
    return list(lines.values())


@functools.cache
def _packages() -> dict[str, list[list[str]]]:
    """The lines of each package of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    packages: dict[str, list[list[str]]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if len(parts) > 1 and not _SKIPPED.intersection(parts):
            packages.setdefault(parts[0], []).extend(_words(path.read_text("utf-8", "replace")))
    return packages


def _source_lines(classes: int, words: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The words of each example, as sorted indices below `words` (the most frequent first), and its package."""
    packages = _packages()
    largest = sorted(packages, key=lambda p: (-len(packages[p]), p))[:classes]
    examples: list[set[str]] = []
    labels: list[int] = []
    for label, package in enumerate(sorted(largest)):
        lines = packages[package]
        for at in range(0, len(lines) - LINES_PER_EXAMPLE, LINES_PER_EXAMPLE):
            examples.append({word for line in lines[at : at + LINES_PER_EXAMPLE] for word in line})
            labels.append(label)
    counts = Counter(word for example in examples for word in example)
    index = {word: i for i, (word, _) in enumerate(sorted(counts.items(), key=lambda c: (-c[1], c[0]))[:words])}
    return [np.array(sorted(index[w] for w in example if w in index), np.int64) for example in examples], np.array(labels)


def _softmax_minus(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Gradient of the mean cross entropy by the logits [..., examples, classes]."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    np.put_along_axis(p, labels[..., None], np.take_along_axis(p, labels[..., None], -1) - 1, -1)
    return p / logits.shape[-2]


def _cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    shifted = logits - logits.max(-1, keepdims=True)
    return float(np.mean(np.log(np.exp(shifted).sum(-1)) - np.take_along_axis(shifted, labels[:, None], -1)[:, 0]))


class SourceLines(Task):
    """Logistic regression: from which of 16 packages of the standard library are five consecutive lines of code?"""

    name, title, batch, steps = "logistic", "logistic regression, words of the Python library", 64, 300

    CLASSES, WORDS = 16, 1000

    def __init__(self) -> None:
        examples, labels = _source_lines(self.CLASSES, self.WORDS)
        present = np.zeros((len(examples), self.WORDS), np.uint8)
        for row, words in enumerate(examples):
            present[row, words] = 1
        kept = np.arange(len(labels)) % 8 == 0
        self.train, self.train_labels = present[~kept], labels[~kept]
        self.validation, self.validation_labels = present[kept].astype(np.float32), labels[kept]
        self.tensors = [Tensor("words.weight", (self.WORDS, self.CLASSES), "other"),
                        Tensor("words.bias", (self.CLASSES,), "bias")]

    def initial(self, seed: int) -> list[np.ndarray]:
        return [np.zeros(t.shape, np.float32) for t in self.tensors]

    def gradients(self, parameters: list[np.ndarray], seed: int, step: int) -> list[np.ndarray]:
        workers = len(parameters[0])
        rows = np.stack([indices(seed, w, step, self.batch // workers, len(self.train)) for w in range(workers)])
        x = self.train[rows].astype(np.float32)
        error = _softmax_minus(x @ parameters[0] + parameters[1][:, None], self.train_labels[rows])
        return [x.transpose(0, 2, 1) @ error, error.sum(1)]

    def held_out(self, parameters: list[np.ndarray]) -> float:
        return _cross_entropy(self.validation @ parameters[0] + parameters[1], self.validation_labels)


class AllSourceLines(Task):
    """The same with 32 packages and 20,000 words: a wide model, of whose gradient a batch touches about 2 %."""

    name, title, batch, steps = "wide", "logistic regression, 20,000 words", 64, 1600
    CLASSES, WORDS = 32, 20_000

    def __init__(self) -> None:
        examples, labels = _source_lines(self.CLASSES, self.WORDS)
        kept = np.arange(len(labels)) % 8 == 0
        self.train = [e for e, k in zip(examples, kept) if not k]
        self.train_labels = labels[~kept]
        self.validation = [e for e, k in zip(examples, kept) if k]
        self.validation_labels = labels[kept]
        self.tensors = [Tensor("words.weight", (self.WORDS, self.CLASSES), "other"),
                        Tensor("words.bias", (self.CLASSES,), "bias")]

    def initial(self, seed: int) -> list[np.ndarray]:
        return [np.zeros(t.shape, np.float32) for t in self.tensors]

    @staticmethod
    def _logits(examples: list[np.ndarray], weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
        return np.stack([weight[words].sum(0) for words in examples]) + bias

    def gradients(self, parameters: list[np.ndarray], seed: int, step: int) -> list[np.ndarray]:
        workers = len(parameters[0])
        weights, biases = np.zeros_like(parameters[0]), np.zeros_like(parameters[1])
        for w in range(workers):
            rows = indices(seed, w, step, self.batch // workers, len(self.train))
            examples = [self.train[row] for row in rows]
            error = _softmax_minus(self._logits(examples, parameters[0][w], parameters[1][w]), self.train_labels[rows])
            for words, e in zip(examples, error, strict=True):
                weights[w, words] += e
            biases[w] = error.sum(0)
        return [weights, biases]

    def held_out(self, parameters: list[np.ndarray]) -> float:
        return _cross_entropy(self._logits(self.validation, *parameters), self.validation_labels)


# Digits ----------------------------------------------------------------------------------------------------------------


class Digits(Task):
    """Two convolutions and two linear layers on the 1,797 digits of 8 x 8 that scikit-learn ships, moved by up to a pixel."""

    name, title, batch, steps = "digits", "convolutional net, scikit-learn's digits", 32, 200
    CHANNELS = (12, 24)
    HIDDEN = 32

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.Generator(np.random.Philox(key=[0, 0])).permutation(len(digits.target))
        images = np.pad((digits.images[order] / 8 - 1).astype(np.float32), ((0, 0), (1, 1), (1, 1)), constant_values=-1)
        labels = digits.target[order].astype(np.int64)
        self.train, self.train_labels = images[450:], torch.from_numpy(labels[450:])
        self.validation = torch.from_numpy(np.ascontiguousarray(images[:450, 1:-1, 1:-1]))[None, ..., None]
        self.validation_labels = torch.from_numpy(labels[:450])
        a, b = self.CHANNELS
        self.tensors = [
            Tensor("conv1.weight", (a, 9), "other"), Tensor("conv1.bias", (a,), "bias"),
            Tensor("conv2.weight", (b, 9 * a), "other"), Tensor("conv2.bias", (b,), "bias"),
            Tensor("mlp.weight", (self.HIDDEN, 16 * b), "mlp"), Tensor("mlp.bias", (self.HIDDEN,), "bias"),
            Tensor("head.weight", (10, self.HIDDEN), "head"), Tensor("head.bias", (10,), "bias"),
        ]

    def initial(self, seed: int) -> list[np.ndarray]:
        """He et al. 2015 for matrices, 0 for biases."""
        random = np.random.Generator(np.random.Philox(key=[seed, 1]))
        return [
            (random.standard_normal(t.shape) * math.sqrt(2 / t.shape[1])).astype(np.float32)
            if len(t.shape) == 2 else np.zeros(t.shape, np.float32) for t in self.tensors
        ]

    @staticmethod
    def _convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x [workers, images, height, width, channels] by each worker's own kernels of 3 x 3, padded."""
        height, width = x.shape[2:4]
        x = F.pad(x, (0, 0, 1, 1, 1, 1))
        patches = torch.cat([x[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)], -1)
        return (patches.flatten(1, 3) @ weight.mT + bias[:, None]).unflatten(1, patches.shape[1:4])

    def _logits(self, x: torch.Tensor, p: list[torch.Tensor]) -> torch.Tensor:
        x = F.relu(self._convolve(x, p[0], p[1]))
        x = x.unflatten(3, (4, 2)).unflatten(2, (4, 2)).mean((3, 5))
        x = F.relu(self._convolve(x, p[2], p[3])).flatten(2)
        x = F.relu(x @ p[4].mT + p[5][:, None])
        return x @ p[6].mT + p[7][:, None]

    def gradients(self, parameters: list[np.ndarray], seed: int, step: int) -> list[np.ndarray]:
        workers = len(parameters[0])
        each = self.batch // workers
        random = [np.random.Generator(np.random.Philox(key=[(seed << 32) | w, step])) for w in range(workers)]
        rows = np.stack([r.integers(0, len(self.train), each) for r in random])
        y, x = np.stack([r.integers(0, 3, (2, each)) for r in random], 1)[..., None] + np.arange(8)  # of the 8 x 8 taken
        images = self.train[rows[..., None, None], y[..., None], x[..., None, :]]
        p = [torch.from_numpy(a).requires_grad_() for a in parameters]
        logits = self._logits(torch.from_numpy(images)[..., None], p)
        loss = F.cross_entropy(logits.flatten(0, 1), self.train_labels[rows.ravel()], reduction="sum") / each
        return [g.contiguous().numpy() for g in torch.autograd.grad(loss, p)]

    @torch.no_grad()
    def held_out(self, parameters: list[np.ndarray]) -> float:
        p = [torch.from_numpy(a)[None] for a in parameters]
        return F.cross_entropy(self._logits(self.validation, p)[0], self.validation_labels).item()


class LargeDigits(Digits):
    """The same with 541,000 parameters."""

    name, title, batch, steps = "digits_large", "convolutional net of half a million parameters, digits", 32, 300
    CHANNELS, HIDDEN = (16, 32), 1024


# Bytes -----------------------------------------------------------------------------------------------------------------


class PythonText(Task):
    """The quickstart's byte-level GPT, an eighth of its size, on the standard library's text."""

    name, title, batch, steps = "gpt", "byte-level GPT, text of the Python library", 8, 240
    CONFIG = GptConfig(context_tokens=32, width=64, layers=2, heads=4)
    VALIDATION_WINDOWS = 128

    def __init__(self) -> None:
        self.corpus = load_corpus()
        self.validation = validation_batch(self.corpus.validation, self.VALIDATION_WINDOWS, self.CONFIG.context_tokens)
        self.model = Gpt(self.CONFIG, 0)
        self.tensors = [Tensor(n, tuple(p.shape), role_of(n)) for n, p in self.model.named_parameters()]

    def initial(self, seed: int) -> list[np.ndarray]:
        return [p.detach().numpy() for p in Gpt(self.CONFIG, seed).parameters()]

    def _use(self, parameters: list[np.ndarray]) -> None:
        for p, values in zip(self.model.parameters(), parameters, strict=True):
            p.data = torch.from_numpy(values)

    def gradients(self, parameters: list[np.ndarray], seed: int, step: int) -> list[np.ndarray]:
        workers = len(parameters[0])
        batches = [training_batch(self.corpus.train, seed, w, step, self.batch // workers, self.CONFIG.context_tokens)
                   for w in range(workers)]
        inputs, targets = (torch.stack(part) for part in zip(*batches, strict=True))

        def loss(own: tuple[torch.Tensor, ...], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = functional_call(self.model, {t.name: p for t, p in zip(self.tensors, own, strict=True)}, (inputs,))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        with warnings.catch_warnings():  # attention is done worker by worker: still the fastest way
            warnings.filterwarnings("ignore", message=".*batching rule")
            found = vmap(grad(loss))(tuple(map(torch.from_numpy, parameters)), inputs, targets)
        return [g.contiguous().numpy() for g in found]

    @torch.no_grad()
    def held_out(self, parameters: list[np.ndarray]) -> float:
        self._use(parameters)
        return self.model.loss(*self.validation).item()


class LargePythonText(PythonText):
    """The same with 0.85 million parameters, nearly the quickstart's; 16 workers take a window each."""

    name, title, batch, steps = "gpt_large", "byte-level GPT of 0.85 million parameters, text of the Python library", 16, 400
    CONFIG = GptConfig(context_tokens=32, width=128, layers=4, heads=4)


# Words -----------------------------------------------------------------------------------------------------------------


class NextWord(Task):
    """Which word of Python code comes next? Embeddings of the four before, a hidden layer, a softmax (Bengio et al. 2003)."""

    name, title, batch, steps = "words", "next word of Python code, an embedding and two layers, 0.82 million parameters", 128, 400

    WORDS, CONTEXT, EMBEDDING, HIDDEN = 4096, 4, 64, 128
    BLOCK = 512  # words; each eighth block is held out

    def __init__(self) -> None:
        packages = _packages()
        text = [word for name in sorted(packages) for line in packages[name] for word in line]
        most = sorted(Counter(text).items(), key=lambda c: (-c[1], c[0]))[: self.WORDS - 1]
        index = {word: i + 1 for i, (word, _) in enumerate(most)}  # 0: any other
        ids = torch.tensor([index.get(word, 0) for word in text])
        windows = ids.unfold(0, self.CONTEXT + 1, 1)
        held_out = torch.arange(len(windows)) // self.BLOCK % 8 == 0
        apart = held_out == torch.cat([held_out[self.CONTEXT:], held_out[-self.CONTEXT:]])  # no window lies in two blocks
        self.train = windows[~held_out & apart]
        self.validation = windows[held_out & apart][::101]
        d, h = self.EMBEDDING, self.HIDDEN
        self.tensors = [Tensor("embedding.weight", (self.WORDS, d), "embedding"),
                        Tensor("hidden.weight", (h, self.CONTEXT * d), "mlp"), Tensor("hidden.bias", (h,), "bias"),
                        Tensor("head.weight", (self.WORDS, h), "head"), Tensor("head.bias", (self.WORDS,), "bias")]

    def initial(self, seed: int) -> list[np.ndarray]:
        """Normal, of a variance of 1 over what a layer takes; biases 0."""
        random = np.random.Generator(np.random.Philox(key=[seed, 2]))
        return [np.zeros(t.shape, np.float32) if t.role == "bias" else
                (random.standard_normal(t.shape) * (1 if t.role == "embedding" else t.shape[1] ** -0.5)).astype(np.float32)
                for t in self.tensors]

    @staticmethod
    def _logits(words: torch.Tensor, p: list[torch.Tensor]) -> torch.Tensor:
        """words [workers, examples, context]; each worker's own parameters."""
        embedded = torch.stack([F.embedding(w, own) for w, own in zip(words, p[0], strict=True)]).flatten(2)
        hidden = torch.tanh(embedded @ p[1].mT + p[2][:, None])
        return hidden @ p[3].mT + p[4][:, None]

    def gradients(self, parameters: list[np.ndarray], seed: int, step: int) -> list[np.ndarray]:
        workers = len(parameters[0])
        each = self.batch // workers
        windows = self.train[np.stack([indices(seed, w, step, each, len(self.train)) for w in range(workers)])]
        p = [torch.from_numpy(a).requires_grad_() for a in parameters]
        logits = self._logits(windows[..., :-1], p)
        loss = F.cross_entropy(logits.flatten(0, 1), windows[..., -1].flatten(), reduction="sum") / each
        return [g.contiguous().numpy() for g in torch.autograd.grad(loss, p)]

    @torch.no_grad()
    def held_out(self, parameters: list[np.ndarray]) -> float:
        p = [torch.from_numpy(a)[None] for a in parameters]
        return F.cross_entropy(self._logits(self.validation[None, :, :-1], p)[0], self.validation[:, -1]).item()


TASKS: dict[str, type[Task]] = {task.name: task for task in (SourceLines, Digits, PythonText, AllSourceLines, LargeDigits,
                                                             LargePythonText, NextWord)}


@functools.cache
def task(name: str) -> Task:
    return TASKS[name]()
