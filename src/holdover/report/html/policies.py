"""What usual activation checkpointing would do to the same step: modelled, for comparison with plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdover.memory.simulate import simulate
from holdover.memory.timeline import Choices, phase_peaks
from holdover.planning.problem import Problem, candidates
from holdover.report.html.moments import Shown
from holdover.report.tables import layer_name
from holdover.trace.events import replayed_part
from holdover.trace.graph import Phase, Trace

MATRIX_OPS = (
    "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution", "aten._scaled_dot_product",
    "aten._flash_attention", "aten._efficient_attention",
)  # fmt: skip


@dataclass(frozen=True)
class Policy:
    """One way of activation checkpointing, as the simulator sees it."""

    name: str
    about: str
    peak_bytes: int
    extra_time: float


def policies_of(shown: Shown, workspace: Mapping[int, int], problem: Problem) -> list[Policy]:
    """Whole blocks, every second block, and selective, where the model has blocks that repeat.

    A block is modelled as recomputing all of its ops whose results stay inside it; results that leave it are kept. The
    prices are those of plans, what following one costs around its ops included.
    """
    trace = shown.trace
    blocks = block_ops(trace)
    if not blocks:
        return []
    names = list(blocks)
    inside = frozenset(o for ops in blocks.values() for o in ops)
    cheap = frozenset(o for o in inside if not trace.ops[o].name.startswith(MATRIX_OPS))
    half = frozenset(o for name in names[::2] for o in blocks[name])
    part = replayed_part(trace, shown.step)
    peaks = phase_peaks(trace, simulate(trace, workspace=workspace, detail=False))
    others = max((n for (_, phase), n in peaks.items() if phase is Phase.OPTIMIZER), default=0)

    def policy(name: str, about: str, ops: frozenset[int]) -> Policy:
        timeline = simulate(part, Choices(ops), workspace, detail=False)
        seconds = sum(problem.cost.get(o, 0.0) * n for o, n in timeline.replays.items())
        if problem.standing is not None:
            seconds += problem.standing.seconds(ops)
        return Policy(name, about, max(timeline.peak_bytes, others), seconds / max(problem.step_seconds, 1e-12))

    return [
        policy("every block", f"activation checkpointing of each of {len(names)} blocks", inside),
        policy("every second block", f"activation checkpointing of {len(names[::2])} of {len(names)} blocks", half),
        policy(
            "selective", "in each block, matrix products, convolutions and attention kept, the rest made again", cheap
        ),
    ]


def block_ops(trace: Trace) -> dict[str, list[int]]:
    """The outermost blocks that repeat (one class, with modules inside), each with the ops whose results stay in it."""
    kinds = {c.path: c.kind for c in trace.calls if c.path}
    outer = {p: k for p, k in kinds.items() if layer_name(p) == p and p.rpartition(".")[2].isdecimal()}
    often = Counter(outer.values())
    parents = {p.rpartition(".")[0] for p in kinds} | {layer_name(p) for p in kinds if layer_name(p) != p}
    blocks = {p for p, k in outer.items() if often[k] > 1 and p in parents}
    _, eligible = candidates(trace, with_loss=False)
    home = {op.id: layer_name(trace.calls[op.call].path) for op in trace.ops}
    leaves = _read_elsewhere(trace, home, set(eligible))
    found: dict[str, list[int]] = {}
    for o in eligible:
        if home[o] in blocks and o not in leaves:
            found.setdefault(home[o], []).append(o)
    return found


def _read_elsewhere(trace: Trace, home: Mapping[int, str], eligible: Collection[int]) -> set[int]:
    return {
        trace.values[v].maker
        for op in trace.ops
        if op.phase in (Phase.FORWARD, Phase.LOSS)
        for v in op.inputs
        if trace.values[v].maker in eligible and home[op.id] != home[trace.values[v].maker]
    }
