"""The models of the frontier bench, in plain PyTorch: nothing is downloaded, weights are random."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from frontier_blocks import Add, Attention, Block, Case, Chain, Experts, FusedQKV, Mul, blocks_of
from frontier_vision import resnet18, resnet50, unet, vit, vit_dropout
from torch import nn


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        head = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k = nn.Linear(width, width, bias=False), nn.Linear(width, key_heads * head, bias=False)
        self.v, self.proj = nn.Linear(width, key_heads * head, bias=False), nn.Linear(width, width, bias=False)
        self.attention = Attention(heads, key_heads, causal=True, rotary=True, width=head)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down, self.silu = nn.Linear(inner, width, bias=False), nn.SiLU()
        self.mul, self.add1, self.add2 = Mul(), Add(), Add()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = self.add1(x, self.proj(self.attention(self.q(h), self.k(h), self.v(h))))
        h = self.norm2(x)
        return self.add2(x, self.down(self.mul(self.silu(self.gate(h)), self.up(h))))  # type: ignore[no-any-return]


class ExpertBlock(nn.Module):
    def __init__(self, width: int, heads: int, number: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention = nn.Linear(width, 3 * width), FusedQKV(heads, causal=True)
        self.proj, self.experts = nn.Linear(width, width), Experts(width, number)
        self.add1, self.add2 = Add(), Add()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.add1(x, self.proj(self.attention(self.qkv(self.norm1(x)))))
        return self.add2(x, self.experts(self.norm2(x)))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, length: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.chain, self.norm, self.head = Chain(blocks), nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.chain(x)))  # type: ignore[no-any-return]


def _language(vocabulary: int, width: int, length: int, batch: int, blocks: list[nn.Module]) -> Case:
    model = LanguageModel(vocabulary, width, length, blocks)
    ids = torch.randint(vocabulary, (batch, length))
    return Case(
        model, (ids,), lambda logits: F.cross_entropy(logits.flatten(0, 1), ids.flatten()), blocks_of(model, "chain"),
        ("chain",),
    )  # fmt: skip


def gpt(dropout: float = 0.0) -> Case:
    return _language(256, 128, 128, 8, [Block(128, 4, causal=True, dropout=dropout) for _ in range(6)])


def gpt_dropout() -> Case:
    return gpt(0.1)


def gpt_12x768() -> Case:
    return _language(8192, 768, 1024, 1, [Block(768, 12, causal=True) for _ in range(12)])


def llama() -> Case:
    return _language(32_000, 128, 128, 4, [LlamaBlock(128, 8, 2, 344) for _ in range(16)])


def moe() -> Case:
    return _language(256, 128, 128, 8, [ExpertBlock(128, 4, 4) for _ in range(4)])


class CrossBlock(nn.Module):
    """A decoder's block: reads the encoder's output beside its own input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.own = Block(width, heads, causal=True)
        self.norm, self.q, self.kv = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.attention, self.proj, self.add = Attention(heads, heads, causal=False), nn.Linear(width, width), Add()

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(memory).chunk(2, -1)
        x = self.add(x, self.proj(self.attention(self.q(self.norm(x)), k, v)))
        return self.own(x)  # type: ignore[no-any-return]


class EncoderDecoder(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = Chain([Block(width, 4, causal=False) for _ in range(depth)])
        self.decoder = Chain([CrossBlock(width, 4) for _ in range(depth)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(self.embedding(target), self.encoder(self.embedding(source))))  # type: ignore[no-any-return]


def encoder_decoder() -> Case:
    model = EncoderDecoder(256, 128, 3)
    source, target = torch.randint(256, (8, 128)), torch.randint(256, (8, 96))
    return Case(
        model, (source, target), lambda logits: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        blocks_of(model, "encoder", "decoder"), ("encoder", "decoder"),
    )  # fmt: skip


class Layered(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.chain = Chain(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(x)  # type: ignore[no-any-return]


def _layered(width: int, batch: int, blocks: list[nn.Module]) -> Case:
    model = Layered(blocks)
    x = torch.randn(batch, width)
    return Case(model, (x,), lambda y: y.square().mean(), blocks_of(model, "chain"), ("chain",))


def widths_doubling() -> Case:
    widths = [32, 64, 128, 256, 512, 1024]
    return _layered(
        32,
        2048,
        [nn.Sequential(nn.Linear(w, 2 * w), nn.GELU(), nn.Linear(2 * w, 2 * w), nn.Tanh()) for w in widths[:-1]],
    )


def thin_chain() -> Case:
    return _layered(32, 2048, [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(200)])


CASES: dict[str, Callable[[], Case]] = {
    "gpt": gpt,
    "gpt-dropout": gpt_dropout,
    "gpt-12x768": gpt_12x768,
    "llama": llama,
    "vit": vit,
    "vit-dropout": vit_dropout,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "unet": unet,
    "encoder-decoder": encoder_decoder,
    "moe": moe,
    "widths-doubling": widths_doubling,
    "thin-chain": thin_chain,
}
QUICK = ("gpt", "resnet18", "unet", "moe", "thin-chain")


def build(name: str) -> Case:
    """The case of that name, always with the same weights and data."""
    torch.manual_seed(0)
    return CASES[name]()
