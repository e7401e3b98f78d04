"""Steps that cannot be recorded, or only on real tensors: what is said about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdover.errors import TraceError
from holdover.trace.record import record

X = torch.ones(3, 4)


class Returning(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


def raising(y: torch.Tensor) -> torch.Tensor:
    raise KeyError("a key that is missing")


@pytest.mark.parametrize(
    ("function", "loss", "said"),
    [
        (lambda y: None, None, "NoneType"),
        (lambda y: {"ids": y.argmax(-1)}, None, "without a floating tensor that requires a gradient"),
        (lambda y: y.detach(), None, "no loss to differentiate"),
        (lambda y: y, lambda y: y, r"shape \(3, 4\)"),
        (lambda y: y, lambda y: 3.0, "returned float"),
        (lambda y: y, lambda y: y.detach().sum(), "does not depend on anything that requires a gradient"),
        (raising, None, "a key that is missing"),
        (lambda y: y.view(5, 5), None, "shape"),
    ],
)
def test_steps_that_fail(function: Any, loss: Any, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        record(Returning(function), (X,), loss=loss)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"args": X}, r"args=\(x,\)"),
        ({"args": "abc"}, "not str"),
        ({"args": (X,), "precision": "fp8"}, "32-true"),
        ({"args": (X,), "optimizer": "adamm"}, "^Unknown optimizer 'adamm'. Known names: adafactor, adagrad"),
        ({"args": (X,), "optimizer": lambda p: 3}, "not a torch.optim.Optimizer"),
        ({"args": (X, X)}, "positional argument"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        record(nn.Linear(4, 4), **arguments)


def test_no_module() -> None:
    with pytest.raises(TraceError, match="Module is needed, not function"):
        record(raising, (X,))  # type: ignore[arg-type]


def test_frozen_parameters() -> None:
    with pytest.raises(TraceError, match="requires a gradient"):
        record(nn.Linear(4, 4).requires_grad_(False), (X,))


@pytest.mark.parametrize(
    "function",
    [lambda y: y * float(y.sum().item()), lambda y: y[y > 0], lambda y: y if y.sum() > 1e9 else y * 2,
     lambda y: y[: int(y.abs().sum()) % 2 + 1], lambda y: y[torch.nonzero(y[:, 0])]],
)  # fmt: skip
def test_what_values_decide_is_recorded_on_real_tensors(function: Any) -> None:
    trace = record(Returning(function), (X,))
    assert trace.recorded_on == "real"
    assert len(trace.notes) == 1
    assert trace.notes[0].startswith("Recorded on real tensors, because fake ones cannot follow this step: ")


def test_a_meta_model_that_asks_for_values() -> None:
    model = Returning(lambda y: y * y.sum().item()).to("meta")
    with pytest.raises(TraceError, match=r"cannot be recorded without data.*real device"):
        record(model, (X.to("meta"),))


def test_a_failing_step_leaves_the_caller_alone() -> None:
    model = Returning(raising)
    state = torch.get_rng_state()
    with pytest.raises(TraceError):
        record(model, (X,))
    assert torch.equal(state, torch.get_rng_state())
    assert model.layer.weight.grad is None
    assert "forward" not in vars(model)
