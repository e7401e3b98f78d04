"""The application that the commands are registered with."""

from __future__ import annotations

from typing import Annotated

import typer

import holdover
from holdover.cli.advise import advise
from holdover.cli.closed_form import closed_form
from holdover.cli.demo import demo
from holdover.cli.devices import devices
from holdover.cli.estimate import estimate
from holdover.cli.explain import explain
from holdover.cli.figures import figures
from holdover.cli.frontier import frontier
from holdover.cli.plan import plan
from holdover.cli.report import report
from holdover.cli.serve import serve
from holdover.cli.verify import verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fit the training step of any PyTorch model into a byte budget: estimate its memory, plan what to recompute, "
    "prove that the result is exact.",
    epilog="Exit status: 0 fine, 1 the promise does not hold, 2 bad input.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import torch

        typer.echo(f"holdover {holdover.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and stop.")
    ] = False,
) -> None:
    pass


for command in (estimate, plan, frontier, advise, explain, report, serve, verify, closed_form, devices, figures, demo):
    app.command()(command)
