"""The frontier as a figure: extra time against the peak."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdover.report.figures.canvas import BLUE, FAINT, SOFT, check_drawable, sheet, write
from holdover.units import binary_unit, format_bytes, format_share, parse_bytes

if TYPE_CHECKING:
    from holdover.planning.frontier import Frontier


def draw_frontier(frontier: Frontier, path: Path) -> None:
    """Draw every breakpoint, and what is proved to be out of reach below them.

    Args:
        path: a file whose ending matplotlib knows (.png, .svg, .pdf).

    Raises:
        HoldoverError: matplotlib is missing, or the file cannot be written.
    """
    check_drawable(path)
    first, last = frontier.plans[0], frontier.plans[-1]
    unit = binary_unit(frontier.unplanned_peak_bytes)
    size = parse_bytes(f"1{unit}")
    floor, price = format_bytes(frontier.floor_bytes), format_share(last.extra_time)
    figure, axes = sheet(
        7.2, 4.4, f"{first.model}: from {format_bytes(frontier.unplanned_peak_bytes)} to {floor} for {price} more time",
        f"peak of the training step against extra time: {len(frontier.plans)} plans on {first.device}",
    )  # fmt: skip
    peaks = [p.predicted_peak_bytes / size for p in frontier.plans]
    times = [100 * p.extra_time for p in frontier.plans]
    bounds = [100 * p.bound_extra_time for p in frontier.plans]
    axes.fill_between(peaks, bounds, 0, step="post", color=FAINT, linewidth=0)
    axes.step(peaks, times, where="pre", color=BLUE, linewidth=1.6)
    axes.plot(peaks, times, "o", color=BLUE, markersize=4)
    axes.set_xlabel(f"peak memory of the step's tensors, {unit}")
    axes.set_ylabel("extra time, % of the step")
    axes.set_ylim(0, max(times[-1] * 1.12, 1))
    room = (peaks[0] - peaks[-1]) or 1
    axes.set_xlim(peaks[-1] - 0.06 * room, peaks[0] + 0.06 * room)
    axes.annotate("no plan", (peaks[0], 0), (0, 12), textcoords="offset points", ha="center", color=BLUE)
    axes.annotate("the floor", (peaks[-1], times[-1]), (8, 2), textcoords="offset points", color=BLUE)
    if bounds[-1] > 0.02 * times[-1]:
        low = peaks[-1], bounds[-1] / 2
        axes.annotate("proved: no plan is here", low, (8, -3), textcoords="offset points", color=SOFT, fontsize=8.5)
    write(figure, path)
