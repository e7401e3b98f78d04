"""The demo's result as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from holdover.units import binary_unit, format_bytes, format_share

if TYPE_CHECKING:
    from holdover.cli.demo import DemoResult

SHOWN_LOSSES = 6


def demo_view(result: DemoResult) -> Group:
    """Memory and time beside their promises, both loss curves, the verdict."""
    unit = binary_unit(result.plain_peak_bytes)
    head = Text(
        f"a byte-level GPT of {result.parameters / 1e6:.1f} million parameters, {result.steps} steps of AdamW "
        f"on the prose of Python's reference; budget {format_bytes(result.budget_bytes, unit)}"
    )
    figures = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("", "told beforehand", "measured", "difference"):
        figures.add_column(name, justify="right" if name else "left")
    for name, told, measured in (
        ("peak, plain", result.estimated_peak_bytes, result.plain_peak_bytes),
        ("peak, planned", result.promised_peak_bytes, result.planned_peak_bytes),
    ):
        off = format_share(measured / told - 1, sign=True)
        figures.add_row(name, format_bytes(told, unit), format_bytes(measured, unit), off)
    figures.add_row(
        "memory saved",
        format_share(1 - result.promised_peak_bytes / result.estimated_peak_bytes),
        format_share(1 - result.planned_peak_bytes / result.plain_peak_bytes),
    )
    figures.add_row(
        "extra time",
        format_share(result.promised_extra_time, sign=True),
        format_share(result.measured_extra_time, sign=True),
    )
    verdict = ("everything holds", "bold green") if result.holds else ("NOT everything holds", "bold red")
    return Group(head, figures, _losses(result), _checks(result), Text(*verdict))


def _losses(result: DemoResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("loss at step", justify="right")
    table.add_column("plain", justify="right")
    table.add_column("planned", justify="right")
    table.add_column("")
    last = result.steps - 1
    highest = max(*result.plain_losses, *result.planned_losses)
    for step in dict.fromkeys(round(i * last / (SHOWN_LOSSES - 1)) for i in range(SHOWN_LOSSES)):
        plain, planned = result.plain_losses[step], result.planned_losses[step]
        bar = Text("█" * round(24 * planned / highest), style="yellow")
        table.add_row(str(step + 1), f"{plain:.7f}", f"{planned:.7f}", bar)
    return table


def _checks(result: DemoResult) -> Text:
    checks = (
        (f"all {result.steps} losses are equal to the last bit", "the losses DIFFER", result.losses_equal),
        ("the trained weights are equal to the last bit", "the trained weights DIFFER", result.weights_equal),
        ("the random generators end in one state", "the random generators DIFFER", result.rng_equal),
        ("the estimate is within 1 % of the measured peak", "the estimate is OFF", result.estimate_holds),
        ("the planned peak is within its promise", "the planned peak BREAKS its promise", result.promise_holds),
    )
    text = Text()
    for good, bad, holds in checks:
        text.append(f"{good if holds else bad}\n", style="green" if holds else "red")
    text.right_crop(1)
    return text
