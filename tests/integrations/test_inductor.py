"""Plans under Inductor, which needs a C++ compiler."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from tests.integrations.helpers import assert_equal, loss, mlp, peak, results, tokens, within_promise

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
