"""`holdover.plan`: from a model and a budget to a Plan."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from holdover.cost.devices import Card
from holdover.cost.roofline import copy_seconds_per_byte, modelled
from holdover.errors import BudgetError, PlanError
from holdover.memory.estimate import peak_of, workspaces
from holdover.memory.on_card import place_of
from holdover.planning.bound import Bound, bound_seconds
from holdover.planning.describe import described
from holdover.planning.inputs import checked_pairs, planned_shape, shapes_of
from holdover.planning.on_card import CardBudget, budget_kind_of
from holdover.planning.outline import outline_of
from holdover.planning.packing import packable
from holdover.planning.plan import Plan
from holdover.planning.priced import priced_here
from holdover.planning.problem import Problem, build
from holdover.planning.search import Candidate, Search
from holdover.trace.graph import Phase, Trace
from holdover.trace.record import Loss
from holdover.trace.step import OptimizerSpec
from holdover.units import checked_seconds, format_bytes, format_share, parse_budget

PACK_SHARE = 0.01
"""Packing is tried only if it saves this share of the activations."""


def plan(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str,
    budget_kind: str | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerSpec = None,
    precision: str | None = None,
    device: str | None = None,
    with_loss: bool = False,
    compiled: bool | str = False,
    also: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]] = (),
    time_limit: float = 60.0,
) -> Plan:
    """Choose what to recompute so that the peak of the training step meets `budget` at the least extra time.

    Args:
        model, args, kwargs, loss, optimizer, precision, device: the training step, as for `holdover.estimate`. With
            an optimizer its state and step are part of the peak.
        budget: bytes of everything live at once (weights, gradients, optimizer state, inputs, activations): an int,
            "24GiB", a share of the step's own unplanned peak ("80%"), or "min" for the lowest that can be reached,
            however much time that takes: `Plan.knee` then names a budget a little above that costs far less.
        budget_kind: what the budget is for on a card: "reserved" (the default there; bytes are then for the whole
            process, the CUDA context is set aside) or "allocated".
        with_loss: also plan ops of the loss, outside the model. Such a plan is put in force by `with plan.recompute():`
            around forward and loss, not by `apply_`.
        compiled: plan for a step under torch.compile: True for Inductor, or a backend's name ("inductor", "aot_eager").
            The modules that are compiled already are planned as they are, each by itself; else the whole model.
        also: further `(args, kwargs)` that the model is trained on, of other batch sizes or lengths. The budget then
            holds at all of these shapes; a share is one of the largest shape's peak. Where one plan for all would cost
            noticeably more time, there are several (`Plan.variants`), and each forward follows the one for its shapes.
        time_limit: seconds that the solver may take in all, about; the best plan so far is what comes back, with its
            bound. Recording and pricing are not counted.

    Raises:
        BudgetError: the budget is below the lowest peak that can be reached; says what that floor is made of.
        UnitError: the budget or the time limit cannot be read.
        PlanError: `also` together with a card or `compiled`, or not in pairs.
        TraceError: the step fails, or gives no loss.

    >>> import torch
    >>> from torch.nn import GELU, Linear, Sequential
    >>> layers = [Sequential(Linear(8, 64), GELU(), Linear(64, 8)) for _ in range(4)]
    >>> p = plan(Sequential(*layers), (torch.ones(1000, 8),), budget="min")
    >>> p.predicted_peak_bytes < p.unplanned_peak_bytes
    True
    """
    wanted = parse_budget(budget)
    checked_seconds(time_limit)
    place = place_of(device)
    budget_kind = budget_kind_of(budget_kind, place.card)
    if compiled and place.card is not None:
        raise PlanError(f"compiled: the compiler's kernels for {place.card.name} are not known without that card.")
    if also and (compiled or place.card is not None):
        raise PlanError(
            f"also= plans several shapes for eager mode on a device that is here, not for {device or 'the compiler'}: "
            "plan for the largest of the shapes alone."
        )
    if compiled:
        from holdover.integrations.planned import plan_compiled  # loads the compiler

        made = plan_compiled(
            model, args, kwargs, budget=wanted, backend="inductor" if compiled is True else compiled, loss=loss,
            optimizer=optimizer, precision=precision, device=place.device, with_loss=with_loss, time_limit=time_limit,
        )  # fmt: skip
        return replace(made, outline=outline_of(model))
    recorded = [
        (shapes_of(a, k), place.record(model, a, k, loss=loss, optimizer=optimizer, precision=precision))
        for a, k in [(args, kwargs), *checked_pairs(also)]
    ]
    if also:
        from holdover.planning.shapes import plan_shapes  # builds upon this module

        made = plan_shapes(recorded, wanted, precision=precision, with_loss=with_loss, time_limit=time_limit)
        return replace(made, outline=outline_of(model))
    [(shapes, trace)] = recorded
    made = plan_of(
        trace, wanted, precision=precision, with_loss=with_loss, time_limit=time_limit, card=place.card,
        budget_kind=budget_kind,
    )  # fmt: skip
    return replace(made, shapes=(planned_shape(shapes, made),), outline=outline_of(model))


def plan_of(
    trace: Trace, budget: int | float | str, *, precision: str | None = None, with_loss: bool = False,
    time_limit: float = 60.0, card: Card | None = None, budget_kind: str | None = None,
) -> Plan:  # fmt: skip
    """The plan for a recorded step; `budget` as `units.parse_budget` returns it, `card` the one it was recorded for."""
    workspace, unknown = workspaces(trace)
    problem, priced = priced_problem(trace, workspace, with_loss=with_loss, card=card)
    if card is not None:
        account = CardBudget(card, budget_kind_of(budget_kind, card), budget)
        return _plan_on_card(trace, problem, workspace, account, priced, precision, unknown, time_limit)
    search = limited(problem, workspace, time_limit)
    plain = search.judge(())
    limit = None if budget == "min" else int(plain.peak_bytes * budget) if isinstance(budget, float) else int(budget)
    began = time.monotonic()
    search, floor = lowest_of(search, quick=limit is not None)
    if limit is not None and limit < min(floor.peak_bytes, plain.peak_bytes):
        search, floor = lowest_of(search)
    if limit is not None and limit < min(floor.peak_bytes, plain.peak_bytes):
        raise below_floor(search, floor, plain, limit)
    began = began if limit is None else time.monotonic()
    search, best, least = within(search, floor, plain, limit)
    made = described(search, best, plain, floor, limit, least, priced=priced, precision=precision, unknown=unknown)
    return noting_limit(made, search, time.monotonic() - began, time_limit)


def noting_limit(plan: Plan, search: Search, spent: float, time_limit: float) -> Plan:
    """The plan, with a note of its gap where the search took the seconds that it had and might have gone on."""
    if spent < search.seconds / 2 or plan.gap * plan.step_seconds <= search.close_seconds:
        return plan
    more = "lower peak, or a cheaper plan for this one" if plan.budget_bytes is None else "cheaper one"
    note = (
        f"The time limit of {time_limit:g} s ended the search: this is the best plan so far. No plan for its peak can "
        f"take less time by more than {format_share(plan.gap)} of the step (the gap to the proved bound). A longer "
        f"limit (--time-limit, time_limit=) may find a {more}."
    )
    return replace(plan, notes=(*plan.notes, note))


def limited(problem: Problem, workspace: Mapping[int, int], time_limit: float) -> Search:
    """A search of `time_limit` seconds in all: a third for the lowest peak, for the cheapest plan, for the proof."""
    return Search(
        problem, workspace, same_places(problem), seconds=time_limit / 3, deadline=time.monotonic() + time_limit
    )


def within(search: Search, floor: Candidate, plain: Candidate, limit: int | None) -> tuple[Search, Candidate, float]:
    """The cheapest candidate whose peak is at most `limit`, or the floor, and the proved bound in seconds.

    Where the step fits as it is, nothing is packed either, which makes the search that it belongs to another one.
    """
    problem = search.problem
    if limit is not None and plain.peak_bytes <= limit:
        return Search(problem, search.workspace, search.everywhere), plain, 0.0
    bound = Bound(problem)
    budget_bytes = limit if limit is not None else floor.peak_bytes
    least = bound.seconds(budget_bytes, time_limit=search.left(1 / 2))
    if limit is None:
        best = search.annealed(floor, floor.peak_bytes, least + search.close_seconds)
    else:
        best = search.cheapest(limit, floor, least)
    return search, best, proved(bound, search, best, budget_bytes, least)


def proved(bound: Bound, search: Search, best: Candidate, budget_bytes: int, least: float) -> float:
    """`least`, or a better bound where `best` is far from it: by the moments at which it is near the budget."""
    if best.seconds <= least + search.close_seconds:
        return least
    tight = search.tight(best)
    return max(
        least, bound.seconds(budget_bytes, moments=tight, time_limit=search.left(1 / 2), whole=search.left(1 / 4))
    )


def _plan_on_card(
    trace: Trace, problem: Problem, workspace: Mapping[int, int], account: CardBudget, priced: str,
    precision: str | None, unknown: list[str], time_limit: float,
) -> Plan:  # fmt: skip
    """The same where the budget is for what a card's allocator shows."""
    search = limited(problem, workspace, time_limit)
    began = time.monotonic()
    plain = search.judge(())
    limit = account.limit(search, plain)
    fits = limit is not None and account.counted(search, plain) <= limit
    search, floor = lowest_of(search)
    if fits:
        search = Search(problem, workspace, search.everywhere)
        best, least = plain, 0.0
    elif limit is None:
        best = account.lowest(search, floor)
        most = account.tensor_bytes(trace, account.counted(search, best))
        least = bound_seconds(problem, most, time_limit=search.left(1 / 2))
    else:
        bound, most = Bound(problem), account.tensor_bytes(trace, limit)
        least = bound.seconds(most, time_limit=search.left(1 / 2))
        best = account.cheapest(search, floor, limit, least)
        least = proved(bound, search, best, most, least)
    plan = described(search, best, plain, floor, limit, least, priced=priced, precision=precision, unknown=unknown)
    made = account.described(plan, search, best, limit)
    return noting_limit(made, search, time.monotonic() - began, time_limit)


