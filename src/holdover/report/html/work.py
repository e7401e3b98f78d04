"""From a training step to the page's data: record, estimate, find the frontier, record at other sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from holdover.errors import BudgetError
from holdover.memory.estimate import estimate_of
from holdover.memory.on_card import place_of
from holdover.planning.frontier import Frontier, frontier_of
from holdover.report.html.data import page_data
from holdover.report.scaling import Subject, scaling_of
from holdover.trace.record import Loss
from holdover.trace.step import OptimizerSpec

USUAL = "70%"
"""The budget of the plan that a page opens with where none is asked for."""

Stage = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """How a step is to be looked at.

    Attributes:
        budget: of the plan that the page opens with; None for USUAL where that can be met, else the lowest peak.
        optimizer, precision, device: as for `holdover.estimate`.
        sizes: whether to record the step at other sizes too.
        time_limit: seconds for the frontier, about.
    """

    budget: int | str | None = None
    optimizer: OptimizerSpec = None
    precision: str | None = None
    device: str | None = None
    sizes: bool = True
    time_limit: float = 60.0


def page_for(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Loss | None,
    request: Request,
    stage: Stage = lambda _: nullcontext(),
) -> dict[str, Any]:
    """Record the step, plan it, and return the page's data.

    Args:
        stage: told what is being done; its context is open as long as that lasts.

    Raises:
        TraceError: the step fails, or gives no loss.
        BudgetError: the budget is below the lowest peak that was found.
        DeviceError: an unknown device.
    """
    place = place_of(request.device)
    with stage("recording the step"):
        trace = place.record(model, args, kwargs, loss=loss, optimizer=request.optimizer, precision=request.precision)
        estimate = estimate_of(trace, precision=request.precision, card=place.card)
    with stage("pricing its ops, finding the frontier"):
        frontier = frontier_of(
            trace, precision=request.precision, time_limit=request.time_limit, card=place.card
        )  # fmt: skip
        chosen = opening(frontier, request.budget)
    scaling = None
    if request.sizes:
        with stage("recording it at other sizes"):
            subject = Subject(model, tuple(args), dict(kwargs), loss, request.precision, place)
            scaling = scaling_of(subject, trace)
    with stage("drawing"):
        return page_data(trace, frontier.plans, estimate=estimate, chosen=chosen, scaling=scaling, card=place.card)


def opening(frontier: Frontier, budget: int | str | None) -> int:
    """Which plan the page opens with: for a budget that was asked for, or for USUAL, or the lowest peak."""
    if budget is not None:
        return frontier.plans.index(frontier.at(budget))
    try:
        return frontier.plans.index(frontier.at(USUAL))
    except BudgetError:
        return len(frontier.plans) - 1
