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
    """Eligible op -> a key shared with its twins: same block kind, same place in it, same cuts around it."""
    trace = problem.trace
    blocks = _blocks(trace, problem.eligible)
    kinds: dict[object, list[tuple[int, ...]]] = defaultdict(list)
    for block in blocks:
        kinds[tuple((trace.ops[o].signature, trace.ops[o].name) for o in block)].append(block)
    classes: dict[int, object] = {}
    for kind, (_, members) in enumerate(kinds.items()):
        size = max(1, -(-len(members) // GROUPS))
        for i, block in enumerate(members):
            shape = tuple(stages[o] - stages[block[0]] for o in block)
            starts = block[0] and stages.get(block[0] - 1) != stages[block[0]]
            for place, o in enumerate(block):
                classes[o] = (kind, i // size, place, shape, starts)
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
