"""Every layout of a model over so many GPUs, under several recomputations: which fit, and how long a step takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdover.closed_form.account import Bytes, account_bytes
from holdover.closed_form.architecture import MEGATRON, Architecture, Kernels
from holdover.closed_form.errors import ConfigurationError
from holdover.closed_form.estimate import DEFAULT_CLUSTER, model_flops
from holdover.closed_form.fitting import choose_row, menus_of
from holdover.closed_form.layout import Layout
from holdover.closed_form.parameters import States
from holdover.closed_form.pipeline import even_split
from holdover.closed_form.rates import Cluster
from holdover.closed_form.recompute import Recompute
from holdover.closed_form.rows import Model, Rows, build_rows
from holdover.closed_form.times import account_times, step_times


@dataclass(frozen=True)
class Candidate:
    """One layout under one recomputation."""

    layout: Layout
    recompute: Recompute
    peak_bytes: int
    step_seconds: float
    replay_seconds: float
    mfu: float


@dataclass(frozen=True)
class Sweep:
    """What was tried, and what fits, fastest first."""

    tried: int
    layouts: int
    fitting: tuple[Candidate, ...]
    lightest_bytes: int
    """The lowest peak of all that was tried, for when nothing fits."""


def layouts_for(
    architecture: Architecture,
    gpus: int,
    *,
    global_batch: int,
    sequence: int = 0,
    per_node: int = 8,
    context: Sequence[int] = (1,),
    micro_batches_of: Sequence[int] = (1, 2, 4),
) -> list[Layout]:
    """Every layout that the model allows on so many GPUs.

    Args:
        architecture: the model.
        gpus: how many.
        global_batch: sequences of a step.
        sequence: tokens of each; 0 for the architecture's.
        per_node: tensor parallelism stays within a node.
        context: context-parallel sizes to try.
        micro_batches_of: sequences of a micro-batch to try.

    Returns:
        Layouts with sequence parallelism wherever there is tensor parallelism, 1F1B and interleaved schedules, states
        replicated, shared (zero=1), or fully sharded where there is no pipeline.
    """
    found = []
    for tp in (size for size in _divisors(gpus) if size <= per_node):
        for cp in (size for size in context if gpus % (tp * size) == 0):
            for pp in (size for size in _divisors(gpus // (tp * cp)) if size <= architecture.layers):
                dp = gpus // (tp * cp * pp)
                for ep in _expert_sizes(architecture, dp * cp * tp):
                    for micro in micro_batches_of:
                        if global_batch % (dp * micro):
                            continue
                        count = global_batch // (dp * micro)
                        base = Layout(
                            dp=dp,
                            tp=tp,
                            cp=cp,
                            pp=pp,
                            ep=ep,
                            sequence_parallel=tp > 1,
                            micro_batch=micro,
                            micro_batches=count,
                            sequence=sequence,
                        )
                        found += [x for x in _variants(base, architecture) if not x.problems(architecture)]
    return found


def _variants(base: Layout, architecture: Architecture) -> list[Layout]:
    """The base under each schedule and each way to share states."""
    shared = base.dp * base.cp > 1
    zeros = [0] + ([1] if shared else []) + ([2, 3] if shared and base.pp == 1 else [])
    pipelines = [(1, "1f1b")]
    if base.pp > 1:
        pipelines += [(v, "interleaved") for v in (2, 3, 4) if base.micro_batches % base.pp == 0]
        pipelines.append((1, "zb-v"))
    found = []
    for virtual, schedule in pipelines:
        parts = base.pp * (2 if schedule == "zb-v" else virtual)
        if parts > architecture.layers:
            continue
        layers = () if architecture.layers % parts == 0 else even_split(architecture.layers, parts)
        found += [
            dataclasses.replace(base, virtual=virtual, schedule=schedule, stage_layers=layers, zero=zero)  # type: ignore[arg-type]
            for zero in zeros
        ]
    return found


def recomputations_for(architecture: Architecture, kernels: Kernels) -> list[Recompute]:
    """The settings worth trying for a model: nothing, Megatron's selective modules, everything, and the optimal set."""
    modules: list[tuple[str, ...]] = [("core_attn",)] if kernels.attention == "eager" else [("layernorm",)]
    cheap = [
        *(["core_attn"] if kernels.attention == "eager" else []),
        "layernorm",
        *(["moe_act"] if architecture.experts else []),
        *(["mla_up_proj"] if architecture.latent else []),
    ]
    if tuple(cheap) not in modules:
        modules.append(tuple(cheap))
    return [
        Recompute(),
        *(Recompute(granularity="selective", modules=names) for names in modules),
        Recompute(granularity="full"),
        Recompute(granularity="optimal"),
    ]


