"""Large models on one card each: activations against weights, and the card's memory as a line."""

from __future__ import annotations

from pathlib import Path

from holdover.closed_form.figure import paper_bars
from holdover.closed_form.rates import cluster_of
from holdover.cost.devices import card
from holdover.report.figures.canvas import BLUE, GREEN, INK, SOFT, VERMILION, check_drawable, sheet, write

GIB = 2**30
CARD = "a100-80gb"
NAMES = {"gpt-22b": "22B", "gpt3-175b": "GPT-3 175B", "mt-nlg-530b": "MT-NLG 530B", "gpt-1t": "1T"}


def draw_megatron(path: Path) -> None:
    """Draw the four models of Korthikanti et al. 2022 by the closed form, at the layouts of their table 3.

    Raises:
        HoldoverError: matplotlib is missing, or the file cannot be written.
    """
    check_drawable(path)
    bars = paper_bars()
    memory = cluster_of(card(CARD)).card
    limit = memory.usable_bytes / GIB
    figure, axes = sheet(
        7.6, 5.0, "Activations, not weights, are what does not fit.",
        "per GPU, first pipeline stage; closed form, at the layouts of Korthikanti et al. 2022, table 3",
    )  # fmt: skip
    axes.set_ylabel("GiB per GPU")
    axes.set_xlim(-0.62, len(bars) + 0.85)
    tallest = max(bar.states_bytes + bar.before_bytes for bar in bars) / GIB
    axes.set_ylim(0, 1.08 * tallest)
    for place, bar in enumerate(bars):
        for x, activations, color in (
            (place - 0.19, bar.before_bytes, VERMILION),
            (place + 0.19, bar.after_bytes, GREEN),
        ):
            states = bar.states_bytes / GIB
            axes.bar(x, states, 0.34, color=BLUE, linewidth=0)
            axes.bar(x, activations / GIB, 0.34, bottom=states, color=color, linewidth=0)
            total = states + activations / GIB
            axes.text(x, total + 1.5, f"{total:.0f}", ha="center", fontsize=8.5, color=SOFT)
    axes.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(len(bars) + 0.83, limit + 1.5, f"memory of one {memory.title}", fontsize=8.5, color=INK, ha="right")
    axes.set_xticks(range(len(bars)), [NAMES.get(bar.name, bar.name) for bar in bars])
    axes.tick_params(axis="x", length=0, labelsize=10, labelcolor=INK)
    axes.spines["bottom"].set_visible(False)
    last = bars[-1]
    states, x = last.states_bytes / GIB, len(bars) - 0.6
    for y, color, text in (
        (states + 0.72 * last.before_bytes / GIB, VERMILION, "activations, tensor\nparallelism alone"),
        (states + 0.5 * last.after_bytes / GIB, GREEN, "activations, sequence\nparallel and selectively\nrecomputed"),
        (states / 2, BLUE, "weights, gradients,\noptimizer state"),
    ):
        axes.text(x, y, text, color=color, va="center", fontsize=9, linespacing=1.15)
    write(figure, path)
