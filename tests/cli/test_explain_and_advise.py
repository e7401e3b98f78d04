"""`holdover explain`, `frontier`, `advise` and `figures`, run as processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Run


def test_explain_tells_the_story_of_a_tensor_under_a_plan_of_its_own_model(run: Run, factories: Path) -> None:
    done = run("plan", f"{factories}:make", "--budget", "min", "-o", "plan.json", "--optimizer", "none")
    assert done.returncode == 0, done.stderr
    done = run("explain", f"{factories}:make", "1:gelu", "--plan", "plan.json", "--optimizer", "none")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1:gelu  in Sequential  (float32[2048, 64])")
    for said in ("saved because backward reads it", "its life over the step", "if it were dropped", "the plan: drop"):
        assert said in done.stdout
    done = run("explain", f"{factories}:other", "0", "--plan", "plan.json", "--optimizer", "none")
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "this plan was made for another model: a Sequential, and this is one of that name that consists of" in said
    assert "7 modules of the planned model are not here: 2 (Linear), 3 (GELU), 4 (Linear) and 4 more" in said
    assert "1 module is of another class: 1 (planned GELU, here Tanh)" in said
    assert "recording" not in said


def test_explain_as_json_with_a_plan_for_a_budget(run: Run, factories: Path) -> None:
    done = run("explain", f"{factories}:make", "1", "--budget", "min", "--optimizer", "none", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (explanation,) = found["explanations"]
    assert explanation["life"]["nbytes"] == 2048 * 64 * 4
    assert explanation["alone"]["peak_before_bytes"] == found["unplanned_peak_bytes"]
    assert explanation["planned"]["fate"] == "dropped"
    done = run("explain", f"{factories}:make", "1", "--plan", "plan.json", "--budget", "min")
    assert done.returncode == 2
    assert "give --plan FILE or --budget SIZE, not both" in done.stderr


def test_explain_answers_unknown_names_with_near_ones(run: Run, factories: Path) -> None:
    done = run("explain", f"{factories}:make", "1:glu", "--optimizer", "none")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "1 has no op 'glu'; its ops: 1:0 (aten.gelu.default)" in done.stderr


def test_frontier_as_json_and_a_figure(run: Run, factories: Path, tmp_path: Path) -> None:
    options = ("--optimizer", "none", "--time-limit", "3")
    done = run("frontier", f"{factories}:make", "--png", "frontier.png", "--json", *options)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    peaks = [plan["predicted_peak_bytes"] for plan in json.loads(done.stdout)["plans"]]
    assert len(peaks) > 1
    assert peaks == sorted(peaks, reverse=True)
    done = run("frontier", f"{factories}:make", "--png", "frontier.bmp2", *options)
    assert done.returncode == 2
    assert "its ending must be one of" in done.stderr
    assert "recording" not in done.stderr


def test_advise_exits_by_whether_anything_fits(run: Run, factories: Path) -> None:
    options = ("--optimizer", "none", "--time-limit", "2")
    done = run("advise", f"{factories}:make", "--memory", "1GiB", *options)
    assert done.returncode == 0, done.stderr
    assert "It fits as it is: store everything, 0 % extra time" in done.stdout
    assert "the tighter constraint is time" in done.stdout
    done = run("advise", f"{factories}:make", "--memory", "10kB", "--json", *options)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert not found["fits"]
    assert found["options"] == []
    assert found["growth"]["largest"] == 0


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ("much", "cannot read 'much' as a size"),
        ("0", "memory of 0 bytes makes no sense"),
        ("24", "'24' has no unit, and would be 24 bytes: write 24MiB or 24GiB, or 24B if bytes are meant"),
    ],
)
def test_bad_memory_is_explained(run: Run, factories: Path, memory: str, said: str) -> None:
    done = run("advise", f"{factories}:other", "--memory", memory)
    assert done.returncode == 2
    assert said in done.stderr


def test_figures_need_a_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("figures", "--out", "file/figures")
    assert done.returncode == 2
    assert "cannot make the directory file/figures" in done.stderr
