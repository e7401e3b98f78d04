"""`holdover report MODEL -o report.html`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdover.cli.common import (
    BatchOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    OptimizerOption,
    PrecisionOption,
    SeqOption,
    check_writable,
    fails_politely,
    named_optimizer,
    show_json,
    stage,
    write_whole,
)


@fails_politely
def report(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="The page, one file that opens from disk.")] = Path(
        "report.html"
    ),
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="The plan that the page opens with: 24GiB, 60% of the step's own peak, or min.",
            show_default="70%, or min where that cannot be met",
        ),
    ] = None,
    optimizer: OptimizerOption = "adamw",
    precision: PrecisionOption = None,
    device: DeviceOption = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    sizes: Annotated[
        bool, typer.Option("--sizes/--no-sizes", help="Record other batch sizes, lengths and depths too.")
    ] = True,
    time_limit: Annotated[float, typer.Option("--time-limit", min=1, help="Seconds for the frontier, about.")] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Show the step as a page: weights beside activations, memory over time, the frontier, each tensor's life."""
    from holdover.cli.model_spec import load
    from holdover.memory.on_card import place_of
    from holdover.report.html.page import render_page
    from holdover.report.html.work import Request, page_for
    from holdover.trace.step import check_precision
    from holdover.units import parse_budget

    if budget is not None:
        parse_budget(budget)
    request = Request(
        budget=budget, optimizer=named_optimizer(optimizer), precision=precision, device=device, sizes=sizes,
        time_limit=time_limit,
    )  # fmt: skip
    place_of(device)  # what is wrong is told before the work
    check_precision(precision)
    check_writable(output)
    with stage(f"building {model}"):
        step = load(model, batch=batch, seq=seq, meta=True)
    made = page_for(step.model, step.args, step.kwargs, step.loss, request, stage)
    if as_json:
        show_json(made)
        return
    write_whole(output, render_page(made))
    typer.echo(f"written to {output}")
