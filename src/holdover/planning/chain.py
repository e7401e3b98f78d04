"""Nested replays along a chain of stages, by dynamic programming: for budgets at which one kept boundary per block is
already too much.

C(i, j, m) is the least time of replays with which stages i to j go through backward in m bytes, what stage i reads
being there already. Stage i's results were made by a replay on behalf of stage j (for the whole chain: by forward).

    C(i, i, m)  everything of stage i is replayed, if m covers it and what backward holds meanwhile
    C(i, j, m)  the least of
                    passage_i + rest_i,k + C(i + 1, j, m - kept_i,k)         stage i keeps the k-th of its menu
                    passage_i + ... + passage_p-1 + C(p, j, m - cut_p) + C(i, p - 1, m)      nothing stays but cut p

This is the programme of Beaumont et al. ("Optimal memory-aware backpropagation of deep join networks", Rotor) with a
menu of what each stage keeps, and without what comes after the last value that backward needs. What crosses many cuts,
such as a mask or a skip connection, is kept. The simulator judges what comes out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from holdover.planning.problem import Ask, Problem
from holdover.planning.stdout import silent_stdout

FINEST, WORK = 2000, 100_000
"""Memory is counted in so many steps, sizes rounded up: fewer for long chains, so that steps times stages stay within
`WORK`."""

MENU = 8
"""Sets per stage, beside all and nothing."""

CROSSES_MANY = 3
"""A value that crosses so many cuts is kept, whatever the programme says."""

MOST_STAGES = 100
"""The programme takes time as their third power: a second for so many."""

Nested = dict[int, tuple[int, int]]


@dataclass(frozen=True)
class Option:
    """One entry of a stage's menu: what is kept, in bytes, and the seconds of replaying the rest."""

    kept: frozenset[int]  # ops
    nbytes: int
    seconds: float


@dataclass
class Stage:
    """A stage of the chain.

    Attributes:
        ops: its eligible ops.
        passage: seconds to make what later stages read from what it reads.
        replay: seconds to make all that backward asks of it.
        working_bytes: what it needs beside its inputs while it goes through backward, the base included.
        cut: ops that make what crosses into the next stage.
        cut_bytes: their bytes.
    """

    ops: list[int]
    passage: float = 0.0
    replay: float = 0.0
    working_bytes: float = 0.0
    cut: frozenset[int] = frozenset()
    cut_bytes: int = 0
    asked: list[int] = field(default_factory=list)
    menu: list[Option] = field(default_factory=list)


