"""The life of an activation: produced, kept or dropped, asked for, produced again, used, freed.

A pure function of the trace and a plan's choices, like the timeline: the same walk, looking at single values. Time is
the position of an op in the step: what happens at position p happens while op p runs or after it, before op p + 1.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdover.memory.recorded import Recipe
from holdover.memory.simulate import Walk
from holdover.memory.timeline import NOTHING, Choices
from holdover.trace.graph import EXISTING, OUTSIDE, Category, Event, Phase, Trace


class Fate(enum.StrEnum):
    """What becomes of a value after forward."""

    KEPT = "kept"
    DROPPED = "dropped"
    PACKED = "packed"
    UNSAVED = "not saved"
    EXISTING = "there anyway"


class State(enum.StrEnum):
    """In which form a value is in memory."""

    ORIGINAL = "original"
    PACKED = "packed"
    COPY = "copy"  # of an argument about to be written over that some recipe still needs
    REPLAYED = "replayed"


@dataclass(frozen=True, slots=True)
class Span:
    """From position `start` up to `end` the value is in memory."""

    start: int
    end: int
    state: State
    nbytes: int


@dataclass(frozen=True, slots=True)
class Read:
    """A backward op that reads the value, and the forward op whose gradient it computes (-1: not known)."""

    position: int
    op: int
    name: str
    module: str
    of: int


@dataclass(frozen=True, slots=True)
class Replay:
    """The value is made again: `ops` is all that ran then, the value's own op among them, for `asked`."""

    position: int
    asked: int  # the value that backward asked for
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Life:
    """One value over one step, under a plan or without one.

    Attributes:
        value, storage, op: numbers in the trace; `op` made it, -1 if it was there before the step.
        name: how `holdover explain` and the report address it, "blocks.0.mlp:2" (module, place of the op there).
        module, op_name, dtype, nbytes: what it is.
        fate: what becomes of it after forward.
        first_op: the op at position 0.
        produced: position of its op; -1 if it was there before the step.
        saved: positions at which autograd saved it.
        asked: positions at which backward asks for it.
        reads: the backward ops that read it.
        replays: each time it is made again.
        spans: when it is in memory, in order.
        freed: position from which it is no longer in memory; the step's length if it stays.
        length: ops in the step.
        backward: position of the first op of backward.
    """

    value: int
    storage: int
    op: int
    name: str
    module: str
    op_name: str
    dtype: str
    nbytes: int
    fate: Fate
    first_op: int
    produced: int
    saved: tuple[int, ...]
    asked: tuple[int, ...]
    reads: tuple[Read, ...]
    replays: tuple[Replay, ...]
    spans: tuple[Span, ...]
    freed: int
    length: int
    backward: int

    def state_at(self, position: int) -> State | None:
        """In which form it is in memory at a position; None if it is not."""
        return next((s.state for s in self.spans if s.start <= position < s.end), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def life_of(trace: Trace, value: int, choices: Choices = NOTHING) -> Life:
    """The life of one value in the last step of the trace.

    Args:
        trace: a recorded step.
        value: its number in the trace.
        choices: what a plan does; nothing for the step as it is.

    >>> import torch
    >>> from holdover.trace.record import record
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 1))
    >>> trace = record(model, (torch.ones(3, 4),))
    >>> hidden = saved_values(trace)[1]
    >>> life = life_of(trace, hidden)
    >>> life.name, life.op_name, life.fate.value, [read.name for read in life.reads]
    ('1:0', 'aten.gelu.default', 'kept', ['aten.mm.default'])
    >>> life_of(trace, hidden, Choices(frozenset([life.op]))).fate.value
    'dropped'
    """
    return lives_of(trace, [value], choices)[value]


def lives_of(trace: Trace, values: Iterable[int], choices: Choices = NOTHING) -> dict[int, Life]:
    """The lives of several values, by number, from one walk over the step."""
    wanted = list(dict.fromkeys(values))
    last = trace.last_step
    numbers = [op.id for op in trace.ops if op.step == last]
    first = numbers[0] if numbers else 0
    walk = _Watch(trace, choices, wanted, first)
    walk.run()
    walk.close(len(numbers))
    start = next((n - first for n in numbers if trace.ops[n].phase is Phase.BACKWARD), len(numbers))
    saved, asked = _slots(trace, wanted, first)
    reads = _reads(trace, wanted, first)
    lives = {}
    for number in wanted:
        value = trace.values[number]
        maker = trace.ops[value.maker] if value.maker >= first else None
        spans = tuple(walk.spans[number])
        lives[number] = Life(
            value=number, storage=value.storage, op=maker.id if maker else -1, name=name_of(trace, number),
            module=trace.calls[maker.call].path if maker else "", op_name=maker.name if maker else "",
            dtype=value.dtype, nbytes=trace.storages[value.storage].nbytes, fate=_fate(trace, number, choices),
            first_op=first, produced=maker.id - first if maker else -1, saved=tuple(saved[number]),
            asked=tuple(asked[number]), reads=tuple(reads[number]), replays=tuple(walk.made[number]), spans=spans,
            freed=max((s.end for s in spans), default=maker.id - first if maker else 0), length=len(numbers),
            backward=start,
        )  # fmt: skip
    return lives


def saved_values(trace: Trace) -> list[int]:
    """The activations that autograd saves in the last step, in order of making."""
    last = trace.last_step
    found = {slot.value for slot in trace.slots}
    return sorted(
        (
            v for v in found
            if trace.values[v].maker >= 0 and trace.ops[trace.values[v].maker].step == last
            and trace.storages[trace.values[v].storage].category is Category.ACTIVATION
        ),
        key=lambda v: (trace.values[v].maker, v),
    )  # fmt: skip


def name_of(trace: Trace, value: int) -> str:
    """How people address a value: its module's path, a colon, and the place of its op among the ops of that module.

    A second call of the same module is told by its own number ("drop:1"), a second result of one op by a point and its
    number ("norm:0.1").
    """
    made = trace.values[value]
    storage = trace.storages[made.storage]
    if made.maker < 0 or storage.category in EXISTING:
        return storage.name or f"value {value}"
    op = trace.ops[made.maker]
    call = trace.calls[op.call]
    if call.key == OUTSIDE:
        home = "loss"
    else:
        again = call.key.rpartition("/")[2].removeprefix(call.path or "model")
        home = call.path + again
    place = op.outputs.index(value)
    return f"{home}:{op.index}" + (f".{place}" if place else "")


def _fate(trace: Trace, value: int, choices: Choices) -> Fate:
    if trace.storages[trace.values[value].storage].category in EXISTING:
        return Fate.EXISTING
    slots = [s for s in trace.slots if s.value == value]
    if not slots:
        return Fate.DROPPED if trace.values[value].maker in choices.recompute else Fate.UNSAVED
    if not choices.with_loss and not any(s.call for s in slots):
        return Fate.KEPT
    if trace.values[value].maker in choices.recompute:
        return Fate.DROPPED
    return Fate.PACKED if value in choices.pack else Fate.KEPT


def _slots(trace: Trace, values: Iterable[int], first: int) -> tuple[Mapping[int, list[int]], Mapping[int, list[int]]]:
    """Where each value is saved, and where it is asked for."""
    wanted = set(values)
    saved: dict[int, list[int]] = defaultdict(list)
    asked: dict[int, list[int]] = defaultdict(list)
    at = -1
    for kind, number in trace.events:
        if kind is Event.OP:
            at = number
        elif kind in (Event.PACK, Event.UNPACK) and trace.slots[number].value in wanted and at >= first:
            (saved if kind is Event.PACK else asked)[trace.slots[number].value].append(at - first)
    return saved, asked


def _reads(trace: Trace, values: Iterable[int], first: int) -> Mapping[int, list[Read]]:
    """The ops of backward that compute something from each value; views of it are no reading."""
    wanted = set(values)
    reads: dict[int, list[Read]] = defaultdict(list)
    for op in trace.ops[first:]:
        if op.phase is not Phase.BACKWARD or not op.outputs:
            continue
        for v in op.inputs:
            if v in wanted:
                reads[v].append(Read(op.id - first, op.id, op.name, trace.calls[op.call].path, op.of))
    return reads


class _Watch(Walk):
    """The simulator's walk, noting when the watched values are in memory and when they are made again."""

    def __init__(self, trace: Trace, choices: Choices, values: Iterable[int], first: int) -> None:
        super().__init__(trace, choices, {}, observer=self.on_change)
        self.first = first
        self.spans: dict[int, list[Span]] = {v: [] for v in values}
        self.made: dict[int, list[Replay]] = {v: [] for v in self.spans}
        self.since: dict[int, tuple[int, State]] = {}
        self.by_storage: dict[int, list[int]] = defaultdict(list)
        self.copied: dict[int, set[int]] = defaultdict(set)  # value -> extra holdings that contain it
        self.there = {v for v in self.spans if trace.values[v].maker < 0 and not trace.values[v].version}
        self.again: set[int] = set()  # replayed into their own storage
        self.running: list[int] = []
        for v in self.spans:
            self.by_storage[trace.values[v].storage].append(v)

    @property
    def position(self) -> int:
        return len(self.memory.live_bytes) - 1 - self.first

    def on_change(self, holding: int, _: int) -> None:
        if holding < 0:
            return
        extra = self.memory.extras.get(holding)
        if extra is None:
            self.see(self.by_storage.get(holding, ()))
        elif extra.value in self.spans:
            self.copied[extra.value] ^= {holding}
            self.see([extra.value])

    def on_op(self, number: int) -> None:
        super().on_op(number)
        op = self.trace.ops[number]
        for v in (v for _, after in op.writes for v in self.by_storage.get(self.trace.values[after].storage, ())):
            self.there.discard(v)
        made = [v for v in op.outputs if v in self.spans]
        self.there.update(made)
        storages = {self.trace.values[v].storage for v in op.outputs}
        self.see(v for s in storages for v in self.by_storage.get(s, ()))

    def on_unpack(self, number: int) -> None:
        super().on_unpack(number)
        value = self.trace.slots[number].value
        if value in self.spans and self.trace.values[value].storage in self.lent:
            self.again.add(value)  # what was replayed is autograd's now, whose holding comes next

    def materialise(self, target: Recipe, asked: int) -> None:
        self.running = []
        super().materialise(target, asked)
        replay = Replay(self.position, asked, tuple(self.running))
        for v in dict.fromkeys(v for n in self.running for v in self.trace.ops[n].outputs if v in self.spans):
            self.made[v].append(replay)

    def replay(self, recipe: Recipe, readers: dict[int, int], passing: set[int], lasting: bool) -> None:
        super().replay(recipe, readers, passing, lasting)
        self.running.append(recipe.op)
        for v in recipe.outputs:
            around = self.by_storage.get(self.trace.values[v].storage, ())
            self.again.difference_update(around)
            if self.copies.get(v) == self.trace.values[v].storage:
                self.again.add(v)
            self.see(around)

    def see(self, values: Iterable[int]) -> None:
        for v in values:
            state = self.state(v)
            before = self.since.get(v)
            if (before[1] if before else None) is state:
                continue
            if before:
                self.end(v, *before)
                del self.since[v]
            if state is not None:
                self.since[v] = self.position, state

    def state(self, value: int) -> State | None:
        storage = self.trace.values[value].storage
        held = bool(self.memory.holders(storage))
        if not held:
            self.again.discard(value)
        if value in self.copies or value in self.again:
            return State.REPLAYED
        if held and value in self.there:
            return State.ORIGINAL
        if storage not in self.awaited and not held:
            self.left(value)
        if self.copied[value]:
            return State.PACKED if value in self.choices.pack else State.COPY
        return None

    def left(self, value: int) -> None:
        """Gone from its storage, unless its op has only just begun and the storage is not handed out yet."""
        if value in self.since and self.since[value][1] is State.ORIGINAL:
            self.there.discard(value)

    def end(self, value: int, start: int, state: State) -> None:
        if self.position > start >= 0 or (start < 0 <= self.position):
            self.lived(value, max(start, 0), self.position, state)

    def lived(self, value: int, start: int, end: int, state: State) -> None:
        spans = self.spans[value]
        if spans and spans[-1].end == start and spans[-1].state is state:
            start = spans.pop().start
        nbytes = self.choices.pack[value] if state is State.PACKED else self.size(value)
        spans.append(Span(start, end, state, nbytes))

    def close(self, length: int) -> None:
        """What is still there at the end of the step stays."""
        for v, (start, state) in self.since.items():
            self.lived(v, max(start, 0), length, state)
