"""Results of the closed form as rich tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdover.closed_form.estimate import ClosedForm, Stage
from holdover.closed_form.layers import layer
from holdover.closed_form.layout import Layout
from holdover.closed_form.megatron import Nearest
from holdover.closed_form.rates import op_seconds
from holdover.closed_form.recompute import Recompute
from holdover.closed_form.sweep import Sweep
from holdover.units import binary_unit, figure, format_bytes, format_seconds, format_share

LEFT_OUT = "Not counted: CUDA context, library workspaces, communication buffers, the allocator's fragmentation."

_PARTS = (
    ("weights", "weights_bytes"),
    ("gradients", "gradients_bytes"),
    ("optimizer", "optimizer_bytes"),
    ("activations", "activations_bytes"),
    ("embedding", "embedding_bytes"),
    ("head, loss", "head_bytes"),
    ("working set", "working_bytes"),
    ("total", "total_bytes"),
)


def result_view(found: ClosedForm, *, step_seconds: float | None = None, every_stage: bool = False) -> RenderableType:
    """One result: its stages, what they add up to, FLOPs and times. `step_seconds` is a measured time."""
    parts: list[RenderableType] = [Text(_headline(found)), _stage_table(found, every_stage), Text(_verdict(found))]
    chosen = found.heaviest if found.heaviest.chosen else next((s for s in found.stages if s.chosen), None)
    if chosen:
        parts.append(Text(_chosen(chosen)))
    parts.append(Text(_work(found, step_seconds)))
    parts += [Text(f"Note: {note}") for note in found.notes]
    parts.append(Text(LEFT_OUT, style="dim"))
    return Group(*parts)


def tensors_view(found: ClosedForm) -> RenderableType:
    """The layer lists, tensor by tensor."""
    layout = found.layout
    values = layout.values(found.architecture, found.kernels.imbalance)
    values |= {"ranks_tp": layout.tp, "ranks_ep": layout.ep * layout.etp}
    tokens = layout.tokens(found.architecture)
    tables: list[RenderableType] = []
    for kind in dict.fromkeys(found.architecture.layer_kinds):
        listed = layer(found.architecture, found.kernels, kind)
        ops = {op.name: op for op in listed.ops}
        table = Table(title=f"one {kind} layer, one micro-batch", title_justify="left", box=None, pad_edge=False)
        for name in ("stored tensor", "bytes/token", "divided by", "freed by"):
            table.add_column(name)
        table.add_column("made again in", justify="right")
        table.add_column("a rank", justify="right")
        total = 0
        for value in listed.stored:
            size = int(-(-value.rank_bytes.at(values) * tokens // 1))
            total += size
            again = "-"
            if value.op in ops:
                times = op_seconds([ops[value.op]], values, tokens, found.cluster, found.kernels.element_bytes)
                again = format_seconds(float(times.forward))
            freed = ", ".join(sorted(value.dropped_by)) or "-"
            table.add_row(value.name, str(value.bytes), value.shard.value, freed, again, format_bytes(size))
        table.add_section()
        table.add_row("total", "", "", "", "", format_bytes(total))
        tables.append(table)
    return Group(*tables)


def compare_view(named: Sequence[tuple[str, ClosedForm]]) -> RenderableType:
    """Several settings side by side, each at its heaviest stage."""
    table = Table(box=None, pad_edge=False)
    unit = binary_unit(max(found.heaviest.total_bytes for _, found in named))
    table.add_column(f"heaviest stage, {unit}")
    for name, _ in named:
        table.add_column(name, justify="right", overflow="fold")
    for label, field in _PARTS:
        cells = [figure(getattr(found.heaviest, field), unit) for _, found in named]
        table.add_row(label, *cells)
    table.add_section()
    table.add_row("stage", *(str(found.heaviest.index) for _, found in named))
    table.add_row("fits", *("yes" if found.fits else "no" for _, found in named))
    table.add_row("GPUs", *(str(found.layout.gpus) for _, found in named))
    table.add_row("step, modelled", *(format_seconds(found.step_seconds) for _, found in named))
    table.add_row("of it recomputing", *(format_share(found.extra_time, sign=True) for _, found in named))
    table.add_row("MFU", *(format_share(found.mfu()) for _, found in named))
    return Group(table, Text(LEFT_OUT, style="dim"))


def sweep_view(swept: Sweep, *, top: int, usable_bytes: int, title: str) -> RenderableType:
    """The fastest candidates that fit."""
    head = Text(
        f"{title}: {swept.layouts:,} layouts, {swept.tried:,} with a recomputation, {len(swept.fitting):,} fit in "
        f"{format_bytes(usable_bytes, 'GiB')}"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("tp", "cp", "pp", "dp", "ep", "zero", "batch", "schedule"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    table.add_column("recompute", overflow="fold")
    unit = binary_unit(min(found.peak_bytes for found in swept.fitting[:top]))
    for name in (unit, "step", "recompute time", "MFU"):
        table.add_column(name, justify="right")
    for found in swept.fitting[:top]:
        x = found.layout
        schedule = f"{x.schedule} x{x.virtual}" if x.virtual > 1 else x.schedule
        table.add_row(
            *(str(number) for number in (x.tp, x.cp, x.pp, x.dp, x.ep, x.zero)),
            f"{x.micro_batch} x {x.micro_batches}",
            schedule if x.pp > 1 else "-",
            recompute_name(found.recompute),
            figure(found.peak_bytes, unit),
            format_seconds(found.step_seconds),
            format_share(found.replay_seconds / (found.step_seconds - found.replay_seconds), sign=True),
            format_share(found.mfu),
        )
    return Group(head, table, Text("Step times are modelled from data sheets, to compare layouts by.", style="dim"))


def nothing_fits(swept: Sweep, *, usable_bytes: int, title: str) -> str:
    """What is said of a sweep without a candidate that fits."""
    return (
        f"nothing fits: none of {swept.layouts:,} layouts of {title}, {swept.tried:,} with a recomputation, fits in "
        f"{format_bytes(usable_bytes, 'GiB')} of each GPU; the lightest needs "
        f"{format_bytes(swept.lightest_bytes, 'GiB')}. Ways out: more --gpus, a --card with more memory or a larger "
        "--memory, a shorter --seq, a leaner --optimizer"
    )


def megatron_view(near: Nearest) -> RenderableType:
    """Megatron's flags, and what they lose."""
    flags = " \\\n    ".join(near.flags)
    plain = near.found.recompute.granularity == "none"
    lines = [f"Nearest Megatron-LM flags:\n    {flags}", ""]
    lines.append(
        f"  {recompute_name(near.found.recompute)}: {format_bytes(near.found.peak_bytes, 'GiB')}, step "
        f"{format_seconds(near.found.step_seconds)} ({format_share(near.found.extra_time, sign=True)} recomputing)"
    )
    lines.append(
        f"  optimal set: {format_bytes(near.optimal.peak_bytes, 'GiB')}, step "
        f"{format_seconds(near.optimal.step_seconds)} ({format_share(near.optimal.extra_time, sign=True)} recomputing)"
    )
    if plain:
        lines.append("  Nothing needs to be recomputed, so the flags lose nothing.")
    else:
        first = near.found.stages[0].replay_seconds, near.optimal.stages[0].replay_seconds
        lines.append(
            f"  The flags lose {format_share(near.lost_time)} of step time; the first stage recomputes for "
            f"{format_seconds(first[0])} a micro-batch where the optimal set needs {format_seconds(first[1])}."
        )
    lines += [f"  Not expressible: {text}" for text in near.not_expressible]
    return Text("\n".join(lines))


