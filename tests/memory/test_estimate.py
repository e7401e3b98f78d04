"""Estimates against bytes counted by hand, and against what the same step really takes."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import holdover
from holdover.memory.estimate import SCHEMA_VERSION
from holdover.memory.measure import measure_peak

BATCH, WIDTH = 64, 100
LAYER = 4 * WIDTH * WIDTH  # bytes of one weight matrix
ROW = 4 * BATCH * WIDTH  # bytes of one activation


def chain(depth: int, *, tied: bool = False) -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)]
    if tied:
        for layer in layers[1:]:
            layer.weight = layers[0].weight
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Sigmoid())))


def batch() -> tuple[torch.Tensor]:
    return (torch.randn(BATCH, WIDTH),)


def test_categories_are_what_one_counts_by_hand() -> None:
    found = holdover.estimate(chain(3), batch(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    assert found.weights_bytes == found.gradients_bytes == found.optimizer_bytes == 3 * LAYER
    assert found.inputs_bytes == ROW
    assert found.activations_bytes == 3 * ROW  # a sigmoid saves its result, which is the next layer's input
    assert found.loss_bytes == 0
    assert sum(found.peak.parts.values()) == found.peak_bytes
    assert found.peak_bytes == max(found.first_step_peak_bytes, found.later_step_peak_bytes)


def test_tied_weights_count_once() -> None:
    assert holdover.estimate(chain(3, tied=True), batch()).weights_bytes == LAYER


def test_buffers_are_weights_too() -> None:
    model = chain(1)
    model.register_buffer("table", torch.zeros(10))
    assert holdover.estimate(model, batch()).weights_bytes == LAYER + 40


@pytest.mark.parametrize("optimizer", [None, "sgd", "adamw"])
def test_the_peak_is_the_measured_one(optimizer: str | None) -> None:
    model, args = chain(4), batch()
    found = holdover.estimate(model, args, optimizer=optimizer)
    built = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer](model.parameters()) if optimizer else None

    def step() -> None:
        output = model(*args)  # a variable, so that it lives on: what the estimate takes for granted
        output.sum().backward()
        if built is not None:
            built.step()
            built.zero_grad()

    def steps() -> None:
        for _ in range(2 if built else 1):
            step()

    assert measure_peak(steps, model, args, built)[1] == pytest.approx(found.peak_bytes, rel=0.001)


def test_on_meta_the_numbers_are_the_same() -> None:
    with torch.device("meta"):
        unreal = holdover.estimate(chain(4), batch(), optimizer="adamw")
    real = holdover.estimate(chain(4), batch(), optimizer="adamw")
    assert unreal.to_dict() == real.to_dict()


def test_logits_and_loss_are_told_apart() -> None:
    model, targets = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1000)), torch.zeros(32, dtype=torch.long)
    found = holdover.estimate(
        model, (torch.randn(32, 8),), loss=lambda logits: nn.functional.cross_entropy(logits, targets)
    )
    assert found.loss_bytes >= 4 * 32 * 1000
    assert found.loss_bytes / found.activations_bytes > 0.9


def test_modules_and_ops_add_up() -> None:
    found = holdover.estimate(chain(4), batch())
    for rows in (found.by_module(), found.by_op()):
        assert sum(row.saved_bytes for row in rows) == found.activations_bytes
    assert sum(row.weights_bytes for row in found.by_module()) == found.weights_bytes
    assert [row.path for row in found.by_module() if row.weights_bytes] == ["0", "2", "4", "6"]


def test_json_says_the_same() -> None:
    found = holdover.estimate(chain(2), batch(), optimizer="sgd", precision="bf16-mixed")
    data = json.loads(found.to_json())
    assert data["schema_version"] == SCHEMA_VERSION
    assert data["peak_bytes"] == found.peak_bytes == sum(data["peak"]["parts"].values())
    assert data["precision"] == "bf16-mixed"
    assert sum(row["saved_bytes"] for row in data["modules"]) == found.activations_bytes


def test_nothing_changes() -> None:
    model, args = chain(2), batch()
    state = torch.get_rng_state()
    before = [p.clone() for p in model.parameters()]
    holdover.estimate(model, args, optimizer="adamw")
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(holdover.DeviceError, match="'abacus'"):
        holdover.estimate(chain(1), batch(), device="abacus")
