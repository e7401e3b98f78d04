"""`holdover verify MODEL --plan FILE` or `--budget SIZE`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdover.cli.common import (
    BROKEN_PROMISE,
    OPTIMIZER_HELP,
    PRECISION_HELP,
    BatchOption,
    JsonOption,
    ModelArgument,
    PlanTimeOption,
    SeqOption,
    fail,
    fails_politely,
    named_optimizer,
    show,
    show_json,
    stage,
)

if TYPE_CHECKING:
    from holdover.planning.plan import Plan


@fails_politely
def verify(
    model: ModelArgument,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="A plan that `holdover plan -o` wrote.", show_default=False)
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="Make a plan for this budget instead: 24GiB, 60% of the step's own peak, or min.",
            show_default=False,
        ),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help=OPTIMIZER_HELP, show_default="the plan's own, or adamw")
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help=PRECISION_HELP, show_default="the plan's own")
    ] = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    time_limit: PlanTimeOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Run the step plain and planned: gradients bit for bit, memory and time against the promise."""
    import holdover
    from holdover.cli.model_spec import load
    from holdover.report.verification_view import verification_view
    from holdover.units import parse_budget

    if (plan is None) == (budget is None):
        fail("give either --plan FILE or --budget SIZE")
    loaded = None if plan is None else holdover.Plan.load(plan)
    if budget is not None:
        parse_budget(budget)
    if loaded is not None:
        optimizer = optimizer or own_optimizer(loaded)
        precision = precision or loaded.precision
    shared: dict[str, Any] = {"optimizer": named_optimizer(optimizer or "adamw"), "precision": precision}
    with stage(f"building {model}"):
        step = load(model, batch=batch, seq=seq, meta=False)
    shared["loss"] = step.loss
    if loaded is None:
        with stage("recording the step, timing its ops, solving"):
            loaded = holdover.plan(
                step.model, step.args, step.kwargs, budget=budget or "min", time_limit=time_limit, **shared
            )
    with stage("running it plain and planned"):
        found = holdover.verify(step.model, step.args, step.kwargs, plan=loaded, **shared)
    if as_json:
        show_json(found.to_json())
    else:
        show(verification_view(found))
    if not found.holds:
        raise typer.Exit(BROKEN_PROMISE)


def own_optimizer(plan: Plan) -> str:
    """The optimizer that a plan counts, by the name that a command takes."""
    from holdover.trace.step import OPTIMIZERS

    if plan.optimizer and plan.optimizer.lower() not in OPTIMIZERS:
        fail(
            f"the plan counts the optimizer {plan.optimizer}, which was made in Python and is not known by name here: "
            "verify it there, holdover.verify(..., plan=plan, optimizer=...), or choose one of "
            f"{', '.join(sorted(OPTIMIZERS))} or none by --optimizer"
        )
    return plan.optimizer or "none"
