"""Questions about values while recording without data: answered where integers and constants decide, never guessed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from holdover.errors import TraceError
from holdover.trace.record import record


class Asking(nn.Module):
    """Decides by a question how many times its layer is used."""

    def __init__(self, ask: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.ask = ask
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for _ in range(self.ask(ids)):
            x = self.layer(x)
        return x


QUESTIONS: dict[str, Callable[[torch.Tensor], int]] = {
    "maximum": lambda ids: int(ids.max()),
    "item of a view": lambda ids: ids[1:, 0].sum().item(),
    "branch on a mask": lambda ids: 3 if (ids < 4).all() else 1,
    "made by arange": lambda ids: int((torch.arange(4) * 2).max()) // 2,
    "a constant": lambda ids: torch.tensor([1, 3])[1].item(),
    "in place": lambda ids: int(ids.clone().add_(1).mul_(0).add_(3).max()),
    "cumulative lengths": lambda ids: torch.cumsum(torch.ones_like(ids[:, 0]), 0)[-1].item(),
    "nonzero": lambda ids: len(torch.nonzero(ids == 3)) + 2,
    "like of floats": lambda ids: int(torch.ones_like(torch.empty(3)).sum()),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_integers_decide_without_data(question: str) -> None:
    ids = torch.tensor([[0, 1], [3, 2], [0, 0]])
    trace = record(Asking(QUESTIONS[question]), (torch.ones(3, 4), ids))
    assert trace.recorded_on == "fake"
    assert sum(op.name == "aten.addmm.default" for op in trace.ops) == 3


def test_inputs_on_meta_leave_arange_known() -> None:
    model = Asking(QUESTIONS["made by arange"]).to("meta")
    trace = record(model, (torch.ones(3, 4, device="meta"), torch.zeros(3, 2, dtype=torch.int64, device="meta")))
    assert sum(op.name == "aten.addmm.default" for op in trace.ops) == 3


def test_what_floats_decide_is_recorded_on_real_tensors() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() if x.sum() > 0 else x

    assert record(Branching(), (torch.ones(3, requires_grad=True),)).recorded_on == "real"


def test_unknown_values_are_not_guessed() -> None:
    model = Asking(QUESTIONS["maximum"]).to("meta")
    with pytest.raises(TraceError):
        record(model, (torch.ones(3, 4, device="meta"), torch.zeros(3, 2, dtype=torch.int64, device="meta")))


def test_a_known_tensor_overwritten_by_unknown_data_is_unknown() -> None:
    def ask(ids: torch.Tensor) -> int:
        counts = torch.zeros(3, dtype=torch.int64)
        view = counts[:2]
        counts.copy_(torch.rand(3).mul(3))
        return int(view.max()) * 0 + 3

    trace = record(Asking(ask), (torch.ones(3, 4), torch.zeros(3, 2, dtype=torch.int64)))
    assert trace.recorded_on == "real"


def test_integer_inputs_and_buffers_are_left_as_they_are() -> None:
    class Counting(Asking):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            ids.add_(1)
            return super().forward(x, ids)

    model, ids = Counting(QUESTIONS["maximum"]), torch.zeros(3, 2, dtype=torch.int64)
    record(model, (torch.ones(3, 4), ids))
    assert model.steps == 0
    assert not ids.any()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands for transformers, whose models ask this module whether a tensor is fake."""
    module = ModuleType("transformers.utils.import_utils")
    module.is_fake_tensor = lambda t: isinstance(t, FakeTensor)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def looks_first(library: ModuleType) -> Callable[[torch.Tensor], int]:
    return lambda ids: 1 if library.is_fake_tensor(ids) or (ids > 5).any() else 3


def test_libraries_are_told_that_tensors_are_real(library: ModuleType) -> None:
    asked = library.is_fake_tensor
    trace = record(Asking(looks_first(library)), (torch.ones(3, 4), torch.zeros(3, 2, dtype=torch.int64)))
    assert trace.recorded_on == "fake"
    assert sum(op.name == "aten.addmm.default" for op in trace.ops) == 3
    assert library.is_fake_tensor is asked


def test_without_data_the_path_for_fake_tensors_is_taken_and_said(library: ModuleType) -> None:
    model = Asking(looks_first(library)).to("meta")
    ids = torch.zeros(3, 2, dtype=torch.int64, device="meta")
    trace = record(model, (torch.ones(3, 4, device="meta"), ids))
    assert sum(op.name == "aten.addmm.default" for op in trace.ops) == 1
    assert "another path" in trace.notes[0]
