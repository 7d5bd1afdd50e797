"""Byte-level GPT of the main demo: small enough for one CPU core, built like today's language models.

Pre-norm blocks with RMSNorm, rotary positions, GELU MLP and bias-free linear layers; untied head.
Every matrix has a multiple of 4096 elements at the default size, so no run of the codec is partial.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GptConfig:
    """Shape of the model; the default has 1.05 million parameters."""

    vocab_size: int = 256
    context_tokens: int = 128
    width: int = 128
    layers: int = 5
    heads: int = 4

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads) != 0:
            raise ValueError(f"width {self.width} must be a multiple of 2 * heads ({self.heads})")


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-6)


def rotary_table(tokens: int, head_width: int) -> tuple[Tensor, Tensor]:
    """cos and sin of shape [tokens, head_width / 2] (RoFormer, equation 15, base 10000)."""
    rate = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle = torch.outer(torch.arange(tokens, dtype=torch.float32), rate)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + head_width / 2) of x [batch, heads, tokens, head_width]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention with rotary positions."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=-1)
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = RmsNorm(config.width)
        self.mlp_up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.mlp_down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x))))


class Gpt(nn.Module):
    """Maps token ids [batch, tokens] to logits [batch, tokens, vocab]; deterministic for a given seed."""

    def __init__(self, config: GptConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = RmsNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        cos, sin = rotary_table(config.context_tokens, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        """Standard deviations: embedding 0.2, linear 0.06, into the stream 0.06 / sqrt(2 layers), head 0.02.

        GPT-2's 0.02 everywhere is meant for wider models: at width 128 it leaves dense AdamW on a plateau for its
        first hundred steps, and would make any comparison with it unfair.
        """
        generator = torch.Generator().manual_seed(seed)
        into_stream = 0.06 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            if name.endswith(("attention.out.weight", "mlp_down.weight")):
                std = into_stream
            else:
                std = {"embedding": 0.2, "head": 0.02}.get(role_of(name), 0.06)
            nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.final_norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats per byte."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def role_of(name: str) -> str:
    """The role of a parameter of Gpt by its name."""
    for part, role in (("norm", "norm"), ("embedding", "embedding"), ("head", "head"), ("attention", "attention")):
        if part in name:
            return role
    return "mlp"