def recompute_name(recompute: Recompute) -> str:
    """A recomputation in a few words."""
    if recompute.granularity == "selective":
        return "selective " + "+".join(recompute.modules)
    if recompute.granularity == "full":
        return f"full {recompute.method} {recompute.num_layers}"
    return recompute.granularity


def layout_name(layout: Layout) -> str:
    """A layout in a few words."""
    names = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "dp", "ep") if getattr(layout, name) > 1]
    if layout.sequence_parallel and layout.tp > 1:
        names.append("sequence parallel")
    if layout.zero:
        names.append(f"zero {layout.zero}")
    if layout.pp > 1:
        names.append(f"{layout.schedule} x{layout.virtual}" if layout.virtual > 1 else layout.schedule)
    return ", ".join(names) or "one GPU"


def _count(parameters: int) -> str:
    for factor, unit in ((1e9, "B"), (1e6, "M")):
        if parameters >= factor:
            return f"{parameters / factor:.1f} {unit}"
    return f"{parameters:,}"


def _headline(found: ClosedForm) -> str:
    layout = found.layout
    many = "GPUs" if layout.gpus > 1 else "GPU"
    return (
        f"{found.architecture.name}: {_count(found.parameters)} parameters on {layout.gpus} {many} "
        f"({found.cluster.card.title}), {layout_name(layout)}\n"
        f"sequences of {layout.sequence or found.architecture.sequence} tokens, {layout.micro_batch} a micro-batch, "
        f"{layout.micro_batches} micro-batches; recompute {recompute_name(found.recompute)}"
    )