class Chain:
    """The dynamic programme for one partition of a problem into stages."""

    def __init__(self, problem: Problem, stages: Mapping[int, int]) -> None:
        self.problem = problem
        self.stage_of = _renumbered(stages, problem.eligible)
        self.resident = self._resident()
        self.stages = [Stage([]) for _ in range(max(self.stage_of.values()) + 1)]
        for o in problem.eligible:
            self.stages[self.stage_of[o]].ops.append(o)
        self.least = float(problem.base.min(initial=0))
        self._cuts()
        menus: dict[tuple[object, ...], list[Option]] = {}
        for i, stage in enumerate(self.stages):
            self._costs(i, stage)
            kind = self._kind(stage)
            if kind not in menus:
                menus[kind] = list(self._menu(stage))
            stage.menu = [replace(o, kept=frozenset(stage.ops[n] for n in o.kept)) for o in menus[kind]]
        self.slots, self.slot = min(FINEST, WORK // len(self.stages)), 0.0
        # By i, j and m: C, the way it is reached, and C(i, j, m - bytes of the cut before i).
        self.table = self.behind = np.empty((0, 0, 0))
        self.ways = np.empty((0, 0, 0), dtype=np.int16)

    # -- the stages -----------------------------------------------------------------------------------------------

    def _resident(self) -> set[int]:
        """Ops whose results are kept: they cross many cuts."""
        found = set()
        for o in self.problem.eligible:
            last = max((self.stage_of[c] for c in self.problem.readers_of(o)), default=-1)
            if last - self.stage_of[o] >= CROSSES_MANY:
                found.add(o)
        return found

    def _cuts(self) -> None:
        """What crosses from stage to stage."""
        problem = self.problem
        cuts: dict[int, set[int]] = defaultdict(set)
        for o in problem.eligible:
            last = max((self.stage_of[c] for c in problem.readers_of(o)), default=-1)
            for i in range(self.stage_of[o], last):
                if o not in self.resident:
                    cuts[i].add(o)
        for i, stage in enumerate(self.stages):
            stage.cut = frozenset(cuts[i])
            stage.cut_bytes = sum(self._bytes(o) for o in stage.cut)

    def _bytes(self, op: int) -> int:
        """What has to be held so that replays can read the op's results."""
        needs = self.problem.needs
        outputs = self.problem.trace.ops[op].outputs
        return sum(needs[v].nbytes for v in outputs if needs[v].saved or v in self.problem.readers)

    def _costs(self, i: int, stage: Stage) -> None:
        problem, needs = self.problem, self.problem.needs
        stage.passage = sum(problem.cost[o] for o in self._closure(stage.cut, i))
        asks = [a for o in stage.ops if o not in stage.cut for a in self._asks(o)]
        if not asks:
            return
        first = min(a.first for a in asks)
        last = min(max(max(a.loan_end, a.last) for a in asks), len(problem.base) - 1)
        # What the next stage reads has mostly been used by it when this stage's turn comes.
        stage.asked = [o for o in stage.ops if any(a.last >= first for a in self._asks(o))]
        stage.replay = sum(problem.cost[o] for o in self._closure(stage.asked, i))
        curve = problem.base[first : last + 1].astype(float)
        for o in stage.asked:
            for v in problem.saved_outputs(o) if o not in self.resident else ():
                ends = [max(a.loan_end, a.last) for a in needs[v].asks.values()]
                curve[: max(min(max(ends, default=-1), last) - first + 1, 0)] += needs[v].nbytes
        stage.working_bytes = float(curve.max()) - self.least
        if i == len(self.stages) - 1:  # what forward's end and the loss hold stands beside all that is kept
            start = max(problem.positions[stage.ops[-1]], 0)
            stage.working_bytes = max(stage.working_bytes, float(problem.running[start : first + 1].max()) - self.least)

    def _asks(self, op: int) -> list[Ask]:
        return [a for v in self.problem.saved_outputs(op) for a in self.problem.needs[v].asks.values()]

    def _closure(self, ops: Iterable[int], i: int, kept: Container[int] = ()) -> set[int]:
        """The ops of stage i that run when these have to be made from what the stage reads and what is kept of it."""
        found: set[int] = set()
        stack = [o for o in ops if self.stage_of[o] == i]
        while stack:
            o = stack.pop()
            if o in found or o in kept or o in self.resident:
                continue
            found.add(o)
            makers = (self.problem.maker.get(v) for v in self.problem.trace.ops[o].inputs)
            stack.extend(m for m in makers if m is not None and self.stage_of[m] == i)
        return found

    def _kind(self, stage: Stage) -> tuple[object, ...]:
        """Equal for stages that have the same menu."""
        start = stage.ops[0]
        return tuple(
            (self.problem.trace.ops[o].signature, o - start, o in self.resident, o in stage.cut,
             tuple(sorted(self.problem.maker.get(v, start - 1) - start for v in self.problem.trace.ops[o].inputs)))
            for o in stage.ops
        )  # fmt: skip

    def _menu(self, stage: Stage) -> Iterator[Option]:
        """Sets of ops (by place in the stage) to keep: nothing, all, and the cheapest for some bytes between."""
        place = {o: n for n, o in enumerate(stage.ops)}
        able = [o for o in stage.ops if o not in self.resident]
        whole = sum(self._bytes(o) for o in able if any(self.problem.saved_outputs(o)))
        seen = set()
        for k in range(MENU + 2):
            kept = frozenset(self._cheapest(stage, able, whole * k // (MENU + 1)))
            if kept in seen:
                continue
            seen.add(kept)
            asked = [o for o in stage.asked if o not in kept]
            seconds = sum(self.problem.cost[o] for o in self._closure(asked, self.stage_of[stage.ops[0]], kept))
            yield Option(frozenset(place[o] for o in kept), sum(self._bytes(o) for o in kept - stage.cut), seconds)

    def _cheapest(self, stage: Stage, able: list[int], room: int) -> set[int]:
        """What to keep in `room` bytes (the cut is there anyway) so that the replay of the rest is cheapest."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        if not able:
            return set()
        problem = self.problem
        column = {o: n for n, o in enumerate(able)}  # kept; replayed is len(able) further
        size = 2 * len(able)
        data: list[float] = []
        columns: list[int] = []
        starts, upper = [0], list[float]()

        def add(entries: list[tuple[int, float]], bound: float) -> None:
            columns.extend(c for c, _ in entries)
            data.extend(a for _, a in entries)
            starts.append(len(columns))
            upper.append(bound)

        for o in able:
            if o in stage.asked:
                add([(column[o], -1.0), (len(able) + column[o], -1.0)], -1.0)
            for v in problem.trace.ops[o].inputs:
                m = problem.maker.get(v)
                if m in column:
                    add([(len(able) + column[o], 1.0), (column[m], -1.0), (len(able) + column[m], -1.0)], 0.0)
        total = max(sum(self._bytes(o) for o in able), 1)
        add([(column[o], self._bytes(o) / total) for o in able if o not in stage.cut], room / total)
        seconds = max(sum(problem.cost[o] for o in able), 1e-12)
        cost = np.concatenate([
            np.array([1e-6 * self._bytes(o) / total for o in able]), np.array([problem.cost[o] / seconds for o in able])
        ])  # fmt: skip
        matrix = csr_matrix((data, columns, starts), shape=(len(upper), size))
        with silent_stdout():
            result = milp(
                cost, constraints=LinearConstraint(matrix, -np.inf, upper), integrality=np.ones(size),
                bounds=Bounds(0, 1), options={"time_limit": 1.0, "mip_rel_gap": 1e-3},
            )  # fmt: skip
        return set() if result.x is None else {o for o in able if result.x[column[o]] > 0.5}

    # -- the programme --------------------------------------------------------------------------------------------

    def solve(self, budget: float) -> None:
        """Fill the table for peaks up to a little above `budget` bytes, if it is not."""
        room_bytes = 1.1 * (budget - self.least)
        if self.slot * self.slots * 0.7 <= room_bytes <= self.slot * self.slots:
            return
        self.slot = max(room_bytes, 1.0) / self.slots
        number = len(self.stages)
        shape = (number, number, self.slots + 1)
        self.table, self.behind = np.full(shape, np.inf), np.full(shape, np.inf)
        self.ways = np.zeros(shape, dtype=np.int16)
        for i in range(number - 1, -1, -1):
            for j in range(i, number):
                if i == j:
                    self.table[i, i, self._slots(self.stages[i].working_bytes) :] = self.stages[i].replay
                else:
                    self._best(i, j)
                if i and (n := self._slots(self.stages[i - 1].cut_bytes)) <= self.slots:
                    self.behind[i, j, n:] = self.table[i, j, : self.slots + 1 - n]

    def _slots(self, nbytes: float) -> int:
        return min(int(np.ceil(nbytes / self.slot)), self.slots + 1)

    def _best(self, i: int, j: int) -> None:
        """The least time for all m, and which way: the entry of the menu, or ~p for cut p."""
        stage = self.stages[i]
        whole = j == len(self.stages) - 1  # made by forward, which is paid for anyway
        best, way = self.table[i, j], self.ways[i, j]
        for k, option in enumerate(stage.menu):
            kept = self._slots(option.nbytes + stage.cut_bytes)
            first = max(kept, self._slots(stage.working_bytes))
            if first > self.slots:
                continue
            then = self.table[i + 1, j, first - kept : self.slots + 1 - kept]
            values = (0.0 if whole else stage.passage) + option.seconds + then
            better = values < best[first:]
            best[first:][better], way[first:][better] = values[better], k
        passages = np.cumsum([0.0 if whole else self.stages[p].passage for p in range(i, j)])
        values = self.behind[i + 1 : j + 1, j] + self.table[i, i:j] + passages[:, None]
        cuts = values.argmin(axis=0)
        least = np.take_along_axis(values, cuts[None], axis=0)[0]
        better = least < best
        best[better], way[better] = least[better], ~(i + 1 + cuts[better])

    def slots_of(self, budget: int) -> int:
        """The m at which the peak is about `budget` bytes."""
        return int(np.clip((budget - self.least) // self.slot, 0, self.slots))

    def feasible(self) -> int | None:
        """The least m with a plan; None if there is none."""
        found = np.flatnonzero(np.isfinite(self.table[0, -1]))
        return int(found[0]) if len(found) else None

    def plan(self, m: int) -> tuple[frozenset[int], Nested]:
        """The recorded ops for m slots, with the stage of each and the stage that it is held from."""
        last = len(self.stages) - 1
        held = {o: self.stage_of[o] for o in self.problem.eligible if o not in self.resident}  # only by its own stage
        kept = {o for o in held if self.stage_of[o] == last and not self.stages[last].replay}
        stack = [(0, last, m)]
        while stack:
            i, j, m = stack.pop()
            if i == j:
                continue
            way = int(self.ways[i, j][m])
            if way < 0:
                p = ~way
                stays = self.stages[p - 1].cut
                stack += [(p, j, m - self._slots(self.stages[p - 1].cut_bytes)), (i, p - 1, m)]
            else:
                option, cut = self.stages[i].menu[way], self.stages[i].cut
                stays = option.kept | cut
                stack.append((i + 1, j, m - self._slots(option.nbytes + self.stages[i].cut_bytes)))
            if j == last:
                kept |= stays
            for o in stays:
                held[o] = max(held[o], j)
        recorded = frozenset(held.keys() - kept)
        return recorded, {o: (self.stage_of[o], held[o]) for o in recorded}


def _renumbered(stages: Mapping[int, int], eligible: list[int]) -> dict[int, int]:
    """The stages that have eligible ops, from 0 without gaps."""
    numbers = {s: n for n, s in enumerate(sorted({stages[o] for o in eligible}))}
    return {o: numbers[stages[o]] for o in eligible}
