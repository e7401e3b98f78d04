"""The planning problem as a small mixed-integer program, solved by HiGHS, for one way of cutting forward into stages.

Per eligible op o a binary x_o: 1 if it is recorded (its outputs dropped, and made again in its stage's backward).
Per value v read by recorded ops, and per stage of such a reader, y_v,s in [0, 1]: v itself is kept, until that stage's
backward is over.

    minimise   sum of cost_o x_o + sum of charge_k z_k
    such that  x_c <= x_o + y_v,s      op c of stage s reads v, made by o in the same stage: v is replayed, or kept
               x_c + x_o <= 1          the same over a cut: a replay never reaches into another stage
               y_v,s >= x_c            v is made by an op that cannot be replayed, or was written over
               y_v,s <= y_v,s'         s' a stage whose backward comes earlier than that of s
               x_o <= z_k              recording o turns the dispatch mode on in the calls of k
               w <= y_v,s, x_c, x_d, 1 - x_o    v's pin is the clone of it that c makes and d writes over v after: the
                                       copy, the clone's replay and its bytes are saved
               base(t) + kept(t) + pinned(t) + replayed(t) <= budget    at every moment t

When a recorded op is replayed depends on what else is recorded. At first intervals are on the safe side: a replayed
value counts from the first moment that anything made from it in its stage might be asked for, until the last. Given a
solution, the model can be built again with the moments that follow from it, which is exact around that solution. The
rows of the last kind are added where a solution breaks them, until none does.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from holdover.planning.problem import NEVER, Problem
from holdover.planning.stdout import silent_stdout

Interval = tuple[int, int, int]  # first position, last position, bytes


@dataclass
class Model:
    """Variables and constraints for one partition. Variables: ops (or classes of equal ops) first, then pins."""

    problem: Problem
    ops: list[int]
    column: dict[int, int]  # op -> variable
    cost: np.ndarray
    fixed: np.ndarray  # bytes at each position if nothing is recorded
    changes: list[list[tuple[int, int, int]]]  # per variable: intervals whose bytes it adds (or takes away)
    rows: list[tuple[list[int], list[float], float]] = field(default_factory=list)  # columns, coefficients, <= bound
    pins: list[float] = field(default_factory=list)  # seconds that each pin costs
    binaries: int = 0

    @property
    def size(self) -> int:
        return len(self.changes)

    def bytes_at(self, solution: np.ndarray) -> np.ndarray:
        """The curve that a solution gives, by this model."""
        delta = np.zeros(len(self.fixed) + 1)
        for x, intervals in zip(solution, self.changes, strict=True):
            if x > 1e-9:
                for first, last, nbytes in intervals:
                    delta[first] += x * nbytes
                    delta[last + 1] -= x * nbytes
        return self.fixed + np.cumsum(delta[:-1])

    def memory_row(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """Columns and bytes that matter at position t."""
        live = self.flat[(self.flat[:, 1] <= t) & (self.flat[:, 2] >= t)]
        sums = np.bincount(live[:, 0], weights=live[:, 3], minlength=self.size)
        columns = np.flatnonzero(sums)
        return columns, sums[columns]

    @cached_property
    def flat(self) -> np.ndarray:
        """All intervals as rows of (column, first, last, bytes)."""
        rows = [(j, *interval) for j, intervals in enumerate(self.changes) for interval in intervals]
        return np.array(rows, dtype=np.int64).reshape(-1, 4)


def build_model(
    problem: Problem, stages: Mapping[int, int], classes: Mapping[int, object] | None = None,
    assumed: frozenset[int] | None = None,
) -> Model:  # fmt: skip
    """The program for one partition; ops of one class share their variable, `assumed` is a solution to be near to."""
    trace, needs = problem.trace, problem.needs
    column: dict[int, int] = {}
    by_class: dict[object, int] = {}
    for o in problem.eligible:
        key = classes[o] if classes is not None and o in classes else ("op", o)
        column[o] = by_class.setdefault(key, len(by_class))
    number = len(by_class)
    cost = [0.0] * number
    changes: list[list[Interval]] = [[] for _ in range(number)]
    fixed = problem.base.astype(float).copy()
    for o in problem.eligible:
        for v in problem.saved_outputs(o):
            need = needs[v]
            first, last = need.program_end + 1, min(need.end, len(fixed) - 1)
            if first <= last:
                fixed[first : last + 1] += need.nbytes
                changes[column[o]].append((first, last, -need.nbytes))
    late: dict[int, int] = defaultdict(lambda: -1)
    cloned = set(problem.clones.values())
    again: dict[int, list[Interval]] = defaultdict(list)  # when clones are there again
    for number_of_pass in problem.passes:
        early, last_asked = replay_times(problem, stages, number_of_pass, assumed)
        for o in problem.eligible:
            if early[o] >= NEVER:
                continue
            late[o] = max(late[o], last_asked[o])
            cost[column[o]] += problem.cost[o]
            for v in trace.ops[o].outputs:
                readers = [c for c in problem.readers.get(v, ()) if stages[c] == stages[o] and early[c] < NEVER]
                ask = needs[v].asks.get(number_of_pass)
                if ask is not None or readers:
                    used = [ask.last, ask.loan_end] if ask is not None else []
                    last = max([*used, *(last_asked[c] for c in readers)])
                    changes[column[o]].append((early[o], min(last, len(fixed) - 1), needs[v].nbytes))
                    if v in cloned:
                        again[v].append((early[o], min(last, len(fixed) - 1), -needs[v].nbytes))
    model = Model(problem, problem.eligible, column, np.array(cost), fixed, changes, binaries=number)
    _add_closure(model, stages, late, again)
    model.cost = np.concatenate([model.cost, model.pins])
    _add_charges(model)
    return model


def replay_times(
    problem: Problem, stages: Mapping[int, int], number_of_pass: int, assumed: frozenset[int] | None
) -> tuple[dict[int, int], dict[int, int]]:
    """The earliest and the latest position at which one backward pass may replay an op, by what its stage asks for.

    If the ops recorded beside it are `assumed` to be known, the two are the same.
    """
    early: dict[int, int] = {}
    late: dict[int, int] = {}
    for o in reversed(problem.eligible):
        asks = [problem.needs[v].asks.get(number_of_pass) for v in problem.saved_outputs(o)]
        own = [a.first for a in asks if a is not None]
        readers = [c for c in problem.readers_of(o) if stages[c] == stages[o] and early[c] < NEVER]
        if assumed is None:
            early[o] = min([*own, *(early[c] for c in readers)], default=NEVER)
            late[o] = max(own) if own else max([late[c] for c in readers], default=-1)
        else:
            sure = [*own, *(early[c] for c in readers if c in assumed)]
            early[o] = min(sure or [early[c] for c in readers], default=NEVER)
            late[o] = early[o] if early[o] < NEVER else -1
    return early, late


def _add_closure(
    model: Model, stages: Mapping[int, int], late: Mapping[int, int], again: Mapping[int, list[Interval]]
) -> None:
    """A recorded op needs its inputs: replayed in its own stage, or kept until it has been replayed."""
    problem = model.problem
    for v, readers in problem.readers.items():
        maker = problem.maker.get(v)
        by_stage: dict[int, list[int]] = defaultdict(list)
        for c in readers:
            by_stage[stages[c]].append(c)
        pins: list[int] = []
        for s in sorted(by_stage, reverse=True):  # the stage whose backward comes first, first
            if maker is not None and stages[maker] != s:
                for c in by_stage[s]:
                    _forbid_both(model, c, maker)
            end = max(_released(problem, c, late) for c in by_stage[s])
            if not _there_anyway(problem, v, maker, by_stage[s], end):
                pins.append(_pin(model, v, by_stage[s], maker if maker is None or stages[maker] == s else None, end))
                clone = problem.clones.get(v)
                if clone is not None and stages[problem.maker[clone]] == s:
                    _pinned_as_clone(model, v, clone, pins[-1], again[clone])
        for later, earlier in itertools.pairwise(pins):  # what the second stage still needs is there for the first
            model.rows.append(([earlier, later], [1.0, -1.0], 0.0))


def _add_charges(model: Model) -> None:
    """What a call costs once anything is recorded in it: a variable that is 1 as soon as one of its ops is."""
    if model.problem.standing is None:
        return
    together: dict[frozenset[int], float] = defaultdict(float)
    for seconds, ops in model.problem.standing.charges(model.ops):
        together[frozenset(model.column[o] for o in ops)] += seconds
    costs = []
    for columns, seconds in together.items():
        if len(columns) == 1:
            model.cost[list(columns)] += seconds
        elif len(columns) < model.binaries:  # a call that every op turns on costs the same whatever is decided
            model.rows += [([column, model.size], [1.0, -1.0], 0.0) for column in columns]
            model.changes.append([])
            costs.append(seconds)
    model.cost = np.concatenate([model.cost, costs])


def _forbid_both(model: Model, reader: int, maker: int) -> None:
    """Not both of them recorded: the reader's replay would reach over a cut."""
    r, m = model.column[reader], model.column[maker]
    model.rows.append(([r, m], [1.0, 1.0], 1.0) if r != m else ([r], [1.0], 0.5))


