"""The demo's model and data: a byte-level GPT, and the English prose of Python's own reference.

Written as people write such models: nothing in it knows of holdover.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and its batches; the default has 3.3 million parameters."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    context: int = 256
    batch: int = 6
    dropout: float = 0.1


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, W]
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))
        x = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return x


class GPT(nn.Module):
    """Bytes in, the loss of predicting each next byte out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)

    def forward(self, text: Tensor, targets: Tensor) -> Tensor:  # [B, T] each
        x = self.embed(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def prose() -> Tensor:
    """Some 600 kB of English about Python, as bytes."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def batches(shape: Shape, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random stretches of the prose, the same for the same seed, without touching the global generators."""
    data, generator = prose(), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - shape.context - 1, (shape.batch,), generator=generator).tolist()
        yield (
            torch.stack([data[s : s + shape.context] for s in starts]).long(),
            torch.stack([data[s + 1 : s + shape.context + 1] for s in starts]).long(),
        )
