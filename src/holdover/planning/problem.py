"""The planning problem of one recorded step: what may be replayed, what it costs, and who needs what when.

Time is the position of an op among the ops of the step. A decision is made per op of forward: record it (its outputs
are dropped and made again in backward) or not (outputs that autograd saved stay, from the moment the program lets go
of them to the moment autograd does). Everything else is *base*: held whatever the plan says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from holdover.memory.timeline import Timeline
from holdover.planning.standing import Standing
from holdover.trace.clones import clone_before
from holdover.trace.events import reachable_events
from holdover.trace.graph import Category, Event, Phase, Trace

NEVER = 1 << 60
MADE_IN_STEP = (Category.ACTIVATION, Category.TEMPORARY)


@dataclass(slots=True)
class Ask:
    """One backward pass's use of a saved value: first and last unpacking, and the end of what it does with it."""

    first: int
    last: int
    loan_end: int = -1


@dataclass(slots=True)
class Need:
    """How long a value is held, in op positions."""

    nbytes: int
    program_end: int = NEVER  # the program lets go of it, or writes over it
    pack: int = NEVER
    release: int = -1  # autograd lets go of it
    asks: dict[int, Ask] = field(default_factory=dict)  # by backward pass

    @property
    def saved(self) -> bool:
        return self.pack < NEVER

    @property
    def end(self) -> int:
        """Until when a kept value is held: at least until backward has done with it."""
        return max([self.release, *(a.loan_end for a in self.asks.values())])


@dataclass
class Problem:
    """The step as the solver sees it. Ops and values are numbered as in the trace.

    Attributes:
        positions: op -> position; only ops of the step planned for are in it.
        eligible: ops that may be recorded, in order.
        cost: seconds that one replay of each eligible op takes.
        base: bytes held at each position whatever the plan says, workspace included: the most up to the next op.
        running: the same while the op itself runs, its results and workspace included.
        needs: value -> how long it is held.
        readers: value -> eligible ops that read it.
        backward_start: position of the first op of backward.
        standing: what a plan pays beside its replays; None for nothing.
        copy_seconds: per byte that is copied: packed, unpacked, or about to be written over while a recipe needs it.
    """

    trace: Trace
    positions: Mapping[int, int]
    eligible: list[int]
    cost: Mapping[int, float]
    base: np.ndarray
    running: np.ndarray
    needs: dict[int, Need]
    readers: dict[int, list[int]]
    backward_start: int
    step_seconds: float
    maker: dict[int, int] = field(default_factory=dict)  # value -> eligible op that makes it
    passes: tuple[int, ...] = ()  # runs of autograd's engine that ask for anything
    with_loss: bool = False
    standing: Standing | None = None
    copy_seconds: float = 0.0

    @cached_property
    def overwritten(self) -> frozenset[int]:
        """Values of which the storage is written over."""
        values = self.trace.values
        last = {v.storage: v.id for v in values}  # versions come in order
        return frozenset(v.id for v in values if last[v.storage] != v.id)

    @cached_property
    def clones(self) -> dict[int, int]:
        """Values that an op writes over -> the saved clone of them made right before, which can serve as their pin."""
        found = {}
        for o in self.eligible:
            for before, _ in self.trace.ops[o].writes:
                clone = clone_before(self.trace, o, before)
                if clone in self.maker and self.needs[clone].asks:
                    found[before] = clone
        return found

    def replay_seconds(self, timeline: Timeline) -> float:
        """What a simulated plan's replays take, and the copies that make them possible."""
        replayed = sum(self.cost[o] * n for o, n in timeline.replays.items() if o in self.cost)
        return replayed + self.copy_seconds * timeline.copied_bytes

    def readers_of(self, op: int) -> Iterable[int]:
        """The eligible ops that read what `op` makes."""
        return (c for v in self.trace.ops[op].outputs for c in self.readers.get(v, ()))

    def saved_outputs(self, op: int) -> Iterable[int]:
        return (v for v in self.trace.ops[op].outputs if self.needs[v].saved)


def candidates(trace: Trace, *, with_loss: bool) -> tuple[int, list[int]]:
    """The step planned for (the last) and its ops that can be replayed and whose results matter to backward."""
    step = trace.last_step
    phases = (Phase.FORWARD, Phase.LOSS) if with_loss else (Phase.FORWARD,)
    able = {}
    for op in trace.ops:
        if op.step != step or op.phase not in phases or op.keep or not op.outputs or op.index < 0:
            continue
        if op.phase is Phase.FORWARD and not trace.calls[op.call].key:
            continue
        if all(trace.storages[trace.values[v].storage].category in MADE_IN_STEP for v in op.outputs) and not any(
            trace.values[v].escapes for v in (*op.inputs, *op.outputs)
        ):
            able[op.id] = op
    saved = {slot.value for slot in trace.slots if slot.call or with_loss}
    wanted: set[int] = set()
    for number in sorted(able, reverse=True):
        op = able[number]
        if any(v in saved or v in wanted for v in op.outputs):
            wanted.update(op.inputs)
        else:
            del able[number]
    return step, sorted(able)