def _there_anyway(problem: Problem, value: int, maker: int | None, readers: Sequence[int], end: int) -> bool:
    """Whether a value that is not replayed is there until `end` without being pinned."""
    need = problem.needs[value]
    if need.program_end > end and not (need.saved and maker is not None):
        return True
    written = any(before == value for c in readers for before, _ in problem.trace.ops[c].writes)
    return need.saved and maker is not None and end <= need.end and not (written and need.program_end < NEVER)


def _pin(model: Model, value: int, readers: Sequence[int], maker: int | None, end: int) -> int:
    """A new variable: the value is held for its recorded readers of one stage, beyond what holds it anyway."""
    problem = model.problem
    need, y = problem.needs[value], model.size
    kept = need.saved and value in problem.maker
    first, last = max(need.program_end, need.end if kept else -1) + 1, min(end, len(model.fixed) - 1)
    model.changes.append([(first, last, need.nbytes)] if first <= last else [])
    copies = 0
    if value in problem.overwritten:  # copied before it is, and again by a replay that writes over it
        copies = 1 + any(before == value for c in readers for before, _ in problem.trace.ops[c].writes)
    model.pins.append(copies * problem.copy_seconds * need.nbytes)
    for c in readers:
        if maker is None:
            model.rows.append(([model.column[c], y], [1.0, -1.0], 0.0))
        elif model.column[maker] != model.column[c]:
            model.rows.append(([model.column[c], y, model.column[maker]], [1.0, -1.0, -1.0], 0.0))
    return y


