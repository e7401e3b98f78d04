"""Reading a Trace."""

from __future__ import annotations

from holdover.trace.graph import Category, Op, Phase, Trace


def forward(trace: Trace, step: int = 0) -> list[Op]:
    return [o for o in trace.ops if o.phase is Phase.FORWARD and o.step == step]


def places(trace: Trace, step: int = 0) -> list[tuple[str, int, str]]:
    """(call key, index, short op name) of forward's ops."""
    return [(trace.calls[o.call].key, o.index, o.name.split(".")[1]) for o in forward(trace, step)]


def op(trace: Trace, name: str, n: int = 0) -> Op:
    return [o for o in trace.ops if o.name.split(".")[1] == name][n]


def saved(trace: Trace) -> dict[int, int]:
    """Storage -> bytes, of what autograd saves and the step made."""
    storages = {trace.values[s.value].storage for s in trace.slots}
    return {n: trace.storages[n].nbytes for n in storages if trace.storages[n].category is Category.ACTIVATION}


def bytes_of(trace: Trace, category: Category) -> int:
    return sum(s.nbytes for s in trace.storages if s.category is category)
