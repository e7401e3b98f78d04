"""A page's knee and its input shapes, in Chromium: from plans whose figures are chosen here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser
from tests.browser import Seen, watched
from torch import nn

import holdover
from holdover.memory.estimate import Estimate
from holdover.planning.inputs import PlannedShape
from holdover.planning.plan import Knee, Plan
from holdover.report.html.data import page_data
from holdover.report.html.page import render_page, without
from holdover.units import format_bytes


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    layers = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
    return holdover.estimate(nn.Sequential(*layers), (torch.ones(512, 16),))


@pytest.fixture(scope="module")
def lowest(estimate: Estimate) -> Plan:
    layers = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
    return replace(holdover.plan(nn.Sequential(*layers), (torch.ones(512, 16),), budget="min", time_limit=2), knee=None)


def opened(browser: Browser, page: str, path: Path) -> Seen:
    path.write_text(page)
    seen = watched(browser)
    seen.page.goto(path.as_uri())
    return seen


def frontier(estimate: Estimate, lowest: Plan, times: tuple[float, float]) -> str:
    """The step as it is, a plan a little above the lowest peak, and the lowest, with these extra times."""
    near = replace(lowest, predicted_peak_bytes=lowest.predicted_peak_bytes + 1024, extra_time=times[0])
    plans = [without(lowest), near, replace(lowest, extra_time=times[1])]
    return render_page(page_data(estimate.trace, plans, estimate=estimate, chosen=2))


def test_the_knee_is_marked_and_one_click_away(
    browser: Browser, estimate: Estimate, lowest: Plan, tmp_path: Path
) -> None:
    seen = opened(browser, frontier(estimate, lowest, (0.2, 3.0)), tmp_path / "knee.html")
    page = seen.page
    assert page.locator("[data-knee]").get_attribute("data-knee") == "1"
    near = format_bytes(lowest.predicted_peak_bytes + 1024)
    said = page.locator("#knee").inner_text()
    assert f"{format_bytes(lowest.predicted_peak_bytes)}, takes +300.0 % time, a budget of {near} about +20.0 %" in said
    page.get_by_role("button", name="Show that plan").click()
    assert page.locator("#budget-text").get_attribute("data-bytes") == str(lowest.predicted_peak_bytes + 1024)
    page.close()
    assert seen.errors == []


def test_where_the_last_bytes_cost_as_much_as_the_others_nothing_is_marked(
    browser: Browser, estimate: Estimate, lowest: Plan, tmp_path: Path
) -> None:
    seen = opened(browser, frontier(estimate, lowest, (0.2, 0.22)), tmp_path / "even.html")
    seen.page.wait_for_selector("html[data-ready=yes]")
    assert seen.page.locator("[data-knee]").count() == seen.page.locator("#knee").count() == 0
    seen.page.close()
    assert seen.errors == []


def test_a_plan_names_its_knee_and_the_promise_at_each_shape(
    browser: Browser, estimate: Estimate, lowest: Plan, tmp_path: Path
) -> None:
    shapes = (
        PlannedShape(((512, 16),), lowest.predicted_peak_bytes, lowest.unplanned_peak_bytes, 0.25, 0, 0),
        PlannedShape(((64, 16),), 50_000, 60_000, 0.0, 0, 1),
    )
    plan = replace(lowest, knee=Knee(700 * 1024, 0.1), shapes=shapes, variants=(replace(lowest, choices=()),))
    for page, knee in ((plan.to_html(), 'budget="700.00KiB"'), (plan.to_html(estimate), "a budget of 700.00 KiB")):
        seen = opened(browser, page, tmp_path / "plan.html")
        assert knee in seen.page.inner_text("body")
        rows = [row.split("\t") for row in seen.page.locator("#shapes tbody").inner_text().splitlines()]
        peaks = [format_bytes(n) for n in (lowest.unplanned_peak_bytes, lowest.predicted_peak_bytes)]
        assert rows == [
            ["512x16", *peaks, "+25.0 %", f"{len(lowest.choices)} ops", "1 of 2"],
            ["64x16", "58.59 KiB", "48.83 KiB", "+0.0 %", "0 ops", "2 of 2"],
        ]
        seen.page.close()
        assert seen.errors == []
    assert "At each of the input shapes" not in lowest.to_html()