def _pinned_as_clone(model: Model, value: int, clone: int, pin: int, again: list[Interval]) -> None:
    """A new variable: the pin needs no copy, since it is a recorded clone, which then need not be made again."""
    problem = model.problem
    maker, w = problem.maker[clone], model.size
    model.changes.append(again)
    model.pins.append(-(problem.copy_seconds * problem.needs[value].nbytes + problem.cost[maker]))
    (writer,) = [o for o in problem.readers[value] if any(v == value for v, _ in problem.trace.ops[o].writes)]
    for column in {pin, model.column[maker], model.column[writer]}:
        model.rows.append(([w, column], [1.0, -1.0], 0.0))
    if value in problem.maker:
        model.rows.append(([w, model.column[problem.maker[value]]], [1.0, 1.0], 1.0))


def _released(problem: Problem, op: int, late: Mapping[int, int]) -> int:
    """When the recipe of `op` can be forgotten: nothing asks for what it makes any more."""
    own = [problem.needs[v].release for v in problem.saved_outputs(op)]
    return max([late[op], *own])


@dataclass
class Solution:
    """What HiGHS found: recorded ops, their cost, and a bound on the cost of any solution of this model."""

    recorded: frozenset[int]
    seconds: float
    bound_seconds: float
    peak: float  # of the model, bytes


def solve(model: Model, budget: float, *, time_limit: float, gap: float = 0.005) -> Solution | None:
    """The cheapest recorded set whose model peak is at most `budget` bytes; None if there is none."""
    if not model.size:
        peak = float(model.fixed.max(initial=0))
        return Solution(frozenset(), 0.0, 0.0, peak) if peak <= budget else None
    rows = sorted({int(t) for t in _first_rows(model)})
    for _ in range(30):
        result = _highs(model, rows, budget, time_limit, gap)
        if result is None:
            return None
        x, bound = result
        x = np.where(np.arange(model.size) < model.binaries, np.round(x), x)
        curve = model.bytes_at(x)
        broken = _worst(curve - budget, rows)
        if not broken:
            return Solution(_recorded(model, x), float(model.cost @ x), bound, float(curve.max()))
        rows = sorted({*rows, *broken})
    return None


