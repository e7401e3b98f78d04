"""`holdover estimate MODEL`."""

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
    show,
    show_json,
    stage,
    with_step_options,
)


@fails_politely
@with_step_options
def estimate(
    model: ModelArgument,
    *,
    options: StepOptions,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            "--snapshot",
            help="Write a memory snapshot for https://pytorch.org/memory_viz to this file (with --device CARD).",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell what a training step will hold in memory, before it runs."""
    import holdover
    from holdover.errors import DeviceError
    from holdover.report.estimate_view import estimate_view

    place = options.checked()
    if snapshot is not None:
        if place.card is None:
            raise DeviceError("--snapshot shows a card's allocator: name one by --device, such as h100-80gb")
        check_writable(snapshot)
    step = options.build(model)
    with stage("recording the step"):
        found = holdover.estimate(
            step.model,
            step.args,
            step.kwargs,
            loss=step.loss,
            **options.keywords,
        )
    if snapshot is not None:
        found.save_snapshot(snapshot)
    if as_json:
        show_json(found.to_dict())
    else:
        show(estimate_view(found))
