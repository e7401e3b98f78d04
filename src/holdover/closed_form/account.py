"""The sums: bytes of every stage of many layouts at once. `times.py` has FLOPs and seconds.

One row of every array is one stage of one layout. A single layout is the case of few rows, so that the sweep and the
table cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdover.closed_form.architecture import Architecture, Kernels, Kind
from holdover.closed_form.blocks import residual_bytes
from holdover.closed_form.formula import Formula, total
from holdover.closed_form.layers import chunk_bytes, first_end, last_end, layer, loss_temporaries, rotary_tables
from holdover.closed_form.layout import Layout
from holdover.closed_form.parameters import (
    States,
    elements,
    first_parameters,
    last_parameters,
    layer_parameters,
)
from holdover.closed_form.pipeline import V_SHAPED, Chunk, chunks
from holdover.closed_form.recompute import Assignment, Mode, Recompute, assign, treatment
from holdover.closed_form.tensors import INPUT, Layer

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
    architecture, recompute = model.architecture, model.recompute
    kinds = architecture.layer_kinds
    index, stages, owned = [], [], []
    values: list[dict[str, float]] = []
    for number, layout in enumerate(layouts):
        symbols = dict(layout.values(architecture, model.kernels.imbalance))
        symbols |= {
            "ranks_tp": layout.tp,
            "ranks_ep": layout.ep * layout.etp,
            "dp": layout.dp,
            "cp": layout.cp,
            "pp": layout.pp,
            "zero": layout.zero,
            "reshard": int(layout.reshard_after_forward),
            "ring": int(layout.context == "ring"),
            "tokens": layout.tokens(architecture),
            "micro_batches": layout.micro_batches,
        }
        split = layout.split(architecture)
        for stage, mine in enumerate(chunks(layout.schedule, split, layout.pp, layout.micro_batches)):
            index.append(number)
            stages.append(stage)
            owned.append(mine)
            values.append(symbols)
    table = {name: np.array([row[name] for row in values], dtype=float) for name in values[0]}
    stage_array, layout_array = np.array(stages), np.array(index)
    v_shaped = np.array([layout.schedule in V_SHAPED for layout in layouts])[layout_array]
    tally = _Tally(len(owned))
    for row, mine in enumerate(owned):
        for chunk in mine:
            span = kinds[chunk.first_layer : chunk.first_layer + chunk.layers]
            tally.add(row, chunk, span, assign(recompute, span), recompute.store_all_micro_batches)
    return Rows(
        layout=layout_array,
        stage=stage_array,
        values=table,
        tokens=table["tokens"],
        first=(stage_array == 0).astype(float),
        last=np.where(v_shaped, stage_array == 0, stage_array == table["pp"] - 1).astype(float),
        first_in_flight=np.array([mine[0].in_flight for mine in owned], dtype=float),
        last_in_flight=np.array([mine[-1].in_flight for mine in owned], dtype=float),
        held=tally.held,
        layers=tally.layers,
        replays=tally.replays,
        groups=tuple(tally.groups),
        group_present=[np.array(present) for present in tally.groups.values()],
        stage_chunks=tuple(owned),
    )


class _Tally:
    """Counts layers by kind and mode, row by row."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.held: dict[Pair, Array] = {}
        self.layers: dict[Kind, Array] = {}
        self.replays: dict[Pair, Array] = {}
        self.groups: dict[tuple[Pair, ...], Array] = {}

    def add(self, row: int, chunk: Chunk, kinds: tuple[Kind, ...], assignment: Assignment, store_all: int) -> None:
        if not kinds:
            return
        whole = min(store_all, chunk.in_flight)
        rest = chunk.in_flight - whole
        for kind, mode, count in assignment.counts:
            self._count(self.layers, kind, row, count)
            if mode == "all" or rest:
                self._count(self.held, (kind, mode), row, count * (rest if mode != "all" else chunk.in_flight))
            if mode != "all" and whole:
                self._count(self.held, (kind, "all"), row, count * whole)
            if mode != "all":
                self._count(self.replays, (kind, mode), row, count * (rest / chunk.in_flight if whole else 1))
        for group in assignment.groups:
            self._count(self.groups, group, row, 1 if rest or group[0][1] == "all" else 0)

    def _count(self, table: dict[Any, Array], key: Any, row: int, amount: float) -> None:
        if key not in table:
            table[key] = np.zeros(self._rows)
        table[key][row] += amount


