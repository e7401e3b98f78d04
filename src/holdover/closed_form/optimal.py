"""The cheapest values to drop: a layer's menu, and how many layers take each dish under a budget.

A layer's menu comes from trying every set of ops that backward could run again. The set decides what must be kept:
what backward needs and no replayed op makes, and what the replayed ops start from. Sets that keep more and cost more
than another are left out. How many layers of each kind take which entry is a small integer programme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from holdover.closed_form.architecture import Kind
from holdover.closed_form.rates import Cluster, op_seconds
from holdover.closed_form.tensors import RESIDUAL, Layer, Op, Value


@dataclass(frozen=True, eq=False)
class Dish:
    """One way to treat a layer, for one micro-batch on one rank."""

    kept_bytes: int
    remade_bytes: int
    """What replay makes again, all of it live at once."""
    seconds: float
    """Of running the ops again."""
    flops: float
    """With experts evenly loaded, as over all ranks they are."""
    kept: tuple[str, ...]
    replayed: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """A stage's layers of one kind. Where its chunks are held for different numbers of micro-batches, each dish is
    meant to be spread evenly over them, and `in_flight` is the mean."""

    kind: Kind
    layers: int
    in_flight: float


@dataclass(frozen=True)
class Choice:
    """How many layers of each group take each dish; `bound_seconds` is a proved lower bound on `seconds`."""

    counts: tuple[tuple[Group, Dish, int], ...]
    bytes: int
    working_bytes: int
    seconds: float
    bound_seconds: float
    flops: float


@lru_cache(maxsize=4096)
def menu(
    layer: Layer, items: tuple[tuple[str, Any], ...], tokens: int, cluster: Cluster, size: int
) -> tuple[Dish, ...]:
    """The layer's undominated dishes, most bytes first.

    The residual stream after attention is all that the layer's two halves share, so each half is enumerated alone, with
    and without that value being wanted by the second.

    Args:
        layer: the list.
        items: what the symbols stand for, as sorted pairs.
        tokens: tokens of a micro-batch on one rank.
        cluster: the cards whose time is counted.
        size: bytes of an activation's element.
    """
    values = dict(items)
    ops = _useful(layer)
    costs = _Costs(
        {value.name: int(-(-value.rank_bytes.at(values) * tokens // 1)) for value in layer.values},
        {op.name: float(op_seconds([op], values, tokens, cluster, size).forward) for op in ops},
        {op.name: float(op.flops.at(values | {"rho": 1})) * tokens for op in ops},
    )
    cut = next(place for place, op in enumerate(ops) if op.name == layer.value(RESIDUAL).op) + 1
    second_ops = {op.name for op in ops[cut:]}
    first_values = [value for value in layer.values if value.op not in second_ops]
    second_values = [value for value in layer.values if value.op in second_ops]
    found: list[_Sets] = []
    for wanted in (False, True):
        second = _sets(ops[cut:], second_values, costs, frozenset())
        takes = np.array([RESIDUAL in op.inputs for op in ops[cut:]])
        asked = (second.chosen & takes).any(axis=1)
        second = second.only(np.flatnonzero(asked == wanted)).front()
        first = _sets(ops[:cut], first_values, costs, frozenset([RESIDUAL] if wanted else [])).front()
        found.append(first.times(second))
    best = found[0].plus(found[1]).front()
    return tuple(_dish(layer, ops, best, number, costs) for number in range(len(best.seconds)))[::-1]


@dataclass(frozen=True)
class _Costs:
    """Bytes of a layer's values, and seconds and FLOPs of its ops, by name."""

    bytes: dict[str, int]
    seconds: dict[str, float]
    flops: dict[str, float]


@dataclass(frozen=True)
class _Sets:
    """Sets of ops to run again: one row each, one column for each op."""

    chosen: Any
    kept: Any
    remade: Any
    seconds: Any

    def only(self, rows: Any) -> _Sets:
        return _Sets(self.chosen[rows], self.kept[rows], self.remade[rows], self.seconds[rows])

    def front(self) -> _Sets:
        """Those that no other beats in both bytes and seconds, fewest bytes first."""
        order = np.lexsort((self.remade, self.seconds, self.kept))
        best = np.minimum.accumulate(np.concatenate([[np.inf], self.seconds[order][:-1]]))
        return self.only(order[self.seconds[order] < best])

    def times(self, other: _Sets) -> _Sets:
        """Each of these with each of the others, over other ops."""
        left, right = (grid.ravel() for grid in np.indices((len(self.seconds), len(other.seconds))))
        return _Sets(
            np.hstack([self.chosen[left], other.chosen[right]]),
            self.kept[left] + other.kept[right],
            self.remade[left] + other.remade[right],
            self.seconds[left] + other.seconds[right],
        )

    def plus(self, other: _Sets) -> _Sets:
        """These and the others, over the same ops."""
        return _Sets(
            np.vstack([self.chosen, other.chosen]),
            np.concatenate([self.kept, other.kept]),
            np.concatenate([self.remade, other.remade]),
            np.concatenate([self.seconds, other.seconds]),
        )


