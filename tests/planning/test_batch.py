"""Other batch sizes: what is scaled, and the largest that fits, against recordings one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from holdover.planning.batch import Batches, Need, Subject, is_linear, need_of, resized, scale_of
from holdover.planning.steps import recorded
from holdover.trace.graph import Category


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))


def subject(model: nn.Module, *args: torch.Tensor, loss: Any = None, optimizer: str | None = None) -> Subject:
    return Subject(model, args, {}, loss, optimizer, None, None)


def peak(need: Need) -> int:
    return need.peak_bytes


def alone(model: nn.Module, batch: int) -> int:
    return need_of(recorded(model, (torch.ones(batch, 8),))).peak_bytes


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    model = mlp()
    batches = Batches(subject(model, torch.ones(10, 8)), scale_of(subject(model, torch.ones(10, 8))))
    for memory in (alone(model, 57), alone(model, 58) - 1, alone(model, 1) + 1, alone(model, 10)):
        largest = batches.largest(memory, peak)
        assert alone(model, largest) <= memory < alone(model, largest + 1)
    assert is_linear({b: n.peak_bytes for b, n in batches.known().items() if b > 20})
    assert len(batches.known()) < 20
    assert batches.largest(10, peak) == 0


class Pairs(nn.Module):
    """Every sample against every other: the peak grows with the square of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        return (y @ y.t()).tanh().sum()


def test_a_peak_that_is_no_line_is_found_by_recordings() -> None:
    model = Pairs()
    batches = Batches(subject(model, torch.ones(16, 8)), scale_of(subject(model, torch.ones(16, 8))))
    memory = alone(model, 123) + 5
    assert batches.largest(memory, peak) == 123
    assert not is_linear({b: n.peak_bytes for b, n in batches.known().items()})
    assert len(batches.known()) < 20


def test_labels_in_the_losss_closure_grow_too_and_the_callers_stay() -> None:
    labels = torch.arange(4)
    given = subject(mlp(), torch.ones(4, 8), loss=lambda out: F.cross_entropy(out, labels))
    batches = Batches(given, scale_of(given))
    need = batches.at(6)
    assert need is not None, batches.reason
    assert need.step.trace.inputs == "(float32[6, 8])"
    assert labels.shape == (4,)
    assert given.args[0].shape == (4, 8)


def test_flattened_targets_grow_with_the_tokens() -> None:
    tokens, targets, mask = torch.zeros(3, 5, dtype=torch.long), torch.arange(15), torch.ones(5, 5)
    given = Subject(nn.Embedding(4, 2), (tokens, targets, mask), {}, None, None, None, None)
    assert scale_of(Subject(given.model, (tokens, targets), {}, None, None, None, None)).scaled == (
        "int64[3, 5]", "int64[15]",
    )  # fmt: skip
    made = resized(given, 3, 6)
    assert [tuple(t.shape) for t in made.args] == [(6, 5), (30,), (5, 5)]
    assert made.args[1].max() == 14


def test_a_model_of_one_batch_size_says_why() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    given = subject(Fixed(), torch.ones(4, 8))
    batches = Batches(given, scale_of(given))
    assert batches.given() is batches.at(4)
    assert batches.at(6) is None
    assert "6" in batches.reason


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_accumulation_needs_no_more_than_said(optimizer: str | None) -> None:
    model = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    need = need_of(recorded(model, (torch.ones(16, 8),), optimizer=optimizer))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # as an earlier micro-batch left them
    first = recorded(model, (torch.ones(16, 8),))
    state = sum(s.nbytes for s in need.step.trace.storages if s.category is Category.OPTIMIZER)
    true = need_of(first).peak_bytes + state
    largest = max(p.nbytes for p in model.parameters())
    assert true <= need.accumulating_bytes <= max(true, need.peak_bytes) + largest
