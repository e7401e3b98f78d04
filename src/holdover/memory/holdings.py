"""What is in memory at each moment of a simulated step, and when it is most."""

from __future__ import annotations

from collections.abc import Callable

from holdover.memory.timeline import CATEGORIES, Extra
from holdover.trace.graph import Category, Trace

Observer = Callable[[int, int], None]
"""Told of every allocation and release of a simulated step, in order: `(holding, bytes)`, bytes negative when it is let
go. An op `n` about to run is told as `(~n, 0)`, and a kernel of op `n` that takes workspace while it makes its outputs
as `(~n, bytes)`; a replayed op is told only of its workspace."""


class Holdings:
    """Counts holders and adds up bytes. Holdings are numbered: storages first, extras after them.

    Args:
        stop: the moment at which to note all that is live, a `peak_moment` of an earlier pass; -1: never.
        observer: told of each allocation and release.
    """

    def __init__(self, trace: Trace, stop: int, observer: Observer | None) -> None:
        self.trace, self.stop, self.observer = trace, stop, observer
        self.sizes = [s.nbytes for s in trace.storages]
        self.order = {c: i for i, c in enumerate(CATEGORIES)}
        self.kinds = [self.order[s.category] for s in trace.storages]
        self.program = [0] * len(trace.storages)  # holders in the program, as recorded
        self.ours = [0] * len(trace.storages)  # holders that are ours or autograd's: kept slots, pins, replayed copies
        self.extras: dict[int, Extra] = {}
        self.now, self.by_kind = 0, [0] * len(CATEGORIES)
        self.live_bytes: list[int] = []
        self.category_bytes: list[tuple[int, ...]] = []
        self.moment = self.peak_moment = -1
        self.peak, self.peak_op, self.top = -1, 0, -1
        self.snapshot: tuple[dict[int, int], list[Extra], int] = {}, [], 0

    def begin_op(self, op: int) -> None:
        if self.observer is not None:
            self.observer(~op, 0)
        self.live_bytes.append(self.now)
        self.category_bytes.append(tuple(self.by_kind))
        self.top = self.now

    def run_kernel(self, op: int, made: int, workspace: int) -> None:
        """A kernel of `op` takes `workspace` bytes while it makes outputs of `made` bytes."""
        if self.observer is not None:
            self.observer(~op, workspace)
        self.look(made + workspace)

    def add(self, holding: int, sign: int) -> None:
        nbytes = self.sizes[holding]
        self.now += sign * nbytes
        self.by_kind[self.kinds[holding]] += sign * nbytes
        if self.observer is not None:
            self.observer(holding, sign * nbytes)
        if sign > 0:
            self.look(0)

    def look(self, workspace: int) -> None:
        """Is this the most so far, of this op and of the step?"""
        self.moment += 1
        total = self.now + workspace
        if total > self.top:
            self.top = total
            if self.live_bytes:
                self.live_bytes[-1] = total
                kinds = list(self.by_kind)
                kinds[self.order[Category.TEMPORARY]] += workspace
                self.category_bytes[-1] = tuple(kinds)
        if total > self.peak:
            self.peak, self.peak_moment = total, self.moment
            self.peak_op = max(len(self.live_bytes) - 1, 0)
        if self.moment == self.stop:
            live = {s.id: s.nbytes for s in self.trace.storages if self.holders(s.id)}
            self.snapshot = live, [e for h, e in self.extras.items() if self.ours[h]], workspace

    def program_holds(self, storage: int) -> None:
        self.program[storage] += 1
        if self.program[storage] == 1 and not self.ours[storage]:
            self.add(storage, 1)

    def program_drops(self, storage: int) -> None:
        self.program[storage] -= 1
        if self.program[storage] == 0 and not self.ours[storage]:
            self.add(storage, -1)

    def hold(self, holding: int) -> None:
        self.ours[holding] += 1
        if self.ours[holding] == 1 and (holding >= len(self.program) or not self.program[holding]):
            self.add(holding, 1)

    def free(self, holding: int) -> None:
        self.ours[holding] -= 1
        if self.ours[holding] == 0 and (holding >= len(self.program) or not self.program[holding]):
            self.add(holding, -1)

    def extra(self, nbytes: int, category: Category, value: int) -> int:
        holding = len(self.sizes)
        self.sizes.append(nbytes)
        self.kinds.append(self.order[category])
        self.ours.append(0)
        self.extras[holding] = Extra(nbytes, category, value)
        self.hold(holding)
        return holding

    def holders(self, storage: int) -> int:
        return self.program[storage] + self.ours[storage]