def _sets(ops: list[Op], values: list[Value], costs: _Costs, wanted: frozenset[str]) -> _Sets:
    """Every set of ops, with what it keeps (of these values), makes again and costs. `wanted` is needed elsewhere."""
    numbers = np.arange(2 ** len(ops))
    chosen = (numbers[:, None] >> np.arange(len(ops))) & 1 == 1
    column = {op.name: place for place, op in enumerate(ops)}
    kept, remade = np.zeros(len(numbers)), np.zeros(len(numbers))
    for value in values:
        made = chosen[:, column[value.op]] if value.op in column else np.zeros(len(numbers), dtype=bool)
        users = [column[op.name] for op in ops if value.name in op.inputs]
        needed = chosen[:, users].any(axis=1) | value.stored | (value.name in wanted)
        kept += (needed & ~made) * costs.bytes[value.name]
        if value.stored:
            remade += made * costs.bytes[value.name]
    return _Sets(chosen, kept, remade, chosen @ np.array([costs.seconds[op.name] for op in ops]))


def _useful(layer: Layer) -> list[Op]:
    """The ops whose outputs backward needs, or another such op does: running the others again cannot help."""
    needed = {value.name for value in layer.stored}
    useful: list[Op] = []
    for op in reversed(layer.ops):
        outputs = {value.name for value in layer.values if value.op == op.name}
        if outputs & needed:
            useful.append(op)
            needed |= set(op.inputs)
    return useful[::-1]


def _dish(layer: Layer, ops: list[Op], sets: _Sets, number: int, costs: _Costs) -> Dish:
    again = [op for op, run in zip(ops, sets.chosen[number], strict=True) if run]
    names = {op.name for op in again}
    starts = {name for op in again for name in op.inputs}
    return Dish(
        int(sets.kept[number]),
        int(sets.remade[number]),
        float(sets.seconds[number]),
        sum(costs.flops[op.name] for op in again),
        tuple(v.name for v in layer.values if (v.stored or v.name in starts) and v.op not in names),
        tuple(op.name for op in again),
    )


@lru_cache(maxsize=4096)
def hull(dishes: tuple[Dish, ...]) -> tuple[Dish, ...]:
    """The dishes that some price per byte would choose, most bytes first."""
    corners: list[Dish] = []
    for dish in dishes:
        while len(corners) >= 2 and _slope(corners[-2], corners[-1]) >= _slope(corners[-2], dish):
            corners.pop()
        corners.append(dish)
    return tuple(corners)


def _slope(heavy: Dish, light: Dish) -> float:
    """Seconds per byte saved."""
    saved = heavy.kept_bytes - light.kept_bytes
    return (light.seconds - heavy.seconds) / saved if saved > 0 else float("inf")


def choose(
    menus: dict[Kind, tuple[Dish, ...]],
    groups: Sequence[Group],
    budget_bytes: float,
    *,
    least_working: float = 0,
    exact: bool = True,
) -> Choice | None:
    """How many layers of each group take which dish: the least replay time whose bytes fit.

    Args:
        menus: the dishes of each kind.
        groups: the layers.
        budget_bytes: for what is kept in all micro-batches in flight, plus what replaying one layer makes again.
        least_working: working bytes that are needed anyway, within which replay costs no more (the loss).
        exact: solve the integer programme; otherwise stop at the walk down the convex hulls, which is at most one
            layer's step from the optimum.

    Returns:
        The choice, or None if even the lightest dishes do not fit.
    """
    groups = [group for group in groups if group.layers]
    walked, bound = _walk(menus, groups, budget_bytes, least_working)
    if not exact or (walked and walked.seconds <= bound * (1 + 1e-9)):
        return walked
    return _solve(menus, groups, budget_bytes, least_working, walked, bound)


