"""What Python costs around each op: in a plain step, and in one that follows a plan.

A Python function that runs once per op finds its code and data out of the processor's caches, driven out by the kernels
that ran in between, and then takes two to five times as long as in a loop of tiny ops. So a stand-in is timed on tiny
ops with real kernels in between, which move as much data as an op of the step moves. (Moving data alone does not do:
it leaves the caches of instructions, branches and addresses as they are.)
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

_TRAFFIC_BYTES = (0, 1 << 18, 2 << 20)
"""Bytes moved between two ops, for which the stand-in is timed; between them it is interpolated."""

_LEAST_TRAFFIC_BYTES = 1 << 16

_RUNS = 24

# Multiples of the stand-in, whose own code stays warmer than a model's: an empty mode costs an op of EfficientNet,
# U-Net, ViT, ConvNeXt or GPT-2 2.7 times as much, whatever the traffic. The rest was fitted to steps of these in which
# all ops were watched, and one or all that can be recorded were; single models lie a third off.
_WATCHED = 4.3
_RECORDED = 9.0
_HOOKED = 1.5
_QUIET_CALL = 3.2
_PLAIN = 0.8


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
    """What an empty dispatch mode adds to one op, with kernels that move that many bytes before each."""
    with bare_kernels():
        calls, kernels = _tiny_ops(), _kernels(traffic_bytes)
        plain = _seconds_per_op(calls, kernels)
        with _Empty():  # type: ignore[no-untyped-call]
            watched = _seconds_per_op(calls, kernels)
    return max(watched - plain, 1e-6)


def _tiny_ops() -> list[Callable[[], Any]]:
    """Ops that do next to nothing, with the numbers and kinds of arguments that ops of models have."""
    aten = torch.ops.aten
    x, v = torch.full((4, 4), 0.5), torch.full((4,), 0.5)
    image, weight = torch.full((1, 4, 2, 2), 0.5), torch.full((4, 4, 1, 1), 0.5)
    mean, var = torch.zeros(4), torch.ones(4)
    return [
        functools.partial(aten.view.default, x, [2, 8]),
        functools.partial(aten.t.default, x),
        functools.partial(aten.addmm.default, v, x, x),
        functools.partial(aten.native_layer_norm.default, x, [4], v, v, 1e-5),
        functools.partial(aten.mul.Tensor, x, x),
        functools.partial(aten.gelu.default, x),
        functools.partial(aten.convolution.default, image, weight, v, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        functools.partial(aten.native_batch_norm.default, image, v, v, mean, var, True, 0.1, 1e-5),
        functools.partial(aten.bmm.default, x[None], x[None]),
        functools.partial(aten.add.Tensor, x, x),
    ]


def _kernels(traffic_bytes: int) -> list[Callable[[], Any]]:
    """Kernels of different kinds that move about so many bytes each."""
    aten = torch.ops.aten
    number = max(traffic_bytes // 8, 64)  # read and written, of 4 bytes each
    side = max(math.isqrt(traffic_bytes // 12), 8)
    rows, square = torch.full((number // 64, 64), 0.5), torch.full((side, side), 0.5)
    return [
        functools.partial(aten.gelu.default, rows),
        functools.partial(aten.mm.default, square, square),
        functools.partial(aten.native_layer_norm.default, rows, [64], None, None, 1e-5),
    ]


def _seconds_per_op(calls: list[Callable[[], Any]], kernels: list[Callable[[], Any]]) -> float:
    """What one of the calls takes on average, each after one of the kernels."""
    runs: list[list[float]] = [[] for _ in calls]
    for turn in range(_RUNS):
        for i, call in enumerate(calls):
            kernels[(i + turn) % len(kernels)]()
            runs[i].append(_timed(call))
    # The lower half of the runs: whatever else the machine does only ever adds to them.
    return statistics.mean(statistics.median(sorted(found)[: _RUNS // 2]) for found in runs)


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
