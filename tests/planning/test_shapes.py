"""Plans for several input shapes: one budget, measured peaks at each length, and which plan a forward follows."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import sys
import warnings
from typing import Any

import pytest
import torch
from tests.planning.blocks import Block, Checkpointed
from torch import nn

import holdover
from holdover.memory.measure import measure_peak
from holdover.planning.inputs import PlannedShape, covers, shapes_of, show
from holdover.planning.plan import Plan
from holdover.recompute.shapes import guide_of
from holdover.units import format_bytes, format_share

LENGTHS = (32, 64, 128)


class GPT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3, vocabulary: int = 64) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(LENGTHS[-1] * 2, width)
        self.blocks = nn.ModuleList(Block(width, 2, causal=True) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def ids(length: int, batch: int = 4) -> torch.Tensor:
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(length))


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT()


def also(*lengths: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [((ids(n),), {}) for n in lengths]


@pytest.fixture(scope="module")
def by_length() -> Plan:
    """A budget that only the longest inputs exceed."""
    return holdover.plan(gpt(), (ids(LENGTHS[0]),), budget="70%", also=also(*LENGTHS[1:]), time_limit=3)


@pytest.fixture(scope="module")
def for_all() -> Plan:
    """Nearly equal shapes, for which one plan is enough."""
    return holdover.plan(gpt(), (ids(120),), budget="70%", also=also(124, 128), time_limit=9)


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x)
    out.sum().backward()
    return out


def promises(plan: Plan) -> dict[Any, PlannedShape]:
    return {shape.shapes: shape for shape in plan.shapes}


@pytest.mark.parametrize("which", ["by_length", "for_all"])
def test_peaks_are_promised_and_gradients_exact_at_every_length(which: str, request: pytest.FixtureRequest) -> None:
    plan: Plan = request.getfixturevalue(which)
    plain, planned = gpt(), gpt()
    holdover.apply_(planned, plan)
    known = promises(plan)
    assert len(known) == 3
    assert plan.budget_bytes is not None
    for shapes, promise in known.items():
        x = ids(shapes[0][1])
        for model in (plain, planned):
            model.zero_grad(set_to_none=True)
        _, unplanned = measure_peak(lambda x=x: step(plain, x), plain, x)  # type: ignore[misc]
        _, peak = measure_peak(lambda x=x: step(planned, x), planned, x)  # type: ignore[misc]
        assert peak <= plan.budget_bytes
        assert peak == pytest.approx(promise.predicted_peak_bytes, rel=0.01, abs=16384)
        assert unplanned == pytest.approx(promise.unplanned_peak_bytes, rel=0.01, abs=16384)
        for p, q in zip(plain.parameters(), planned.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)


def test_short_inputs_pay_nothing_where_only_long_ones_exceed_the_budget(by_length: Plan) -> None:
    assert [shape.shapes for shape in by_length.shapes] == [((4, n),) for n in LENGTHS]
    assert [shape.variant for shape in by_length.shapes] == [1, 1, 0]
    assert by_length.choices
    assert [v.choices for v in by_length.variants] == [()]
    assert [shape.shapes for shape in by_length.variants[0].shapes] == [((4, n),) for n in LENGTHS[:2]]
    model = holdover.apply_(gpt(), by_length)
    for length, replays in ((32, False), (128, True)):
        step(model, ids(length))
        done = holdover.inspect(model)
        assert (done.replayed_ops > 0) == replays


def test_one_plan_is_enough_where_shapes_hardly_differ(for_all: Plan) -> None:
    assert for_all.variants == ()
    assert [shape.shapes for shape in for_all.shapes] == [((4, n),) for n in (120, 124, 128)]
    assert {shape.variant for shape in for_all.shapes} == {0}
    assert for_all.predicted_peak_bytes == for_all.shapes[-1].predicted_peak_bytes


def test_a_plan_prints_its_promise_at_each_shape(by_length: Plan) -> None:
    printed = str(by_length)
    assert "at each of the input shapes" in printed
    for length, ops, number in ((32, "nothing", 2), (64, "nothing", 2), (128, r"\d+ ops", 1)):
        (shape,) = [s for s in by_length.shapes if s.shapes == ((4, length),)]
        peak, time = format_bytes(shape.predicted_peak_bytes, "MiB"), format_share(shape.extra_time, sign=True)
        assert re.search(rf"4x{length} .* {peak} +{re.escape(time)} +{ops} +{number} of 2", printed)


@pytest.mark.parametrize("which", ["by_length", "for_all"])
def test_the_headline_is_that_of_the_dearest_shape(which: str, request: pytest.FixtureRequest) -> None:
    plan: Plan = request.getfixturevalue(which)
    dearest = max(plan.shapes, key=lambda shape: shape.unplanned_peak_bytes)
    assert dearest.shapes == ((4, 128),)
    assert plan.inputs == "(int64[4, 128])"
    assert plan.unplanned_peak_bytes == dearest.unplanned_peak_bytes
    assert plan.predicted_peak_bytes == dearest.predicted_peak_bytes
    assert plan.extra_time == dearest.extra_time > 0
    assert not any("nothing is recomputed" in note for note in plan.notes)
    assert "nothing is recomputed" not in str(plan)


def test_shapes_that_all_fit_are_told_so() -> None:
    plan = holdover.plan(gpt(), (ids(32),), budget="1GiB", also=also(64), time_limit=2)
    assert [shape.shapes for shape in plan.shapes] == [((4, 32),), ((4, 64),)]
    assert plan.choices == ()
    assert plan.variants == ()
    assert plan.unplanned_peak_bytes == plan.shapes[1].predicted_peak_bytes
    assert "nothing is recomputed" in str(plan)


def test_a_share_is_one_of_the_largest_shape(by_length: Plan) -> None:
    largest = max(shape.unplanned_peak_bytes for shape in promises(by_length).values())
    assert by_length.budget_bytes == int(0.7 * largest)


def test_verification_holds_each_shape_to_its_own_promise(by_length: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdover.verification.MAX_ROUNDS", 1)
    known = promises(by_length)
    for length in (32, 128):
        found = holdover.verify(gpt(), (ids(length),), plan=by_length)
        assert found.holds
        assert found.predicted_peak_bytes == known[((4, length),)].predicted_peak_bytes


def test_plans_with_variants_come_back_from_json(by_length: Plan) -> None:
    again = Plan.from_json(by_length.to_json())
    assert again == by_length
    for length in LENGTHS:
        assert chosen(again, ids(length)) == chosen(by_length, ids(length))


def test_a_shape_that_cannot_meet_the_budget_is_named() -> None:
    with pytest.raises(holdover.BudgetError, match=r"For inputs of 4x128: A budget of .* cannot be met") as refused:
        holdover.plan(gpt(), (ids(32),), budget="600KiB", also=also(128), time_limit=2)
    assert refused.value.floor_bytes > 600 * 1024


def test_the_lowest_for_several_is_the_highest_of_their_lowest() -> None:
    plan = holdover.plan(gpt(), (ids(32),), budget="min", also=also(128), time_limit=3)
    largest = max(promises(plan).values(), key=lambda shape: shape.predicted_peak_bytes)
    assert plan.budget_bytes is None
    assert largest.shapes == ((4, 128),)
    assert largest.predicted_peak_bytes < largest.unplanned_peak_bytes


def chosen(plan: Plan, x: torch.Tensor) -> Any:
    guide = guide_of(plan)
    assert guide is not None
    return guide.choose((x,), {}).scripts


def test_an_unknown_shape_follows_the_nearest_that_is_not_smaller(by_length: Plan) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not chosen(by_length, ids(20))
        assert not chosen(by_length, ids(64, batch=3))
        assert set(chosen(by_length, ids(100))) == set(by_length.script)
        assert set(chosen(by_length, ids(256, batch=2))) == set(by_length.script)  # as many elements, other proportions


def test_longer_inputs_than_planned_are_warned_about_once_with_numbers(by_length: Plan) -> None:
    model, plain = holdover.apply_(gpt(), by_length), gpt()
    warning = r"inputs of 4x128, peak .*this forward has 4x256, 2.00 times .*about "
    with pytest.warns(UserWarning, match=warning):
        step(model, ids(256))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, ids(250))
    step(plain, ids(256))
    step(plain, ids(250))
    assert all(
        torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
        for p, q in zip(plain.parameters(), model.parameters(), strict=True)
    )


def called_here(model: nn.Module, x: torch.Tensor) -> int:
    """Calls the model, and says on which line that was."""
    line = sys._getframe().f_lineno + 1
    model(x)
    return line


@pytest.mark.parametrize("how", ["applied", "in a block", "inside another model", "checkpointed"])
def test_the_warning_names_the_line_that_calls_the_model(by_length: Plan, how: str) -> None:
    model: nn.Module = gpt()
    with by_length.recompute() if how == "in a block" else contextlib.nullcontext():
        if how != "in a block":
            holdover.apply_(model, by_length)
        if how == "inside another model":
            model = nn.Sequential(nn.Sequential(model))
        if how == "checkpointed":
            model = Checkpointed(model)
        with pytest.warns(UserWarning, match="this forward has 4x256") as said:
            place = __file__, called_here(model, ids(256))
    if how == "checkpointed":  # the nearest line of the user's, which is the forward of a module
        forward = Checkpointed.forward.__code__
        place = forward.co_filename, forward.co_firstlineno + 1
    assert (said[0].filename, said[0].lineno) == place


def test_the_estimate_at_other_shapes_leaves_weights_alone() -> None:
    shape = PlannedShape(((4, 100),), 1500, 2000, 0.1, fixed_bytes=500)
    assert shape.estimated_peak_bytes(((4, 300),)) == 500 + 3 * 1000


def test_a_block_of_code_chooses_when_the_model_is_called(by_length: Plan) -> None:
    model = gpt()
    for length, replays in ((32, False), (128, True)):
        with by_length.recompute() as session:
            loss = model(ids(length)).sum()
        loss.backward()
        assert (session.ledger.replayed_ops > 0) == replays


def test_copies_of_a_model_choose_too(by_length: Plan) -> None:
    model = holdover.apply_(gpt(), by_length)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        step(twin, ids(128))
        assert holdover.inspect(twin).replayed_ops > 0


@pytest.mark.parametrize("pair", [(torch.ones(2),), [torch.ones(2), {}], "x"], ids=["no kwargs", "no tuple", "text"])
def test_what_is_no_pair_is_refused(pair: Any) -> None:
    with pytest.raises(holdover.PlanError, match=r"also\[0\] is not a pair \(args, kwargs\)"):
        holdover.plan(gpt(), (ids(32),), budget="min", also=[pair])


def test_several_shapes_are_not_planned_for_the_compiler_or_another_card() -> None:
    with pytest.raises(holdover.PlanError, match="plan for the largest of the shapes alone"):
        holdover.plan(gpt(), (ids(32),), budget="min", also=also(64), compiled=True)
    with pytest.raises(holdover.PlanError, match="not for h100-80gb"):
        holdover.plan(gpt(), (ids(32),), budget="min", also=also(64), device="h100-80gb")


def test_shapes_in_words() -> None:
    assert show(shapes_of((torch.ones(2, 3),), {"b": torch.ones(2, 3), "a": torch.tensor(1)})) == "2x3, ()"
    assert show(()) == "no tensor"
    assert not covers(((2, 3),), ((2, 3), (1,)))
