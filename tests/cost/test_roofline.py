"""Modelled seconds against figures worked out by hand from the cards' data sheets."""

from __future__ import annotations

from typing import Any

import pytest

from holdover.cost.devices import CARDS, card
from holdover.cost.efficiency import EFFICIENCY, FLASH2_ON_HOPPER, KERNEL_SECONDS, class_of
from holdover.cost.roofline import efficiency_of, modelled, rate_of
from holdover.trace.graph import Signature, TensorSpec


def tensor(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    steps, step = [], 1
    for size in reversed(shape):
        steps.insert(0, step)
        step *= size
    return TensorSpec(shape, tuple(steps), dtype, "cpu")


def op(name: str, *args: Any, **kwargs: Any) -> Signature:
    return Signature(f"aten.{name}", args, tuple(kwargs.items()))


def seconds(signature: Signature, name: str = "h100-80gb") -> float:
    (cost,) = modelled([signature], card(name))
    assert cost.source == "modelled"
    return cost.seconds


def test_a_large_product_is_bound_by_arithmetic() -> None:
    x = tensor(4096, 4096)
    assert seconds(op("mm.default", x, x)) == pytest.approx(2 * 4096**3 / (989e12 * 0.7))
    assert seconds(op("mm.default", x, x), "a100-80gb") == pytest.approx(2 * 4096**3 / (312e12 * 0.7))


def test_a_thin_product_is_bound_by_memory() -> None:
    thin = op("mm.default", tensor(8, 16384), tensor(16384, 16384))
    moved = 2 * (8 * 16384 + 16384 * 16384 + 8 * 16384)
    assert seconds(thin) == pytest.approx(moved / (3.35e12 * 0.8))


def test_a_pointwise_op_moves_its_bytes() -> None:
    x = tensor(64, 2**20)
    assert seconds(op("gelu.default", x)) == pytest.approx(2 * 2 * 64 * 2**20 / (3.35e12 * 0.8))


def test_nothing_is_faster_than_a_kernel_but_a_view() -> None:
    assert seconds(op("add.Tensor", tensor(4), tensor(4))) == KERNEL_SECONDS
    assert seconds(op("view.default", tensor(4), (2, 2))) == 0.0


def test_the_dtype_decides_the_rate() -> None:
    for dtype, rate in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        x = tensor(8, 8, dtype=dtype)
        assert rate_of(op("mm.default", x, x), card("a100-80gb")) == rate
    full = tensor(1, 3, 8, 8, dtype="float32")
    convolution = op("convolution.default", full, full)
    assert rate_of(convolution, card("a100-80gb")) == "tf32"  # as cuDNN is set by default
    assert rate_of(convolution, card("v100-32gb")) == "fp32"
    half = tensor(8, 8)
    assert rate_of(op("mm.default", half, half), card("t4")) == "fp32"  # no units for bfloat16


def test_flash_attention_by_card_mask_and_direction() -> None:
    q = tensor(2, 16, 2048, 64)
    product = 2 * 2 * 16 * 2048 * 2048 * 64
    plain = op("_scaled_dot_product_flash_attention.default", q, q, q, 0.0, False)
    causal = op("_scaled_dot_product_flash_attention.default", q, q, q, 0.0, True)
    assert seconds(plain, "a100-80gb") == pytest.approx(2 * product / (312e12 * 0.6))
    assert seconds(causal, "a100-80gb") == pytest.approx(product / (312e12 * 0.6))
    assert seconds(plain) == pytest.approx(2 * product / (989e12 * FLASH2_ON_HOPPER.flops))
    backward = op("_scaled_dot_product_flash_attention_backward.default", q, q, q, q)
    assert seconds(backward, "a100-80gb") == pytest.approx(5 * product / (312e12 * 0.5))
    by_name = op("_scaled_dot_product_efficient_attention.default", q, q, q, None, True, is_causal=True)
    assert efficiency_of(by_name, card("h100-80gb")).flops == 1.2


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("addmm.default", "matmul"), ("_grouped_mm.default", "matmul"), ("convolution_backward.default", "convolution"),
        ("cudnn_convolution.default", "convolution"), ("_cudnn_rnn_backward.default", "rnn"),
        ("_scaled_dot_product_cudnn_attention.default", "attention"), ("native_batch_norm.default", "reduction"),
        ("_softmax_backward_data.default", "reduction"), ("nll_loss_forward.default", "reduction"),
        ("embedding_dense_backward.default", "gather"), ("_fused_adamw_.default", "pointwise"),
        ("_foreach_norm.Scalar", "pointwise"), ("native_dropout.default", "pointwise"),
    ],
)  # fmt: skip
def test_classes(name: str, kind: str) -> None:
    assert class_of(op(name)) == kind


def test_every_share_says_where_it_comes_from() -> None:
    for found in (*EFFICIENCY.values(), FLASH2_ON_HOPPER):
        assert 0 < found.flops < 1
        assert 0 < found.nbytes < 1
        assert found.source.startswith("assumption") or "20" in found.source  # or a paper's year


def test_every_card_prices_every_dtype() -> None:
    for name in CARDS:
        for dtype in ("float32", "bfloat16", "float16", "int64"):
            x = tensor(512, 512, dtype=dtype)
            assert KERNEL_SECONDS <= seconds(op("add.Tensor", x, x), name) < 1e-3
