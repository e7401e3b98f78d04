"""Memory against time: what usual activation checkpointing reaches, and holdover's frontier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdover.report.figures.canvas import BLUE, FAINT, INK, SOFT, VERMILION, check_drawable, sheet, write
from holdover.units import binary_unit, format_bytes, parse_bytes

if TYPE_CHECKING:
    from holdover.planning.frontier import Frontier
    from holdover.report.html.policies import Policy


def draw_strategies(frontier: Frontier, policies: Sequence[Policy], path: Path, *, about: str) -> None:
    """Draw the peak of each strategy against the time that it adds.

    Args:
        frontier: holdover's plans.
        policies: other strategies, modelled on the same step.
        path: a file whose ending matplotlib knows.
        about: the step in words.

    Raises:
        HoldoverError: matplotlib is missing, or the file cannot be written.
    """
    check_drawable(path)
    unit = binary_unit(frontier.unplanned_peak_bytes)
    size = parse_bytes(f"1{unit}")
    figure, axes = sheet(7.6, 5.0, _statement(frontier, policies), about)
    times = [100 * p.extra_time for p in frontier.plans]
    peaks = [p.predicted_peak_bytes / size for p in frontier.plans]
    axes.step(times, peaks, where="post", color=BLUE, linewidth=1.7)
    axes.plot(times, peaks, "o", color=BLUE, markersize=3)
    axes.plot([100 * p.extra_time for p in policies], [p.peak_bytes / size for p in policies], "D", color=VERMILION)
    widest = max([times[-1], *(100 * p.extra_time for p in policies)])
    for policy in policies:
        at = 100 * policy.extra_time, policy.peak_bytes / size
        right = at[0] > 0.8 * widest  # there the name goes before the point
        axes.annotate(policy.name, at, (-8 if right else 8, 5), textcoords="offset points", color=VERMILION,
                      ha="right" if right else "left")  # fmt: skip
    plain = f"no plan: {format_bytes(frontier.unplanned_peak_bytes)}"
    axes.annotate(plain, (0, peaks[0]), (4, 7), textcoords="offset points", color=INK)
    axes.annotate("holdover", (times[len(times) // 2], peaks[len(peaks) // 2]), (-8, -14), textcoords="offset points",
                  color=BLUE, ha="right", fontweight="bold")  # fmt: skip
    held = sum(frontier.plans[0].peak_parts.get(name, 0) for name in ("parameter", "buffer", "optimizer", "input"))
    axes.axhspan(0, held / size, color=FAINT, linewidth=0)
    axes.text(0.99, held / size / 2, "weights, optimizer state: there anyway", transform=axes.get_yaxis_transform(),
              ha="right", va="center", fontsize=8.5, color=SOFT)  # fmt: skip
    axes.set_xlabel("extra time, % of the step")
    axes.set_ylabel(f"peak memory, {unit}")
    axes.set_ylim(0, 1.08 * peaks[0])
    axes.set_xlim(-0.02 * widest, 1.06 * widest)
    write(figure, path)


def _statement(frontier: Frontier, policies: Sequence[Policy]) -> str:
    """What the figure shows, from its numbers: the memory of a policy, for how much less time."""
    within = [p for p in policies if p.peak_bytes >= frontier.floor_bytes]
    gains = {p: p.extra_time - frontier.within(p.peak_bytes).extra_time for p in within}
    if not gains:
        return "Memory against time"
    best = max(gains, key=gains.__getitem__)
    ours = frontier.within(best.peak_bytes).extra_time
    return f"The memory of “{best.name}”, for {100 * ours:.0f} % more time instead of {100 * best.extra_time:.0f} %"
