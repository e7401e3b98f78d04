"""`holdover devices`, and cards of a user's own, run as processes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from .conftest import Run

OWN = {
    "name": "Lab 48GB", "capability": [8, 6], "usable_bytes": "47.49GiB", "bandwidth": 768e9,
    "rates": {"bf16": 155e12, "fp32": 38.7e12}, "context_bytes": ["200MiB", "1GiB"], "unconfirmed": ["bf16"],
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "cards.json"
    path.write_text(json.dumps(OWN))
    return path


def test_it_lists_every_card_on_one_line(run: Run) -> None:
    done = run("devices")
    assert done.returncode == 0
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert rows["h100-80gb"] == ["9.0", "79.1", "3.35", "989", "989", "494.5", "67", "63", "256-1454?", "32"]
    assert rows["t4-16gb"] == ["7.5", "14.56", "0.32?", "none", "65?", "none", "8.1?", "12?", "105-141", "8.125"]
    assert rows["mi300x-192gb"][0] == "AMD"
    assert "…" not in done.stdout
    assert "not confirmed by a source" in " ".join(done.stdout.split())


def test_json_has_the_source_of_every_figure(run: Run) -> None:
    cards = json.loads(run("devices", "--json").stdout)
    by_name = {card["name"]: card for card in cards}
    assert by_name["h100-80gb"]["sources"]["bf16"] == "vendor's data sheet, dense"
    assert by_name["h100-80gb"]["sources"]["context_bytes"] == "unconfirmed"
    for card in cards:
        assert set(card["sources"]) == {
            "usable_bytes", "bandwidth", "host_link", "peer_link", "context_bytes", "cublas_bytes", *card["rates"]
        }  # fmt: skip


def test_a_file_adds_a_card(run: Run, own: Path) -> None:
    done = run("devices", "--devices", str(own))
    assert done.returncode == 0
    row = next(line.split() for line in done.stdout.splitlines() if "lab48gb" in line)
    assert row == ["lab48gb", "8.6", "47.49", "0.768", "155?", "none", "none", "38.7", "31", "200-1024", "8.125"]


def test_the_environment_names_such_a_file_and_its_own_json_reads_back(
    run: Run, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDOVER_DEVICES", str(own))
    cards = json.loads(run("devices", "--json").stdout)
    added = cards[-1]
    assert (added["name"], added["usable_bytes"]) == ("lab48gb", int(47.49 * 2**30))
    assert added["sources"]["fp32"] == str(own)
    again = tmp_path / "again.json"
    again.write_text(json.dumps(cards))
    assert run("devices", "--devices", str(again)).returncode == 0


def test_a_file_that_is_not_there(run: Run) -> None:
    done = run("devices", "--devices", "nowhere.json")
    assert done.returncode == 2
    assert "cannot read the cards of nowhere.json: No such file or directory" in done.stderr


# -- estimates and plans for a card -----------------------------------------------------------------------------------


def test_an_estimate_for_a_card_of_ones_own_with_its_snapshot(
    run: Run, factories: Path, own: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "step.pickle"
    done = run(
        "estimate", f"{factories}:make", "--device", "lab48gb", "--devices", own, "--optimizer", "none", "--json",
        "--snapshot", snapshot,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    on_card = found["on_card"]
    assert (found["device"], on_card["card"]) == ("lab48gb", "lab48gb")
    assert found["peak_bytes"] < on_card["allocated_bytes"] <= on_card["reserved_bytes"]
    assert on_card["process_bytes"] == [on_card["reserved_bytes"] + n for n in (200 * 2**20, 2**30)]
    segments = pickle.loads(snapshot.read_bytes())["segments"]
    assert sum(segment["total_size"] for segment in segments) == on_card["reserved_bytes"]


LARGER = """
import torch
from torch import nn

def make():
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(3)]
        return nn.Sequential(*blocks), (torch.zeros(8192, 512),)
"""


def test_a_plan_for_a_card(run: Run, tmp_path: Path) -> None:
    model, path = tmp_path / "larger.py", tmp_path / "plan.json"
    model.write_text(LARGER)
    done = run("plan", f"{model}:make", "--budget", "70%", "--device", "a100-80gb", "-o", path)
    assert done.returncode == 0, done.stderr
    assert "reserved on a100-80gb" in done.stdout
    plan = json.loads(path.read_text())
    assert (plan["device"], plan["budget_kind"]) == ("a100-80gb", "reserved")
    assert plan["reserved_bytes"] <= plan["budget_bytes"] < plan["unplanned_reserved_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("estimate", "--snapshot", "step.pickle"), "--snapshot shows a card's allocator: name one by --device"),
        (("plan", "--budget", "1GiB", "--device", "t4", "--budget-kind", "cached"), "budget_kind='cached'"),
    ],
    ids=["snapshot", "kind"],
)
def test_what_is_refused(run: Run, factories: Path, arguments: tuple[str, ...], said: str) -> None:
    command, *options = arguments
    done = run(command, f"{factories}:make", *options)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
