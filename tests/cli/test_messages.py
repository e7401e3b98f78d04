"""What somebody new may get wrong, and what is said: one message, status 2, before the work where that can be."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from holdover.cli.app import app

MODELS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(7, 4)

    def forward(self, x):
        return self.down(self.up(x))

class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x))

X = (torch.ones(2, 4),)

def ok(): return nn.Sequential(nn.Linear(4, 4), nn.GELU()), X
def needs(width, depth=2): return nn.Linear(width, depth)
def nothing(): nn.Linear(4, 4)
def a_class(): return nn.Linear
def five(): return nn.Linear(4, 4), X, {}, None, 5
def integers(): return Returns(lambda y: y.argmax(-1)), X
def tuples(): return Returns(lambda y: (y, y.argmax(-1), None)), X
def text(): return Returns(lambda y: "hello"), X
def no_output(): return Returns(lambda y: None), X
def no_args(): return nn.Linear(4, 4)
def float_loss(): return nn.Linear(4, 4), X, {}, lambda y: 3.0
def vector_loss(): return nn.Linear(4, 4), X, {}, lambda y: y
def bad_loss(): return nn.Linear(4, 4), X, {}, lambda y: y.no_such_thing
def frozen(): return nn.Linear(4, 4).requires_grad_(False), X
def wrong_shape(): return nn.ModuleDict({"a": Block()})["a"], X
"""


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "lacks.py").write_text("import no_such_module\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "other.json").write_text('{"a": 1}')


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.output
    return done


def refused(*arguments: str) -> str:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    return " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("mine.py:needs", "'needs' of mine.py is a function that needs arguments (width), and it is called without"),
        ("mine.py:Returns", "'Returns' of mine.py is a class that needs arguments (function), and it is"),
        ("mine.py:nothing", "not NoneType: all but the model, a torch.nn.Module, may be left out; is its return"),
        ("mine.py:a_class", "Linear is a class, call it"),
        ("mine.py:five", "not (Linear, tuple, dict, NoneType, int): all but the model"),
        ("mine.py:oks", "mine.py has no 'oks': its functions are a_class, bad_loss, five"),
        ("mine:ok", "there is no file mine; near it: mine.py, as in mine.py:ok"),
        ("mines.py:ok", "there is no file mines.py; near it: mine.py"),
        ("hub:gpt2", "there is no file hub. A MODEL is path/to/file.py:factory, transformers:CONFIG.json"),
        ("folder:ok", "there is no file folder: it is a directory"),
        ("timm:", "MODEL 'timm:' names no model: write for example timm:resnet18"),
        ("", "cannot read MODEL '': write path/to/file.py:factory"),
        ("broken.py:f", "importing broken.py raised SyntaxError: invalid syntax (broken.py, line 1)"),
        ("lacks.py:f", "importing lacks.py raised ModuleNotFoundError: No module named 'no_such_module' (line 1)"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_made(model: str, said: str) -> None:
    assert said in refused("estimate", model)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("integers", "The model returned a tensor of int64 without a floating tensor that requires a gradient"),
        ("text", "The model returned str without a floating tensor"),
        ("no_output", "The model returned NoneType without a floating tensor"),
        ("no_args", "Linear.forward() missing 1 required positional argument: 'input'. It fails in forward, in the "
         "model itself (Linear). The model was called without arguments: they are args= and kwargs=, or the second"),
        ("float_loss", "The loss function returned float; a scalar tensor is needed."),
        ("vector_loss", "The loss has shape (2, 4); a scalar is needed"),
        ("bad_loss", "It fails in the loss, at line 35 of mine.py: def bad_loss(): return nn.Linear(4, 4), X, {}, l"),
        ("frozen", "No parameter of the model requires a gradient, so that an optimizer has nothing to train"),
        ("wrong_shape", "mat1 and mat2 shapes cannot be multiplied (2x8 and 7x4). It fails in forward, in down "
         "(Linear), at line 11 of mine.py: return self.down(self.up(x))."),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_recorded(model: str, said: str) -> None:
    assert said in refused("estimate", f"mine.py:{model}")


def test_a_tuple_of_outputs_is_summed_where_it_can_be() -> None:
    done = run("estimate", "mine.py:tuples", "--optimizer", "none")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("16gb?", "cannot read '16gb?' as a size"),
        ("0", "a budget of 0 bytes makes no sense"),
        ("-1GiB", "cannot read '-1GiB' as a size"),
        ("nan", "cannot read 'nan' as a size"),
        ("", "cannot read '' as a size"),
        ("110%", "it is a share of the step's own peak, above 0% and at most 100%, which is the step as it is"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "verify", "report", "explain"])
def test_budgets_that_are_none_are_told_before_the_work(command: str, budget: str, said: str) -> None:
    more = ("0",) if command == "explain" else ()
    told = refused(command, "mine.py:ok", *more, "--budget", budget)
    assert said in told
    assert "building" not in told


@pytest.mark.parametrize(
    "command",
    [("plan", "mine.py:ok", "--budget", "min", "-o"), ("report", "mine.py:ok", "-o"),
     ("frontier", "mine.py:ok", "--png"),
     ("estimate", "mine.py:ok", "--device", "t4-16gb", "--snapshot"), ("closed-form", "llama3-8b", "--figure")],
    ids=["plan", "report", "frontier", "estimate", "closed-form"],
)  # fmt: skip
def test_files_that_cannot_be_written_are_told_before_the_work(command: tuple[str, ...]) -> None:
    told = refused(*command, "nowhere/out.png")
    assert (
        "cannot write nowhere/out.png: No such file or directory; there is no directory nowhere, make it first" in told
    )
    assert "cannot write folder: it is a directory; give the name of a file in it" in refused(*command, "folder")
    assert "building" not in told


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("nowhere.json", "The plan nowhere.json cannot be read: No such file or directory."),
        ("folder", "The plan folder cannot be read: Is a directory."),
        ("binary.json", "binary.json is not a plan: it is not text."),
        ("other.json", "other.json is not a plan: JSON as Plan.save writes it is needed."),
    ],
)
def test_plans_that_cannot_be_read(file: str, said: str) -> None:
    assert said in refused("verify", "mine.py:ok", "--plan", file)
    assert said in refused("explain", "mine.py:ok", "0", "--plan", file)


