"""holdover as a contender: a plan for each peak that a peer reached, for the usual shares of the peak, and the lowest.

A plan's budget is the whole peak, so that what exists before the step (weights, gradients, inputs) is added to a share.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import torch
from frontier_blocks import Case
from frontier_measure import Contender, Point, Setting, many_graphs, twin_of

from holdover import BudgetError, Plan, apply_, estimate, frontier, plan
from holdover.memory.measure import existing_bytes

SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)
QUICK_SHARES = (0.75, 0.5, 0.3)
NEAR, QUICK_NEAR = 0.01, 0.04
"""Budgets nearer to one another than this share of the peak are one."""
QUICK_SECONDS = 15.0

Planner = Callable[[int | str], Plan]


def eager(case: Case, setting: Setting) -> Iterator[Point]:
    """By `holdover.plan` at each budget; in a quick run from one `holdover.frontier`."""
    fixed = existing_bytes(case.model, case.args, case.loss)
    begun = time.perf_counter()
    if setting.quick:
        found = frontier(case.model, case.args, loss=case.loss, time_limit=QUICK_SECONDS)
        peak, planner = found.unplanned_peak_bytes - fixed, found.at
    else:
        peak = estimate(case.model, case.args, loss=case.loss).peak_bytes - fixed
        planner = lambda budget: plan(case.model, case.args, loss=case.loss, budget=budget)  # noqa: E731
    yield from _points(planner, setting, peak, fixed, time.perf_counter() - begun, _follow)


def compiled(*, by_block: bool) -> Contender:
    """`plan(..., compiled=True)` for the whole model, or for blocks compiled one by one."""

    def prepare(made: Plan, model: torch.nn.Module, case: Case) -> torch.nn.Module:
        for name in case.blocks if by_block else ():
            model.get_submodule(name).compile()
        return apply_(model, made)

    def offers(case: Case, setting: Setting) -> Iterator[Point]:
        many_graphs()
        model = twin_of(case.model)
        for name in case.blocks if by_block else ():
            model.get_submodule(name).compile()
        fixed = existing_bytes(model, case.args, case.loss)
        begun = time.perf_counter()
        peak = estimate(case.model, case.args, loss=case.loss).peak_bytes - fixed
        yield from _points(
            lambda budget: plan(model, case.args, loss=case.loss, budget=budget, compiled=True),
            setting, peak, fixed, time.perf_counter() - begun, lambda made, model: prepare(made, model, case),
        )  # fmt: skip

    return offers


def _follow(made: Plan, model: torch.nn.Module) -> torch.nn.Module:
    return apply_(model, made)


def _points(
    planner: Planner, setting: Setting, peak: int, fixed: int, before: float,
    follow: Callable[[Plan, torch.nn.Module], torch.nn.Module],
) -> Iterator[Point]:  # fmt: skip
    seen = set()
    for budget in _budgets(setting, peak, fixed):
        begun = time.perf_counter()
        try:
            made = planner(budget)
        except BudgetError:
            continue
        seconds = time.perf_counter() - begun + before
        if (made.choices or made.compiled) and made.choices not in seen:  # a compiled plan without choices is one too
            seen.add(made.choices)
            promised = made.predicted_peak_bytes - fixed
            label = "lowest" if budget == "min" else f"budget {(int(budget) - fixed) / peak:.3f}"
            yield Point(label, functools.partial(follow, made), seconds, promised, made.extra_time)


def _budgets(setting: Setting, peak: int, fixed: int) -> list[int | str]:
    shares = QUICK_SHARES if setting.quick else SHARES
    near = (QUICK_NEAR if setting.quick else NEAR) * peak
    chosen: list[int] = []
    for nbytes in sorted([*setting.peaks, *(int(share * peak) for share in shares)]):
        if nbytes < peak and (not chosen or nbytes - chosen[-1] > near):  # the lowest of those close together
            chosen.append(nbytes)
    return ["min", *(fixed + n for n in chosen)]


OURS: dict[str, Contender] = {
    "holdover": eager,
    "holdover, compiled model": compiled(by_block=False),
    "holdover, compiled blocks": compiled(by_block=True),
}
