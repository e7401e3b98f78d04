"""Cheaper plans of nested replays by simulated annealing, from the best plan that the other ways found.

The dynamic programme and the solver decide for stages: all that a stage replays is held, or all of it is dropped again.
Rule 15 of `recompute.recipe` lets each op have a stage of its own, and any stage to be held from. Here each step tries
one such change on one op, or on its twins in all equal blocks: record it or keep it, or hold its replays from another
moment of backward on. While the peak is over the budget, the op is one of those that stand in the peak. The simulator
judges the change; what costs less is accepted, and now and then what costs more, the less
often the later (Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", 1983). A peak over the budget
costs in proportion to the excess, so that ways lead through plans that do not fit.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING

from holdover.memory.timeline import FOREVER
from holdover.planning.classes import classes_of

if TYPE_CHECKING:
    from holdover.planning.search import Candidate, Search

WARM, COLD = 0.03, 0.0005
"""Temperatures, in shares of a step's time: at the begin of a round, and at its end."""

EXCESS = 4.0
"""What a peak of twice the budget costs, in shares of a step's time."""

TRIES_PER_OP, FEWEST_TRIES = 40, 200
"""Changes tried in one round, per op that may be recorded; a round that has no time for so many in all is not begun."""

PATIENCE = 2
"""Rounds in a row that may gain next to nothing before it is given up."""

KEEPS, TOGETHER = 0.4, 0.3
"""How often what is recorded is kept again, rather than held from another moment on; and how often twins change too."""

SEED = 20


class Annealing:
    """Rounds of annealing for one search and budget."""

    def __init__(self, search: Search, budget: int) -> None:
        self.search, self.budget = search, budget
        self.ops = search.problem.eligible
        self.number = {o: n for n, o in enumerate(self.ops)}
        self.step_seconds = max(search.problem.step_seconds, 1e-12)
        self.random = Random(SEED)
        self.twins = self._twins()

    def _twins(self) -> dict[int, list[int]]:
        """Op -> the ops at its place in all equal blocks; only those that have any."""
        parts = self.search.parts()
        groups: dict[object, list[int]] = defaultdict(list)
        for o, key in classes_of(self.search.problem, parts[0]).items() if parts else ():
            groups[key].append(o)
        return {o: group for group in groups.values() if len(group) > 1 for o in group}

    def improved(self, best: Candidate, enough: float, until: float) -> Candidate:
        """`best`, or a cheaper plan within the budget; rounds go on until some gain nothing, down to `enough` seconds.

        Args:
            best: a plan within the budget.
            enough: seconds of replays that are near enough to what can be proved.
            until: a moment of `time.monotonic`.
        """
        begun = time.monotonic()
        now = self.own_stages(best)
        tries = max(TRIES_PER_OP * len(self.ops), FEWEST_TRIES)
        each = time.monotonic() - begun  # of one simulation
        in_vain = 0
        while best.seconds > enough and in_vain < PATIENCE and time.monotonic() + FEWEST_TRIES * each < until:
            found = self.round(now, tries, until)
            gain = best.seconds - found.seconds
            if found.seconds < best.seconds and found.peak_bytes <= self.budget:
                nested = any(held < FOREVER for _, held in found.stages.values())
                best, now = self.search.judge(found.recorded, found.stages if nested else {}), found
            in_vain = in_vain + 1 if gain < self.search.close_seconds else 0
        return best

    def own_stages(self, plan: Candidate) -> Candidate:
        """The same plan, with a stage for each op: its number among the ops that may be recorded."""
        last: dict[int, int] = {}
        for o, (stage, _) in plan.stages.items():
            last[stage] = max(last.get(stage, -1), self.number[o])

        def held_from(o: int) -> int:
            held = plan.stages.get(o, (0, FOREVER))[1]
            return FOREVER if held >= FOREVER else max((n for s, n in last.items() if s <= held), default=-1)

        return self.search.simulated(plan.recorded, {o: (self.number[o], held_from(o)) for o in plan.recorded})

    def round(self, start: Candidate, tries: int, until: float) -> Candidate:
        """The cheapest plan within the budget that is met from `start` on."""
        best = now = start
        open_to_change = self.ops
        begun = time.monotonic()
        for n in range(tries):
            moment = time.monotonic()
            if moment >= until:
                break
            gone = max(n / tries, (moment - begun) / (until - begun))
            temperature = WARM * (COLD / WARM) ** gone
            after = self.search.simulated(*self.change(now, self.random.choice(open_to_change or self.ops)))
            worse = self.price(after) - self.price(now)
            if worse <= 0 or self.random.random() < math.exp(-worse / temperature):
                now = after
                open_to_change = self.search.at_peak(now) if now.peak_bytes > self.budget else self.ops
                if now.peak_bytes <= self.budget and now.seconds < best.seconds:
                    best = now
        return best

    def price(self, plan: Candidate) -> float:
        """What is made small: the extra time, and what stands over the budget, in shares of the step's time."""
        return plan.seconds / self.step_seconds + EXCESS * max(plan.peak_bytes / self.budget - 1, 0.0)

    def change(self, plan: Candidate, op: int) -> tuple[frozenset[int], Mapping[int, tuple[int, int]]]:
        """A plan beside this one that treats `op` in another way: the recorded ops, and their stages."""
        random, last = self.random, len(self.ops) - 1
        ops = self.twins[op] if op in self.twins and random.random() < TOGETHER else [op]
        if op in plan.recorded and random.random() < KEEPS:
            recorded = plan.recorded.difference(ops)
            return recorded, {o: stage for o, stage in plan.stages.items() if o in recorded}
        later = random.choice((FOREVER, 0, random.randint(0, last - self.number[op])))
        stages = {o: (self.number[o], min(self.number[o] + later, FOREVER)) for o in ops}
        return plan.recorded.union(ops), {**plan.stages, **stages}
