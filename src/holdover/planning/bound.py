"""A proved bound: no plan of this problem that meets the budget takes less extra time than this.

The linear programme here is weaker than any plan on purpose, so that every plan, with segments or without, nested or
not, satisfies it. It looks at some moments t at which an op runs. Per op o: x_o, whether it is ever replayed; d_o,
whether it is replayed at least twice. Per moment and value v that nobody holds anyway: h_v, whether its bytes are there
(kept, pinned, or replayed and waiting), and g_v, whether it is made again later. Per value that is written over: f_v,
whether it is copied for its readers before that, r_v, whether its writer's replay copies it, and e_v, whether a clone
of it made right before is made again. No copy is counted where that clone may have served as the pin.

    minimise   sum of cost_o (x_o + d_o) + sum of charge_k z_k + sum of copy_v (f_v + r_v) + sum of cost_c e_v
    such that  held anyway(t) + in use by backward(t) + sum of bytes_v h_v <= budget
               h_v >= 1 - x_o               v, made by o, is saved: without a replay it is kept
               h_v + g_v >= 1               v is asked for after t
               g_v <= x_o                   it is made again by o
               x_o <= z_k                   a replay of o turns the dispatch mode on in the calls of k
               g_v <= h_u + g_u             from everything that o reads
               x_c + b_o - 1 <= b_c         o, which reads what c makes, is replayed before t: then c is, too
               b_o + g_v - 1 <= d_o         and again after it
               x_c - x_o - x_k <= f_v   c reads v, made by o, that is written over; k, if any, clones it before
               x_w - x_o <= r_v         w writes over v
               x_k + x_o - 1 <= e_v     a clone of what is made again is no pin

What can be packed takes no more than its packed bytes, dropping what is never asked for is free, and what replays hold
for a moment only does not count.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdover.planning.packing import packable
from holdover.planning.problem import MADE_IN_STEP, NEVER, Problem
from holdover.planning.stdout import silent_stdout
from holdover.trace.clones import clone_before

MOST_COLUMNS = 40_000
"""Variables from which on no more moments are looked at."""

CHAINED_UP_TO = 400
"""Eligible ops up to which it is followed what a replay makes be replayed before it."""

MOMENTS_AT_ONCE, IF_LARGE, LARGE = 6, 1, 10_000
"""Moments that are added together before solving again; the second number from so many variables on, where each
makes the solver noticeably slower and most that look violated are met once the worst of them is."""


def bound_seconds(
    problem: Problem, budget: int, *, moments: Iterable[int] = (), time_limit: float = 10.0, whole: float = 0.0
) -> float:
    """The least seconds that any plan whose peak is at most `budget` bytes adds; infinite if none can exist.

    The budget is below the peak of the step as it is, so that something is planned and its standing cost paid.

    Args:
        moments: positions to look at from the start; those at which a good plan is near the budget say most.
        time_limit: seconds for the relaxation, about. What comes back holds however early it ends.
        whole: more seconds in which decisions may not be split, for a better bound.
    """
    return Bound(problem).seconds(budget, moments=moments, time_limit=time_limit, whole=whole)


@dataclass
class _Rows:
    """A sparse matrix in the making, and its upper bounds."""

    data: list[float] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    upper: list[float] = field(default_factory=list)

    def add(self, columns: Sequence[int], coefficients: Sequence[float], upper: float) -> None:
        self.columns.extend(columns)
        self.data.extend(coefficients)
        self.starts.append(len(self.columns))
        self.upper.append(upper)


class Bound:
    """The programme of one problem, for any budget: moments once looked at serve the next budget too."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.packed = packable(problem.trace, with_loss=problem.with_loss)
        needs = problem.needs
        self.replayed = {o: i for i, o in enumerate(problem.eligible)}
        asked = {o for o in problem.eligible if any(needs[v].asks for v in problem.saved_outputs(o))}
        self.dropped = {o: self.replayed[o] for o in asked}
        size = len(self.replayed)
        for o in problem.eligible:
            if o not in asked:
                self.dropped[o], size = size, size + 1
        self.binaries = size
        self.twice: dict[int, int] = {}
        if len(problem.passes) == 1:
            self.twice = {o: size + i for i, o in enumerate(problem.eligible)}
        self.size = size + len(self.twice)
        self.chained = len(self.replayed) <= CHAINED_UP_TO
        self.rows = _Rows()
        self.twin = {v: w for v, clone in problem.clones.items() for v, w in ((v, clone), (clone, v))}
        extra = [self._charges(), self._copies()]
        self.cost = np.zeros(self.size)
        free = {problem.maker[clone] for clone in problem.clones.values()}
        for columns in (self.replayed, self.twice):
            for o, column in columns.items():
                self.cost[column] = 0.0 if o in free else problem.cost[o]
        for by_column in extra:
            for column, seconds in by_column.items():
                self.cost[column] += seconds
        self.deadline = _deadlines(problem)
        self.scale = max(float(problem.running.max(initial=1)), 1.0)
        self.memory: dict[int, tuple[int, float]] = {}  # moment -> its row, bytes whatever is decided
        self._simple()

    def _charges(self) -> dict[int, float]:
        """What calls cost in which anything is replayed, by column; `self.standing` is what any plan pays."""
        standing = self.problem.standing
        self.standing = standing.least if standing is not None else 0.0
        found: dict[int, float] = defaultdict(float)
        for seconds, ops in standing.charges(self.replayed) if standing is not None else ():
            if len(ops) == len(self.replayed):
                self.standing += seconds
            elif len(ops) == 1:
                found[self.replayed[min(ops)]] += seconds
            else:
                column = self._column()
                found[column] = seconds
                for o in ops:
                    self.rows.add([self.replayed[o], column], [1.0, -1.0], 0.0)
        return found

    def _copies(self) -> dict[int, float]:
        """What copies cost of what is written over, and clones that are made again, by column."""
        problem, column = self.problem, self.replayed
        found: dict[int, float] = {}
        for v, writer, clone in _copied(problem, self.packed):
            copied, copied_again = self._column(), self._column()
            found[copied] = found[copied_again] = problem.copy_seconds * problem.needs[v].nbytes
            maker = [column[problem.maker[v]]] if v in problem.maker else []
            cloner = [column[problem.maker[clone]]] if clone is not None else []
            for c in problem.readers[v]:
                if column[c] not in cloner:
                    unless = [*maker, *cloner, copied]
                    self.rows.add([column[c], *unless], [1.0] + [-1.0] * len(unless), 0.0)
            self.rows.add([column[writer], *maker, copied_again], [1.0] + [-1.0] * (len(maker) + 1), 0.0)
            if clone is not None and maker:
                again = self._column()
                found[again] = problem.cost[problem.maker[clone]]
                self.rows.add([*cloner, *maker, again], [1.0, 1.0, -1.0], 1.0)
        return found

    def _simple(self) -> None:
        """Bytes at every position by kept values alone: what says which moments to look at."""
        self.fixed = self.problem.running.astype(float).copy()
        self.kept: list[tuple[int, int, int, int]] = []  # column, first, last, bytes
        last_position = len(self.fixed) - 1
        for o in self.problem.eligible:
            for v in self.problem.saved_outputs(o):
                need = self.problem.needs[v]
                used = np.zeros(len(self.fixed), dtype=bool)
                for ask in need.asks.values():  # it is there while backward uses it, kept or replayed
                    used[ask.first + 1 : ask.loan_end + 1] = True
                self.fixed[used] += need.nbytes
                held = np.zeros(len(self.fixed), dtype=bool)
                held[need.program_end + 1 : min(need.end, last_position) + 1] = need.program_end < NEVER
                nbytes = self.packed.get(v, need.nbytes)
                self.kept += [(self.dropped[o], a, b, nbytes) for a, b in _runs(held & ~used)]

    def curve(self, x: np.ndarray) -> np.ndarray:
        """Bytes at every position that a solution cannot avoid, by kept values alone."""
        change = np.zeros(len(self.fixed) + 1)
        for column, first, last, nbytes in self.kept:
            change[first] += nbytes * (1 - x[column])
            change[last + 1] -= nbytes * (1 - x[column])
        return self.fixed + np.cumsum(change[:-1])

    # -- one moment -----------------------------------------------------------------------------------------------

    def look_at(self, t: int) -> None:
        """Add the variables and rows of one moment."""
        if t in self.memory:
            return
        problem, needs = self.problem, self.problem.needs
        h: dict[int, int] = {}
        g: dict[int, int] = {}
        fixed = float(problem.running[t])
        bytes_of: dict[int, float] = {}  # by column
        either: dict[int, int] = {}  # the first of a value and its clone -> whether one of them is there
        wanted: dict[int, None] = {}  # in order

        def present(v: int) -> int:
            """The variable for v being there."""
            if v in h:
                return h[v]
            h[v] = self._column()
            twin = self.twin.get(v)
            if twin is None:
                bytes_of[h[v]] = self.packed.get(v, needs[v].nbytes) / self.scale
            elif not self._in_use(twin, t):  # a pin may be the clone: the bytes of one of them
                if twin not in either:
                    either[v] = self._column()
                    bytes_of[either[v]] = min(self.packed.get(u, needs[u].nbytes) for u in (v, twin)) / self.scale
                self.rows.add([h[v], either[v] if v in either else either[twin]], [1.0, -1.0], 0.0)
            return h[v]

        for o in problem.eligible:
            if problem.positions[o] >= t:
                break
            for v in problem.saved_outputs(o):
                need = needs[v]
                if self._in_use(v, t):
                    fixed += need.nbytes
                elif need.program_end < t <= need.end:
                    self.rows.add([present(v), self.dropped[o]], [-1.0, -1.0], -1.0)
                if not self._there(v, t) and any(a.first >= t for a in need.asks.values()):
                    wanted[v] = None
        seen: set[int] = set()
        stack = list(wanted)
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            present(v)
            if v in problem.maker:
                maker = problem.maker[v]
                g[v] = self._column()
                self.rows.add([g[v], self.replayed[maker]], [1.0, -1.0], 0.0)
                stack.extend(u for u in problem.trace.ops[maker].inputs if not self._there(u, t))
        for v in seen:
            parts = [h[v], g[v]] if v in g else [h[v]]
            if v in wanted:
                self.rows.add(parts, [-1.0] * len(parts), -1.0)
            for c in problem.readers.get(v, ()):
                for w in problem.trace.ops[c].outputs:
                    if w in g:
                        self.rows.add([g[w], *parts], [1.0] + [-1.0] * len(parts), 0.0)
        if self.twice:
            self._add_again(t, g)
        self.memory[t] = len(self.rows.upper), fixed
        self.rows.add([*bytes_of], [*bytes_of.values()], 0.0)

    def _add_again(self, t: int, g: Mapping[int, int]) -> None:
        """What is replayed before t and after it is replayed twice."""
        problem = self.problem
        before: dict[int, int] = {}  # op -> whether it is replayed before t
        for o in reversed(problem.eligible):
            if self.deadline[o] < t:
                before[o] = self.replayed[o]
            elif self.chained:
                after = {before[c]: None for v in self._gone(o) for c in problem.readers.get(v, ()) if c in before}
                if after:
                    before[o] = self._column()
                for column in after:
                    self.rows.add([self.replayed[o], column, before[o]], [1.0, 1.0, -1.0], 1.0)
        for v, again in g.items():
            o = problem.maker[v]
            if o in before:
                self.rows.add([before[o], again, self.twice[o]], [1.0, 1.0, -1.0], 1.0)

    def _gone(self, op: int) -> Iterator[int]:
        """Outputs that no replay finds in the program's hands."""
        for v in self.problem.trace.ops[op].outputs:
            if self.problem.needs[v].program_end < self.problem.backward_start:
                yield v

    def _column(self) -> int:
        self.size += 1
        return self.size - 1

    def _in_use(self, v: int, t: int) -> bool:
        return any(a.first < t <= a.loan_end for a in self.problem.needs[v].asks.values())

    def _there(self, v: int, t: int) -> bool:
        """Whether a value is there at t without costing the plan anything."""
        need = self.problem.needs[v]
        if need.program_end >= t or self._in_use(v, t):
            return True
        return v not in self.problem.maker and need.saved and need.release >= t

    # -- solving --------------------------------------------------------------------------------------------------

    def seconds(
        self, budget: int, *, moments: Iterable[int] = (), time_limit: float = 10.0, whole: float = 0.0
    ) -> float:
        """See `bound_seconds`."""
        if self.fixed.max(initial=0) > budget + 1:
            return float(np.inf)
        if not self.replayed:
            return 0.0
        until = time.monotonic() + time_limit
        for t in (int(np.argmax(self.curve(np.zeros(self.binaries)))), self.problem.backward_start, *moments):
            if self.size < MOST_COLUMNS and t < len(self.fixed):
                self.look_at(t)
        value = 0.0
        while True:
            left = until - time.monotonic()
            if left <= 0:
                break
            found = self._solve(budget, left, whole=False)
            if found is None:
                return float(np.inf)
            if found[0] is None:
                break
            x, value = found[0], max(value, found[1])
            most = IF_LARGE if self.size > LARGE else MOMENTS_AT_ONCE
            broken = [t for t in worst(self.curve(x[: self.binaries]) - budget) if t not in self.memory][:most]
            if not broken or self.size > MOST_COLUMNS:
                break
            for t in broken:
                self.look_at(t)
        if whole:
            found = self._solve(budget, whole, whole=True)
            value = max(value, found[1]) if found is not None else value
        return max(value, 0.0) * (1 - 1e-6) + self.standing  # less the solver's tolerance

    def _solve(self, budget: int, time_limit: float, *, whole: bool) -> tuple[np.ndarray | None, float] | None:
        """The solution and a bound on all solutions; None if there is no solution at all."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix

        upper = np.array(self.rows.upper)
        for row, fixed in self.memory.values():
            upper[row] = (budget - fixed) / self.scale
        matrix = csr_matrix((self.rows.data, self.rows.columns, self.rows.starts), shape=(len(upper), self.size))
        total = max(float(self.cost.sum()), 1e-12)
        cost = np.zeros(self.size)
        cost[: len(self.cost)] = self.cost / total
        integrality = np.zeros(self.size)
        integrality[: len(self.cost)] = whole
        with silent_stdout():
            result = milp(
                cost, constraints=LinearConstraint(matrix, -np.inf, upper), integrality=integrality,
                bounds=Bounds(np.zeros(self.size), np.ones(self.size)),
                options={"time_limit": time_limit, "mip_rel_gap": 1e-3},
            )  # fmt: skip
        if result.status == INFEASIBLE:
            return None
        if whole:
            return None, max(float(result.mip_dual_bound or 0.0), 0.0) * total
        return (result.x, float(result.fun) * total) if result.status == OPTIMAL else (None, 0.0)


OPTIMAL, INFEASIBLE = 0, 2
"""In scipy's words."""


