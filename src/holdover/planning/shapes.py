"""One budget for several input shapes: one plan for all of them where that costs little, else one for each.

Places of ops are the same at every batch size and length, so a plan found for one shape is a candidate for all others.
Each candidate is simulated at each shape.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdover.errors import BudgetError
from holdover.memory.estimate import workspaces
from holdover.planning.api import below_floor, limited, lowest_of, noting_limit, priced_problem, within
from holdover.planning.choices import choices_of
from holdover.planning.describe import described
from holdover.planning.inputs import Shapes, planned_shape, show
from holdover.planning.plan import Plan
from holdover.planning.search import Candidate, Search
from holdover.trace.graph import Trace

NOTICEABLE = 0.01
"""More time than this, as a share of the step and on average over the shapes, is not paid for having one plan only."""


@dataclass
class _Shape:
    """One recorded shape, and its own cheapest plan."""

    shapes: Shapes
    trace: Trace
    search: Search
    plain: Candidate
    floor: Candidate
    priced: str
    unknown: Sequence[str]
    bound: float = 0.0

    def judge(self, plan: Plan) -> Candidate:
        """What a plan that was made for another shape does at this one."""
        choices = choices_of(self.trace, plan)
        ops = [o for o in self.search.problem.eligible if o in choices.recompute]
        return self.search_for(plan).judge(ops, {o: held for o, held in choices.stages.items() if o in ops})

    def search_for(self, plan: Plan) -> Search:
        """The search in which what the plan keeps packed is packed, and nothing else."""
        if plan.packs == bool(self.search.pack):
            return self.search
        pack = choices_of(self.trace, plan).pack
        return Search(self.search.problem, self.search.workspace, self.search.everywhere, pack)

    def plan_for(self, search: Search, candidate: Candidate, limit: int | None, precision: str | None) -> Plan:
        return described(
            search, candidate, self.plain, self.floor, limit, self.bound, priced=self.priced, precision=precision,
            unknown=self.unknown,
        )  # fmt: skip

    def extra(self, candidate: Candidate) -> float:
        return candidate.seconds / max(self.search.problem.step_seconds, 1e-12)


def plan_shapes(
    recorded: Sequence[tuple[Shapes, Trace]], budget: int | float | str, *, precision: str | None = None,
    with_loss: bool = False, time_limit: float = 60.0,
) -> Plan:  # fmt: skip
    """The plan for several recordings of one step; its figures are those of the dearest: the highest peak unplanned.

    Args:
        recorded: input shapes, and the step recorded at them.
        budget: as `units.parse_budget` returns it; a share is one of the largest shape's peak, and "min" the lowest
            peak that all shapes can be brought to.

    Raises:
        BudgetError: a shape cannot meet the budget; says which.
    """
    deadline = time.monotonic() + time_limit
    began = time.monotonic()
    known = [_known(shapes, trace, with_loss, time_limit / len(recorded), deadline) for shapes, trace in recorded]
    limit = _limit(known, budget)
    for shape in known:
        if limit < shape.floor.peak_bytes and limit < shape.plain.peak_bytes:
            refused = below_floor(shape.search, shape.floor, shape.plain, limit)
            raise BudgetError(
                f"For inputs of {show(shape.shapes)}: {refused}", floor_bytes=refused.floor_bytes,
                budget_bytes=limit, parts=refused.parts,
            )  # fmt: skip
    asked = None if budget == "min" else limit
    plans = []
    for shape in known:
        search, best, shape.bound = within(shape.search, shape.floor, shape.plain, limit)
        plans.append(shape.plan_for(search, best, asked, precision))
    made = _assembled(known, plans, limit, asked, precision)
    spent = (time.monotonic() - began) / len(known)
    return noting_limit(made, known[_dearest(known)].search, spent, time_limit)


def _known(shapes: Shapes, trace: Trace, with_loss: bool, time_limit: float, deadline: float) -> _Shape:
    workspace, unknown = workspaces(trace)
    problem, priced = priced_problem(trace, workspace, with_loss=with_loss)
    search = limited(problem, workspace, time_limit)
    search.deadline = deadline  # of all shapes together
    plain = search.judge(())
    search, floor = lowest_of(search)
    return _Shape(shapes, trace, search, plain, floor, priced, unknown)


def _limit(known: Iterable[_Shape], budget: int | float | str) -> int:
    if budget == "min":
        return max(shape.floor.peak_bytes for shape in known)
    if isinstance(budget, float):
        return int(budget * max(shape.plain.peak_bytes for shape in known))
    return int(budget)


def _assembled(
    known: Sequence[_Shape], plans: Sequence[Plan], limit: int, asked: int | None, precision: str | None
) -> Plan:
    """One plan, or the dearest shape's with the others as its variants."""
    table = [[shape.judge(plan) for shape in known] for plan in plans]
    cheapest = [_cheapest(shape, [row[k] for row in table], limit) for k, shape in enumerate(known)]
    least = sum(shape.extra(table[p][k]) for k, (shape, p) in enumerate(zip(known, cheapest, strict=True)))
    everywhere = [p for p, row in enumerate(table) if all(c.peak_bytes <= limit for c in row)]
    if everywhere:
        costs = {p: sum(s.extra(c) for s, c in zip(known, table[p], strict=True)) for p in everywhere}
        one = min(everywhere, key=costs.__getitem__)
        if costs[one] - least <= NOTICEABLE * len(known):
            cheapest = [one] * len(known)
    order = list(dict.fromkeys([cheapest[_dearest(known)], *cheapest]))
    made = [
        _for_shapes(plans[p], [(s, table[p][k]) for k, s in enumerate(known) if cheapest[k] == p], asked, precision)
        for p in order
    ]
    of_plan = [iter(each.shapes) for each in made]
    shapes = [replace(next(of_plan[n]), variant=n) for n in map(order.index, cheapest)]
    knee = made[0].knee
    if knee is not None and knee.budget_bytes < limit:  # another shape's lowest peak is above it
        knee = None
    return replace(made[0], shapes=tuple(shapes), variants=tuple(made[1:]), knee=knee)


def _dearest(known: Sequence[_Shape]) -> int:
    """The shape for which there is most to do: its peak without a plan decides whether the budget is met at all."""
    return max(range(len(known)), key=lambda k: known[k].plain.peak_bytes)


def _cheapest(shape: _Shape, candidates: Sequence[Candidate], limit: int) -> int:
    """Which of the plans costs this shape least, of those that keep it within the limit; its own one does."""
    fitting = [p for p, c in enumerate(candidates) if c.peak_bytes <= limit]
    return min(fitting, key=lambda p: (shape.extra(candidates[p]), candidates[p].peak_bytes))


def _for_shapes(
    plan: Plan, members: Sequence[tuple[_Shape, Candidate]], asked: int | None, precision: str | None
) -> Plan:
    """The plan with the figures of the dearest of these shapes, and its promise at each of them."""
    described_at = [shape.plan_for(shape.search_for(plan), c, asked, precision) for shape, c in members]
    quiet = [
        key
        for key in plan.quiet
        if all(key in at.quiet or key not in _keys(s.trace) for at, (s, _) in zip(described_at, members, strict=True))
    ]
    shapes = [planned_shape(shape.shapes, at) for at, (shape, _) in zip(described_at, members, strict=True)]
    figures = described_at[_dearest([shape for shape, _ in members])]
    return replace(figures, choices=plan.choices, quiet=tuple(quiet), shapes=tuple(shapes))


def _keys(trace: Trace) -> set[str]:
    return {call.key for call in trace.calls}
