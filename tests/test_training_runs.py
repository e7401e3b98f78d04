"""Whole training runs under a plan, to the last bit: several steps and batch sizes, accumulation, clipping, copies."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import holdover

Batch = Callable[[int], torch.Tensor]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.norm(self.first(x)), inplace=True)
        x = nn.functional.relu(x + self.second(x), inplace=True)
        return self.head(nn.functional.max_pool2d(x, 2).flatten(1))


class TiedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(48, 50)
        self.body = nn.LSTM(32, 48, 2, batch_first=True, dropout=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens))[0])


def images(n: int) -> torch.Tensor:
    return torch.randn(n, 3, 16, 16)


def tokens(n: int) -> torch.Tensor:
    return torch.randint(0, 50, (n, 24))


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def trained(kind: type[nn.Module], batch: Batch, budget: str | None) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """Parameters and buffers after training, the generator's state, and how many planned ops ran in the last step."""
    torch.manual_seed(0)
    model = kind()
    if budget is not None:
        with torch.random.fork_rng():
            plan = holdover.plan(model, (batch(16),), loss=mean_square, budget=budget, optimizer="adamw")
        holdover.apply_(model, plan)
        model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(5)
    for step in range(4):
        for _ in range(2):
            mean_square(model(batch(16 if step < 2 else 11))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(batch(3))
    matched = holdover.inspect(model).matched if budget is not None else 0
    return list(model.state_dict().values()), torch.get_rng_state(), matched


@pytest.mark.parametrize(
    ("kind", "batch"),
    [(Convolutions, images), (TiedTransformer, tokens), (Recurrent, tokens)],
    ids=["convolutions", "transformer", "recurrent"],
)
def test_training_under_a_plan_is_training(kind: type[nn.Module], batch: Batch) -> None:
    plain, plain_state, _ = trained(kind, batch, None)
    planned, state, matched = trained(kind, batch, "min")
    assert matched > 0, "the plan is in force in the copy, and at another batch size"
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
    assert torch.equal(plain_state, state)