def _walk(
    menus: dict[Kind, tuple[Dish, ...]], groups: Sequence[Group], budget_bytes: float, working: float
) -> tuple[Choice | None, float]:
    """Take the cheapest steps down the hulls until the bytes fit; the fractional last step gives the bound."""
    corners = {group: hull(menus[group.kind]) for group in groups}
    counts = {group: [group.layers] + [0] * (len(corners[group]) - 1) for group in groups}
    held = sum(corners[group][0].kept_bytes * group.layers * group.in_flight for group in groups)
    bound, crossed = 0.0, held <= budget_bytes
    last: tuple[Group, Dish] | None = None
    steps = sorted(
        (_slope(corners[group][level], corners[group][level + 1]) / group.in_flight, level, position)
        for position, group in enumerate(groups)
        for level in range(len(corners[group]) - 1)
    )
    for _, level, position in steps:
        if held + working <= budget_bytes:
            break
        group = groups[position]
        heavy, light = corners[group][level], corners[group][level + 1]
        saved = (heavy.kept_bytes - light.kept_bytes) * group.in_flight
        more = light.seconds - heavy.seconds
        if not crossed:
            bound += min(group.layers, max(0.0, held - budget_bytes) / saved) * more
        grown = max(working, light.remade_bytes)
        moved = min(group.layers, max(0, int(-(-(held + grown - budget_bytes) // saved))))
        counts[group][level] -= moved
        counts[group][level + 1] += moved
        held -= saved * moved
        crossed = crossed or held <= budget_bytes
        if moved:
            working, last = grown, (group, light)
    chosen = {
        (group, dish): count
        for group in groups
        for dish, count in zip(corners[group], counts[group], strict=True)
        if count
    }
    spare = budget_bytes - held - working
    if spare < 0:
        return None, bound
    if last is not None:
        _relieve(chosen, menus, *last, spare, working)
    return _choice(tuple((group, dish, count) for (group, dish), count in chosen.items()), bound), bound


def _relieve(
    chosen: dict[tuple[Group, Dish], int],
    menus: dict[Kind, tuple[Dish, ...]],
    group: Group,
    light: Dish,
    spare: float,
    working: float,
) -> None:
    """The last layer that was moved saved more than was wanted: give it the fastest dish that still fits."""
    fitting = [
        dish
        for dish in menus[group.kind]
        if (dish.kept_bytes - light.kept_bytes) * group.in_flight + max(0.0, dish.remade_bytes - working) <= spare
    ]
    best = min(fitting, key=lambda dish: dish.seconds, default=light)
    chosen[group, light] -= 1
    chosen[group, best] = chosen.get((group, best), 0) + 1
    if not chosen[group, light]:
        del chosen[group, light]


def _choice(counts: tuple[tuple[Group, Dish, int], ...], bound: float) -> Choice:
    return Choice(
        counts,
        round(sum(dish.kept_bytes * group.in_flight * count for group, dish, count in counts)),
        max((dish.remade_bytes for _, dish, _ in counts), default=0),
        sum(dish.seconds * count for _, dish, count in counts),
        bound,
        sum(dish.flops * count for _, dish, count in counts),
    )


def _solve(
    menus: dict[Kind, tuple[Dish, ...]],
    groups: Sequence[Group],
    budget_bytes: float,
    least_working: float,
    walked: Choice | None,
    bound: float,
) -> Choice | None:
    """The integer programme: layers per dish, and whether a dish is used at all, which fixes the replay's bytes."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    pairs = [(group, dish) for group in groups for dish in menus[group.kind]]
    count = len(pairs)
    # Variables: layers of each pair, whether each is used, and the bytes that replay makes again, in units that keep
    # the solver's tolerances meaningful.
    unit = max(budget_bytes, 1.0)
    kept = np.array([dish.kept_bytes * group.in_flight / unit for group, dish in pairs])
    remade = np.array([dish.remade_bytes / unit for _, dish in pairs])
    most = np.array([group.layers for group, _ in pairs], dtype=float)
    scale = max((dish.seconds for _, dish in pairs), default=0.0) or 1.0
    cost = np.concatenate([[dish.seconds / scale for _, dish in pairs], np.zeros(count + 1)])
    eye, none = np.eye(count), np.zeros((count, count))
    same = np.array([[float(pair[0] == group) for pair in pairs] + [0.0] * (count + 1) for group in groups])
    layers = np.array([group.layers for group in groups], dtype=float)
    constraints = [
        LinearConstraint(same, layers, layers),
        LinearConstraint(np.hstack([eye, -np.diag(most), np.zeros((count, 1))]), -np.inf, 0),
        LinearConstraint(np.hstack([none, np.diag(remade), -np.ones((count, 1))]), -np.inf, 0),
        LinearConstraint(np.concatenate([kept, np.zeros(count), [1.0]])[None, :], -np.inf, 1.0),
    ]
    solved = milp(
        cost,
        constraints=constraints,
        integrality=np.concatenate([np.ones(2 * count), [0]]),
        bounds=Bounds(
            np.append(np.zeros(2 * count), least_working / unit), np.concatenate([most, np.ones(count), [np.inf]])
        ),
        options={"time_limit": 5.0, "mip_rel_gap": 1e-6},
    )
    if solved.x is None:
        return walked
    numbers = np.rint(solved.x[:count]).astype(int)
    counts = tuple((group, dish, int(number)) for (group, dish), number in zip(pairs, numbers, strict=True) if number)
    proved = float(solved.mip_dual_bound) * scale if solved.mip_dual_bound is not None else bound
    found = _choice(counts, max(bound, proved))
    fits = found.bytes + max(found.working_bytes, least_working) <= budget_bytes * (1 + 1e-9)
    return found if fits and (walked is None or found.seconds <= walked.seconds) else walked
