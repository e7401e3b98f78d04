"""Seconds per op on the machine at hand: each distinct op is timed once, and what cannot be is modelled from the rest.

A plan weighs an op's time against the bytes of its result, so proportions between ops matter more than the last
percent, and measuring must not take longer than planning.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from holdover.cost.flops import Work, work_of
from holdover.measuring._torch import TorchDispatchMode, bare_kernels
from holdover.measuring.arguments import Arena, UnrunnableError, argument_bytes, is_view_or_factory
from holdover.measuring.machine import free_bytes
from holdover.measuring.store import open_store
from holdover.trace.graph import Signature

_TOTAL_SECONDS = 2.5
_REPEAT_SECONDS = 3e-3
_SLOW_SECONDS = 0.15  # an op is not repeated once it has taken this long in all
_RUNS = 3  # at least, the first one to warm up included
_SECOND_CHANCES = 20
_PROBE_SIZE = 768
_FREE_SHARE = 4  # at most a quarter of the free memory is taken
_EMPTY_MODES_PER_REPLAY = 3.0  # measured: 14 us where an empty dispatch mode costs 4.7


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one run of an op takes: `source` says whether that very op was timed, or modelled from others."""

    seconds: float
    source: Literal["measured", "modelled"]


def price(signatures: Sequence[Signature], *, device: str = "cpu") -> list[OpCost]:
    """Seconds that each op takes on `device`, the call from Python included.

    Args:
        signatures: the distinct ops of a trace.
        device: "cpu", or a CUDA device that is there.

    Returns:
        One cost per signature, in order. What recomputation adds per op is not in it: see `replay_overhead_seconds`.

    Small ops are timed first, until `_TOTAL_SECONDS` are used up; larger ones, ops too large for the free memory and
    ops that do not run on made-up arguments are modelled by FLOPs and bytes, at the rates of the timed ones (those of
    the same name first). Results are kept on disk. Random states, grad mode and threads are left as found.

    >>> from holdover.trace.graph import TensorSpec
    >>> x = TensorSpec((64, 64), (64, 1), "float32", "cpu")
    >>> [cost.source for cost in price([Signature("aten.mm.default", (x, x), ())])]
    ['measured']
    """
    target = torch.device(device)
    store = open_store(target)
    launch = launch_seconds(device)
    work = [work_of(signature) for signature in signatures]
    seconds: dict[int, float] = {}
    missing: list[int] = []
    for i, signature in enumerate(signatures):
        if is_view_or_factory(signature.name):
            seconds[i] = launch
        elif (known := store.get("seconds", signature)) is not None:
            seconds[i] = known
        else:
            missing.append(i)
    missing.sort(key=lambda i: _ASSUMED.seconds(work[i]))
    arena, deadline, limit = Arena(target), time.perf_counter() + _TOTAL_SECONDS, free_bytes() // _FREE_SHARE
    for i in missing:
        if time.perf_counter() + _RUNS * _ASSUMED.seconds(work[i]) > deadline:
            break  # the rest is larger still
        measured = _measured(signatures[i], work[i], arena, limit)
        if measured is not None:
            seconds[i] = measured
    model = _Model([(signatures[i].name, work[i], s) for i, s in seconds.items()], target)
    # Another program's burst makes an op look many times slower; those that stand out get a second chance.
    timed = [i for i in missing if i in seconds]
    timed.sort(key=lambda i: seconds[i] - model.rates.seconds(work[i]), reverse=True)
    for i in timed[:_SECOND_CHANCES]:
        if time.perf_counter() > deadline + _TOTAL_SECONDS / 4:
            break
        again = _measured(signatures[i], work[i], arena, limit)
        seconds[i] = min(seconds[i], again or seconds[i])
    for i in timed:
        store.put("seconds", signatures[i], seconds[i])
    store.save()
    if len(seconds) < len(signatures):
        model = _Model([(signatures[i].name, work[i], s) for i, s in seconds.items()], target)
    return [
        OpCost(seconds[i], "measured")
        if i in seconds
        else OpCost(max(launch, model.seconds(signature.name, work[i])), "modelled")
        for i, signature in enumerate(signatures)
    ]


