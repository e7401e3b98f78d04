"""Models known by name.

The four of the paper come from its table 3 (vocabulary 51200, sequence 2048, learned positions, tied head). The others
are their published `config.json`, at the sequence length they were trained with.
"""

from __future__ import annotations

from typing import Any

from holdover.closed_form.architecture import Architecture, Experts, Latent


def _paper(name: str, heads: int, hidden: int, layers: int) -> Architecture:
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=4 * hidden,
        vocab=51200,
        sequence=2048,
        norm="layernorm",
        activation="gelu",
        rotary=False,
        tied=True,
        linear_bias=True,
        qkv_bias=True,
        hidden_dropout=True,
        attention_dropout=True,
    )


def _llama(name: str, shape: tuple[int, int, int, int, int, int], sequence: int, **more: Any) -> Architecture:
    layers, hidden, heads, kv_heads, ffn, vocab = shape
    return Architecture(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        sequence=sequence,
        **more,
    )


_MODELS = (
    _paper("gpt-22b", 64, 6144, 48),
    _paper("gpt3-175b", 96, 12288, 96),
    _paper("mt-nlg-530b", 128, 20480, 105),
    _paper("gpt-1t", 160, 25600, 128),
    _llama("llama2-7b", (32, 4096, 32, 32, 11008, 32000), 4096),
    _llama("llama2-13b", (40, 5120, 40, 40, 13824, 32000), 4096),
    _llama("llama2-70b", (80, 8192, 64, 8, 28672, 32000), 4096),
    _llama("llama3-8b", (32, 4096, 32, 8, 14336, 128256), 8192),
    _llama("llama3-70b", (80, 8192, 64, 8, 28672, 128256), 8192),
    _llama("llama3-405b", (126, 16384, 128, 8, 53248, 128256), 8192),
    _llama("mixtral-8x7b", (32, 4096, 32, 8, 14336, 32000), 4096, experts=Experts(count=8, top_k=2, ffn=14336)),
    _llama("mixtral-8x22b", (56, 6144, 48, 8, 16384, 32000), 4096, experts=Experts(count=8, top_k=2, ffn=16384)),
    _llama(
        "deepseek-v3",
        (61, 7168, 128, 128, 18432, 129280),
        4096,
        latent=Latent(query_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        experts=Experts(count=256, top_k=8, ffn=2048, shared_ffn=2048, first_dense=3),
    ),
    _llama("qwen2.5-7b", (28, 3584, 28, 4, 18944, 152064), 4096, qkv_bias=True),
    _llama("qwen2.5-72b", (80, 8192, 64, 8, 29568, 152064), 4096, qkv_bias=True),
    _llama("qwen3-8b", (36, 4096, 32, 8, 12288, 151936), 4096, head_dim=128, qk_norm=True),
    _llama("qwen3-32b", (64, 5120, 64, 8, 25600, 151936), 4096, head_dim=128, qk_norm=True),
    _llama(
        "qwen3-30b-a3b",
        (48, 2048, 32, 4, 6144, 151936),
        4096,
        head_dim=128,
        qk_norm=True,
        experts=Experts(count=128, top_k=8, ffn=768),
    ),
    _llama(
        "qwen3-235b-a22b",
        (94, 4096, 64, 4, 12288, 151936),
        4096,
        head_dim=128,
        qk_norm=True,
        experts=Experts(count=128, top_k=8, ffn=1536),
    ),
)

PRESETS: dict[str, Architecture] = {model.name: model for model in _MODELS}
"""Architectures by name."""

PAPER_LAYOUTS: dict[str, dict[str, int]] = {
    "gpt-22b": {"tp": 8, "pp": 1, "virtual": 1, "micro_batch": 4, "micro_batches": 1},
    "gpt3-175b": {"tp": 8, "pp": 8, "virtual": 3, "micro_batch": 1, "micro_batches": 64},
    "mt-nlg-530b": {"tp": 8, "pp": 35, "virtual": 3, "micro_batch": 1, "micro_batches": 280},
    "gpt-1t": {"tp": 8, "pp": 64, "virtual": 1, "micro_batch": 1, "micro_batches": 512},
}
"""The layouts of the paper's table 3."""
