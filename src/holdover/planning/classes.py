"""Equal ops of equal blocks, so that a model of a hundred blocks is no harder to plan than one of eight.

Blocks are calls whose ops are the same, in the same order, on the same shapes. They are gathered into a few groups of
neighbours; within a group the same op of each block gets the same decision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from holdover.planning.problem import Problem
from holdover.trace.graph import Trace

GROUPS = 8


def classes_of(problem: Problem, stages: Mapping[int, int]) -> dict[int, object]:
    """Eligible op -> a key shared with its twins: same place in an equal block, cut alike, as far into its stage."""
    trace = problem.trace
    twins: dict[object, list[tuple[int, ...]]] = defaultdict(list)
    in_stage: dict[int, int] = defaultdict(int)
    for block in _blocks(trace, problem.eligible):
        first = stages[block[0]]
        kind = tuple(trace.ops[o].signature for o in block)
        cuts = tuple(stages[o] - first for o in block)
        starts = stages.get(block[0] - 1) != first
        twins[kind, cuts, starts, in_stage[first]].append(block)
        in_stage[first] += 1
    classes: dict[int, object] = {}
    for number, members in enumerate(twins.values()):
        size = -(-len(members) // GROUPS)
        for i, block in enumerate(members):
            for place, o in enumerate(block):
                classes[o] = (number, i // size, place)
    return classes


def _blocks(trace: Trace, eligible: list[int]) -> list[tuple[int, ...]]:
    """The eligible ops of each outermost module call that has at least two more like it."""
    inside: dict[int, list[int]] = defaultdict(list)
    for o in eligible:
        call = trace.ops[o].call
        while call >= 0:
            inside[call].append(o)
            call = trace.calls[call].parent
    kinds: dict[object, list[int]] = defaultdict(list)
    for call, ops in inside.items():
        kinds[tuple(trace.ops[o].signature for o in ops)].append(call)
    repeated = {c for calls in kinds.values() if len(calls) >= 3 for c in calls}
    chosen = []
    for call, ops in inside.items():
        if call in repeated and not _has_ancestor(trace, call, repeated):
            chosen.append(tuple(ops))
    return sorted(chosen)


def _has_ancestor(trace: Trace, call: int, among: set[int]) -> bool:
    call = trace.calls[call].parent
    while call >= 0:
        if call in among:
            return True
        call = trace.calls[call].parent
    return False
