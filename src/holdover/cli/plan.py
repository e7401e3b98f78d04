"""`holdover plan MODEL --budget SIZE`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from holdover.cli.common import (
    BatchOption,
    DeviceOption,
    DevicesOption,
    JsonOption,
    ModelArgument,
    OptimizerOption,
    PrecisionOption,
    SeqOption,
    add_devices,
    check_writable,
    fails_politely,
    named_optimizer,
    show,
    show_json,
    stage,
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
        help="On a card, what the budget is for: reserved (bytes are then for the whole process) or allocated. "
        "[default: reserved]",
    ),
]


@fails_politely
def plan(
    model: ModelArgument,
    budget: BudgetOption,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the plan to this file.", show_default=False)
    ] = None,
    optimizer: OptimizerOption = "adamw",
    precision: PrecisionOption = None,
    device: DeviceOption = None,
    devices: DevicesOption = None,
    budget_kind: BudgetKindOption = None,
    batch: BatchOption = 8,
    seq: SeqOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choose what to recompute so that the step's peak meets a budget at the least extra time."""
    import holdover
    from holdover.cli.model_spec import load
    from holdover.memory.on_card import place_of
    from holdover.planning.on_card import budget_kind_of
    from holdover.report.plan_view import plan_view
    from holdover.units import parse_budget

    parse_budget(budget)
    add_devices(devices)
    budget_kind_of(budget_kind, place_of(device).card)  # what is wrong is told before the work
    if output is not None:
        check_writable(output)
    with stage(f"building {model}"):
        step = load(model, batch=batch, seq=seq, meta=True)
    with stage("recording the step, pricing its ops, solving"):
        found = holdover.plan(
            step.model,
            step.args,
            step.kwargs,
            budget=int(budget) if budget.isdecimal() else budget,
            budget_kind=budget_kind,
            loss=step.loss,
            optimizer=named_optimizer(optimizer),
            precision=precision,
            device=device,
        )
    if output is not None:
        write_whole(output, found.to_json() + "\n")
    if as_json:
        show_json(json.loads(found.to_json()))
    else:
        show(plan_view(found))
        if output is not None:
            typer.echo(f"\nwritten to {output}")
