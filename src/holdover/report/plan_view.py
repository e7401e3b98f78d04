"""A plan as text for people: the whole story."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdover.planning.inputs import show
from holdover.report.tables import MAX_LAYERS, alike, knee_line, layer_name, parts_table
from holdover.units import binary_unit, format_bytes, format_parts, format_seconds, format_share

if TYPE_CHECKING:
    from holdover.planning.plan import Plan


def plan_view(plan: Plan) -> Group:
    """A plan for a terminal: what it promises and at what price, the peak that is left, what it does where."""
    unit = binary_unit(plan.unplanned_peak_bytes)
    head = Text.assemble(
        ("plan for ", ""),
        (plan.model, "bold"),
        f"  {plan.inputs}  {plan.optimizer or 'no optimizer'}, {plan.precision or 'as given'}, {plan.device}",
    )
    blocks: list[RenderableType] = [head]
    if len(plan.shapes) > 1:
        dearest = "the figures below are for the dearest, whose peak is the highest without a plan"
        blocks += [Text(), Text(f"at each of the input shapes ({dearest})"), _shapes_table(plan, unit)]
    blocks += [_promises(plan, unit), _gauge(plan)]
    if knee := knee_line(plan):
        blocks.append(Text(knee, style="bold"))
    blocks += [
        Text(),
        Text(f"what is left at the peak ({plan.peak_at})"),
        parts_table(dict(plan.peak_parts), "at the peak", unit),
    ]
    if plan.choices:
        blocks += [_actions_table(plan), _ops_line(plan)]
    if plan.with_loss:
        blocks.append(
            Text("reaches into the loss: put it in force by `with plan.recompute():` around forward and loss")
        )
    blocks += [Text(f"note: {note}", style="dim") for note in plan.notes]
    return Group(*blocks)


def _promises(plan: Plan, unit: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("", "unplanned", "planned", "change"):
        table.add_column(name, justify="right" if name else "left")
    peak = "peak memory" if plan.allocated_bytes is None else "peak of the tensors"
    rows = [(peak, plan.unplanned_peak_bytes, plan.predicted_peak_bytes)]
    for name, unplanned, planned_bytes in (
        ("  allocated", plan.unplanned_allocated_bytes, plan.allocated_bytes),
        ("  reserved", plan.unplanned_reserved_bytes, plan.reserved_bytes),
    ):
        if unplanned is not None and planned_bytes is not None:
            rows.append((f"{name} on {plan.device}", unplanned, planned_bytes))
    rows.append(("saved for backward", plan.unplanned_saved_bytes, plan.saved_bytes))
    for name, before, after in rows:
        change = format_share(after / before - 1, sign=True) if before else ""
        table.add_row(name, format_bytes(before, unit), format_bytes(after, unit), change)
    planned = plan.step_seconds * (1 + plan.extra_time)
    table.add_row(
        "time of the ops",
        format_seconds(plan.step_seconds),
        format_seconds(planned),
        format_share(plan.extra_time, sign=True),
    )
    return table


def _shapes_table(plan: Plan, unit: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("inputs", "unplanned", "planned", "extra time", "recomputed", "plan"):
        table.add_column(name, justify="left" if name == "inputs" else "right")
    plans = (plan, *plan.variants)
    for shape in plan.shapes:
        ops = len(plans[shape.variant].choices)
        table.add_row(
            show(shape.shapes),
            format_bytes(shape.unplanned_peak_bytes, unit),
            format_bytes(shape.predicted_peak_bytes, unit),
            format_share(shape.extra_time, sign=True),
            f"{ops} op{'s' * (ops != 1)}" if ops else "nothing",
            f"{1 + shape.variant} of {len(plans)}",
        )
    return table


def _gauge(plan: Plan) -> Group:
    """Floor, budget and peak on one line from nothing to what the step takes without a plan, in the budget's unit."""
    kind, at, whole = plan.budget_kind, plan.allocated_bytes, plan.unplanned_allocated_bytes
    if kind == "reserved":
        at, whole = plan.reserved_bytes, plan.unplanned_reserved_bytes
    floor = f"floor {format_bytes(plan.floor_bytes)}"
    if at is None or whole is None:
        at, whole, unit = plan.predicted_peak_bytes, plan.unplanned_peak_bytes, ""
    else:
        unit, floor = f" {kind} on {plan.device}", f"{floor} of tensors"
    budget = "" if plan.budget_bytes is None else f", budget {format_bytes(plan.budget_bytes)}"
    room = 60
    filled = min(room, round(room * at / max(whole, 1)))
    bar = Text("█" * filled, style="bold yellow") + Text("░" * (room - filled), style="yellow")
    line = Text(f"{format_bytes(at)} of {format_bytes(whole)}{unit}; {floor}{budget}")
    proof = Text(
        f"no plan that meets this adds less than {format_share(plan.bound_extra_time, sign=True)} (proved; "
        f"the gap is {format_share(plan.gap)} of the step); times: {plan.priced}",
        style="dim",
    )
    return Group(bar, line, proof)


