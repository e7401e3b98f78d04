"""Which kept values can be held smaller without loss, and how small."""

from __future__ import annotations

from holdover.planning.problem import candidates
from holdover.trace.graph import Category, Op, Phase, TensorSpec, Trace

WORTH_BYTES = 4096
"""Smaller values are not worth a recipe of their own."""


def packable(trace: Trace, *, with_loss: bool = False) -> dict[int, int]:
    """Saved values that may be packed, with their packed bytes: bool to bits, indices to the integers that hold them.

    Index ranges come from the op that makes them (a pooling index is below the size of the plane, a sort index below
    the length of the dimension), never from data, so the promise holds for any input.
    """
    step, _ = candidates(trace, with_loss=with_loss)
    phases = (Phase.FORWARD, Phase.LOSS) if with_loss else (Phase.FORWARD,)
    found: dict[int, int] = {}
    for slot in trace.slots:
        value = trace.values[slot.value]
        storage = trace.storages[value.storage]
        if value.maker < 0 or value.version or storage.category is not Category.ACTIVATION or value.escapes:
            continue
        op = trace.ops[value.maker]
        if op.step != step or op.phase not in phases or op.index < 0 or storage.nbytes < WORTH_BYTES:
            continue
        if value.dtype == "bool":
            found[value.id] = -(-storage.nbytes // 8)
        elif value.dtype == "int64" and (size := index_bytes(trace, op)) is not None and size < 8:
            found[value.id] = storage.nbytes // 8 * size
    rewritten = {before for op in trace.ops for before, _ in op.writes}
    return {v: n for v, n in found.items() if v not in rewritten}


def index_bytes(trace: Trace, op: Op) -> int | None:
    """Bytes of the smallest integer that holds any index the op can give; None if its range is not known."""
    signature = trace.signatures[op.signature]
    first = signature.args[0] if signature.args else None
    if not isinstance(first, TensorSpec):
        return None
    packet = signature.name.split(".")[1]
    planes = {"max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3, "adaptive_max_pool2d": 2}
    if packet in planes:
        limit = 1
        for n in first.shape[-planes[packet] :]:
            limit *= n
    elif packet in ("topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "median"):
        limit = max(first.shape, default=1)
    else:
        return None
    return 1 if limit <= 128 else 2 if limit <= 1 << 15 else 4 if limit <= 1 << 31 else None
