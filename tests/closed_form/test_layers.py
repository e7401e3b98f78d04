"""Bytes per token of today's layers, against figures worked out or measured elsewhere."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest

from holdover.closed_form.architecture import (
    HUGGING_FACE,
    MEGATRON,
    PAPER,
    Architecture,
    Experts,
    Kernels,
    Latent,
)
from holdover.closed_form.errors import ConfigurationError
from holdover.closed_form.formula import Formula, symbols
from holdover.closed_form.layers import chunk_bytes, last_end, layer, loss_temporaries, rotary_tables
from holdover.closed_form.layout import Layout
from holdover.closed_form.presets import PRESETS
from holdover.closed_form.tensors import Shard

h, a, d, g, f, v, s = symbols("h a d g f v s")
E, k, f_e, f_s = symbols("E k f_e f_s")
LLAMA, DEEPSEEK, MIXTRAL = PRESETS["llama3-8b"], PRESETS["deepseek-v3"], PRESETS["mixtral-8x7b"]
ONE = {"t": 1, "t_s": 1, "t_e": 1, "kv_copies": 1, "rho": 1}


def per_token(architecture: Architecture, kernels: Kernels = MEGATRON, kind: str = "dense") -> Formula:
    return layer(architecture, kernels, kind).bytes(small=False).substitute(**ONE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        pytest.param(MEGATRON, 8 * h + 4 * a * d + 4 * g * d + 6 * f + 4 * a, id="fused"),
        pytest.param(HUGGING_FACE, 16 * h + 4 * a * d + 4 * g * d + 8 * f + 4 * a, id="eager code"),
        pytest.param(
            dataclasses.replace(HUGGING_FACE, expand_kv=True), 16 * h + 8 * a * d + 8 * f + 4 * a, id="repeat_kv"
        ),
        pytest.param(Kernels(fp8="tensor"), 6 * h + 5 * a * d + 4 * g * d + 5 * f + 4 * a, id="fp8"),
        pytest.param(Kernels(fp32_residual=True), 12 * h + 4 * a * d + 4 * g * d + 6 * f + 4 * a, id="fp32 residual"),
        pytest.param(Kernels(fp8_gated_input=True), 8 * h + 4 * a * d + 4 * g * d + 4 * f + 4 * a, id="fp8 gate, up"),
        pytest.param(Kernels(norm="composite"), 20 * h + 4 * a * d + 4 * g * d + 6 * f + 4 * a, id="nn.RMSNorm on CPU"),
    ],
)
def test_llama(kernels: Kernels, expected: Formula) -> None:
    assert per_token(LLAMA, kernels) == expected


def test_fp8_scales_cost_a_part_of_a_byte() -> None:
    plain, block, mx = (per_token(LLAMA, Kernels(fp8=name)) for name in ("tensor", "block", "mx"))  # type: ignore[arg-type]
    inputs = 2 * h + a * d + f
    assert block - plain == inputs * Fraction(1, 32)
    assert mx - plain == inputs * Fraction(1, 32)


@pytest.mark.parametrize(
    ("name", "fused", "eager"),
    [
        ("llama2-7b", 131712, 186496),
        ("llama3-8b", 139392, 200832),
        ("llama3-70b", 274688, 397568),
        ("llama3-405b", 520704, 758272),
    ],
)
def test_llama_models(name: str, fused: int, eager: int) -> None:
    values = PRESETS[name].values()
    assert per_token(PRESETS[name]).at(values) == fused
    assert per_token(PRESETS[name], HUGGING_FACE).at(values) == eager


@pytest.mark.parametrize(("name", "measured"), [("llama2-7b", 45.53), ("llama3-8b", 49.03)])
def test_transformers_llama_as_counted_under_fake_tensors(name: str, measured: float) -> None:
    """Bytes per token and hidden element that transformers' code saves in bf16, published to two decimals."""
    model = PRESETS[name]
    assert per_token(model, HUGGING_FACE).at(model.values()) / model.hidden == pytest.approx(measured, abs=0.005)


def test_measured_small_llama() -> None:
    """11112 and 11880 bytes a token at h=256, a=8, g=2, f=704, statistics and rotary tables included."""
    small = Architecture(name="x", layers=1, hidden=256, heads=8, kv_heads=2, ffn=704, vocab=100, sequence=64)
    values = Layout(micro_batch=2).values(small)
    for kernels, measured in ((HUGGING_FACE, 11112), (dataclasses.replace(HUGGING_FACE, expand_kv=True), 11880)):
        assert layer(small, kernels).bytes().at(values) + rotary_tables(small, kernels).at(values) == measured


def test_deepseek() -> None:
    values = DEEPSEEK.values()
    attention = [x for x in layer(DEEPSEEK, MEGATRON, "moe").stored if not x.small]
    cut = next(place for place, x in enumerate(attention) if x.name == "attention residual")
    norm_pair = 4 * 7168  # input and output of the attention's norm
    assert sum(x.bytes.substitute(**ONE).at(values) for x in attention[:cut]) == 201_344
    assert norm_pair + 4 * 1536 + 2 * 576 + 2 * 512 + 131_072 + 2 * 128 * 128 + 4 * 128 == 201_344
    assert per_token(DEEPSEEK, MEGATRON, "moe").at(values) == 457_600
    up = [x for x in attention if "mla_up_proj" in x.dropped_by]
    assert sum(x.bytes.at(values) for x in up) == 131_072
    heavy = Kernels(router_fp32_input=True, separate_probs=True)
    more = per_token(DEEPSEEK, heavy, "moe").at(values)
    assert more == 457_600 + 4 * 7168 + 2 * 8 * 7168
    assert more == pytest.approx(601_000, rel=0.001)


