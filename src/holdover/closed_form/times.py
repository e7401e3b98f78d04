"""The sums: FLOPs and seconds of every stage of many layouts, and of their steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdover.closed_form.account import Bytes, at
from holdover.closed_form.blocks import residual_bytes
from holdover.closed_form.formula import total
from holdover.closed_form.layers import first_end, last_end, layer
from holdover.closed_form.layout import Layout
from holdover.closed_form.pipeline import bubble
from holdover.closed_form.rates import Cluster, Seconds, op_seconds
from holdover.closed_form.recompute import treatment
from holdover.closed_form.rows import Model, Rows

Array = Any


@dataclass(frozen=True)
class Times:
    """Seconds and FLOPs of every row, for one micro-batch."""

    forward: Array
    backward: Array
    replay: Array
    transfer: Array
    """Exposed: pipeline sends, full sharding's gathers and offloading that compute does not hide."""
    hardware_flops: Array
    """Forward, backward and replay."""


def account_times(model: Model, rows: Rows, cluster: Cluster, bytes_of: Bytes, layouts: Sequence[Layout]) -> Times:
    """Seconds and FLOPs of every row, from the same lists."""
    size = model.kernels.element_bytes
    zeros = np.zeros(len(rows.stage))
    parts = {"products": zeros, "traffic": zeros, "collectives": zeros, "exchanges": zeros}
    flops, replay, replay_flops = zeros, zeros, zeros
    # The most loaded expert rank sets the time; over all ranks the FLOPs are those of an even load.
    even = dataclasses.replace(rows, values=rows.values | {"rho": np.ones_like(rows.tokens)})

    def add(times: Seconds, weight: Array) -> None:
        for name in parts:
            parts[name] = parts[name] + weight * getattr(times, name)

    for kind, number in rows.layers.items():
        listed = layer(model.architecture, model.kernels, kind)
        add(op_seconds(listed.ops, rows.values, rows.tokens, cluster, size), number)
        flops = flops + number * rows.tokens * at(listed.flops, even)
    for end, where in (
        (first_end(model.architecture, model.kernels), rows.first),
        (last_end(model.architecture, model.kernels), rows.last),
    ):
        add(op_seconds(end.ops, rows.values, rows.tokens, cluster, size), where)
        flops = flops + where * rows.tokens * at(end.flops, even)
    for (kind, mode), number in rows.replays.items():
        ops = treatment(layer(model.architecture, model.kernels, kind), mode, model.recompute).replayed
        replay = replay + number * op_seconds(ops, rows.values, rows.tokens, cluster, size).forward
        replay_flops = replay_flops + number * rows.tokens * at(total(op.flops for op in ops), even)
    whole = Seconds(**parts)
    return Times(
        whole.forward,
        whole.backward,
        replay,
        _transfers(model, rows, cluster, bytes_of, layouts, whole),
        3 * flops + replay_flops,
    )


def _transfers(
    model: Model, rows: Rows, cluster: Cluster, bytes_of: Bytes, layouts: Sequence[Layout], compute: Seconds
) -> Array:
    values = rows.values
    chunk_count = np.array([layout.chunks_per_stage for layout in layouts])[rows.layout]
    boundary = residual_bytes(model.kernels) * values["h"] / values["t"] * rows.tokens
    link = cluster.link_between(values["t"] * values["cp"] * values["dp"] * values["pp"])
    sends = np.where(values["pp"] > 1, 2 * chunk_count * boundary / link, 0.0)
    weights = bytes_of.weights * values["dp"] * values["cp"]
    data_link = cluster.link_between(values["t"] * values["cp"] * values["dp"], values["t"])
    gathers = np.where(values["zero"] >= 3, 3 * weights / data_link, 0.0)
    exposed = np.maximum(0.0, gathers - compute.forward - compute.backward)
    host = bytes_of.host / np.maximum(rows.first_in_flight, 1) / cluster.card.host_link
    offload = np.maximum(0.0, host - compute.forward) + np.maximum(0.0, host - compute.backward)
    return sends + exposed + offload + _context(model, rows, cluster)


def _context(model: Model, rows: Rows, cluster: Cluster) -> Array:
    """Context parallelism: a ring passes keys and values (three times: forward, backward and their gradients), Ulysses
    exchanges query, key, value and output twice. The ring hides behind attention; half of it is counted."""
    values, size = rows.values, model.kernels.element_bytes
    layers = sum(rows.layers.values(), np.zeros(len(rows.stage)))
    width = values["a"] * values["d"] / values["t"]
    key_width = 2 * values["g"] * values["d"] * values["kv_copies"] / values["t"]
    moved = np.where(
        values["ring"] > 0,
        0.5 * 3 * key_width * (values["cp"] - 1),
        2 * (2 * width + key_width) * (values["cp"] - 1) / values["cp"],
    )
    return layers * size * rows.tokens * moved / cluster.link_between(values["t"] * values["cp"])


@dataclass(frozen=True)
class Steps:
    """Seconds of a step, one entry for each layout."""

    seconds: Array
    replay_seconds: Array
    """What the step would be shorter by if nothing were recomputed, at the slowest stage."""
    bubble_seconds: Array
    sync_seconds: Array
    """Exposed gradient reduction and the optimizer's own traffic."""


def step_times(
    rows: Rows, layouts: Sequence[Layout], cluster: Cluster, bytes_of: Bytes, times: Times, replay: Array
) -> Steps:
    """Seconds of a step: the slowest stage's micro-batches, the pipeline's idle share, gradients and optimizer."""
    values = rows.values
    work = times.forward + times.backward + times.transfer + replay
    ranks = values["dp"] * values["cp"]
    link = cluster.link_between(values["t"] * ranks, values["t"])
    rounds = np.where(values["zero"] >= 3, 0.0, 2.0) * (ranks - 1) / ranks
    reduced = bytes_of.gradients * np.where(values["zero"] >= 2, ranks, 1.0)
    sync = np.maximum(0.0, rounds * reduced / link - times.backward)
    # The optimizer reads and writes gradients, weights and states once.
    sync = sync + 2 * bytes_of.states / (cluster.card.bandwidth * cluster.memory)
    count = len(layouts)
    micro = np.array([layout.micro_batches for layout in layouts], dtype=float)
    idle = np.array([bubble(x.schedule, x.pp, x.chunks_per_stage, x.micro_batches) for x in layouts])
    slowest, plain = _most(work, rows.layout, count), _most(work - replay, rows.layout, count)
    synced = _most(sync, rows.layout, count)
    return Steps(
        slowest * micro * (1 + idle) + synced,
        (slowest - plain) * micro * (1 + idle),
        slowest * micro * idle,
        synced,
    )


def _most(array: Array, index: Array, count: int) -> Array:
    most = np.zeros(count)
    np.maximum.at(most, index, array)
    return most
