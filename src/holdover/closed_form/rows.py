"""The stages of many layouts as rows of arrays: what each has, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdover.closed_form.architecture import Architecture, Kernels, Kind
from holdover.closed_form.layout import Layout
from holdover.closed_form.parameters import States
from holdover.closed_form.pipeline import V_SHAPED, Chunk, chunks
from holdover.closed_form.recompute import Mode, Recompute, assign

Array = Any
Pair = tuple[Kind, Mode]


@dataclass(frozen=True)
class Model:
    """What is common to all rows."""

    architecture: Architecture
    kernels: Kernels
    states: States
    recompute: Recompute
    small: bool = True
    """Count bookkeeping too: norm statistics, token ids, masked targets. The paper leaves them out."""


@dataclass(frozen=True)
class Rows:
    """The stages of the layouts: which layout, which stage, and what each holds."""

    layout: Array
    """Index of the row's layout."""
    stage: Array
    values: dict[str, Array]
    """What the symbols stand for, per row."""
    tokens: Array
    first: Array
    """1 where the stage has the embedding."""
    last: Array
    """1 where the stage has the head."""
    first_in_flight: Array
    last_in_flight: Array
    held: dict[Pair, Array]
    """Layers times micro-batches in flight, by kind and mode."""
    layers: dict[Kind, Array]
    replays: dict[Pair, Array]
    """Layers that run again, each counted by the share of its micro-batches that do."""
    groups: tuple[tuple[Pair, ...], ...]
    """The groups of layers that are replayed at once."""
    group_present: Array
    """For each group, 1 where the row has it."""
    stage_chunks: tuple[tuple[Chunk, ...], ...]


def build_rows(model: Model, layouts: Sequence[Layout]) -> Rows:
    """Lay the model out in each of the layouts."""
    architecture = model.architecture
    tallies: dict[Any, _Tally] = {}
    used = []
    for layout in layouts:
        # Layouts that differ in tensor or data parallelism alone share their pipeline.
        pipeline = (layout.schedule, layout.split(architecture), layout.pp, layout.micro_batches)
        if pipeline not in tallies:
            tallies[pipeline] = _Tally(chunks(*pipeline), architecture.layer_kinds, model.recompute)
        used.append(tallies[pipeline])
    stages = np.array([layout.pp for layout in layouts])
    values = [_values(layout, model) for layout in layouts]
    table = {name: np.repeat(np.array([row[name] for row in values], dtype=float), stages) for name in values[0]}
    stage = np.concatenate([np.arange(layout.pp) for layout in layouts])
    v_shaped = np.repeat(np.array([layout.schedule in V_SHAPED for layout in layouts]), stages)
    groups = _joined([tally.groups for tally in used], stages)
    return Rows(
        layout=np.repeat(np.arange(len(layouts)), stages),
        stage=stage,
        values=table,
        tokens=table["tokens"],
        first=(stage == 0).astype(float),
        last=np.where(v_shaped, stage == 0, stage == table["pp"] - 1).astype(float),
        first_in_flight=np.concatenate([tally.first_in_flight for tally in used]),
        last_in_flight=np.concatenate([tally.last_in_flight for tally in used]),
        held=_joined([tally.held for tally in used], stages),
        layers=_joined([tally.layers for tally in used], stages),
        replays=_joined([tally.replays for tally in used], stages),
        groups=tuple(groups),
        group_present=list(groups.values()),
        stage_chunks=tuple(mine for tally in used for mine in tally.stages),
    )


def _values(layout: Layout, model: Model) -> dict[str, float]:
    """What the symbols of the formulas, and the layout's own numbers, stand for."""
    return {
        **layout.values(model.architecture, model.kernels.imbalance),
        "ranks_tp": layout.tp,
        "ranks_ep": layout.ep * layout.etp,
        "dp": layout.dp,
        "cp": layout.cp,
        "pp": layout.pp,
        "zero": layout.zero,
        "reshard": int(layout.reshard_after_forward),
        "ring": int(layout.context == "ring"),
        "tokens": layout.tokens(model.architecture),
        "micro_batches": layout.micro_batches,
    }


def _joined(tables: Sequence[dict[Any, Array]], stages: Array) -> dict[Any, Array]:
    """The counts of several pipelines one after the other, 0 where a pipeline has nothing of a kind."""
    keys = dict.fromkeys(key for table in tables for key in table)
    nothing = [np.zeros(count) for count in stages]
    return {
        key: np.concatenate([table.get(key, none) for table, none in zip(tables, nothing, strict=True)]) for key in keys
    }


class _Tally:
    """Counts the layers of one pipeline by kind and mode, stage by stage."""

    def __init__(self, stages: tuple[tuple[Chunk, ...], ...], kinds: tuple[Kind, ...], recompute: Recompute) -> None:
        self.stages = stages
        self.first_in_flight = np.array([mine[0].in_flight for mine in stages], dtype=float)
        self.last_in_flight = np.array([mine[-1].in_flight for mine in stages], dtype=float)
        self.held: dict[Pair, Array] = {}
        self.layers: dict[Kind, Array] = {}
        self.replays: dict[Pair, Array] = {}
        self.groups: dict[tuple[Pair, ...], Array] = {}
        for stage, mine in enumerate(stages):
            for chunk in mine:
                span = kinds[chunk.first_layer : chunk.first_layer + chunk.layers]
                self._add(stage, chunk, span, recompute)

    def _add(self, stage: int, chunk: Chunk, kinds: tuple[Kind, ...], recompute: Recompute) -> None:
        assignment = assign(recompute, kinds)
        whole = min(recompute.store_all_micro_batches, chunk.in_flight)
        rest = chunk.in_flight - whole
        for kind, mode, count in assignment.counts:
            self._count(self.layers, kind, stage, count)
            self._count(self.held, (kind, mode), stage, count * (chunk.in_flight if mode == "all" else rest))
            if mode != "all":
                self._count(self.held, (kind, "all"), stage, count * whole)
                self._count(self.replays, (kind, mode), stage, count * (rest / chunk.in_flight if whole else 1))
        for group in assignment.groups:
            self._count(self.groups, group, stage, 1 if rest or group[0][1] == "all" else 0)

    def _count(self, table: dict[Any, Array], key: Any, stage: int, amount: float) -> None:
        if key not in table:
            table[key] = np.zeros(len(self.stages))
        table[key][stage] += amount
