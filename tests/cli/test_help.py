"""Every command's help ends with an example, and the examples can be read by the commands that they are of."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest
import typer

from holdover.cli.app import EXAMPLES, app
from holdover.closed_form.presets import PRESETS
from holdover.closed_form.recompute import MODULES
from holdover.closed_form.settings import CHOICES
from holdover.trace.step import OPTIMIZERS, PRECISIONS


def test_every_command_has_an_example_that_it_understands() -> None:
    group = typer.main.get_command(app)
    context = group.make_context("holdover", [], resilient_parsing=True)
    names = group.list_commands(context)  # type: ignore[attr-defined]
    assert [example.split()[0] for example in EXAMPLES.values()] == names
    for name, example in zip(names, EXAMPLES.values(), strict=True):
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        assert command.epilog == f"Example: holdover {example}"
        command.make_context(name, shlex.split(example)[1:], parent=context)  # raises what a wrong option would


def parameters() -> Iterator[tuple[str, click.Parameter]]:
    group = typer.main.get_command(app)
    context = group.make_context("holdover", [], resilient_parsing=True)
    for name in group.list_commands(context):  # type: ignore[attr-defined]
        for parameter in group.get_command(context, name).params:  # type: ignore[attr-defined]
            yield name, parameter


def help_of(command: str, option: str) -> str:
    (found,) = (str(p.help) for name, p in parameters() if name == command and option in p.opts)
    return found


@pytest.mark.parametrize("command", ["estimate", "plan", "frontier", "advise", "explain", "report", "verify"])
def test_precisions_and_optimizers_are_listed_as_they_are_accepted(command: str) -> None:
    assert help_of(command, "--precision") == f"{', '.join(PRECISIONS)}."
    assert "16-true" in PRECISIONS
    assert help_of(command, "--optimizer").startswith(f"{', '.join(sorted(OPTIMIZERS))}; none for")


@pytest.mark.parametrize("setting", CHOICES)
def test_the_closed_forms_choices_are_listed_as_they_are_accepted(setting: str) -> None:
    option = {"method": "--recompute-method"}.get(setting, f"--{setting}")
    assert help_of("closed-form", option).endswith(f"{', '.join(c for c in CHOICES[setting] if c)}.")
    assert ", ".join(MODULES) in help_of("closed-form", "--recompute-modules")
    assert ", ".join(PRESETS) in help_of("closed-form", "model")


@pytest.mark.parametrize(
    ("command", "seconds"),
    [("plan", 60), ("explain", 60), ("verify", 60), ("frontier", 60), ("report", 60), ("advise", 30), ("serve", 30)],
)
def test_what_plans_has_a_time_limit(command: str, seconds: float) -> None:
    (option,) = (p for name, p in parameters() if name == command and "--time-limit" in p.opts)
    assert option.default == seconds


def test_every_option_is_explained() -> None:
    assert [(name, p.name) for name, p in parameters() if not getattr(p, "help", None)] == []
