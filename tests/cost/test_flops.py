"""FLOPs and bytes against figures counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from holdover.cost.flops import Work, work_of
from holdover.trace.graph import Signature, TensorSpec


def tensor(*shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> TensorSpec:
    steps, step = [], 1
    for size in reversed(shape):
        steps.insert(0, step)
        step *= size
    return TensorSpec(shape, stride or tuple(steps), dtype, "cpu")


def work(name: str, *args: Any, **kwargs: Any) -> Work:
    return work_of(Signature(name, args, tuple(kwargs.items())))


def test_matrix_products() -> None:
    assert work("aten.mm.default", tensor(8, 16), tensor(16, 4)) == Work(2 * 8 * 16 * 4, 4 * (128 + 64 + 32))
    assert work("aten.addmm.default", tensor(4), tensor(8, 16), tensor(16, 4)).flops == 2 * 8 * 16 * 4
    assert work("aten.bmm.default", tensor(3, 8, 16), tensor(3, 16, 4)).flops == 3 * 2 * 8 * 16 * 4
    assert work("aten.mv.default", tensor(8, 16), tensor(16)).flops == 2 * 8 * 16


def test_half_precision_moves_half_the_bytes() -> None:
    full = work("aten.mm.default", tensor(8, 16), tensor(16, 4))
    half = work("aten.mm.default", tensor(8, 16, dtype="bfloat16"), tensor(16, 4, dtype="bfloat16"))
    assert half == Work(full.flops, full.nbytes // 2)


CONV = (tensor(2, 3, 8, 8), tensor(5, 3, 3, 3))
CONV_SETTINGS = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def test_convolution() -> None:
    macs = 2 * 5 * 8 * 8 * (3 * 3 * 3)  # each of the output's elements sums a 3x3 window over 3 channels
    settings = tuple(tuple(s) if isinstance(s, list) else s for s in CONV_SETTINGS)
    assert work("aten.convolution.default", *CONV, None, *settings).flops == 2 * macs
    grad = tensor(2, 5, 8, 8)
    both = work("aten.convolution_backward.default", grad, *CONV, (5,), *settings, (True, True, False))
    assert both.flops == 2 * 2 * macs
    weight_only = work("aten.convolution_backward.default", grad, *CONV, (5,), *settings, (False, True, False))
    assert weight_only.flops == 2 * macs


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_on_cpu(key_heads: int) -> None:
    query, key = tensor(2, 4, 16, 8), tensor(2, key_heads, 32, 8)
    product = 2 * (2 * 4 * 16 * 32 * 8)  # of every head: 16 queries by 32 keys, width 8
    forward = work("aten._scaled_dot_product_flash_attention_for_cpu.default", query, key, key)
    assert forward.flops == 2 * product
    backward = work(
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        query, query, key, key, query, tensor(2, 4, 16), 0.0, False,
    )  # fmt: skip
    assert backward.flops == 5 * product


def test_lstm_layer() -> None:
    length, batch, width, hidden = 7, 3, 10, 6
    sequence, state = tensor(length, batch, width), tensor(batch, hidden)
    weights = (tensor(4 * hidden, width), tensor(4 * hidden, hidden), tensor(4 * hidden), tensor(4 * hidden))
    flops = 2 * length * batch * 4 * hidden * (width + hidden)
    forward = work(
        "aten.mkldnn_rnn_layer.default", sequence, *weights, state, state, False, (), 2, hidden, 1, True, False, False,
        True,
    )  # fmt: skip
    assert forward.flops == flops
    output = tensor(length, batch, hidden)
    backward = work(
        "aten.mkldnn_rnn_layer_backward.default", sequence, *weights, state, state, output, state, state, output, None,
        None, False, 2, hidden, 1, True, True, False, (), False, tensor(64, dtype="uint8"),
    )  # fmt: skip
    assert backward.flops == 2 * flops


def test_grouped_product() -> None:
    rows, experts = tensor(32, 16, dtype="bfloat16"), tensor(4, 16, 8, dtype="bfloat16")
    assert work("aten._grouped_mm.default", rows, experts, tensor(4, dtype="int32")).flops == 2 * 32 * 16 * 8


def test_pointwise_ops_are_their_bytes() -> None:
    assert work("aten.gelu.default", tensor(64, 64)) == Work(0, 2 * 4 * 64 * 64)
    assert work("aten.add.Tensor", tensor(64, 64), tensor(64)) == Work(0, 4 * (64 * 64 + 64 + 64 * 64))


def test_an_expanded_operand_is_read_once() -> None:
    spread = tensor(64, 64, stride=(0, 1))
    assert work("aten.neg.default", spread).nbytes == 4 * (64 + 64 * 64)


def test_views_and_empty_tensors_are_no_work() -> None:
    assert work("aten.transpose.int", tensor(4, 8), 0, 1) == Work(0, 0)
    assert work("aten.empty_like.default", tensor(4, 8)) == Work(0, 0)


def test_an_embedding_reads_only_the_rows_it_returns() -> None:
    table, ids = tensor(100_000, 16), tensor(10, dtype="int64")
    assert work("aten.embedding.default", table, ids).nbytes == 4 * 160 + 8 * 10 + 4 * 160


def test_an_unknown_op_is_told_by_its_operands() -> None:
    assert work("nowhere.nothing.default", tensor(8)) == Work(0, 64)


# -- CUDA's names -----------------------------------------------------------------------------------------------------

CUDA_ATTENTION = ["flash", "efficient", "cudnn"]


@pytest.mark.parametrize("kind", CUDA_ATTENTION)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_on_cuda(kind: str, key_heads: int) -> None:
    query, key, value = tensor(2, 4, 16, 8), tensor(2, key_heads, 32, 8), tensor(2, key_heads, 32, 12)
    scores, weighted = (2 * (2 * 4 * 16 * 32 * width) for width in (8, 12))
    bias = () if kind == "flash" else (None, True)
    forward = work(f"aten._scaled_dot_product_{kind}_attention.default", query, key, value, *bias, 0.0, False)
    assert forward.flops == scores + weighted
    grad = tensor(2, 4, 16, 12)
    backward = work(f"aten._scaled_dot_product_{kind}_attention_backward.default", grad, query, key, value)
    assert backward.flops == 3 * scores + 2 * weighted  # scores again, gradients of query and key; of value and scores


def test_cudnn_lstm_of_two_layers_in_both_directions() -> None:
    length, batch, width, hidden = 7, 3, 10, 6
    sequence, state = tensor(length, batch, width), tensor(4, batch, hidden)
    first = 2 * length * batch * 4 * hidden * (width + hidden)
    second = 2 * length * batch * 4 * hidden * (2 * hidden + hidden)  # reads both directions of the first
    settings = (2, hidden, 0, 2, False, 0.0, True, True, (), None)
    forward = work("aten._cudnn_rnn.default", sequence, (), 4, None, state, state, *settings)
    assert forward.flops == 2 * (first + second)
    grads = (tensor(length, batch, 2 * hidden), tensor(length, batch, 2 * hidden), None, None)
    backward = work(
        "aten._cudnn_rnn_backward.default", sequence, (), 4, tensor(8), state, state, *grads, *settings, tensor(64),
        (True, True, True, True),
    )  # fmt: skip
    assert backward.flops == 2 * forward.flops


def test_cudnn_lstm_with_projection() -> None:
    sequence, state = tensor(7, 3, 10), tensor(1, 3, 6)
    forward = work(
        "aten._cudnn_rnn.default", sequence, (), 4, None, state, state, 2, 6, 2, 1, False, 0.0, True, False, (), None
    )
    assert forward.flops == 2 * 7 * 3 * (4 * 6 * (10 + 2) + 6 * 2)  # the state is 2 wide, projected from 6
