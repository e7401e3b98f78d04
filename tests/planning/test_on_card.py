"""Plans for a card that is not here: budgets of reserved memory, what is said of them, and what is refused."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from tests.planning.blocks import Block
from torch import nn

import holdover
from holdover.cost.devices import card
from holdover.memory.allocator_config import MIB
from holdover.memory.on_card import replay_on
from holdover.memory.timeline import FOREVER, Choices
from holdover.planning.plan import Plan
from holdover.trace.graph import Trace
from holdover.trace.record import record
from holdover.trace.target import Target
from holdover.units import format_bytes, parse_bytes

CONTEXT = card("h100-80gb").context_bytes[1]


def model(layers: int = 3, width: int = 512) -> nn.Module:
    with torch.device("meta"):
        blocks = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
            for _ in range(layers)
        ]
        return nn.Sequential(*blocks)


def step() -> dict[str, Any]:
    return {"args": (torch.zeros(8192, 512, device="meta"),), "optimizer": "sgd", "device": "h100-80gb"}


def planned(budget: int | str, **more: Any) -> Plan:
    return holdover.plan(model(), budget=budget, time_limit=2.0, **{**step(), **more})


def trace() -> Trace:
    return record(model(), step()["args"], optimizer="sgd", target=Target("h100-80gb", (9, 0)))


def replayed(plan: Plan, recorded: Trace) -> tuple[int, int]:
    """What the allocator makes of the plan's choices, looked up by place in a recording of their own."""
    places = {(c.call, c.index, c.op): c for c in plan.choices}
    assert all(c.action == "recompute" for c in plan.choices)
    chosen = {o.id: places.get((recorded.calls[o.call].key, o.index, o.name)) for o in recorded.ops}
    stages = {n: (c.stage, FOREVER if c.held_from is None else c.held_from) for n, c in chosen.items() if c is not None}
    played = replay_on(recorded, card("h100-80gb"), Choices(frozenset(stages), stages=stages))
    return played.allocated_bytes, played.reserved_bytes


@pytest.fixture(scope="module")
def plain() -> holdover.Estimate:
    return holdover.estimate(model(), **step())


def test_a_budget_of_the_process_leaves_room_for_the_context(plain: holdover.Estimate) -> None:
    assert plain.reserved_bytes is not None
    budget = CONTEXT + plain.reserved_bytes * 7 // 10
    plan = planned(budget)
    assert plan.reserved_bytes is not None
    assert plan.allocated_bytes is not None
    assert plan.budget_bytes == budget
    assert plan.budget_kind == "reserved"
    assert plan.device == "h100-80gb"
    assert plan.unplanned_reserved_bytes == plain.reserved_bytes
    assert plan.predicted_peak_bytes < plan.allocated_bytes <= plan.reserved_bytes <= budget - CONTEXT
    assert 0 <= plan.bound_extra_time <= plan.extra_time < 0.5
    assert plan.priced == "modelled for h100-80gb from FLOPs and bytes"
    assert plan.notes[0].startswith("At most ")
    assert "the budget, 1.42 GiB are for the context" in plan.notes[0]
    assert "modelled for h100-80gb" in plan.notes[1]
    assert replayed(plan, trace()) == (plan.allocated_bytes, plan.reserved_bytes)


def test_a_share_is_of_what_the_step_reserves(plain: holdover.Estimate) -> None:
    plan = planned("75%")
    assert plan.reserved_bytes is not None
    assert plain.reserved_bytes is not None
    assert plan.budget_bytes == int(plain.reserved_bytes * 0.75)
    assert plan.reserved_bytes <= plan.budget_bytes
    assert holdover.Plan.from_json(plan.to_json()) == plan
    text = str(plan)
    assert "reserved on h100-80gb" in text
    assert "times: modelled for h100-80gb" in " ".join(text.split())


def test_a_budget_of_allocated_memory_sets_nothing_aside(plain: holdover.Estimate) -> None:
    assert plain.on_card is not None
    budget = plain.on_card.allocated_bytes * 7 // 10
    plan = planned(budget, budget_kind="allocated")
    assert plan.allocated_bytes is not None
    assert plan.budget_kind == "allocated"
    assert plan.allocated_bytes <= budget
    assert plan.notes[0] == f"At most {budget / 2**20:.2f} MiB may be allocated."


