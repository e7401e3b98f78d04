"""`holdover demo` holds, in short form; its model and data are what they say."""

from __future__ import annotations

import json

import pytest
import torch

from holdover.cli.demo import DemoResult
from holdover.cli.gpt import GPT, Shape, batches, prose
from holdover.report.demo_view import demo_view
from holdover.report.text import render

from .conftest import Run


def test_the_demo_holds(run: Run) -> None:
    done = run("demo", "--steps", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["holds"]
    assert found["plain_losses"] == found["planned_losses"]
    assert len(found["plain_losses"]) == 3
    assert found["planned_peak_bytes"] < 0.65 * found["plain_peak_bytes"]
    assert found["promised_peak_bytes"] <= found["budget_bytes"]


def result(**changes: object) -> DemoResult:
    fields = {
        "parameters": 3_000_000, "steps": 3, "budget_bytes": 60 * 2**20, "estimated_peak_bytes": 100 * 2**20,
        "promised_peak_bytes": 60 * 2**20, "plain_peak_bytes": 100 * 2**20, "planned_peak_bytes": 60 * 2**20,
        "promised_extra_time": 0.05, "measured_extra_time": 0.06, "plain_losses": [3.0, 2.0, 1.0],
        "planned_losses": [3.0, 2.0, 1.0], "losses_equal": True, "weights_equal": True, "rng_equal": True,
    }  # fmt: skip
    return DemoResult(**{**fields, **changes})  # type: ignore[arg-type]


def test_it_says_that_all_holds() -> None:
    printed = render(demo_view(result()))
    rows = [line.split() for line in printed.splitlines()]
    assert ["peak,", "planned", "60.00", "MiB", "60.00", "MiB", "+0.0", "%"] in rows
    assert ["extra", "time", "+5.0", "%", "+6.0", "%"] in rows
    assert "all 3 losses are equal to the last bit" in printed
    assert printed.endswith("everything holds")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"losses_equal": False}, "the losses DIFFER"),
        ({"weights_equal": False}, "the trained weights DIFFER"),
        ({"rng_equal": False}, "the random generators DIFFER"),
        ({"plain_peak_bytes": 102 * 2**20}, "the estimate is OFF"),
        ({"planned_peak_bytes": 61 * 2**20}, "the planned peak BREAKS its promise"),
    ],
)
def test_it_says_what_does_not_hold(change: dict[str, object], said: str) -> None:
    broken = result(**change)
    assert not broken.holds
    printed = render(demo_view(broken))
    assert said in printed
    assert printed.endswith("NOT everything holds")


def test_too_few_steps_are_bad_input(run: Run) -> None:
    assert run("demo", "--steps", "1").returncode == 2


def test_the_text_is_english_prose() -> None:
    text = bytes(prose().tolist()).decode()
    assert len(text) > 300_000
    assert "Assert statements are a convenient way to insert debugging assertions" in text


def test_batches_are_repeatable_and_leave_the_generator_alone() -> None:
    shape = Shape(batch=2, context=16)
    before = torch.get_rng_state()
    first, second = list(batches(shape, 2, 7)), list(batches(shape, 2, 7))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
    text, targets = first[0]
    assert torch.equal(text[:, 1:], targets[:, :-1])


def test_the_model_starts_out_knowing_nothing() -> None:
    shape = Shape(layers=1, width=32, heads=2, context=16, batch=4)
    loss = GPT(shape)(*next(batches(shape, 1, 0)))
    assert 5.0 < loss.item() < 6.5  # about log(256) = 5.55
