"""How much arithmetic and memory traffic an op is: for ops that cannot be timed, and to put times into proportion.

PyTorch's own FLOP formulas where it has some, own ones for what it misses, none for the rest: pointwise ops and
reductions are bound by the bytes they move.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.flop_counter import flop_registry

from holdover.measuring.arguments import (
    dtype_of,
    extent_bytes,
    is_view_or_factory,
    numel,
    on_fake_tensors,
    result_bytes,
    tensors_of,
)
from holdover.trace.graph import Signature, TensorSpec

READS_A_PART = frozenset({"embedding", "index", "index_select", "gather", "slice_backward", "select_backward"})
"""Ops that touch as much of their largest operand as they return."""

RNN_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
"""Gates by oneDNN's and cuDNN's number of the cell: RNN with relu, with tanh, LSTM, GRU."""


@dataclass(frozen=True)
class Work:
    """Floating-point operations (a multiplication and an addition are two) and bytes read and written."""

    flops: int
    nbytes: int


def work_of(signature: Signature) -> Work:
    """What one call of the op has to do. A view or an empty tensor is no work.

    >>> a = TensorSpec((8, 16), (16, 1), "float32", "cpu")
    >>> b = TensorSpec((16, 4), (4, 1), "float32", "cpu")
    >>> work_of(Signature("aten.mm.default", (a, b), ()))
    Work(flops=1024, nbytes=896)
    """
    if is_view_or_factory(signature.name) or not signature.runnable:
        return Work(0, 0)
    args, kwargs, result = on_fake_tensors(signature)
    made = result_bytes(result)
    read = [_touched_bytes(spec) for spec in tensors_of(signature)]
    if result is None:
        made = max(read, default=0)
    if signature.name.split(".")[1] in READS_A_PART and read:
        read[read.index(max(read))] = made
    return Work(_flops(signature, args, kwargs, result), sum(read) + made)


def _touched_bytes(spec: TensorSpec) -> int:
    return min(numel(spec) * dtype_of(spec).itemsize, extent_bytes(spec))


# -- arithmetic -------------------------------------------------------------------------------------------------------


def _flops(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    packet = signature.name.split(".")[1]
    own = _OWN.get(packet)
    if own is not None:
        return own(*signature.args)
    formula = _formulas().get(packet)
    if formula is None or result is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except (AssertionError, TypeError, ValueError, IndexError):
        return 0


@functools.cache
def _formulas() -> dict[str, Callable[..., int]]:
    return {str(op).removeprefix("aten."): formula for op, formula in flop_registry.items()}


def _attention(query: TensorSpec, key: TensorSpec, value: TensorSpec, *_: Any) -> int:
    """Scores and weighted sum; grouped queries cost as much as if keys and values were repeated."""
    *batch, length, width = query.shape
    return 2 * math.prod(batch) * length * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(_grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec, *_: Any) -> int:
    """Five products where forward has two: the scores once more, and the gradients of scores, query, key and value."""
    *batch, length, width = query.shape
    return 2 * math.prod(batch) * length * key.shape[-2] * (3 * width + 2 * value.shape[-1])


def _rnn(sequence: TensorSpec, *rest: Any) -> int:
    """One layer in one direction: input and recurrent weights at every position."""
    mode, hidden = int(rest[8]), int(rest[9])
    *lengths, width = sequence.shape
    return 2 * math.prod(lengths) * RNN_GATES[mode] * hidden * (width + hidden)


def _rnn_backward(sequence: TensorSpec, *rest: Any) -> int:
    mode, hidden = int(rest[13]), int(rest[14])
    *lengths, width = sequence.shape
    return 4 * math.prod(lengths) * RNN_GATES[mode] * hidden * (width + hidden)


def _cudnn_rnn(sequence: TensorSpec, *rest: Any) -> int:
    """All layers and directions; a later layer reads what the directions of the one before made."""
    return _rnn_layers(sequence, *(int(rest[i]) for i in (5, 6, 7, 8)), directions=1 + bool(rest[12]))


def _cudnn_rnn_backward(sequence: TensorSpec, *rest: Any) -> int:
    """Gradients of inputs and of weights: two products for each of forward's."""
    return 2 * _rnn_layers(sequence, *(int(rest[i]) for i in (9, 10, 11, 12)), directions=1 + bool(rest[16]))


def _rnn_layers(sequence: TensorSpec, mode: int, hidden: int, projected: int, layers: int, *, directions: int) -> int:
    *lengths, width = sequence.shape
    state = projected or hidden
    inputs = width + (layers - 1) * directions * state
    products = RNN_GATES[mode] * hidden * (inputs + layers * state) + layers * projected * hidden
    return 2 * math.prod(lengths) * directions * products


def _grouped_product(left: TensorSpec, right: TensorSpec, *_: Any) -> int:
    """Rows are divided among the matrices of `right`, or (both flat) the inner size is."""
    if len(left.shape) == 2 and len(right.shape) == 3:
        return 2 * left.shape[0] * left.shape[1] * right.shape[-1]
    if len(left.shape) == 3 and len(right.shape) == 2:
        return 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]
    return 2 * numel(left) * right.shape[-1]


def _matrix_vector(matrix: TensorSpec, *_: Any) -> int:
    return 2 * numel(matrix)


def _added_matrix_vector(_added: TensorSpec, matrix: TensorSpec, *_: Any) -> int:
    return 2 * numel(matrix)


_OWN: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    "_cudnn_rnn": _cudnn_rnn,
    "_cudnn_rnn_backward": _cudnn_rnn_backward,
    "mkldnn_rnn_layer": _rnn,
    "mkldnn_rnn_layer_backward": _rnn_backward,
    "_grouped_mm": _grouped_product,
    "_scaled_grouped_mm": _grouped_product,
    "mv": _matrix_vector,
    "dot": _matrix_vector,
    "addmv": _added_matrix_vector,
}
