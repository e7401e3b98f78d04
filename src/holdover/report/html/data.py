"""The data behind the report page: plain lists and names, the same numbers that a page's charts and tables show.

Series and positions are stored as differences (`deltas`), names as indices into `strings`: a page for a model of a
hundred layers stays small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from holdover.cost.devices import Card
from holdover.cost.measured import price
from holdover.cost.roofline import modelled
from holdover.memory.estimate import Estimate, estimate_of, workspaces
from holdover.memory.life import name_of
from holdover.memory.timeline import CATEGORIES, Choices
from holdover.planning.api import priced_problem
from holdover.planning.choices import choices_of
from holdover.planning.describe import bend
from holdover.planning.inputs import FIXED
from holdover.planning.plan import Plan
from holdover.planning.problem import Problem
from holdover.report.html.held import KEEP, PACKED, REASONS, RECOMPUTE, Held, held_values, reasons_of, state_of
from holdover.report.html.moments import Run, Shown, Watched, runs_of, shown_step, tops, watch, watch_planned
from holdover.report.html.policies import policies_of
from holdover.report.stack import LOSS, stack_of
from holdover.trace.graph import Category, Phase, Trace

SCHEMA_VERSION = 1
STATES = (KEEP, RECOMPUTE, PACKED)
LISTED_AT_PEAK = 12
LISTED = (Category.ACTIVATION, Category.TEMPORARY, Category.GRADIENT, Category.INPUT)
"""Categories whose storages are listed one by one; of the others the page has the totals."""


def deltas(numbers: Iterable[int]) -> list[int]:
    """Each number less the one before it.

    >>> deltas([5, 7, 7])
    [5, 2, 0]
    """
    found, last = [], 0
    for n in numbers:
        found.append(n - last)
        last = n
    return found


class Strings:
    """A table of names, each once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def page_data(
    trace: Trace, plans: Sequence[Plan] = (), *, estimate: Estimate | None = None, chosen: int = 0,
    scaling: Mapping[str, Any] | None = None, card: Card | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Everything that the page shows of a recorded step.

    Args:
        plans: plans of this trace, falling peaks; a frontier's. The first should be the step without a plan.
        estimate: the trace's estimate, where it is there already.
        chosen: index of the plan that the page opens with.
        card: the card that the step was recorded for, if that is not here.
        scaling: what other sizes of the step were found to hold, from `holdover.report.scaling`.
    """
    estimate = estimate or estimate_of(trace)
    workspace, _ = workspaces(trace)
    shown = shown_step(trace)
    strings = Strings()
    runs = runs_of(shown)
    plain = watch(shown, workspace)
    rows = held_values(shown)
    problem, seconds = _priced(shown, workspace, plans, card) if plans else (None, [])
    cost = problem.cost if problem else {}
    at_peak = _at_highest(plain)
    storages = _listed(shown, plain)
    number = {s: i for i, s in enumerate(storages)}
    modules = _Modules(shown, strings)
    data: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "torch": torch.__version__,
        **{k: v for k, v in estimate.to_dict().items() if k not in ("schema_version", "modules", "ops")},
        "step": shown.step,
        "categories": [c.value for c in CATEGORIES],
        "phases": [p.value for p in Phase],
        "states": list(STATES),
        "reasons": REASONS,
        "layers": [{"name": name, **vars(layer)} for name, layer in stack_of(trace).items()],
        "scaling": scaling,
        "modules": modules.data(estimate),
        "runs": _runs_data(runs, tops(plain.live_bytes, runs), seconds),
        "ops": {
            "name": [strings[trace.ops[n].name] for n in shown.ops],
            "module": [modules.of_op(n) for n in shown.ops],
            "optimizer_start": shown.optimizer_start,
        },
        "storages": _storages_data(shown, plain, storages, strings, modules),
        "held": _held_data(rows, shown, number, cost, strings),
        "plain": _watched_data(plain, runs, shown, number, {}),
        "step_seconds": problem.step_seconds if problem else 0.0,
        "priced": plans[0].priced if plans else "",
        "plans": [],
        "policies": [],
        "chosen": chosen,
        "knee": _knee_data(plans),
    }
    for plan in plans:
        choices = choices_of(trace, plan)
        seen = watch_planned(shown, choices, workspace, plain) if plan.choices else plain
        data["plans"].append({
            **_plan_data(plan), **_watched_data(seen, runs, shown, number, plain.spans),
            "recomputed": deltas(i for i, n in enumerate(shown.ops) if n in choices.recompute),
            "replays": [seen.timeline.replays.get(n, 0) for n in shown.ops if n in choices.recompute],
            "held": [STATES.index(state_of(row, shown, choices)) for row in rows],
            "reasons": [list(REASONS).index(r) for r in reasons_of(rows, shown, choices, at_peak, cost)],
            "modules": _plan_modules(plan, rows, shown, choices, seen, cost, modules),
        })  # fmt: skip
    if problem is not None:
        data["policies"] = [vars(p) for p in policies_of(shown, workspace, problem)]
    data["strings"] = list(strings.numbers)
    return data


def _priced(
    shown: Shown, workspace: Mapping[int, int], plans: Sequence[Plan], card: Card | None
) -> tuple[Problem, list[float]]:
    """The planning problem with its prices, and seconds of each shown op's kernel."""
    trace = shown.trace
    problem, _ = priced_problem(trace, workspace, with_loss=any(p.with_loss for p in plans), card=card)
    if card is not None:
        prices = modelled(trace.signatures, card)
    else:
        device = trace.device
        prices = price(trace.signatures, device=device, replayed=())
    return problem, [prices[trace.ops[n].signature].seconds for n in shown.ops]


def _at_highest(plain: Watched) -> frozenset[int]:
    """Storages that are there at the highest moment of the shown step."""
    if not plain.live_bytes:
        return frozenset()
    top = max(range(len(plain.live_bytes)), key=plain.live_bytes.__getitem__)
    return frozenset(s for s, spans in plain.spans.items() if any(a <= top <= b for a, b in spans))


def _listed(shown: Shown, plain: Watched) -> list[int]:
    trace = shown.trace
    return [
        s
        for s, spans in sorted(plain.spans.items())
        if trace.storages[s].category in LISTED and spans[0][0] < shown.optimizer_start and trace.storages[s].nbytes
    ]


def _runs_data(runs: Sequence[Run], highest: Sequence[int], seconds: Sequence[float]) -> dict[str, Any]:
    phases = list(Phase)
    return {
        "first": deltas(r.first for r in runs),
        "phase": [phases.index(r.phase) for r in runs],
        "top": deltas(highest),
        "seconds": [float(f"{sum(seconds[r.first : r.end]):.4g}") for r in runs] if seconds else None,
    }


def _watched_data(
    seen: Watched, runs: Sequence[Run], shown: Shown, number: Mapping[int, int], plain: Mapping[int, Sequence[Any]]
) -> dict[str, Any]:
    highest = tops(seen.live_bytes, runs)
    return {
        "live": deltas(seen.live_bytes[i] for i in highest),
        "by_category": [deltas(seen.category_bytes[i][k] for i in highest) for k in range(len(CATEGORIES))],
        "peak": _peak_data(seen, shown, number),
        "spans": _changed_spans(seen, number, plain) if plain else [],
        "copies": [[nbytes, *span] for nbytes, span in seen.copies],
    }


def _peak_data(seen: Watched, shown: Shown, number: Mapping[int, int]) -> dict[str, Any]:
    """The highest moment of the shown step, and the largest storages at it."""
    if not seen.live_bytes:
        return {"at": 0, "bytes": 0, "largest": []}
    at = max(range(len(seen.live_bytes)), key=lambda i: (seen.live_bytes[i], -i))
    there = {s for s, spans in seen.spans.items() if any(a <= at <= b for a, b in spans)}
    sizes = {s: shown.trace.storages[s].nbytes for s in there if s in number}
    largest = sorted(sizes, key=lambda s: (-sizes[s], s))[:LISTED_AT_PEAK]
    return {
        "at": at,
        "bytes": seen.live_bytes[at],
        "parts": list(seen.category_bytes[at]),
        "largest": [number[s] for s in largest],
    }


def _changed_spans(
    seen: Watched, number: Mapping[int, int], plain: Mapping[int, Sequence[Any]]
) -> list[list[int]]:  # fmt: skip
    """[storage, from, to, from, to, ...] of those that a plan changes; positions relative to the plain step's start."""
    changed = []
    for storage, index in number.items():
        spans = seen.spans.get(storage, [])
        if spans != plain[storage]:
            base = plain[storage][0][0]
            changed.append([index, *(edge - base for span in spans for edge in span)])
    return changed


class _Modules:
    """The modules of a trace by path, the model itself first and the code outside it last."""

    def __init__(self, shown: Shown, strings: Strings) -> None:
        self.trace, self.strings = shown.trace, strings
        calls = [c for c in shown.trace.calls if c.key]
        self.paths = list(dict.fromkeys(["", *(c.path for c in calls)]))
        self.kinds = {c.path: c.kind for c in calls}
        self.number = {path: i for i, path in enumerate(self.paths)}

    def of_op(self, op: int) -> int:
        call = self.trace.calls[self.trace.ops[op].call]
        return self.number[call.path] if call.key else len(self.paths)

    def data(self, estimate: Estimate) -> dict[str, Any]:
        weights = {row.path: row.weights_bytes for row in estimate.by_module()}
        for path, nbytes in weights.items():
            if path not in self.number and nbytes:
                self._above(path, weights)
        return {
            "path": [self.strings[p] for p in self.paths] + [self.strings[LOSS]],
            "kind": [self.strings[self.kinds.get(p, "")] for p in self.paths] + [self.strings[""]],
            "parent": [self._parent(p) for p in self.paths] + [-1],
            "weights_bytes": [weights.get(p, 0) for p in self.paths] + [0],
        }

    def _above(self, path: str, weights: dict[str, int]) -> None:
        """Weights of a module that was never called go to the nearest one above it that was."""
        above = path
        while above not in self.number:
            above = above.rpartition(".")[0]
        weights[above] = weights.get(above, 0) + weights[path]

    def _parent(self, path: str) -> int:
        if not path:
            return -1
        above = path.rpartition(".")[0]
        while above not in self.number:
            above = above.rpartition(".")[0]
        return self.number[above]


def _storages_data(
    shown: Shown, plain: Watched, storages: Sequence[int], strings: Strings, modules: _Modules
) -> dict[str, Any]:
    trace = shown.trace
    makers = {v.storage: v.maker for v in trace.values if v.version == 0}
    order = list(CATEGORIES)
    return {
        "bytes": [trace.storages[s].nbytes for s in storages],
        "category": [order.index(trace.storages[s].category) for s in storages],
        "name": [
            strings[trace.ops[makers[s]].name if makers.get(s, -1) >= 0 else trace.storages[s].name] for s in storages
        ],
        "module": [modules.of_op(makers[s]) if makers.get(s, -1) >= 0 else -1 for s in storages],
        "from": deltas(plain.spans[s][0][0] for s in storages),
        "length": [plain.spans[s][0][1] - plain.spans[s][0][0] for s in storages],
        "again": {i: plain.spans[s][1:] for i, s in enumerate(storages) if len(plain.spans[s]) > 1},
    }


def _held_data(
    rows: Sequence[Held], shown: Shown, number: Mapping[int, int], cost: Mapping[int, float], strings: Strings
) -> dict[str, Any]:
    return {
        "storage": deltas(number.get(r.storage, -1) for r in rows),
        "name": [strings[name_of(shown.trace, r.value)] for r in rows],
        "bytes": [r.nbytes for r in rows],
        "maker": deltas(r.maker for r in rows),
        "dtype": [strings[r.dtype] for r in rows],
        "shape": [strings[" x ".join(map(str, r.shape)) if r.shape else ""] for r in rows],
        "readers": [[i - r.maker for i in r.readers] for r in rows],
        "needers": [deltas(r.needers) for r in rows],
        "seconds": [_short(cost.get(shown.ops[r.maker])) for r in rows],
        "obstacle": [strings[r.obstacle] for r in rows],
    }


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.4g}")


