"""What following a plan costs beside its replays: Python that looks at each op and each saved tensor of forward.

It is paid as soon as anything is planned. Calls that the plan leaves alone wholly ("quiet") run without the dispatch
mode, so that what is planned where matters; the hooks on saved tensors are there everywhere.
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
        step = max((op.step for op in trace.ops), default=0)
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
        self.loud = loud_calls(trace) & self.present
        hooked = sum(trace.ops[slot.op].step == step and slot.call in inside for slot in trace.slots if slot.op >= 0)
        self.hooks_seconds = hooked * overheads.hooked

    @property
    def least(self) -> float:
        """What every plan pays: one that plans nothing outside the calls that can never be quiet."""
        return self.hooks_seconds + self.overheads.watched * sum(self.ops_of[c] for c in self.loud)

    def seconds(self, recorded: Iterable[int]) -> float:
        """What a plan that drops the results of these ops pays; nothing where it drops none."""
        ops = [o for o in recorded if self.trace.ops[o].call in self.present]
        if not ops:
            return 0.0
        loud = self.loud | {up for call in {self.trace.ops[o].call for o in ops} for up in ancestors(call, self.parent)}
        watched = sum(self.ops_of[c] for c in loud)
        quiet = sum(self.children[c] for c in loud) - sum(self.parent[c] in loud for c in loud)
        return self.hooks_seconds + watched * self.overheads.watched + quiet * self.overheads.quiet_call


def loud_calls(trace: Trace) -> set[int]:
    """Calls that are never quiet: the code outside the model, what writes to things made outside it, and all around."""
    parent = {c.id: c.parent for c in trace.calls}
    made_by = {v.storage: v.maker for v in trace.values if v.version == 0}
    loud = {c.id for c in trace.calls if c.key == OUTSIDE}
    for op in trace.ops:
        if op.index < 0 or not op.writes:
            continue
        for _, after in op.writes:
            maker = made_by[trace.values[after].storage]
            around = set(ancestors(trace.ops[maker].call if maker >= 0 else 0, parent))
            loud.update(call for call in ancestors(op.call, parent) if call not in around)
    return {up for call in loud for up in ancestors(call, parent)}


def ancestors(call: int, parent: Mapping[int, int]) -> Iterator[int]:
    """The call itself and those around it, outwards."""
    while call >= 0:
        yield call
        call = parent[call]