def worst(excess: np.ndarray) -> list[int]:
    """Some positions that are over budget, the worst first, spread over the runs of them."""
    over = np.flatnonzero(excess > 1.0)
    if not len(over):
        return []
    runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    pieces = [p for run in runs for p in np.array_split(run, min(len(run), max(1, MOMENTS_AT_ONCE // len(runs))))]
    tops = sorted(((float(excess[p].max()), int(p[np.argmax(excess[p])])) for p in pieces), reverse=True)
    return [t for _, t in tops[:MOMENTS_AT_ONCE]]


def _copied(problem: Problem, packed: Mapping[int, int]) -> Iterator[tuple[int, int, int | None]]:
    """What an op writes over, that has to be copied where a recipe pins it, the op, and the clone that may serve."""
    trace = problem.trace
    for o in problem.eligible:
        for v, _ in trace.ops[o].writes:
            if o not in problem.readers.get(v, ()) or v in packed:
                continue
            small = trace.storages[trace.values[v].storage].category not in MADE_IN_STEP  # may be copied when pinned
            clone = problem.clones.get(v)
            if not small and (clone is not None or clone_before(trace, o, v) < 0):
                yield v, o, clone


def _deadlines(problem: Problem) -> dict[int, int]:
    """The position by which an op has been replayed for the first time, if it is replayed at all."""
    deadline: dict[int, int] = {}
    for o in reversed(problem.eligible):
        own = [a.first for v in problem.saved_outputs(o) for a in problem.needs[v].asks.values()]
        deadline[o] = min(own) if own else max((deadline[c] for c in problem.readers_of(o)), default=NEVER)
    return deadline


def _runs(held: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], held.astype(np.int8), [0]])))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]