def test_what_fits_is_left_alone_and_no_card_has_more_than_it_has(plain: holdover.Estimate) -> None:
    plan = planned("1000GiB")
    assert plan.choices == ()
    assert plan.reserved_bytes == plan.unplanned_reserved_bytes == plain.reserved_bytes
    assert plan.extra_time == 0.0
    assert "of 79.10 GiB, what h100-80gb has, 1.42 GiB are for the context" in plan.notes[0]


def test_the_lowest_peak_says_what_it_reserves() -> None:
    plan = planned("min")
    assert plan.budget_bytes is None
    assert plan.reserved_bytes is not None
    assert plan.unplanned_reserved_bytes is not None
    assert plan.predicted_peak_bytes <= plan.reserved_bytes < plan.unplanned_reserved_bytes
    assert "At most" not in plan.notes[0]


def encoder_plan(budget: str, kind: str) -> Plan:
    """For four blocks of a small ViT, all of whose tensors lie in segments of 20 MiB."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(Block(192, 3, causal=False) for _ in range(4))), torch.zeros(8, 197, 192)
    return holdover.plan(
        model, (x,), budget=budget, budget_kind=kind, optimizer="adamw", device="h100-80gb", time_limit=4.0
    )


def test_more_reserved_memory_never_costs_more_though_it_comes_in_steps() -> None:
    plans = [encoder_plan(budget, "reserved") for budget in ("min", "90%", "100%")]
    for tight, wide in itertools.pairwise(plans):
        assert wide.extra_time <= tight.extra_time + 0.01  # what the search does not find in its time
        assert wide.bound_extra_time <= wide.extra_time
    for plan in plans[1:]:
        assert plan.reserved_bytes is not None
        assert plan.budget_bytes is not None
        assert plan.reserved_bytes <= plan.budget_bytes
    assert plans[1].extra_time < plans[0].extra_time / 2


def test_the_bound_knows_of_the_workspaces_that_are_always_there() -> None:
    plan = encoder_plan("80%", "allocated")
    assert plan.allocated_bytes is not None
    assert plan.budget_bytes is not None
    assert 0.97 * plan.budget_bytes < plan.allocated_bytes <= plan.budget_bytes
    assert 0 < plan.bound_extra_time <= plan.extra_time
    workspaces = 2 * card("h100-80gb").cublas_bytes  # of forward's thread and of autograd's
    assert plan.predicted_peak_bytes + workspaces <= plan.allocated_bytes


def test_the_knee_of_a_card_is_a_budget_of_the_whole_process() -> None:
    with torch.device("meta"):
        thin = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(40)))
        x = torch.zeros(65536, 16)
    lowest = holdover.plan(thin, (x,), budget="min", device="h100-80gb", time_limit=3.0)
    assert lowest.knee is not None
    assert lowest.reserved_bytes is not None
    assert lowest.knee.budget_bytes > CONTEXT + lowest.reserved_bytes
    asked = holdover.plan(thin, (x,), budget=lowest.knee.budget, device="h100-80gb", time_limit=3.0)
    assert asked.reserved_bytes is not None
    assert asked.reserved_bytes <= parse_bytes(lowest.knee.budget) - CONTEXT
    assert asked.extra_time < 0.75 * lowest.extra_time


@pytest.fixture(scope="module")
def found() -> holdover.Frontier:
    return holdover.frontier(model(), step()["args"], optimizer="sgd", device="h100-80gb", time_limit=4.0)


def test_a_frontier_for_a_card_says_what_each_plan_takes(plain: holdover.Estimate, found: holdover.Frontier) -> None:
    assert found.plans[0].reserved_bytes == plain.reserved_bytes
    assert len(found.plans) > 1
    for plan in found.plans:
        assert plan.device == "h100-80gb"
        assert plan.reserved_bytes is not None
        assert plan.allocated_bytes is not None
        assert plan.predicted_peak_bytes < plan.allocated_bytes <= plan.reserved_bytes
        assert plan.unplanned_reserved_bytes == plain.reserved_bytes
        assert plan.priced.startswith("modelled for h100-80gb")
        assert plan.budget_kind == "reserved"
        assert plan.budget_bytes == plan.reserved_bytes
        assert plan.bound_extra_time <= plan.extra_time
    for higher, lower in itertools.pairwise(found.plans):
        assert found.counted_bytes(lower) <= found.counted_bytes(higher)
        assert lower.predicted_peak_bytes < higher.predicted_peak_bytes
        assert lower.extra_time > higher.extra_time


def test_budgets_of_a_frontier_for_a_card_are_those_of_a_plan_there(found: holdover.Frontier) -> None:
    assert found.budget_kind == "reserved"
    assert found.context_bytes == CONTEXT
    least = found.counted_bytes(found.plans[-1])
    middle = found.plans[len(found.plans) // 2]
    taken = found.counted_bytes(middle)
    cheapest = next(plan for plan in found.plans if found.counted_bytes(plan) <= taken)
    assert found.at(taken + CONTEXT) is cheapest  # bytes are for the whole process
    assert found.at("100%") is found.plans[0]
    assert found.counted_bytes(found.at("min")) == least
    assert found.at("min").extra_time <= found.plans[-1].extra_time
    three_quarters = found.at("75%")
    assert three_quarters.reserved_bytes is not None
    assert three_quarters.reserved_bytes <= 0.75 * found.counted_bytes(found.plans[0])
    assert planned("75%").extra_time <= three_quarters.extra_time + 0.01
    assert found.within(middle.predicted_peak_bytes) is middle
    assert found.within(1) is found.plans[-1]
    with pytest.raises(
        holdover.BudgetError, match=r"1\.42 GiB are for the context, cannot be met.* reserved\."
    ) as error:
        found.at(least + CONTEXT - 1)
    assert error.value.floor_bytes == least + CONTEXT


def test_what_is_printed_for_a_card_names_its_units(found: holdover.Frontier) -> None:
    data = json.loads(found.to_json())
    assert data["budget_kind"] == "reserved"
    assert data["context_bytes"] == CONTEXT
    assert data["floor_reserved_bytes"] == found.plans[-1].reserved_bytes
    printed = " ".join(str(found).split())
    assert "reserved of it tensors extra time" in printed
    assert "one in bytes needs 1.42 GiB more, for the context" in printed
    plan = found.plans[-1]
    assert plan.reserved_bytes is not None
    assert plan.unplanned_reserved_bytes is not None
    taken = (
        f"{format_bytes(plan.reserved_bytes)} of {format_bytes(plan.unplanned_reserved_bytes)} reserved on h100-80gb"
    )
    assert f"{taken}; floor {format_bytes(plan.floor_bytes)} of tensors, budget" in " ".join(str(plan).split())


def test_a_budget_below_the_floor() -> None:
    with pytest.raises(holdover.BudgetError) as error:
        planned(CONTEXT + 100 * MIB)
    said = str(error.value)
    assert "A budget of 1.52 GiB of reserved memory cannot be met on h100-80gb (it has 79.10 GiB; 1.42 GiB are" in said
    assert "the plan of the lowest peak allocates" in said
    assert 'or budget="min"' in said
    assert error.value.floor_bytes == error.value.parts["reserved"] + CONTEXT


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"budget_kind": "cached"}, holdover.PlanError, "held against 'reserved' or 'allocated'"),
        ({"budget_kind": "reserved", "device": "cpu"}, holdover.PlanError, "needs a card: name one by device="),
        ({"device": "h1000"}, holdover.DeviceError, "unknown card 'h1000'; the table has"),
        ({"compiled": True}, holdover.PlanError, "the compiler's kernels for h100-80gb are not known"),
    ],
)
def test_what_is_refused(more: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        planned("50%", **more)
    assert said in str(raised.value)


def test_a_plan_for_a_card_is_harmless_where_other_ops_run() -> None:
    """The CPU runs other dropout than the card: what is not found at its place is kept, and the step is the same."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(3)]
    small = nn.Sequential(*blocks)
    x = torch.randn(512, 64)
    plan = holdover.plan(small, (x,), budget="min", budget_kind="allocated", device="h100-80gb", time_limit=2.0)
    here = {op.name for op in record(small, (x,)).ops}
    assert {c.op for c in plan.choices} - here == {"aten.native_dropout.default"}
    gradients = []
    for apply in (False, True):
        if apply:
            holdover.apply_(small, plan)
        torch.manual_seed(1)
        small.zero_grad()
        small(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in small.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