def _stage_table(found: ClosedForm, every_stage: bool) -> Table:
    """Parts down and stages across, or, for every stage, the other way round."""
    table = Table(box=None, pad_edge=False)
    shown = _shown(found, every_stage)
    unit = binary_unit(found.heaviest.total_bytes)
    table.add_column(f"{unit} per GPU")
    if every_stage:
        for name in ("layers", "flight", "weight", "grad", "optim", "activ", "embed", "head", "work", "total"):
            table.add_column(name, justify="right", no_wrap=True)
        for stage, name in shown:
            sizes = [figure(getattr(stage, field), unit) for _, field in _PARTS]
            table.add_row(name, str(stage.layers), _in_flight(stage), *sizes)
        return table
    for _, name in shown:
        table.add_column(name, justify="right")
    table.add_row("layers", *(str(stage.layers) for stage, _ in shown))
    table.add_row("micro-batches in flight", *(_in_flight(stage) for stage, _ in shown))
    for label, field in _PARTS[:-1]:
        table.add_row(label, *(figure(getattr(stage, field), unit) for stage, _ in shown))
    table.add_section()
    table.add_row(_PARTS[-1][0], *(figure(getattr(stage, _PARTS[-1][1]), unit) for stage, _ in shown))
    return table


def _in_flight(stage: Stage) -> str:
    return "+".join(map(str, stage.in_flight))


def _shown(found: ClosedForm, every_stage: bool) -> list[tuple[Stage, str]]:
    stages, heaviest = found.stages, found.heaviest
    if len(stages) == 1:
        return [(stages[0], "the only stage")]
    names = {0: "first", len(stages) - 1: "last"}
    shown = stages if every_stage else [s for s in stages if s.index in names or s is heaviest]
    return [
        (s, ", ".join(filter(None, (f"stage {s.index}", names.get(s.index), "heaviest" if s is heaviest else ""))))
        for s in shown
    ]


def _verdict(found: ClosedForm) -> str:
    usable = found.usable_bytes
    word = "fits" if found.fits else "does not fit"
    heavy = found.heaviest
    working = "a layer's backward" if heavy.replay_bytes + heavy.temporaries_bytes >= heavy.loss_bytes else "the loss"
    text = (
        f"{format_bytes(found.peak_bytes, 'GiB')} of {format_bytes(usable, 'GiB')} usable: {word}. "
        f"The working set is that of {working}" + (", and gathered weights." if heavy.gathered_bytes else ".")
    )
    if heavy.host_bytes:
        text += f" {format_bytes(heavy.host_bytes, 'GiB')} wait in host memory."
    return text


def _chosen(stage: Stage) -> str:
    lines = [f"Stage {stage.index} makes again:"]
    for kind, count, ops in sorted(stage.chosen, key=lambda item: len(item[2])):
        lines.append(f"  {count} {kind} layer{'s' if count > 1 else ''}: {', '.join(ops) or 'nothing'}")
    return "\n".join(lines)


def _work(found: ClosedForm, step_seconds: float | None) -> str:
    more, idle = found.hardware_flops / found.model_flops - 1, found.bubble_seconds / found.step_seconds
    lines = [
        f"{found.model_flops / 1e15:,.1f} PFLOP a step, {found.hardware_flops / 1e15:,.1f} with recomputation "
        f"({format_share(more, sign=True)})",
        f"Modelled step {format_seconds(found.step_seconds)}: recomputation "
        f"{format_share(found.extra_time, sign=True)}, idle pipeline {format_share(idle)}, "
        f"MFU {format_share(found.mfu())}",
    ]
    if step_seconds:
        lines.append(
            f"At the given {format_seconds(step_seconds)} a step: MFU {format_share(found.mfu(step_seconds))}, "
            f"HFU {format_share(found.hfu(step_seconds))}"
        )
    return "\n".join(lines)
