"""How a model differs from the one that a plan was made for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import holdover
from holdover.planning.outline import outline_of, strange_places, why_other
from holdover.planning.plan import Choice, Plan
from holdover.trace.record import record

WIDTH = 8


class Block(nn.Module):
    def __init__(self, wide: int = 32, act: type[nn.Module] = nn.GELU, bias: bool = True) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, wide, bias=bias), act(), nn.Linear(wide, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.act(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self, depth: int = 6, **block: object) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**block) for _ in range(depth))  # type: ignore[arg-type]
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = holdover.plan(Net(), (torch.ones(500, WIDTH),), budget="min", time_limit=3)
    return Plan.from_json(made.to_json())


def refused(plan: Plan, model: nn.Module) -> str:
    with pytest.raises(holdover.ApplyError) as caught:
        holdover.apply_(model, plan)
    return str(caught.value)


def test_equal_modules_in_a_row_are_written_once() -> None:
    outline = outline_of(Net())
    assert list(outline["modules"]["blocks"]["modules"]) == ["0-5"]
    deep = outline_of(Net(depth=100))
    assert len(json.dumps(deep)) == len(json.dumps(outline)) + 1  # 99 for 5


def test_a_model_like_it_is_taken(plan: Plan) -> None:
    assert plan.outline == outline_of(Net())
    assert why_other(plan, Net()) == ""
    with torch.device("meta"):
        assert why_other(plan, Net().half()) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"depth": 4}, "2 modules of the planned model are not here: blocks.4 (Block), blocks.5 (Block). Ways out"),
        ({"depth": 10}, "4 modules are here only: blocks.6 (Block), blocks.7 (Block), blocks.8 (Block) and 1 more."),
        ({"act": nn.ReLU}, "6 modules are of another class: blocks.0.act (planned GELU, here ReLU), blocks.1.act"),
        ({"wide": 64}, "18 parameters are of another shape: blocks.0.up.weight (planned 32x8, here 64x8), bl"),
        ({"bias": False}, "6 parameters of the planned model are not here: blocks.0.up.bias (32), blocks.1.up"),
    ],
    ids=["fewer", "more", "class", "shape", "bias"],
)  # fmt: skip
def test_the_differences_are_told_with_their_number_and_the_first_few(
    plan: Plan, changes: dict[str, object], said: str
) -> None:
    told = refused(plan, Net(**changes))  # type: ignore[arg-type]
    assert told.startswith("this plan was made for another model: a Net, and this is one of that name that consists of")
    assert said in told
    assert told.endswith(
        "Ways out: plan again for this model; or build it as it was when it was planned (its batch, length, device and "
        "numbers may be others)"
    )
    assert plan.fingerprint not in told


def test_what_is_frozen_is_told(plan: Plan) -> None:
    model = Net()
    model.head.weight.requires_grad_(False)
    assert "1 parameter is trained in one only: head.weight (planned trained, here frozen)." in refused(plan, model)


def test_a_model_around_the_planned_one_is_pointed_into(plan: Plan) -> None:
    told = refused(plan, nn.ModuleDict({"module": Net()}))
    assert told.endswith("Its part 'module' is what was planned: apply the plan to that, model.module")
    assert "a Net, and this is a ModuleDict" in told


def test_a_plan_without_an_outline_tells_the_modules_that_it_names(plan: Plan) -> None:
    bare = replace(plan, outline={})
    told = refused(bare, Net(depth=4))
    lacking = [f"blocks.{n}{end}" for n in (4, 5) for end in ("", ".act", ".down", ".up")]
    named = [path for path in lacking if f"/{path}" in plan.to_json()]
    assert named
    assert f"{len(named)} modules that the plan names are not here: blocks.4, blocks.4.act" in told
    assert "It has all modules that the plan names, and others, or parameters of other shapes" in refused(
        bare, Net(wide=64)
    )


def test_places_with_another_op_are_told(plan: Plan) -> None:
    class Act(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.silu(x)

    trace = record(nn.Sequential(nn.Linear(WIDTH, WIDTH), Act()), (torch.ones(9, WIDTH),))
    places = [
        ("model/1", 0, "aten.silu.default"),
        ("model/1", 0, "aten.gelu.default"),
        ("model/2", 3, "aten.mul.Tensor"),
    ]
    (right, other, none) = (replace(plan, choices=(Choice(*place, "recompute"),)) for place in places)
    assert strange_places(trace, right) == []
    assert strange_places(trace, other) == ["op 0 of model/1 (planned aten.gelu.default, here aten.silu.default)"]
    assert strange_places(trace, none) == ["op 3 of model/2 (planned aten.mul.Tensor, here nothing)"]
