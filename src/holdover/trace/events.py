"""A trace's events as planning looks at them: what a plan can reach, and the part of the step that it changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from holdover.trace.graph import Event, Phase, Trace


def reachable_events(trace: Trace, *, with_loss: bool) -> Iterator[tuple[Event, int]]:
    """The trace's events, where a slot that no plan reaches is one more holder of its storage, asked for or not."""
    for kind, number in trace.events:
        if Event.PACK <= kind <= Event.RELEASE and not with_loss and not trace.slots[number].call:
            if kind is not Event.UNPACK:
                storage = trace.values[trace.slots[number].value].storage
                yield (Event.HOLD if kind is Event.PACK else Event.DROP), storage
        else:
            yield kind, number


def after_forward(trace: Trace, *, with_loss: bool) -> set[int]:
    """The first op of each step that comes when forward, or with it the loss, is over."""
    watched = (Phase.FORWARD, Phase.LOSS) if with_loss else (Phase.FORWARD,)
    return {last + 1 for last in {op.step: op.id for op in trace.ops if op.phase in watched}.values()}


def replayed_part(trace: Trace, step: int) -> Trace:
    """The same trace with only the events of one step's forward, loss and backward, and what is held at its start.

    A plan changes nothing after backward, and the last step has all that earlier ones hold, so that a search need not
    walk through the rest again and again.
    """
    holders: dict[int, int] = defaultdict(int)
    packed: dict[int, None] = {}
    events: list[tuple[Event, int]] = []
    started = False
    for kind, number in trace.events:
        if kind is Event.OP:
            op = trace.ops[number]
            if started and op.phase is Phase.OPTIMIZER:
                break
            if not started and op.step == step:
                started = True
                events += [(Event.HOLD, s) for s, n in holders.items() for _ in range(n)]
                events += [(Event.PACK, slot) for slot in packed]
        if started:
            events.append((kind, number))
        elif kind is Event.HOLD:
            holders[number] += 1
        elif kind is Event.DROP:
            holders[number] -= 1
        elif kind is Event.PACK:
            packed[number] = None
        elif kind is Event.RELEASE:
            packed.pop(number, None)
    return replace(trace, events=events)
