"""Planning where there is least room, and where the step does what steps rarely do."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from tests.planning.problems import problem_of, program_trace, search_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import holdover
from holdover.planning.chain import Chain
from holdover.planning.search import Search


def test_a_budget_that_the_nested_plans_only_just_meet() -> None:
    """The dynamic programme divides the room into slots; here all of them are needed by the only plan there is."""
    problem, workspace = problem_of(program_trace([("gelu", 0, 0), ("norm", 0, 0), ("tanh", 0, 0)] * 3), [1.0])
    floor = search_of(problem, workspace).lowest()

    def solved(budget: int) -> tuple[Search, Chain]:
        search = search_of(problem, workspace)
        chain = search.chain()
        assert chain is not None
        chain.solve(budget)
        return search, chain

    low, high = 0, search_of(problem, workspace).judge(()).peak_bytes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if solved(middle)[1].feasible() is not None else (middle, high)
    search, chain = solved(high)
    assert chain.feasible() == chain.slots
    found = search.deepest(replace(floor, peak_bytes=high), time.monotonic() + 1)
    assert found.peak_bytes <= high


class WritesWhenRunAgain(nn.Module):
    """Reentrant activation checkpointing of what scales its input in place, unseen by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.detach().mul_(0.8)
        return x.exp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.scaled, self.layer(x).sin(), use_reentrant=True).cos()


def test_a_storage_that_backward_writes_to_while_it_uses_it() -> None:
    model, x = WritesWhenRunAgain(), torch.rand(200, 64)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    plan = holdover.plan(model, (x,), loss=loss, budget="min", time_limit=2)
    assert holdover.verify(model, (x,), loss=loss, plan=plan).holds
