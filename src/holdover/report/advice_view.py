"""Advice as text for people: the verdict, the ways that fit, what else helps, and throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdover.report.tables import bar
from holdover.units import binary_unit, format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from holdover.planning.advice import Advice, Floor

TIME_MODEL = (
    "times: the sum of the step's ops, {priced}; larger batches spread the fixed cost of launching an op over more "
    "samples. Loading data and talking to other devices are not in it."
)


def advice_view(advice: Advice) -> Group:
    """Advice for a terminal."""
    head = Text.assemble(
        "advice for ", (advice.model, "bold"),
        f"  {advice.inputs}  {advice.optimizer or 'no optimizer'}, {advice.precision or 'as given'}, {advice.device}\n",
        f"there is {format_bytes(advice.memory_bytes)}, the step takes {format_bytes(advice.unplanned_peak_bytes)}, "
        f"so that the tighter constraint is ", (advice.constraint, "bold yellow"),
    )  # fmt: skip
    style = "bold green" if advice.fits else "bold red"
    blocks: list[RenderableType] = [head, Text(), Text(advice.verdict, style=style)]
    if advice.options:
        blocks += [Text(), Text(f"ways to take the batch of {advice.batch:,}"), _options(advice)]
    if advice.floor is not None:
        blocks += [*_floor(advice.floor), *([_levers(advice)] if advice.levers else [])]
    if advice.rates:
        blocks += [Text("samples per second against batch size"), _rates(advice)]
    blocks += [Text(line) for line in _growth(advice)]
    blocks.append(Text(TIME_MODEL.format(priced=advice.priced), style="dim"))
    blocks += [Text(f"note: {note}", style="dim") for note in advice.notes]
    return Group(*blocks)


def _options(advice: Advice) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("", "at once", "times", "peak", "room left", "time", "extra time"):
        table.add_column(name, justify="right" if name else "left")
    unit = binary_unit(advice.memory_bytes)
    for option in advice.options:
        table.add_row(
            option.kind, f"{option.micro_batch:,}", f"{option.micro_steps:,}", format_bytes(option.peak_bytes, unit),
            format_bytes(advice.memory_bytes - option.peak_bytes, unit), format_seconds(option.seconds),
            format_share(option.extra_time, sign=True),
        )  # fmt: skip
    return table


def _floor(floor: Floor) -> list[RenderableType]:
    unit = binary_unit(floor.peak_bytes)
    parts = ", ".join(f"{name} {format_bytes(nbytes, unit)}" for name, nbytes in floor.parts)
    price = format_share(floor.extra_time, sign=True)
    first = f"the lowest peak at this batch: {format_bytes(floor.peak_bytes)}, for {price} time"
    if not floor.helps:
        first = f"no plan helps: the lowest peak at this batch is {format_bytes(floor.peak_bytes)}"
    lines = [first, f"  at {floor.at}: {parts}", f"  it is no lower because {floor.reason}"]
    if floor.loss_bytes:
        lines.insert(
            2, f"  of it logits, what the loss makes of them, and their gradients: {format_bytes(floor.loss_bytes)}"
        )
    return [Text(lines[0], style="bold"), *(Text(line) for line in lines[1:])]


def _levers(advice: Advice) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("what would lower it")
    table.add_column("to", justify="right", no_wrap=True)
    table.add_column("by", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("costs", overflow="fold")
    for lever in advice.levers:
        saved = lever.peak_before_bytes - lever.peak_after_bytes
        share = format_share(saved / lever.peak_before_bytes)
        table.add_row(lever.name, format_bytes(lever.peak_after_bytes), share, lever.how, lever.price)
    return table


def _rates(advice: Advice) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in ("batch", "peak", "recomputation", "time", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    unit = binary_unit(advice.memory_bytes)
    best = advice.best_rate
    top = best.samples_per_second if best else 1.0
    for rate in advice.rates:
        size = bar(round(1000 * rate.samples_per_second), round(1000 * top), 24)
        mark = " best" if rate is best else ""
        table.add_row(
            f"{rate.batch:,}", format_bytes(rate.peak_bytes, unit), format_share(rate.extra_time, sign=True),
            format_seconds(rate.seconds), f"{rate.samples_per_second:,.1f}", Text(size + mark, style="yellow"),
        )  # fmt: skip
    return table


def _growth(advice: Advice) -> list[str]:
    growth = advice.growth
    if growth.reason:
        return [f"batch: {growth.reason}"]
    fixed = f"; not scaled: {', '.join(growth.fixed)}" if growth.fixed else ""
    line = "on one line, to the byte" if growth.linear else "not on one line, so each was recorded"
    sizes = ", ".join(f"{batch:,}" for batch, _ in growth.peaks)
    largest = f"largest batch without recomputation: {growth.largest or 0:,}"
    if growth.limit:
        largest += f", which is not the most that memory allows ({growth.limit})"
    return [
        f"{largest}; with accumulation, whose gradients stay: {growth.largest_accumulating or 0:,}",
        f"batch scaled along dimension 0 of {', '.join(growth.scaled)}{fixed}",
        f"recorded at batch {sizes}: peaks {line}",
    ]
