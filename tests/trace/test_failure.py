"""A step that fails while it is recorded: the message names the module and the line, the cause is the error itself."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdover.errors import TraceError
from holdover.trace import isolate
from holdover.trace.record import record

HERE = "test_failure.py: "


class OwnError(Exception):
    """Of a user; its `limit` does not come in `args`, so that a copy cannot be made."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"above {limit}", "really")
        self.limit = limit


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        out: torch.Tensor = self.down(x)  # the line that is at fault
        return out


class Raising(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].no_such_method()


class Through(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


def refused(model: nn.Module, **more: Any) -> TraceError:
    with pytest.raises(TraceError) as caught:
        record(model, (torch.ones(2, 4),), **more)
    return caught.value


@pytest.fixture(params=["forked", "copied"])
def _how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "copied":
        monkeypatch.setattr(isolate, "can_fork", lambda: False)


@pytest.mark.usefixtures("_how")
def test_the_module_and_the_users_line_are_named_and_the_error_is_the_cause() -> None:
    error = refused(nn.Sequential(Block(8), nn.Sequential(Block(7))))
    said = str(error)
    assert said.startswith("The training step itself fails: RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert "It fails in forward, in 1.0.down (Linear), at line " in said
    assert said.endswith(f"{HERE}out: torch.Tensor = self.down(x)  # the line that is at fault.")
    assert type(error.__cause__) is RuntimeError
    assert "mat1 and mat2 shapes cannot be multiplied (2x8 and 7x4)" in str(error.__cause__)
    shown = "".join(traceback.format_exception(error))
    assert "self.down(x)  # the line that is at fault" in shown.partition("The training step itself fails")[0]


def test_on_meta_it_is_told_as_well() -> None:
    with pytest.raises(TraceError) as caught:
        record(nn.Sequential(Block(7)).to("meta"), (torch.ones(2, 4, device="meta"),))
    assert "It fails in forward, in 0.down (Linear), at line " in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        (Raising(KeyError("k")), None, "KeyError: 'k'. It fails in forward, in the model itself (Raising), at line "),
        (nn.Linear(4, 4), lambda out: out.nothing, "has no attribute 'nothing'. It fails in the loss, at line "),
        (Through(FailsInBackward.apply), None, "no attribute 'no_such_method'. It fails in backward, at line "),
    ],
    ids=["forward", "loss", "backward"],
)
def test_the_phase_is_named(model: nn.Module, loss: Callable[[Any], Any] | None, said: str) -> None:
    told = str(refused(model, loss=loss))
    assert said in told
    assert HERE in told


def test_an_error_that_cannot_leave_its_process_is_told_by_its_text() -> None:
    error = refused(Raising(OwnError(3)))
    assert "OwnError: ('above 3', 'really'). It fails in forward, in the model itself (Raising)" in str(error)
    assert error.__cause__ is not None
    assert "OwnError: ('above 3', 'really')" in str(error.__cause__)


def test_what_the_recording_refuses_is_no_failure_of_the_step() -> None:
    error = refused(nn.Linear(4, 4), loss=lambda out: out)
    assert str(error) == "The loss has shape (2, 4); a scalar is needed (for example its .mean())."
