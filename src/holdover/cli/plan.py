"""`holdover plan MODEL --budget SIZE`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from holdover.cli.common import (
    JsonOption,
    ModelArgument,
    PlanTimeOption,
    StepOptions,
    check_writable,
    fails_politely,
    show,
    show_json,
    stage,
    with_step_options,
    write_whole,
)

BudgetOption = Annotated[
    str,
    typer.Option(
        "--budget", help="24GiB, a share of the step's own peak such as 60%, or min for the lowest peak there is."
    ),
]


BudgetKindOption = Annotated[
    str | None,
    typer.Option(
        "--budget-kind",
        help="On a card, what the budget is for: reserved (bytes are then for the whole process) or allocated.",
        show_default="reserved",
    ),
]


@fails_politely
@with_step_options
def plan(
    model: ModelArgument,
    *,
    budget: BudgetOption,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan to this file.", show_default=False)
    ] = None,
    options: StepOptions,
    budget_kind: BudgetKindOption = None,
    time_limit: PlanTimeOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Choose what to recompute so that the step's peak meets a budget at the least extra time."""
    import holdover
    from holdover.planning.on_card import budget_kind_of
    from holdover.report.plan_view import plan_view
    from holdover.units import parse_budget

    parse_budget(budget)
    budget_kind_of(budget_kind, options.checked().card)
    if output is not None:
        check_writable(output)
    step = options.build(model)
    with stage("recording the step, pricing its ops, solving"):
        found = holdover.plan(
            step.model,
            step.args,
            step.kwargs,
            budget=budget,
            budget_kind=budget_kind,
            loss=step.loss,
            time_limit=time_limit,
            **options.keywords,
        )
    if output is not None:
        write_whole(output, found.to_json() + "\n")
    if as_json:
        show_json(json.loads(found.to_json()))
    else:
        show(plan_view(found))
        if output is not None:
            typer.echo(f"\nwritten to {output}")
