"""Find the plan: solve for several partitions, let the simulator judge, correct, and polish.

The solver's model of memory is on the safe side, so its answers are simulated, and the budget that the solver is given
is moved until the simulated peak just meets the real one. What the simulator says is what the plan promises.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from holdover.memory.simulate import simulate
from holdover.memory.timeline import Choices, Timeline, phase_peaks
from holdover.planning import milp
from holdover.planning.annealing import Annealing
from holdover.planning.chain import MOST_STAGES, Chain
from holdover.planning.classes import classes_of
from holdover.planning.problem import Problem
from holdover.planning.stages import partitions
from holdover.trace.events import replayed_part
from holdover.trace.graph import Phase, Trace

TIE_ABOVE = 600
"""Eligible ops from which on equal ops of equal blocks are decided together."""

QUICK_ABOVE = 400
"""Eligible ops from which on a first look at the lowest peak is a quick one."""

CLOSE, CLOSE_IF_LARGE = 0.002, 0.005
"""Shares of a step: a plan this near to its bound is good enough; the second from QUICK_ABOVE ops on."""

PAIRS_UP_TO = 40
"""Eligible ops up to which changes of two at a time are tried where none of one alone lowers the peak."""

WORTH_ANNEALING = 0.01
"""The share of a step by which a plan has to be over what is near enough, for annealing to be tried."""

ROUNDS, PROMISING = 3, 3
"""How often a partition's model is built again near its last solution, and for how many partitions."""

USUAL, USUAL_QUICK = 12, 4
"""Ways of cutting of which the usual plan is looked at; the second number, at a quick look."""

STARTS = 3
"""Usual plans from which single changes go down to the lowest peak, as from the best plan; each ends elsewhere."""

NEARLY = 1.08
"""A plan that is over the budget by no more than this may be changed until it fits."""

NEAR_PEAK, MOST_TIGHT = 0.98, 24

QUICK, THOROUGH = 1.0, 5.0
"""Seconds for one call of the solver: at the first look at a partition, and later."""


Stages = Mapping[int, tuple[int, int]]
"""Recorded op -> its stage of backward, and the stage it is held from; only in plans of nested replays."""


@dataclass(frozen=True)
class Candidate:
    """A set of recorded ops of the step planned for, what its peak is over all steps, and what its replays cost."""

    recorded: frozenset[int]
    peak_bytes: int
    seconds: float
    stages: Stages = field(default_factory=dict)


