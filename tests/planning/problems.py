"""Small planning problems with made-up prices, and every plan that they have."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from tests.memory.programs import ROWS, WIDTH, Program

from holdover.memory.estimate import workspaces
from holdover.memory.workspace import true_outputs
from holdover.planning.api import same_places
from holdover.planning.problem import Problem, build
from holdover.planning.search import Candidate, Search
from holdover.trace.graph import Trace
from holdover.trace.record import record


def problem_of(trace: Trace, prices: list[float]) -> tuple[Problem, Mapping[int, int]]:
    """The trace's problem, its signatures priced in turn from `prices`, and the workspace."""
    workspace, _ = workspaces(trace)
    cost = {i: prices[i % len(prices)] for i in range(len(trace.signatures))}
    return build(trace, cost, workspace), workspace


def program_trace(program: list[tuple[str, int, int]]) -> Trace:
    return record(Program(program), (torch.rand(ROWS, WIDTH),), corrections=true_outputs)


def search_of(problem: Problem, workspace: Mapping[int, int], seconds: float = 5.0) -> Search:
    return Search(problem, workspace, same_places(problem), seconds=seconds)


def all_plans(search: Search) -> list[Candidate]:
    """Every set of recorded ops, as the simulator judges it."""
    ops = search.problem.eligible
    return [search.judge(c) for n in range(len(ops) + 1) for c in itertools.combinations(ops, n)]
