"""Plans under Inductor, which needs a C++ compiler."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from tests.integrations.helpers import Residual, assert_equal, loss, mlp, peak, results, tokens, within_promise
from torch import nn
from torch._inductor import config as inductor_config

import holdover
from holdover.integrations.regions import compile_regions


def test_blocks_under_inductor() -> None:
    if shutil.which("g++") is None:
        pytest.fail("Inductor builds its CPU kernels with g++, which is not installed: apt-get install g++")
    model, x = mlp(), tokens(64).requires_grad_()
    names = ("0", "1", "2")
    torch._dynamo.reset()
    plain = copy.deepcopy(model)
    compile_regions(plain, "inductor", names)  # type: ignore[arg-type]
    expected, unplanned = results(plain, x), peak(plain, x)
    for name in names:
        model.get_submodule(name).compile()
    plan = holdover.plan(model, (x,), loss=loss, budget="min", compiled=True)
    assert plan.compiled == "inductor"
    torch._dynamo.reset()
    follower = holdover.apply_(copy.deepcopy(model), plan)
    assert_equal(results(follower, x), expected)
    measured = peak(follower, x)
    assert within_promise(measured, plan)
    assert measured < 0.7 * unplanned


class Mean(nn.Module):
    """Of each channel; backward reads nothing of what it is taken of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def test_what_inductor_does_to_the_layout_of_images_is_in_the_promise() -> None:
    """Blocks copy what their convolutions read; max-pooling before them would copy what it saved for their gradient."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), Residual(8), Residual(8), Mean())
    x = torch.randn(8, 3, 34, 34)
    for block in model[2:4]:
        block.compile()
    torch._dynamo.reset()
    plan = holdover.plan(model, (x,), loss=loss, budget="min", compiled=True, time_limit=10.0)
    expected = results(copy.deepcopy(model), x)
    torch._dynamo.reset()
    follower = holdover.apply_(copy.deepcopy(model), plan)
    found = results(follower, x)
    torch.testing.assert_close(found, expected)
    measured = peak(follower, x)
    assert within_promise(measured, plan)
    assert measured > 0.97 * plan.predicted_peak_bytes


def test_a_plan_for_convolutions_says_what_inductor_does_to_their_layout() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = torch.randn(4, 3, 16, 16)

    def notes(layout: bool) -> str:
        torch._dynamo.reset()
        with inductor_config.patch(layout_optimization=layout):
            plan = holdover.plan(model, (x,), loss=loss, budget="min", compiled=True, time_limit=2.0)
        return " ".join(plan.notes)

    assert "layout_optimization = False, which keeps the promise" in notes(layout=True)
    assert "layout_optimization" not in notes(layout=False)
