"""The page as a file: it carries its data, asks for nothing, stays small, and nothing in a model's name is run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Run, cache, factories, run  # noqa: F401
from tests.report.conftest import Made
from torch import nn

import holdover
from holdover.errors import HoldoverError, PlanError
from holdover.planning.plan import Choice
from holdover.report.html.data import page_data
from holdover.report.html.page import encode, read_page, render_page, without
from holdover.trace.graph import Phase
from holdover.units import format_bytes


def small() -> tuple[nn.Module, tuple[Any, ...]]:
    layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    return nn.Sequential(*layers), (torch.ones(512, 16),)


def test_a_page_gives_its_data_back(made: Made) -> None:
    assert read_page(made.path.read_text()) == json.loads(json.dumps(made.data))
    assert encode(made.data) == encode(made.data)


def test_other_text_is_no_page() -> None:
    with pytest.raises(HoldoverError, match="it carries no data"):
        read_page("<html></html>")


def test_a_page_refers_to_nothing_outside_it(made: Made) -> None:
    page = made.path.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page)
    assert set(re.findall(r"https?://[^\s\"'<>]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


def test_a_hundred_layers_stay_below_a_megabyte() -> None:
    layers = [nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 8)) for _ in range(100)]
    estimate = holdover.estimate(nn.Sequential(*layers), (torch.ones(16, 8),))
    trace = estimate.trace
    dropped = [
        Choice(trace.calls[op.call].key, op.index, op.name, "recompute")
        for op in trace.ops
        if op.phase is Phase.FORWARD
        and op.name in ("aten.gelu.default", "aten.mul.Tensor", "aten.native_dropout.default")
    ]
    plain = without(holdover.plan(*small(), budget="min", time_limit=1))
    plans = [replace(plain, choices=tuple(dropped[: 5 * k])) for k in range(25)]
    data = page_data(trace, plans, estimate=estimate)
    assert len(data["plans"][-1]["spans"]) > 100
    assert len(render_page(data).encode()) < 2**18  # a megabyte is for those of four times as many plans and ops


def test_names_are_text_and_never_code() -> None:
    model, args = small()
    evil = type("</script><script>alert(1)</script>", (nn.Sequential,), {})(model)
    page = holdover.estimate(evil, args).to_html()
    assert "<script>alert(1)" not in page
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page


def test_an_estimate_is_a_page_and_a_fragment() -> None:
    model, args = small()
    estimate = holdover.estimate(model, args)
    assert read_page(estimate.to_html())["peak_bytes"] == estimate.peak_bytes
    fragment = estimate._repr_html_()
    assert f'<strong data-bytes="{estimate.peak_bytes}">{format_bytes(estimate.peak_bytes)}</strong>' in fragment
    assert "<script" not in fragment
    assert "<style" not in fragment


def test_a_plan_is_a_page_and_a_fragment() -> None:
    model, args = small()
    plan = holdover.plan(model, args, budget="min", time_limit=5)
    page = plan.to_html()
    assert plan.choices
    assert page.count("<td>recompute</td>") == len(plan.choices)
    assert f'data-bytes="{plan.predicted_peak_bytes}"' in page
    assert f'data-bytes="{plan.unplanned_peak_bytes}"' in page
    assert f'<strong data-bytes="{plan.predicted_peak_bytes}">' in plan._repr_html_()
    whole = read_page(plan.to_html(holdover.estimate(model, args)))
    assert [p["peak_bytes"] for p in whole["plans"]] == [plan.unplanned_peak_bytes, plan.predicted_peak_bytes]
    assert whole["plans"][1]["peak"]["bytes"] == plan.predicted_peak_bytes


def test_a_plan_and_an_estimate_of_another_step_do_not_go_together() -> None:
    model, args = small()
    plan = holdover.plan(model, args, budget="min", time_limit=5)
    with pytest.raises(PlanError, match=r"The estimate is of Sequential with .*\[5, 16\].*, the plan for Sequential"):
        plan.to_html(holdover.estimate(model, (torch.ones(5, 16),)))


def test_the_command_writes_a_page(run: Run, factories: Path, tmp_path: Path) -> None:  # noqa: F811
    done = run(
        "report", f"{factories}:make", "-o", "out.html", "--optimizer", "none", "--budget", "80%", "--time-limit", 3
    )
    assert (done.returncode, done.stdout) == (0, "written to out.html\n"), done.stderr
    data = read_page((tmp_path / "out.html").read_text())
    chosen = data["plans"][data["chosen"]]
    assert chosen["peak_bytes"] <= 0.8 * data["peak_bytes"] < data["plans"][data["chosen"] - 1]["peak_bytes"]
    assert [axis["name"] for axis in data["scaling"]["axes"]] == ["batch"]


def test_the_command_says_what_is_wrong(run: Run, factories: Path, tmp_path: Path) -> None:  # noqa: F811
    for arguments, said in [
        (("-o", "nowhere/out.html"), "cannot write nowhere/out.html: No such file or directory"),
        (("--device", "abacus"), "unknown card 'abacus'"),
    ]:
        done = run("report", f"{factories}:other", *arguments)
        assert done.returncode == 2
        assert said in done.stderr
    assert list(tmp_path.glob("*.html")) == []
