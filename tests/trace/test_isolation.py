"""Recording leaves no mark on anything that the caller can see."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdover.trace.record import record

COUNTER = [0]
LOG: list[str] = []


class Meddling(nn.Module):
    """Changes all there is to change, in forward."""

    calls = 0

    def __init__(self, real: bool) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.zeros(6))
        self.table, self.steps, self.cache, self.real = torch.ones(6), 0, {"x": [torch.zeros(2)]}, real
        counts = [0]

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            counts[0] += 1
            return output * 1.0

        self.counts = counts
        self.layer.register_forward_hook(hook)

    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        type(self).calls += 1
        COUNTER[0] += 1
        LOG.append("forward")
        print("forward runs")
        self.steps += 1
        self.seen.add_(x.detach().sum(0))
        self.table.mul_(2)
        self.cache["x"].append(x)
        self.cache["y"] = x * 2
        options["seen"] = True
        random.random()
        np.random.rand()
        if self.real and x.sum() > -1e9:
            self.extra = torch.rand(3)
        return self.norm(self.layer(x + torch.rand_like(x) * self.table))


def state(model: Meddling, x: torch.Tensor, options: Any) -> dict[str, Any]:
    return {
        "parameters": {n: (p, p.clone(), p.grad, p.requires_grad, p._version) for n, p in model.named_parameters()},
        "buffers": {n: (b, b.clone(), b._version) for n, b in model.named_buffers()},
        "attributes": sorted(vars(model)), "table": model.table.clone(), "steps": model.steps,
        "cache": copy.deepcopy(model.cache), "options": copy.deepcopy(options), "input": (x, x.clone(), x.grad),
        "counts": list(model.counts), "class": type(model).calls, "globals": (COUNTER[0], list(LOG)),
        "torch": torch.get_rng_state(), "numpy": np.random.get_state()[1].copy(), "python": random.getstate(),
        "grad mode": torch.is_grad_enabled(), "threads": torch.get_num_threads(), "training": model.training,
        "forward": [("forward" in vars(m)) for m in model.modules()], "hooks": len(model.layer._forward_hooks),
    }  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a is b or torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("optimizer", [None, "adamw"])
@pytest.mark.parametrize("real", [False, True])
def test_nothing_changes(real: bool, optimizer: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    model, x, options = Meddling(real), torch.rand(4, 6, requires_grad=True), {"scale": [1, 2]}
    before = state(model, x, options)
    trace = record(model, (x, options), optimizer=optimizer)
    assert trace.recorded_on == ("real" if real else "fake")
    after = state(model, x, options)
    assert [k for k in before if not same(before[k], after[k])] == []
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_an_optimizer_and_gradients_of_the_caller_stay() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    gradient = model.weight.grad
    assert gradient is not None
    kept = gradient.clone()
    trace = record(model, (torch.ones(2, 4),), optimizer=optimizer)
    assert trace.optimizer == "Adam"
    assert same(before["state"], optimizer.state_dict()["state"])
    assert model.weight.grad is gradient
    assert torch.equal(gradient, kept)
    assert all(k is p for k, p in zip(optimizer.state, model.parameters(), strict=True))


def test_inference_mode_and_no_grad_of_the_caller() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    expected = len(record(model, (x,)).ops)
    with torch.no_grad():
        assert len(record(model, (x,)).ops) == expected
        assert not torch.is_grad_enabled()


def test_recording_twice_gives_the_same() -> None:
    model, x = Meddling(False), torch.rand(4, 6)
    first, second = (record(model, (x, {}), optimizer="sgd") for _ in range(2))
    assert first.ops == second.ops
    assert first.events == second.events
    assert first.storages == second.storages
