"""A frontier as text for people: what each lower peak costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from holdover.units import binary_unit, format_bytes, format_share

if TYPE_CHECKING:
    from holdover.planning.frontier import Frontier


def frontier_view(frontier: Frontier) -> Group:
    """A frontier for a terminal: one row per breakpoint."""
    first = frontier.plans[0]
    unit = binary_unit(frontier.unplanned_peak_bytes)
    head = Text.assemble("frontier of ", (first.model, "bold"), f"  {first.inputs}  {first.device}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("peak", "of unplanned", "extra time", "proved bound", "gap", "recomputed"):
        table.add_column(name, justify="right")
    for plan in frontier.plans:
        table.add_row(
            format_bytes(plan.predicted_peak_bytes, unit),
            format_share(plan.predicted_peak_bytes / frontier.unplanned_peak_bytes),
            format_share(plan.extra_time),
            format_share(plan.bound_extra_time),
            format_share(plan.gap),
            f"{len(plan.choices)} ops" + (", nested" if plan.nested else ""),
        )
    return Group(head, table)
