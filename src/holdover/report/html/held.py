"""What is held over from forward to backward: one row per storage, its users, and what a plan does with it and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdover.memory.timeline import Choices
from holdover.planning.problem import candidates
from holdover.report.html.moments import Shown
from holdover.trace.graph import Category, Phase, TensorSpec, Trace

KEEP, RECOMPUTE, PACKED = "keep", "recompute", "pack"

REASONS = {
    "no plan": "kept, as plain PyTorch does",
    "replayed": "dropped, and made again when backward asks for it",
    "packed": "kept in a smaller form, without loss",
    "loss": "kept: made outside the model, where a plan that is applied to the model does not reach",
    "cannot": "kept: it cannot be made again safely",
    "source": "kept: other values are made again from it",
    "away": "kept: it is not there when memory is highest, so dropping it would gain nothing",
    "dear": "kept: making it again costs more per byte than anything that this plan drops",
    "enough": "kept: the budget is met without dropping it",
}


@dataclass(frozen=True)
class Held:
    """A storage that autograd saves for backward, made in the step. Ops are positions in the shown step."""

    storage: int
    value: int
    maker: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    readers: tuple[int, ...]  # ops that read it in forward and loss
    needers: tuple[int, ...]  # ops that read it in backward
    eligible: bool
    obstacle: str  # why its op cannot be replayed; "" where it can


def held_values(shown: Shown) -> list[Held]:
    """The rows, in order of making; their bytes add up to the estimate's `activations_bytes`."""
    trace = shown.trace
    place = {op: i for i, op in enumerate(shown.ops)}
    _, able = candidates(trace, with_loss=True)
    eligible = set(able)
    readers: dict[int, list[int]] = defaultdict(list)  # by storage
    for i, number in enumerate(shown.ops[: shown.optimizer_start]):
        op = trace.ops[number]
        if op.outputs or op.writes:
            for read in {trace.values[v].storage for v in op.inputs}:
                readers[read].append(i)
    shapes = _shapes(shown)
    rows: dict[int, Held] = {}
    for slot in trace.slots:
        value = trace.values[slot.value]
        storage = trace.storages[value.storage]
        if storage.category is not Category.ACTIVATION or value.maker not in place or storage.id in rows:
            continue
        maker = trace.ops[value.maker]
        users = readers[storage.id]
        later = [i for i in users if i > place[maker.id]]
        rows[storage.id] = Held(
            storage.id, value.id, place[maker.id], storage.nbytes, value.dtype, shapes.get(value.id, ()),
            tuple(i for i in later if trace.ops[shown.ops[i]].phase is not Phase.BACKWARD),
            tuple(i for i in later if trace.ops[shown.ops[i]].phase is Phase.BACKWARD),
            maker.id in eligible, maker.keep or value.escapes,
        )  # fmt: skip
    return sorted(rows.values(), key=lambda row: row.maker)


def _shapes(shown: Shown) -> dict[int, tuple[int, ...]]:
    """Shapes of values, as the first op that reads the whole of one sees it."""
    trace = shown.trace
    found: dict[int, tuple[int, ...]] = {}
    for number in shown.ops:
        op = trace.ops[number]
        signature = trace.signatures[op.signature]
        specs = [*_specs(signature.args), *_specs(signature.kwargs)]
        for v in op.inputs:
            value = trace.values[v]
            nbytes = trace.storages[value.storage].nbytes
            spec = next((s for s in specs if s.storage_bytes == nbytes and s.dtype == value.dtype), None)
            if spec is not None:
                found.setdefault(v, spec.shape)
    return found


def _specs(arguments: Any) -> Iterator[TensorSpec]:
    if isinstance(arguments, TensorSpec):
        yield arguments
    elif isinstance(arguments, (tuple, list)):
        for argument in arguments:
            yield from _specs(argument)


def state_of(row: Held, shown: Shown, choices: Choices) -> str:
    """Kept, recomputed or packed."""
    if shown.ops[row.maker] in choices.recompute:
        return RECOMPUTE
    return PACKED if row.value in choices.pack else KEEP


def reasons_of(
    rows: list[Held], shown: Shown, choices: Choices, at_peak: Collection[int], cost: Mapping[int, float]
) -> list[str]:
    """Why each value is kept or not: keys of REASONS.

    Args:
        at_peak: storages live when the plain step's memory is highest.
        cost: seconds of one replay, by op of the trace.
    """
    trace = shown.trace
    sources = {trace.values[v].storage for o in choices.recompute for v in trace.ops[o].inputs}
    dropped = [r for r in rows if shown.ops[r.maker] in choices.recompute and r.nbytes]
    dearest = max((cost.get(shown.ops[r.maker], 0.0) / r.nbytes for r in dropped), default=0.0)
    return [_reason(row, shown, choices, sources, at_peak, cost, dearest) for row in rows]


def _reason(
    row: Held, shown: Shown, choices: Choices, sources: Collection[int], at_peak: Collection[int],
    cost: Mapping[int, float], dearest: float,
) -> str:  # fmt: skip
    trace: Trace = shown.trace
    maker = trace.ops[shown.ops[row.maker]]
    state = state_of(row, shown, choices)
    if state != KEEP:
        return "replayed" if state == RECOMPUTE else "packed"
    if not choices.recompute and not choices.pack:
        return "no plan"
    if not row.eligible:
        return "cannot"
    if not choices.with_loss and (maker.phase is Phase.LOSS or not trace.calls[maker.call].key):
        return "loss"
    if row.storage in sources:
        return "source"
    if row.storage not in at_peak:
        return "away"
    return "dear" if cost.get(maker.id, 0.0) / max(row.nbytes, 1) > dearest else "enough"
