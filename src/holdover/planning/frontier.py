"""The frontier: peak against extra time, every breakpoint that the search finds, each with its plan."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdover.cost.devices import Card
from holdover.errors import BudgetError
from holdover.memory.estimate import workspaces
from holdover.memory.on_card import place_of
from holdover.planning.api import lowest_of, priced_problem, same_places
from holdover.planning.bound import Bound
from holdover.planning.describe import described
from holdover.planning.inputs import planned_shape, shapes_of
from holdover.planning.on_card import CardBudget
from holdover.planning.outline import outline_of
from holdover.planning.plan import Plan
from holdover.planning.search import Candidate, Search
from holdover.trace.graph import Trace
from holdover.trace.record import Loss
from holdover.trace.step import OptimizerSpec
from holdover.units import format_bytes, parse_budget

BUDGETS = 24
"""Budgets that are solved for; between them lie the breakpoints that were met on the way."""

MOMENTS, TIGHT = 40, 3
"""Moments that the bound looks at before it gets slow, and how many of them a point may add."""

WORTH_PEAK, WORTH_TIME = 0.002, 0.0005
"""A breakpoint is left out if its neighbour is lower by less than this share of the peak, or dearer by less than this
share of the step."""


@dataclass(frozen=True)
class Frontier:
    """Plans from the step as it is down to the lowest peak: each next one holds less and takes longer.

    On a card budgets are for reserved memory, as those of `holdover.plan` are. Each next one reserves no more there
    than the one before; some reserve as much, since the allocator takes memory in large pieces.

    Attributes:
        plans: falling `predicted_peak_bytes`, rising `extra_time`. The first recomputes nothing.
        context_bytes: on a card, what is set aside of a budget in bytes, which is for the whole process.
    """

    plans: tuple[Plan, ...]
    context_bytes: int = 0

    @property
    def budget_kind(self) -> str:
        """What budgets are for: "reserved" memory on a card, "allocated" elsewhere."""
        return "allocated" if self.plans[0].reserved_bytes is None else "reserved"

    @property
    def unplanned_peak_bytes(self) -> int:
        """The peak of the step's tensors without a plan."""
        return self.plans[0].unplanned_peak_bytes

    @property
    def floor_bytes(self) -> int:
        """The lowest peak of tensors that was reached."""
        return self.plans[-1].predicted_peak_bytes

    @property
    def step_seconds(self) -> float:
        """The step's own time, which extra times are fractions of."""
        return self.plans[0].step_seconds

    def counted_bytes(self, plan: Plan) -> int:
        """What budgets are held against: what a plan reserves on a card, its peak elsewhere."""
        return plan.predicted_peak_bytes if plan.reserved_bytes is None else plan.reserved_bytes

    def at(self, budget: int | str) -> Plan:
        """The cheapest plan here that keeps within `budget`, which is as for `holdover.plan`.

        Args:
            budget: bytes, "24GiB", a share of what the step takes without a plan ("80%"), or "min". On a card it is for
                reserved memory, and bytes are for the whole process: the context is set aside.

        Raises:
            BudgetError: the budget is below the floor.
        """
        wanted = parse_budget(budget)
        most, least = self.counted_bytes(self.plans[0]), self.counted_bytes(self.plans[-1])
        if wanted == "min":
            return next(plan for plan in self.plans if self.counted_bytes(plan) == least)
        aside = self.context_bytes if isinstance(wanted, int) else 0
        limit = int(most * wanted) if isinstance(wanted, float) else int(wanted) - aside
        for plan in self.plans:
            if self.counted_bytes(plan) <= limit:
                return plan
        reserved = " reserved" if self.budget_kind == "reserved" else ""
        context = f", of which {format_bytes(aside)} are for the context," if aside else ""
        raise BudgetError(
            f"A budget of {format_bytes(limit + aside)}{context} cannot be met: the frontier goes from "
            f"{format_bytes(least)} to {format_bytes(most)}{reserved}. Ways out: a budget of at least "
            f"{format_bytes(least + aside)}, a smaller batch or sequence, or budget=\"min\".",
            floor_bytes=least + aside, budget_bytes=limit + aside, parts=dict(self.plans[-1].peak_parts),
        )  # fmt: skip

    def within(self, peak_bytes: int) -> Plan:
        """The cheapest plan here whose tensors take at most `peak_bytes`, on a card too; at worst the lowest."""
        return next((p for p in self.plans if p.predicted_peak_bytes <= peak_bytes), self.plans[-1])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Peaks are of tensors; `budget_kind` says what the `budget_bytes` of plans are for."""
        return {
            "budget_kind": self.budget_kind, "context_bytes": self.context_bytes,
            "unplanned_peak_bytes": self.unplanned_peak_bytes, "floor_bytes": self.floor_bytes,
            "unplanned_reserved_bytes": self.plans[0].reserved_bytes,
            "floor_reserved_bytes": self.plans[-1].reserved_bytes,
            "step_seconds": self.step_seconds, "plans": [p.to_dict() for p in self.plans],
        }  # fmt: skip

    def to_json(self) -> str:
        """The frontier as JSON text, every plan in full."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        from holdover.report.text import render_frontier

        return render_frontier(self)


