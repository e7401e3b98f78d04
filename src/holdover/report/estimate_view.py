"""An estimate as text for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdover.report.tables import BAR, MAX_LAYERS, WIDTH, layer_name, parts_table
from holdover.units import binary_unit, format_bytes, format_parts

if TYPE_CHECKING:
    from holdover.memory.estimate import Estimate, ModuleRow
    from holdover.memory.on_card import CardMemory


def estimate_view(estimate: Estimate) -> Group:
    """An estimate for a terminal: the peak and its parts, memory over time, weights beside activations."""
    unit = binary_unit(estimate.peak_bytes)
    peak = estimate.peak
    where = f"at {peak.op}" + (f" in {peak.module}" if peak.module else "")
    when = f"{peak.phase}, step {peak.step + 1}" if estimate.optimizer else str(peak.phase)
    head = Text.assemble(
        (f"{estimate.model}", "bold"),
        f"  {estimate.inputs}  {estimate.optimizer or 'no optimizer'}, {estimate.precision}, {estimate.device}\n",
        ("peak ", "bold"),
        (format_bytes(estimate.peak_bytes), "bold yellow"),
        f"  in {when}, {where}",
    )
    blocks: list[RenderableType] = [
        head,
        *([_card_table(estimate.on_card)] if estimate.on_card is not None else []),
        parts_table({kind.value: n for kind, n in peak.parts.items()}, "at the peak", unit),
        _over_time(estimate),
        _layers_table(estimate),
        _facts(estimate, unit),
    ]
    blocks += [Text(f"note: {note}", style="dim") for note in estimate.notes]
    blocks += [Text(f"uncertain: {what}", style="red") for what in estimate.uncertainties]
    return Group(*blocks)


def _card_table(on_card: CardMemory) -> Table:
    """Allocated, reserved and the process, beside what the card has; then the phases of the last step."""
    unit = binary_unit(on_card.usable_bytes)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    cublas = f"of it cuBLAS's workspace {format_bytes(on_card.cublas_bytes)}" if on_card.cublas_bytes else ""
    settings = f" ({on_card.settings})" if on_card.settings else ""
    low, high = on_card.process_bytes
    rows = [
        (f"allocated on {on_card.card}", format_bytes(on_card.allocated_bytes, unit), cublas),
        ("reserved", format_bytes(on_card.reserved_bytes, unit), f"by PyTorch's allocator{settings}"),
        ("process", format_bytes(high, unit), f"in nvidia-smi, {format_bytes(low, unit)} at least: with the context"),
        ("the card has", format_bytes(on_card.usable_bytes, unit), "enough" if on_card.fits else "too little"),
    ]
    last = max((p.step for p in on_card.phases), default=0)
    for phase in on_card.phases:
        if phase.step == last:
            reserved = f"reserved {format_bytes(phase.reserved_bytes, unit)}"
            rows.append((f"  allocated in {phase.phase.value}", format_bytes(phase.allocated_bytes, unit), reserved))
    for name, figure, remark in rows:
        table.add_row(name, Text(figure, style="bold yellow" if name == "reserved" else ""), remark)
    return table


def _over_time(estimate: Estimate) -> Group:
    """Bytes live over the last step as a strip of bars, its phases written below."""
    last = estimate.trace.last_step
    points = [
        (op.phase.value, nbytes)
        for op, nbytes in zip(estimate.trace.ops, estimate.timeline.live_bytes, strict=True)
        if op.step == last
    ]
    if not points:
        return Group()
    columns = min(WIDTH - 4, len(points))
    strip, phases = Text(), []
    top = max(nbytes for _, nbytes in points)
    for column in range(columns):
        here = points[column * len(points) // columns : (column + 1) * len(points) // columns]
        highest = max(nbytes for _, nbytes in here)
        strip.append("▁▂▃▄▅▆▇█"[min(7, highest * 8 // (top + 1))], style="bold red" if highest == top else "yellow")
        phases.append(here[0][0])
    legend = ""
    for phase in dict.fromkeys(phases):
        room = phases.count(phase)
        legend += f"|{phase}"[: max(1, room)].ljust(room)
    title = "memory over the step" if last == 0 else f"memory over step {last + 1}, as every later one"
    return Group(Text(title, style="bold"), strip, Text(legend, style="dim"))


@dataclass(frozen=True)
class Layer:
    """A row of the table of layers: one module, or several that are alike."""

    name: str
    weights_bytes: int
    saved_bytes: int


def layers_of(rows: Iterable[ModuleRow]) -> list[Layer]:
    """Modules gathered into layers: everything below `blocks.0` is layer `blocks.0`, in order of first use."""
    gathered: dict[str, tuple[int, int]] = {}
    for row in rows:
        name = layer_name(row.path)
        weights, saved = gathered.get(name, (0, 0))
        gathered[name] = weights + row.weights_bytes, saved + row.saved_bytes
    return [Layer(name, *sizes) for name, sizes in gathered.items()]


def fold(layers: Sequence[Layer], most: int = MAX_LAYERS) -> list[Layer]:
    """At most about `most` rows: runs of layers of one size keep their ends, then small layers are put together."""
    rows: list[Layer] = []
    i = 0
    while i < len(layers):
        j = i
        while j < len(layers) and _alike(layers[i], layers[j]):
            j += 1
        run = layers[i:j]
        if len(layers) > most and len(run) > 4:
            middle = run[2:-1]
            rows += [*run[:2], _sum(f"... {len(middle)} more such", middle), run[-1]]
        else:
            rows += run
        i = j
    if len(rows) > most:
        kept = sorted(range(len(rows)), key=lambda k: -rows[k].saved_bytes - rows[k].weights_bytes)[: most - 1]
        others = [row for k, row in enumerate(rows) if k not in kept]
        rows = [rows[k] for k in sorted(kept)] + [_sum(f"... {len(others)} smaller ones", others)]
    return rows


def _alike(a: Layer, b: Layer) -> bool:
    same_name = re.sub(r"\d+", "", a.name) == re.sub(r"\d+", "", b.name)
    return same_name and (a.weights_bytes, a.saved_bytes) == (b.weights_bytes, b.saved_bytes)


def _sum(name: str, layers: Sequence[Layer]) -> Layer:
    return Layer(name, sum(row.weights_bytes for row in layers), sum(row.saved_bytes for row in layers))


def _layers_table(estimate: Estimate) -> Table:
    """Weights beside activations, layer by layer, and the stack of activations growing towards the loss."""
    layers = fold(layers_of(estimate.by_module()))
    unit = binary_unit(max(estimate.activations_bytes, estimate.weights_bytes, 1))
    weights = format_parts([row.weights_bytes for row in layers], unit)
    saved = format_parts([row.saved_bytes for row in layers], unit)
    total = sum(row.saved_bytes for row in layers)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True, padding=(0, 1))
    table.add_column("layer", footer="total", overflow="ellipsis", no_wrap=True, max_width=40)
    table.add_column(f"weights {unit}", footer=weights[-1], justify="right")
    table.add_column(f"saved {unit}", footer=saved[-1], justify="right")
    table.add_column("saved for backward, growing")
    below = 0
    for row, weight, save in zip(layers, weights, saved, strict=False):
        start = round(below * BAR / total) if total else 0
        below += row.saved_bytes
        end = round(below * BAR / total) if total else 0
        stack = Text("░" * start, style="yellow")
        stack.append("█" * (end - start) or ("▏" if row.saved_bytes and start < BAR else ""), style="bold yellow")
        table.add_row(row.name, weight, save, stack)
    return table


def _facts(estimate: Estimate, unit: str) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")

    def row(name: str, nbytes: int, remark: str = "") -> None:
        table.add_row(name, format_bytes(nbytes, unit), remark)

    row("weights", estimate.weights_bytes, "parameters and buffers")
    row("gradients", estimate.gradients_bytes)
    if estimate.optimizer:
        row("optimizer", estimate.optimizer_bytes, f"{estimate.optimizer}, from the second step on")
    row("saved for backward", estimate.activations_bytes, "each storage once, without parameters and inputs")
    row("  of it logits and loss", estimate.loss_bytes)
    for op in estimate.by_op()[:3]:
        row(f"  of it from {op.name}", op.saved_bytes, f"{op.count} tensors")
    if estimate.optimizer:
        row("peak of the first step", estimate.first_step_peak_bytes)
        row("peak of later steps", estimate.later_step_peak_bytes)
    return table
