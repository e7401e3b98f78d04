"""`holdover.verify`: it says what is, leaves no mark, and notices what is wrong."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdover
from holdover import verification
from holdover.planning.plan import Plan
from holdover.recompute.apply import installation_of
from holdover.verification import Verification


class Noisy(nn.Module):
    """Dropout, batch norm, a counter and randomness of all three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        for layer in self.layers:
            x = x + self.drop(torch.nn.functional.gelu(layer(self.norm(x)))) * (1 + random.random() + np.random.rand())
        return {"features": x, "name": "noisy"}


def loss(output: dict[str, Any]) -> torch.Tensor:
    return output["features"].square().mean()


@pytest.fixture(autouse=True)
def _short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "MAX_ROUNDS", 1)


@pytest.fixture(scope="module")
def step() -> tuple[Noisy, tuple[torch.Tensor], Plan]:
    torch.manual_seed(3)
    model, args = Noisy(), (torch.randn(512, 32, requires_grad=True),)
    return model, args, holdover.plan(model, args, loss=loss, budget="min")


Step = tuple[Noisy, tuple[torch.Tensor], Plan]


def test_a_good_plan_holds(step: Step) -> None:
    model, args, plan = step
    found = holdover.verify(model, args, plan=plan, loss=loss)
    assert found.holds
    assert found.exact
    assert found.differences == ()
    assert found.predicted_peak_bytes == plan.predicted_peak_bytes
    assert found.unplanned_peak_bytes == plan.unplanned_peak_bytes
    assert found.measured_unplanned_peak_bytes == pytest.approx(plan.unplanned_peak_bytes, rel=0.01)
    assert found.measured_peak_bytes < found.measured_unplanned_peak_bytes


def test_with_an_optimizer_two_steps_are_measured(step: Step) -> None:
    model, args, _ = step
    plan = holdover.plan(model, args, loss=loss, budget="min", optimizer="adamw")
    found = holdover.verify(model, args, plan=plan, loss=loss, optimizer="adamw")
    assert found.holds
    assert found.measured_unplanned_peak_bytes == pytest.approx(plan.unplanned_peak_bytes, rel=0.01)


def test_precision_is_that_of_the_plan(step: Step) -> None:
    model, args, _ = step
    plan = holdover.plan(model, args, loss=loss, budget="min", precision="bf16-mixed")
    found = holdover.verify(model, args, plan=plan, loss=loss)
    assert found.exact
    assert found.measured_unplanned_peak_bytes == pytest.approx(plan.unplanned_peak_bytes, rel=0.01)


def test_nothing_of_the_callers_changes(step: Step) -> None:
    model, args, plan = step
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    holdover.verify(model, args, plan=plan, loss=loss)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert args[0].grad is None
    assert model.calls == 0
    assert installation_of(model) is None


def test_a_model_that_follows_the_plan_already_can_be_verified(step: Step) -> None:
    model, args, plan = step
    holdover.apply_(model, plan)
    try:
        assert holdover.verify(model, args, plan=plan, loss=loss).holds
        assert installation_of(model) is not None
    finally:
        holdover.remove_(model)


def test_a_promise_that_is_too_low_is_broken(step: Step) -> None:
    model, args, plan = step
    found = holdover.verify(model, args, plan=replace(plan, predicted_peak_bytes=10**5), loss=loss)
    assert found.exact
    assert not found.within_promise
    assert not found.holds
    assert found.to_json()["holds"] is False


@pytest.mark.parametrize(
    ("promised", "most"),
    [
        (1_000, 1_138),  # 1 % and 128 bytes
        (524_288, 524_288 + 5_242 + 128),
        (2**30, 2**30 + 10_737_418 + 128),
    ],
)
def test_what_is_allowed_above_a_promise_is_bounded_in_proportion(promised: int, most: int) -> None:
    def measured(peak: int) -> Verification:
        return Verification(
            gradients_equal=True, buffers_equal=True, rng_equal=True, outputs_equal=True, measured_peak_bytes=peak,
            predicted_peak_bytes=promised, unplanned_peak_bytes=2 * promised,
            measured_unplanned_peak_bytes=2 * promised, step_time_ratio=1.0, predicted_time_ratio=1.0,
            budget_bytes=None, device="cpu",
        )  # fmt: skip

    assert measured(most).within_promise
    assert not measured(most + 1).within_promise
    assert measured(most).to_json()["within_promise"]
    assert measured(2 * promised).to_json()["above_promise"] == 1.0


class Different(nn.Module):
    """Does something else when its forward is framed, as a faulty runtime would make it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        planned = "forward" in self.__dict__
        if planned:
            self.seen += 1
            torch.rand(1)
        return self.linear(x * (2 if planned else 1)).exp()


def test_every_difference_is_found_and_named() -> None:
    model, args = Different(), (torch.randn(4, 16),)
    plan = holdover.plan(model, args, budget="min")
    found = holdover.verify(model, args, plan=plan)
    assert [found.gradients_equal, found.buffers_equal, found.outputs_equal] == [False, False, False]
    assert not found.rng_equal
    assert not found.holds
    named = {(d.kind, d.name, d.module) for d in found.differences}
    assert ("gradient", "linear.weight", "linear") in named
    assert ("buffer", "seen", "") in named
    assert {("output", "loss", ""), ("output", "output", ""), ("rng", "torch", "")} <= named
    assert "gradient 'linear.weight' of module 'linear'" in str(found)


def test_a_plan_of_another_model_is_refused(step: Step) -> None:
    _, _, plan = step
    with pytest.raises(holdover.ApplyError, match="made for another model: a Noisy"):
        holdover.verify(nn.Linear(32, 1), (torch.ones(1, 32),), plan=plan)


def test_a_model_without_data_is_refused(step: Step) -> None:
    _, args, plan = step
    with torch.device("meta"):
        model = Noisy()
    with pytest.raises(holdover.HoldoverError, match="on the meta device, without data"):
        holdover.verify(model, args, plan=plan)


def test_a_verification_is_plain_data(step: Step) -> None:
    import json

    model, args, plan = step
    data = json.loads(json.dumps(holdover.verify(model, args, plan=plan, loss=loss).to_json()))
    assert data["schema"] == 1
    assert data["gradients_equal"] is True
    assert data["predicted_time_ratio"] == 1 + plan.extra_time
