"""`holdover advise MODEL --memory SIZE`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from holdover.cli.common import (
    BROKEN_PROMISE,
    JsonOption,
    ModelArgument,
    StepOptions,
    fails_politely,
    show,
    show_json,
    time_limit_option,
    with_step_options,
)


@fails_politely
@with_step_options
def advise(
    model: ModelArgument,
    *,
    memory: Annotated[
        str, typer.Option("--memory", help="What there is for the step: 24GiB; on a card, for the whole process.")
    ],
    options: StepOptions,
    time_limit: Annotated[
        float, time_limit_option("Seconds that the solver may take for each plan, about; there may be ten of them.")
    ] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Say whether memory or time is the tighter constraint, and what follows, with what each way costs."""
    from holdover.planning.advise import advice_for
    from holdover.planning.batch import Subject
    from holdover.report.advice_view import advice_view
    from holdover.units import parse_bytes

    memory_bytes = parse_bytes(memory)
    options.checked()
    step = options.build(model)
    subject = Subject(step.model, step.args, step.kwargs, step.loss, **options.keywords)
    began = time.perf_counter()

    def say(what: str) -> None:
        typer.echo(f"{time.perf_counter() - began:6.1f} s  {what}", err=True)

    found = advice_for(subject, memory_bytes, time_limit=time_limit, say=say)
    if as_json:
        show_json(found.to_dict())
    else:
        show(advice_view(found))
    if not found.fits:
        raise typer.Exit(BROKEN_PROMISE)
