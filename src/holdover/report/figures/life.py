"""The life of one activation with and without recomputation, under the step's memory over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdover.memory.estimate import workspaces
from holdover.memory.life import Life, State, life_of
from holdover.memory.simulate import simulate
from holdover.memory.timeline import Choices
from holdover.report.figures.canvas import BLUE, FAINT, GREEN, INK, ORANGE, SOFT, check_drawable, sheet, write
from holdover.trace.graph import Phase, Trace
from holdover.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30


def draw_life(trace: Trace, value: int, choices: Choices, path: Path, *, about: str) -> None:
    """Draw a value's life as it is and under a plan that drops it.

    Args:
        trace: the recorded step.
        value: its number in the trace.
        choices: what the plan does.
        path: a file whose ending matplotlib knows.
        about: the step and the plan in words.

    Raises:
        HoldoverError: matplotlib is missing, or the file cannot be written.
    """
    check_drawable(path)
    workspace, _ = workspaces(trace)
    kept, planned = life_of(trace, value), life_of(trace, value, choices)
    first = kept.first_op
    end = next((op.id - first for op in trace.ops[first:] if op.phase is Phase.OPTIMIZER), kept.length)
    width, height = 7.8, 5.4
    figure, axes = sheet(
        width, height, "The life of one activation: dropped in forward, made again for backward", about
    )
    axes.set_position((0.85 / width, 2.45 / height, 1 - 1.15 / width, 1 - 3.3 / height))
    for made, color in ((Choices(), SOFT), (choices, BLUE)):
        live = simulate(trace, made, workspace, detail=False).live_bytes[first : first + end]
        axes.plot(range(end), [n / GIB for n in live], color=color, linewidth=1.4, drawstyle="steps-post")
        top = max(range(end), key=live.__getitem__)
        name = "as it is" if color is SOFT else "planned"
        axes.annotate(
            f"{name}: peak {format_bytes(live[top])}", (top, live[top] / GIB), (8, 3), textcoords="offset points",
            color=color, fontsize=9,
        )  # fmt: skip
        axes.plot([top], [live[top] / GIB], "o", color=color, markersize=4)
    axes.set_ylabel("live, GiB")
    axes.set_xlim(0, end)
    axes.set_ylim(bottom=0)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    lanes = figure.add_axes((0.85 / width, 0.35 / height, 1 - 1.15 / width, 1.95 / height))
    _lanes(lanes, kept, planned, end)
    for each in (axes, lanes):
        each.axvline(kept.backward, color=FAINT, linewidth=1, zorder=0)
    write(figure, path)


def _lanes(axes: Axes, kept: Life, planned: Life, end: int) -> None:
    """One bar for the value as it is, two for the planned one, and what happens at their ends."""
    axes.set_xlim(0, end)
    axes.set_ylim(-0.75, 3.1)
    axes.set_yticks([])
    for side in ("left", "top", "right"):
        axes.spines[side].set_visible(False)
    middle = kept.backward
    axes.set_xticks([middle / 2, (middle + end) / 2], ["forward", "backward"])
    axes.tick_params(length=0, labelsize=9.5)
    for y, life, color in ((2.0, kept, SOFT), (0.2, planned, BLUE)):
        axes.plot([0, end], [y, y], color=FAINT, linewidth=0.8, zorder=0)
        for span in life.spans:
            shade = {State.ORIGINAL: ORANGE, State.REPLAYED: GREEN}.get(span.state, color)
            least = max(span.end - span.start, 0.006 * end)
            axes.barh(y, least, 0.5, left=span.start, color=shade, linewidth=0)
    told: dict[str, Any] = {"fontsize": 8.5, "va": "center", "ha": "center", "color": INK}
    what = kept.op_name.removeprefix("aten.").rpartition(".")[0]
    size = format_bytes(kept.nbytes)
    axes.text(
        0, 2.62, f"as it is: the {size} that {what} makes in {kept.module} wait for backward", fontsize=9, color=SOFT
    )
    axes.text(0, 0.82, "planned: they are given up, and made again when backward asks", fontsize=9, color=BLUE)
    start, stop = kept.spans[0].start, kept.spans[-1].end
    axes.text(start, 1.53, "produced", **told)
    axes.text(stop, 1.53, "used, freed", **told)
    original, replayed = planned.spans[0], planned.spans[-1]
    axes.text(original.start, -0.27, "produced, dropped", **told)
    axes.text(replayed.start, -0.27, "made again, used, freed", **told)
    gap = (original.end + replayed.start) / 2
    axes.text(gap, 0.2, "not in memory", **(told | {"color": SOFT, "backgroundcolor": "white"}))
