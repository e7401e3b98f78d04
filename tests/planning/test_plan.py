"""`holdover.plan` from outside: budgets, refusals, notes, files."""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import holdover
from holdover.errors import BudgetError, PlanError
from holdover.memory.estimate import workspaces
from holdover.planning.classes import classes_of
from holdover.planning.inputs import PlannedShape
from holdover.planning.plan import Choice, Knee, Plan
from holdover.planning.problem import Problem, build
from holdover.planning.stages import partitions
from holdover.trace.graph import Phase
from holdover.trace.record import record
from holdover.units import format_share, parse_bytes


def stack(blocks: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(blocks)))


ARGS = (torch.ones(512, 16),)


@pytest.fixture(scope="module")
def halfway() -> Plan:
    lowest = holdover.plan(stack(), ARGS, budget="min")
    return holdover.plan(stack(), ARGS, budget=(lowest.floor_bytes + lowest.unplanned_peak_bytes) // 2)


def test_a_budget_in_bytes_is_met(halfway: Plan) -> None:
    assert halfway.budget_bytes is not None
    assert halfway.floor_bytes <= halfway.predicted_peak_bytes <= halfway.budget_bytes < halfway.unplanned_peak_bytes
    assert 0 < halfway.bound_extra_time <= halfway.extra_time < 1
    assert sum(halfway.peak_parts.values()) == halfway.predicted_peak_bytes
    assert halfway.saved_bytes < halfway.unplanned_saved_bytes
    assert {c.action for c in halfway.choices} == {"recompute"}


def test_what_the_activations_are() -> None:
    plan = holdover.plan(stack(), ARGS, budget="min")
    # Each block saves the first layer's result for GELU and GELU's for the second layer; three pass theirs on.
    assert plan.unplanned_saved_bytes == 4 * 2 * 512 * 64 * 4 + 3 * 512 * 16 * 4
    assert plan.budget_bytes is None
    assert plan.predicted_peak_bytes == plan.floor_bytes


def test_shares_of_the_unplanned_peak() -> None:
    plan = holdover.plan(stack(), ARGS, budget="80%")
    assert plan.budget_bytes == int(plan.unplanned_peak_bytes * 0.8)
    assert plan.predicted_peak_bytes <= plan.budget_bytes


def test_more_memory_never_costs_more_time() -> None:
    lowest = holdover.plan(stack(), ARGS, budget="min")
    room = lowest.unplanned_peak_bytes - lowest.floor_bytes
    times = [
        holdover.plan(stack(), ARGS, budget=lowest.floor_bytes + room * n // 4).extra_time * lowest.step_seconds
        for n in (0, 1, 2, 3, 4)
    ]
    assert all(a >= b - 1e-3 * times[0] for a, b in itertools.pairwise(times))
    assert times[-1] == 0


def test_a_step_that_fits_is_left_alone() -> None:
    plan = holdover.plan(stack(), ARGS, budget="1GiB")
    assert plan.choices == ()
    assert plan.extra_time == plan.bound_extra_time == 0
    assert plan.predicted_peak_bytes == plan.unplanned_peak_bytes
    assert any("fits" in note for note in plan.notes)


def test_nothing_to_gain_is_said() -> None:
    plan = holdover.plan(nn.Linear(64, 64), (torch.ones(2, 64),), budget="min")
    assert plan.choices == ()
    assert any("No recomputation lowers the peak" in note for note in plan.notes)


def test_below_the_floor() -> None:
    floor = holdover.plan(stack(), ARGS, budget="min").floor_bytes
    with pytest.raises(BudgetError, match="cannot be met") as refusal:
        holdover.plan(stack(), ARGS, budget=100_000)
    error = refusal.value
    assert (error.budget_bytes, error.floor_bytes) == (100_000, floor)
    assert sum(error.parts.values()) == floor
    assert "97.66 KiB" in str(error)
    assert 'budget="min"' in str(error)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("budget", ["lots", "-5GiB", "120 %%", "", None, -1])
def test_budgets_that_mean_nothing(budget: Any) -> None:
    with pytest.raises(holdover.HoldoverError):
        holdover.plan(stack(1), ARGS, budget=budget)


def test_json_and_files_give_the_plan_back(halfway: Plan, tmp_path: Path) -> None:
    assert Plan.from_json(halfway.to_json()) == halfway
    halfway.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == halfway
    assert os.listdir(tmp_path) == ["plan.json"]
    assert json.loads(halfway.to_json())["schema_version"] == 1


PLACES = st.builds(
    Choice, call=st.sampled_from(["model", "model/0", "model/0/1", "graph:48960"]), index=st.integers(0, 5),
    op=st.sampled_from(["aten.gelu.default", "aten.addmm.default"]), action=st.sampled_from(["recompute", "pack"]),
)  # fmt: skip
NESTED = st.builds(
    lambda choice, stage, more: replace(choice, stage=stage, held_from=stage + more),
    PLACES, st.integers(0, 4), st.integers(0, 2**40),
)  # fmt: skip
SHAPES = st.lists(
    st.builds(
        PlannedShape, st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple),
        st.integers(0), st.integers(0), st.floats(0, 1e3), st.integers(0), st.integers(0, 2),
    ),
    max_size=3,
).map(tuple)  # fmt: skip


@given(st.integers(1, 2**45))
def test_the_budget_of_a_knee_is_enough_and_hardly_more(nbytes: int) -> None:
    asked = parse_bytes(Knee(nbytes, 0.1).budget)
    assert nbytes <= asked <= nbytes * 1.01 + 1


class Thin(nn.Module):
    """A chain of which little need be kept, at a steep price."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_lowest_peak_names_a_budget_that_costs_far_less() -> None:
    model, args = Thin(), (torch.randn(2048, 16),)
    lowest = holdover.plan(model, args, budget="min", time_limit=5)
    assert lowest.knee is not None
    assert lowest.floor_bytes < lowest.knee.budget_bytes < (3 * lowest.floor_bytes + lowest.unplanned_peak_bytes) / 4
    assert lowest.knee.extra_time < 0.75 * lowest.extra_time
    assert f'budget="{lowest.knee.budget}"' in str(lowest)
    assert Plan.from_json(lowest.to_json()) == lowest
    asked = holdover.plan(model, args, budget=lowest.knee.budget, time_limit=5)
    assert asked.extra_time < 0.75 * lowest.extra_time
    assert asked.knee is None
    assert "last bytes" not in str(asked)


@given(
    choices=st.lists(PLACES | NESTED, max_size=12).map(tuple),
    notes=st.lists(st.text(), max_size=2).map(tuple),
    shapes=SHAPES,
    further=st.lists(st.lists(PLACES | NESTED, max_size=4).map(tuple), max_size=2),
    times=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)),
    knee=st.none() | st.builds(Knee, st.integers(0), st.floats(0, 1e3)),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_plan_comes_back_from_json_as_it_was(
    halfway: Plan, choices: Any, notes: Any, shapes: Any, further: Any, times: Any, knee: Any
) -> None:
    plan = replace(
        halfway, choices=choices, notes=notes, shapes=shapes, knee=knee, extra_time=times[0], bound_extra_time=times[1],
        variants=tuple(replace(halfway, choices=c, shapes=shapes) for c in further),
    )  # fmt: skip
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.script == plan.script


def test_choices_of_calls_that_take_turns_stand_by_call(halfway: Plan) -> None:
    outer, inner, later = (
        Choice(call, i, "aten.gelu.default", "recompute") for call, i in [("a", 0), ("a/b", 2), ("a", 3)]
    )
    plan = replace(halfway, choices=(outer, inner, later))
    assert plan.choices == (outer, later, inner)
    assert Plan.from_json(plan.to_json()) == plan


def test_choices_name_ops_of_the_model(halfway: Plan) -> None:
    kinds = {c.call.rsplit("/", 1)[-1]: c.op for c in halfway.choices}
    assert set(kinds.values()) <= {"aten.addmm.default", "aten.gelu.default"}
    for place, op in kinds.items():
        layer = place.split(".")[1]
        assert op == ("aten.gelu.default" if layer == "1" else "aten.addmm.default")


@pytest.mark.parametrize(
    "text",
    ["", "not json", "[]", "{}", "null", "3", '{"schema_version": 99}', '{"schema_version": 1}',
     '{"schema_version": 1, "choices": 3}', '{"schema_version": 1, "choices": {"model": [[1]]}, "modules": []}'],
)  # fmt: skip
def test_what_is_no_plan(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_cut_short(halfway: Plan, tmp_path: Path) -> None:
    text = halfway.to_json()
    for end in range(0, len(text) - 1, len(text) // 7):
        (tmp_path / "plan.json").write_text(text[:end])
        with pytest.raises(PlanError):
            Plan.load(tmp_path / "plan.json")


def test_no_file_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match="directory"):
        Plan.load(tmp_path)
    (tmp_path / "bytes").write_bytes(bytes(range(128, 256)))
    with pytest.raises(PlanError, match="not text"):
        Plan.load(tmp_path / "bytes")


def test_a_folder_that_is_not_there(halfway: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be written"):
        halfway.save(tmp_path / "nowhere" / "plan.json")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(halfway: Plan, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(PlanError, match="cannot be written"):
        halfway.save(target)
    assert (target / "old").read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


# -- stages and classes ----------------------------------------------------------------------------------------------


def problem(model: nn.Module) -> Problem:
    trace = record(model, ARGS)
    return build(trace, dict.fromkeys(range(len(trace.signatures)), 1.0), workspaces(trace)[0])


@pytest.mark.parametrize("blocks", [1, 2, 5, 17])
def test_stages_cover_forward_in_order(blocks: int) -> None:
    subject = problem(stack(blocks))
    found = partitions(subject)
    assert found
    for part in found:
        assert set(part) >= set(subject.eligible)
        numbers = [part[o] for o in sorted(part)]
        assert numbers[0] == 0
        assert all(b - a in (0, 1) for a, b in itertools.pairwise(numbers))
    assert [len(set(p.values())) for p in found] == sorted((len(set(p.values())) for p in found), reverse=True)
    assert len(set(found[-1].values())) == 1


def test_stages_of_equal_blocks_are_cut_between_blocks() -> None:
    subject = problem(stack(6))
    trace = subject.trace
    wide = [o.id for o in trace.ops if o.phase is Phase.FORWARD and o.name == "aten.gelu.default"]
    for part in partitions(subject):
        assert all(part[o] == part[o - 1] for o in wide)  # 128 KiB cross before GELU, 32 KiB between blocks


def test_equal_blocks_share_classes() -> None:
    subject = problem(stack(24))
    part = {o: o // 5 for o in range(24 * 5)}  # a block is t, addmm, gelu, t, addmm
    classes = classes_of(subject, part)
    gelu = [o for o in subject.eligible if subject.trace.ops[o].name == "aten.gelu.default"]
    groups = [classes[o] for o in gelu if o in classes]
    assert len(set(groups)) <= 8 + 2  # at most eight groups of neighbours, the first and last blocks may differ
    assert groups == sorted(groups, key=groups.index)  # neighbours
    for o, p in itertools.pairwise(gelu):
        if classes.get(o) == classes.get(p):
            assert subject.trace.ops[o].signature == subject.trace.ops[p].signature


def test_classes_hold_one_kind_of_op_each() -> None:
    subject = problem(stack(24))
    for part in partitions(subject):
        kinds: dict[object, set[tuple[int, int]]] = {}
        for o, key in classes_of(subject, part).items():
            op = subject.trace.ops[o]
            kinds.setdefault(key, set()).add((op.signature, op.index))
        assert all(len(k) == 1 for k in kinds.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"predicted_peak_bytes": "big"}, "predicted_peak_bytes is 'big', not a number"),
        ({"extra_time": None}, "extra_time is None, not a number"),
        ({"choices": {"model": [[0, "aten.add.Tensor", "foo"]]}}, "the action of aten.add.Tensor in 'model' is 'foo'"),
        ({"choices": {"model": [[-7, "aten.add.Tensor", "recompute"]]}}, "stands at -7, stage 0, held from None"),
        ({"choices": {"model": [[0, "aten.add.Tensor", "recompute", 3, 2]]}}, "stage 3, held from 2"),
    ],
    ids=["text for bytes", "no time", "action", "place", "stages"],
)
def test_a_broken_file_is_refused_with_what_is_broken(change: dict[str, object], said: str) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3)))
    data = json.loads(holdover.plan(layers, (torch.ones(500, 8),), budget="min").to_json())
    with pytest.raises(holdover.PlanError, match=re.escape(said)):
        holdover.Plan.from_json(json.dumps(data | change))


def test_at_the_end_of_its_time_the_best_plan_so_far_comes_back_with_its_gap() -> None:
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16)) for _ in range(6)]
    plan = holdover.plan(nn.Sequential(*blocks), (torch.ones(500, 16),), budget="60%", time_limit=0.01)
    assert plan.budget_bytes is not None
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.gap > 0
    said = plan.notes[-1]
    assert said.startswith("The time limit of 0.01 s ended the search: this is the best plan so far.")
    assert f"by more than {format_share(plan.gap)} of the step (the gap to the proved bound)" in said
    assert "A longer limit (--time-limit, time_limit=) may find a cheaper one." in said


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), "5"])
def test_a_time_limit_that_is_none_is_refused_before_the_work(limit: Any) -> None:
    with pytest.raises(holdover.UnitError, match="makes no sense: give a number of seconds above 0"):
        holdover.plan(nn.Linear(2, 2), (torch.ones(1, 3),), budget="min", time_limit=limit)
