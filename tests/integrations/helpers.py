"""Small models, and one training step of each by the same random numbers."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from holdover.memory.measure import measure_peak
from holdover.planning.plan import Plan


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.qkv, self.drop = nn.Linear(width, 3 * width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def transformer(blocks: int = 4, width: int = 32, dropout: float = 0.0) -> Chain:
    torch.manual_seed(3)
    return Chain([Block(width, dropout) for _ in range(blocks)], width)


def tokens(batch: int = 8, width: int = 32) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(batch, 64, width)


class Residual(nn.Module):
    """Batch norm, and an activation that writes in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2, self.act = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.second(self.act(self.norm1(self.first(x)))))
        y += x
        return self.act(y)


def convolutions() -> nn.Module:
    torch.manual_seed(3)
    body = [Residual(8) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *body, nn.Flatten(1), nn.Linear(8 * 144, 4))


def mlp() -> nn.Module:
    """Three equal blocks, each of which Inductor compiles into few kernels."""
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(3)])


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def results(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a step leaves behind, after one that compiles."""
    twin = copy.deepcopy(dict(model.named_buffers()))
    torch.manual_seed(7)
    loss(model(x)).backward()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(twin[name])
    torch.manual_seed(7)
    output = model(x)
    loss(output).backward()
    found = {f"gradient {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    return {**found, "output": output.detach(), "rng": torch.get_rng_state()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def peak(model: nn.Module, x: torch.Tensor) -> int:
    """Measured, in a step after the one that compiles; the output is held until the end, as in a training loop."""

    def work() -> Any:
        output = model(x)
        loss(output).backward()
        return output

    work()
    model.zero_grad(set_to_none=True)
    gc.collect()
    measured = measure_peak(work, model, x)[1]
    model.zero_grad(set_to_none=True)
    return measured


def within_promise(measured: int, plan: Plan) -> bool:
    return measured <= plan.predicted_peak_bytes * 1.01 + 16384
