"""The application that the commands are registered with."""

from __future__ import annotations

from collections.abc import Callable
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
    epilog="Exit status: 0 fine; 1 the answer is no: a promise does not hold (verify, demo), or no way fits in the "
    "memory (advise); 2 nothing could be done: bad input, a step that fails, a budget or memory that no plan or layout "
    "meets.",
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


EXAMPLES: dict[Callable[..., None], str] = {
    estimate: "estimate train.py:make --device rtx4090-24gb --precision bf16-mixed",
    plan: "plan train.py:make --budget 70% -o plan.json",
    frontier: "frontier train.py:make --png frontier.svg",
    advise: "advise train.py:make --memory 24GiB --device rtx4090-24gb",
    explain: "explain train.py:make blocks.0.mlp:gelu --budget 70%",
    report: "report train.py:make -o report.html",
    serve: "serve train.py:make timm:resnet50",
    verify: "verify train.py:make --plan plan.json",
    closed_form: "closed-form llama3-70b --tp 8 --pp 4 --dp 2 --zero 1 --sequence-parallel --recompute optimal",
    devices: "devices --devices cards.json",
    figures: "figures --out figures",
    demo: "demo --steps 12",
}
"""Every command, in the order of the help, with an example for its own."""

for command, example in EXAMPLES.items():
    app.command(epilog=f"Example: holdover {example}")(command)
