"""The picture of the problem: a block of weights that stays, beside a stack of activations that grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdover.report.figures.canvas import BLUE, INK, ORANGE, SOFT, check_drawable, sheet, write
from holdover.report.stack import stack_of
from holdover.trace.graph import Trace
from holdover.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30


def draw_stack(traces: Mapping[int, Trace], path: Path, *, about: str) -> None:
    """Draw weights beside what is saved for backward, layer by layer, at several batch sizes.

    Args:
        traces: recordings of one model, by batch size, smallest first.
        path: a file whose ending matplotlib knows.
        about: what was recorded.

    Raises:
        HoldoverError: matplotlib is missing, or the file cannot be written.
    """
    check_drawable(path)
    stacks = {batch: stack_of(trace) for batch, trace in traces.items()}
    figure, axes = sheet(7.6, 5.0, "The weights stay. The activations grow with the batch.", about)
    first, last = next(iter(stacks.values())), list(stacks.values())[-1]
    top = sum(layer.saved_bytes for layer in last.values()) / GIB
    axes.set_ylabel("GiB")
    axes.set_ylim(0, 1.09 * top)
    axes.set_xlim(-0.6, len(stacks) + 1.5)
    names = ["weights", *(f"batch {batch}" for batch in stacks)]
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0, labelsize=10, labelcolor=INK)
    axes.spines["bottom"].set_visible(False)
    columns = [[layer.weights_bytes for layer in first.values()]]
    columns += [[layer.saved_bytes for layer in stack.values()] for stack in stacks.values()]
    edges: list[float] = []
    for x, column in enumerate(columns):
        bottom = 0.0
        color = BLUE if x == 0 else ORANGE
        edges = []
        for nbytes in column:
            height = nbytes / GIB
            axes.bar(x, height, 0.72, bottom=bottom, color=color, edgecolor="white", linewidth=0.7)
            edges.append(bottom + height / 2)
            bottom += height
        axes.text(x, bottom + 0.012 * top, format_bytes(sum(column), "GiB"), ha="center", va="bottom", fontsize=9)
    _name_layers(axes, list(last), [layer.saved_bytes / GIB for layer in last.values()], edges, len(stacks) + 0.42, top)
    write(figure, path)


def _name_layers(
    axes: Axes, names: Sequence[str], heights: Sequence[float], middles: Sequence[float], x: float, top: float
) -> None:
    """Beside the last column, the layers that are high enough for a line of text."""
    below = -1.0
    for name, height, middle in zip(names, heights, middles, strict=True):
        if height > 0.012 * top and middle - below > 0.034 * top:
            axes.text(x, middle, name, fontsize=8, color=SOFT, va="center")
            below = middle
