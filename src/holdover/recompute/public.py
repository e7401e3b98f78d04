"""`holdover.apply_` and `holdover.remove_`: plans on models, in place."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

import torch

from holdover.errors import ApplyError
from holdover.planning.outline import why_other
from holdover.recompute.apply import install, uninstall
from holdover.recompute.shapes import guide_of

if TYPE_CHECKING:
    from holdover.planning.plan import Plan

M = TypeVar("M", bound=torch.nn.Module)


def apply_(model: M, plan: Plan) -> M:
    """Make the model follow the plan, in place.

    Parameter names, `state_dict`, classes, `repr` and hooks stay as they are. Where gradients are off the model runs as
    it always did; where a step does not match the plan, the value is kept (`holdover.inspect` counts it).

    A plan that was made with `compiled` compiles the model as well, in place: the modules that were compiled when it
    was made, else all of it.

    Args:
        model: the model that was planned for, or another of the same architecture; on any device.
        plan: from `holdover.plan` or `holdover.Plan.load`.

    Returns:
        The same model.

    Raises:
        ApplyError: the plan was made for another architecture (says how the two differ), needs `plan.recompute()`
            because it reaches into the loss, or the model follows a plan already.

    >>> import torch, holdover
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> plan = holdover.plan(model, (torch.ones(100, 8),), budget="min")
    >>> holdover.apply_(model, plan) is model
    True
    """
    if not isinstance(model, torch.nn.Module):
        raise ApplyError(f"a plan goes on a torch.nn.Module, and this is a {type(model).__name__}")
    if difference := why_other(plan, model):
        raise ApplyError(difference)
    if plan.with_loss:
        raise ApplyError(
            "this plan reaches into the loss, which is outside the model: run forward and loss inside "
            "`with plan.recompute():`, or plan without with_loss=True"
        )
    if plan.compiled:
        from holdover.integrations.compile import apply_compiled  # loads the compiler

        apply_compiled(model, plan)
        return model
    install(
        model, plan.script, plan.quiet, guide=guide_of(plan),
        plan_id=f"{plan.model}, peak {plan.predicted_peak_bytes:,} bytes",
    )  # fmt: skip
    return model


def remove_(model: M) -> M:
    """Take the plan off the model again, in place; nothing of it stays.

    Returns:
        The same model.

    Raises:
        ApplyError: the model follows no plan.
    """
    compiler = sys.modules.get("holdover.integrations.compile")
    if compiler is None or not compiler.remove_compiled(model):
        uninstall(model)
    return model
