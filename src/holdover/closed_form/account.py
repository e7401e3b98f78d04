"""The sums: bytes of every stage of many layouts at once. `times.py` has FLOPs and seconds.

One row of every array is one stage of one layout. A single layout is the case of few rows, so that the sweep and the
table cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from holdover.closed_form.blocks import residual_bytes
from holdover.closed_form.formula import Formula, total
from holdover.closed_form.layers import chunk_bytes, first_end, last_end, layer, loss_temporaries, rotary_tables
from holdover.closed_form.parameters import (
    elements,
    first_parameters,
    last_parameters,
    layer_parameters,
)
from holdover.closed_form.recompute import treatment
from holdover.closed_form.rows import Array, Model, Rows
from holdover.closed_form.tensors import INPUT, Layer


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