@functools.cache
def launch_seconds(device: str) -> float:
    """Seconds that an op without work takes on `device`: a view, called from Python."""
    x = torch.empty(8, device=device)
    with bare_kernels():
        return _seconds(lambda: torch.ops.aten.view.default(x, (8,)), torch.device(device))


@functools.cache
def replay_overhead_seconds(device: str) -> float:
    """Seconds that recording and replaying add per op, beside the op's own time.

    That is Python's work on the processor, so it hardly depends on `device`. It is scaled from what an empty dispatch
    mode costs here, which is a third of it.
    """

    class Empty(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    x = torch.empty(8)
    call = functools.partial(torch.ops.aten.view.default, x, (8,))
    plain = _seconds(call, torch.device("cpu"))
    with Empty():  # type: ignore[no-untyped-call]
        watched = _seconds(call, torch.device("cpu"))
    return _EMPTY_MODES_PER_REPLAY * max(watched - plain, 1e-6)


def _measured(signature: Signature, work: Work, arena: Arena, limit: int) -> float | None:
    """Seconds of one call, None if it cannot be run here."""
    try:
        if argument_bytes(signature) + work.nbytes > limit:
            return None
        with bare_kernels():
            op, args, kwargs = arena.call(signature)
            seconds = _seconds(lambda: op(*args, **kwargs), arena.device)
            arena.restore(op, args, kwargs)
    except (RuntimeError, UnrunnableError, TypeError, ValueError, NotImplementedError, IndexError):
        return None
    return seconds


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The least of several runs: whatever else the machine does only ever adds to it."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()  # the first run also loads and compiles kernels
    best = total = once()
    runs = 1
    while total < _SLOW_SECONDS and (runs < 3 or (total < _REPEAT_SECONDS and runs < 50)):
        seconds = once()
        best, total, runs = min(best, seconds), total + seconds, runs + 1
    return best


@dataclass(frozen=True)
class _Rates:
    flops: float
    nbytes: float

    def seconds(self, work: Work) -> float:
        """The roofline: an op waits for arithmetic or for memory, whichever takes longer."""
        return max(work.flops / self.flops, work.nbytes / self.nbytes)


_ASSUMED = _Rates(flops=2e10, nbytes=5e9)


class _Model:
    """Seconds from FLOPs and bytes, at the rates that the timed ops reached on this machine."""

    def __init__(self, timed: Sequence[tuple[str, Work, float]], device: torch.device) -> None:
        heavy = [(w.flops, s) for _, w, s in timed if w.flops > 4 * w.nbytes and w.flops > 1e6]
        light = [(w.nbytes, s) for _, w, s in timed if w.flops <= 4 * w.nbytes and w.nbytes > 1e5]
        size = _PROBE_SIZE
        x = torch.full((size, size), 0.5, device=device)
        if not any(flops >= 2 * size**3 for flops, _ in heavy):  # small products do not reach the machine's rate
            heavy = [(2 * size**3, _seconds(lambda: torch.mm(x, x), device))]
        if not light:
            light = [(2 * x.nbytes, _seconds(lambda: torch.neg(x), device))]
        self.rates = _Rates(_usual(heavy), _usual(light))
        ratios: dict[str, list[float]] = defaultdict(list)
        for name, w, s in sorted(timed, key=lambda row: self.rates.seconds(row[1])):
            if (expected := self.rates.seconds(w)) > 0:
                ratios[name].append(s / expected)
        # The largest timed ones are most like those that were too large to be timed.
        self.ratio = {name: statistics.median(values[-3:]) for name, values in ratios.items()}

    def seconds(self, name: str, work: Work) -> float:
        return self.rates.seconds(work) * self.ratio.get(name, 1.0)


def _usual(samples: Sequence[tuple[int, float]]) -> float:
    """Amount per second that the better half of the samples reach."""
    rates = sorted(amount / seconds for amount, seconds in samples)
    return rates[(3 * len(rates)) // 4] if len(rates) > 1 else rates[0]
