"""The planning problem with the costs of this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from holdover.cost.flops import work_of
from holdover.cost.measured import OpCost, copy_seconds_per_byte, price
from holdover.cost.overheads import overheads
from holdover.cost.timing import POOR_SPREAD
from holdover.measuring.arguments import is_view_or_factory
from holdover.planning.problem import Problem, build
from holdover.planning.standing import Standing
from holdover.trace.graph import Phase, Trace


def priced_here(trace: Trace, workspace: Mapping[int, int], *, with_loss: bool) -> tuple[Problem, str]:
    """The problem with each op's cost on this machine, and how the costs came about.

    A replay costs its kernel with cold caches, and the Python that records it in forward and runs it in backward. The
    step's own time is that of its kernels and of the Python and autograd around them.
    """
    device = trace.device
    replayed = {op.signature for op in trace.ops if op.phase in (Phase.FORWARD, Phase.LOSS) and not op.keep}
    costs = price(trace.signatures, device=device, replayed=replayed)
    around = overheads(traffic_bytes(trace))
    problem = build(trace, {i: c.step_seconds for i, c in enumerate(costs)}, workspace, with_loss=with_loss)
    recorded = max(around.recorded - around.watched, 0.0)  # every op of such a call is watched, recorded or not
    problem.cost = {o: costs[trace.ops[o].signature].replay_seconds + recorded for o in problem.eligible}
    problem.copy_seconds = copy_seconds_per_byte(device)
    problem.step_seconds += around.plain * len(problem.positions)
    if device == "cpu":  # elsewhere Python runs ahead of the device, and only what is launched counts
        problem.standing = Standing(trace, around, with_loss=with_loss)
    return problem, _how(costs)


def traffic_bytes(trace: Trace) -> float:
    """Bytes that an op of forward reads and writes, on average: what drives Python out of the caches."""
    number = Counter(op.signature for op in trace.ops if op.phase is Phase.FORWARD and not is_view_or_factory(op.name))
    return sum(n * work_of(trace.signatures[i]).nbytes for i, n in number.items()) / max(number.total(), 1)


def _how(costs: Sequence[OpCost]) -> str:
    measured = [c for c in costs if c.source == "measured"]
    noisy = sum(c.spread > POOR_SPREAD for c in measured)
    text = f"{len(measured)} of {len(costs)} distinct ops measured here, the rest modelled"
    return text + (f"; timings of {noisy} vary by more than {POOR_SPREAD:.0%}" if noisy else "")
