"""The bound against every plan of small random graphs, nested ones included."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from tests.planning.graphs import random_step
from tests.planning.problems import problem_of, program_trace, search_of

from holdover.cost.overheads import Overheads
from holdover.planning.bound import Bound
from holdover.planning.problem import Problem, build
from holdover.planning.search import Candidate, Search
from holdover.planning.standing import Standing
from holdover.trace.graph import Call, Phase

GRAPHS, STAGINGS = 40, 4


def every_plan(search: Search, random: Random) -> list[Candidate]:
    """Every set of recorded ops, held until last use, and with some random stages each."""
    eligible = search.problem.eligible
    found = []
    for number in range(len(eligible) + 1):
        for chosen in itertools.combinations(eligible, number):
            found.append(search.judge(chosen))
            for _ in range(STAGINGS if chosen else 0):
                stages = sorted(random.randint(0, 3) for _ in chosen)
                held = {o: (s, s + random.randint(0, 2)) for o, s in zip(chosen, stages, strict=True)}
                found.append(search.judge(chosen, held))
    return found


def problem_of_seed(seed: int) -> Problem:
    """Every other one has modules in modules, and charges for watching what runs in them."""
    trace, costs = random_step(seed)
    if seed % 2:
        return build(trace, costs, {})
    random = Random(seed)
    trace.calls += [Call(2, "model/a", "", "A", 1), Call(3, "model/b", "", "B", 1), Call(4, "model/a/c", "", "C", 2)]
    for op in trace.ops:
        if op.phase is Phase.FORWARD:
            op.call = random.choice([1, 2, 2, 3, 4, 4])
    problem = build(trace, costs, {})
    overheads = Overheads(watched=random.choice([0.5, 3.0]), recorded=0, hooked=0.1, quiet_call=0.2, plain=0)
    problem.standing = Standing(trace, overheads, with_loss=False)
    return problem


@pytest.mark.parametrize("start", range(0, 3 * GRAPHS, GRAPHS))
def test_no_plan_beats_the_bound(start: int) -> None:
    """bound <= optimum <= plan, at the lowest peak, at the plain one, and between."""
    nearness = []
    for seed in range(start, start + GRAPHS):
        problem = problem_of_seed(seed)
        if not problem.eligible:
            continue
        search = search_of(problem, {}, seconds=1.0)
        plans = every_plan(search, Random(seed))
        low, high = min(p.peak_bytes for p in plans), search.judge(()).peak_bytes
        bound = Bound(problem)
        floor = search_of(problem, {}, seconds=1.0).lowest()
        for budget in sorted({low, (2 * low + high) // 3, (low + 2 * high) // 3, high - 1}):
            fitting = [p for p in plans if p.peak_bytes <= budget]
            if not fitting or budget >= high:  # where the step fits as it is, nothing is planned
                continue
            optimum = min(p.seconds for p in fitting)
            whole = bound.seconds(budget, whole=2.0)
            assert bound.seconds(budget) <= whole + 1e-6 * (1 + whole)
            assert whole <= optimum * (1 + 1e-6) + 1e-9, f"seed {seed}, budget {budget}"
            if floor.peak_bytes <= budget:
                plan = search_of(problem, {}, seconds=1.0).cheapest(budget, floor, whole)
                assert whole - 1e-6 <= plan.seconds
                nearness.append((whole, optimum, plan.seconds))
    proved = sum(b for b, _, _ in nearness)
    best = sum(o for _, o, _ in nearness)
    found = sum(p for _, _, p in nearness)
    assert proved > 0.4 * best  # 0.9 over thousands of graphs
    assert found < 1.2 * best  # and the plans are good: 3 % over all, with a second for each


IN_PLACE = ("silu_", "gated_", "cloned", "relu_", "overwritten", "mul_", "add_")


@pytest.mark.parametrize("seed", range(24))
def test_no_plan_beats_the_bound_where_copies_cost(seed: int) -> None:
    """Real programs that write in place, with autograd's clones before that, at a price for each byte copied."""
    random = Random(seed)
    program = [(random.choice(IN_PLACE), random.randint(0, 3), random.randint(0, 5))]
    if random.random() < 0.5:
        program.append((random.choice((*IN_PLACE, "gelu", "linear")), random.randint(0, 3), random.randint(0, 5)))
    problem, workspace = problem_of(program_trace(program), [random.choice([1.0, 2.0, 5.0, 20.0]) for _ in range(7)])
    problem.copy_seconds = random.choice([5e-4, 2e-3])  # three to twelve seconds for a matrix
    if len(problem.eligible) > 7:
        problem, workspace = problem_of(program_trace(program[:1]), [1.0, 5.0, 2.0])
    search = search_of(problem, workspace, seconds=1.0)
    plans = every_plan(search, random)
    low, high = min(p.peak_bytes for p in plans), search.judge(()).peak_bytes
    bound = Bound(problem)
    for budget in sorted({low, (2 * low + high) // 3, (low + 2 * high) // 3}):
        fitting = [p for p in plans if p.peak_bytes <= budget]
        if fitting and budget < high:
            assert bound.seconds(budget, whole=2.0) <= min(p.seconds for p in fitting) * (1 + 1e-6) + 1e-9
