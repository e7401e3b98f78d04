"""The closed form against published figures, against Megatron-LM's own estimator and settings, and against the clock.

    python benchmarks/closed_form.py

Everything is computed here, on one CPU core; nothing is read from a network. What is compared with was published:
figure 1 and table 4 of Korthikanti et al. 2022. Megatron-LM's estimator is its formula in our words
(`holdover.closed_form.megatron.megatron_estimate`).
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from holdover.closed_form.architecture import HUGGING_FACE, MEGATRON, PAPER, Kernels
from holdover.closed_form.estimate import closed_form
from holdover.closed_form.figure import paper_bars
from holdover.closed_form.layers import layer
from holdover.closed_form.layout import Layout
from holdover.closed_form.megatron import megatron_estimate, nearest
from holdover.closed_form.presets import PRESETS
from holdover.closed_form.rates import cluster_of, op_seconds
from holdover.closed_form.recompute import Recompute, treatment
from holdover.closed_form.sweep import layouts_for, sweep
from holdover.closed_form.views import recompute_name
from holdover.cost.devices import card

FIGURE_1 = {
    "gpt-22b": (46.0, 59.1, 9.7),
    "gpt3-175b": (45.7, 66.7, 12.2),
    "mt-nlg-530b": (31.7, 113.6, 22.9),
    "gpt-1t": (32.8, 131.2, 26.5),
}
"""GiB of parameters and optimizer, activations before, activations after, read off the published figure."""

TABLE_4 = {"none": 19.6, "selective": 20.9, "full": 27.2}
TABLE_4_SEQUENCE = {"none": 19.0, "selective": 20.3}
"""Milliseconds of forward and backward of one layer of the 22B model."""

GIB = 2**30


def figure_1() -> Table:
    table = _table("Figure 1, GiB per GPU: published / here", "model", "states", "before", "after")
    for bar in paper_bars():
        here = (bar.states_bytes, bar.before_bytes, bar.after_bytes)
        cells = (f"{said:.1f} / {size / GIB:.1f}" for said, size in zip(FIGURE_1[bar.name], here, strict=True))
        table.add_row(bar.name, *cells)
    return table


def table_4() -> Table:
    table = _table(
        "Table 4, ms of one 22B layer on 8 A100: published / modelled", "layout", "none", "selective", "full"
    )
    model, cluster = PRESETS["gpt-22b"], cluster_of(card("a100-80gb"))
    listed = layer(model, PAPER)
    for name, sequence, published in (("tp 8", False, TABLE_4), ("tp 8, sequence parallel", True, TABLE_4_SEQUENCE)):
        layout = Layout(tp=8, sequence_parallel=sequence, micro_batch=4)
        values = layout.values(model) | {"ranks_tp": 8, "ranks_ep": 1}
        whole = op_seconds(listed.ops, values, 8192, cluster, 2)
        cells = []
        for granularity in ("none", "selective", "full"):
            setting = Recompute(granularity=granularity)  # type: ignore[arg-type]
            mode = {"none": "all", "selective": "selective", "full": "boundary"}[granularity]
            again = treatment(listed, mode, setting).replayed  # type: ignore[arg-type]
            replay = op_seconds(again, values, 8192, cluster, 2).forward if again else 0.0
            said = f"{published[granularity]}" if granularity in published else "-"
            cells.append(f"{said} / {1e3 * float(whole.forward + whole.backward + replay):.1f}")
        table.add_row(name, *cells)
    return table


def estimators() -> Table:
    table = _table(
        "Activations of the first stage, GiB: what Megatron-LM's estimator says against the list of tensors",
        "setting",
        "estimator",
        "list",
        "off by",
    )
    sp = Layout(tp=8, sequence_parallel=True)
    norms = Recompute(granularity="selective", modules=("layernorm",))
    cases = [
        ("llama3-8b, one GPU", "llama3-8b", Layout(), Recompute(), MEGATRON),
        ("llama3-8b, one GPU, transformers' code", "llama3-8b", Layout(), Recompute(), HUGGING_FACE),
        ("llama3-8b, one GPU, full", "llama3-8b", Layout(), Recompute(granularity="full"), MEGATRON),
        ("llama3-70b, tp 8 sp", "llama3-70b", sp, Recompute(), MEGATRON),
        ("llama3-70b, tp 8 sp, layernorm", "llama3-70b", sp, norms, MEGATRON),
        ("gpt3-175b, tp 8 sp, eager attention", "gpt3-175b", sp, Recompute(), PAPER),
        ("gpt3-175b, tp 8 sp, selective", "gpt3-175b", sp, Recompute(granularity="selective"), PAPER),
        ("mixtral-8x7b, ep 8", "mixtral-8x7b", Layout(dp=8, ep=8), Recompute(), MEGATRON),
        ("deepseek-v3, ep 8", "deepseek-v3", Layout(dp=8, ep=8), Recompute(), MEGATRON),
        ("llama3-8b, cp 4, 32k tokens", "llama3-8b", Layout(cp=4, sequence=32768), Recompute(), MEGATRON),
    ]  # fmt: skip
    for name, model, layout, setting, kernels in cases:
        theirs = megatron_estimate(PRESETS[model], layout, setting).activations_bytes
        stage = closed_form(PRESETS[model], layout, kernels=kernels, recompute=setting).stages[0]
        ours = stage.activations_bytes + stage.embedding_bytes + stage.head_bytes
        table.add_row(name, f"{theirs / GIB:.1f}", f"{ours / GIB:.1f}", f"{theirs / ours - 1:+.0%}")
    return table


def settings() -> Table:
    table = _table(
        "The cheapest Megatron-LM setting that fits, against the optimal set of tensors, step time lost to recomputing",
        "model and layout",
        "budget",
        "Megatron-LM",
        "its loss",
        "optimal",
        "bound",
    )
    tp8 = Layout(tp=8, pp=4, sequence_parallel=True, micro_batches=16)
    tp8_pp8 = Layout(tp=8, pp=8, sequence_parallel=True, micro_batches=64)
    expert = Layout(dp=8, tp=2, ep=8, sequence_parallel=True, zero=1, micro_batch=4)
    cases = [
        ("llama3-8b, 8 H100, zero 3, 2 x 8192", "llama3-8b", Layout(dp=8, zero=3, micro_batch=2), MEGATRON, 79),
        ("llama3-8b, 8 H100, zero 3, 1 x 8192", "llama3-8b", Layout(dp=8, zero=3), MEGATRON, 40),
        ("llama3-70b, tp 8 pp 4", "llama3-70b", tp8, MEGATRON, 55),
        ("gpt3-175b, tp 8 pp 8, eager", "gpt3-175b", tp8_pp8, PAPER, 60),
        ("qwen3-8b, 8 H100, zero 3, 1 x 16384", "qwen3-8b", Layout(dp=8, zero=3, sequence=16384), MEGATRON, 70),
        ("mixtral-8x7b, tp 2 ep 8", "mixtral-8x7b", expert, MEGATRON, 75),
    ]  # fmt: skip
    for name, model, layout, kernels, gib in cases:
        best = closed_form(
            PRESETS[model], layout, kernels=kernels, recompute=Recompute(granularity="optimal"), memory_bytes=gib * GIB
        )
        near = nearest(best, gib * GIB)
        first = best.stages[0]
        work = best.step_seconds - best.replay_seconds
        per_step = layout.micro_batches / work
        table.add_row(
            name,
            f"{gib} GiB",
            recompute_name(near.found.recompute),
            f"{near.found.stages[0].replay_seconds * per_step:+.1%}",
            f"{first.replay_seconds * per_step:+.1%}",
            f"{first.replay_bound_seconds * per_step:+.1%}",
        )
    return table


def speed() -> Table:
    table = _table("Speed on one core", "what", "candidates", "seconds", "a second")
    began = time.perf_counter()
    for _ in range(20):
        closed_form(PRESETS["gpt3-175b"], Layout(tp=8, pp=8, sequence_parallel=True, micro_batches=64), kernels=PAPER)
    single = (time.perf_counter() - began) / 20
    table.add_row("one answer, gpt3-175b on 64 GPUs", "1", f"{single:.4f}", f"{1 / single:,.0f}")
    cases: list[tuple[str, int, int, Kernels]] = [
        ("gpt3-175b", 512, 1536, PAPER),
        ("llama3-70b", 256, 1024, MEGATRON),
        ("deepseek-v3", 1024, 4096, MEGATRON),
    ]
    for name, gpus, batch, kernels in cases:
        began = time.perf_counter()
        layouts = layouts_for(PRESETS[name], gpus, global_batch=batch)
        swept = sweep(PRESETS[name], layouts, kernels=kernels, cluster=cluster_of(card("h100-80gb")))
        seconds = time.perf_counter() - began
        what = f"sweep of {name} on {gpus} GPUs, {len(layouts):,} layouts"
        table.add_row(what, f"{swept.tried:,}", f"{seconds:.2f}", f"{swept.tried / seconds:,.0f}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def main() -> None:
    console = Console(width=130)
    for build in (figure_1, table_4, estimators, settings, speed):
        console.print(build())
        console.print()


if __name__ == "__main__":
    main()
