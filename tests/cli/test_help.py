"""Every command's help ends with an example, and the examples can be read by the commands that they are of."""

from __future__ import annotations

import shlex

import typer

from holdover.cli.app import EXAMPLES, app


def test_every_command_has_an_example_that_it_understands() -> None:
    group = typer.main.get_command(app)
    context = group.make_context("holdover", [], resilient_parsing=True)
    names = group.list_commands(context)  # type: ignore[attr-defined]
    assert [example.split()[0] for example in EXAMPLES.values()] == names
    for name, example in zip(names, EXAMPLES.values(), strict=True):
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        assert command.epilog == f"Example: holdover {example}"
        command.make_context(name, shlex.split(example)[1:], parent=context)  # raises what a wrong option would
