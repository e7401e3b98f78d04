"""One recorded step with its frontier and other sizes, and the page made of it, for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser
from tests.browser import chromium

import holdover
from holdover.cli.gpt import GPT, Shape, batches
from holdover.memory.estimate import Estimate
from holdover.planning.frontier import Frontier, frontier_of
from holdover.report.html.data import page_data
from holdover.report.html.page import render_page
from holdover.report.scaling import Subject, scaling_of

SHAPE = Shape(layers=4, width=64, heads=2, context=32, batch=8)


@dataclass(frozen=True)
class Made:
    estimate: Estimate
    frontier: Frontier
    data: dict[str, Any]
    path: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    args = next(batches(SHAPE, 1, 0))
    model = GPT(SHAPE)
    estimate = holdover.estimate(model, args, optimizer="adamw")
    frontier = frontier_of(estimate.trace, time_limit=2)
    scaling = scaling_of(Subject(model, args, {}, None), estimate.trace)
    data = page_data(
        estimate.trace, frontier.plans, estimate=estimate, chosen=len(frontier.plans) // 2, scaling=scaling
    )  # fmt: skip
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(data))
    return Made(estimate, frontier, data, path)


@pytest.fixture(scope="module")  # no longer: while it is open, this thread can run no event loop of its own
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found