def test_padding_the_value_as_measured() -> None:
    """5996 against 4896 bytes a token: a value as wide as the key, and a padded output beside its unpadded copy."""
    latent = Latent(query_rank=48, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16)
    model = Architecture(name="x", layers=1, hidden=64, heads=4, ffn=128, vocab=100, sequence=32, latent=latent)
    key, value, heads = 24, 16, 4
    plain, padded = (per_token(model, Kernels(pad_value=on)).at(model.values()) for on in (False, True))
    assert padded - plain == 2 * heads * (key - value) + 2 * heads * key


def test_a_query_without_compression() -> None:
    latent = Latent(query_rank=0, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16)
    model = Architecture(name="x", layers=1, hidden=64, heads=4, ffn=128, vocab=100, sequence=32, latent=latent)
    assert "query norm output" not in {x.name for x in layer(model, MEGATRON).stored}


def test_mixtral() -> None:
    assert per_token(MIXTRAL, MEGATRON, "moe").at(MIXTRAL.values()) == 241_864
    routed = per_token(MIXTRAL, MEGATRON, "moe")
    assert routed == 8 * h + 4 * a * d + 4 * g * d + 4 * a + 9 * E + k * (2 * h + 6 * f_e)


def test_imbalance_multiplies_what_is_routed_and_nothing_else() -> None:
    values = MIXTRAL.values()
    even, uneven = (
        layer(MIXTRAL, Kernels(), "moe").bytes(small=False).at(values | ONE | {"rho": rho}) for rho in (1, 2)
    )
    assert uneven - even == 2 * (2 * 4096 + 6 * 14336)


def test_expert_parallelism_does_not_divide_and_expert_tensor_parallelism_gathers_inputs() -> None:
    listed = layer(MIXTRAL, MEGATRON, "moe")
    assert not any("ep" in x.rank_bytes.names for x in listed.values)
    gathered = [x.name for x in listed.stored if x.shard is Shard.GATHERED]
    assert gathered == ["dispatched tokens"]


def test_query_key_norm_keeps_what_it_normalises() -> None:
    plain = dataclasses.replace(PRESETS["qwen3-8b"], qk_norm=False)
    assert per_token(PRESETS["qwen3-8b"]) - per_token(plain) == 2 * a * d + 2 * g * d
    eager = Kernels(norm="eager")
    assert per_token(PRESETS["qwen3-8b"], eager) - per_token(plain, eager) == 6 * a * d + 6 * g * d


def test_relu_keeps_its_output_alone() -> None:
    gelu = PRESETS["gpt-22b"]
    relu = dataclasses.replace(gelu, activation="relu")
    assert per_token(gelu, PAPER) - per_token(relu, PAPER) == 2 * f


@pytest.mark.parametrize(
    ("changes", "kept", "extra"),
    [
        pytest.param({"loss": "eager"}, 4 * h + 4 * v, 8 * v, id="eager, fp32 logits"),
        pytest.param({"loss": "eager", "logits_returned": True}, 4 * h + 4 * v, 10 * v, id="logits held by the caller"),
        pytest.param({"loss": "eager", "logits_bytes": 2}, 4 * h + 2 * v, 4 * v, id="eager, 16-bit"),
        pytest.param({}, 4 * h + 4 * v, 2 * v, id="vocabulary parallel"),
        pytest.param({"loss": "chunked"}, 4 * h, Formula(), id="chunked"),
    ],
)
def test_the_head(changes: dict[str, Any], kept: Formula, extra: Formula) -> None:
    kernels = Kernels(**changes)
    assert last_end(LLAMA, kernels).bytes(small=False).substitute(**ONE) == kept
    assert loss_temporaries(LLAMA, kernels).substitute(**ONE) == extra
    assert bool(chunk_bytes(LLAMA, kernels)) == (kernels.loss == "chunked")


def test_forward_flops_of_a_layer_are_the_papers() -> None:
    counted = layer(PRESETS["gpt-22b"], PAPER).flops.substitute(**ONE, g=a, d=h / a, f=4 * h)
    assert counted == 24 * h * h + 4 * s * h


def test_names_are_unique_in_every_list() -> None:
    for model in PRESETS.values():
        for kind in set(model.layer_kinds):
            names = [x.name for x in layer(model, HUGGING_FACE, kind).values]
            assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "5 heads do not divide hidden size 64.*such as 4"),
        ({"kv_heads": 3}, "3 key-value heads do not divide 4 heads"),
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"experts": Experts(count=4, top_k=5, ffn=8)}, "visits 5 experts of 4"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"layers": 1, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 100, "sequence": 32}
    with pytest.raises(ConfigurationError, match=message):
        Architecture(name="x", **(good | changes))


def test_kernels_refuse_an_impossible_imbalance() -> None:
    with pytest.raises(ConfigurationError, match="below 1"):
        Kernels(imbalance=0.5)
    with pytest.raises(ConfigurationError, match="at least 1"):
        Kernels(chunk_tokens=0)