def _actions_table(plan: Plan) -> Table:
    """What the plan drops, packs and runs again, layer by layer; of equal layers all that they do together."""
    each: dict[str, list[float]] = {}
    for module in plan.modules:
        row = each.setdefault(layer_name(module.path), [0, 0, 0, 0.0])
        figures = (module.dropped_bytes, module.packed_bytes, module.replayed_ops, module.seconds)
        for i, figure in enumerate(figures):
            row[i] += figure
    rows = {
        name: [sum(column) for column in zip(*(each[member] for member in members), strict=True)]
        for name, members in alike({name: tuple(row[:3]) for name, row in each.items()}).items()
    }
    names = list(rows)
    if len(names) > MAX_LAYERS:
        shown = sorted(names, key=lambda name: -rows[name][0] - rows[name][1])[: MAX_LAYERS - 1]
        others = [rows[name] for name in names if name not in shown]
        rows = {name: rows[name] for name in names if name in shown}
        rows[f"... {len(others)} more"] = [sum(column) for column in zip(*others, strict=True)]
    unit = binary_unit(max(int(max(row[0], row[1])) for row in rows.values()) or 1)
    dropped = format_parts([int(row[0]) for row in rows.values()], unit)
    packed = format_parts([int(row[1]) for row in rows.values()], unit)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True, padding=(0, 1))
    table.add_column("layer", footer="total", overflow="ellipsis", no_wrap=True, max_width=40)
    table.add_column(f"dropped {unit}", footer=dropped[-1], justify="right")
    packs = any(row[1] for row in rows.values())
    if packs:
        table.add_column(f"packed away {unit}", footer=packed[-1], justify="right")
    table.add_column("ops run again", footer=f"{sum(int(row[2]) for row in rows.values()):,}", justify="right")
    table.add_column("time", footer=format_seconds(sum(row[3] for row in rows.values())), justify="right")
    for (name, row), drop, pack in zip(rows.items(), dropped, packed, strict=False):
        cells = [name, drop, *([pack] if packs else []), f"{int(row[2]):,}", format_seconds(row[3])]
        table.add_row(*cells)
    return table


def _ops_line(plan: Plan) -> Text:
    """Which kinds of op are dropped and packed."""
    text = Text()
    for action, verb in (("recompute", "recomputed"), ("pack", "packed")):
        counts = Counter(choice.op.removeprefix("aten.") for choice in plan.choices if choice.action == action)
        if counts:
            shown = ", ".join(f"{name} x{count}" for name, count in counts.most_common(8))
            more = f" and {len(counts) - 8} other kinds" if len(counts) > 8 else ""
            text.append(f"{verb}: ", style="bold")
            text.append(f"{shown}{more}\n")
    text.right_crop(1)
    return text
