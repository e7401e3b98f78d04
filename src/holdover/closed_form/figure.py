"""The paper's figure 1: parameters and optimizer beside activations, before and after, against a card's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdover.closed_form.architecture import PAPER, Architecture, Kernels
from holdover.closed_form.estimate import ClosedForm, closed_form
from holdover.closed_form.layout import Layout
from holdover.closed_form.parameters import States
from holdover.closed_form.presets import PAPER_LAYOUTS, PRESETS
from holdover.closed_form.rates import cluster_of
from holdover.closed_form.recompute import Recompute
from holdover.cost.devices import card
from holdover.errors import HoldoverError


@dataclass(frozen=True)
class Bar:
    """One model: bytes of parameters and optimizer, and of activations before and after."""

    name: str
    states_bytes: int
    """Weights, gradients and optimizer states, each parameter once, evenly over the model-parallel ranks."""
    before_bytes: int
    """The layers' activations on the first stage: tensor parallelism alone, nothing recomputed."""
    after_bytes: int
    """With sequence parallelism and selective recomputation, or the setting asked for."""


def paper_layout(name: str) -> Layout:
    """The layout of the paper's table 3."""
    sizes = PAPER_LAYOUTS[name]
    return Layout(
        tp=sizes["tp"],
        pp=sizes["pp"],
        virtual=sizes["virtual"],
        schedule="interleaved" if sizes["virtual"] > 1 else "1f1b",
        micro_batch=sizes["micro_batch"],
        micro_batches=sizes["micro_batches"],
    )


def paper_bars() -> list[Bar]:
    """The bars of the published figure, from the lists.

    >>> [f"{bar.before_bytes / 2**30:.1f} {bar.after_bytes / 2**30:.1f}" for bar in paper_bars()]
    ['59.2 9.6', '66.8 12.4', '114.0 23.1', '131.2 26.6']
    """
    return [
        compare_bar(
            PRESETS[name],
            dataclasses.replace(paper_layout(name), sequence_parallel=True),
            kernels=PAPER,
            recompute=Recompute(granularity="selective"),
            small=False,
        )
        for name in PAPER_LAYOUTS
    ]


def compare_bar(
    architecture: Architecture,
    layout: Layout,
    *,
    kernels: Kernels,
    recompute: Recompute,
    states: States | None = None,
    small: bool = True,
    **options: Any,
) -> Bar:
    """One model's bar: the given setting against tensor parallelism with nothing recomputed.

    Args:
        architecture: the model.
        layout: its layout, with sequence parallelism if the setting has it.
        kernels: which code runs it.
        recompute: the setting.
        states: what is kept per parameter.
        small: count norm statistics and the like, which the paper leaves out.
        **options: the cluster and the budget, as `closed_form` takes them.
    """
    kept = states or States()
    after = closed_form(architecture, layout, kernels=kernels, states=kept, recompute=recompute, small=small, **options)
    plain = dataclasses.replace(layout, sequence_parallel=layout.sequence_parallel and architecture.experts is not None)
    before = closed_form(architecture, plain, kernels=kernels, states=kept, small=small, **options)
    return Bar(architecture.name, even_states(after), *(x.stages[0].activations_bytes for x in (before, after)))


def even_states(found: ClosedForm) -> int:
    """Bytes per rank if every parameter were there once and all ranks had the same share, as the paper counts."""
    per_parameter = found.states.weight_bytes + found.states.gradient_bytes + found.states.optimizer_bytes
    ranks = found.layout.tp * found.layout.pp * (found.layout.dp * found.layout.cp if found.layout.zero == 3 else 1)
    return int(per_parameter * found.parameters / ranks)


def draw(bars: Sequence[Bar], path: Path, *, card_name: str = "a100-80gb") -> None:
    """Draw the figure.

    Args:
        bars: one or more models.
        path: a file whose ending matplotlib knows (.png, .svg, .pdf).
        card_name: the card whose memory is the line.

    Raises:
        HoldoverError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise HoldoverError("drawing needs matplotlib: pip install matplotlib") from None
    memory = cluster_of(card(card_name)).card
    figure = Figure(figsize=(max(5.0, 1.9 * len(bars) + 1.5), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, bar in enumerate(bars):
        for offset, activations, color, label in (
            (-0.2, bar.before_bytes, "#c8553d", "activations, before"),
            (0.2, bar.after_bytes, "#588b8b", "activations, after"),
        ):
            states = bar.states_bytes / 2**30
            axes.bar(place + offset, states, 0.36, color="#93b7be", label="parameters, optimizer" if offset < 0 else "")
            axes.bar(place + offset, activations / 2**30, 0.36, bottom=states, color=color, label=label)
            total = states + activations / 2**30
            axes.text(place + offset, total + 1, f"{total:.1f}", ha="center", fontsize=8)
    # The vendor's round figure, as in the paper, is what the name says; what programs can use is a little less.
    axes.axhline(memory.usable_bytes / 2**30, color="black", linestyle="--", linewidth=1)
    axes.text(len(bars) - 0.5, memory.usable_bytes / 2**30 + 1, memory.title, ha="right", fontsize=8)
    axes.set_xticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylabel("GiB per GPU, first stage")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise HoldoverError(f"cannot draw to {path}: {error}") from None
