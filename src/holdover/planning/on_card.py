"""Budgets for a card: what PyTorch's allocator reserves under a plan, and the plan that keeps within it.

The planner counts the bytes of tensors. The allocator rounds them up, cannot use every gap, and holds cuBLAS's
workspace too. So plans are played to the replayed allocator, the planner's own budget is moved until what that reserves
just fits, and of all plans that were met on the way the cheapest that fits is taken.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import replace
from typing import Literal

from holdover.cost.devices import Card
from holdover.errors import BudgetError, PlanError
from holdover.memory.on_card import replay_on
from holdover.memory.replay import BLAS_OPS
from holdover.planning.describe import knee_of
from holdover.planning.plan import Knee, Plan
from holdover.planning.search import Candidate, Search
from holdover.trace.graph import Phase, Trace
from holdover.units import format_bytes

BudgetKind = Literal["reserved", "allocated"]

ROUNDS = 8
"""Budgets that the planner is given."""

NEAR = 0.005
"""Budgets of tensors that differ by less than this share of the limit are not told apart."""

FIRST_SHARE, LATER_SHARE, LOOK_SHARE = 2, 8, 8
"""Parts of the search's time: for the planner's first budget, for each later one, for each way to polish the plan."""

STARTS = 6
"""Plans over the limit from which cheaper ones within it are looked for."""


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
        key = _key(search, candidate)
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

    def tensor_bytes(self, trace: Trace, limit: int) -> int:
        """The most bytes of tensors that a step can hold where the allocator shows at most `limit`.

        The workspaces of cuBLAS that the steps before the one planned for have asked for are there all the time. What
        lies in the host's memory counts as tensors, but not on the card.
        """
        step = trace.last_step
        before = (op for op in trace.ops if op.step < step and op.name.split(".")[1] in BLAS_OPS)
        handles = {op.phase is Phase.BACKWARD for op in before}
        host = sum(s.nbytes for s in trace.storages if s.device == "cpu")
        return limit - len(handles) * self.card.cublas_bytes + host

    def lowest(self, search: Search, floor: Candidate) -> Candidate:
        """The plan that takes least on the card, of those that were met and are nearly as low as the floor."""
        until = time.monotonic() + search.seconds / LOOK_SHARE
        best = floor
        for met in sorted(search.judged(), key=lambda c: (c.peak_bytes, c.seconds)):
            if met.peak_bytes > self.counted(search, best) or time.monotonic() > until:
                break
            best = min(best, met, key=lambda c: (self.counted(search, c), c.seconds))
        return best

    def cheapest(self, search: Search, floor: Candidate, limit: int, least: float) -> Candidate:
        """The cheapest plan found that takes at most `limit` on the card.

        What the allocator makes of a plan moves in steps, by up to 20 MiB, and not always with the bytes of tensors: so
        several budgets of tensors are solved for, and then all plans that were met on the way are asked, and their
        neighbours.

        Args:
            floor: the plan of the lowest peak.
            least: a lower bound on the seconds of such a plan.

        Raises:
            BudgetError: nothing that was found fits.
        """
        best = floor if self.counted(search, floor) <= limit else self.lowest(search, floor)
        if self.counted(search, best) > limit:
            raise self.too_little(search, best, limit)
        seconds = search.seconds
        enough = least + search.close_seconds
        for look in (self._aimed, self._met, self._stepped, self._kept):
            if best.seconds > enough:
                best = look(search, best, limit, least)
            search.seconds = seconds
        return best

    def _aimed(self, search: Search, best: Candidate, limit: int, least: float) -> Candidate:
        """Move the budget of tensors until what the allocator shows just meets the limit."""
        seconds, until = search.seconds, time.monotonic() + search.seconds
        low, high = best.peak_bytes, self.tensor_bytes(search.trace, limit)
        target = min(high, limit - (self.counted(search, best) - best.peak_bytes))
        for n in range(ROUNDS):
            if high - low < NEAR * limit or target <= low or time.monotonic() > until:
                break
            search.seconds = seconds / (LATER_SHARE if n else FIRST_SHARE)
            found = search.cheapest(target, best, least)
            room = limit - self.counted(search, found)
            if room >= 0:
                best = min(best, found, key=lambda c: c.seconds)
                low, aim = target, target + room
            else:
                high, aim = target, min(target, found.peak_bytes) + room
            # what the last plan says, where that narrows the search down, else the middle
            target = aim if low + NEAR * limit < aim < high - NEAR * limit and n < ROUNDS // 2 else (low + high) // 2
        return best

    def _met(self, search: Search, best: Candidate, limit: int, least: float) -> Candidate:
        """The cheapest of all plans that were met and fit."""
        most, until = self.tensor_bytes(search.trace, limit), time.monotonic() + search.seconds / LOOK_SHARE
        for met in sorted(search.judged(), key=lambda c: (c.seconds, c.peak_bytes)):
            if met.seconds >= best.seconds or time.monotonic() > until:
                break
            if met.peak_bytes <= most and self.counted(search, met) <= limit:
                return met
        return best

    def _stepped(self, search: Search, best: Candidate, limit: int, least: float) -> Candidate:
        """`best`, or a cheaper plan a few single changes away from one that is over the limit and was asked already."""
        until = time.monotonic() + search.seconds / LOOK_SHARE
        over = [c for c in search.judged() if c.seconds < best.seconds and self._known(search, c, limit) > limit]
        near = sorted(over, key=lambda c: self.counted(search, c) / limit + c.seconds / max(best.seconds, 1e-12))
        for now in near[:STARTS]:
            while self.counted(search, now) > limit:
                changed = [search.judge(ops, now.stages) for ops in search.neighbours(now)]
                cheaper = sorted((c for c in changed if c.seconds < best.seconds), key=lambda c: c.peak_bytes)
                asked = []
                for c in cheaper:
                    if time.monotonic() > until:
                        return best
                    asked.append((self.counted(search, c), self.taken(search, c)[0], c.seconds, c))
                lower = [a for a in asked if a[:2] < (self.counted(search, now), self.taken(search, now)[0])]
                fitting = [a for a in lower if a[0] <= limit]
                if not lower:
                    break
                now = min(fitting, key=lambda a: a[2])[3] if fitting else min(lower, key=lambda a: a[:3])[3]
            if self.counted(search, now) <= limit and now.seconds < best.seconds:
                best = now
        return best

    def _known(self, search: Search, candidate: Candidate, otherwise: int) -> int:
        """What a candidate takes, if the allocator was asked already."""
        taken = self._taken.get(_key(search, candidate))
        return otherwise if taken is None else taken[self.kind == "reserved"]

    def _kept(self, search: Search, best: Candidate, limit: int, least: float) -> Candidate:
        """Keep outputs again, the dearest first, as long as what the allocator shows stays within the limit."""
        until = time.monotonic() + search.seconds / LOOK_SHARE
        for o in sorted(best.recorded, key=lambda o: -search.problem.cost[o]):
            if time.monotonic() > until:
                break
            found = search.judge(best.recorded - {o}, best.stages)
            if found.seconds <= best.seconds and self.counted(search, found) <= limit:
                best = found
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
        knee = plan.knee
        if knee is not None and (bent := knee_of(search, best, plan.unplanned_peak_bytes)) is not None:
            context = self.card.context_bytes[1] if self.kind == "reserved" else 0
            knee = Knee(self.counted(search, bent) + context, bent.seconds / search.problem.step_seconds)
        budget = self.budget if isinstance(self.budget, int) else plan.budget_bytes if limit is None else limit
        return replace(
            plan, device=self.card.name, budget_bytes=budget, budget_kind=self.kind, allocated_bytes=allocated,
            reserved_bytes=reserved, unplanned_allocated_bytes=plain_allocated, unplanned_reserved_bytes=plain_reserved,
            notes=(*notes, *plan.notes), knee=knee,
        )  # fmt: skip


def _key(search: Search, candidate: Candidate) -> Hashable:
    return candidate.recorded, frozenset(candidate.stages.items()), frozenset(search.pack)
