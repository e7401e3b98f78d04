"""What the models of the frontier bench are made of, and how a contender finds its way in them.

Every op of a block is a module of its own (adding, gating and attention included), so that each contender can mark what
it likes without another model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    """A model with one step's data. `loss` takes the model's output.

    `blocks` names the modules that activation checkpointing would wrap, in order; `chains` the places where such blocks
    follow one another and nothing else, so that segments of several can be made.
    """

    model: nn.Module
    args: tuple[torch.Tensor, ...]
    loss: Callable[[Any], torch.Tensor]
    blocks: tuple[str, ...]
    chains: tuple[str, ...] = ()


class Add(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


class Mul(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b


class Concat(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a, b], 1)


class Chain(nn.Module):
    """Blocks one after the other; `shared` is what all of them read beside the running value."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, *shared)
        return x


def blocks_of(model: nn.Module, *chains: str) -> tuple[str, ...]:
    return tuple(
        f"{c}.blocks.{name}" for c in chains for name, _ in model.get_submodule(f"{c}.blocks").named_children()
    )


class Attention(nn.Module):
    """Fused attention. Keys and values may have fewer heads than queries."""

    def __init__(self, heads: int, key_heads: int, *, causal: bool, rotary: bool = False, width: int = 0) -> None:
        super().__init__()
        self.heads, self.key_heads, self.causal, self.rotary = heads, key_heads, causal, rotary
        if rotary:
            angles = torch.outer(torch.arange(1024.0), 10_000.0 ** -(torch.arange(0, width, 2) / width))
            self.cos: torch.Tensor
            self.sin: torch.Tensor
            self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1), persistent=False)
            self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1), persistent=False)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b, t, _ = q.shape
        q = q.view(b, t, self.heads, -1).transpose(1, 2)
        k, v = (y.view(b, y.shape[1], self.key_heads, -1).transpose(1, 2) for y in (k, v))
        if self.rotary:
            q, k = self.turned(q), self.turned(k)
        if self.heads != self.key_heads:
            k, v = (y.repeat_interleave(self.heads // self.key_heads, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return y.transpose(1, 2).reshape(b, t, -1)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return x * cos + torch.cat([-high, low], -1) * sin


class FusedQKV(nn.Module):
    """Attention over one tensor of queries, keys and values."""

    def __init__(self, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.core = Attention(heads, heads, causal=causal)

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        return self.core(*qkv.chunk(3, -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """GPT's and ViT's block; with `dropout`, after attention and after the MLP."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention = nn.Linear(width, 3 * width), FusedQKV(heads, causal=causal)
        self.proj, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.gelu, self.add1, self.add2 = nn.GELU(), Add(), Add()
        self.drop1 = nn.Dropout(dropout) if dropout else nn.Identity()
        self.drop2 = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.add1(x, self.drop1(self.proj(self.attention(self.qkv(self.norm1(x))))))
        return self.add2(x, self.drop2(self.down(self.gelu(self.up(self.norm2(x))))))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Each token goes through its two best of several small MLPs; the shapes depend on the data."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, number)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(number)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            y = y.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return y.view_as(x)