@pytest.mark.parametrize("command", ["plan", "verify", "frontier", "report", "explain", "advise"])
@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_time_limits_that_are_none(command: str, seconds: str) -> None:
    more = {
        "plan": ("--budget", "min"),
        "verify": ("--budget", "min"),
        "explain": ("0",),
        "advise": ("--memory", "1GiB"),
    }
    told = refused(command, "mine.py:ok", *more.get(command, ()), "--time-limit", seconds)
    assert "Invalid value for '--time-limit':" in told


@pytest.mark.parametrize("model", ["nowhere.py:make", "tim:resnet18", "mine.py"])
def test_the_server_does_not_start_with_models_that_cannot_be(model: str) -> None:
    assert "error: " in refused("serve", "mine.py:ok", model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--imbalance", "nan"), "--imbalance nan is no number"),
        (("--memory", "0"), "--memory of 0 bytes makes no sense"),
        (("--memory", "50%"), "cannot read '50%' as a size"),
        (("--head-dim", "-1"), "--head-dim -1: give a number above 0, or 0 for the model's own"),
        (("--layers", "-4"), "--layers -4: give a number above 0"),
        (("--compare", ""), "--compare names no setting: write settings and their values"),
        (("--recompute", "selective", "--recompute-modules", ","), "--recompute-modules names none: use some of core"),
        (("--offload", "nan"), "an offload share of nan is not between 0 and 1"),
        (("--step-time", "nan"), "Invalid value for '--step-time'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_settings_of_the_closed_form_that_cannot_be(options: tuple[str, ...], said: str) -> None:
    assert said in refused("closed-form", "llama3-8b", *options)


def test_configurations_that_are_none_are_told() -> None:
    assert 'other: it has no "model_type", so it is no config.json' in refused("closed-form", "other.json")
    assert "binary.json is not a readable config.json" in refused("closed-form", "binary.json")


def test_the_memory_that_is_given_decides_whether_a_layout_fits_and_small_models_have_figures() -> None:
    done = run("closed-form", "llama3-8b", "--dp", "8", "--zero", "3", "--memory", "10GiB")
    assert done.exit_code == 0
    assert "60.04 GiB of 10.00 GiB usable: does not fit." in done.stdout
    small = ("--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "100", "--seq", "128")
    done = run("closed-form", *small)
    weights = 2 * 100 * 64 + 2 * (4 * 64**2 + 3 * 64 * 256 + 2 * 64) + 64  # 8/3 of 64, rounded up to 256
    assert f"model: {weights:,} parameters on 1 GPU" in done.stdout
    assert "MiB per GPU" in done.stdout
