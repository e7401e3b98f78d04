"""`holdover report MODEL -o report.html`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdover.cli.common import (
    JsonOption,
    ModelArgument,
    StepOptions,
    check_writable,
    fails_politely,
    show_json,
    stage,
    time_limit_option,
    with_step_options,
    write_whole,
)


@fails_politely
@with_step_options
def report(
    model: ModelArgument,
    *,
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
    options: StepOptions,
    sizes: Annotated[
        bool, typer.Option("--sizes/--no-sizes", help="Record other batch sizes, lengths and depths too.")
    ] = True,
    time_limit: Annotated[
        float, time_limit_option("Seconds for the frontier, about: the page has the best plans by then.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Show the step as a page: weights beside activations, memory over time, the frontier, each tensor's life."""
    from holdover.report.html.page import render_page
    from holdover.report.html.work import Request, page_for
    from holdover.units import parse_budget

    if budget is not None:
        parse_budget(budget)
    options.checked()
    request = Request(budget=budget, sizes=sizes, time_limit=time_limit, **options.keywords)
    check_writable(output)
    step = options.build(model)
    made = page_for(step.model, step.args, step.kwargs, step.loss, request, stage)
    if as_json:
        show_json(made)
        return
    write_whole(output, render_page(made))
    typer.echo(f"written to {output}")
