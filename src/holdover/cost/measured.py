"""Seconds per op on the machine at hand: each distinct op is timed, and what cannot be is modelled from the rest.

A plan weighs an op's time against the bytes of its result, so proportions between ops matter more than the last
percent, and measuring must not take longer than planning.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from holdover.cost.flops import Work, work_of
from holdover.cost.timing import POOR_SPREAD, Timing, clock_for, cold, warm
from holdover.measuring._torch import bare_kernels
from holdover.measuring.arguments import Arena, UnrunnableError, argument_bytes, is_view_or_factory
from holdover.measuring.machine import free_bytes
from holdover.measuring.store import open_store
from holdover.trace.graph import Signature

_TOTAL_SECONDS = 5.0
_TOTAL_COLD_SECONDS = 4.0
_PATIENCE = 3.0  # so many times longer it may take where other programs are in the way
_RUNS = 3  # at least, the first one to warm up included
_PROBE_SIZE = 768
_FREE_SHARE = 4  # at most a quarter of the free memory is taken
_TRIES = 3  # an op that is timed badly so often is one of varying time, and not timed again
_COPIED_BYTES = 4 << 20
_COLD_BYTES = 1 << 16  # fewer are read in no time
_COLD_RATE = 4e9  # bytes per second; no memory is slower
_COLD_SHARE = 0.05  # where cold caches cannot change an op's time by more, they are not tried


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one run of an op takes.

    Attributes:
        seconds: with its arguments in the caches.
        source: whether that very op was timed, or modelled from others.
        cold_seconds: with its arguments out of the caches; None where that makes no difference.
        spread: how much longer its usual run took than the least, as a share.
    """

    seconds: float
    source: Literal["measured", "modelled"]
    cold_seconds: float | None = None
    spread: float = 0.0

    @property
    def replay_seconds(self) -> float:
        """What a replay takes, which comes long after forward: with cold caches."""
        return self.seconds if self.cold_seconds is None else max(self.seconds, self.cold_seconds)

    @property
    def step_seconds(self) -> float:
        """What it takes in a step, halfway between: an op reads what was just made beside what was not touched for
        long, such as weights and, in backward, saved tensors."""
        return (self.seconds + self.replay_seconds) / 2


def price(
    signatures: Sequence[Signature], *, device: str = "cpu", replayed: Collection[int] | None = None
) -> list[OpCost]:
    """Seconds that each op takes on `device`, the call from Python included.

    Args:
        signatures: the distinct ops of a trace.
        device: "cpu", or a CUDA device that is there.
        replayed: numbers of those that may be replayed, which are timed with cold caches too; None for all.

    Returns:
        One cost per signature, in order. What a plan adds around each op is not in it: see `cost.overheads`.

    Small ops are timed first, until `_TOTAL_SECONDS` are used up; larger ones, ops too large for the free memory and
    ops that do not run on made-up arguments are modelled by FLOPs and bytes, at the rates of the timed ones (those of
    the same name first). Results are kept on disk with their spread, and those of poor quality are measured again.
    On one thread it is the thread's processor time that counts, so that other programs disturb little. Random states,
    grad mode and threads are left as found.

    >>> from holdover.trace.graph import TensorSpec
    >>> x = TensorSpec((64, 64), (64, 1), "float32", "cpu")
    >>> [cost.source for cost in price([Signature("aten.mm.default", (x, x), ())])]
    ['measured']
    """
    target = torch.device(device)
    launch = launch_seconds(device)
    work = [work_of(signature) for signature in signatures]
    real = [i for i, signature in enumerate(signatures) if not is_view_or_factory(signature.name)]
    bench = _Bench(signatures, work, target)
    timings = bench.run("warm", real, _TOTAL_SECONDS)
    seconds = {i: t.seconds for i, t in timings.items()}
    again = [i for i in real if i in timings and (replayed is None or i in replayed) and _matters(work[i], seconds[i])]
    chilled = bench.run("cold", again, _TOTAL_COLD_SECONDS)
    bench.store.save()
    code = cold_code_seconds(device) if chilled else 0.0
    real_numbers = set(real)
    for i in set(range(len(signatures))) - real_numbers:
        seconds[i] = launch
    model = _Model([(signatures[i].name, work[i], s) for i, s in seconds.items()], target)
    per_byte = _cold_per_byte(signatures, work, {i: chilled[i].seconds - code - seconds[i] for i in chilled})
    costs = []
    for i, signature in enumerate(signatures):
        if i not in seconds:
            modelled = max(launch, model.seconds(signature.name, work[i]))
            costs.append(OpCost(modelled, "modelled", modelled + per_byte(signature.name) * work[i].nbytes))
            continue
        cold_seconds = None
        if i in chilled:
            cold_seconds = chilled[i].seconds - code
        elif i in real_numbers and _matters(work[i], seconds[i]):
            cold_seconds = seconds[i] + per_byte(signature.name) * work[i].nbytes
        spread = max((t[i].spread for t in (timings, chilled) if i in t), default=0.0)
        costs.append(OpCost(seconds[i], "measured", cold_seconds, spread))
    return costs


