"""Where to cut forward into stages: places where few bytes cross, so that a stage can be replayed from little.

A stage is a run of forward ops whose recorded ones are replayed together, when backward reaches the stage. Replays
never reach over a cut: what they read from before it is kept. One cut per block gives what whole-block activation
checkpointing can do and more; fewer cuts give segments in the manner of Chen et al. 2016 for very low budgets.
"""

from __future__ import annotations

import numpy as np

from holdover.planning.problem import Problem, crossing_bytes
from holdover.trace.graph import Phase


def partitions(problem: Problem, limit: int = 9) -> list[dict[int, int]]:
    """Several ways to cut, finest first: each maps an op to the number of its stage.

    Cutting at every valley gives the finest stages; leaving out the shallow valleys (those that more bytes cross) and
    joining neighbours gives the others.
    """
    ops = [
        n for n in problem.positions if problem.trace.ops[n].phase in (Phase.FORWARD, Phase.LOSS)
        and n <= (problem.eligible[-1] if problem.eligible else -1)
    ]  # fmt: skip
    if not ops:
        return []
    crossing = crossing_bytes(problem, ops)
    valleys = _valleys(problem, ops, crossing)
    saved = np.cumsum([sum(problem.needs[v].nbytes for v in problem.saved_outputs(o)) for o in ops])
    found: dict[tuple[int, ...], dict[int, int]] = {}
    depths = _depths(crossing, valleys)
    for depth in depths:
        cuts = [c for c in valleys if crossing[c] <= depth]
        for chosen in _every(cuts) if depth in (depths[0], depths[-1]) else ():
            found.setdefault(tuple(chosen), _numbered(ops, chosen))
        for number in _counts(len(cuts) + 1, limit):
            chosen = _choose(cuts, saved, crossing, number)
            found.setdefault(tuple(chosen), _numbered(ops, chosen))
    return [found[cuts] for cuts in sorted(found, key=len, reverse=True)]


def _every(cuts: list[int]) -> list[list[int]]:
    """Every second and third cut, from each start: blocks often have cuts of several kinds, and one is best."""
    return [cuts[start::step] for step in (2, 3) for start in range(step) if len(cuts) >= 2 * step]


def _depths(crossing: np.ndarray, valleys: list[int]) -> list[int]:
    """Up to four bounds on the bytes that cross a cut: no bound, and the levels at which many valleys lie."""
    if not valleys:
        return [0]
    levels = np.sort(crossing[valleys])
    return sorted({int(levels[int(q * (len(levels) - 1))]) for q in (0.25, 0.5, 0.75, 1.0)}, reverse=True)


def _counts(most: int, limit: int) -> list[int]:
    """Numbers of stages to try: the finest, halved again and again, down to one."""
    counts: list[int] = []
    number = float(most)
    while number >= 1 and len(counts) < limit:
        counts.append(round(number))
        number /= 2 if most > 16 else 1.5
    if most > 8:
        counts.append(max(2, round(np.sqrt(most))))
    return sorted({*counts, 1}, reverse=True)


def _valleys(problem: Problem, ops: list[int], crossing: np.ndarray) -> list[int]:
    """Indices after which a cut is cheap: fewer bytes cross there than on either side. A plain chain is one valley."""
    makes = [bool(problem.trace.ops[o].outputs) for o in ops]
    runs: list[list[int]] = []
    for i in range(len(ops) - 1):
        if runs and crossing[i] == crossing[runs[-1][0]]:
            runs[-1].append(i)
        else:
            runs.append([i])
    for end in (0, -1):  # before the first value and after the last one that forward reads there is nothing to cut
        while len(runs) > 1 and not crossing[runs[end][0]]:
            runs.pop(end)
    valleys = []
    for k, run in enumerate(runs):
        left = crossing[runs[k - 1][0]] if k else np.inf
        right = crossing[runs[k + 1][0]] if k + 1 < len(runs) else np.inf
        if crossing[run[0]] < left and crossing[run[0]] < right:
            producing = [i for i in run if makes[i]]
            valleys.extend(producing or run[:1])
    return valleys


def _choose(cuts: list[int], saved: np.ndarray, crossing: np.ndarray, number: int) -> list[int]:
    """`number - 1` of the cuts, which share the saved bytes evenly, the cheapest near each ideal place."""
    if number > len(cuts):
        return cuts
    ideal = saved[-1] / number
    chosen: list[int] = []
    for k in range(1, number):
        low, high = (k - 0.5) * ideal, (k + 0.5) * ideal
        near = [c for c in cuts if low < saved[c] <= high and (not chosen or c > chosen[-1])]
        if near:
            chosen.append(min(near, key=lambda c: (crossing[c], abs(saved[c] - k * ideal))))
    return chosen


def _numbered(ops: list[int], cuts: list[int]) -> dict[int, int]:
    stages, stage, last = {}, 0, iter([*cuts, len(ops)])
    edge = next(last)
    for i, o in enumerate(ops):
        stages[o] = stage
        if i == edge:
            stage += 1
            edge = next(last)
    return stages
