"""Plans on the compiler's graphs, with the backend that needs no C++ compiler: exact, and as small as promised."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import helpers
from tests.integrations.helpers import assert_equal, loss, peak, results, tokens, transformer, within_promise
from tests.planning.blocks import Checkpointed
from torch import nn

import holdover
from holdover import ApplyError, BudgetError, Plan, PlanError, TraceError
from holdover.integrations.compile import backend
from holdover.integrations.regions import compile_regions, regions


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def planned(model: nn.Module, x: torch.Tensor, budget: int | str, **options: Any) -> Plan:
    return holdover.plan(model, (x,), loss=loss, budget=budget, compiled="aot_eager", time_limit=4.0, **options)


def twin(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return copy.deepcopy(model)


def compiled(model: nn.Module, names: tuple[str, ...] = ("",)) -> nn.Module:
    """The same, compiled without a plan."""
    model = twin(model)
    compile_regions(model, "aot_eager", names)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("names", [("",), tuple(f"blocks.{i}" for i in range(4))], ids=["whole", "blocks"])
def test_budgets_are_met_exactly_and_more_budget_costs_no_more(names: tuple[str, ...]) -> None:
    model, x = transformer(), tokens()
    plain = compiled(model, names)
    expected, unplanned = results(plain, x), peak(plain, x)
    if names != ("",):
        for name in names:
            model.get_submodule(name).compile()
    lowest = planned(model, x, "min")
    assert abs(lowest.unplanned_peak_bytes - unplanned) < 16384
    assert lowest.predicted_peak_bytes < 0.65 * unplanned
    middle = planned(model, x, (lowest.predicted_peak_bytes + lowest.unplanned_peak_bytes) // 2)
    assert middle.budget_bytes is not None
    assert middle.predicted_peak_bytes <= middle.budget_bytes
    assert 0 < middle.extra_time < lowest.extra_time
    assert middle.bound_extra_time <= middle.extra_time
    for plan in (middle, lowest):
        assert plan.regions == names
        follower = twin(model)
        assert holdover.apply_(follower, plan) is follower
        assert_equal(results(follower, x), expected)
        measured = peak(follower, x)
        assert abs(measured - plan.predicted_peak_bytes) < 0.01 * measured + 16384


def test_equal_blocks_are_one_graph_with_one_set_of_choices() -> None:
    model, x = transformer(), tokens().requires_grad_()
    for block in model.blocks:
        block.compile()
    plan = planned(model, x, "min")
    assert len({choice.call for choice in plan.choices}) == 1
    assert any(note.startswith("1 compiled graph: graph 0 (4 calls)") for note in plan.notes)
    assert {module.path for module in plan.modules} == {"graph 0"}
    assert plan.choices[0].call not in str(plan)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("build", "shape"), [(lambda: transformer(dropout=0.3), None), (helpers.convolutions, (4, 3, 12, 12))],
    ids=["dropout", "batch norm in place"],
)  # fmt: skip
def test_random_numbers_and_running_statistics_end_as_without_a_plan(build: Any, shape: Any) -> None:
    model, x = build(), tokens() if shape is None else torch.randn(*shape)
    expected = results(compiled(model), x)
    plan = planned(model, x, "min")
    assert plan.choices
    follower = holdover.apply_(twin(model), plan)
    assert_equal(results(follower, x), expected)
    assert within_promise(peak(follower, x), plan)


def test_the_users_activation_checkpointing_keeps_its_say() -> None:
    whole, x = transformer(dropout=0.2), tokens()
    model = copy.deepcopy(whole)
    for i in range(2):
        model.blocks[i] = Checkpointed(model.blocks[i])
    plain = compiled(model)
    expected, before = results(plain, x), peak(plain, x)
    plan = planned(model, x, "min")
    assert abs(plan.unplanned_peak_bytes - before) < 16384
    assert plan.unplanned_peak_bytes < planned(whole, x, "min").unplanned_peak_bytes
    follower = holdover.apply_(twin(model), plan)
    assert_equal(results(follower, x), expected)
    assert within_promise(peak(follower, x), plan)


def test_another_batch_size_follows_the_plan_when_sizes_become_symbolic() -> None:
    model, x = transformer(2), tokens()
    plan = planned(model, x, "min")
    follower = twin(model)
    chosen = backend(plan)
    follower.compile(backend=chosen)
    for batch in (8, 4, 6):
        follower(tokens(batch)).sum().backward()
    assert len(chosen.partition.matched) >= 2
    assert chosen.partition.unmatched == []


def test_the_optimizer_and_precision_are_part_of_the_plan() -> None:
    model, x = transformer(2), tokens()
    plan = planned(model, x, "100%", optimizer="adamw", precision="bf16-mixed")
    assert plan.choices == ()
    without = planned(model, x, "100%", precision="bf16-mixed").unplanned_peak_bytes
    state = 2 * sum(p.nbytes for p in model.parameters())
    assert abs(plan.unplanned_peak_bytes - without - state) < 16384
    assert (plan.precision, plan.optimizer) == ("bf16-mixed", "AdamW")


def test_a_saved_plan_compiles_the_same_blocks_of_another_model(tmp_path: Path) -> None:
    model, x = transformer(), tokens()
    for block in model.blocks:
        block.compile()
    plan = planned(model, x, "min")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    fresh = transformer()
    holdover.apply_(fresh, loaded)
    assert tuple(regions(fresh)) == plan.regions
    assert within_promise(peak(fresh, x), plan)


def test_verifying_compares_with_the_same_code_without_the_plan() -> None:
    model, x = transformer(2, dropout=0.2), tokens()
    plan = planned(model, x, "min")
    verdict = holdover.verify(model, (x,), loss=loss, plan=plan)
    assert verdict.exact
    assert verdict.within_promise
    assert abs(verdict.measured_unplanned_peak_bytes - plan.unplanned_peak_bytes) < 16384


def test_many_plans_on_one_model_are_all_followed() -> None:
    model, x = transformer(1), tokens()
    plan = planned(model, x, "min")
    for _ in range(10):
        holdover.apply_(model, plan)
        assert within_promise(peak(model, x), plan)
        holdover.remove_(model)


def test_removing_puts_back_what_was_there() -> None:
    model, x = transformer(2), tokens()
    plan = planned(model, x, "min")
    holdover.apply_(model, plan)
    with pytest.raises(ApplyError, match="follows a plan"):
        holdover.apply_(model, plan)
    holdover.remove_(model)
    assert model._compiled_call_impl is None
    model.compile(backend="eager")
    before = model._compiled_call_impl
    holdover.apply_(model, plan)
    assert model._compiled_call_impl is not before
    assert holdover.remove_(model)._compiled_call_impl is before
    with pytest.raises(ApplyError, match="follows no plan"):
        holdover.remove_(model)


def test_what_is_said_of_ops_alone_is_refused_for_compiled_code() -> None:
    model, x = transformer(1), tokens()
    plan = planned(model, x, "min")
    holdover.apply_(model, plan)
    with pytest.raises(ApplyError, match=r"for compiled code.*it has not run yet.*holdover\.verify"):
        holdover.inspect(model)
    results(model, x)
    with pytest.raises(ApplyError, match="made 1 graph that the plan knows, and 0 that it does not"):
        holdover.inspect(model)
    holdover.remove_(model)
    with pytest.raises(ApplyError, match="follows no plan"):
        holdover.inspect(model)
    with pytest.raises(ApplyError, match=r"places in the compiler's graphs.*apply_"):
        plan.recompute()
    with pytest.raises(PlanError, match="an estimate is of the ops that run without it"):
        plan.to_html(holdover.estimate(model, (x,), loss=loss))


def test_planning_leaves_the_model_alone() -> None:
    model, x = transformer(2, dropout=0.1), tokens()
    state, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    planned(model, x, "min")
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert model._compiled_call_impl is None


def test_a_budget_that_cannot_be_met_says_the_floor() -> None:
    model, x = transformer(2), tokens()
    with pytest.raises(BudgetError, match="lowest peak that recomputation reaches") as error:
        planned(model, x, "1KiB")
    assert error.value.floor_bytes == planned(model, x, "min").predicted_peak_bytes


def test_a_graph_that_the_plan_does_not_know_is_told_once() -> None:
    model, x = transformer(2, dropout=0.2), tokens()
    follower = holdover.apply_(twin(model), planned(model, x, "min")).eval()  # without dropout: another graph
    with pytest.warns(UserWarning, match=r"does not know.*it knows 1 other graph\..*train and eval mode") as said:
        follower(x)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follower(x[:, :32])


def test_what_cannot_be_planned_is_refused() -> None:
    model, x = transformer(1), tokens()
    with pytest.raises(PlanError, match=r"'tensorrt'.*inductor, aot_eager"):
        holdover.plan(model, (x,), loss=loss, budget="min", compiled="tensorrt")
    with pytest.raises(PlanError, match="put the loss into the module"):
        planned(model, x, "min", with_loss=True)
    eager = holdover.plan(model, (x,), loss=loss, budget="min")
    with pytest.raises(ApplyError, match=r"made for eager mode.*compiled=True"):
        backend(eager)
    holdover.apply_(model, eager)
    with pytest.raises(ApplyError, match=r"follows a plan for eager mode.*remove_"):
        planned(model, x, "min")


def test_a_model_without_a_graph_is_refused() -> None:
    class Broken(nn.Linear):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    with pytest.raises(TraceError, match="no graph with a backward"):
        planned(Broken(32, 4), tokens(), "min")


def test_other_regions_than_planned_are_refused() -> None:
    model, x = transformer(2), tokens()
    plan = planned(model, x, "min")
    model.blocks[1].compile()
    with pytest.raises(ApplyError, match=r"for the whole model.*blocks\.1 is compiled"):
        holdover.apply_(model, plan)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such day")


def test_a_step_that_fails_when_compiled_is_an_error_of_ours() -> None:
    with pytest.raises(TraceError, match=r"fails when compiled by aot_eager: .*no such day"):
        holdover.plan(Failing(), (torch.zeros(2, 4),), budget="80%", compiled="aot_eager")
