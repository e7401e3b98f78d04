"""Autograd's clone before an op in place serves as the copy that pins need of what is written over (rule 5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.recompute.helpers import script
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from holdover.memory.simulate import simulate
from holdover.memory.timeline import Choices
from holdover.recompute.apply import install
from holdover.recompute.inspect import inspect
from holdover.trace.record import record

N = 20_000
BYTES = 4 * N


class Counts(TorchDispatchMode):
    """How often each op runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Gate(nn.Module):
    """A product that `activation` writes over, and a sine that saves the result."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], read_before: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-2, 2, N))
        self.activation, self.read_before = activation, read_before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.scale
        before = y.view(100, -1).tanh().view(-1) if self.read_before else None
        y = self.activation(y).sin()
        return y if before is None else y * before


ACTIVATIONS = {
    "silu": lambda y: F.silu(y, inplace=True),
    "hardswish": lambda y: F.hardswish(y, inplace=True),
    "relu6": lambda y: F.relu6(y, inplace=True),
    "square": lambda y: y.pow_(2),
}


def step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.grad = model.scale.grad = None
    model(x).sum().backward()
    return x.grad, model.scale.grad


def all_but_the_product(key: str, index: int, name: str) -> str:
    return "" if index == 0 else "recompute"


def assert_same_gradient(model: nn.Module, passes: int = 1) -> None:
    """What the input gets in so many backward passes, with all but the product dropped and without a plan."""
    x = torch.linspace(-1, 1, N).requires_grad_()

    def gradient() -> torch.Tensor:
        x.grad = None
        out = model(x).sum()
        for number in range(passes):
            out.backward(retain_graph=number + 1 < passes)
        return x.grad

    expected = gradient()
    install(model, script(model, (x,), None, all_but_the_product))
    assert torch.equal(expected, gradient())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("read_before", [False, True], ids=["read once", "read before"])
def test_what_is_written_over_is_not_copied_again(activation: str, read_before: bool) -> None:
    model, x = Gate(ACTIVATIONS[activation], read_before), torch.linspace(-1, 1, N).requires_grad_()
    with Counts() as plain:
        expected = step(model, x)
    before = plain.ops["aten.clone.default"]
    trace = record(model, (x,))
    chosen = frozenset(o.id for o in trace.ops if o.index > 0 and trace.calls[o.call].key and o.outputs and not o.keep)
    timeline = simulate(trace, Choices(chosen))

    install(model, script(model, (x,), None, all_but_the_product))
    with Counts() as planned:
        found = step(model, x)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    # The one more is made in backward, where the activation is run again on a copy of what is pinned.
    assert planned.ops["aten.clone.default"] == before + 1
    assert timeline.copied_bytes == BYTES
    assert inspect(model).replayed_ops == sum(timeline.replays.values())
    assert "aten.clone.default" not in {trace.ops[o].name for o in timeline.replays}


def test_a_clone_of_the_program_is_copied_before_it_is_written_to() -> None:
    """The clone is saved, serves as the pin, and then a branch that gets no gradient lets the program change it."""

    class Changes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            z = y.clone()
            y.mul_(z)  # saves z
            w = y.sin()
            with torch.no_grad():
                z.zero_()
            return w.detach() * x + z.sum()

    assert_same_gradient(Changes())


def test_a_clone_that_lies_another_way_is_not_taken_for_the_content() -> None:
    class Strided(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x * 2).view(100, -1)
            half = y[:, ::2]  # its clone is dense
            z = y.tanh()
            F.silu(half, inplace=True)
            return z * y.sin()

    assert_same_gradient(Strided())


def test_a_result_in_place_of_a_clone_that_is_pinned_leaves_the_pin_alone() -> None:
    """Backward twice: if the replay of an op in place had written to the clone, the second pass would differ."""

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            z = y.clone()
            y.mul_(z)
            z = z + 0 * y  # what follows reads both
            return z.mul_(y.tanh()).sin()

    assert_same_gradient(Twice(), passes=2)
