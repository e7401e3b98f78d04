"""Printed estimates: the figures add up as printed, layers are told apart, nothing depends on a terminal."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

import holdover
from holdover.cli.gpt import GPT, Shape, batches
from holdover.memory.estimate import Estimate
from holdover.planning.plan import Choice, ModuleSummary, Plan
from holdover.report.estimate_view import Layer, fold, layers_of
from holdover.report.tables import MAX_LAYERS, WIDTH
from holdover.report.text import render_estimate, render_verification
from holdover.units import binary_unit, format_bytes
from holdover.verification import Verification

SHAPE = Shape(layers=3, width=64, heads=2, context=32, batch=2)


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    return holdover.estimate(GPT(SHAPE), next(batches(SHAPE, 1, 0)), optimizer="adamw")


def columns_of(printed: str, title: str) -> list[list[str]]:
    """Rows of the table whose first heading is `title`: name, then its figures."""
    lines = iter(printed.splitlines())
    next(line for line in lines if line.strip().startswith(title))
    next(lines)  # the rule
    rows = []
    for line in lines:
        if not line.strip():
            if rows[-1][0] == "total":
                break
            continue
        rows.append([part.strip() for part in re.split(r"\s{2,}", line.strip())])
        if rows[-1][0] == "total":
            break
    return rows


def cents(figure: str) -> int:
    return round(float(figure.replace(",", "")) * 100)


def test_the_parts_at_the_peak_add_up_as_printed(estimate: Estimate) -> None:
    rows = columns_of(str(estimate), "at the peak")
    assert sum(cents(row[1]) for row in rows[:-1]) == cents(rows[-1][1])
    unit = binary_unit(estimate.peak_bytes)
    assert f"{rows[-1][1]} {unit}" == format_bytes(estimate.peak_bytes)


def test_weights_and_saved_bytes_of_the_layers_add_up_as_printed(estimate: Estimate) -> None:
    rows = columns_of(str(estimate), "layer")
    for column in (1, 2):
        assert sum(cents(row[column]) for row in rows[:-1]) == cents(rows[-1][column])
    unit = binary_unit(max(estimate.activations_bytes, estimate.weights_bytes))
    assert f"{rows[-1][1]} {unit}" == format_bytes(estimate.weights_bytes, unit)
    assert f"{rows[-1][2]} {unit}" == format_bytes(estimate.activations_bytes, unit)


def test_saved_bytes_by_op_add_up(estimate: Estimate) -> None:
    assert sum(row.saved_bytes for row in estimate.by_op()) == estimate.activations_bytes
    assert {row.name: row.count for row in estimate.by_op()}["aten.gelu.default"] == SHAPE.layers


def test_each_block_has_a_row_and_the_stack_grows(estimate: Estimate) -> None:
    rows = columns_of(str(estimate), "layer")
    blocks = [row for row in rows if row[0].startswith("blocks.")]
    assert [row[0] for row in blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    ends = [len(row[3]) for row in rows[:-1] if len(row) > 3]
    assert ends == sorted(ends)


def test_the_peak_is_named(estimate: Estimate) -> None:
    printed = str(estimate)
    assert printed.startswith("GPT  (int64[2, 32], int64[2, 32])  AdamW, as given, cpu\npeak ")
    assert f"in {estimate.peak_phase}, step {estimate.peak.step + 1}, at {estimate.peak.op}" in printed
    assert all(len(line) <= WIDTH for line in printed.splitlines())
    assert "\x1b" not in printed


def test_without_an_optimizer_nothing_is_said_of_one() -> None:
    printed = render_estimate(holdover.estimate(nn.Linear(8, 8), (torch.ones(4, 8),)))
    assert "no optimizer" in printed
    assert "later steps" not in printed
    assert "step 2" not in printed


def test_layers_gather_what_is_below_them(estimate: Estimate) -> None:
    layers = layers_of(estimate.by_module())
    assert sum(layer.saved_bytes for layer in layers) == sum(row.saved_bytes for row in estimate.by_module())
    assert len({layer.name for layer in layers}) == len(layers)


def test_many_equal_layers_are_folded_into_one_row() -> None:
    layers = [Layer("embed", 7, 1), *(Layer(f"h.{i}", 10, 100) for i in range(80)), Layer("head", 7, 3)]
    rows = fold(layers)
    assert [row.name for row in rows] == ["embed", "h.0", "h.1", "... 77 more such", "h.79", "head"]
    assert rows[3] == Layer("... 77 more such", 770, 7700)


def test_many_unlike_layers_keep_the_largest() -> None:
    layers = [Layer(f"h.{i}", i, i * i) for i in range(100)]
    rows = fold(layers)
    assert len(rows) == MAX_LAYERS
    assert rows[-1].name.startswith("... ")
    assert sum(row.saved_bytes for row in rows) == sum(layer.saved_bytes for layer in layers)
    assert rows[-2].name == "h.99"


def plan_of(layers: dict[str, tuple[int, int, int]]) -> Plan:
    modules = tuple(ModuleSummary(f"{name}.mlp", d, p, n, 0.001 * n) for name, (d, p, n) in layers.items())
    return Plan(
        model="GPT", fingerprint="", inputs="(int64[2, 32])", device="cpu", precision=None, optimizer="",
        torch_version="", budget_bytes=None, predicted_peak_bytes=80 * 2**20, unplanned_peak_bytes=100 * 2**20,
        floor_bytes=80 * 2**20, extra_time=0.05, bound_extra_time=0.031, step_seconds=1.0, priced="by hand",
        saved_bytes=0, unplanned_saved_bytes=0, peak_at="", peak_parts={"activation": 80 * 2**20},
        choices=(Choice("model/h.0", 0, "aten.gelu.default", "recompute"),), modules=modules,
    )  # fmt: skip


def test_equal_layers_of_a_plan_stand_in_one_row_with_what_they_do_together() -> None:
    mib = 2**20
    equal = {f"transformer.h.{n}": (mib, 0, 2) for n in range(12)}
    rows = columns_of(str(plan_of({"wte": (2 * mib, 0, 1), **equal, "transformer.h.12": (mib, 0, 3)})), "layer")
    assert rows == [
        ["wte.mlp", "2.00", "1", "1.0 ms"],
        ["transformer.h.0-11 (12x)", "12.00", "24", "24.0 ms"],
        ["transformer.h.12", "1.00", "3", "3.0 ms"],
        ["total", "15.00", "28", "28.0 ms"],
    ]
    every_second = {f"h.{n}": (mib * (1 + n % 2), 0, 2) for n in range(12)}
    rows = columns_of(str(plan_of(every_second)), "layer")
    assert [row[0] for row in rows] == ["h.0,2,4,...,10 (6x)", "h.1,3,5,...,11 (6x)", "total"]


def test_a_plan_tells_its_proved_bound_and_the_gap_to_it() -> None:
    printed = " ".join(str(plan_of({"h.0": (1, 0, 1)})).split())
    assert "no plan that meets this adds less than +3.1 % (proved; the gap is 1.9 % of the step)" in printed


def verification(**changes: object) -> Verification:
    fields = {
        "gradients_equal": True, "buffers_equal": True, "rng_equal": True, "outputs_equal": True,
        "measured_peak_bytes": 60 * 2**20, "predicted_peak_bytes": 60 * 2**20, "unplanned_peak_bytes": 100 * 2**20,
        "measured_unplanned_peak_bytes": 100 * 2**20, "step_time_ratio": 1.07, "predicted_time_ratio": 1.05,
        "budget_bytes": 61 * 2**20, "device": "cpu",
    }  # fmt: skip
    return Verification(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_verification_that_holds_says_so() -> None:
    printed = render_verification(verification())
    assert "peak memory   100.00 MiB   60.00 MiB   60.00 MiB" in printed
    assert "step time         1.00 x      1.07 x      1.05 x" in printed
    assert printed.endswith("the plan holds")


def test_a_broken_promise_says_so() -> None:
    broken = verification(measured_peak_bytes=62 * 2**20)
    assert not broken.holds
    assert "peak ABOVE the promise (+3.3 %, 2.00 MiB)" in str(broken)
    assert str(broken).endswith("the plan does NOT hold")


def test_a_peak_a_little_above_its_promise_is_within_it() -> None:
    kept = verification(measured_peak_bytes=1_060_500, predicted_peak_bytes=1_050_000)
    assert kept.holds
    assert "peak within the promise (+1.0 %)" in str(kept)


def test_differences_are_listed() -> None:
    from holdover.comparison import Difference

    differences = tuple(Difference("gradient", f"w{i}", "", 1, math.nan, "None instead of a tensor") for i in range(12))
    printed = str(verification(gradients_equal=False, differences=differences))
    assert "gradients DIFFER" in printed
    assert "gradient 'w9': None instead of a tensor" in printed
    assert "and 2 more" in printed