def priced_problem(
    trace: Trace, workspace: Mapping[int, int], *, with_loss: bool, card: Card | None = None
) -> tuple[Problem, str]:
    """The problem with each op's cost on this machine, or on a card that is not here, and how the costs came about."""
    if card is not None:
        seconds = {i: c.seconds for i, c in enumerate(modelled(trace.signatures, card))}
        problem = build(trace, seconds, workspace, with_loss=with_loss)
        problem.copy_seconds = copy_seconds_per_byte(card)
        return problem, f"modelled for {card.name} from FLOPs and bytes"
    return priced_here(trace, workspace, with_loss=with_loss)


def lowest_of(search: Search, *, quick: bool = False) -> tuple[Search, Candidate]:
    """The floor, and the search it was found by: with packed values where that lowers it."""
    floor = search.lowest(quick=quick)
    problem, trace = search.problem, search.trace
    pack = packable(trace, with_loss=problem.with_loss)
    gain = sum(trace.storages[trace.values[v].storage].nbytes - n for v, n in pack.items())
    kept = sum(need.nbytes for need in problem.needs.values() if need.saved)
    if gain > PACK_SHARE * kept:
        spread = {twin: pack[v] for v in pack for twin in twins(trace, v, search.everywhere)}
        packing = Search(
            problem, search.workspace, search.everywhere, spread, seconds=search.seconds, deadline=search.deadline
        )
        lower = packing.lowest(quick=quick)
        if lower.peak_bytes < floor.peak_bytes:
            return packing, lower
    return search, floor


