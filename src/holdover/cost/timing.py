"""Timing one call on a machine that others use too: many runs, the least of them, and how far apart they lay."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdover.measuring.machine import free_bytes

POOR_SPREAD = 0.25
"""A timing whose usual run is slower than its least by more than this share is not to be relied upon."""

_REPEAT_SECONDS = 3e-3
_SLOW_SECONDS = 0.15  # a call is not repeated once it has taken this long in all
_COLD_RUNS = 5
_FLUSH_BYTES = 128 << 20  # larger than a processor's caches, and than what its address translation remembers
_FLUSH_SHARE = 8  # of the free memory


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call. `spread` is by how much its usual run was slower than the least, as a share of that."""

    seconds: float
    spread: float

    def better(self, other: Timing) -> Timing:
        """The less disturbed of two timings of one call: others can only ever add to it."""
        return Timing(min(self.seconds, other.seconds), min(self.spread, other.spread))


def warm(call: Callable[[], Any], device: torch.device) -> Timing:
    """One call after the other on the same arguments; the first run, which also loads and compiles, does not count."""
    _once(call, device)
    runs = [_once(call, device)]
    while (total := sum(runs)) < _SLOW_SECONDS and (len(runs) < 3 or (total < _REPEAT_SECONDS and len(runs) < 50)):
        runs.append(_once(call, device))
    return _timing(runs, 0)


def cold(call: Callable[[], Any], device: torch.device) -> Timing:
    """With the caches emptied before each run, as replays find them: forward was long ago.

    The second least of a few runs: how cold the caches are differs from run to run, and is no disturbance.
    """
    buffer = _flush_buffer(device)
    _once(call, device)
    runs: list[float] = []
    while len(runs) < _COLD_RUNS and sum(runs) < _SLOW_SECONDS:
        buffer.mul_(1.0)
        runs.append(_once(call, device))
    return _timing(runs, 1)


def _timing(runs: list[float], place: int) -> Timing:
    ordered = sorted(runs)
    found = ordered[min(place, len(ordered) - 1)]
    return Timing(found, max(0.0, statistics.median(ordered) / found - 1.0) if found else 0.0)


def _once(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        return _event_seconds(call, device)
    clock = clock_for(device)
    start = clock()
    result = call()
    seconds = clock() - start
    del result  # afterwards: to free memory is the business of whoever lets go of it
    return max(seconds - _clock_seconds(clock), 1e-9)


def _event_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """By the card's own clock, from an idle card: between two events on its stream."""
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        result = call()
        end.record()
        end.synchronize()
    del result
    milliseconds: float = begin.elapsed_time(end)
    return max(milliseconds / 1e3, 1e-9)


def clock_for(device: torch.device) -> Callable[[], float]:
    """This thread's processor time where all work is done in it, so that waiting for other programs does not count."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


@functools.cache
def _clock_seconds(clock: Callable[[], float]) -> float:
    """What looking at the clock takes by itself."""
    return min(-(clock() - clock()) for _ in range(50))


@functools.lru_cache(maxsize=1)
def _flush_buffer(device: torch.device) -> torch.Tensor:
    return torch.ones(min(_FLUSH_BYTES, free_bytes() // _FLUSH_SHARE) // 4, device=device)
