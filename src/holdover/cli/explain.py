"""`holdover explain MODEL TENSOR-OR-MODULE`."""

from __future__ import annotations

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
    fail,
    fails_politely,
    named_optimizer,
    show,
    show_json,
    stage,
)


@fails_politely
def explain(
    model: ModelArgument,
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
        str | None, typer.Option("--budget", help="Also tell what the plan for this budget does with it, and why.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="The same for a plan from a file.", show_default=False)
    ] = None,
    optimizer: OptimizerOption = "adamw",
    precision: PrecisionOption = None,
    device: DeviceOption = None,
    devices: DevicesOption = None,
    batch: BatchOption = 8,
    seq: SeqOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell why a tensor is held for backward, and what dropping it would save at the peak and cost."""
    from holdover.cli.model_spec import load
    from holdover.planning.explain import explain_of
    from holdover.planning.plan import Plan
    from holdover.planning.steps import recorded
    from holdover.report.explain_view import explain_view
    from holdover.units import parse_budget

    if budget is not None and plan is not None:
        fail("give --plan FILE or --budget SIZE, not both")
    add_devices(devices)
    wanted = parse_budget(int(budget) if budget.isdecimal() else budget) if budget is not None else None
    chosen = Plan.load(plan) if plan is not None else None
    with stage(f"building {model}"):
        step = load(model, batch=batch, seq=seq, meta=True)
    with stage("recording the step"):
        found = recorded(
            step.model, step.args, step.kwargs, loss=step.loss, optimizer=named_optimizer(optimizer),
            precision=precision, device=device,
        )  # fmt: skip
    if wanted is not None:
        with stage("planning"):
            chosen = found.plan(wanted)
    if chosen is not None and chosen.fingerprint != found.trace.fingerprint:
        fail(f"the plan was made for another model ({chosen.model}); plan again, or give --budget")
    with stage("timing its ops, simulating"):
        account = explain_of(found, target, plan=chosen)
    if as_json:
        show_json(account.to_dict())
    else:
        show(explain_view(account))
