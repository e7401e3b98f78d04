"""`holdover plan` and `holdover verify`, run as processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from .conftest import Run


def test_plan_then_verify(run: Run, factories: Path, tmp_path: Path) -> None:
    model = f"{factories}:make"
    done = run("plan", model, "--budget", "80%", "-o", "plan.json", "--optimizer", "sgd")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan for Sequential  (float32[2048, 64])  SGD")
    assert done.stdout.endswith("written to plan.json\n")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["predicted_peak_bytes"] <= plan["budget_bytes"] < plan["unplanned_peak_bytes"]
    done = run("verify", model, "--plan", "plan.json", "--json")  # with the plan's own optimizer
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["holds"]
    assert found["gradients_equal"]
    assert found["predicted_peak_bytes"] == plan["predicted_peak_bytes"]
    plan["predicted_peak_bytes"] //= 2  # a promise that nothing keeps
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = run("verify", model, "--plan", "plan.json", "--optimizer", "sgd")
    assert done.returncode == 1
    assert done.stdout.rstrip().endswith("the plan does NOT hold")
    done = run("verify", f"{factories}:other", "--plan", "plan.json")
    assert done.returncode == 2
    assert "made for another model" in done.stderr
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "optimizer": "Muon"}))
    done = run("verify", model, "--plan", "plan.json")
    assert done.returncode == 2
    assert "the plan counts the optimizer Muon, which was made in Python and is not known by name here" in done.stderr
    assert "building" not in done.stderr


def test_plan_prints_json(run: Run, factories: Path) -> None:
    done = run("plan", f"{factories}:make", "--budget", "min", "--json", "--optimizer", "none")
    assert done.returncode == 0
    plan = json.loads(done.stdout)
    assert plan["predicted_peak_bytes"] == plan["floor_bytes"]


def test_verify_plans_for_itself(run: Run, factories: Path) -> None:
    done = run("verify", f"{factories}:make", "--budget", "min", "--optimizer", "none")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("the plan holds")


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("16gb?", "cannot read '16gb?' as a size"),
        ("120%", "share of the step's own peak"),
        ("0", "a budget of 0 bytes makes no sense"),
        ("1KiB", "cannot be met"),
        (
            "70",
            "'70' has no unit, and would be 70 bytes: write 70MiB or 70GiB, or 70B if bytes are meant. A budget may",
        ),
    ],
)
def test_bad_budgets_are_explained(run: Run, factories: Path, budget: str, said: str) -> None:
    done = run("plan", f"{factories}:make", "--budget", budget)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr


def test_output_that_cannot_be_written_is_told_before_the_work(run: Run, factories: Path, tmp_path: Path) -> None:
    done = run("plan", f"{factories}:make", "--budget", "min", "-o", "nowhere/plan.json")
    assert done.returncode == 2
    assert "cannot write nowhere/plan.json: No such file or directory" in done.stderr
    assert "recording" not in done.stderr
    done = run("plan", f"{factories}:make", "--budget", "min", "-o", tmp_path)
    assert done.returncode == 2
    assert "is a directory" in done.stderr


def test_a_file_that_is_there_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import holdover
    from holdover.cli.common import write_whole

    target = tmp_path / "plan.json"
    target.write_text("precious")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(holdover.HoldoverError, match=r"cannot write .*: No space left on device"):
            write_whole(target, "new")
    assert target.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [target]
    write_whole(target, "new")
    assert target.read_text() == "new"


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), ("no json", "is not a plan"), ("{}", "is not a plan"), ('{"schema_version": 99}', "99")],
)
def test_files_that_are_no_plans_are_explained(
    run: Run, factories: Path, tmp_path: Path, content: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    done = run("verify", f"{factories}:other", "--plan", "plan.json")
    assert done.returncode == 2
    assert said in done.stderr


def test_verify_wants_one_of_plan_and_budget(run: Run, factories: Path) -> None:
    for arguments in ((), ("--plan", "plan.json", "--budget", "min")):
        done = run("verify", f"{factories}:other", *arguments)
        assert done.returncode == 2
        assert "give either --plan FILE or --budget SIZE" in done.stderr
