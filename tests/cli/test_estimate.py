"""`holdover estimate`, and what all commands share, run as processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Run


def test_it_prints_the_estimate(run: Run, factories: Path) -> None:
    done = run("estimate", f"{factories}:make", "--optimizer", "sgd")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "Sequential  (float32[2048, 64])  SGD, as given, cpu"
    assert lines[1].startswith("peak ")
    assert "recording the step" in done.stderr
    assert "so does building" in done.stderr  # a model's own printing keeps out of the way of the output


def test_json_is_all_there_is_on_stdout(run: Run, factories: Path) -> None:
    done = run("estimate", f"{factories}:make", "--json", "--optimizer", "none", "--precision", "bf16-mixed")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert sum(found["peak"]["parts"].values()) == found["peak_bytes"]
    assert (found["optimizer"], found["precision"]) == ("", "bf16-mixed")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("nowhere.py:make", "there is no file nowhere.py"),
        (
            "{file}:build",
            "has no 'build': its functions are bad_args, exits, make, no_loss, no_model, other, raises, step_fails",
        ),
        ("{file}:not_callable", "'not_callable' of {file} is a int, not a function that makes a model"),
        ("{file}:raises", "raises() of {file} raised KeyError: 'no such thing' (line 18)"),
        ("{file}:exits", "exits() of {file} raised SystemExit: 7"),
        ("{file}:no_model", "no_model() of {file} must return (model, args, kwargs, loss), not int"),
        ("{file}:bad_args", "args must be a tuple such as (x,), not Tensor"),
        ("{file}:no_loss", "requires a gradient"),
        ("{file}:step_fails", "mat1 and mat2 shapes cannot be multiplied"),
        ("gibberish", "cannot read MODEL 'gibberish': write path/to/file.py:factory, transformers:CONFIG.json"),
        (".:make", "there is no file .: it is a directory"),
    ],
)
def test_bad_models_are_explained(run: Run, factories: Path, model: str, said: str) -> None:
    done = run("estimate", model.format(file=factories))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error: " in done.stderr
    assert said.format(file=factories) in done.stderr.replace("\n", " ")


def test_a_file_that_cannot_be_imported_is_explained(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import torch\n1 / 0\n")
    done = run("estimate", "broken.py:make")
    assert done.returncode == 2
    assert "importing broken.py raised ZeroDivisionError: division by zero (line 2)" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--optimizer", "newton"),
        ("--precision", "12-bit"),
        ("--device", "abacus"),
    ],
)
def test_bad_options_are_explained(run: Run, factories: Path, arguments: tuple[str, str]) -> None:
    done = run("estimate", f"{factories}:other", *arguments)
    assert done.returncode == 2
    assert f"'{arguments[1]}'" in done.stderr


def test_versions(run: Run) -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("holdover 0.")
    assert "torch 2." in done.stdout


def test_the_surface_grows_on_purpose_only(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    commands = [line.split()[1] for line in done.stdout.split("Commands")[1].splitlines() if line.startswith("│ ")]
    assert [c for c in commands if c in ("estimate", "plan", "verify", "demo")] == [
        "estimate",
        "plan",
        "verify",
        "demo",
    ]


def test_an_unknown_command_is_bad_input(run: Run) -> None:
    assert run("divine").returncode == 2
