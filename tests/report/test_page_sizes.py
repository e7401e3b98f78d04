"""Other sizes: what the polynomials say is what a recording at that size holds; what cannot be varied is said."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.report.conftest import SHAPE, Made
from torch import nn

import holdover
from holdover.cli.gpt import GPT, Shape, batches
from holdover.memory.on_card import place_of
from holdover.report.scaling import Subject, base_sizes, fit, scaling_of, value
from holdover.report.stack import stack_of

numbers = st.integers(-(10**12), 10**12)


@given(
    st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=2, max_size=2), st.integers(1, 99), st.integers(1, 99)
)
def test_a_polynomial_is_found_from_its_values(coefficients: list[list[int]], batch: int, seq: int) -> None:
    exact = [[Fraction(c) for c in row] for row in coefficients]
    nodes = {(b, s): int(value(exact, b, s)) for b in (2, 32) for s in (4, 16, 128)}
    found = fit([2, 32], [4, 16, 128], nodes)
    assert found == exact
    assert value(found, batch, seq) == value(exact, batch, seq)


def at(scaling: dict[str, Any], names: list[str], batch: int, seq: int) -> dict[str, int]:
    """What the page computes, in Python."""
    found = {}
    for name, rows in zip(names, scaling["layers"], strict=True):
        total = sum(c * batch**i * seq**j for i, row in enumerate(rows) for j, c in enumerate(row))
        assert total % scaling["denominator"] == 0
        found[name] = total // scaling["denominator"]
    return found


@pytest.mark.parametrize(("batch", "seq"), [(8, 32), (5, 20), (32, 32), (1, 32), (7, 4)])
def test_any_size_is_what_a_recording_at_it_holds(made: Made, batch: int, seq: int) -> None:
    shape = Shape(layers=SHAPE.layers, width=SHAPE.width, heads=SHAPE.heads, context=seq, batch=batch)
    estimate = holdover.estimate(GPT(shape), next(batches(shape, 1, 0)))
    recorded = {name: layer.saved_bytes for name, layer in stack_of(estimate.trace).items()}
    names = [layer["name"] for layer in made.data["layers"]]
    assert at(made.data["scaling"], names, batch, seq) == {name: recorded.get(name, 0) for name in names}


def test_fewer_blocks_leave_the_others_as_they_are(made: Made) -> None:
    shape = Shape(layers=3, width=SHAPE.width, heads=SHAPE.heads, context=SHAPE.context, batch=SHAPE.batch)
    fewer = stack_of(holdover.estimate(GPT(shape), next(batches(shape, 1, 0))).trace)
    scaling, layers = made.data["scaling"], made.data["layers"]
    dropped = layers[scaling["blocks"][-1]]["name"]
    assert {n: layer.saved_bytes for n, layer in fewer.items()} == {
        layer["name"]: layer["saved_bytes"] for layer in layers if layer["name"] != dropped
    }
    depth = next(axis for axis in scaling["axes"] if axis["name"] == "depth")
    assert (depth["least"], depth["most"], depth["base"]) == (1, 4, 4)


def test_no_length_is_offered_beyond_the_table_of_positions(made: Made) -> None:
    seq = next(axis for axis in made.data["scaling"]["axes"] if axis["name"] == "seq")
    assert seq["most"] == SHAPE.context  # GPT's table of positions has that many rows


def study(model: nn.Module, args: tuple[Any, ...], loss: Any = None) -> dict[str, Any] | None:
    trace = holdover.estimate(model, args, loss=loss).trace
    return scaling_of(Subject(model, args, {}, loss), trace)


def test_sizes_of_a_step_on_a_card_are_recorded_for_that_card() -> None:
    place, model = place_of("h100-80gb"), GPT(SHAPE)
    args = next(batches(SHAPE, 1, 0))
    scaling = scaling_of(Subject(model, args, {}, None, place=place), place.record(model, args))
    assert scaling is not None
    shape = Shape(layers=SHAPE.layers, width=SHAPE.width, heads=SHAPE.heads, context=20, batch=5)
    recorded = stack_of(place.record(GPT(shape), next(batches(shape, 1, 0))))
    assert at(scaling, list(recorded), 5, 20) == {name: layer.saved_bytes for name, layer in recorded.items()}


def test_targets_in_the_losss_closure_grow_with_the_batch() -> None:
    targets = torch.zeros(4, dtype=torch.int64)
    model, inputs = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(4, 8)
    scaling = study(model, (inputs,), lambda logits: F.cross_entropy(logits, targets))
    assert scaling is not None
    assert [(a["name"], a["least"], a["most"]) for a in scaling["axes"]] == [("batch", 1, 16)]
    assert targets.shape == (4,)
    assert inputs.shape == (4, 8)


def test_a_size_that_is_fixed_in_the_code_is_not_varied() -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.requires_grad_() * 2).view(4, 8).sin()

    scaling = study(Fixed(), (torch.randn(4, 8),))
    assert scaling is not None
    assert scaling["axes"] == []
    assert scaling["notes"][0].startswith("The batch size cannot be varied: ")


def test_where_bytes_are_no_polynomial_only_recorded_sizes_are_offered() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = -(-x.shape[0] // 4) * 4  # to a multiple of four
            return F.pad(self.linear(x), (0, 0, 0, rows - x.shape[0])).sin()

    scaling = study(Padded(), (torch.randn(8, 8),))
    assert scaling is not None
    rows = scaling["recorded"]
    assert [(r["batch"], r["base"]) for r in rows] == [(1, False), (4, False), (8, True), (16, False)]
    assert [sum(r["saved_bytes"]) for r in rows] == [n * 8 * 4 for n in (4, 4, 8, 16)]
    assert scaling["notes"] == ["Bytes are no polynomial of the sizes here, so that only recorded sizes are offered."]


def test_nothing_can_be_varied_without_a_batch() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> torch.Tensor:
            return self.weight.exp()

    assert base_sizes(Subject(Alone(), (), {}, None)) == (0, 1)
    assert study(Alone(), ()) is None
