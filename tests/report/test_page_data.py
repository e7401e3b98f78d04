"""The numbers behind the page: they add up, and they are those of the estimate, the plans and the simulator."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from tests.report.conftest import Made
from torch import nn

import holdover
from holdover.memory.estimate import Estimate, workspaces
from holdover.memory.life import name_of
from holdover.memory.simulate import simulate
from holdover.memory.timeline import Choices
from holdover.planning.plan import Choice
from holdover.report.html import moments
from holdover.report.html.data import page_data
from holdover.report.html.held import REASONS, held_values, reasons_of
from holdover.report.html.moments import runs_of, shown_step, watch, watch_planned
from holdover.report.html.page import without
from holdover.report.html.policies import block_ops
from holdover.report.stack import LOSS, stack_of
from holdover.trace.graph import Phase


def convolutions() -> tuple[nn.Module, tuple[Any, ...]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(4)
    )
    inputs = torch.randn(4, 3, 16, 16)
    model(inputs)
    return model, (inputs,)


def blocks(number: int = 3) -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8)) for _ in range(number))
    ), (torch.randn(64, 8),)


STEPS = {"convolutions": convolutions, "blocks": blocks}


def test_tensors_are_named_as_explain_names_them(made: Made) -> None:
    names = [made.data["strings"][n] for n in made.data["held"]["name"]]
    assert len(set(names)) == len(names)
    assert names == [name_of(made.estimate.trace, row.value) for row in held_values(shown_step(made.estimate.trace))]


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_what_is_held_adds_up_to_the_estimate(name: str, optimizer: str | None) -> None:
    model, args = STEPS[name]()
    estimate = holdover.estimate(model, args, optimizer=optimizer)
    data = page_data(estimate.trace, estimate=estimate)
    assert sum(data["held"]["bytes"]) == estimate.activations_bytes > 0
    assert sum(layer["saved_bytes"] for layer in data["layers"]) == estimate.activations_bytes
    assert sum(layer["weights_bytes"] for layer in data["layers"]) == estimate.weights_bytes
    assert sum(data["modules"]["weights_bytes"]) == estimate.weights_bytes
    assert data["plain"]["peak"]["bytes"] == estimate.later_step_peak_bytes
    assert sum(data["plain"]["peak"]["parts"]) == estimate.later_step_peak_bytes


def test_the_curve_is_the_estimates_timeline(made: Made) -> None:
    trace, data = made.estimate.trace, made.data
    step = [op.id for op in trace.ops if op.step == 1]
    tops = list(accumulate(data["runs"]["top"]))
    assert list(accumulate(data["plain"]["live"])) == [made.estimate.timeline.live_bytes[step[i]] for i in tops]
    categories = [list(accumulate(series)) for series in data["plain"]["by_category"]]
    assert [sum(parts) for parts in zip(*categories, strict=True)] == list(accumulate(data["plain"]["live"]))


def test_every_plan_shows_the_peak_that_it_promises(made: Made) -> None:
    for plan, shown in zip(made.frontier.plans, made.data["plans"], strict=True):
        assert shown["peak"]["bytes"] == plan.predicted_peak_bytes == max(accumulate(shown["live"]))
        assert shown["extra_time"] == plan.extra_time
        dropped = sum(n for n, state in zip(made.data["held"]["bytes"], shown["held"], strict=True) if state == 1)
        assert dropped == sum(m.dropped_bytes for m in plan.modules)
        assert sum(row[2] for row in shown["modules"]) == dropped


def test_runs_cover_the_step_once_and_keep_the_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = blocks(6)
    estimate = holdover.estimate(model, args, optimizer="adamw")
    monkeypatch.setattr(moments, "MOST_RUNS", 40)
    monkeypatch.setattr(moments, "MOST_OPTIMIZER_RUNS", 7)
    shown = shown_step(estimate.trace)
    runs = runs_of(shown)
    assert [run.first for run in runs] == [0, *(run.end for run in runs[:-1])]
    assert runs[-1].end == shown.length
    assert sum(run.phase is Phase.OPTIMIZER for run in runs) == 7
    assert len(runs) <= 47
    for run in runs:
        assert {estimate.trace.ops[n].phase for n in shown.ops[run.first : run.end]} == {run.phase}
    live = watch(shown, workspaces(estimate.trace)[0]).live_bytes
    assert max(live[i] for i in moments.tops(live, runs)) == estimate.later_step_peak_bytes


@pytest.mark.parametrize("name", STEPS)
def test_the_storages_that_are_there_make_up_the_bytes_that_are_live(name: str) -> None:
    model, args = STEPS[name]()
    trace = holdover.estimate(model, args, optimizer="sgd").trace
    shown = shown_step(trace)
    seen = watch(shown, {})
    for i, nbytes in enumerate(seen.live_bytes):
        through = after = 0
        for storage, spans in seen.spans.items():
            through += trace.storages[storage].nbytes * any(a <= i <= b for a, b in spans)
            after += trace.storages[storage].nbytes * any(a <= i < b for a, b in spans)
        assert after <= nbytes <= through


def test_a_dropped_value_is_there_twice_and_a_kept_one_once() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 8))
    trace = holdover.estimate(model, (torch.ones(64, 8),)).trace
    shown = shown_step(trace)
    rows = held_values(shown)
    gelu = next(r for r in rows if trace.ops[shown.ops[r.maker]].name == "aten.gelu.default")
    choices = Choices(frozenset([shown.ops[gelu.maker]]))
    plain = watch(shown, {})
    planned = watch_planned(shown, choices, {}, plain)
    [(made_at, freed)] = plain.spans[gelu.storage]
    first, again = planned.spans[gelu.storage]
    backward = next(i for i, n in enumerate(shown.ops) if trace.ops[n].phase is Phase.BACKWARD)
    assert made_at == first[0] == gelu.maker
    assert first[1] < backward < again[0]
    assert again[0] <= min(gelu.needers)
    assert again[1] <= freed
    for row in rows:
        if row is not gelu:
            assert planned.spans[row.storage] == plain.spans[row.storage]
    assert max(planned.live_bytes) == simulate(trace, choices).peak_bytes


def test_the_needs_of_a_value_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    trace = holdover.estimate(model, (torch.ones(3, 4),)).trace
    shown = shown_step(trace)
    [tanh] = held_values(shown)  # the input exists anyway, and linear's results are not saved
    assert (tanh.nbytes, tanh.shape, tanh.dtype) == (3 * 6 * 4, (3, 6), "float32")
    names = [trace.ops[shown.ops[i]].name for i in tanh.needers]
    assert sorted(names) == ["aten.mm.default", "aten.tanh_backward.default"]
    assert [trace.ops[shown.ops[i]].name for i in tanh.readers] == ["aten.addmm.default"]


def test_why_a_value_is_kept() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x).sin().cos()
            loose = torch.empty_like(hidden).fill_(1.0)
            return (self.second(hidden) * loose).exp()

    trace = holdover.estimate(Step(), (torch.ones(16, 8),), loss=lambda out: (out.sigmoid() ** 2).sum()).trace
    shown = shown_step(trace)
    rows = held_values(shown)
    name = {i: trace.ops[shown.ops[r.maker]].name for i, r in enumerate(rows)}
    cos = next(shown.ops[r.maker] for i, r in enumerate(rows) if name[i] == "aten.cos.default")
    at_peak = {r.storage for r in rows}
    cost = {shown.ops[r.maker]: 1.0 if "exp" in name[i] else 1e-6 for i, r in enumerate(rows)}
    reasons = reasons_of(rows, shown, Choices(frozenset([cos])), at_peak, cost)
    said = {name[i]: reason for i, reason in enumerate(reasons)}
    assert said["aten.cos.default"] == "replayed"
    assert said["aten.sin.default"] == "source"
    assert said["aten.exp.default"] == "dear"
    assert said["aten.sigmoid.default"] == "loss"
    assert set(said.values()) <= set(REASONS)
    assert set(reasons_of(rows, shown, Choices(), at_peak, cost)) == {"no plan"}
    there = reasons_of(rows, shown, Choices(frozenset([cos])), set(), cost)
    assert dict(zip(name.values(), there, strict=True))["aten.exp.default"] == "away"


def test_usual_checkpointing_is_modelled_from_the_blocks(made: Made) -> None:
    model, args = blocks()
    trace = holdover.estimate(model, args).trace
    found = block_ops(trace)
    assert list(found) == ["0", "1", "2"]
    # The last linear's result leaves the block (or the model), so that its op is not among those made again; dropout
    # is a bernoulli_ into memory that is not initialised (kept), a scaling and a product.
    assert {trace.ops[o].name for ops in found.values() for o in ops} >= {"aten.addmm.default", "aten.gelu.default"}
    for ops in found.values():
        assert sum(trace.ops[o].name == "aten.addmm.default" for o in ops) == 1
    policies = {p["name"]: p for p in made.data["policies"]}
    plain = made.data["plain"]["peak"]["bytes"]
    assert policies["every block"]["peak_bytes"] < policies["every second block"]["peak_bytes"] < plain
    assert policies["every block"]["extra_time"] > policies["every second block"]["extra_time"] > 0
    assert set(policies) == {"every block", "every second block", "selective"}


def test_a_model_without_blocks_has_no_policies() -> None:
    trace = holdover.estimate(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), (torch.ones(2, 4),)).trace
    assert block_ops(trace) == {}


def test_the_loss_is_a_layer_of_its_own() -> None:
    trace = holdover.estimate(nn.Linear(4, 4), (torch.ones(2, 4),), loss=lambda out: (out.exp() ** 2).sum()).trace
    layers = stack_of(trace)
    assert layers[LOSS].saved_bytes == 2 * 4 * 4  # the result of exp, which pow saves too
    assert sum(layer.weights_bytes for layer in layers.values()) == (4 * 4 + 4) * 4


def test_the_step_as_it_is_stands_beside_a_plan(made: Made) -> None:
    plan = made.frontier.plans[-1]
    plain = without(plan)
    assert plain.predicted_peak_bytes == plan.unplanned_peak_bytes
    assert plain.choices == ()
    assert isinstance(plan.choices[0], Choice)


def test_positions_go_forward(made: Made) -> None:
    for series in ("first", "top"):
        assert all(a <= b for a, b in pairwise(accumulate(made.data["runs"][series])))


def test_estimates_have_a_page_without_plans(made: Made) -> None:
    data = page_data(made.estimate.trace, estimate=made.estimate)
    assert data["plans"] == []
    assert data["runs"]["seconds"] is None
    assert isinstance(made.estimate, Estimate)
