"""One self-contained file: the page, its style and script, and its data, which `read_page` gets back."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import Environment

from holdover.errors import HoldoverError, PlanError
from holdover.units import format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from holdover.memory.estimate import Estimate
    from holdover.planning.plan import Plan

SCRIPTS = ("base.js", "stack.js", "memory.js", "frontier.js", "life.js", "tables.js", "main.js")
"""In the order in which they are put together: parts of one ES module."""

NO_SIZES = (
    "The command holdover report records other batch sizes, lengths and depths too, and puts their controls here."
)


def render_page(data: Mapping[str, Any], **more: Any) -> str:
    """The page for what `data.page_data` returns; `more` is what `holdover serve` adds to it."""
    return fill(
        title=f"{data.get('model', '')}: memory of a training step", data=data, encoded=encode(data),
        figures=_figures(data), no_sizes=NO_SIZES, script="\n".join(asset(f"js/{name}") for name in SCRIPTS), **more,
    )  # fmt: skip


def estimate_page(estimate: Estimate) -> str:
    """The page for an estimate: no plans, and no other sizes, which would have to be recorded."""
    from holdover.report.html.data import page_data

    return render_page(page_data(estimate.trace, estimate=estimate))


def plan_page(plan: Plan, estimate: Estimate | None = None) -> str:
    """The page for a plan: with the estimate of its step, all that the step's trace tells; else what the plan says.

    Raises:
        PlanError: the estimate is of another model or other inputs.
    """
    from holdover.report.html.data import page_data
    from holdover.report.html.notebook import plan_fragment, plan_rows

    if estimate is not None:
        if (estimate.trace.fingerprint, estimate.trace.inputs) != (plan.fingerprint, plan.inputs):
            raise PlanError(
                f"The estimate is of {estimate.model} with {estimate.inputs}, the plan for {plan.model} with "
                f"{plan.inputs}: pass the estimate of the step that was planned, or none."
            )
        data = page_data(estimate.trace, [without(plan), plan], estimate=estimate, chosen=1)
        return render_page(data, shapes=_shapes(plan))
    facts = [
        ("budget", "the lowest peak" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)),
        ("lowest peak found", format_bytes(plan.floor_bytes)),
        ("saved for backward", f"{format_bytes(plan.saved_bytes)} of {format_bytes(plan.unplanned_saved_bytes)}"),
        ("the peak stands at", plan.peak_at),
        ("time of the ops", f"{format_seconds(plan.step_seconds)}, {plan.priced}"),
    ]
    above = _environment().from_string(asset("plan.html")).render(
        fragment=plan_fragment(plan), facts=facts, rows=plan_rows(plan), choices=plan.choices, shapes=_shapes(plan)
    )  # fmt: skip
    return fill(title=f"Plan for {plan.model}", above=above)


def _shapes(plan: Plan) -> str:
    """The promise at each input shape, where the plan is for more than one."""
    from holdover.planning.inputs import show

    plans = (plan, *plan.variants)
    rows = [
        {
            "inputs": show(shape.shapes),
            "unplanned": shape.unplanned_peak_bytes, "planned": shape.predicted_peak_bytes,
            "extra_time": format_share(shape.extra_time, sign=True),
            "ops": f"{len(plans[shape.variant].choices):,} ops", "plan": f"{1 + shape.variant} of {len(plans)}",
        }
        for shape in plan.shapes
    ]  # fmt: skip
    return _environment().from_string(asset("shapes.html")).render(shapes=rows) if len(rows) > 1 else ""


def without(plan: Plan) -> Plan:
    """The step as it is, as a plan: what the page compares a plan with."""
    return replace(
        plan, choices=(), modules=(), budget_bytes=plan.unplanned_peak_bytes, extra_time=0.0, bound_extra_time=0.0,
        predicted_peak_bytes=plan.unplanned_peak_bytes, saved_bytes=plan.unplanned_saved_bytes, notes=(),
    )  # fmt: skip


def fill(**values: Any) -> str:
    """The page's template filled; names that the values leave out are taken as absent."""
    from holdover import __version__

    template = _environment().from_string(asset("page.html"))
    return template.render(style=asset("style.css"), version=__version__, torch=torch.__version__, **values)


def asset(name: str) -> str:
    """The text of a file beside this one."""
    return files("holdover.report.html").joinpath(name).read_text()


def _environment() -> Environment:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds}
    return environment


def encode(data: Mapping[str, Any]) -> str:
    """Data as the page carries it: JSON, gzip (always the same bytes for the same data), base64."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def read_page(page: str) -> dict[str, Any]:
    """The data that a page was made from.

    Raises:
        HoldoverError: the text is no report page.

    >>> read_page(render_page({"plans": [], "peak_bytes": 7}))["peak_bytes"]
    7
    """
    found = re.search(r'<script type="application/json" id="data"[^>]*>([^<]*)</script>', page)
    if found is None:
        raise HoldoverError("this is no page that holdover made: it carries no data")
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found.group(1))))
    return data


def _figures(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The numbers at the head of the page."""
    where = f"in {data.get('peak_phase', '')}"
    rows = [
        ("peak", "peak_bytes", where),
        ("weights", "weights_bytes", "parameters and buffers"),
        ("gradients", "gradients_bytes", ""),
        ("optimizer", "optimizer_bytes", str(data.get("optimizer") or "")),
        ("activations", "activations_bytes", "saved for backward"),
    ]
    figures = [
        {"name": name, "key": key, "nbytes": data[key], "text": format_bytes(data[key]), "remark": remark}
        for name, key, remark in rows
        if data.get(key)
    ]
    card = data.get("on_card")
    if card:
        reserved = card["reserved_bytes"]
        figures.append({
            "name": "reserved", "key": "reserved", "nbytes": reserved, "text": format_bytes(reserved),
            "remark": f"by PyTorch's allocator on {card['card']}",
        })  # fmt: skip
    plans: list[dict[str, Any]] = list(data.get("plans", []))
    if len(plans) > 1:
        floor = plans[-1]["peak_bytes"]
        figures.append({
            "name": "lowest peak", "key": "floor", "nbytes": floor, "text": format_bytes(floor),
            "remark": f"of {len(plans)} plans, {plans[-1]['extra_time']:+.1%} time",
        })  # fmt: skip
    return figures
