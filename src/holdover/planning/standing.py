"""What following a plan costs beside its replays: Python that looks at each op and each saved tensor of forward.

It is paid as soon as anything is planned. Calls that the plan leaves alone wholly ("quiet"), and that write to nothing
which it reads, run without the dispatch mode, so that what is planned where matters; the hooks on saved tensors are
there everywhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from holdover.cost.overheads import Overheads
from holdover.trace.graph import OUTSIDE, Phase, Trace


class Standing:
    """The standing cost of plans for the last step of a trace.

    Args:
        overheads: seconds per watched op, saved tensor and quiet call.
    """

    def __init__(self, trace: Trace, overheads: Overheads, *, with_loss: bool) -> None:
        self.trace, self.overheads = trace, overheads
        step = trace.last_step
        phases = (Phase.FORWARD, Phase.LOSS) if with_loss else (Phase.FORWARD,)
        inside = {c.id for c in trace.calls if with_loss or c.key != OUTSIDE}
        self.parent = {c.id: c.parent for c in trace.calls}
        self.ops_of = Counter(
            op.call for op in trace.ops if op.step == step and op.phase in phases and op.call in inside
        )
        self.present = {up for call in self.ops_of for up in ancestors(call, self.parent)}
        self.children: dict[int, int] = defaultdict(int)
        for call in self.present:
            self.children[self.parent[call]] += 1
        self.writers = writing_calls(trace)
        self.always = loud_calls(trace, (), self.writers) & self.present
        hooked = sum(trace.ops[slot.op].step == step and slot.call in inside for slot in trace.slots if slot.op >= 0)
        self.hooks_seconds = hooked * overheads.hooked

    @property
    def least(self) -> float:
        """What every plan pays: one that plans nothing but what lies outside of all modules."""
        return self.hooks_seconds + self.overheads.watched * sum(self.ops_of[c] for c in self.always)

    def seconds(self, recorded: Iterable[int]) -> float:
        """What a plan that drops the results of these ops pays; nothing where it drops none."""
        ops = [o for o in recorded if self.trace.ops[o].call in self.present]
        if not ops:
            return 0.0
        loud = self.always.union(*map(self._turned_on, ops))
        watched = sum(self.ops_of[c] for c in loud)
        quiet = sum(self.children[c] for c in loud) - sum(self.parent[c] in loud for c in loud)
        return self.hooks_seconds + watched * self.overheads.watched + quiet * self.overheads.quiet_call

    def charges(self, eligible: Iterable[int]) -> list[tuple[float, frozenset[int]]]:
        """What further calls cost once the dispatch mode is on in them, and the ops of which any one turns it on.

        Calls with the same such ops are one entry. With `least` and what one quiet call costs, for the model itself,
        the entries that a plan's ops turn on add up to `seconds` of that plan.
        """
        turned_on: dict[int, set[int]] = defaultdict(set)
        for o in eligible:
            for call in self._turned_on(o) - self.always:
                turned_on[call].add(o)
        together: dict[frozenset[int], float] = defaultdict(float)
        for call, ops in turned_on.items():
            quiet = self.children[call] - (self.parent[call] >= 0)
            together[frozenset(ops)] += self.ops_of[call] * self.overheads.watched + quiet * self.overheads.quiet_call
        return [(seconds, ops) for ops, seconds in together.items() if seconds > 0]

    def _turned_on(self, op: int) -> set[int]:
        """The calls that are loud as soon as the op is planned."""
        return with_ancestors(concerned(self.trace, op, self.writers), self.parent) & self.present


def writing_calls(trace: Trace) -> dict[int, set[int]]:
    """The calls that write to each storage although it was made outside them, by storage."""
    parent = {c.id: c.parent for c in trace.calls}
    made_by = {v.storage: v.maker for v in trace.values if v.version == 0}
    writers: dict[int, set[int]] = defaultdict(set)
    for op in trace.ops:
        if op.index < 0:
            continue
        # A batch norm counts whatever its mode was: the model may be in the other one when the plan is in force.
        for storage in (*(trace.values[after].storage for _, after in op.writes), *op.statistics):
            maker = made_by[storage]
            around = set(ancestors(trace.ops[maker].call if maker >= 0 else 0, parent))
            writers[storage].update(call for call in ancestors(op.call, parent) if call not in around)
    return writers


def loud_calls(trace: Trace, planned: Iterable[int], writers: Mapping[int, set[int]]) -> set[int]:
    """Calls in which the dispatch mode has to be on under a plan for the ops `planned`.

    Those of the planned ops; those that write to what a planned op reads or makes, since its recipe must be told; the
    code outside the model; and all around these. `writers` is what `writing_calls` says.
    """
    parent = {c.id: c.parent for c in trace.calls}
    loud = {c.id for c in trace.calls if c.key == OUTSIDE}
    return with_ancestors(loud.union(*(concerned(trace, o, writers) for o in planned)), parent)


def concerned(trace: Trace, planned: int, writers: Mapping[int, set[int]]) -> set[int]:
    """The call of a planned op, and those that write to what it reads or makes."""
    op = trace.ops[planned]
    storages = {trace.values[v].storage for v in (*op.inputs, *op.outputs)}
    return {op.call}.union(*(writers.get(storage, ()) for storage in storages))


def with_ancestors(calls: Iterable[int], parent: Mapping[int, int]) -> set[int]:
    """The calls and all around them."""
    return {up for call in calls for up in ancestors(call, parent)}


def ancestors(call: int, parent: Mapping[int, int]) -> Iterator[int]:
    """The call itself and those around it, outwards."""
    while call >= 0:
        yield call
        call = parent[call]
