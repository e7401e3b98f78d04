"""RReLU saves its noise before it fills it: autograd's note must follow the filled content, kept or recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdover


def step(budget: str | None) -> tuple[list[torch.Tensor], torch.Tensor, set[str]]:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.RReLU()) for _ in range(3)]
    model, x = nn.Sequential(*layers), torch.randn(400, 16)
    ops = set()
    if budget is not None:
        plan = holdover.plan(model, (x,), budget=budget)
        ops = {choice.op for choice in plan.choices}
        holdover.apply_(model, plan)
    torch.manual_seed(4)
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None], torch.get_rng_state(), ops


@pytest.mark.parametrize("budget", ["min", "85%"])
def test_noise_is_replayed_exactly(budget: str) -> None:
    plain, plain_state, _ = step(None)
    planned, state, ops = step(budget)
    assert len(plain) == len(planned) == 12
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))
    assert torch.equal(plain_state, state)
    if budget == "min":
        assert "aten.rrelu_with_noise.default" in ops, "at the lowest peak the noise is not kept"
