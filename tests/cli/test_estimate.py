"""`holdover estimate`, and what all commands share, run as processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import holdover
from holdover.cli.model_spec import load

from .conftest import Run

ROOT = Path(__file__).parent.parent.parent


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
        ("factorys.py:make", "there is no file factorys.py; near it: factories.py"),
        ("{file}", "MODEL '{file}' names no function: write {file}:FUNCTION; its functions are bad_args, exits, make"),
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
    ("option", "value", "said"),
    [
        (
            "--optimizer",
            "muon",
            "Unknown optimizer 'muon'. Known names: adafactor, adagrad, adam, adamw, rmsprop, sgd;",
        ),
        ("--precision", "12-bit", "Unknown precision '12-bit'. Known: 32-true, bf16-mixed"),
        ("--device", "abacus", "unknown card 'abacus'; the table has t4-16gb"),
        (
            "--device",
            "mps",
            "device='mps' is none that steps can be recorded for: known are 'cpu', the CUDA devices of",
        ),
    ],
)
def test_bad_options_are_explained_before_the_work(
    run: Run, factories: Path, option: str, value: str, said: str
) -> None:
    done = run("estimate", f"{factories}:other", option, value)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert "building" not in done.stderr


SIZED = """
import torch

def sized(width=3, *, batch=2):
    return torch.nn.Linear(width, 1), (torch.ones(batch, width),)

def any_size(**sizes):
    return torch.nn.Linear(3, 1), (torch.ones(sizes.get("batch", 5), sizes.get("seq", 7), 3),)

def fixed():
    return sized()
"""


def test_the_factory_that_the_readme_shows_works(run: Run, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    [shown] = [block for block in blocks if "def make(" in block]
    (tmp_path / "train.py").write_text(shown)
    done = run("estimate", "train.py:make", "--batch", "1024", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["inputs"] == "(float32[1024, 64])"
    done = run("explain", "train.py:make", "3.1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("factory", "sizes", "shape"),
    [
        ("sized", {}, (2, 3)),
        ("sized", {"batch": 9}, (9, 3)),
        ("any_size", {"batch": 4, "seq": 6}, (4, 6, 3)),
        ("fixed", {}, (2, 3)),
    ],
)
def test_sizes_reach_a_factory_that_has_parameters_for_them(
    tmp_path: Path, factory: str, sizes: dict[str, int], shape: tuple[int, ...]
) -> None:
    path = tmp_path / "sized_factories.py"
    path.write_text(SIZED)
    assert load(f"{path}:{factory}", **sizes, meta=True).args[0].shape == shape  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("factory", "sizes", "said"),
    [
        (
            "sized",
            {"seq": 4},
            "--seq 4 does not reach sized() of {path}, which has no parameter 'seq', only width, batch.",
        ),
        (
            "fixed",
            {"batch": 4},
            "--batch 4 does not reach fixed() of {path}, which has no parameter 'batch', nor any other",
        ),
    ],
)
def test_sizes_that_would_not_reach_the_factory_are_refused(
    tmp_path: Path, factory: str, sizes: dict[str, int], said: str
) -> None:
    path = tmp_path / "sized_factories.py"
    path.write_text(SIZED)
    with pytest.raises(holdover.ModelSpecError) as caught:
        load(f"{path}:{factory}", **sizes, meta=True)  # type: ignore[arg-type]
    assert said.format(path=path) in str(caught.value)
    assert "Leave it out, and the factory decides; or give it that parameter, as in def make(" in str(caught.value)


def test_a_batch_that_the_factory_does_not_take_is_bad_input(run: Run, factories: Path) -> None:
    for command in (("estimate",), ("plan", "--budget", "min"), ("verify", "--budget", "min")):
        done = run(command[0], f"{factories}:other", *command[1:], "--batch", "4")
        assert done.returncode == 2
        assert "--batch 4 does not reach other()" in done.stderr


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
