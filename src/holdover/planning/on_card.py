"""Budgets for a card: what PyTorch's allocator reserves under a plan, and the plan that keeps within it.

The planner counts the bytes of tensors. The allocator rounds them up, cannot use every gap, and holds cuBLAS's
workspace too. So a plan is played to the replayed allocator, and the planner's own budget is lowered until what that
reserves fits.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import replace
from typing import Literal

from holdover.cost.devices import Card
from holdover.errors import BudgetError, PlanError
from holdover.memory.on_card import replay_on
from holdover.planning.plan import Plan
from holdover.planning.search import Candidate, Search
from holdover.units import format_bytes

BudgetKind = Literal["reserved", "allocated"]

ROUNDS = 6
"""Budgets that the planner is given before the floor is taken."""

LATER_SHARE = 4
"""Later rounds, which start from what the first one met, get this part of its time."""

SECOND_LOOK_SECONDS = 2.0
"""For plans that were met on the way and are cheaper."""


def budget_kind_of(kind: str | None, card: Card | None) -> BudgetKind:
    """What a budget is held against: by default reserved memory on a card, allocated elsewhere.

    Raises:
        PlanError: an unknown kind, or reserved memory without a card.
    """
    if kind not in (None, "reserved", "allocated"):
        raise PlanError(f"budget_kind={kind!r}: a budget is held against 'reserved' or 'allocated' memory.")
    if card is None:
        if kind == "reserved":
            raise PlanError("budget_kind='reserved' needs a card: name one by device=, such as 'h100-80gb'.")
        return "allocated"
    return "allocated" if kind == "allocated" else "reserved"


class CardBudget:
    """What plans take on a card, and how much they may take.

    Args:
        card: the card.
        kind: "reserved" or "allocated": which figure of the allocator the budget is for.
        budget: as `units.parse_budget` returns it. Bytes of a "reserved" budget are for the whole process: the largest
            context of the card is set aside, and more than the card has is not counted on.

    Attributes:
        plain: bytes allocated and reserved without a plan, once `limit` was asked for.
    """

    def __init__(self, card: Card, kind: BudgetKind, budget: int | float | str) -> None:
        self.card, self.kind, self.budget = card, kind, budget
        self.set_aside_bytes = card.context_bytes[1] if kind == "reserved" and isinstance(budget, int) else 0
        self.plain = 0, 0
        self._taken: dict[Hashable, tuple[int, int]] = {}

    def taken(self, search: Search, candidate: Candidate) -> tuple[int, int]:
        """Bytes that the allocator has allocated, and has reserved, at most under a candidate."""
        key = candidate.recorded, frozenset(candidate.stages.items()), frozenset(search.pack)
        if key not in self._taken:
            played = replay_on(search.trace, self.card, search.choices(candidate), search.workspace)
            self._taken[key] = played.allocated_bytes, played.reserved_bytes
        return self._taken[key]

    def counted(self, search: Search, candidate: Candidate) -> int:
        """The one of both that the budget is for."""
        return self.taken(search, candidate)[self.kind == "reserved"]

    def limit(self, search: Search, plain: Candidate) -> int | None:
        """The most that may be taken; None for the lowest there is. `search` packs nothing: it gives the plain step."""
        self.plain = self.taken(search, plain)
        if isinstance(self.budget, int):
            return min(self.budget, self.card.usable_bytes) - self.set_aside_bytes
        return int(self.plain[self.kind == "reserved"] * self.budget) if isinstance(self.budget, float) else None

    def cheapest(self, search: Search, floor: Candidate, limit: int, least: float) -> Candidate:
        """The cheapest plan found that takes at most `limit` on the card.

        Args:
            floor: the plan of the lowest peak.
            least: a lower bound on the seconds of such a plan.

        Raises:
            BudgetError: not even the floor fits.
        """
        if self.counted(search, floor) > limit:
            raise self.too_little(search, floor, limit)
        best, target, seconds = floor, limit - self.card.cublas_bytes, search.seconds
        for _ in range(ROUNDS):
            if target <= floor.peak_bytes:
                break
            found = search.cheapest(target, floor, least)
            search.seconds = seconds / LATER_SHARE
            excess = self.counted(search, found) - limit
            if excess <= 0:
                best = found
                break
            target = min(target, found.peak_bytes) - max(excess, limit // 500)
        search.seconds = seconds
        until = time.monotonic() + SECOND_LOOK_SECONDS
        for met in sorted(search.judged(), key=lambda c: c.seconds):
            if met.seconds >= best.seconds or time.monotonic() > until:
                break
            if met.peak_bytes <= limit and self.counted(search, met) <= limit:
                return met
        return best

    def too_little(self, search: Search, floor: Candidate, limit: int) -> BudgetError:
        """The refusal, with what the floor takes."""
        allocated, reserved = self.taken(search, floor)
        needed = self.counted(search, floor) + self.set_aside_bytes
        asked = self.budget if isinstance(self.budget, int) else limit
        has = f"it has {format_bytes(self.card.usable_bytes)}"
        if self.set_aside_bytes:
            has += f"; {format_bytes(self.set_aside_bytes)} are set aside for the context"
        ways = "a smaller batch or sequence, a leaner optimizer, PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        return BudgetError(
            f"A budget of {format_bytes(asked)} of {self.kind} memory cannot be met on {self.card.name} ({has}): "
            f"the plan of the lowest peak allocates {format_bytes(allocated)} and reserves {format_bytes(reserved)}. "
            f'Ways out: a budget of at least {format_bytes(needed)} where the card has that, {ways}, or budget="min".',
            floor_bytes=needed, budget_bytes=asked, parts={"allocated": allocated, "reserved": reserved},
        )  # fmt: skip

    def described(self, plan: Plan, search: Search, best: Candidate, limit: int | None) -> Plan:
        """The plan with what it takes on the card, and what was done with the budget."""
        allocated, reserved = self.taken(search, best)
        plain_allocated, plain_reserved = self.plain
        notes = [f"The times are modelled for {self.card.name}; Python's are taken to pass behind the card's."]
        if limit is not None:
            said = f"At most {format_bytes(limit)} may be {self.kind}"
            if isinstance(self.budget, int) and self.kind == "reserved":
                whole = min(self.budget, self.card.usable_bytes)
                source = "the budget" if whole == self.budget else f"what {self.card.name} has"
                said += (
                    f": of {format_bytes(whole)}, {source}, {format_bytes(self.set_aside_bytes)} are for the context"
                )
            notes.insert(0, said + ".")
        budget = self.budget if isinstance(self.budget, int) else plan.budget_bytes if limit is None else limit
        return replace(
            plan, device=self.card.name, budget_bytes=budget, budget_kind=self.kind, allocated_bytes=allocated,
            reserved_bytes=reserved, unplanned_allocated_bytes=plain_allocated, unplanned_reserved_bytes=plain_reserved,
            notes=(*notes, *plan.notes),
        )  # fmt: skip
