"""What the simulator says a plan holds is what the runtime really holds, op for op and byte for byte."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.memory.programs import ROWS, WIDTH, Program, programs, script
from torch import nn

import holdover
from holdover.memory.estimate import workspaces
from holdover.memory.measure import measure_peak
from holdover.memory.simulate import simulate
from holdover.memory.timeline import NOTHING, Choices
from holdover.memory.workspace import true_outputs
from holdover.planning.packing import packable
from holdover.planning.problem import candidates
from holdover.recompute.apply import install
from holdover.recompute.inspect import inspect
from holdover.trace.graph import Trace
from holdover.trace.record import record

TOLERANCE = 2048  # scalars and allocator rounding; a tensor of these programs has 6,144 bytes


def measured(model: nn.Module, x: torch.Tensor) -> int:
    """The real peak of forward and backward, with the output alive to the end as while recording."""

    def step() -> None:
        out = model(x)
        loss = out.sum()
        loss.backward()

    step()
    for p in model.parameters():
        p.grad = None
    return measure_peak(step, model, x)[1]


def simulated(trace: Trace, choices: Choices = NOTHING) -> Any:
    return simulate(trace, choices, workspaces(trace)[0], detail=False)


def trace_bytes(trace: Trace, value: int) -> int:
    return trace.storages[trace.values[value].storage].nbytes


@given(program=programs, picks=st.lists(st.booleans(), min_size=40, max_size=40), everything=st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_recorded_set_of_any_program(program: Any, picks: list[bool], everything: bool) -> None:
    model, x = Program(program), torch.rand(ROWS, WIDTH)
    trace = record(model, (x,), corrections=true_outputs)
    _, eligible = candidates(trace, with_loss=False)
    ops = [o for o, pick in zip(eligible, picks, strict=False) if pick or everything]
    plain = simulated(trace)
    assert plain.peak_bytes == pytest.approx(measured(model, x), abs=TOLERANCE)

    planned = simulated(trace, Choices(frozenset(ops)))
    install(model, script(trace, ops))
    real = measured(model, x)
    assert real - planned.peak_bytes <= TOLERANCE
    if not any(name == "inner_gradient" for name, _, _ in program):
        assert real - planned.peak_bytes >= -TOLERANCE
        assert inspect(model).replayed_ops == sum(planned.replays.values())


@given(
    program=programs,
    picks=st.lists(st.booleans(), min_size=40, max_size=40),
    steps=st.lists(st.sampled_from([0, 0, 1]), min_size=40, max_size=40),
    reach=st.lists(st.integers(0, 3), min_size=40, max_size=40),
    everything=st.booleans(),
)
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_stages_of_any_program(
    program: Any, picks: list[bool], steps: list[int], reach: list[int], everything: bool
) -> None:
    """Nested replays: results that higher stages drop again are made again, with the same bits and the same bytes."""
    model, x = Program(program), torch.rand(ROWS, WIDTH)
    trace = record(model, (x,), corrections=true_outputs)
    _, eligible = candidates(trace, with_loss=False)
    chosen = [o for o, pick in zip(eligible, picks, strict=False) if pick or everything]
    stages = {o: (s, s + more) for o, s, more in zip(chosen, itertools.accumulate(steps), reach, strict=False)}

    def gradients() -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model(x).sum().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    state = copy.deepcopy(model.state_dict())
    plain = gradients()
    model.load_state_dict(state)
    planned = simulated(trace, Choices(frozenset(stages), stages=stages))
    plan = script(trace, list(stages))
    for o, (stage, held_from) in stages.items():
        place = plan[trace.calls[trace.ops[o].call].key]
        place[trace.ops[o].index] = (*place[trace.ops[o].index], stage, held_from)
    install(model, plan)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
    real = measured(model, x)
    assert real - planned.peak_bytes <= TOLERANCE
    if not any(name == "inner_gradient" for name, _, _ in program):
        assert real - planned.peak_bytes >= -TOLERANCE
        assert inspect(model).replayed_ops == sum(planned.replays.values())


class Pooling(nn.Module):
    """Saves int64 indices of 64 KiB and a bool mask of 8 KiB, which can be held in an eighth and less."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(x * self.scale, 2)
        return torch.cat([torch.native_dropout(y, 0.4, True)[0]] * 16).sin()


