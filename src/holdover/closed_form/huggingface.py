"""An architecture from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdover.closed_form.architecture import Architecture, Experts, Latent
from holdover.closed_form.errors import ConfigurationError

_LLAMA_LIKE = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3",
}  # fmt: skip
_GPT_LIKE = {"gpt2", "gpt_bigcode"}
_QK_NORM = {"qwen3", "qwen3_moe"}
_QKV_BIAS = {"qwen2", "qwen2_moe"}
_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu"}


def from_config(config: Mapping[str, Any] | str | Path, *, sequence: int | None = None) -> Architecture:
    """Read a Hugging Face configuration.

    Args:
        config: the configuration, or the path of its `config.json` (or of the folder that holds it).
        sequence: tokens of a training sequence; None takes the smaller of 4096 and the model's limit.

    Returns:
        The architecture.

    Raises:
        ConfigurationError: the file cannot be read, its model type is unknown, or its numbers contradict each other.

    >>> llama = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    ...          "num_key_value_heads": 2, "intermediate_size": 176, "vocab_size": 1000}
    >>> from_config(llama).head_dim
    16
    """
    name = "config"
    if not isinstance(config, Mapping):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
        config = _read(path)
    kind = str(config.get("model_type", ""))
    name = str(config.get("_name_or_path") or name)
    if kind in _GPT_LIKE:
        return _gpt(config, name, sequence)
    if kind in _LLAMA_LIKE:
        return _llama(config, kind, name, sequence)
    if not kind:
        raise ConfigurationError(f'{name}: it has no "model_type", so it is no config.json of a Hugging Face model')
    raise ConfigurationError(
        f"{name}: model type {kind!r} is unknown to the closed form. It knows "
        f"{', '.join(sorted(_LLAMA_LIKE | _GPT_LIKE))}. Describe the model with flags (--layers, --hidden, --heads, "
        f"--ffn, --vocab), or use `holdover estimate`, which reads any model"
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigurationError(f"no such file: {path}. Give a preset's name or the path of a config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"{path} is not a readable config.json: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} holds a {type(config).__name__}, not a configuration with named fields")
    return config


def _field(config: Mapping[str, Any], name: str, field: str) -> int:
    if not isinstance(config.get(field), int):
        raise ConfigurationError(f"{name}: the configuration's {field} is {config.get(field)!r}; it must be a number")
    return int(config[field])


def _gpt(config: Mapping[str, Any], name: str, sequence: int | None) -> Architecture:
    hidden = _field(config, name, "n_embd")
    limit = _field(config, name, "n_positions")
    _check_sequence(name, sequence, limit)
    return Architecture(
        name=name,
        layers=_field(config, name, "n_layer"),
        hidden=hidden,
        heads=_field(config, name, "n_head"),
        kv_heads=1 if config.get("multi_query") else 0,
        ffn=int(config.get("n_inner") or 4 * hidden),
        vocab=_field(config, name, "vocab_size"),
        sequence=sequence or limit,
        norm="layernorm",
        activation="relu" if config.get("activation_function") == "relu" else "gelu",
        rotary=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        linear_bias=True,
        qkv_bias=True,
        hidden_dropout=float(config.get("resid_pdrop", 0.1)) > 0,
        attention_dropout=float(config.get("attn_pdrop", 0.1)) > 0,
    )


def _llama(config: Mapping[str, Any], kind: str, name: str, sequence: int | None) -> Architecture:
    activation = str(config.get("hidden_act", "silu"))
    if activation not in _ACTIVATIONS:
        raise ConfigurationError(
            f"{name}: activation {activation!r} is unknown to the closed form, which knows {', '.join(_ACTIVATIONS)}"
        )
    limit = int(config.get("max_position_embeddings", 4096))
    return Architecture(
        name=name,
        layers=_field(config, name, "num_hidden_layers"),
        hidden=_field(config, name, "hidden_size"),
        heads=_field(config, name, "num_attention_heads"),
        kv_heads=int(config.get("num_key_value_heads") or 0),
        head_dim=int(config.get("head_dim") or 0) if "kv_lora_rank" not in config else 0,
        ffn=_field(config, name, "intermediate_size"),
        vocab=_field(config, name, "vocab_size"),
        sequence=sequence or min(4096, limit),
        activation=_ACTIVATIONS[activation],  # type: ignore[arg-type]
        tied=bool(config.get("tie_word_embeddings", False)),
        linear_bias=bool(config.get("mlp_bias", False)),
        qkv_bias=kind in _QKV_BIAS or bool(config.get("attention_bias", False)),
        qk_norm=kind in _QK_NORM,
        attention_dropout=float(config.get("attention_dropout") or 0) > 0,
        latent=_latent(config, name),
        experts=_experts(config, name),
    )


def _latent(config: Mapping[str, Any], name: str) -> Latent | None:
    if "kv_lora_rank" not in config:
        return None
    return Latent(
        query_rank=int(config.get("q_lora_rank") or 0),
        kv_rank=_field(config, name, "kv_lora_rank"),
        nope_dim=_field(config, name, "qk_nope_head_dim"),
        rope_dim=_field(config, name, "qk_rope_head_dim"),
        value_dim=_field(config, name, "v_head_dim"),
    )


def _experts(config: Mapping[str, Any], name: str) -> Experts | None:
    count = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if not count:
        return None
    ffn = int(config.get("moe_intermediate_size") or _field(config, name, "intermediate_size"))
    shared = config.get("shared_expert_intermediate_size") or ffn * int(config.get("n_shared_experts") or 0)
    return Experts(
        count=int(count),
        top_k=_field(config, name, "num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=int(shared),
        first_dense=int(config.get("first_k_dense_replace") or 0),
        every=int(config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1),
    )


def _check_sequence(name: str, sequence: int | None, limit: int) -> None:
    if sequence and sequence > limit:
        raise ConfigurationError(
            f"{name}: a sequence of {sequence} tokens is longer than its position table of {limit}: lower --seq"
        )