def _matters(work: Work, seconds: float) -> bool:
    """Whether cold caches could change the op's time."""
    return work.nbytes > _COLD_BYTES and work.nbytes / _COLD_RATE > _COLD_SHARE * seconds


def _spent(device: torch.device, seconds: float) -> Callable[[], float]:
    """Seconds spent since now: processor time on one thread, so that a busy machine leaves no more ops untimed."""
    clock = clock_for(device)
    began, wall = clock(), time.perf_counter()

    def spent() -> float:
        late = time.perf_counter() - wall > _PATIENCE * abs(seconds)
        return float("inf") if late else clock() - began

    return spent


def _cold_per_byte(
    signatures: Sequence[Signature], work: Sequence[Work], added: Mapping[int, float]
) -> Callable[[str], float]:
    """Seconds that cold caches add per byte: as for the timed ops of that name, or as for those of all names."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for i, seconds in added.items():
        by_name[signatures[i].name].append(max(seconds, 0.0) / work[i].nbytes)
    usual = statistics.median([r for rs in by_name.values() for r in rs]) if by_name else 0.0
    return lambda name: statistics.median(by_name[name]) if name in by_name else usual


class _Bench:
    """Times ops, smallest first, and keeps what it found on disk."""

    def __init__(self, signatures: Sequence[Signature], work: Sequence[Work], device: torch.device) -> None:
        self.signatures, self.work = signatures, work
        self.store, self.arena = open_store(device), Arena(device)
        self.limit = free_bytes() // _FREE_SHARE

    def run(self, how: Literal["warm", "cold"], numbers: Iterable[int], seconds: float) -> dict[int, Timing]:
        """Timings by number, from disk or measured now; what cannot be run, or not in time, is not among them."""
        found: dict[int, Timing] = {}
        tries: dict[int, int] = {}
        todo = []
        for i in numbers:
            known = self.store.get(how, self.signatures[i])
            if known is not None:
                found[i], tries[i] = Timing(known[0], known[1]), known[2]
            if known is None or (found[i].spread > POOR_SPREAD and tries[i] < _TRIES):
                todo.append(i)
        todo.sort(key=lambda i: _ASSUMED.seconds(self.work[i]))
        spent = _spent(self.arena.device, seconds)
        for i in todo:
            if spent() + _RUNS * _ASSUMED.seconds(self.work[i]) > seconds:
                break  # the rest is larger still
            self._once(how, i, found, tries)
        for i in sorted((i for i in todo if i in found), key=lambda i: -found[i].spread * found[i].seconds):
            if found[i].spread <= POOR_SPREAD or spent() > 1.25 * seconds:
                break
            self._once(how, i, found, tries)
        return found

    def _once(self, how: Literal["warm", "cold"], i: int, found: dict[int, Timing], tries: dict[int, int]) -> None:
        timing = _measured(self.signatures[i], self.work[i], self.arena, self.limit, warm if how == "warm" else cold)
        if timing is None:
            return
        found[i] = timing.better(found[i]) if i in found else timing
        tries[i] = tries.get(i, 0) + 1
        self.store.put(how, self.signatures[i], [found[i].seconds, found[i].spread, tries[i]])


@functools.cache
def launch_seconds(device: str) -> float:
    """Seconds that an op without work takes on `device`: a view, called from Python."""
    x = torch.empty(8, device=device)
    with bare_kernels():
        return warm(lambda: torch.ops.aten.view.default(x, (8,)), torch.device(device)).seconds


@functools.cache
def copy_seconds_per_byte(device: str) -> float:
    """Seconds per byte that is copied to new memory, with cold caches."""
    x, target = torch.ones(_COPIED_BYTES // 4, device=device), torch.device(device)
    with bare_kernels():
        return cold(functools.partial(torch.ops.aten.clone.default, x), target).seconds / _COPIED_BYTES


@functools.cache
def cold_code_seconds(device: str) -> float:
    """What emptied caches cost an op that moves nothing: its code's way back, which a step does not pay at each op."""
    x, target = torch.ones(8, device=device), torch.device(device)
    with bare_kernels():
        call = functools.partial(torch.ops.aten.neg.default, x)
        return max(0.0, cold(call, target).seconds - warm(call, target).seconds)


def _measured(
    signature: Signature, work: Work, arena: Arena, limit: int, timed: Callable[[Callable[[], Any], Any], Timing]
) -> Timing | None:
    """The time of one call, None if it cannot be run here."""
    try:
        if argument_bytes(signature) + work.nbytes > limit:
            return None
        with bare_kernels():
            op, args, kwargs = arena.call(signature)
            timing = timed(lambda: op(*args, **kwargs), arena.device)
            arena.restore(op, args, kwargs)
    except (RuntimeError, UnrunnableError, TypeError, ValueError, NotImplementedError, IndexError):
        return None
    return timing


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
            heavy = [(2 * size**3, warm(lambda: torch.mm(x, x), device).seconds)]
        if not light:
            light = [(2 * x.nbytes, warm(lambda: torch.neg(x), device).seconds)]
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