def _plan_data(plan: Plan) -> dict[str, Any]:
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.predicted_peak_bytes,
        "peak_at": plan.peak_at,
        "extra_time": plan.extra_time,
        "bound_extra_time": plan.bound_extra_time,
        "saved_bytes": plan.saved_bytes,
        "reserved_bytes": plan.reserved_bytes,
        "with_loss": plan.with_loss,
        "notes": list(plan.notes),
    }


def _knee_data(plans: Sequence[Plan]) -> dict[str, Any] | None:
    """What to ask for instead of the lowest peak, where its last bytes are dear: a budget, and its plan if shown."""
    if not plans:
        return None
    last = plans[-1]
    if last.knee is not None:
        return {"budget_bytes": last.knee.budget_bytes, "extra_time": last.knee.extra_time, "plan": None}
    if len(plans) == 2:  # the step as it is, and a plan that need not be the lowest
        return None
    fixed = sum(last.peak_parts.get(name, 0) for name in FIXED)
    bent = bend([(p.predicted_peak_bytes, p.extra_time) for p in plans], fixed, last.unplanned_peak_bytes)
    if bent is None:
        return None
    return {"budget_bytes": plans[bent].predicted_peak_bytes, "extra_time": plans[bent].extra_time, "plan": bent}


def _plan_modules(
    plan: Plan, rows: Sequence[Held], shown: Shown, choices: Choices, seen: Watched, cost: Mapping[int, float],
    modules: _Modules,
) -> list[list[float]]:  # fmt: skip
    """[module, kept bytes, dropped bytes, packed bytes, replays, seconds] for modules that hold or replay anything."""
    table: dict[int, list[float]] = {}
    for row in rows:
        entry = table.setdefault(modules.of_op(shown.ops[row.maker]), [0, 0, 0, 0, 0.0])
        entry[STATES.index(state_of(row, shown, choices))] += row.nbytes
    for o in (n for n in shown.ops if n in choices.recompute):
        entry = table.setdefault(modules.of_op(o), [0, 0, 0, 0, 0.0])
        entry[3] += seen.timeline.replays.get(o, 0)
        entry[4] += seen.timeline.replays.get(o, 0) * cost.get(o, 0.0)
    return [[m, *entry[:4], float(f"{entry[4]:.4g}")] for m, entry in sorted(table.items())]
