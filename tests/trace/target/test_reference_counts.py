"""transformers' Llama in bfloat16, against saved bytes that were counted elsewhere (in units of sequence x hidden)."""

from __future__ import annotations

import benchmarks.zoo  # noqa: F401  (lets transformers import beside a torchvision without compiled ops)
import pytest
import torch
from tests.trace.target.cases import H100
from transformers import LlamaConfig, LlamaForCausalLM

from holdover.trace.graph import Category, Trace
from holdover.trace.record import record

SEQ, HIDDEN = 4096, 4096
SBH = SEQ * HIDDEN


def llama(layers: int, kv_heads: int, feed_forward: int, vocabulary: int) -> Trace:
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=feed_forward, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config).to(torch.bfloat16), torch.zeros(1, SEQ, dtype=torch.long)
    return record(model, (), {"input_ids": ids, "labels": ids}, target=H100)


def saved(trace: Trace) -> dict[int, int]:
    storages = {trace.values[slot.value].storage for slot in trace.slots}
    return {n: trace.storages[n].nbytes for n in storages if trace.storages[n].category is Category.ACTIVATION}


@pytest.mark.parametrize(
    ("kv_heads", "feed_forward", "vocabulary", "published_sbh", "published_mib"),
    [(32, 11008, 32000, 45.53, 728.5), (8, 14336, 128256, 49.03, 784.5)],
    ids=["Llama-2-7B", "Llama-3-8B"],
)
def test_a_layer(kv_heads: int, feed_forward: int, vocabulary: int, published_sbh: float, published_mib: float) -> None:
    one, two = (sum(saved(llama(n, kv_heads, feed_forward, vocabulary)).values()) for n in (1, 2))
    assert round((two - one) / SBH, 2) == published_sbh
    assert round((two - one) / 2**20, 1) == published_mib


def test_head_and_loss() -> None:
    trace = llama(1, 8, 14336, 128256)
    of_head = [
        trace.storages[n].nbytes
        for n in saved(trace)
        if trace.ops[next(v.maker for v in trace.values if v.storage == n)].name.startswith("aten._log_softmax.")
    ]
    normed = 2 * SBH  # the last norm's output, which the head's weight gradient needs
    assert round((sum(of_head) + normed) / 2**30, 2) == 1.99
