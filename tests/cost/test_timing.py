"""Timing by a clock that the test moves: what counts, what is left out, and when enough has been seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from holdover.cost import timing
from holdover.cost.timing import Timing, cold, warm

CPU = torch.device("cpu")


class Clock:
    """Moves only when a call takes its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0

    def call(self, seconds: Iterator[float]) -> Callable[[], None]:
        def run() -> None:
            self.calls += 1
            self.now += next(seconds)

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "clock_for", lambda device: lambda: made.now)
    monkeypatch.setattr(timing, "_clock_seconds", lambda clock: 0.0)
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 1024)
    timing._flush_buffer.cache_clear()
    return made


def forever(first: list[float], then: float) -> Iterator[float]:
    yield from first
    while True:
        yield then


def test_the_first_run_loads_and_does_not_count(clock: Clock) -> None:
    found = warm(clock.call(forever([9.0], 1e-3)), CPU)
    assert found.seconds == pytest.approx(1e-3)
    assert found.spread == pytest.approx(0.0)


def test_the_least_run_counts_and_the_usual_one_is_the_spread(clock: Clock) -> None:
    found = warm(clock.call(iter([9.0, 2e-3, 1e-3, 3e-3])), CPU)
    assert found.seconds == pytest.approx(1e-3)
    assert found.spread == pytest.approx(1.0)


def test_a_slow_call_is_not_repeated(clock: Clock) -> None:
    warm(clock.call(forever([], 1.0)), CPU)
    assert clock.calls == 2


def test_cold_runs_take_the_second_least(clock: Clock) -> None:
    found = cold(clock.call(iter([9.0, 5e-3, 1e-3, 2e-3, 4e-3, 3e-3])), CPU)
    assert found.seconds == pytest.approx(2e-3)
    assert found.spread == pytest.approx(0.5)


def test_of_two_timings_the_undisturbed_one_counts() -> None:
    assert Timing(2.0, 0.1).better(Timing(1.0, 0.5)) == Timing(1.0, 0.1)


def test_waiting_does_not_count_on_one_thread() -> None:
    assert torch.get_num_threads() == 1
    assert timing.clock_for(CPU) is __import__("time").thread_time
