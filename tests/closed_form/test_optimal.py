"""The menu against every set of ops, the choice against every assignment."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from holdover.closed_form.account import account_bytes
from holdover.closed_form.architecture import HUGGING_FACE, MEGATRON, PAPER, Architecture, Kernels, Kind
from holdover.closed_form.estimate import DEFAULT_CLUSTER, closed_form
from holdover.closed_form.fitting import menus_of
from holdover.closed_form.layers import layer
from holdover.closed_form.layout import Layout
from holdover.closed_form.optimal import Dish, Group, choose, hull, menu
from holdover.closed_form.parameters import States
from holdover.closed_form.presets import PRESETS
from holdover.closed_form.rates import op_seconds
from holdover.closed_form.recompute import Recompute
from holdover.closed_form.rows import Model, build_rows
from holdover.errors import BudgetError

GPT, LLAMA, MIXTRAL = PRESETS["gpt-22b"], PRESETS["llama3-8b"], PRESETS["mixtral-8x7b"]
OPTIMAL = Recompute(granularity="optimal")


def items(architecture: Architecture, layout: Layout) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted({**layout.values(architecture), "ranks_tp": layout.tp, "ranks_ep": layout.ep}.items()))


def every_set(architecture: Architecture, kernels: Kernels, layout: Layout, kind: Kind) -> list[tuple[int, float]]:
    """Bytes and seconds of every set of replayed ops, the slow way; ops that feed nothing are tried too."""
    listed, values = layer(architecture, kernels, kind), dict(items(architecture, layout))
    tokens = layout.tokens(architecture)
    needed = {value.name for value in listed.stored}
    ops = [op for op in listed.ops if any(v.op == op.name for v in listed.values)]
    sizes = {value.name: int(value.rank_bytes.at(values) * tokens) for value in listed.values}
    seconds = {op.name: float(op_seconds([op], values, tokens, DEFAULT_CLUSTER, 2).forward) for op in ops}
    found = []
    for size in range(len(ops) + 1):
        for chosen in itertools.combinations(ops, size):
            names = {op.name for op in chosen}
            wanted = needed | {name for op in chosen for name in op.inputs}
            kept = sum(sizes[v.name] for v in listed.values if v.name in wanted and v.op not in names)
            found.append((kept, sum(seconds[name] for name in names)))
    return found


@pytest.mark.parametrize(
    ("architecture", "kernels", "layout"),
    [
        pytest.param(LLAMA, MEGATRON, Layout(), id="llama"),
        pytest.param(LLAMA, HUGGING_FACE, Layout(), id="llama, eager"),
        pytest.param(LLAMA, MEGATRON, Layout(tp=8, sequence_parallel=True), id="llama, tensor parallel"),
        pytest.param(GPT, Kernels(), Layout(), id="gpt, fused"),
    ],
)
def test_the_menu_is_the_front_of_every_set(architecture: Architecture, kernels: Kernels, layout: Layout) -> None:
    dishes = menu(
        layer(architecture, kernels), items(architecture, layout), layout.tokens(architecture), DEFAULT_CLUSTER, 2
    )
    front = []
    for kept, seconds in sorted(every_set(architecture, kernels, layout, "dense")):
        if not front or seconds < front[-1][1] - 1e-15:
            front.append((kept, seconds))
    assert [(dish.kept_bytes, pytest.approx(dish.seconds)) for dish in reversed(dishes)] == front


def test_the_ends_of_a_menu() -> None:
    listed = layer(GPT, PAPER)
    dishes = menu(listed, items(GPT, Layout()), 2048, DEFAULT_CLUSTER, 2)
    assert dishes[0].replayed == ()
    assert dishes[0].kept_bytes == listed.bytes().at(dict(items(GPT, Layout()))) * 2048
    assert "layer input" in dishes[-1].kept
    # The layer's input, and the statistics that the norms would make again are nothing beside it.
    assert dishes[-1].kept_bytes < 2.01 * 2048 * 6144
    # Less than running the whole layer again: what makes only the layer's output is left out.
    assert "MLP residual addition" not in dishes[-1].replayed


def dish(kept: int, seconds: float, remade: int = 0) -> Dish:
    return Dish(kept, remade, seconds, 0.0, (), ())


def brute(dishes: tuple[Dish, ...], groups: list[Group], budget: float, least: float) -> float | None:
    """Least seconds over all assignments."""
    ways = []
    for group in groups:
        ways.append([
            x for x in itertools.product(range(group.layers + 1), repeat=len(dishes)) if sum(x) == group.layers
        ])  # fmt: skip
    best = None
    for picks in itertools.product(*ways):
        pairs = [
            (group, option, count)
            for group, counts in zip(groups, picks, strict=True)
            for option, count in zip(dishes, counts, strict=True)
            if count
        ]
        held = sum(option.kept_bytes * group.in_flight * count for group, option, count in pairs)
        working = max([least, *(option.remade_bytes for _, option, _ in pairs)])
        seconds = sum(option.seconds * count for _, option, count in pairs)
        if held + working <= budget and (best is None or seconds < best):
            best = seconds
    return best


MENU = (dish(100, 0.0), dish(70, 1.0, 30), dish(45, 3.0, 55), dish(40, 3.2, 60), dish(10, 9.0, 90))


@pytest.mark.parametrize("least", [0, 80])
@pytest.mark.parametrize("budget", range(100, 1300, 37))
def test_the_choice_is_the_best_of_all(budget: int, least: int) -> None:
    groups = [Group("dense", 3, 2), Group("moe", 2, 3)]
    menus: dict[Kind, tuple[Dish, ...]] = {"dense": MENU, "moe": MENU}
    expected = brute(MENU, groups, budget, least)
    found = choose(menus, groups, budget, least_working=least)
    assert (found and pytest.approx(found.seconds)) == expected
    if found is not None:
        assert found.bytes + max(found.working_bytes, least) <= budget
        assert found.bound_seconds <= found.seconds + 1e-9
    walked = choose(menus, groups, budget, least_working=least, exact=False)
    if walked is not None:
        assert walked.bytes + max(walked.working_bytes, least) <= budget
        assert expected is not None
        assert walked.seconds >= expected - 1e-9
        assert walked.bound_seconds <= expected + 1e-9


def test_the_hull_is_convex_and_keeps_both_ends() -> None:
    corners = hull(MENU)
    assert corners[0] is MENU[0]
    assert corners[-1] is MENU[-1]
    slopes = [(y.seconds - x.seconds) / (x.kept_bytes - y.kept_bytes) for x, y in itertools.pairwise(corners)]
    assert slopes == sorted(slopes)


def test_nothing_is_recomputed_when_all_fits() -> None:
    found = closed_form(LLAMA, Layout(dp=8, zero=3), recompute=OPTIMAL, memory_bytes=2**40)
    assert found.extra_time == 0
    assert found.hardware_flops == found.model_flops
    assert found.stages[0].chosen == (("dense", 32, ()),)


@pytest.mark.parametrize("gib", [40, 50, 60, 70])
def test_the_budget_is_met_and_more_memory_never_costs_time(gib: int) -> None:
    layout = Layout(dp=8, zero=3, micro_batch=2)
    tight, loose = (
        closed_form(LLAMA, layout, recompute=OPTIMAL, memory_bytes=size * 2**30) for size in (gib, gib + 10)
    )
    assert tight.peak_bytes <= gib * 2**30
    assert tight.extra_time >= loose.extra_time
    assert sum(count for _, count, _ in tight.stages[0].chosen) == 32


def test_it_beats_megatrons_whole_layers_at_the_same_memory() -> None:
    layout = Layout(dp=8, zero=3, micro_batch=2)
    for count in (8, 16, 24):
        block = closed_form(LLAMA, layout, recompute=Recompute(granularity="full", method="block", num_layers=count))
        best = closed_form(LLAMA, layout, recompute=OPTIMAL, memory_bytes=block.peak_bytes)
        assert best.peak_bytes <= block.peak_bytes
        assert best.replay_seconds < 0.6 * block.replay_seconds


def test_an_impossible_budget_names_the_floor() -> None:
    with pytest.raises(BudgetError, match=r"stage 0 needs .* even with everything recomputed") as caught:
        closed_form(LLAMA, Layout(), recompute=OPTIMAL, memory_bytes=80 * 2**30)
    assert caught.value.floor_bytes == sum(caught.value.parts.values())
    assert caught.value.floor_bytes > caught.value.budget_bytes


def test_kinds_share_a_budget() -> None:
    model = PRESETS["deepseek-v3"]
    layout = Layout(
        tp=8, pp=16, ep=8, dp=8, sequence_parallel=True, zero=1, micro_batches=32,
        stage_layers=(4,) * 15 + (1,),
    )  # fmt: skip
    rows = build_rows(Model(model, MEGATRON, States(), OPTIMAL), [layout])
    assert set(menus_of(Model(model, MEGATRON, States(), OPTIMAL), rows, 0, DEFAULT_CLUSTER)) == {"dense", "moe"}
    plain = closed_form(model, layout)
    tight = closed_form(model, layout, recompute=OPTIMAL, memory_bytes=plain.peak_bytes - 4 * 2**30)
    assert tight.peak_bytes <= plain.peak_bytes - 4 * 2**30
    assert {kind for kind, _, _ in tight.stages[0].chosen} == {"dense", "moe"}
    assert account_bytes(Model(model, MEGATRON, States(), OPTIMAL), rows).total.max() == plain.peak_bytes
