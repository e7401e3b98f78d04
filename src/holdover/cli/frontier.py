"""`holdover frontier MODEL`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from holdover.cli.common import (
    JsonOption,
    ModelArgument,
    StepOptions,
    check_writable,
    fails_politely,
    show,
    show_json,
    stage,
    time_limit_option,
    with_step_options,
)


@fails_politely
@with_step_options
def frontier(
    model: ModelArgument,
    *,
    png: Annotated[
        Path | None, typer.Option("--png", help="Also draw it to this file (.png, .svg, .pdf).", show_default=False)
    ] = None,
    options: StepOptions,
    time_limit: Annotated[
        float, time_limit_option("Seconds that the solver may take, about: the best plans by then are listed.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """List the plans between the step as it is and its lowest peak: what each byte costs in time."""
    import holdover

    options.checked()
    if png is not None:
        from holdover.report.figures.canvas import check_drawable

        check_writable(png)
        check_drawable(png)
    step = options.build(model)
    with stage("recording the step, timing its ops, solving"):
        found = holdover.frontier(
            step.model,
            step.args,
            step.kwargs,
            loss=step.loss,
            **options.keywords,
            time_limit=time_limit,
        )
    if png is not None:
        from holdover.report.figures.frontier import draw_frontier

        draw_frontier(found, png)
    if as_json:
        show_json(json.loads(found.to_json()))
    else:
        from holdover.report.frontier_view import frontier_view

        show(frontier_view(found))
        if png is not None:
            typer.echo(f"\ndrew {png}")
