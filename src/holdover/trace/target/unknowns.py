"""What a recording for a card that is not there leaves out or guesses, each with its size or "unknown"."""

from __future__ import annotations

from holdover.trace.graph import Trace
from holdover.trace.target.card import Target

MIB = 1 << 20
CONVOLUTIONS = ("aten.convolution.", "aten.convolution_backward.")


def unknowns(trace: Trace, target: Target) -> list[str]:
    """One sentence each, for `Trace.uncertainties`."""
    names = {op.name for op in trace.ops}
    found = [
        f"The ops are those that PyTorch's source says {target.name} runs; none was seen on the card.",
        "Not in the recording: the workspace of cuBLAS and the CUDA context, which go with the card and are added "
        "by an estimate; buffers of NCCL, size unknown.",
    ]
    if any(name.startswith(CONVOLUTIONS) for name in names):
        found.append("Workspace of cuDNN's convolutions: size unknown; freed at once, so it shows in reserved memory.")
    reserve = rnn_reserve_bytes(trace)
    if reserve:
        found.append(
            f"The reserve that cuDNN's recurrent layers keep for backward is a guess, {reserve / MIB:.1f} MiB in the "
            "step; their workspace and the state of dropout between layers are unknown."
        )
    if any("cudnn_batch_norm" in name for name in names):
        found.append("The reserve of cuDNN's batch norm is taken as empty; in channels-last layout it may not be.")
    for kernel, said in (("cudnn", "cuDNN's"), ("efficient", "memory-efficient")):
        if f"aten._scaled_dot_product_{kernel}_attention_backward.default" in names:
            found.append(f"Workspace of {said} attention backward: size unknown.")
    return found


def rnn_reserve_bytes(trace: Trace) -> int:
    """Of one step, as each holds the same. The reserve is what cuDNN's layers give back as plain bytes."""
    return sum(
        trace.storages[trace.values[v].storage].nbytes
        for op in trace.ops
        if op.step == 0 and op.name.startswith("aten._cudnn_rnn.")
        for v in op.outputs
        if trace.values[v].dtype == "uint8"
    )
