"""The frontier, the nested plans at its low end, and the targets on a chain of known sizes and prices."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from benchmarks.block_model import TARGETS, block_model, input_bytes, search_of
from torch import nn

import holdover
from holdover.planning.bound import Bound
from holdover.planning.chain import Chain
from holdover.planning.stages import partitions


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def step() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(32) for _ in range(12))), (torch.randn(512, 32),)


@pytest.fixture(scope="module")
def frontier(step: tuple[nn.Module, tuple[torch.Tensor]]) -> holdover.Frontier:
    return holdover.frontier(*step, time_limit=15)


def test_each_lower_peak_costs_more(frontier: holdover.Frontier) -> None:
    plans = frontier.plans
    assert len(plans) > 5
    assert plans[0].choices == ()
    assert plans[0].predicted_peak_bytes == frontier.unplanned_peak_bytes
    assert plans[-1].predicted_peak_bytes == frontier.floor_bytes
    for higher, lower in itertools.pairwise(plans):
        assert lower.predicted_peak_bytes < higher.predicted_peak_bytes
        assert lower.extra_time > higher.extra_time
        assert lower.bound_extra_time >= higher.bound_extra_time
    assert all(p.bound_extra_time <= p.extra_time for p in plans)


def test_a_budget_picks_the_cheapest_that_fits(frontier: holdover.Frontier) -> None:
    for plan in frontier.plans:
        assert frontier.at(plan.predicted_peak_bytes) is plan
        assert frontier.at(plan.predicted_peak_bytes - 1 + (plan is frontier.plans[-1])) is not None
    assert frontier.at("min") is frontier.plans[-1]
    assert frontier.at("100%") is frontier.plans[0]
    with pytest.raises(holdover.BudgetError, match=r"A budget of .* cannot be met: the frontier goes from .* to .*"):
        frontier.at(frontier.floor_bytes - 1)


def test_it_agrees_with_a_plan_for_the_same_budget(
    step: tuple[nn.Module, tuple[torch.Tensor]], frontier: holdover.Frontier
) -> None:
    for point in frontier.plans[2::8]:
        plan = holdover.plan(*step, budget=point.predicted_peak_bytes, time_limit=5)
        assert plan.predicted_peak_bytes <= point.predicted_peak_bytes
        assert plan.extra_time == pytest.approx(point.extra_time, abs=0.02, rel=0.15)


def test_the_lowest_plans_are_nested_and_exact(
    step: tuple[nn.Module, tuple[torch.Tensor]], frontier: holdover.Frontier
) -> None:
    model, args = step
    plan = frontier.plans[-1]
    assert plan.nested
    assert max(c.held_from for c in plan.choices if c.held_from is not None) > 0
    found = holdover.verify(model, args, plan=holdover.Plan.from_json(plan.to_json()))
    assert found.gradients_equal
    assert found.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.01)


def test_json_holds_every_plan(frontier: holdover.Frontier) -> None:
    data = json.loads(frontier.to_json())
    assert [p["predicted_peak_bytes"] for p in data["plans"]] == [p.predicted_peak_bytes for p in frontier.plans]
    assert "peak" in str(frontier)


def test_the_chain_of_known_prices_meets_its_targets() -> None:
    """What the programme of peers reaches with menus per block, in % of the step."""
    search = search_of(*block_model(), seconds=8)
    fixed, step = input_bytes(search.trace), search.problem.step_seconds
    footprint = search.judge(()).peak_bytes - fixed
    floor, bound = search.lowest(), Bound(search.problem)
    for share, target in TARGETS.items():
        budget = fixed + int(share * footprint)
        found = search.cheapest(budget, floor, bound.seconds(budget))
        assert found.peak_bytes <= budget
        assert 100 * found.seconds / step <= target + 0.05
        assert bound.seconds(budget) <= found.seconds


def test_a_chain_knows_the_time_of_its_plans() -> None:
    """Without menus to choose wrongly from: what the programme says a plan takes is what the simulator counts."""
    search = search_of(*block_model(blocks=6, h=64, s=32), seconds=5)
    part = max(partitions(search.problem), key=lambda p: len(set(p.values())))
    chain = Chain(search.problem, part)
    chain.solve(search.judge(()).peak_bytes)
    last = len(chain.stages) - 1
    feasible = chain.feasible()
    assert feasible is not None
    for m in range(feasible, chain.slots, chain.slots // 12):
        found = search.judge(*chain.plan(m))
        assert found.seconds == pytest.approx(chain.table[0, last][m])
        assert found.peak_bytes <= chain.least + m * chain.slot + 2 * max(s.cut_bytes for s in chain.stages)


def test_a_step_that_nothing_lowers_has_the_plain_plan_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    frontier = holdover.frontier(model, (torch.ones(4, 16),), optimizer="adamw")
    assert [p.choices for p in frontier.plans] == [()]
    assert frontier.floor_bytes == frontier.unplanned_peak_bytes
    assert "100.0 %" in str(frontier)


class Thin(nn.Module):
    """A chain without any valley: as many bytes cross everywhere, and the loss reads what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(60))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_chain_without_valleys_is_cut_too() -> None:
    plan = holdover.plan(Thin(), (torch.randn(1024, 16),), budget="20%", time_limit=5)
    assert plan.nested or plan.extra_time < 1
    assert plan.predicted_peak_bytes <= 0.2 * plan.unplanned_peak_bytes
    assert plan.floor_bytes < 0.15 * plan.unplanned_peak_bytes


def test_its_plans_know_their_model_and_their_shapes(
    frontier: holdover.Frontier, step: tuple[nn.Module, tuple[torch.Tensor]]
) -> None:
    """As those of `holdover.plan`: another model, or a longer sequence, is told in the same way."""
    plan = holdover.plan(*step, budget="80%", time_limit=3)
    for point in frontier.plans:
        assert point.outline == plan.outline
        [shape] = point.shapes
        assert shape.shapes == plan.shapes[0].shapes
        assert shape.predicted_peak_bytes == point.predicted_peak_bytes
