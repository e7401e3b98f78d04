"""GPT and Llama in plain PyTorch, written as the closed form assumes them to be."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from holdover.closed_form.architecture import Architecture


class EagerAttention(nn.Module):
    """Matmul, softmax, dropout, matmul, without a mask."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        return self.dropout(scores.softmax(-1)) @ value


class FusedAttention(nn.Module):
    """Scaled-dot-product attention; keys and values may have fewer heads."""

    def __init__(self, expand: int = 1) -> None:
        super().__init__()
        self.expand = expand

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.expand > 1:
            key, value = key.repeat_interleave(self.expand, 1), value.repeat_interleave(self.expand, 1)
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )


class GptBlock(nn.Module):
    def __init__(self, shape: Architecture, *, eager: bool, dropout: float) -> None:
        super().__init__()
        h = shape.hidden
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.query, self.key, self.value = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, h)
        self.attention = EagerAttention(dropout) if eager else FusedAttention()
        self.out = nn.Linear(h, h)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.up, self.act, self.down = nn.Linear(h, shape.ffn), nn.GELU(), nn.Linear(shape.ffn, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        y = self.norm1(x)
        split = [part(y).view(b, s, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)]
        context = self.attention(*split).transpose(1, 2).reshape(b, s, h)
        x = x + self.dropout1(self.out(context))
        return x + self.dropout2(self.down(self.act(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, shape: Architecture, *, eager: bool, dropout: float) -> None:
        super().__init__()
        h = shape.hidden
        self.tokens, self.positions = nn.Embedding(shape.vocab, h), nn.Embedding(shape.sequence, h)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GptBlock(shape, eager=eager, dropout=dropout) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(h)
        self.head = nn.Linear(h, shape.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.dropout(self.tokens(ids) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class EagerNorm(nn.Module):
    """RMSNorm as transformers writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class LlamaBlock(nn.Module):
    def __init__(self, shape: Architecture, *, expand: bool) -> None:
        super().__init__()
        h, d = shape.hidden, shape.head_dim
        self.head_dim = d
        self.norm1, self.norm2 = EagerNorm(h), EagerNorm(h)
        self.query = nn.Linear(h, shape.heads * d, bias=False)
        self.key = nn.Linear(h, shape.kv_heads * d, bias=False)
        self.value = nn.Linear(h, shape.kv_heads * d, bias=False)
        self.attention = FusedAttention(shape.heads // shape.kv_heads if expand else 1)
        self.out = nn.Linear(shape.heads * d, h, bias=False)
        self.gate, self.up = nn.Linear(h, shape.ffn, bias=False), nn.Linear(h, shape.ffn, bias=False)
        self.act, self.down = nn.SiLU(), nn.Linear(shape.ffn, h, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        y = self.norm1(x)
        query, key, value = (
            part(y).view(b, s, -1, self.head_dim).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        context = self.attention(rotate(query, cosine, sine), rotate(key, cosine, sine), value)
        x = x + self.out(context.transpose(1, 2).reshape(b, s, -1))
        y = self.norm2(x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, shape: Architecture, *, expand: bool) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(shape, expand=expand) for _ in range(shape.layers))
        self.norm = EagerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        frequencies = 10000 ** -(torch.arange(0, self.head_dim, 2, device=ids.device) / self.head_dim)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * frequencies
        angles = torch.cat([angles, angles], -1)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
