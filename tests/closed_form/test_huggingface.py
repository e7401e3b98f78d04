"""Hugging Face configurations become the architectures of their presets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from holdover.closed_form.architecture import Architecture
from holdover.closed_form.errors import ConfigurationError
from holdover.closed_form.huggingface import from_config
from holdover.closed_form.presets import PRESETS

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
QWEN = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}


def same(found: Architecture, name: str) -> None:
    expected = PRESETS[name]
    assert dataclasses.replace(found, name=name, sequence=expected.sequence) == expected


@pytest.mark.parametrize(
    ("config", "name"),
    [(LLAMA, "llama3-8b"), (DEEPSEEK, "deepseek-v3"), (QWEN, "qwen3-30b-a3b"), (MIXTRAL, "mixtral-8x7b")],
)
def test_configurations_are_their_presets(config: dict[str, Any], name: str) -> None:
    same(from_config(config), name)


@pytest.mark.parametrize(
    ("kind", "field"), [("llama", None), ("mistral", None), ("qwen2", "qkv_bias"), ("qwen3", "qk_norm")]
)
def test_a_file_or_its_folder_is_read(kind: str, field: str | None, tmp_path: Path) -> None:
    config = LLAMA | {"model_type": kind, "num_hidden_layers": 2, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = from_config(tmp_path, sequence=128)
    assert found == from_config(tmp_path / "config.json", sequence=128)
    assert (found.name, found.layers, found.sequence, found.tied) == (tmp_path.name, 2, 128, True)
    assert {name for name in ("qkv_bias", "qk_norm") if getattr(found, name)} == ({field} if field else set())


def test_gpt2() -> None:
    config = {"model_type": "gpt2", "n_layer": 3, "n_embd": 48, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    found = from_config(config | {"resid_pdrop": 0.1, "attn_pdrop": 0.0, "n_inner": None})
    assert (found.layers, found.hidden, found.ffn, found.sequence) == (3, 48, 192, 64)
    assert found.tied
    assert found.hidden_dropout
    assert not found.attention_dropout
    assert not found.rotary
    with pytest.raises(ConfigurationError, match="longer than its position table of 64: lower --seq"):
        from_config(config, sequence=128)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "model type 'mamba' is unknown.*holdover estimate"),
        ({}, 'it has no "model_type"'),
        (LLAMA | {"hidden_size": None}, "hidden_size is None; it must be a number"),
        (LLAMA | {"hidden_act": "tanh"}, "activation 'tanh' is unknown"),
    ],
)
def test_unknown_configurations_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        from_config(config)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    with pytest.raises(ConfigurationError, match="no such file"):
        from_config(broken)
    broken.write_text("{")
    with pytest.raises(ConfigurationError, match="not a readable config"):
        from_config(broken)
    broken.write_text(json.dumps([1]))
    with pytest.raises(ConfigurationError, match="holds a list"):
        from_config(broken)
