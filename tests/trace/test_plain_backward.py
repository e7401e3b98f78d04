"""Backward as it is without anybody watching: the recorded step against bytes counted by hand, and the profiler's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdover
from holdover.memory.measure import measure_peak
from holdover.memory.simulate import simulate
from holdover.memory.timeline import phase_peaks
from holdover.trace.graph import Phase, Trace
from holdover.trace.plain_backward import NO_ZEROS
from holdover.trace.record import record

SIDE = 64
TENSOR = 4 * SIDE * SIDE  # bytes of one float32 tensor of SIDE x SIDE
SCALARS = 64  # what is left of a peak when whole tensors are counted


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * 2


twice: Callable[[torch.Tensor], torch.Tensor] = Twice.apply


class Reads(nn.Module):
    """Reads h = weight * 2 in some way, beside other tensors."""

    def __init__(self, read: Callable[..., torch.Tensor], *others: torch.Tensor) -> None:
        super().__init__()
        self.read, self.others = read, others
        self.weight = nn.Parameter(torch.rand(SIDE, SIDE) + 0.5)

    def forward(self) -> torch.Tensor:
        return self.read(self.weight * 2, *self.others)


def hooked(h: torch.Tensor) -> torch.Tensor:
    h.register_hook(lambda gradient: None)
    return h.sum() + h.mean() + h.tanh().sum()


def in_place(trace: Trace) -> int:
    return sum(op.name == "aten.add_.Tensor" for op in trace.ops if op.phase is Phase.BACKWARD)


def measured(model: nn.Module) -> int:
    def step() -> None:
        output = model()
        loss = output.sum()
        loss.backward()

    return measure_peak(step, model)[1]


READS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int, int]] = {
    # tensors at the peak of backward, and additions in place
    # the weight, tanh's gradient, mean's; sum's has no memory of its own and is added last
    "of tanh, mean and sum": (lambda h: h.sum() + h.mean() + h.tanh().sum(), 3, 2),
    # the weight, h, the output, and the gradients of both operands, of which the second is added to the first
    "of both operands of one op": (lambda h: h * h, 5, 1),
    # the sum's gradient comes first, and is one number for all elements: there is nothing to add to in place.
    # The weight, sum + mean, mean's gradient
    "of what is expanded first": (lambda h: h.mean() + h.sum(), 3, 0),
    # the weight, both gradients of the halves, each as large as the whole, and what narrow's backward copies from
    "of its halves": (lambda h: h[:, : SIDE // 2].exp().sum() + h[:, SIDE // 2 :].sum(), 3, 1),
    "of a tensor with a hook": (hooked, 3, 2),
}


@pytest.mark.parametrize("name", READS)
def test_gradients_of_one_tensor_are_added_where_the_engine_adds_them(name: str) -> None:
    read, tensors, added = READS[name]
    model = Reads(read)
    trace = record(model)
    assert in_place(trace) == added
    assert phase_peaks(trace, simulate(trace))[0, Phase.BACKWARD] // TENSOR == tensors
    assert abs(holdover.estimate(model).peak_bytes - measured(model)) <= SCALARS


@pytest.mark.parametrize("name", READS)
def test_on_a_card_the_same_gradients_are_added_in_place(name: str) -> None:
    read, tensors, added = READS[name]
    estimate = holdover.estimate(Reads(read), device="h100-80gb")
    assert in_place(estimate.trace) == added
    assert phase_peaks(estimate.trace, simulate(estimate.trace))[0, Phase.BACKWARD] // TENSOR == tensors


ON_CARD: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    # the weight, h, the output, that times the gradient, where h is 0, that flipped, summed up and flipped back
    "cumprod": (lambda h: h.cumprod(1), 1 + 1 + 1 + 1 + 0.25 + 3),
    # the weight, h, where it is no number (and the maximum neither), where it is the maximum, the gradient, times 2
    "max": (torch.max, 1 + 1 + 0.25 + 0.25 + 1),
}


@pytest.mark.parametrize("name", ON_CARD)
def test_on_a_card_formulas_run_as_there(name: str) -> None:
    function, tensors = ON_CARD[name]
    trace = holdover.estimate(Reads(function), device="h100-80gb").trace
    peak = phase_peaks(trace, simulate(trace))[0, Phase.BACKWARD]
    assert abs(peak - tensors * TENSOR) <= SCALARS


ELSEWHERE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "passed on to two": lambda h: (h + h.sin()) * torch.ones(SIDE, SIDE),
    "of a custom function, last": lambda h: twice(h).sum() + h.tanh().sum() + h.mean(),
    "of a custom function, first": lambda h: h.tanh().sum() + h.mean() + twice(h * 1.0).sum(),
    "a transposed one": lambda h: h.mT.tanh().sum() + h.mean() + h.sum(),
    "several times": lambda h: h + h + h + h,
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_sums_of_gradients_take_what_the_profiler_sees(name: str) -> None:
    model = Reads(ELSEWHERE[name])
    assert abs(holdover.estimate(model).peak_bytes - measured(model)) <= SCALARS


class Penalty(nn.Module):
    """A gradient inside of forward, which is itself to be differentiated: no sum of gradients is in place then."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIDE, SIDE))

    def forward(self) -> torch.Tensor:
        h = self.weight * 2
        (gradient,) = torch.autograd.grad(h.tanh().sum() + h.sin().sum(), h, create_graph=True)
        return gradient.square().sum()


