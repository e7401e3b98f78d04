"""On one device the closed form's peak is the recorder's, but for gradients that do not exist yet at the loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.closed_form.models import Gpt, Llama

import holdover
from holdover.closed_form.architecture import Architecture, Kernels
from holdover.closed_form.estimate import closed_form
from holdover.closed_form.layout import Layout
from holdover.closed_form.parameters import States

GPT = Architecture(
    name="gpt", layers=4, hidden=256, heads=4, ffn=1024, vocab=8000, sequence=256, norm="layernorm",
    activation="gelu", rotary=False, tied=True, linear_bias=True, qkv_bias=True,
    hidden_dropout=True, attention_dropout=True,
)  # fmt: skip
LLAMA = Architecture(name="llama", layers=4, hidden=256, heads=4, kv_heads=2, ffn=704, vocab=16000, sequence=256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=lambda shape: shape.name)
def test_one_device(shape: Architecture, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    with torch.device("meta"):
        model = (Gpt(shape, eager=True, dropout=0.1) if shape is GPT else Llama(shape, expand=False)).to(dtype)
        ids, targets = (torch.zeros(4, 256, dtype=torch.int64) for _ in range(2))
    recorded = holdover.estimate(model, (ids, targets))
    kernels = Kernels(
        attention="eager" if shape is GPT else "fused", norm="eager", gated="eager", loss="eager",
        element_bytes=size, mask_bytes=size, statistic_bytes=size if shape is GPT else 4,
    )  # fmt: skip
    name = "fp32" if size == 4 else "bf16"
    states = States(weights=name, gradients=name, optimizer="none")  # type: ignore[arg-type]
    stage = closed_form(shape, Layout(micro_batch=4), kernels=kernels, states=states).stages[0]
    kept = stage.activations_bytes + stage.embedding_bytes + stage.head_bytes
    inputs, scalar = 2 * 4 * 256 * 8, 4
    assert stage.weights_bytes == recorded.weights_bytes
    assert stage.gradients_bytes == recorded.gradients_bytes
    assert kept - inputs + scalar == recorded.activations_bytes
    assert stage.loss_bytes == stage.working_bytes == pytest.approx(recorded.temporaries_bytes, rel=0.001)
    assert stage.total_bytes - stage.gradients_bytes == pytest.approx(recorded.peak_bytes, rel=0.001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=lambda shape: shape.name)
def test_where_a_layers_backward_is_the_peak(shape: Architecture, dtype: torch.dtype) -> None:
    """With a small vocabulary: the widest op's gradients bound what the recorder sees, and not by much."""
    shape = dataclasses.replace(shape, vocab=64)
    size = dtype.itemsize
    with torch.device("meta"):
        gpt = shape.name == "gpt"
        model = (Gpt(shape, eager=True, dropout=0.1) if gpt else Llama(shape, expand=False)).to(dtype)
        ids, targets = (torch.zeros(4, 256, dtype=torch.int64) for _ in range(2))
    recorded = holdover.estimate(model, (ids, targets))
    kernels = Kernels(
        attention="eager" if gpt else "fused", norm="eager", gated="eager", loss="eager",
        element_bytes=size, mask_bytes=size, statistic_bytes=size if gpt else 4,
    )  # fmt: skip
    name = "fp32" if size == 4 else "bf16"
    states = States(weights=name, gradients=name, optimizer="none")  # type: ignore[arg-type]
    stage = closed_form(shape, Layout(micro_batch=4), kernels=kernels, states=states).stages[0]
    assert stage.working_bytes == stage.temporaries_bytes > stage.loss_bytes
    assert 0.995 < (stage.total_bytes - stage.gradients_bytes) / recorded.peak_bytes < 1.06