@dataclass(frozen=True)
class Bytes:
    """Bytes of every row, by what they are."""

    weights: Array
    gradients: Array
    optimizer: Array
    activations: Array
    """Of the layers, in all micro-batches in flight, on the device."""
    embedding: Array
    """Kept by the embedding: its dropout mask, token ids, rotary tables."""
    head: Array
    """Kept by the final norm, the output layer and the loss."""
    replay: Array
    """What replaying one group of layers makes again."""
    temporaries: Array
    """Gradients of one op's inputs and outputs in a layer's backward, beside the residual's."""
    loss: Array
    """What the loss needs at its peak beyond what it keeps."""
    gathered: Array
    """Weights gathered by full sharding, and one unit's unsharded gradient."""
    host: Array
    """Activations waiting in host memory."""
    stage_output: Array
    """What keeping each stage's output in flight would add: it is freed, as the next stage keeps it as its input."""

    @property
    def working(self) -> Array:
        """The working set: a layer's backward (with its replay), or the loss, and what full sharding gathers."""
        return np.maximum(self.replay + self.temporaries, self.loss) + self.gathered

    @property
    def states(self) -> Array:
        """Weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> Array:
        """All of it."""
        return self.states + self.activations + self.embedding + self.head + self.working


def account_bytes(model: Model, rows: Rows) -> Bytes:
    """Sum the lists for every row. Under "optimal" this is what nothing recomputed takes."""
    states = _states(model, rows)
    kept = np.zeros(len(rows.stage))
    for (kind, mode), count in rows.held.items():
        formula = treatment(layer(model.architecture, model.kernels, kind), mode, model.recompute)
        kept = kept + count * rows.tokens * at(formula.kept_bytes(small=model.small), rows)
    offload = model.recompute.offload
    first, last = first_end(model.architecture, model.kernels), last_end(model.architecture, model.kernels)
    tables = rotary_tables(model.architecture, model.kernels) if model.small else Formula()
    embedding = rows.first * at(first.bytes(small=model.small), rows) + at(tables, rows)
    head = rows.last * at(last.bytes(small=model.small), rows)
    loss = rows.tokens * at(loss_temporaries(model.architecture, model.kernels), rows)
    output = residual_bytes(model.kernels) * rows.values["h"] / rows.values["t_s"] * rows.tokens
    return Bytes(
        **states,
        activations=whole(kept * (1 - offload)),
        embedding=whole(embedding * rows.tokens * rows.first_in_flight),
        head=whole(head * rows.tokens * rows.last_in_flight),
        replay=whole(_replay(model, rows)),
        temporaries=whole(_temporaries(model, rows)),
        loss=whole(rows.last * (loss + at(chunk_bytes(model.architecture, model.kernels), rows))),
        host=whole(kept * offload),
        stage_output=whole(output * rows.first_in_flight * (1 - rows.last)),
    )


def _states(model: Model, rows: Rows) -> dict[str, Array]:
    """Weights, gradients, optimizer states and what full sharding gathers."""
    architecture, states, values = model.architecture, model.states, rows.values
    separate = rows.last * (1 - rows.first) > 0
    counts: dict[bool, Array] = {}
    units: list[Array] = []
    for experts in (False, True):
        count = np.zeros(len(rows.stage))
        for kind, number in rows.layers.items():
            count = count + number * at(elements(layer_parameters(architecture, kind), experts=experts), rows)
        if not experts:
            ends = rows.first * at(elements(first_parameters(architecture)), rows)
            for alone, mask in ((True, separate), (False, ~separate)):
                end = at(elements(last_parameters(architecture, separate=alone)), rows)
                ends = ends + rows.last * np.where(mask, end, 0.0)
            count = count + ends
            units.append(ends)
        counts[experts] = count
    largest = np.zeros(len(rows.stage))
    for kind, number in rows.layers.items():
        unit = at(elements(layer_parameters(architecture, kind)), rows)
        largest = np.maximum(largest, np.where(number > 0, unit, 0.0))
    dense_ranks = values["dp"] * values["cp"]
    expert_ranks = values["dp"] * values["cp"] * values["t"] / (values["ep"] * values["t_e"])
    zero = values["zero"]

    def share(level: int, size: Any) -> Array:
        parts = [
            counts[experts] / np.where(zero >= level, ranks, 1.0)
            for experts, ranks in ((False, dense_ranks), (True, np.maximum(expert_ranks, 1.0)))
        ]
        return whole((parts[0] + parts[1]) * float(size))

    # Gathered in forward and again in backward: the unit that runs and the one fetched ahead, in the precision that
    # computes, and its gradient before it is scattered. The root unit (embedding, final norm, head) stays gathered.
    compute = model.kernels.element_bytes
    layers = sum(rows.layers.values(), np.zeros(len(rows.stage)))
    ahead = np.where(values["reshard"] > 0, np.minimum(layers, 2), layers)
    gathered = (ahead * largest + units[0]) * compute + largest * compute
    shared = (zero >= 3) & (dense_ranks > 1)
    return {
        "weights": share(3, states.weight_bytes),
        "gradients": share(2, states.gradient_bytes),
        "optimizer": share(1, states.optimizer_bytes),
        "gathered": whole(np.where(shared, gathered, 0.0)),
    }


def _replay(model: Model, rows: Rows) -> Array:
    largest = np.zeros(len(rows.stage))
    for group, present in zip(rows.groups, rows.group_present, strict=True):
        remade = total(
            treatment(layer(model.architecture, model.kernels, kind), mode, model.recompute).remade_bytes(
                small=model.small
            )
            for kind, mode in group
        )
        largest = np.maximum(largest, np.where(present > 0, rows.tokens * at(remade, rows), 0.0))
    return largest


def _temporaries(model: Model, rows: Rows) -> Array:
    largest = np.zeros(len(rows.stage))
    residual = residual_bytes(model.kernels) * rows.values["h"] / rows.values["t_s"]
    for kind, number in rows.layers.items():
        for formula in _op_gradients(layer(model.architecture, model.kernels, kind)):
            there = np.where(number > 0, rows.tokens * (at(formula, rows) + residual), 0.0)
            largest = np.maximum(largest, there)
    return largest + _context_buffers(model, rows)


def _context_buffers(model: Model, rows: Rows) -> Array:
    """What context parallelism passes on: a ring the next rank's keys and values, twice for double buffering; Ulysses
    query, key and value as they were before the exchange."""
    values = rows.values
    if model.architecture.latent:
        key = values["a"] * (values["d_n"] + values["d_r"] + values["d_v"])
        query = values["a"] * (values["d_n"] + values["d_r"])
    else:
        key, query = 2 * values["g"] * values["d"] * values["kv_copies"], values["a"] * values["d"]
    passed = np.where(values["ring"] > 0, 2 * key, query + key) / values["t"]
    return np.where(values["cp"] > 1, model.kernels.element_bytes * rows.tokens * passed, 0.0)


def _op_gradients(of: Layer) -> set[Formula]:
    """For each op's backward, bytes per token of the gradients of its inputs and outputs and of inputs it gathers, less
    what the layer kept for later ops: their backward has let go of it."""
    found, freed = set(), Formula()
    for op in reversed(of.ops):
        touched = [value for value in of.values if value.gradient and (value.op == op.name or value.name in op.inputs)]
        found.add(total(value.rank_bytes for value in touched if value.name != INPUT) + op.gathered - freed)
        freed = freed + total(value.rank_bytes for value in of.stored if value.op == op.name)
    return found


def at(formula: Formula, rows: Rows) -> Array:
    """A formula's value for every row."""
    value = formula.at(rows.values)
    return value if isinstance(value, np.ndarray) else np.full(len(rows.stage), float(value))


def whole(array: Array) -> Array:
    """Whole bytes, rounded up; what float arithmetic leaves below a thousandth of a byte is not rounded up."""
    return np.ceil(np.round(array, 3))
