"""What the table of a frontier says."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

from holdover import Frontier, frontier
from holdover.planning.plan import Choice
from holdover.report.frontier_view import changes, frontier_view
from holdover.report.text import render
from holdover.units import binary_unit, format_bytes


@pytest.fixture(scope="module")
def found() -> Frontier:
    layers = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3)]
    return frontier(nn.Sequential(*layers), (torch.ones(1000, 8),), time_limit=3)


def test_a_row_for_each_plan(found: Frontier) -> None:
    text = render(frontier_view(found))
    assert text == str(found)
    unit = binary_unit(found.unplanned_peak_bytes)
    rows = [line for line in text.splitlines() if re.match(r"\s*[\d,.]+ \w*B ", line)]
    assert [" ".join(row.split()[:2]) for row in rows] == [
        format_bytes(plan.predicted_peak_bytes, unit) for plan in found.plans
    ]  # fmt: skip
    assert "nothing is recomputed" in rows[0]
    assert "gelu" in text


def test_changes_tell_what_is_dropped_kept_again_and_moved(found: Frontier) -> None:
    plan = dataclasses.replace(found.plans[0], choices=())

    def chose(*choices: tuple[str, str, str]) -> object:
        return dataclasses.replace(plan, choices=tuple(Choice(call, 0, op, action) for call, op, action in choices))

    gelu, norm = "aten.gelu.default", "aten.native_layer_norm.default"
    before = chose(("a", gelu, "recompute"), ("b", norm, "recompute"))
    after = chose(("c", gelu, "recompute"), ("d", "aten.gt.Scalar", "pack"), ("e", "aten.gt.Scalar", "pack"))
    assert changes(before, after) == "+gt packed x2, -layer_norm, 1 elsewhere"  # type: ignore[arg-type]
    assert changes(before, before) == "the same ops, held differently"  # type: ignore[arg-type]
