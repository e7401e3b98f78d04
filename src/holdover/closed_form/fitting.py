"""The cheapest recomputation of a stage under a budget, and the error when there is none."""

from __future__ import annotations

from typing import Any

from holdover.closed_form.account import Bytes
from holdover.closed_form.architecture import Kind
from holdover.closed_form.layers import layer
from holdover.closed_form.optimal import Choice, Dish, Group, choose, menu
from holdover.closed_form.rates import Cluster
from holdover.closed_form.rows import Model, Rows
from holdover.errors import BudgetError
from holdover.units import format_bytes


def menus_of(model: Model, rows: Rows, row: int, cluster: Cluster) -> dict[Kind, tuple[Dish, ...]]:
    """The dishes of each kind of layer on one row."""
    items = tuple(
        sorted((name, _number(array[row])) for name, array in rows.values.items() if name not in _NOT_IN_MENUS)
    )
    return {
        kind: menu(
            layer(model.architecture, model.kernels, kind),
            items,
            int(rows.tokens[row]),
            cluster,
            model.kernels.element_bytes,
        )
        for kind in rows.layers
    }


_NOT_IN_MENUS = frozenset({"dp", "cp", "pp", "zero", "reshard", "ring", "tokens", "micro_batches", "s_max"})
"""Of a row's values, those that no layer's list depends on: menus are shared between rows that differ in them."""


def choose_row(
    model: Model,
    rows: Rows,
    row: int,
    counted: Bytes,
    cluster: Cluster,
    budget_bytes: float,
    *,
    menus: dict[Kind, tuple[Dish, ...]] | None = None,
    exact: bool = True,
) -> Choice | None:
    """The cheapest recomputation of one stage under a budget, None if there is none. `menus` spares looking them up."""
    held = {kind: number[row] for (kind, _), number in rows.held.items()}
    groups = [
        Group(kind, int(number[row]), float(held[kind] / number[row]))
        for kind, number in rows.layers.items()
        if number[row]
    ]
    parts = (counted.weights, counted.gradients, counted.optimizer, counted.embedding, counted.head, counted.gathered)
    fixed = sum(float(part[row]) for part in parts)
    return choose(
        menus_of(model, rows, row, cluster) if menus is None else menus,
        groups,
        float(budget_bytes - fixed - counted.temporaries[row]),
        least_working=max(0.0, float(counted.loss[row] - counted.temporaries[row])),
        exact=exact,
    )


def over_budget(model: Model, rows: Rows, row: int, counted: Bytes, cluster: Cluster, budget_bytes: int) -> BudgetError:
    """The error for a stage that does not fit even with everything recomputed: its floor, and what makes it."""
    menus = menus_of(model, rows, row, cluster)
    lightest = {kind: dishes[-1] for kind, dishes in menus.items() if rows.layers[kind][row]}
    kinds = model.architecture.layer_kinds
    kept = sum(
        lightest[kind].kept_bytes * chunk.in_flight
        for chunk in rows.stage_chunks[row]
        for kind in kinds[chunk.first_layer : chunk.first_layer + chunk.layers]
    )
    replay = max(dish.remade_bytes for dish in lightest.values())
    parts = {
        "weights, gradients, optimizer": int(counted.states[row]),
        "layer inputs": kept,
        "kept by embedding and head": int(counted.embedding[row] + counted.head[row]),
        "a layer's backward or the loss": max(replay + int(counted.temporaries[row]), int(counted.loss[row])),
        "gathered weights": int(counted.gathered[row]),
    }
    floor = sum(parts.values())
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return BudgetError(
        f"stage {int(rows.stage[row])} needs {format_bytes(floor)} even with everything recomputed, and the "
        f"budget is {format_bytes(budget_bytes)}: {listed}. Raise --tp or --pp, share states with --zero, or lower "
        f"--micro-batch",
        floor_bytes=floor,
        budget_bytes=budget_bytes,
        parts=parts,
    )


def _number(value: Any) -> int | float:
    return int(value) if float(value).is_integer() else float(value)
