"""Parameter counts against the models' own, bytes per parameter against published tables, and who shares them."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
import torch
from tests.closed_form.models import Gpt, Llama

from holdover.closed_form.architecture import Architecture
from holdover.closed_form.estimate import closed_form
from holdover.closed_form.layout import Layout
from holdover.closed_form.parameters import States, unique_parameters
from holdover.closed_form.presets import PRESETS

BILLIONS = {
    "llama2-7b": 6.738,
    "llama2-13b": 13.016,
    "llama2-70b": 68.977,
    "llama3-8b": 8.030,
    "llama3-70b": 70.554,
    "llama3-405b": 405.853,
    "mixtral-8x7b": 46.703,
    "mixtral-8x22b": 140.621,
    "deepseek-v3": 671.026,
    "qwen2.5-7b": 7.616,
    "qwen2.5-72b": 72.706,
    "qwen3-8b": 8.191,
    "qwen3-32b": 32.762,
    "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    assert unique_parameters(PRESETS[name]) / 1e9 == pytest.approx(BILLIONS[name], abs=0.001)


def test_counts_are_those_of_modules() -> None:
    llama = Architecture(name="x", layers=3, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=100, sequence=32)
    gpt = Architecture(
        name="x",
        layers=2,
        hidden=64,
        heads=4,
        ffn=256,
        vocab=100,
        sequence=32,
        norm="layernorm",
        activation="gelu",
        rotary=False,
        tied=True,
        linear_bias=True,
        qkv_bias=True,
    )
    with torch.device("meta"):
        for shape, model in ((llama, Llama(llama, expand=False)), (gpt, Gpt(gpt, eager=True, dropout=0.0))):
            assert unique_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("states", "whole"),
    [
        pytest.param(States(), 18, id="bf16, fp32 gradients"),
        pytest.param(States(weights="fp16", gradients="fp16"), 20, id="fp16, fp16 gradients"),
        pytest.param(States(weights="fp32"), 16, id="fp32"),
        pytest.param(States(gradients="bf16"), 16, id="bf16 gradients"),
        pytest.param(States(gradients="bf16", master=False), 12, id="no master, fp32 moments"),
        pytest.param(States(gradients="bf16", optimizer="adamw-bf16", master=False), 8, id="all bf16"),
        pytest.param(States(optimizer="adamw-bf16"), 14, id="bf16 moments"),
        pytest.param(States(optimizer="adamw-8bit"), 12 + Fraction(1, 32), id="8-bit moments"),
        pytest.param(States(optimizer="sgd"), 10, id="sgd"),
        pytest.param(States(optimizer="sgd-momentum"), 14, id="momentum"),
        pytest.param(States(optimizer="none"), 6, id="none"),
    ],
)
def test_bytes_of_a_parameter(states: States, whole: Fraction) -> None:
    assert states.weight_bytes + states.gradient_bytes + states.optimizer_bytes == whole


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_distributed_optimizer_takes_6_and_12_over_d_bytes(ranks: int) -> None:
    model = PRESETS["llama2-7b"]
    stage = closed_form(model, Layout(dp=ranks, zero=1)).stages[0]
    parameters = unique_parameters(model)
    assert stage.weights_bytes + stage.gradients_bytes == 6 * parameters
    assert stage.optimizer_bytes == 12 * parameters // ranks


def test_each_zero_level_shares_one_thing_more() -> None:
    model = PRESETS["llama2-7b"]
    weights = unique_parameters(model)
    found = [closed_form(model, Layout(dp=8, zero=level)).stages[0] for level in range(4)]  # type: ignore[arg-type]
    assert [x.weights_bytes for x in found] == [2 * weights] * 3 + [2 * weights // 8]
    assert [x.gradients_bytes for x in found] == [4 * weights] * 2 + [4 * weights // 8] * 2
    assert [x.optimizer_bytes for x in found] == [12 * weights] + [12 * weights // 8] * 3
    assert [x.gathered_bytes > 0 for x in found] == [False, False, False, True]


def test_full_sharding_gathers_two_layers_or_all_without_resharding() -> None:
    model = PRESETS["llama2-7b"]
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    root = 2 * 32000 * 4096 + 4096
    layout = Layout(dp=8, zero=3)
    assert closed_form(model, layout).stages[0].gathered_bytes == 2 * (2 * layer + root) + 2 * layer
    kept = dataclasses.replace(layout, reshard_after_forward=False)
    assert closed_form(model, kept).stages[0].gathered_bytes == 2 * (32 * layer + root) + 2 * layer


def test_tensor_parallelism_replicates_norms_and_shards_the_rest() -> None:
    model = PRESETS["llama2-7b"]
    whole, half = (closed_form(model, Layout(tp=tp)).stages[0].weights_bytes // 2 for tp in (1, 2))
    norms = (2 * 32 + 1) * 4096
    assert half == (whole - norms) // 2 + norms


def test_experts_are_divided_by_expert_ranks_and_shared_by_the_data_ranks_that_are_left() -> None:
    model = PRESETS["mixtral-8x7b"]
    experts = 32 * 8 * 3 * 4096 * 14336
    rest = unique_parameters(model) - experts
    stage = closed_form(model, Layout(dp=16, ep=8, zero=1)).stages[0]
    assert stage.weights_bytes == 2 * (rest + experts // 8)
    assert stage.optimizer_bytes == 12 * (rest // 16 + experts // 8 // 2)


def test_a_tied_head_is_there_twice_once_a_pipeline_parts_it_from_the_embedding() -> None:
    model = PRESETS["gpt-22b"]
    stages = closed_form(model, Layout(pp=2, micro_batches=2)).stages
    table, positions, norm = 51200 * 6144, 2048 * 6144, 2 * 6144
    assert (stages[0].weights_bytes - stages[1].weights_bytes) // 2 == positions - norm
    assert sum(stage.weights_bytes for stage in stages) // 2 == unique_parameters(model) + table


def test_copies_of_key_value_heads_are_weights_too() -> None:
    model = PRESETS["llama3-8b"]
    sharded = closed_form(model, Layout(tp=8)).stages[0].weights_bytes
    copied = closed_form(model, Layout(tp=16, replicate_kv=True)).stages[0].weights_bytes
    pairs, norms = 32 * 2 * 4096 * 1024, 65 * 4096
    everything = unique_parameters(model) - norms
    assert sharded == 2 * (everything // 8 + norms)
    assert copied == 2 * ((everything - pairs) // 16 + pairs // 8 + norms)