def test_nothing_is_added_in_place_that_is_to_be_differentiated() -> None:
    trace = record(Penalty())
    inner = [op for op in trace.ops if op.name.startswith("aten.add") and op.id < trace.slots[-1].op]
    assert "aten.add.Tensor" in {op.name for op in inner}
    assert "aten.add_.Tensor" not in {op.name for op in inner}
    assert abs(holdover.estimate(Penalty()).peak_bytes - measured(Penalty())) <= SCALARS


INDEX = torch.arange(SIDE * SIDE // 2)
TARGET = torch.rand(SIDE, SIDE)

FORMULAS: dict[str, tuple[Reads, float]] = {
    # at the peak, in tensors of float32: the weight, what else there is before, h, and
    # the zeros that become its gradient, the mask (a quarter), and the mask in int64 while it is summed
    "max": (Reads(torch.max), 1 + 1 + 1 + 0.25 + 2),
    "min": (Reads(torch.min), 1 + 1 + 1 + 0.25 + 2),
    "median": (Reads(torch.median), 1 + 1 + 1 + 0.25 + 2),
    # the output, and sigmoid(h), which becomes the gradient
    "binary cross entropy": (
        Reads(lambda h, y: F.binary_cross_entropy_with_logits(h, y, reduction="none"), TARGET), 1 + 1 + 1 + 1 + 1
    ),
    # the index (half as many, twice as wide), no h, the output, the zeros that become the gradient, that times 2
    "take": (Reads(lambda h, index: h.take(index), INDEX), 1 + 1 + 0.5 + 1 + 1),
    # h, the output, that times the gradient, where h is 0 (a quarter), that flipped, summed up and flipped back
    "cumprod": (Reads(lambda h: h.cumprod(1)), 1 + 1 + 1 + 1 + 0.25 + 3),
    # no h, the zeros that become the gradient, that times 2
    "trace": (Reads(torch.trace), 1 + 1 + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_write_to_what_they_have_made(name: str) -> None:
    model, tensors = FORMULAS[name]
    peak = holdover.estimate(model).peak_bytes
    assert abs(peak - tensors * TENSOR) <= 2048
    assert abs(peak - measured(model)) <= SCALARS


def test_what_depends_on_zeros_is_said_where_there_is_no_data_and_looked_up_where_there_is() -> None:
    assert NO_ZEROS in record(Reads(lambda h: h.cumprod(1))).uncertainties
    with_data = Reads(lambda h: h.cumprod(1) * (1.0 if h.sum() > 0 else 2.0))
    few = holdover.estimate(with_data)
    assert few.recorded_on == "real"
    assert NO_ZEROS not in few.uncertainties
    assert abs(few.peak_bytes - measured(with_data)) <= SCALARS
    with torch.no_grad():
        with_data.weight[0, 0] = 0.0
    many = holdover.estimate(with_data).peak_bytes
    assert many >= measured(with_data) > few.peak_bytes


def test_clamp_between_tensors() -> None:
    low, high = torch.full((SIDE, SIDE), 0.6), nn.Parameter(torch.full((SIDE, SIDE), 2.0))
    model = Reads(lambda h, low, high: h.clamp(low, high), low, high)
    assert abs(holdover.estimate(model).peak_bytes - measured(model)) <= SCALARS


def test_recorded_on_real_tensors_gradients_are_right() -> None:
    """Then the ops in place run for real, on the tensors of the step."""
    model = Reads(lambda h: (h.sum() + h.mean() + h.max()) * (1.0 if h.sum() > 0 else 2.0))
    trace = record(model)
    assert trace.recorded_on == "real"
    assert in_place(trace) == 2
    assert abs(holdover.estimate(model).peak_bytes - measured(model)) <= SCALARS
