"""From a plan back to what it does to a recorded step."""

from __future__ import annotations

from holdover.memory.timeline import Choices
from holdover.planning.packing import packable
from holdover.planning.plan import PACK, Plan
from holdover.trace.graph import Phase, Trace


def choices_of(trace: Trace, plan: Plan) -> Choices:
    """The ops and values of all steps of `trace` that the plan's places name; places that match nothing are left out.

    >>> import torch
    >>> from torch.nn import GELU, Linear, Sequential
    >>> from holdover.memory.simulate import simulate
    >>> from holdover.planning.api import plan_of
    >>> from holdover.trace.record import record
    >>> layers = [Sequential(Linear(8, 64), GELU(), Linear(64, 8)) for _ in range(4)]
    >>> trace = record(Sequential(*layers), (torch.ones(1000, 8),))
    >>> plan = plan_of(trace, "min")
    >>> simulate(trace, choices_of(trace, plan)).peak_bytes == plan.predicted_peak_bytes
    True
    """
    wanted = {(c.call, c.index, c.op): c for c in plan.choices}
    places = {
        number: wanted[place]
        for number, op in enumerate(trace.ops)
        if op.phase in (Phase.FORWARD, Phase.LOSS)
        and (place := (trace.calls[op.call].key, op.index, op.name)) in wanted
    }
    recompute = {n: c for n, c in places.items() if c.action != PACK}
    sizes = packable(trace, with_loss=plan.with_loss)
    of_place = {
        (trace.calls[op.call].key, op.index, op.outputs.index(v)): nbytes
        for v, nbytes in sizes.items()
        for op in [trace.ops[trace.values[v].maker]]
    }
    pack = {
        v: of_place[c.call, c.index, i]
        for n, c in places.items()
        if c.action == PACK
        for i, v in enumerate(trace.ops[n].outputs)
        if (c.call, c.index, i) in of_place
    }
    stages = {n: (c.stage, c.held_from) for n, c in recompute.items() if c.held_from is not None}
    return Choices(frozenset(recompute), pack, plan.with_loss, stages)