def frontier(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerSpec = None,
    precision: str | None = None,
    device: str | None = None,
    with_loss: bool = False,
    time_limit: float = 60.0,
) -> Frontier:
    """What each byte of the peak costs: the plans between the step as it is and the lowest peak.

    Args:
        model, args, kwargs, loss, optimizer, precision, device, with_loss: the training step, as for `holdover.plan`.
        time_limit: seconds that the solver may take in all, about.

    Raises:
        TraceError: the step fails, or gives no loss.

    >>> import torch
    >>> from torch.nn import GELU, Linear, Sequential
    >>> layers = [Sequential(Linear(8, 64), GELU(), Linear(64, 8)) for _ in range(4)]
    >>> f = frontier(Sequential(*layers), (torch.ones(1000, 8),))
    >>> f.plans[0].extra_time, f.at("min").predicted_peak_bytes == f.floor_bytes
    (0.0, True)
    """
    place = place_of(device)
    trace = place.record(model, args, kwargs, loss=loss, optimizer=optimizer, precision=precision)
    found = frontier_of(trace, precision=precision, with_loss=with_loss, time_limit=time_limit, card=place.card)
    shapes, outline = shapes_of(args, kwargs), outline_of(model)
    plans = tuple(replace(p, shapes=(planned_shape(shapes, p),), outline=outline) for p in found.plans)
    return replace(found, plans=plans)


def frontier_of(
    trace: Trace, *, precision: str | None = None, with_loss: bool = False, time_limit: float = 60.0,
    card: Card | None = None,
) -> Frontier:  # fmt: skip
    """The frontier of a recorded step; `card` is the one it was recorded for, whose times are then modelled."""
    workspace, unknown = workspaces(trace)
    problem, priced = priced_problem(trace, workspace, with_loss=with_loss, card=card)
    bound = Bound(problem)
    until = time.monotonic() + time_limit
    each = time_limit / (BUDGETS + 8)
    search = Search(problem, workspace, same_places(problem), seconds=8 * each)
    plain = search.judge(())
    account = None if card is None else CardBudget(card, "reserved", "min")
    if account is not None:
        account.limit(search, plain)
    search, floor = lowest_of(search)
    search.seconds = each
    begun = time.monotonic()
    proved = sweep(search, bound, floor, plain, until)
    search.seconds = 4 * each
    refine(search, proved, floor, plain, min(until - time_limit / 5, 2 * time.monotonic() - begun))
    search.seconds = each
    lower = [c for c in search.judged() if c.peak_bytes < plain.peak_bytes]
    points = thinned([plain, *pareto(lower)], problem.step_seconds)
    if account is not None:
        points = reserving_no_more(search, account, points)
    plans = []
    least = 0.0
    for point in points:
        within = search if point.recorded else Search(problem, workspace, search.everywhere)
        taken = None if account is None else account.counted(within, point)
        most = point.peak_bytes if account is None or taken is None else account.tensor_bytes(trace, taken)
        left = max(until - time.monotonic(), each / 4)  # what is proved may take a little more than the limit
        least = max(least, bound.seconds(most, time_limit=min(left, each)))
        if left > each and point.seconds > least + search.close_seconds and len(bound.memory) < MOMENTS:
            tight = search.tight(point)[:TIGHT]
            least = max(least, bound.seconds(most, moments=tight, time_limit=each))
        plan = described(
            within, point, plain, floor, point.peak_bytes, least, priced=priced, precision=precision, unknown=unknown
        )
        plans.append(plan if account is None else account.described(plan, within, point, taken))
    return Frontier(tuple(plans), 0 if card is None else card.context_bytes[1])


def sweep(search: Search, bound: Bound, floor: Candidate, plain: Candidate, until: float) -> list[tuple[int, float]]:
    """Solve for budgets between the floor and the plain peak, coarse steps first; the candidates stay in the search.

    Returns the budgets, each with the bound in seconds.
    """
    proved = []
    room = plain.peak_bytes - floor.peak_bytes
    steps = [k for odd in (16, 8, 4, 2, 1) for k in range(odd, BUDGETS, 2 * odd)]
    for k in steps if room else ():
        if time.monotonic() > until:
            break
        budget = floor.peak_bytes + room * k // BUDGETS
        proved.append((budget, bound.seconds(budget, time_limit=search.seconds)))
        search.cheapest(budget, floor, proved[-1][1])
    return proved


def refine(
    search: Search, proved: Sequence[tuple[int, float]], floor: Candidate, plain: Candidate, until: float
) -> None:
    """Solve for the peaks of the points met so far, those farthest from their bound first, with more time for each."""
    tried: set[int] = set()
    while time.monotonic() < until:
        gaps = {}
        for point in pareto(c for c in search.judged() if c.peak_bytes < plain.peak_bytes):
            least = max((seconds for budget, seconds in proved if budget >= point.peak_bytes), default=0.0)
            if point.peak_bytes not in tried and point.seconds > least + search.close_seconds:
                gaps[point.seconds - least] = point.peak_bytes, least
        if not gaps:
            break
        budget, least = gaps[max(gaps)]
        tried.add(budget)
        search.cheapest(budget, floor, least)


def pareto(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other beats in peak and time, highest peak first."""
    best: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.seconds, c.peak_bytes)):
        if not best or c.peak_bytes < best[-1].peak_bytes:
            best.append(c)
    return best


def reserving_no_more(search: Search, account: CardBudget, steps: Sequence[Candidate]) -> list[Candidate]:
    """Those that reserve no more on the card than any before; the first is the step without a plan."""
    kept, least = [steps[0]], account.plain[1]
    for step in steps[1:]:
        taken = account.counted(search, step)
        if taken <= least:
            kept.append(step)
            least = taken
    return kept


def thinned(points: Sequence[Candidate], step_seconds: float) -> list[Candidate]:
    """Without points that are hardly lower than the one before, or hardly cheaper than the one after."""
    kept = list(points[:1])
    for point, following in itertools.zip_longest(points[1:], points[2:]):
        lower = kept[-1].peak_bytes - point.peak_bytes >= WORTH_PEAK * kept[-1].peak_bytes
        cheaper = following is None or following.seconds - point.seconds >= WORTH_TIME * step_seconds
        if following is None or (lower and cheaper):
            kept.append(point)
    return kept