def twins(trace: Trace, value: int, everywhere: Mapping[int, tuple[int, ...]]) -> list[int]:
    """The same value in every step of the trace."""
    maker = trace.values[value].maker
    place = trace.ops[maker].outputs.index(value)
    return [trace.ops[o].outputs[place] for o in everywhere.get(maker, (maker,))]


def same_places(problem: Problem) -> dict[int, tuple[int, ...]]:
    """Op of the step planned for -> the ops at the same place in all steps, as the plan will address them."""
    trace = problem.trace
    by_place: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    for op in trace.ops:
        if op.index >= 0 and op.phase in (Phase.FORWARD, Phase.LOSS):
            by_place[trace.calls[op.call].key, op.index, op.name].append(op.id)
    return {
        n: tuple(by_place[trace.calls[trace.ops[n].call].key, trace.ops[n].index, trace.ops[n].name])
        for n in problem.positions
        if trace.ops[n].index >= 0 and trace.ops[n].phase in (Phase.FORWARD, Phase.LOSS)
    }


def below_floor(search: Search, floor: Candidate, plain: Candidate, limit: int) -> BudgetError:
    """The refusal: what was asked, what the floor is and what makes it, and the ways out."""
    peak = peak_of(search.trace, search.timeline(floor))
    parts = {k.value: n for k, n in peak.parts.items() if n}
    made = ", ".join(f"{name} {format_bytes(n)}" for name, n in sorted(parts.items(), key=lambda kv: -kv[1]))
    where = f"{peak.op} in {peak.module or 'the loss' if peak.phase != Phase.OPTIMIZER else 'the optimizer'}"
    return BudgetError(
        f"A budget of {format_bytes(limit)} cannot be met: the lowest peak that recomputation reaches is "
        f"{format_bytes(floor.peak_bytes)} (unplanned {format_bytes(plain.peak_bytes)}). It stands in {peak.phase}, at "
        f"{where}, and is made of {made}. Ways out: a budget of at least {format_bytes(floor.peak_bytes)}, "
        f"a smaller batch or sequence, a leaner optimizer, or budget=\"min\".",
        floor_bytes=floor.peak_bytes, budget_bytes=limit, parts=parts,
    )  # fmt: skip
