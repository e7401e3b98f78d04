"""Estimates and plans as notebooks show them: a fragment of HTML that needs no script and no style sheet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import Environment

from holdover.report.html.page import asset
from holdover.report.stack import stack_of
from holdover.report.tables import knee_line, layer_name
from holdover.units import format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from holdover.memory.estimate import Estimate
    from holdover.planning.plan import Plan

COLOURS = {
    "parameter": "#3f5f8a", "buffer": "#6d7f99", "gradient": "#7a5195", "optimizer": "#2c8c7c", "input": "#9b9b94",
    "activation": "#e08a1e", "temporary": "#f2c230",
}  # fmt: skip
MOST_ROWS = 8


def estimate_fragment(estimate: Estimate) -> str:
    """The peak and its parts, and the layers that hold most."""
    layers = sorted(stack_of(estimate.trace).items(), key=lambda item: -item[1].saved_bytes)
    parts = {k.value: n for k, n in estimate.peak.parts.items()}
    peak = estimate.peak
    return _filled(
        title=estimate.model,
        subtitle=f"{estimate.inputs}, {estimate.optimizer or 'no optimizer'}, {estimate.precision}, {estimate.device}",
        bars=[_bar(f"peak, in {peak.phase} at {peak.op}", parts, peak.nbytes)],
        key=_parts(parts, peak.nbytes),
        heads=["layer", "weights", "saved for backward"],
        rows=[
            [name, format_bytes(layer.weights_bytes), format_bytes(layer.saved_bytes)]
            for name, layer in layers[:MOST_ROWS]
        ],
        remarks=[*_left_out(len(layers)), *estimate.notes, *estimate.uncertainties],
    )


def plan_fragment(plan: Plan) -> str:
    """The promise, the peak that is left, and the layers that give up most."""
    rows = plan_rows(plan)
    whole = max(plan.unplanned_peak_bytes, 1)
    parts = dict(plan.peak_parts)
    unplanned = {"unplanned": plan.unplanned_peak_bytes}
    return _filled(
        title=f"Plan for {plan.model}",
        subtitle=f"{plan.inputs}, {plan.optimizer or 'no optimizer'}, {plan.precision or 'as given'}, {plan.device}",
        bars=[
            _bar("peak as it is", unplanned, whole),
            _bar(
                f"peak with the plan, for {format_share(plan.extra_time, sign=True)} time "
                f"(proved: no plan adds less than {format_share(plan.bound_extra_time, sign=True)})",
                parts, whole,
            ),
        ],
        key=_parts(parts, whole),
        heads=["layer", "dropped", "packed away", "ops run again", "time"],
        rows=[[n, format_bytes(d), format_bytes(p), f"{k:,}", format_seconds(s)] for n, d, p, k, s in rows[:MOST_ROWS]],
        remarks=[*_left_out(len(rows)), *filter(None, [knee_line(plan)]), *plan.notes],
    )  # fmt: skip


def plan_rows(plan: Plan) -> list[tuple[str, int, int, int, float]]:
    """What a plan does by layer: bytes dropped, bytes packed away, ops run again, their seconds; most bytes first."""
    table: dict[str, list[float]] = {}
    for m in plan.modules:
        row = table.setdefault(layer_name(m.path), [0, 0, 0, 0.0])
        for i, figure in enumerate((m.dropped_bytes, m.packed_bytes, m.replayed_ops, m.seconds)):
            row[i] += figure
    rows = [(name, int(d), int(p), int(n), s) for name, (d, p, n, s) in table.items()]
    return sorted(rows, key=lambda row: -row[1] - row[2])


def _left_out(number: int) -> list[str]:
    return [f"and {number - MOST_ROWS} more layers; to_html() shows everything"] if number > MOST_ROWS else []


def _parts(parts: Mapping[str, int], whole: int) -> list[dict[str, Any]]:
    return [
        {"name": name, "text": format_bytes(n), "share": f"{100 * n / max(whole, 1):.3f}",
         "colour": COLOURS.get(name, "#8888")}
        for name, n in parts.items() if n
    ]  # fmt: skip


def _bar(label: str, parts: Mapping[str, int], whole: int) -> dict[str, Any]:
    total = sum(parts.values())
    shown = _parts(parts, total)
    words = ", ".join(f"{part['name']} {part['text']}" for part in shown)
    return {
        "label": label, "nbytes": total, "text": format_bytes(total), "parts": shown, "words": words,
        "width": f"{100 * total / max(whole, 1):.3f}",
    }  # fmt: skip


def _filled(**values: Any) -> str:
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(asset("fragment.html"))
    return template.render(**values)