def test_packed_values() -> None:
    model, x = Pooling(), torch.rand(4, 1, 32, 32)
    trace = record(model, (x,), corrections=true_outputs)
    pack = packable(trace)
    assert sorted(pack.values()) == [4 * 8 * 16 * 16 // 8, 4 * 8 * 16 * 16 * 2]
    makers = [trace.values[v].maker for v in pack]
    plain = measured(model, x)
    planned = simulated(trace, Choices(pack=pack)).peak_bytes
    install(model, script(trace, makers, "pack"))
    real = measured(model, x)
    assert abs(real - planned) <= TOLERANCE
    assert plain - real == pytest.approx(sum(trace_bytes(trace, v) for v in pack) - sum(pack.values()), abs=TOLERANCE)


@pytest.mark.parametrize("function", [torch.tanh, torch.sigmoid, torch.exp, lambda t: t.softmax(-1), F.relu])
def test_a_kept_result_whose_backward_never_comes_is_freed(function: Any) -> None:
    class Saving(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(super().forward(x))

    model, x = Saving(nn.Linear(WIDTH, WIDTH), nn.GELU()), torch.rand(1000, WIDTH)
    install(model, {"model/1": {0: ("aten.gelu.default", "recompute")}})

    def forwards(n: int) -> None:
        for _ in range(n):
            model(x)

    forwards(1)
    assert measure_peak(lambda: forwards(2))[1] == measure_peak(lambda: forwards(9))[1]


@pytest.mark.parametrize(
    "function",
    [lambda y: y.max(-1)[0], lambda y: y.topk(4)[0], lambda y: y.sort(-1)[0], lambda y: y.median(-1)[0],
     lambda y: y[:, torch.tensor([1, 3])], lambda y: y.index_select(1, torch.tensor([1, 3])),
     lambda y: y.gather(1, torch.ones(64, 900, dtype=torch.int64)), lambda y: y.cummax(-1)[0]],
    ids=["max", "topk", "sort", "median", "index", "index_select", "gather", "cummax"],
)  # fmt: skip
def test_backward_formulas_that_write_into_zeros(function: Any) -> None:
    """They copy instead under a dispatch mode, as while recording; what is recorded is what a real step does."""

    class Choosing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(super().forward(x))

    model, x = Choosing(8, 1000), torch.rand(64, 8)
    assert simulated(record(model, (x,), corrections=true_outputs)).peak_bytes == pytest.approx(
        measured(model, x), abs=TOLERANCE
    )


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_cells_whose_parts_count_versions_apart(cell: Any) -> None:
    """The CPU's GRU writes in place to parts of one tensor that do not share a version counter: those are kept."""

    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state: Any = None
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return state[0] if isinstance(state, tuple) else state

    model, x = Unrolled(), torch.randn(64, 6, 32)
    trace = record(model, (x,), corrections=true_outputs)
    _, eligible = candidates(trace, with_loss=False)
    planned = simulated(trace, Choices(frozenset(eligible))).peak_bytes
    install(model, script(trace, eligible))
    assert measured(model, x) == pytest.approx(planned, abs=2 * TOLERANCE)


def test_two_contents_of_one_storage_are_there_at_once() -> None:
    """Backward uses what `silu_` made while what it overwrote, on the same storage, waits for its gradient."""
    model, x = Program([("gelu", 0, 0), ("silu_", 0, 0), ("linear", 0, 0)]), torch.rand(ROWS, WIDTH)
    trace = record(model, (x,), corrections=true_outputs)
    _, eligible = candidates(trace, with_loss=False)
    planned = simulated(trace, Choices(frozenset(eligible)))
    install(model, script(trace, eligible))
    assert measured(model, x) - planned.peak_bytes == pytest.approx(0, abs=TOLERANCE)


class LossInside(nn.Module):
    """Returns the loss and the logits that it was made of, which a matrix product passes on without its own tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()),
            nn.Linear(4 * WIDTH, 300, bias=False),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(x))
        return F.cross_entropy(logits.flatten(0, 1), torch.zeros(x.shape[0] * 8, dtype=torch.int64)), logits

    def step(self, x: torch.Tensor) -> None:
        loss, logits = self(x)  # as in `measured`, the output is there to the end
        loss.backward()
        del logits


@pytest.mark.parametrize("dropped", [("mm", "_log_softmax"), ("gelu", "nll_loss_forward"), ("_log_softmax",), ("mm",)])
def test_what_the_program_holds_of_a_loss_within_the_model(dropped: tuple[str, ...]) -> None:
    """Recipes of what is held end with forward; logits are held, but not as the tensor that the product made."""
    model, x = LossInside(), torch.rand(16, 8, WIDTH)
    trace = record(model, (x,), loss=lambda out: out[0], corrections=true_outputs)
    _, eligible = candidates(trace, with_loss=False)
    ops = [o for o in eligible if trace.ops[o].name.split(".")[1] in dropped]
    assert len(ops) == len(dropped)
    planned = simulated(trace, Choices(frozenset(ops)))
    install(model, script(trace, ops))
    model.step(x)
    for p in model.parameters():
        p.grad = None
    assert measure_peak(lambda: model.step(x), model, x)[1] == pytest.approx(planned.peak_bytes, abs=TOLERANCE)
    assert inspect(model).replayed_ops == sum(planned.replays.values())


class Halved(torch.autograd.Function):
    """A tanh in place that tells autograd so: marking it dirty counts one write more than its ops did."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5).tanh_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y) * 0.5


def test_what_a_custom_function_marks_dirty_is_kept_and_said_to_be() -> None:
    class Dirty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Halved.apply(x * self.scale).sin().exp()

    model, x = Dirty(), torch.rand(ROWS, WIDTH)
    trace = record(model, (x,), corrections=true_outputs)
    (tanh,) = [op for op in trace.ops if op.name == "aten.tanh_.default"]
    assert "mark_dirty" in tanh.keep
    plan = holdover.plan(model, (x,), budget="min", time_limit=2)
    assert not any(choice.op == "aten.tanh_.default" for choice in plan.choices)
    holdover.apply_(model, plan)
    assert measured(model, x) - plan.predicted_peak_bytes <= TOLERANCE
    assert inspect(model).kept == ()
