"""`holdover explain MODEL TENSOR-OR-MODULE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdover.cli.common import (
    JsonOption,
    ModelArgument,
    PlanTimeOption,
    StepOptions,
    fail,
    fails_politely,
    show,
    show_json,
    stage,
    with_step_options,
)

MOST_PLACES = 3


@fails_politely
@with_step_options
def explain(
    model: ModelArgument,
    *,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TENSOR-OR-MODULE",
            help='A module such as "blocks.0"; one of its tensors by op, "blocks.0.mlp:gelu", or by place, '
            '"blocks.0.mlp:2"; ":2" of the model itself; "loss:0".',
            show_default=False,
        ),
    ],
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="Also tell what the plan for this budget does with it, and why: 24GiB, 60% of the step's own peak, or "
            "min.",
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="The same for a plan from a file.", show_default=False)
    ] = None,
    options: StepOptions,
    time_limit: PlanTimeOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Tell why a tensor is held for backward, and what dropping it would save at the peak and cost."""
    from holdover.planning.explain import explain_of
    from holdover.planning.outline import strange_places, why_other
    from holdover.planning.plan import Plan
    from holdover.planning.steps import recorded
    from holdover.report.explain_view import explain_view
    from holdover.units import parse_budget

    if budget is not None and plan is not None:
        fail("give --plan FILE or --budget SIZE, not both")
    options.checked()
    wanted = parse_budget(budget) if budget is not None else None
    chosen = Plan.load(plan) if plan is not None else None
    if chosen is not None and chosen.compiled:
        fail(
            f"{plan} is a plan for code that {chosen.compiled} compiles, and what is explained runs without a compiler"
        )
    step = options.build(model)
    if chosen is not None and (difference := why_other(chosen, step.model)):
        fail(difference)
    with stage("recording the step"):
        found = recorded(step.model, step.args, step.kwargs, loss=step.loss, **options.keywords)
    if wanted is not None:
        with stage("planning"):
            chosen = found.plan(wanted, time_limit=time_limit)
    if chosen is not None and (strange := strange_places(found.trace, chosen)):
        more = f" and {len(strange) - MOST_PLACES} more" if len(strange) > MOST_PLACES else ""
        typer.echo(
            f"note: {len(strange)} of {len(chosen.choices)} places of the plan are not in this step, and their results "
            f"are kept: {', '.join(strange[:MOST_PLACES])}{more}. Plan again for this step.",
            err=True,
        )
    with stage("timing its ops, simulating"):
        account = explain_of(found, target, plan=chosen)
    if as_json:
        show_json(account.to_dict())
    else:
        show(explain_view(account))
