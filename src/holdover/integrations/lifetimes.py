"""When values of compiled graphs live: corrections of a recorded trace.

A compiled function saves and unpacks all its tensors at once, before and after its graphs run. What a plan decides
about is each tensor by itself, so each gets its own moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from holdover.trace.graph import Event, Phase, Trace


def unpack_late(trace: Trace, slots: Iterable[int]) -> None:
    """The backward that used these slots has just been recorded: move the unpacking of each to its first use."""
    wanted, events = set(slots), trace.events
    start = len(events)
    for i in range(len(events) - 1, -1, -1):
        kind, number = events[i]
        if kind is Event.UNPACK and number in wanted:
            start = i
        elif kind is Event.PACK:
            break
    segment, events[start:] = events[start:], []
    used = {trace.values[v].storage for k, n in segment if k is Event.OP for v in trace.ops[n].inputs}
    storage_of = {n: trace.values[trace.slots[n].value].storage for n in wanted}
    moved = {n for n in wanted if storage_of[n] in used}
    released = {n for k, n in segment if k is Event.RELEASE and n in moved}
    waiting: dict[int, list[tuple[Event, int]]] = defaultdict(list)
    held = -1  # the place of a hold that belongs to the unpacking before it
    for i, (kind, number) in enumerate(segment):
        if i == held or (kind is Event.RELEASE and number in moved):
            continue
        if kind is Event.UNPACK and number in moved:
            own = waiting[storage_of[number]]
            own.append((kind, number))
            if segment[i + 1 : i + 2] == [(Event.HOLD, storage_of[number])]:
                own.append(segment[i + 1])
                held = i + 1
            if number in released:
                own.append((Event.RELEASE, number))
            continue
        if kind is Event.OP:
            for v in trace.ops[number].inputs:
                events.extend(waiting.pop(trace.values[v].storage, ()))
        events.append((kind, number))


def inlined(trace: Trace, fused: set[int]) -> dict[int, frozenset[int]]:
    """Take what fused ops make out of the trace: their readers read what they read.

    Returns which fused ops of forward each other op carries out in its own kernel.
    """
    saved = {trace.values[slot.value].storage for slot in trace.slots}
    sources: dict[int, tuple[int, ...]] = {}
    carried: dict[int, frozenset[int]] = {}
    inline: dict[int, frozenset[int]] = {}
    for op in trace.ops:
        if op.id in fused and (op.keep or op.random or any(trace.values[v].storage in saved for v in op.outputs)):
            fused.discard(op.id)
        inside = frozenset(f for v in op.inputs for f in carried.get(v, ()))
        op.inputs = tuple(dict.fromkeys(s for v in op.inputs for s in sources.get(v, (v,))))
        if op.id not in fused:
            inline[op.id] = inside
            continue
        for v in op.outputs:
            trace.storages[trace.values[v].storage].nbytes = 0
            if op.phase is not Phase.BACKWARD:
                sources[v], carried[v] = op.inputs, inside | {op.id}
        op.outputs, op.writes = (), ()
    return inline


def let_go_early(trace: Trace, prefix: str) -> None:
    """A graph's forward returns what it saves, and so holds it to its end; what is not saved goes after its last use.

    Calls of graphs have keys that begin with `prefix`. Saving and letting go are moved to that place, so that whoever
    decides against saving sees what that brings.
    """
    events = trace.events
    in_graph = {op.id for op in trace.ops if trace.calls[op.call].key.startswith(prefix)}
    last_use: dict[int, int] = {}
    next_op = [len(events)] * (len(events) + 1)
    for i in range(len(events) - 1, -1, -1):
        next_op[i] = i if events[i][0] is Event.OP else next_op[i + 1]
    moved: set[int] = set()
    at: dict[int, list[tuple[Event, int]]] = defaultdict(list)
    for i, (kind, number) in enumerate(events):
        if kind is Event.OP and number in in_graph:
            op = trace.ops[number]
            last_use.update((trace.values[v].storage, i) for v in (*op.inputs, *op.outputs))
        elif kind is Event.PACK:
            value = trace.values[trace.slots[number].value]
            if value.maker not in in_graph or not trace.calls[trace.slots[number].call].key.startswith(prefix):
                continue
            place, end = next_op[last_use[value.storage] + 1], next_op[i]
            drop = next((j for j in range(i, end) if events[j] == (Event.DROP, value.storage)), -1)
            if drop < 0 or place >= i:
                continue  # the program goes on holding it
            moved.add(i)
            at[place].append(events[i])
            if drop not in moved:
                moved.add(drop)
                at[place].append(events[drop])
    packs_first = lambda e: e[0] is not Event.PACK  # noqa: E731
    trace.events = [
        event for i, own in enumerate(events)
        for event in (*sorted(at.get(i, ()), key=packs_first), *(() if i in moved else (own,)))
    ]  # fmt: skip
