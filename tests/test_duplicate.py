"""Copies of whole steps share nothing with the original, and share among themselves what the original shares."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import holdover
from holdover.duplicate import duplicate


def test_a_loss_that_looks_at_the_model_looks_at_the_copy() -> None:
    model = nn.Linear(2, 1)

    def loss(output: torch.Tensor) -> torch.Tensor:
        model.eval()
        return output.sum() + model.weight.sum()

    twin, twin_loss = duplicate((model, loss))
    twin_loss(twin(torch.ones(2))).backward()
    assert model.training
    assert not twin.training
    assert model.weight.grad is None
    assert twin.weight.grad is not None


def test_functions_that_share_a_variable_still_share_it() -> None:
    def pair() -> tuple[Any, Any]:
        count = 0

        def up() -> None:
            nonlocal count
            count += 1

        return up, lambda: count

    up, read = pair()
    twin_up, twin_read = duplicate((up, read))
    twin_up()
    twin_up()
    assert (read(), twin_read()) == (0, 2)


def test_tied_weights_and_optimizer_stay_tied() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    twin, twin_optimizer = duplicate((model, optimizer))
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight is twin_optimizer.param_groups[0]["params"][0]
    assert twin[0].weight is not first.weight


def test_results_of_an_earlier_step_are_copied() -> None:
    model = nn.Linear(2, 2)
    model.last = model(torch.ones(2))
    twin = duplicate(model)
    assert torch.equal(twin.last, model.last)
    assert twin.last.is_leaf
    assert twin.last.requires_grad


def test_hooks_of_tensors_are_copied() -> None:
    model = nn.Linear(2, 1, bias=False)
    calls: list[str] = []
    model.weight.register_hook(lambda g: calls.append("original") or g * 2)
    model.weight.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    twin = duplicate(model)
    twin(torch.ones(2)).sum().backward()
    assert twin.weight.grad is not None
    assert twin.weight.grad.tolist() == [[2.0, 2.0]]
    assert calls == []


def test_module_hooks_write_to_their_own_copies() -> None:
    model = nn.Linear(2, 1)
    seen: list[int] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    duplicate(model)(torch.ones(2))
    assert seen == []


def test_what_refuses_to_be_copied_is_named() -> None:
    model = nn.Linear(2, 1)
    model.lock = threading.Lock()
    with pytest.raises(holdover.HoldoverError, match=r"cannot be copied.*TypeError.*lock.*__deepcopy__"):
        duplicate(model)
