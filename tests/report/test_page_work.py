"""From a step to the page's data: stages are told, devices are heeded, only a budget that was asked for is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from holdover.errors import BudgetError
from holdover.report.html.page import render_page
from holdover.report.html.work import Request, page_for
from holdover.units import format_bytes


def step() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    return nn.Sequential(*blocks), (torch.ones(1024, 64),)


def test_each_stage_is_told_before_it_begins_and_ends_before_the_next() -> None:
    told: list[str] = []

    @contextmanager
    def stage(what: str) -> Iterator[None]:
        told.append(what)
        yield
        told.append("done")

    model, args = step()
    data = page_for(model, args, {}, None, Request(time_limit=1), stage)
    stages = ["recording the step", "pricing its ops, finding the frontier", "recording it at other sizes", "drawing"]
    assert told == [x for what in stages for x in (what, "done")]
    opened = data["plans"][data["chosen"]]["peak_bytes"]
    assert opened <= 0.7 * data["peak_bytes"] or opened == data["plans"][-1]["peak_bytes"]


def test_a_card_that_is_not_here_has_its_own_prices_and_what_its_allocator_reserves() -> None:
    model, args = step()
    request = Request(device="h100-80gb", sizes=False, time_limit=1)
    data = page_for(model, args, {}, None, request)
    assert [p["peak"]["bytes"] for p in data["plans"]] == [p["peak_bytes"] for p in data["plans"]]
    assert len(data["plans"]) > 1
    assert all(p["reserved_bytes"] > p["peak_bytes"] for p in data["plans"])
    assert data["priced"] == "modelled for h100-80gb from FLOPs and bytes"
    assert data["on_card"]["reserved_bytes"] > data["peak_bytes"]
    assert format_bytes(data["on_card"]["reserved_bytes"]) in render_page(data)


def test_a_budget_that_was_asked_for_is_refused_below_the_floor() -> None:
    model, args = step()
    with pytest.raises(BudgetError, match=r"A budget of 1\.00 KiB"):
        page_for(model, args, {}, None, Request(budget="1KiB", sizes=False, time_limit=1))