def sweep(
    architecture: Architecture,
    layouts: Sequence[Layout],
    *,
    kernels: Kernels = MEGATRON,
    states: States | None = None,
    recomputations: Sequence[Recompute] | None = None,
    cluster: Cluster = DEFAULT_CLUSTER,
    memory_bytes: int | None = None,
) -> Sweep:
    """Account for all layouts at once and keep those that fit, by modelled step time.

    Args:
        architecture: the model.
        layouts: such as `layouts_for` lists.
        kernels: which code runs the model.
        states: what is kept per parameter.
        recomputations: the settings to try; None is `recomputations_for`.
        cluster: the cards.
        memory_bytes: of each GPU; None is the card's usable memory.

    Returns:
        The candidates that fit, fastest first; among equals the one with the lower peak.

    Raises:
        ConfigurationError: there is no layout to try.
    """
    if not layouts:
        raise ConfigurationError(
            f"no layout of {architecture.name} on these GPUs: the global batch must be a multiple of the data-parallel "
            f"size times the micro-batch, and heads, vocabulary and layers must divide. Change --gpus or --global-batch"
        )
    settings = recomputations or recomputations_for(architecture, kernels)
    budget = cluster.card.usable_bytes if memory_bytes is None else memory_bytes
    lengths = {layout.sequence for layout in layouts}
    per_sequence = {length: model_flops(architecture, Layout(sequence=length), kernels) for length in lengths}
    flops = np.array([per_sequence[x.sequence] * x.global_batch for x in layouts], dtype=float)
    gpus = np.array([layout.gpus for layout in layouts])
    peak_rate = cluster.rate(kernels.element_bytes)
    fitting: list[Candidate] = []
    lightest = float("inf")
    for setting in settings:
        model = Model(architecture, kernels, states or States(), setting)
        rows = build_rows(model, layouts)
        counted = account_bytes(model, rows)
        times = account_times(model, rows, cluster, counted, layouts)
        replay = times.replay
        useful = np.ones(len(layouts), dtype=bool)
        if setting.granularity == "optimal":
            # Where nothing needs recomputing the optimum is the setting "none", which is tried as well.
            useful[:] = False
            useful[rows.layout[counted.total > budget]] = True
            counted, replay = _optimal(model, rows, counted, cluster, budget)
        steps = step_times(rows, layouts, cluster, counted, times, replay)
        peaks = np.zeros(len(layouts))
        np.maximum.at(peaks, rows.layout, counted.total)
        lightest = min(lightest, float(peaks.min()))
        mfu = flops / (steps.seconds * gpus * peak_rate)
        fitting += [
            Candidate(
                layouts[index],
                setting,
                int(peaks[index]),
                float(steps.seconds[index]),
                float(steps.replay_seconds[index]),
                float(mfu[index]),
            )
            for index in np.flatnonzero((peaks <= budget) & useful).tolist()
        ]
    fitting.sort(key=lambda candidate: (candidate.step_seconds, candidate.peak_bytes))
    return Sweep(len(layouts) * len(settings), len(layouts), tuple(fitting), int(lightest))


def _optimal(model: Model, rows: Rows, counted: Bytes, cluster: Cluster, budget_bytes: float) -> tuple[Bytes, Any]:
    """Choose for every stage; a layout with a stage that cannot be made to fit is left as heavy as it is."""
    activations, replay_bytes = counted.activations.copy(), counted.replay.copy()
    seconds = np.zeros(len(rows.stage))
    lost = set(rows.layout[counted.states >= budget_bytes].tolist())
    menus: dict[int, Any] = {}
    for row in np.flatnonzero(counted.total > budget_bytes).tolist():
        layout = int(rows.layout[row])
        if layout in lost:
            continue
        if layout not in menus:
            menus[layout] = menus_of(model, rows, row, cluster)
        choice = choose_row(model, rows, row, counted, cluster, budget_bytes, menus=menus[layout], exact=False)
        if choice is None:
            lost.add(layout)
            continue
        activations[row], replay_bytes[row], seconds[row] = choice.bytes, choice.working_bytes, choice.seconds
    return dataclasses.replace(counted, activations=activations, replay=replay_bytes), seconds


def _expert_sizes(architecture: Architecture, ranks: int) -> list[int]:
    if architecture.experts is None:
        return [1]
    return [size for size in _divisors(architecture.experts.count) if ranks % size == 0]


def _divisors(number: int) -> list[int]:
    return [other for other in range(1, number + 1) if number % other == 0]
