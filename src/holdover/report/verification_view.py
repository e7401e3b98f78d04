"""A verification as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holdover.units import binary_unit, format_bytes, format_share

if TYPE_CHECKING:
    from holdover.verification import Verification


def verification_view(verification: Verification) -> Group:
    """A verification for a terminal: what is equal, memory and time beside their promises, the verdict."""
    v = verification
    unit = binary_unit(v.measured_unplanned_peak_bytes)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("planned", justify="right")
    table.add_column("promised", justify="right")
    table.add_row(
        "peak memory",
        format_bytes(v.measured_unplanned_peak_bytes, unit),
        format_bytes(v.measured_peak_bytes, unit),
        format_bytes(v.predicted_peak_bytes, unit),
    )
    spread = f" ± {v.step_time_uncertainty:.2f}" if v.step_time_uncertainty < 1 else ""
    table.add_row("step time", "1.00 x", f"{v.step_time_ratio:.2f}{spread} x", f"{v.predicted_time_ratio:.2f} x")
    verdicts = Text()
    for name, equal in (
        ("gradients", v.gradients_equal),
        ("buffers", v.buffers_equal),
        ("outputs", v.outputs_equal),
        ("random generators", v.rng_equal),
    ):
        verdicts.append(f"{name} {'equal to the last bit' if equal else 'DIFFER'}\n", style="green" if equal else "red")
    verdicts.append(*_peak_verdict(v))
    shown = [Padding(Text(str(d), style="red"), (0, 0, 0, 2)) for d in v.differences[:10]]
    more = len(v.differences) - len(shown)
    if more > 0:
        shown.append(Padding(Text(f"and {more} more"), (0, 0, 0, 2)))
    verdict = ("the plan holds", "bold green") if v.holds else ("the plan does NOT hold", "bold red")
    return Group(table, verdicts, *shown, Text(*verdict))


def _peak_verdict(v: Verification) -> tuple[str, str]:
    """What is said of the peak, and its style."""
    over = format_share(v.above_promise, sign=True)
    if v.within_promise:
        return f"peak within the promise ({over})", "green"
    by = format_bytes(v.measured_peak_bytes - v.predicted_peak_bytes)
    return f"peak ABOVE the promise ({over}, {by})", "red"
