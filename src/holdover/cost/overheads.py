"""What Python costs around each op: in a plain step, and in one that follows a plan.

A Python function that runs once per op finds its code and data out of the processor's caches, driven out by the op's
own data, and then takes two to three times as long as in a loop of tiny ops. So a stand-in is timed with as much data
moved in between as an op of the step moves.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from holdover.measuring._torch import TorchDispatchMode, bare_kernels

_TRAFFIC_BYTES = (0, 1 << 20, 8 << 20, 64 << 20)
"""Bytes moved between two ops, for which the stand-in is timed; between them it is interpolated."""

_LEAST_TRAFFIC_BYTES = 1 << 16

_RUNS = 40

# Multiples of the stand-in. In a loop of tiny ops (benchmarks/overhead.py) they are 0.7, 4, 0.7, 0.5; with 8 MB moved
# between ops, which drives out more of the runtime's code than of the stand-in's, 1.2, 7, 2 and 1.
_WATCHED = 1.0
_RECORDED = 6.0
_HOOKED = 1.4
_QUIET_CALL = 0.8
_PLAIN = 1.0


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of Python around ops: those that a plan adds beside the ops that it replays, and those of any step.

    Attributes:
        watched: an op of forward that the plan leaves alone, in a call where something is planned.
        recorded: an op whose results are dropped: noting how it was made, and the bookkeeping when it runs again.
        hooked: a tensor that autograd saves and the plan keeps, in forward and backward together.
        quiet_call: a module call that the plan leaves alone wholly.
        plain: what an op of the step takes without any plan, beside its kernel: autograd and the modules' Python.
    """

    watched: float
    recorded: float
    hooked: float
    quiet_call: float
    plain: float


def overheads(traffic_bytes: float = 0.0) -> Overheads:
    """What following a plan costs on this machine where an op moves that many bytes, on average.

    >>> tiny, large = overheads(0), overheads(8 << 20)
    >>> 0 < tiny.watched < tiny.recorded < 1e-2
    True
    """
    unit = _at(traffic_bytes)
    return Overheads(_WATCHED * unit, _RECORDED * unit, _HOOKED * unit, _QUIET_CALL * unit, _PLAIN * unit)


def _at(traffic_bytes: float) -> float:
    points = [math.log2(n + _LEAST_TRAFFIC_BYTES) for n in _TRAFFIC_BYTES]
    x = min(math.log2(traffic_bytes + _LEAST_TRAFFIC_BYTES), points[-1])
    k = next(k for k in range(len(points) - 1) if x <= points[k + 1])
    low, high = _stand_in_seconds(_TRAFFIC_BYTES[k]), _stand_in_seconds(_TRAFFIC_BYTES[k + 1])
    return low + (x - points[k]) / (points[k + 1] - points[k]) * (high - low)


class _Empty(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@functools.cache
def _stand_in_seconds(traffic_bytes: int) -> float:
    """What an empty dispatch mode adds to one op, with that many bytes moved before each."""
    source, target = bytearray(traffic_bytes // 2), memoryview(bytearray(traffic_bytes // 2))
    x = torch.empty(8)
    call = functools.partial(torch.ops.aten.view.default, x, (8,))

    def runs() -> list[float]:
        times = []
        for _ in range(_RUNS):
            target[:] = source  # no op, so that a mode does not see it
            times.append(_timed(call))
        return times

    with bare_kernels():
        plain = runs()
        with _Empty():  # type: ignore[no-untyped-call]
            watched = runs()
    # The lower half of the runs: whatever else the machine does only ever adds to them.
    return max(_lower_half(watched) - _lower_half(plain), 1e-6)


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _lower_half(runs: list[float]) -> float:
    return statistics.median(sorted(runs)[: len(runs) // 2])
