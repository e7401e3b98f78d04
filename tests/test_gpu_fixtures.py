"""Recordings for a card against what a card really ran: every file in tests/fixtures/gpu, and the comparison itself.

`python benchmarks/gpu.py` writes such files where a card is. `by-hand-*.json` are worked out from PyTorch's source.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_fixture import SCHEMA_VERSION, differences, ran, recorded
from benchmarks.zoo import ZOO
from torch import nn

from holdover.memory.on_card import place_of
from holdover.memory.workspace import true_outputs
from holdover.trace.graph import Trace
from holdover.trace.record import record

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures" / "gpu"


def mlp() -> Any:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return model, (torch.zeros(32, 64),), {}, lambda output: output.square().mean()


EXAMPLES: dict[str, Callable[[], Any]] = {"by-hand:mlp": mlp, **{f"zoo:{name}": make for name, make in ZOO.items()}}


def recording(fixture: dict[str, Any]) -> Trace:
    model, args, kwargs, loss = EXAMPLES[fixture["example"]]()
    target = place_of(fixture["card"]).target
    return record(model.train(), args, kwargs, loss=loss, precision=fixture["precision"], target=target)


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / name).read_text())
    return found


def test_recordings_are_what_the_card_ran() -> None:
    files = sorted(FIXTURES.glob("*.json"))
    assert files, "by-hand-mlp.json is always there"
    wrong = {}
    for path in files:
        fixture = read(path.name)
        assert fixture["schema_version"] == SCHEMA_VERSION, f"{path.name}: run benchmarks/gpu.py again"
        wrong[path.name] = differences(fixture, recording(fixture))
    assert wrong == {path.name: [] for path in files}


def test_the_comparison_tells_every_difference() -> None:
    fixture = read("by-hand-mlp.json")
    trace = recording(fixture)
    other = copy.deepcopy(fixture)
    other["forward"]["aten.gelu.default"] = 2
    other["backward"]["aten.threshold_backward.default"] = 1
    del other["backward"]["aten.gelu_backward.default"]
    other["saved"] = [32 * 64 * 4, 32 * 256 * 4, 32 * 256 * 2]
    assert differences(other, trace) == [
        "forward: aten.gelu.default ran 2 times on the device, 1 in the recording",
        "backward: aten.gelu_backward.default ran 0 times on the device, 1 in the recording",
        "backward: aten.threshold_backward.default ran 1 times on the device, 0 in the recording",
        "saved: 1 storages of 16,384 B on the device, 0 in the recording",
        "saved: 1 storages of 32,768 B on the device, 2 in the recording",
    ]


def test_what_ran_is_written_down_as_it_ran() -> None:
    """On this machine's own device, where recordings are held to measurements elsewhere, both agree."""
    model, args, kwargs, loss = ZOO["gpt2"]()
    trace = record(model.train(), args, kwargs, loss=loss, precision="bf16-mixed", corrections=true_outputs)
    measured = ran(model, args, kwargs, loss, "bf16-mixed", torch.device("cpu"))
    assert json.loads(json.dumps(measured)) == recorded(trace)
    assert measured["forward"]["aten.addmm.default"] == 16
    assert all(p.grad is None for p in model.parameters())


def test_the_benchmark_says_that_there_is_no_card() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "no CUDA device here: nothing can be measured\n"
