"""`holdover estimate MODEL`."""

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
    check_writable,
    fails_politely,
    named_optimizer,
    show,
    show_json,
    stage,
)


@fails_politely
def estimate(
    model: ModelArgument,
    optimizer: OptimizerOption = "adamw",
    precision: PrecisionOption = None,
    device: DeviceOption = None,
    devices: DevicesOption = None,
    batch: BatchOption = 8,
    seq: SeqOption = None,
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
    from holdover.cli.model_spec import load
    from holdover.errors import DeviceError
    from holdover.memory.on_card import place_of
    from holdover.report.estimate_view import estimate_view

    add_devices(devices)
    place = place_of(device)  # a wrong name is told before the work
    if snapshot is not None:
        if place.card is None:
            raise DeviceError("--snapshot shows a card's allocator: name one by --device, such as h100-80gb")
        check_writable(snapshot)
    with stage(f"building {model}"):
        step = load(model, batch=batch, seq=seq, meta=True)
    with stage("recording the step"):
        found = holdover.estimate(
            step.model,
            step.args,
            step.kwargs,
            loss=step.loss,
            optimizer=named_optimizer(optimizer),
            precision=precision,
            device=device,
        )
    if snapshot is not None:
        found.save_snapshot(snapshot)
    if as_json:
        show_json(found.to_dict())
    else:
        show(estimate_view(found))