def lowest(model: Model, *, time_limit: float, gap: float = 0.01) -> Solution:
    """A recorded set of the lowest model peak."""
    if not model.size:
        return Solution(frozenset(), 0.0, 0.0, float(model.fixed.max(initial=0)))
    rows = sorted({int(t) for t in _first_rows(model)})
    for _ in range(30):
        result = _highs(model, rows, None, time_limit, gap)
        if result is None:
            break
        x, bound = result
        x = np.where(np.arange(model.size) < model.binaries, np.round(x), x)
        curve = model.bytes_at(x)
        reached = max((curve[t] for t in rows), default=0.0)
        broken = _worst(curve - max(reached, bound) * 1.001, rows)
        if not broken:
            return Solution(_recorded(model, x), float(model.cost @ x), 0.0, float(curve.max()))
        rows = sorted({*rows, *broken})
    return Solution(frozenset(), 0.0, 0.0, float(model.fixed.max()))


def _recorded(model: Model, x: np.ndarray) -> frozenset[int]:
    return frozenset(o for o in model.ops if x[model.column[o]] > 0.5)


def _first_rows(model: Model) -> Sequence[int]:
    return [int(np.argmax(model.fixed)), model.problem.backward_start - 1 if model.problem.backward_start else 0]


def _worst(excess: np.ndarray, known: Sequence[int], most: int = 12) -> list[int]:
    """Local maxima of what is over budget, the worst first, in places not looked at yet."""
    over = np.flatnonzero(excess > 1.0)
    if not len(over):
        return []
    taken = set(known)
    chosen: list[int] = []
    runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    # A long run over budget gives several rows, or the next solution just moves the peak along it.
    pieces = [p for run in runs for p in np.array_split(run, min(len(run), max(1, most // len(runs))))]
    for piece in sorted(pieces, key=lambda p: -float(excess[p].max())):
        t = int(piece[np.argmax(excess[piece])])
        if t not in taken:
            chosen.append(t)
        if len(chosen) == most:
            break
    return chosen


def _highs(
    model: Model, rows: Sequence[int], budget: float | None, time_limit: float, gap: float
) -> tuple[np.ndarray, float] | None:
    """One call of HiGHS. Without a budget the peak itself is minimised, in a last variable, time breaking ties."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    size = model.size + (budget is None)
    scale = max(float(model.fixed.max()), 1.0)
    data: list[float] = []
    columns: list[int] = []
    starts = [0]
    upper: list[float] = []
    for cols, coefficients, bound in model.rows:
        columns.extend(cols)
        data.extend(coefficients)
        starts.append(len(columns))
        upper.append(bound)
    for t in rows:
        live, nbytes = model.memory_row(t)
        columns.extend(live.tolist())
        data.extend((nbytes / scale).tolist())
        if budget is None:
            columns.append(model.size)
            data.append(-1.0)
        starts.append(len(columns))
        upper.append(((budget or 0.0) - model.fixed[t]) / scale)
    matrix = csr_matrix((data, columns, starts), shape=(len(upper), size))
    total = max(float(model.cost.sum()), 1e-12)
    cost = model.cost / total
    if budget is None:
        cost = np.append(cost * 1e-3, 1.0)
    integrality = np.zeros(size)
    integrality[: model.binaries] = 1
    high = np.ones(size)
    if budget is None:
        high[-1] = np.inf
    with silent_stdout():
        result = milp(
            cost, constraints=LinearConstraint(matrix, -np.inf, np.array(upper)), integrality=integrality,
            bounds=Bounds(np.zeros(size), high), options={"time_limit": time_limit, "mip_rel_gap": gap},
        )  # fmt: skip
    if result.x is None:
        return None
    if budget is None:
        return result.x[:-1], float(result.x[-1]) * scale
    bound = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
    return result.x, max(float(bound), 0.0) * total
