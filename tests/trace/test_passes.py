"""What activation checkpointing inside the model does beside its ops: runs of the engine, and generator states."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from holdover.memory.estimate import estimate
from holdover.memory.measure import measure_peak
from holdover.memory.simulate import simulate
from holdover.trace.generators import seeing_states
from holdover.trace.graph import Category, Event, Phase, Trace
from holdover.trace.record import record
from holdover.trace.recorder import Recorder

STATE = 5056  # bytes of the CPU's generator state


class Region(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.sin, x, **self.options)  # type: ignore[no-any-return]


class Regions(nn.Module):
    """sin(sin(x * scale)) * scale, each sine made again in backward."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1000,), 2.0))
        self.first, self.second = Region(**options), Region(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x * self.scale)) * self.scale


def passes(trace: Trace) -> list[int]:
    """The runs of the engine in the order in which they ask, numbered from 0."""
    numbers = [number for kind, number in trace.events if kind is Event.PASS]
    first = min(n for n in numbers if n >= 0)
    return [n - first if n >= 0 else n for n in numbers]


def test_a_reentrant_region_is_a_run_within_the_outer_one() -> None:
    assert passes(record(Regions(use_reentrant=True), (torch.ones(1000),))) == [0, 1, 0, 2, 0, -1]
    assert passes(record(Regions(use_reentrant=False), (torch.ones(1000),))) == [0, -1]


def test_each_step_has_a_run_of_its_own() -> None:
    trace = record(nn.Linear(4, 4), (torch.ones(2, 4),), optimizer="sgd")
    assert passes(trace) == [0, -1, 1, -1]


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient today")


refuses: Any = Refuses.apply


class Catches(torch.autograd.Function):
    """Its backward tries the gradient of another graph, and gives the incoming one twice when that fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad(), pytest.raises(ValueError, match="no gradient today"):
            refuses(torch.ones(1000, requires_grad=True).tanh()).exp().sum().backward()
        return gradient * 2


catches: Any = Catches.apply


class Tries(nn.Module):
    """Asks twice for gradients that fail, catches that, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1000,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x * self.scale).sin()
        for _ in range(2):
            with pytest.raises(ValueError, match="no gradient today"):
                torch.autograd.grad(refuses(hidden.tanh()).exp().sum(), self.scale)
        return hidden.cos().sum()


def peak_of(model: nn.Module) -> int:
    def step() -> None:
        loss = model(torch.ones(1000))
        loss.sum().backward()

    return measure_peak(step, model)[1]


def test_a_run_that_failed_is_over() -> None:
    trace = record(Tries(), (torch.ones(1000),))
    assert passes(trace) == [0, -1, 1, -1, 2, -1]


def test_a_run_that_failed_within_another_gives_way_to_it() -> None:
    class Model(Tries):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return catches(catches((x * self.scale).sin())).cos()  # type: ignore[no-any-return]

    assert passes(record(Model(), (torch.ones(1000),))) == [0, 1, 0, 2, 0, -1]


def test_memory_of_a_step_that_survives_failed_runs() -> None:
    """Scale, x, their product, its sine, and of the run that fails tanh, exp and exp's gradient: 4,000 bytes each."""
    peak = estimate(Tries(), (torch.ones(1000),)).peak_bytes
    assert 0 <= peak - 7 * 4000 <= 16
    assert abs(peak - peak_of(Tries())) <= 16


def states_held(trace: Trace) -> list[int]:
    """Bytes of generator states in memory at each op of forward."""
    states = {s.id for s in trace.storages if s.name == "generator state"}
    assert all(trace.storages[s].nbytes == STATE and trace.storages[s].category is Category.TEMPORARY for s in states)
    now, seen = 0, []
    for kind, number in trace.events:
        if kind in (Event.HOLD, Event.DROP) and number in states:
            now += STATE if kind is Event.HOLD else -STATE
        elif kind is Event.OP and trace.ops[number].phase is Phase.FORWARD:
            seen.append(now)
    assert now == 0  # backward has let go of them all
    return seen


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_each_region_holds_a_generator_state_from_its_forward_on(reentrant: bool) -> None:
    trace = record(Regions(use_reentrant=reentrant), (torch.ones(1000),))
    assert states_held(trace) == [0, STATE, 2 * STATE, 2 * STATE]  # at mul, sin, sin, mul


def test_without_preserving_the_state_there_is_none() -> None:
    trace = record(Regions(use_reentrant=True, preserve_rng_state=False), (torch.ones(1000),))
    assert not any(s.name == "generator state" for s in trace.storages)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_the_peak_is_the_real_one_to_the_byte(reentrant: bool) -> None:
    model, x = Regions(use_reentrant=reentrant), torch.ones(1000)
    trace = record(model, (x,))

    def step() -> None:
        output = model(x)
        output.sum().backward()

    assert simulate(trace).peak_bytes == measure_peak(step, model, x)[1]


def test_the_functions_are_put_back() -> None:
    take = torch.get_rng_state
    record(nn.Linear(4, 4), (torch.ones(2, 4),))
    assert torch.get_rng_state is torch.random.get_rng_state is take


def test_states_that_another_thread_takes_are_no_part_of_the_step() -> None:
    """Such as one that loads data: to it, the function is what it was, and it may keep it."""
    own = torch.get_rng_state
    recorder = Recorder(real=True)
    kept: list[Any] = []
    with seeing_states(recorder):
        other = threading.Thread(target=lambda: kept.extend([torch.get_rng_state, torch.get_rng_state()]))
        other.start()
        other.join()
        assert not recorder.trace.storages
        mine = torch.get_rng_state()
        assert [(s.name, s.nbytes) for s in recorder.trace.storages] == [("generator state", STATE)]
    assert torch.get_rng_state is torch.random.get_rng_state is own
    take, state = kept
    assert torch.equal(state, mine)
    assert torch.equal(take(), mine)


def test_two_threads_that_record_at_once_see_their_own_states() -> None:
    own, here, done = torch.get_rng_state, threading.Event(), threading.Event()
    counts: dict[str, int] = {}

    def other() -> None:
        recorder = Recorder(real=True)
        with seeing_states(recorder):
            here.set()
            done.wait(60)
            torch.get_rng_state()
        counts["other"] = len(recorder.trace.storages)

    thread = threading.Thread(target=other)
    recorder = Recorder(real=True)
    with seeing_states(recorder):
        thread.start()
        here.wait(60)
        torch.get_rng_state()
    counts["own"] = len(recorder.trace.storages)
    done.set()
    thread.join()
    assert counts == {"own": 1, "other": 1}
    assert torch.get_rng_state is own
