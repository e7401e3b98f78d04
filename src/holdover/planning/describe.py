"""From the solver's answer to a Plan: places instead of op numbers, what it promises, and what it does per module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from holdover.memory.estimate import peak_of
from holdover.memory.timeline import Timeline
from holdover.planning.inputs import FIXED
from holdover.planning.plan import PACK, RECOMPUTE, Choice, Knee, ModuleSummary, Plan
from holdover.planning.problem import Problem
from holdover.planning.search import Candidate, Search
from holdover.planning.standing import loud_calls, writing_calls
from holdover.trace.graph import Category, Trace

LOW, FAR_CHEAPER = 0.25, 0.75
"""Beside the lowest peak a plan is worth naming that gives up at most a quarter of what recomputation gains, and is at
least a quarter cheaper."""


def described(
    search: Search, best: Candidate, plain: Candidate, floor: Candidate, limit: int | None, least: float,
    *, priced: str, precision: str | None, unknown: Sequence[str],
) -> Plan:  # fmt: skip
    """The plan that `best` is, for a budget of `limit` bytes; `least` is the proved bound, in seconds."""
    problem = search.problem
    trace, with_loss = problem.trace, problem.with_loss
    timeline = search.timeline(best)
    peak = peak_of(trace, timeline)
    pack = {v: n for v, n in search.choices(best).pack.items() if trace.values[v].maker in problem.positions}
    choices = _choices(trace, best, pack)
    step = max(problem.step_seconds, 1e-12)
    saved, kept = _saved_bytes(trace, problem, best.recorded, pack)
    bound = min(least, best.seconds)
    notes = [*trace.notes, *unknown]
    if best.recorded and peak.nbytes >= plain.peak_bytes:
        notes.append("This plan does not lower the peak.")
    if limit is None and floor.peak_bytes >= plain.peak_bytes:
        notes.append(f"No recomputation lowers the peak: it stands in {peak.phase}, at {peak.op}.")
    bent = knee_of(search, floor, plain.peak_bytes) if limit is None else None
    if limit is not None and not choices:
        notes.append("The step fits the budget as it is: nothing is recomputed.")
    return Plan(
        model=trace.model, fingerprint=trace.fingerprint, inputs=trace.inputs,
        device=trace.device, precision=precision,
        optimizer=trace.optimizer, torch_version=torch.__version__,
        budget_bytes=limit, predicted_peak_bytes=peak.nbytes, unplanned_peak_bytes=plain.peak_bytes,
        floor_bytes=floor.peak_bytes, extra_time=best.seconds / step, bound_extra_time=bound / step,
        step_seconds=problem.step_seconds, priced=priced, saved_bytes=kept, unplanned_saved_bytes=saved,
        peak_at=peak.place,
        peak_parts={k.value: n for k, n in peak.parts.items()}, with_loss=with_loss,
        choices=tuple(choices), quiet=tuple(quiet_calls(trace, choices)),
        modules=tuple(_modules(trace, problem, timeline, best.recorded, pack)), notes=tuple(notes),
        knee=None if bent is None else Knee(bent.peak_bytes, bent.seconds / step),
    )  # fmt: skip


def knee_of(search: Search, floor: Candidate, unplanned_bytes: int) -> Candidate | None:
    """A plan that was met on the way, nearly as low as the floor and far cheaper: of those the one with the least
    product of memory and time, in which a doubled time has to halve the bytes that a plan can do something about."""
    parts = peak_of(search.trace, search.timeline(floor)).parts
    fixed = sum(n for kind, n in parts.items() if kind.value in FIXED)
    step, met = max(search.problem.step_seconds, 1e-12), [*search.judged(), floor]
    bent = bend([(c.peak_bytes, c.seconds / step) for c in met], fixed, unplanned_bytes)
    return None if bent is None else met[bent]


def bend(points: Sequence[tuple[int, float]], fixed_bytes: int, unplanned_bytes: int) -> int | None:
    """The same among plans' peaks and extra times, the last of which is the lowest peak: an index, if one is worth it.

    >>> bend([(90, 0.1), (52, 0.4), (50, 3.0)], fixed_bytes=20, unplanned_bytes=100)
    1
    """
    low, most = points[-1]
    high = low + LOW * (unplanned_bytes - low)
    near = (i for i, (peak, _) in enumerate(points) if peak <= high)
    best = min(near, key=lambda i: (points[i][0] - fixed_bytes) * (1 + points[i][1]))
    return best if points[best][1] < FAR_CHEAPER * most else None


def _choices(trace: Trace, best: Candidate, pack: Mapping[int, int]) -> list[Choice]:
    def choice(number: int, action: str) -> Choice:
        op = trace.ops[number]
        return Choice(trace.calls[op.call].key, op.index, op.name, action, *best.stages.get(number, ()))

    packers = {trace.values[v].maker for v in pack} - best.recorded
    return [choice(o, RECOMPUTE) for o in sorted(best.recorded)] + [choice(o, PACK) for o in sorted(packers)]


def _saved_bytes(trace: Trace, problem: Problem, recorded: frozenset[int], pack: Mapping[int, int]) -> tuple[int, int]:
    """Activations saved for backward: without the plan, and with it."""
    unplanned = kept = 0
    seen: set[int] = set()
    for slot in trace.slots:
        value = trace.values[slot.value]
        storage = trace.storages[value.storage]
        if value.maker not in problem.positions or storage.category is not Category.ACTIVATION or storage.id in seen:
            continue
        seen.add(storage.id)
        unplanned += storage.nbytes
        kept += 0 if value.maker in recorded else pack.get(value.id, storage.nbytes)
    return unplanned, kept


def _modules(
    trace: Trace, problem: Problem, timeline: Timeline, recorded: frozenset[int], pack: Mapping[int, int]
) -> list[ModuleSummary]:
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
    for o in sorted(recorded):
        row = rows[trace.calls[trace.ops[o].call].path]
        row[0] += sum(problem.needs[v].nbytes for v in problem.saved_outputs(o))
        row[2] += timeline.replays.get(o, 0)
        row[3] += timeline.replays.get(o, 0) * problem.cost[o]
    for v, nbytes in pack.items():
        row = rows[trace.calls[trace.ops[trace.values[v].maker].call].path]
        row[1] += problem.needs[v].nbytes - nbytes
    return [ModuleSummary(p, int(d), int(k), int(n), float(s)) for p, (d, k, n, s) in rows.items()]


def quiet_calls(trace: Trace, choices: list[Choice]) -> list[str]:
    """Largest calls that the plan leaves alone and that write to nothing from outside them which it reads or makes."""
    places = {(c.call, c.index) for c in choices}
    planned = [op.id for op in trace.ops if (trace.calls[op.call].key, op.index) in places]
    loud = loud_calls(trace, planned, writing_calls(trace))
    return [c.key for c in trace.calls if c.id not in loud and c.parent in loud]
