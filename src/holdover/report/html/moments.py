"""One step over time: when each storage is there, and the highest bytes of each run of ops.

Positions count the ops of the step that the page shows, the last one of the trace; -1 is "before it".
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdover.memory.simulate import simulate
from holdover.memory.timeline import NOTHING, Choices, Timeline
from holdover.trace.events import replayed_part
from holdover.trace.graph import Event, Phase, Trace

MOST_RUNS, MOST_OPTIMIZER_RUNS = 1200, 120
"""Points that a curve has at most: those of forward, loss and backward, and those of the optimizer's step."""

Span = tuple[int, int]
"""From the op during which a storage is allocated to the op during which it is freed."""


@dataclass(frozen=True)
class Shown:
    """The step of a trace that the page shows: its ops, and where its optimizer begins."""

    trace: Trace
    step: int
    ops: tuple[int, ...]
    optimizer_start: int

    @property
    def length(self) -> int:
        return len(self.ops)


@dataclass(frozen=True)
class Watched:
    """A simulated step: bytes live after each op of it, and when each storage (or copy that a plan makes) is there."""

    live_bytes: list[int]
    category_bytes: list[tuple[int, ...]]
    spans: dict[int, list[Span]]
    copies: list[tuple[int, Span]]  # (bytes, span) of clones, packed forms, generator states and values made aside
    timeline: Timeline


@dataclass(frozen=True)
class Run:
    """Neighbouring ops of one phase that are one point of a curve: positions `first` to `end`, `end` not included."""

    phase: Phase
    first: int
    end: int


def shown_step(trace: Trace) -> Shown:
    """The last recorded step: with an optimizer, the one that every later step is like."""
    step = trace.last_step
    ops = tuple(op.id for op in trace.ops if op.step == step)
    start = next((i for i, n in enumerate(ops) if trace.ops[n].phase is Phase.OPTIMIZER), len(ops))
    return Shown(trace, step, ops, start)


def watch(shown: Shown, workspace: Mapping[int, int]) -> Watched:
    """The step as it is."""
    return _watched(shown, shown.trace, NOTHING, workspace)


def watch_planned(shown: Shown, choices: Choices, workspace: Mapping[int, int], plain: Watched) -> Watched:
    """The step under a plan, which changes nothing from the optimizer's step on."""
    part = replayed_part(shown.trace, shown.step)
    seen = _watched(shown, part, choices, workspace)
    end = shown.optimizer_start
    for storage, spans in seen.spans.items():
        if spans[-1][1] == shown.length:  # outlives backward: what then becomes of it is the plain step's matter
            spans[-1] = (spans[-1][0], next((b for a, b in plain.spans.get(storage, ()) if b >= end), shown.length))
    for storage, spans in plain.spans.items():
        if spans[-1][0] >= end:
            seen.spans[storage] = spans
    live = seen.live_bytes[:end] + plain.live_bytes[end:]
    return Watched(live, seen.category_bytes[:end] + plain.category_bytes[end:], seen.spans, seen.copies, seen.timeline)


def _watched(shown: Shown, trace: Trace, choices: Choices, workspace: Mapping[int, int]) -> Watched:
    place = {op: i for i, op in enumerate(shown.ops)}
    storages = len(trace.storages)
    began: dict[int, int] = {}
    sizes: dict[int, int] = {}
    spans: dict[int, list[Span]] = defaultdict(list)
    at = -1

    def see(holding: int, nbytes: int) -> None:
        nonlocal at
        if holding < 0:
            if not nbytes:  # else the workspace of a kernel, perhaps of one that is replayed
                at = place.get(~holding, at)
        elif nbytes > 0:
            began[holding] = at
            sizes[holding] = nbytes
        elif holding in began:
            start = began.pop(holding)
            if spans[holding] and spans[holding][-1][1] == start >= 0:  # handed from one holder to another
                start = spans[holding].pop()[0]
            if at >= 0:
                spans[holding].append((start, at))

    timeline = simulate(trace, choices, workspace, detail=False, observer=see)
    for holding, start in began.items():
        spans[holding].append((start, shown.length))
    walked = [number for kind, number in trace.events if kind is Event.OP]
    rows = {op: i for i, op in enumerate(walked)}
    order = [rows[op] for op in shown.ops if op in rows]
    return Watched(
        [timeline.live_bytes[i] for i in order],
        [timeline.category_bytes[i] for i in order],
        {h: s for h, s in spans.items() if h < storages and s},
        [(sizes[h], span) for h, several in spans.items() if h >= storages for span in several],
        timeline,
    )


def runs_of(shown: Shown) -> list[Run]:
    """The step cut into runs of ops of one phase each, single ops where there are few enough."""
    phases: list[Run] = []
    for i, number in enumerate(shown.ops):
        phase = shown.trace.ops[number].phase
        if phases and phases[-1].phase is phase:
            phases[-1] = Run(phase, phases[-1].first, i + 1)
        else:
            phases.append(Run(phase, i, i + 1))
    runs: list[Run] = []
    for whole in phases:
        optimizer = whole.phase is Phase.OPTIMIZER
        total = shown.length - shown.optimizer_start if optimizer else max(shown.optimizer_start, 1)
        most = MOST_OPTIMIZER_RUNS if optimizer else MOST_RUNS
        length = whole.end - whole.first
        number = min(length, max(1, length * most // total))
        edges = [whole.first + k * length // number for k in range(number + 1)]
        runs += [Run(whole.phase, a, b) for a, b in itertools.pairwise(edges)]
    return runs


def tops(live_bytes: Sequence[int], runs: Sequence[Run]) -> list[int]:
    """The position of the most bytes in each run: what stands for the run, so that no peak is lost.

    >>> tops([1, 5, 2, 7, 7], [Run(Phase.FORWARD, 0, 3), Run(Phase.BACKWARD, 3, 5)])
    [1, 3]
    """
    return [max(range(run.first, run.end), key=lambda i: (live_bytes[i], -i)) for run in runs]
