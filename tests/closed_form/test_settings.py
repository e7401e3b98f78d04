"""Flat settings: what they mean, how they are changed, how they fail."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdover.closed_form.architecture import HUGGING_FACE, MEGATRON, PAPER
from holdover.closed_form.errors import ConfigurationError
from holdover.closed_form.presets import PRESETS
from holdover.closed_form.settings import Settings
from holdover.errors import DeviceError, UnitError


def test_a_preset_is_itself_until_changed() -> None:
    assert Settings(model="llama3-8b").architecture() == PRESETS["llama3-8b"]
    longer = Settings(model="llama3-8b", seq=32768, layers=40).architecture()
    assert longer == dataclasses.replace(PRESETS["llama3-8b"], sequence=32768, layers=40)


def test_a_model_from_numbers() -> None:
    llama = Settings(layers=2, hidden=768, heads=12, vocab=1000).architecture()
    assert (llama.activation, llama.ffn, llama.head_dim, llama.rotary) == ("swiglu", 2048, 64, True)
    gpt = Settings(style="gpt", layers=2, hidden=768, heads=12, vocab=1000, seq=512).architecture()
    assert (gpt.activation, gpt.ffn, gpt.sequence, gpt.tied) == ("gelu", 3072, 512, True)
    moe = Settings(layers=2, hidden=768, heads=12, vocab=1000, experts=8, top_k=2, expert_ffn=256).architecture()
    assert moe.experts is not None
    assert (moe.experts.count, moe.experts.top_k, moe.experts.ffn) == (8, 2, 256)


def test_other_heads_are_not_as_wide_as_the_presets() -> None:
    model = Settings(model="llama3-8b", heads=64).architecture()
    assert (model.head_dim, model.kv_heads) == (64, 64)


def test_the_code_follows_the_model() -> None:
    assert Settings(model="gpt3-175b").kernels() == PAPER
    assert Settings(model="llama3-8b").kernels() == MEGATRON
    assert Settings(model="gpt3-175b", code="huggingface").kernels() == HUGGING_FACE
    assert Settings(model="gpt3-175b", attention="fused").kernels().attention == "fused"
    assert Settings(model="llama3-8b", logits="16-bit", loss="eager").kernels().logits_bytes == 2
    assert Settings(model="llama3-8b", code="huggingface", weights="fp32").kernels().element_bytes == 4


def test_chunks_mean_interleaving_and_stages_mean_micro_batches() -> None:
    layout = Settings(model="llama3-8b", pp=4, virtual=2).layout()
    assert (layout.schedule, layout.micro_batches) == ("interleaved", 16)
    assert Settings(model="llama3-8b", pp=2, stage_layers="15,17").layout().stage_layers == (15, 17)


def test_changes_of_every_type() -> None:
    base = Settings(model="llama3-8b", sequence_parallel=True)
    changed = base.changed("tp=4, recompute=selective,recompute-modules=layernorm+mlp,sequence_parallel=no,offload=0.5")
    assert changed == dataclasses.replace(
        base, tp=4, recompute="selective", modules="layernorm,mlp", sequence_parallel=False, offload=0.5
    )
    assert base.changed("tied").tied is True
    assert base.changed("") == base


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=3", "no setting 'rank' to compare; there are model, style, layers"),
        ("tp=four", "tp must be a number, not 'four'"),
        ("sequence-parallel=perhaps", "is a switch"),
        ("recompute=most", "--recompute 'most' is unknown: use one of none, selective, full, optimal"),
    ],
)
def test_impossible_changes(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Settings(model="llama3-8b").changed(text)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "llama9"}, ConfigurationError, "unknown model 'llama9': give the path of a config.json, or one of"),
        ({}, ConfigurationError, "needs --layers, --hidden, --heads, --vocab too"),
        ({"model": "llama3-8b", "card": "h1000"}, DeviceError, "unknown card 'h1000'"),
        ({"model": "llama3-8b", "memory": "80G"}, UnitError, "two ways"),
        ({"model": "llama3-8b", "zero": 4}, ConfigurationError, "--zero 4 is unknown: use 0, 1, 2 or 3"),
        ({"model": "llama3-8b", "stage_layers": "a"}, ConfigurationError, "cannot read stage layers 'a'"),
        ({"model": "llama3-8b", "store_all": "some"}, ConfigurationError, "--store-all 'some'"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Settings(**changes).run() if "memory" not in changes else Settings(**changes).memory_bytes()


@pytest.mark.parametrize("name", ["method", "optimizer", "fp8", "schedule", "context", "weights", "style", "code"])
def test_words_are_checked(name: str) -> None:
    with pytest.raises(ConfigurationError, match="is unknown: use one of"):
        Settings(model="llama3-8b", **{name: "nonsense"})  # type: ignore[arg-type]


def test_auto_keeps_as_many_micro_batches_as_fit() -> None:
    settings = Settings(model="gpt-22b", pp=8, tp=2, recompute="full", store_all="auto", card="a100-80gb")
    found = settings.run()
    assert found.fits
    assert 0 < found.recompute.store_all_micro_batches <= 8
