"""A proved bound: no plan of this problem that meets the budget takes less extra time than this.

The linear programme here is weaker than any plan on purpose. It charges one replay for an op of which a saved value is
asked for when nobody holds it any more, nothing for dropping what is never asked for, and no memory for replays but
the tensor that backward is using at the moment; a replay's inputs must be kept or replayed somewhere, in whatever
stage; what can be packed takes no more than its packed bytes; only the moments at which an op runs are looked at.
Every plan, with segments or without, satisfies it.
"""

from __future__ import annotations

import numpy as np

from holdover.planning.milp import Interval, Model, relaxed
from holdover.planning.packing import packable
from holdover.planning.problem import NEVER, Problem


def bound_seconds(problem: Problem, budget: int) -> float:
    """The least seconds of replay of any plan whose peak is at most `budget` bytes; infinite if none can exist."""
    model = _optimistic(problem)
    found = relaxed(model, float(budget))
    return np.inf if found is None else max(found, 0.0) * (1 - 1e-6)  # the solver's tolerance


def _optimistic(problem: Problem) -> Model:
    needs = problem.needs
    packed = packable(problem.trace, with_loss=problem.with_loss)
    asked = [o for o in problem.eligible if any(needs[v].asks for v in problem.saved_outputs(o))]
    column = {o: i for i, o in enumerate(problem.eligible)}  # replayed, and so recorded
    dropped = {o: len(column) + i for i, o in enumerate(sorted(set(column) - set(asked)))}  # recorded
    fixed = problem.running.astype(float).copy()
    changes: list[list[Interval]] = [[] for _ in range(len(column) + len(dropped))]
    for o in column:
        for v in problem.saved_outputs(o):
            need = needs[v]
            used = np.zeros(len(fixed), dtype=bool)
            for ask in need.asks.values():  # it is there while backward uses it, kept or replayed
                used[ask.first + 1 : ask.loan_end + 1] = True
            fixed[used] += need.nbytes
            held = np.zeros(len(fixed), dtype=bool)
            held[need.program_end + 1 : min(need.end, len(fixed) - 1) + 1] = need.program_end < NEVER
            nbytes = packed.get(v, need.nbytes)
            for first, last in _runs(held & ~used):
                fixed[first : last + 1] += nbytes
                changes[dropped.get(o, column[o])].append((first, last, -nbytes))
    cost = np.array([problem.cost[o] for o in column])
    model = Model(problem, problem.eligible, column, cost, fixed, changes, binaries=len(changes))
    _closure(model)
    model.cost = np.concatenate([cost, np.zeros(model.size - len(cost))])
    return model


def _runs(held: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], held.astype(np.int8), [0]])))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _closure(model: Model) -> None:
    """What a replayed op reads is replayed too, or held from forward at least until backward begins."""
    problem = model.problem
    for v, readers in problem.readers.items():
        need, maker = problem.needs[v], problem.maker.get(v)
        if need.program_end >= problem.backward_start or need.saved:
            continue
        y = model.size
        model.changes.append([(need.program_end + 1, problem.backward_start - 1, need.nbytes)])
        for c in readers:
            columns, coefficients = [model.column[c], y], [1.0, -1.0]
            if maker is not None:
                columns.append(model.column[maker])
                coefficients.append(-1.0)
            model.rows.append((columns, coefficients, 0.0))
