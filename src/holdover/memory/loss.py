"""What of a step belongs to its loss."""

from __future__ import annotations

from holdover.trace.graph import Phase, Trace

LOSS_OPS = ("_log_softmax", "nll_loss", "binary_cross_entropy", "mse_loss", "smooth_l1_loss", "huber_loss")
CASTS = ("aten._to_copy", "aten.clone", "aten.copy_", "aten.contiguous")


def logits_and_loss(trace: Trace, step: int) -> set[int]:
    """Storages made by the loss, and the logits it reads: back from the loss's first op through casts and copies."""
    found: set[int] = set()
    for op in trace.ops:
        if op.step != step or op.phase not in (Phase.FORWARD, Phase.LOSS):
            continue
        is_loss_op = any(name in op.name for name in LOSS_OPS)
        if op.phase is Phase.LOSS or is_loss_op:
            found.update(trace.values[v].storage for v in op.outputs)
        if is_loss_op:
            queue = list(op.inputs)
            while queue:
                value = trace.values[queue.pop()]
                if value.maker < 0 or value.storage in found or value.dtype.startswith("int"):
                    continue
                found.add(value.storage)
                if trace.ops[value.maker].name.startswith(CASTS):
                    queue.extend(trace.ops[value.maker].inputs)
    return found
