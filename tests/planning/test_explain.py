"""Explanations against the simulator and numbers counted by hand, and names against what people write."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from holdover.errors import HoldoverError
from holdover.memory.estimate import workspaces
from holdover.memory.life import Fate, name_of
from holdover.memory.simulate import simulate
from holdover.memory.timeline import Choices
from holdover.planning.address import find
from holdover.planning.explain import explain_of
from holdover.planning.steps import Recorded, recorded
from holdover.units import format_bytes

ROWS, WIDTH, WIDE = 1000, 8, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.act(self.up(x))))


@pytest.fixture(scope="module")
def step() -> Recorded:
    model = nn.Sequential(*(Block() for _ in range(4)))
    return recorded(model, (torch.ones(ROWS, WIDTH),), loss=lambda out: out.square().mean(), optimizer="sgd")


def place(step: Recorded, name: str) -> int:
    (value,) = find(step.trace, name)
    return step.trace.values[value].maker


def test_the_effect_is_what_the_simulator_says_with_and_without(step: Recorded) -> None:
    trace = step.trace
    (found,) = explain_of(step, "1.act:0").explanations
    everywhere = [o.id for o in trace.ops if o.name == "aten.gelu.default" and trace.calls[o.call].path == "1.act"]
    assert len(everywhere) == 2  # in both steps
    workspace, _ = workspaces(trace)
    before = simulate(trace, workspace=workspace).peak_bytes
    after = simulate(trace, Choices(frozenset(everywhere)), workspace).peak_bytes
    assert found.alone is not None
    assert (found.alone.peak_before_bytes, found.alone.peak_after_bytes) == (before, after)
    assert found.alone.replays == 1
    assert found.alone.seconds > 0
    assert found.alike is not None
    assert found.alike.dropped == 4


def test_it_says_which_backward_reads_the_value_and_what_the_replay_reads(step: Recorded) -> None:
    (found,) = explain_of(step, "2.up:addmm").explanations
    assert found.life.nbytes == ROWS * WIDE * 4
    assert found.why_saved == ("aten.gelu_backward.default, for the gradient of aten.gelu.default in 2.act",)
    needs = {need.name: need.how for need in found.needs}
    assert needs["2.up.weight"] == needs["2.up.bias"] == "there anyway (parameter)"
    assert needs["1:0"] == "kept for a backward of its own"


def test_ops_whose_results_nobody_keeps_run_again_as_well(step: Recorded) -> None:
    (found,) = explain_of(step, "0.drop:2").explanations  # the mask, divided in place after it was drawn
    assert found.with_it == ("aten.bernoulli_.float in 0.drop",)
    assert found.alone is not None
    assert found.alone.replays == 2


def test_a_value_that_backward_does_not_read_is_not_kept() -> None:
    step = recorded(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), (torch.ones(64, 8),))
    (found,) = explain_of(step, "0:addmm").explanations  # tanh's backward reads its result
    assert found.obstacle == "backward does not read it, so it is not kept in the first place"


def test_a_value_that_is_not_there_at_the_peak_gains_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 2000), nn.GELU(), nn.Linear(2000, 8))
    step = recorded(model, (torch.ones(2, 8),), optimizer="adamw")
    account = explain_of(step, "1:gelu")
    (found,) = account.explanations
    assert "optimizer" in account.peak_at
    assert not found.at_peak
    assert found.alone is not None
    assert found.alone.saved_bytes == 0
    assert "it is not there when memory is highest, so dropping it gains nothing" in str(account)


def test_a_parameter_is_there_anyway(step: Recorded) -> None:
    (found,) = explain_of(step, "3.up.weight").explanations
    assert found.life.fate is Fate.EXISTING
    assert found.obstacle == "it is a parameter, there before the step and after it"
    assert found.alone is None


def test_the_loss_is_out_of_a_plans_reach() -> None:
    step = recorded(nn.Linear(8, 8), (torch.ones(4, 8),), loss=lambda out: out.exp().sum())
    (found,) = explain_of(step, "loss").explanations  # exp's backward reads its result
    assert found.life.op_name == "aten.exp.default"
    assert "made by the loss, outside the model" in found.obstacle


def test_a_module_is_a_row_per_tensor_and_all_of_them_together(step: Recorded) -> None:
    account = explain_of(step, "1")
    names = [found.life.name for found in account.explanations]
    assert names == ["1.up:0", "1.act:0", "1.drop:2", "1:0"]
    assert account.held == (len(names), sum(found.life.nbytes for found in account.explanations))
    assert account.together is not None
    alone = [found.alone.saved_bytes for found in account.explanations if found.alone]
    assert account.together.saved_bytes >= max(alone)
    text = str(account)
    assert "all that can be dropped, together" in text
    assert account.to_dict()["target"] == "1"


def test_a_plan_says_what_it_does_and_why(step: Recorded) -> None:
    plan = step.plan("min", time_limit=3)
    account = explain_of(step, "1.act:0", plan=plan)
    (found,) = account.explanations
    assert found.planned is not None
    assert found.planned.fate is Fate.DROPPED
    assert found.planned.why.startswith("kept, the peak would be")
    assert found.planned.life.replays
    text = str(account)
    assert "the plan: dropped" in text
    assert "made again" in text
    fitting = step.plan(1 << 40, time_limit=3)
    (found,) = explain_of(step, "1.act:0", plan=fitting).explanations
    assert found.planned is not None
    assert (found.planned.fate, found.planned.why) == (Fate.KEPT, "the step fits as it is: nothing is dropped")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("1.akt", "there is no module or tensor '1.akt' in this step; near it: 1.act"),
        ("act", "there is no module or tensor 'act' in this step; near it: 0.act, 1.act"),
        ("act:gelu", "near it: 0.act:gelu, 1.act:gelu"),
        ("gelu", "near it: 0.act:gelu, 1.act:gelu"),
        ("atc", "near it: 0.act, 1.act"),
        ("up.weight", "near it: 0.up.weight, 1.up.weight"),
        ("1.act:relu", "1.act has no op 'relu'; its ops: 1.act:0 (aten.gelu.default)"),
        ("1.act:7", "1.act has no op '7'"),
        ("zzzz", "there is no module or tensor 'zzzz' in this step; it begins with: 0, 0.up"),
    ],
)
def test_names_that_are_none_are_answered_with_near_ones(step: Recorded, name: str, said: str) -> None:
    with pytest.raises(HoldoverError) as error:
        explain_of(step, name)
    assert said in str(error.value)


def test_names_find_what_they_say(step: Recorded) -> None:
    trace = step.trace
    assert [name_of(trace, v) for v in find(trace, "1.act")] == ["1.act:0"]
    assert find(trace, "1.act:gelu") == find(trace, "1.act:aten.gelu.default") == find(trace, "1.act:0")
    assert set(find(trace, "1")) < set(find(trace, "."))
    assert all(trace.ops[trace.values[v].maker].step == 1 for v in find(trace, "."))
    (value,) = find(trace, "0.up.weight")
    assert trace.storages[trace.values[value].storage].name == "0.up.weight"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("1:gelu", ["1.act:gelu"]),  # of a module in it
        (":gelu", [f"{n}.act:gelu" for n in range(4)]),
        ("0.up:gelu", []),
        ("9:gelu", [f"{n}.act:gelu" for n in range(4)]),
    ],
)
def test_what_is_offered_is_there_and_is_not_what_was_asked_for(step: Recorded, name: str, near: list[str]) -> None:
    with pytest.raises(HoldoverError) as error:
        find(step.trace, name)
    said = str(error.value)
    assert said.partition("; near it: ")[2] == ", ".join(near)
    for offered in near:
        assert find(step.trace, offered)


def test_an_op_of_a_module_that_only_holds_others_is_answered_with_theirs(step: Recorded) -> None:
    with pytest.raises(HoldoverError) as error:
        find(step.trace, ":tanh")
    assert str(error.value).startswith("the model itself makes nothing of its own, only the modules in it do, such as ")
    assert "0.act:0 (aten.gelu.default)" in str(error.value)


def test_no_figure_of_a_modules_table_is_cut(step: Recorded) -> None:
    account = explain_of(step, ".", plan=step.plan(1 << 40, time_limit=1))
    table = [re.split(r"\s{2,}", line.strip()) for line in str(account).splitlines() if re.match(r"\s*\d[.:]", line)]
    assert len(table) == len({found.life.op for found in account.explanations})
    for row in table:
        assert not any("…" in cell for cell in row[2:])
    sizes = {row[2] for row in table}
    assert {format_bytes(ROWS * WIDE * 4), format_bytes(ROWS * WIDTH * 4)} <= sizes