@dataclass
class Search:
    """The search for plans of one problem. `everywhere` maps an op to the same op in the other steps of the trace.

    `seconds` are for each of its parts (the lowest peak, the cheapest plan), `deadline` ends all: a monotonic time.
    """

    problem: Problem
    workspace: Mapping[int, int]
    everywhere: Mapping[int, tuple[int, ...]]
    pack: Mapping[int, int] = field(default_factory=dict)
    seconds: float = 20.0
    deadline: float = float("inf")
    _chain: Chain | None = None
    _parts: list[dict[int, int]] | None = None
    _seen: dict[tuple[frozenset[int], frozenset[Any]], Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        step = self.trace.last_step
        self.part = replayed_part(self.trace, step)
        peaks = phase_peaks(self.trace, simulate(self.trace, workspace=self.workspace, detail=False))
        self.other_peak_bytes = max((n for (_, phase), n in peaks.items() if phase is Phase.OPTIMIZER), default=0)

    @property
    def trace(self) -> Trace:
        return self.problem.trace

    def judge(self, recorded: Iterable[int], stages: Stages | None = None) -> Candidate:
        """Simulate: what this set of recorded ops really does to the peak, and which replays it leads to."""
        ops = frozenset(recorded)
        nested = {o: held for o, held in (stages or {}).items() if o in ops}
        key = ops, frozenset(nested.items())
        if key not in self._seen:
            self._seen[key] = self.simulated(ops, nested)
        return self._seen[key]

    def simulated(self, recorded: frozenset[int], stages: Stages) -> Candidate:
        """The same without remembering it; `stages` are of recorded ops only."""
        draft = Candidate(recorded, 0, 0.0, stages)
        timeline = simulate(self.part, self.choices(draft), self.workspace, detail=False)
        seconds = self.problem.replay_seconds(timeline)
        if self.problem.standing is not None:
            seconds += self.problem.standing.seconds(recorded)
        return replace(draft, peak_bytes=max(timeline.peak_bytes, self.other_peak_bytes), seconds=seconds)

    def judged(self) -> list[Candidate]:
        """All candidates that were simulated so far."""
        return list(self._seen.values())

    def timeline(self, candidate: Candidate) -> Timeline:
        """The whole trace under a candidate."""
        return simulate(self.trace, self.choices(candidate), self.workspace)

    def tight(self, candidate: Candidate) -> list[int]:
        """Positions at which a candidate's bytes are a local maximum near its peak: where a bound has to look."""
        live = self.timeline(candidate).live_bytes
        curve = np.array([live[o] for o in self.problem.positions])
        near = np.flatnonzero(curve >= NEAR_PEAK * candidate.peak_bytes)
        tops = [int(t) for t in near if curve[t] == curve[max(t - 1, 0) : t + 2].max()]
        return sorted(tops, key=lambda t: -curve[t])[:MOST_TIGHT]

    def choices(self, candidate: Candidate) -> Choices:
        ops = frozenset(o for r in candidate.recorded for o in self.everywhere[r])
        made = {v for o in ops for v in self.trace.ops[o].outputs}
        stages = {o: held for r, held in candidate.stages.items() for o in self.everywhere[r]}
        pack = {v: n for v, n in self.pack.items() if v not in made}
        return Choices(ops, pack, self.problem.with_loss, stages)

    def parts(self) -> list[dict[int, int]]:
        if self._parts is None:
            self._parts = partitions(self.problem)
        return self._parts

    def usual(self) -> Iterator[frozenset[int]]:
        """What whole-block activation checkpointing would do: all is dropped but what crosses from stage to stage."""
        whole = frozenset(self.problem.eligible)
        yield whole
        for part in self.parts()[:USUAL]:
            yield whole - {o for o in whole if any(part[c] != part[o] for c in self.problem.readers_of(o))}

    def model(self, part: Mapping[int, int], near: Candidate | None = None) -> milp.Model:
        tied = classes_of(self.problem, part) if len(self.problem.eligible) > TIE_ABOVE else None
        return milp.build_model(self.problem, part, tied, near.recorded if near is not None else None)

    def until(self, share: float) -> float:
        """The end of what begins now and may take a share of the seconds for a part."""
        return time.monotonic() + self.left(share)

    def left(self, share: float) -> float:
        """Seconds of that share which the deadline leaves."""
        return max(min(share * self.seconds, self.deadline - time.monotonic()), 0.0)

    @property
    def close_seconds(self) -> float:
        """How near to its bound a plan is good enough."""
        large = len(self.problem.eligible) > QUICK_ABOVE
        return (CLOSE_IF_LARGE if large else CLOSE) * self.problem.step_seconds

    def lowest(self, *, quick: bool = False) -> Candidate:
        """The lowest peak found over all partitions, made lower still by single changes at the peak.

        A `quick` look at a large problem asks the dynamic programme alone.
        """
        until = self.until(1 / 2)
        quick = quick and len(self.problem.eligible) > QUICK_ABOVE
        usual = [self.judge(c) for c in itertools.islice(self.usual(), USUAL_QUICK if quick else None)]
        best = min(self.judge(()), *usual, key=lambda c: (c.peak_bytes, c.seconds))
        if quick:
            return self.deepest(best, time.monotonic())
        for part in self.parts():
            near: Candidate | None = None
            for _ in range(ROUNDS):
                left = until - time.monotonic()
                if left <= 0:
                    break
                found = self.judge(milp.lowest(self.model(part, near), time_limit=min(left, 5.0)).recorded)
                best = min(best, found, key=lambda c: (c.peak_bytes, c.seconds))
                if near is not None and found.peak_bytes >= near.peak_bytes:
                    break
                near = found
        best = self.deepest(best, self.until(1 / 4))
        starts = [best, *sorted(usual, key=lambda c: (c.peak_bytes, c.seconds))[:STARTS]]
        until = self.until(1 / 8)
        best = min((self.lower(c, until) for c in starts), key=lambda c: (c.peak_bytes, c.seconds))
        return self.cheaper(best, best.peak_bytes, self.until(1 / 8))

    def cheapest(self, budget: int, floor: Candidate, least_seconds: float) -> Candidate:
        """The cheapest plan found whose simulated peak is at most `budget`; `floor` is one that meets it.

        It ends early where hardly anything is left to gain: `least_seconds` is a bound on what any plan costs.
        """
        best = floor
        half, whole = self.until(1 / 2), self.until(1)
        enough = least_seconds + self.close_seconds
        found: list[tuple[float, int, Candidate]] = []
        for n, part in enumerate(self.parts()):  # a quick look at each
            if best.seconds <= enough or time.monotonic() > half:
                break
            plan = self.within(self.model(part), budget, half, QUICK)
            if plan is not None:
                found.append((plan.seconds, n, plan))
                best = min(best, plan, key=lambda c: (c.seconds, c.peak_bytes))
        for _, n, near in sorted(found)[:PROMISING]:  # and more rounds where it was promising
            for _ in range(ROUNDS - 1):
                if best.seconds <= enough or time.monotonic() > whole:
                    break
                plan = self.within(self.model(self.parts()[n], near), budget, whole, THOROUGH)
                if plan is None or plan.seconds >= near.seconds:
                    break
                near = plan
                best = min(best, near, key=lambda c: (c.seconds, c.peak_bytes))
        if best.seconds > enough:
            best = min(best, self.nested(budget) or best, key=lambda c: (c.seconds, c.peak_bytes))
        fitting = [c for c in self.judged() if c.peak_bytes <= budget]
        best = min([best, *fitting], key=lambda c: (c.seconds, c.peak_bytes))
        if best.seconds > enough:
            best = self.stepped(best, budget, self.until(1 / 8))
        if best.seconds > enough:
            best = self.cheaper(best, budget, self.until(1 / 8))
        return self.annealed(best, budget, enough)

    def annealed(self, best: Candidate, budget: int, enough: float) -> Candidate:
        """`best`, or a cheaper plan in which each op is held from a moment of its own."""
        if best.seconds <= enough + WORTH_ANNEALING * self.problem.step_seconds:
            return best
        return Annealing(self, budget).improved(best, enough, self.until(1 / 2))

    def chain(self) -> Chain | None:
        """The finest way of cutting that the dynamic programme can bear."""
        if self._chain is None:
            for part in self.parts():
                if 2 < len({part[o] for o in self.problem.eligible}) <= MOST_STAGES:
                    self._chain = Chain(self.problem, part)
                    break
        return self._chain

    def nested(self, budget: int) -> Candidate | None:
        """The cheapest plan of nested replays found whose simulated peak is at most `budget`."""
        chain = self.chain()
        if chain is None:
            return None
        chain.solve(budget)
        feasible = chain.feasible()
        best: Candidate | None = None
        if feasible is None:
            return None
        m, tried = max(chain.slots_of(budget), feasible), set[int]()
        while m not in tried and len(tried) < 8:
            tried.add(m)
            found = self.judge(*chain.plan(m))
            if found.peak_bytes <= budget and (best is None or found.seconds < best.seconds):
                best = found
            m = max(feasible, min(m + int((budget - found.peak_bytes) // chain.slot), chain.slots))
        return best

    def deepest(self, best: Candidate, until: float) -> Candidate:
        """`best`, or a plan of nested replays with a lower peak."""
        chain = self.chain()
        budget = float(best.peak_bytes)
        while chain is not None:
            chain.solve(budget)
            feasible = chain.feasible()
            if feasible is None:
                break
            steps = range(feasible, chain.slots + 1, max(chain.slots // 40, 1))
            found = min((self.judge(*chain.plan(m)) for m in steps), key=lambda c: c.peak_bytes)
            best = min(best, found, key=lambda c: (c.peak_bytes, c.seconds))
            lower = chain.least + feasible * chain.slot
            if lower > 0.9 * budget or time.monotonic() > until:
                break
            budget = lower
        return best

    def within(self, model: milp.Model, budget: int, until: float, each: float) -> Candidate | None:
        """Solve at a moving target until the simulated peak just meets the budget."""
        best: Candidate | None = None
        target, low, high = float(budget), 0.0, float("inf")
        for _ in range(6):
            left = until - time.monotonic()
            if left <= 0:
                break
            solution = milp.solve(model, target, time_limit=min(left, each))
            if solution is None:  # the model is on the safe side: what it calls impossible may well fit
                low = max(low, target)
                target = target * 1.05 if high == float("inf") else (low + high) / 2
                if target > budget * 1.2:
                    break
                continue
            found = self.judge(solution.recorded)
            slack = budget - found.peak_bytes
            if slack >= 0:
                if best is None or found.seconds < best.seconds:
                    best = found
                low = max(low, target)
                if slack < 0.005 * budget:
                    break
                target = min(target + slack, (target + high) / 2)
            else:
                high = min(high, target)
                target = max(target + slack * 1.02, (low + high) / 2 if low else 0.0)
            if high - low < 0.002 * budget:
                break
        return best

    def stepped(self, best: Candidate, budget: int, until: float) -> Candidate:
        """`best`, or a cheaper plan that lies a few single changes away from one just over the budget."""
        over = [c for c in self.judged() if budget < c.peak_bytes <= budget * NEARLY and c.seconds < best.seconds]
        for start in sorted(over, key=lambda c: (c.peak_bytes / budget - 1) + c.seconds / best.seconds)[:PROMISING]:
            now = start
            while now.peak_bytes > budget and now.seconds < best.seconds and time.monotonic() < until:
                left = itertools.takewhile(lambda _: time.monotonic() < until, self.neighbours(now))
                changed = [self.judge(n, now.stages) for n in left]
                lower = [c for c in changed if c.peak_bytes < now.peak_bytes]
                if not lower:
                    break
                enough = [c for c in lower if c.peak_bytes <= budget]
                last = now
                if enough:
                    now = min(enough, key=lambda c: c.seconds)
                else:
                    now = min(lower, key=lambda c: (c.seconds - last.seconds) / (last.peak_bytes - c.peak_bytes))
            if now.peak_bytes <= budget and now.seconds < best.seconds:
                best = now
        return best

    def cheaper(self, start: Candidate, budget: int, until: float) -> Candidate:
        """Keep outputs again, the dearest first, as long as the peak stays within `budget`."""
        best = start
        for o in sorted(start.recorded, key=lambda o: -self.problem.cost[o]):
            if time.monotonic() > until:
                break
            found = self.judge(best.recorded - {o}, best.stages)
            if found.peak_bytes <= budget and found.seconds <= best.seconds:
                best = found
        return best

    def lower(self, start: Candidate, until: float) -> Candidate:
        """Change one op at a time among those whose values are live at the peak, while that lowers it; then two."""
        best, pairs = start, False
        while time.monotonic() < until:
            better = best
            for changed in self.pairs(best) if pairs else self.neighbours(best):
                if time.monotonic() > until:
                    break
                better = min(better, self.judge(changed, best.stages), key=lambda c: (c.peak_bytes, c.seconds))
            if better.peak_bytes >= best.peak_bytes:
                if pairs or len(self.problem.eligible) > PAIRS_UP_TO:
                    break
                pairs = True
            else:
                best, pairs = better, False
        return best

    def pairs(self, candidate: Candidate) -> Iterator[frozenset[int]]:
        """Sets that differ in two ops, wherever they are: only for small problems."""
        return (candidate.recorded ^ set(two) for two in itertools.combinations(self.problem.eligible, 2))

    def neighbours(self, candidate: Candidate) -> list[frozenset[int]]:
        """Sets that differ in what is live at the peak: drop one more value, or keep one that is replayed there."""
        here = self.at_peak(candidate)
        now = candidate.recorded
        return [now ^ {o} for o in here] + list({now | self.cheap_ancestors(o, now) for o in here if o not in now})

    def at_peak(self, candidate: Candidate) -> list[int]:
        """Eligible ops of which an output is live at the peak, as the program's, as a replay's or as a copy."""
        timeline = simulate(self.part, self.choices(candidate), self.workspace)
        live, aside = set(timeline.at_peak), {e.value for e in timeline.extra_at_peak}
        values, ops = self.trace.values, self.trace.ops
        return [
            o for o in self.problem.eligible if any(values[v].storage in live or v in aside for v in ops[o].outputs)
        ]

    def cheap_ancestors(self, op: int, recorded: frozenset[int]) -> frozenset[int]:
        """`op` and the ops it would need, back to values that are kept for autograd or exist anyway."""
        found, stack = set(), [op]
        while stack:
            o = stack.pop()
            if o in found:
                continue
            found.add(o)
            for v in self.trace.ops[o].inputs:
                maker = self.problem.maker.get(v)
                if maker is not None and maker not in recorded and not self.problem.needs[v].saved:
                    stack.append(maker)
        return frozenset(found)
