"""Measured peaks, against bytes counted by hand."""

from __future__ import annotations

import os

import pytest
import torch

from holdover.memory.measure import existing_bytes, measure_peak

KB = 1000  # a float32 tensor of 250 elements


def test_the_peak_is_what_is_alive_together() -> None:
    def work() -> None:
        a = torch.ones(250)
        b = torch.ones(500)
        del a
        torch.ones(250)
        del b

    assert measure_peak(work)[1] == 3 * KB


def test_what_existed_counts_once_per_storage() -> None:
    x = torch.ones(250)
    assert measure_peak(lambda: None, x, x.view(10, 25), {"again": [x[3:]]})[1] == KB


def test_freeing_what_existed_does_not_lower_the_count() -> None:
    boxes = [torch.ones(2500)]

    def work() -> None:
        boxes.clear()
        torch.ones(250)

    assert measure_peak(work)[1] == KB


def test_the_result_comes_back() -> None:
    assert measure_peak(lambda: 42)[0] == 42


def test_backward_holds_activation_and_gradient() -> None:
    x = torch.ones(250, requires_grad=True)

    def work() -> None:
        x.exp().backward(torch.ones(250))  # exp's result is saved; beside it two gradients and the copy kept in x.grad

    peak = measure_peak(work, x)[1]
    assert peak in (4 * KB, 5 * KB)
    assert peak == measure_peak(work, x)[1] - KB  # now x.grad exists already


def test_gradients_closures_and_optimizer_state_exist() -> None:
    layer = torch.nn.Linear(10, 10, bias=False)  # 400 bytes
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(10)).sum().backward()
    optimizer.step()
    hidden = torch.ones(100)
    assert existing_bytes(layer) == 800
    assert existing_bytes((layer, optimizer)) == 1200
    assert existing_bytes(lambda: hidden) == 400


def test_sparse_and_lazy_tensors_are_counted() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (4,))
    assert existing_bytes(sparse) == 2 * 8 + 2 * 4
    assert existing_bytes(torch.nn.LazyLinear(3)) == 0


def test_the_profiler_is_silent_and_the_environment_unchanged(capfd: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    measure_peak(lambda: torch.ones(3))
    assert dict(os.environ) == before
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
