"""Packed sequences on a card: their batch sizes are on the CPU, and PyTorch reads them where no mode sees it.

What is read here are values known beside fake tensors, which follow from lengths that the caller gave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from holdover.trace._torch import disable_current_modes
from holdover.trace.known import KnownValues
from holdover.trace.target import recurrent
from holdover.trace.target.card import Target

aten = torch.ops.aten
Kernel = Callable[..., Any]


def values(known: KnownValues, tensor: torch.Tensor) -> list[int]:
    """The integers in a small tensor.

    Raises:
        RuntimeError: they do not follow from the caller's own tensors.
    """
    real = known.of(tensor)
    if real is None:
        raise RuntimeError("The lengths of a packed sequence are not known without data.")
    with disable_current_modes():
        return [int(n) for n in real.tolist()]


def pack_outputs(
    known: KnownValues, input: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """PackedSequence.cpp _pack_padded_sequence: rows of all steps in one tensor, and how many each step has."""
    longest_first = values(known, lengths)
    sizes = [sum(n > step for n in longest_first) for step in range(longest_first[0])]
    with disable_current_modes():
        real = torch.tensor(sizes)
    batch_sizes = torch.empty(len(sizes), dtype=torch.int64, device="cpu")
    known.learn(batch_sizes, real)
    return input.new_empty((sum(sizes), *input.shape[2:])), batch_sizes


def pack_backward(
    known: KnownValues, target: Target, grad: torch.Tensor, input_size: list[int], batch_sizes: torch.Tensor,
    batch_first: bool,
) -> torch.Tensor:  # fmt: skip
    """PackedSequence.cpp _pack_padded_sequence_backward."""
    size = [input_size[1], input_size[0], *input_size[2:]] if batch_first else list(input_size)
    out, offset = torch.zeros(size, dtype=grad.dtype, device=grad.device), 0
    for step, count in enumerate(values(known, batch_sizes)):
        out[step, :count].copy_(grad[offset : offset + count])
        offset += count
    return out.transpose(0, 1) if batch_first else out


def pad(
    known: KnownValues, target: Target, data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool,
    padding_value: float, total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """PackedSequence.cpp _pad_packed_sequence: runs of steps with equal batch are copied at once."""
    sizes = values(known, batch_sizes)
    length = total_length if total_length > 0 else len(sizes)
    shape = (length, sizes[0], *data.shape[1:])
    out, offset, first = torch.full(shape, padding_value, dtype=data.dtype, device=data.device), 0, 0
    lengths = torch.empty(sizes[0], dtype=batch_sizes.dtype)
    with disable_current_modes():
        known.learn(lengths, torch.tensor([sum(size > row for size in sizes) for row in range(sizes[0])]))
    for step in range(1, len(sizes) + 1):
        if step == len(sizes) or sizes[step] != sizes[first]:
            rows = (step - first) * sizes[first]
            run = data[offset : offset + rows].view(step - first, sizes[first], *data.shape[1:])
            out[first:step, : sizes[first]].copy_(run)
            offset, first = offset + rows, step
    return (out.transpose(0, 1) if batch_first else out), lengths


def composites(known: KnownValues) -> dict[str, Kernel]:
    """For the composite functions that read batch sizes; each takes the target first."""

    def with_sizes(layer: Kernel) -> Kernel:
        def packed(target: Target, data: torch.Tensor, batch_sizes: torch.Tensor, *rest: Any) -> Any:
            return layer(target, data, values(known, batch_sizes), *rest)

        return packed

    return {
        "_pack_padded_sequence_backward": partial(pack_backward, known),
        "_pad_packed_sequence": partial(pad, known),
        "lstm.data": with_sizes(recurrent.lstm_packed),
        **{
            f"{kind}.data": with_sizes(partial(recurrent.one_hidden_packed, kind))
            for kind in ("gru", "rnn_tanh", "rnn_relu")
        },
    }


def fake_kernels(known: KnownValues) -> dict[Any, Kernel]:
    return {aten._pack_padded_sequence.default: partial(pack_outputs, known)}
