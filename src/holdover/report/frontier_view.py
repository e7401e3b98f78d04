"""A frontier as text for people: what each lower peak costs, and what changes from one to the next."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from holdover.units import binary_unit, format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from holdover.planning.frontier import Frontier
    from holdover.planning.plan import Plan

MOST_KINDS = 3


def frontier_view(frontier: Frontier) -> Group:
    """A frontier for a terminal: one row per breakpoint."""
    first = frontier.plans[0]
    unit = binary_unit(frontier.unplanned_peak_bytes)
    head = Text.assemble(
        "frontier of ", (first.model, "bold"),
        f"  {first.inputs}  {first.optimizer or 'no optimizer'}, {first.precision or 'as given'}, {first.device}",
    )  # fmt: skip
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    on_card = frontier.budget_kind == "reserved"
    for name in (
        *(("reserved", "of it", "tensors") if on_card else ("peak", "of it")),
        "extra time",
        "bound",
        "gap",
        "ops",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what changes", overflow="fold")
    before, most = None, frontier.counted_bytes(first)
    for plan in frontier.plans:
        counted = frontier.counted_bytes(plan)
        table.add_row(
            format_bytes(counted, unit),
            format_share(counted / most),
            *([format_bytes(plan.predicted_peak_bytes, unit)] if on_card else []),
            format_share(plan.extra_time),
            format_share(plan.bound_extra_time),
            format_share(plan.gap),
            f"{len(plan.choices)}" + ("n" if plan.nested else ""),
            changes(before, plan) if before is not None else _first(plan),
        )
        before = plan
    unplanned = "what is reserved without a plan" if on_card else "the unplanned peak"
    notes = [
        f"of it: share of {unplanned}, {format_bytes(most)}; extra time: of the step's "
        f"{format_seconds(frontier.step_seconds)}, {first.priced};",
        f"bound: proved, no plan that {'reserves' if on_card else 'has'} as little adds less; gap: between the two; "
        "what changes: kinds of op dropped (+), kept again (-), or dropped in other places instead (elsewhere)"
        + ("; n: nested, some ops run more than once" if any(p.nested for p in frontier.plans) else ""),
    ]
    if on_card:
        notes.insert(
            0,
            f"reserved: by PyTorch's allocator on {first.device}, what a budget is for there (one in bytes needs "
            f"{format_bytes(frontier.context_bytes)} more, for the context); tensors: the peak of their bytes;",
        )
    return Group(head, table, *(Text(note, style="dim") for note in notes))


def _first(plan: Plan) -> str:
    """A plan that takes no time may still run something again, where the model of times calls it free."""
    number = len(plan.choices)
    return f"{number} op{'s' * (number > 1)} at no cost" if number else "nothing is recomputed"


def changes(before: Plan, after: Plan) -> str:
    """Ops that are dropped (+) or kept again (-) from one plan to the next, the most frequent kinds first.

    Plans are not nested in each other: the cheapest plan for a lower peak may keep what the one above it dropped.
    """
    old, new = ({(c.call, c.index, c.op, c.action) for c in plan.choices} for plan in (before, after))
    dropped, kept = (Counter(_kind(op, action) for _, _, op, action in found) for found in (new - old, old - new))
    net = Counter({f"+{kind}": count for kind, count in (dropped - kept).items()})
    net.update({f"-{kind}": count for kind, count in (kept - dropped).items()})
    told = [f"{kind} x{count}" if count > 1 else kind for kind, count in net.most_common(MOST_KINDS)]
    more = len(net) - MOST_KINDS
    if more > 0:
        told.append(f"{more} other kind{'s' * (more > 1)}")
    elsewhere = sum((dropped & kept).values())
    if elsewhere:
        told.append(f"{elsewhere} elsewhere")
    return ", ".join(told) or "the same ops, held differently"


def _kind(op: str, action: str) -> str:
    return _short(op) + (" packed" if action == "pack" else "")


def _short(op: str) -> str:
    name = op.removeprefix("aten.").rpartition(".")[0] or op
    return name.removeprefix("native_").removeprefix("_scaled_dot_product_").removesuffix("_for_cpu")
