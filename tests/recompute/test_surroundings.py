"""What a replay must not depend on: what is set, which modes are on, and what others do with what they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.recompute.helpers import assert_same, default_loss, results, same, script
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from holdover.recompute.apply import install
from holdover.recompute.geometry import geometry, rebuild
from holdover.recompute.inspect import inspect
from holdover.recompute.settings import now


class Mixed(nn.Module):
    """A convolution, a matrix product, a long sum, a division of integers and numbers below the normal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.line, self.end = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 64), nn.Linear(64, 4)
        self.many = nn.Parameter(torch.randn(1 << 17))

    def forward(self, x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        h = self.line(nn.functional.gelu(self.conv(x)).flatten(1)).tanh()
        h = h * (torch.arange(64) / 3).to(h.dtype)
        long = self.many * wide
        share = (long / long.sum()).sin().sum()
        little = h * 1e-20 * 1e-19
        return self.end(h).sum() + share + (little * 1e38 * h).cos().sum()


@contextmanager
def default_type() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 3)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def low_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def flushed() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def without_mkldnn() -> Any:
    return torch.backends.mkldnn.flags(enabled=False)  # type: ignore[no-untyped-call]


class Rounding(TorchDispatchMode):
    """Changes what ops give."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        coarse = isinstance(out, torch.Tensor) and func in (torch.ops.aten.mul.Tensor, torch.ops.aten.addmm.default)
        return out.bfloat16().to(out.dtype) if coarse else out


AROUND = [default_type, threads, low_precision, flushed, deterministic, without_mkldnn, Rounding]


@pytest.mark.parametrize("around", AROUND, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_set_around_forward_alone_holds_for_its_replays(around: Callable[[], Any], dtype: torch.dtype) -> None:
    outcomes = []
    for plan in (False, True):
        torch.manual_seed(0)
        model = Mixed().to(dtype)
        args = (torch.randn(4, 3, 8, 8, dtype=dtype), torch.randn(1 << 17, dtype=dtype))
        if plan:
            with around():
                choices = script(model, args)
            install(model, choices)
        with around():
            out = model(*args)
        before = now()
        default_loss(out).backward()
        assert now() is before
        outcomes.append({"out": out.detach(), **results(model)})
        if plan:
            done = inspect(model)
            assert done.unmatched == ()
            assert done.replayed_ops > 8
    assert_same(*outcomes)


class WritesOver(torch.autograd.Function):
    """Its backward works in the memory of what it saved, as it may: nobody else asks for that in plain PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        result: torch.Tensor = x.cos_().mul_(grad)
        return result


LOOKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda h: h,
    "part": lambda h: h[1:],
    "transposed": lambda h: h.t(),
    "real": lambda h: torch.view_as_real(torch.complex(h, h * 2)),
}


def assert_same_when_all_is_dropped(build: Callable[[], nn.Module]) -> None:
    outcomes = []
    for plan in (False, True):
        torch.manual_seed(0)
        model, x = build(), torch.randn(5, 8)
        if plan:
            install(model, script(model, (x,)))
        model(x).backward()
        outcomes.append(results(model))
    assert_same(*outcomes)


@pytest.mark.parametrize("look", LOOKS)
def test_what_a_backward_writes_over_is_not_taken_for_the_value(look: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x) * 2
            other = (self.second(h.sigmoid()) * h.tanh()).sum()  # asks for h again, after the function's backward
            end: torch.Tensor = WritesOver.apply(LOOKS[look](h)).sum()
            return other + end * end

    assert_same_when_all_is_dropped(Model)


class LooksInInferenceMode(torch.autograd.Function):
    """Its backward unpacks what it saved in inference mode."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            (x,) = ctx.saved_tensors
        return grad * 3 * x.sign().abs()


def test_what_is_made_again_in_inference_mode_serves_those_who_are_not_in_it() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x).exp()
            other = h.sin().sum()  # asks for h again, after the function's backward
            end: torch.Tensor = LooksInInferenceMode.apply(h).sum()
            return other + end

    assert_same_when_all_is_dropped(Model)


def test_nothing_is_packed_in_inference_mode() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                many = int((x > 0.5).sum())
            return (self.scale * many).sum()

    model, x = Masked(), torch.linspace(0, 1, 64)
    install(model, script(model, (x,), None, lambda key, index, name: "pack"))
    model(x).backward()
    assert model.scale.grad is not None
    assert torch.equal(model.scale.grad, torch.full((64,), 32.0))
    assert "inference mode" in str(inspect(model))


def test_whatever_is_rebuilt_counts_writes_with_what_it_lies_on() -> None:
    base = torch.randn(6, dtype=torch.complex64)
    cases = [
        base.conj(),
        torch.view_as_real(base),
        torch.view_as_real(base)[2:, 1],
        base[1::2].conj(),
        base.conj().imag,
    ]
    for case in cases:
        for found_on in (base, base.conj(), torch.view_as_real(base)):
            again = rebuild(found_on, geometry(case))
            assert geometry(again) == geometry(case)
            assert same(again, case)
            before = base._version
            again.mul_(2)
            assert base._version == before + 1
