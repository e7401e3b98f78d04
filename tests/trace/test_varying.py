"""Which calls may give other bits when they run again, and that such are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.recompute.helpers import everything, script
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from holdover.recompute.apply import install
from holdover.recompute.inspect import inspect
from holdover.trace.record import record
from holdover.trace.varying import ASKED, PICKS, RACES, SUMS, varies, why_varying

aten = torch.ops.aten


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def calls(device: str) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Op, arguments and named arguments, by a name."""
    matrix, rows = torch.zeros(4, 8, device=device), torch.zeros(2, 8, device=device)
    index, mask = torch.tensor([1, 1], device=device), torch.zeros(4, dtype=torch.bool, device=device)
    places, counts = (torch.zeros(n, 8, dtype=torch.int64, device=device) for n in (2, 4))
    image, kernel = torch.zeros(1, 2, 8, 8, device=device), torch.zeros(2, 2, 3, 3, device=device)
    conv: tuple[Any, ...] = (image, kernel, None, [1, 1], [0, 0], [1, 1])
    return {
        "index_add": (aten.index_add_.default, (matrix, 0, index, rows), {}),
        "scatter_add": (aten.scatter_add.default, (matrix, 0, places, rows), {}),
        "scatter_add of integers": (aten.scatter_add.default, (counts, 0, places, places), {}),
        "scatter of a number": (aten.scatter.value, (matrix, 0, places, 1.0), {}),
        "scatter of tensors": (aten.scatter.src, (matrix, 0, places, rows), {}),
        "index_put": (aten.index_put_.default, (matrix, [index], rows), {}),
        "index_put by mask": (aten.index_put_.default, (matrix, [mask], matrix), {}),
        "index_copy": (aten.index_copy.default, (matrix, 0, index, rows), {}),
        "cumsum": (aten.cumsum.default, (matrix, 0), {}),
        "cumsum of integers": (aten.cumsum.default, (counts, 0), {}),
        "cumsum of integers in floats": (aten.cumsum.default, (counts, 0), {"dtype": torch.float32}),
        "convolution": (aten.convolution.default, (*conv, False, [0, 0], 1), {}),
        "transposed convolution": (aten.convolution.default, (*conv, True, [0, 0], 1), {}),
        "addmm": (aten.mm.default, (matrix, matrix), {}),
    }


ANYWHERE = {"index_put": RACES, "index_copy": RACES}
ON_CARDS = {
    **ANYWHERE,
    "index_add": SUMS,
    "scatter_add": SUMS,
    "scatter of tensors": RACES,
    "cumsum": SUMS,
    "cumsum of integers in floats": SUMS,
    "transposed convolution": PICKS,
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_may_vary(device: str) -> None:
    with FakeTensorMode():
        found = {name: why_varying(*call) for name, call in calls(device).items()}
    assert {name: why for name, why in found.items() if why} == (ON_CARDS if device == "cuda" else ANYWHERE)


def test_deterministic_algorithms_do_not_vary(deterministic: None) -> None:
    with FakeTensorMode():
        assert not any(why_varying(*call) for call in calls("cuda").values())


def test_the_names_are_ops_of_this_pytorch() -> None:
    assert [name for name in ASKED if not hasattr(aten, name)] == []


class Routed(nn.Module):
    """Writes rows back by index, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x).index_put((torch.arange(len(x)),), self.layer(x))
        return made.sin()


def test_what_may_vary_is_kept_by_trace_and_runtime() -> None:
    model, x = Routed(), torch.rand(100, 64)
    trace = record(model, (x,))
    assert {op.name: op.keep for op in trace.ops if "index_put" in op.name} == {"aten.index_put.default": RACES}
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    install(model, script(model, (x,), None, everything))
    model(x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))
    assert ("aten.index_put.default", RACES) in [(kept.op, kept.reason) for kept in inspect(model).kept]


def test_positions_beyond_what_is_given() -> None:
    assert varies("bincount", (torch.zeros(4, dtype=torch.int64),), {}) == ""