def build(trace: Trace, cost: Mapping[int, float], workspace: Mapping[int, int], *, with_loss: bool = False) -> Problem:
    """The problem of the last step of `trace`; `cost` is seconds per signature, launch included."""
    step, eligible = candidates(trace, with_loss=with_loss)
    numbers = [op.id for op in trace.ops if op.step == step]
    positions = {number: i for i, number in enumerate(numbers)}
    able = set(eligible)
    maker = {v: o for o in eligible for v in trace.ops[o].outputs}
    needs = {v.id: Need(trace.storages[v.storage].nbytes) for v in trace.values}
    base, running = _walk(trace, positions, maker, needs, workspace, with_loss=with_loss)
    readers: dict[int, list[int]] = defaultdict(list)
    for o in eligible:
        for v in trace.ops[o].inputs:
            readers[v].append(o)
    start = min((positions[n] for n in numbers if trace.ops[n].phase is Phase.BACKWARD), default=len(numbers))
    seconds = sum(cost.get(trace.ops[n].signature, 0.0) for n in numbers)
    per_op = {o: cost.get(trace.ops[o].signature, 0.0) for o in able}
    passes = tuple(sorted({p for n in needs.values() for p in n.asks}))
    return Problem(
        trace, positions, eligible, per_op, base, running, needs, readers, start, seconds, maker, passes, with_loss
    )  # fmt: skip


def _walk(
    trace: Trace,
    positions: Mapping[int, int],
    maker: Mapping[int, int],
    needs: Mapping[int, Need],
    workspace: Mapping[int, int],
    *,
    with_loss: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Fill `needs` and return the base curves.

    What backward asks for is not base for the values of eligible ops: keeping or replaying pays for it.
    """
    base = np.zeros(len(positions), dtype=np.int64)
    running = np.zeros(len(positions), dtype=np.int64)
    held = [0] * len(trace.storages)
    content = [-1] * len(trace.storages)
    for first in trace.values:
        if first.version == 0 and first.maker < 0:
            content[first.storage] = first.id
    borrowed: dict[int, int] = {}  # storages whose holders are backward's -> the value that these were given
    now, at, current = 0, -1, -1

    def note(extra: int = 0) -> None:
        if at >= 0:
            base[at] = max(base[at], now + extra)

    for kind, number in reachable_events(trace, with_loss=with_loss):
        if kind is Event.OP:
            op = trace.ops[number]
            at = positions.get(number, -1)
            for before, after in op.writes:
                storage = trace.values[after].storage
                old = content[storage] if before < 0 else before
                if old >= 0:
                    needs[old].program_end = min(needs[old].program_end, max(at, 0))
                content[storage] = after
            for v in op.outputs:
                if not trace.values[v].version:
                    content[trace.values[v].storage] = v
            note()
            made = sum(needs[v].nbytes for v in op.outputs if not trace.values[v].version)
            note(made + workspace.get(op.signature, 0))
            if at >= 0:
                running[at] = now + made + workspace.get(op.signature, 0)
        elif kind is Event.HOLD:
            held[number] += 1
            value = content[number]
            if value in maker and needs[value].asks and held[number] == 1:
                borrowed[number] = value
            if held[number] == 1 and number not in borrowed:
                now += trace.storages[number].nbytes
                note()
        elif kind is Event.DROP:
            held[number] -= 1
            if held[number] == 0:
                if number in borrowed:
                    ask = next(reversed(needs[borrowed.pop(number)].asks.values()))
                    ask.loan_end = max(ask.loan_end, at)
                else:
                    now -= trace.storages[number].nbytes
                    if (value := content[number]) >= 0:
                        needs[value].program_end = min(needs[value].program_end, at)
        elif kind is Event.PASS:
            current = number
        else:
            now += _on_slot(trace, kind, number, at, maker, needs, held, current)
            note()
    return base, running


def _on_slot(
    trace: Trace, kind: Event, number: int, at: int, maker: Mapping[int, int], needs: Mapping[int, Need],
    held: list[int], current: int,
) -> int:  # fmt: skip
    """Note a slot's event; what it changes in the base (a slot of a value that cannot be dropped is a holder)."""
    value = trace.slots[number].value
    need, storage = needs[value], trace.values[value].storage
    if kind is Event.PACK:
        need.pack = min(need.pack, at)
    elif kind is Event.UNPACK:
        if not held[storage] or need.program_end < NEVER:  # else the program still has it, and nothing is replayed
            ask = need.asks.setdefault(current, Ask(at, at))
            ask.last = at
    else:
        need.release = max(need.release, at)
    if value in maker:
        return 0
    before = held[storage]
    held[storage] += {Event.PACK: 1, Event.UNPACK: 0, Event.RELEASE: -1}[kind]
    return need.nbytes * (bool(held[storage]) - bool(before))


def crossing_bytes(problem: Problem, ops: Sequence[int]) -> np.ndarray:
    """Bytes of step-made values that are made at or before each of `ops` and read after it, in forward."""
    trace = problem.trace
    place = {o: i for i, o in enumerate(ops)}
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for o, i in place.items():
        for v in trace.ops[o].inputs:
            last[v] = i
        for v in trace.ops[o].outputs:
            made[v] = i
    change = np.zeros(len(ops) + 1, dtype=np.int64)
    for v, i in made.items():
        if v in last and last[v] > i:
            change[i] += problem.needs[v].nbytes
            change[last[v]] -= problem.needs[v].nbytes
    return np.cumsum(change[:-1])
