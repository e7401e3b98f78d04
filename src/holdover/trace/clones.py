"""Clones that are made right before what they copy is written over.

Autograd does so before an op in place whose backward reads what it overwrites: `silu_`, `hardswish_`, `hardtanh_`,
`mul_` by what needs a gradient.
"""

from __future__ import annotations

from holdover.trace.graph import Trace

CLONE = "aten.clone.default"


def clone_before(trace: Trace, number: int, value: int) -> int:
    """The value to which the op right before op `number`, in the same call, copied `value`; -1 if it did not."""
    if not number:
        return -1
    op, last = trace.ops[number], trace.ops[number - 1]
    if last.name != CLONE or last.inputs != (value,) or (last.call, last.index + 1) != (op.call, op.index):
        return -1
    if trace.signatures[last.signature].kwargs:  # it may lie another way
        return -1
    (clone,) = last.outputs
    sizes = [trace.storages[trace.values[v].storage].nbytes for v in (value, clone)]
    return clone if sizes[0] == sizes[1] else -1
