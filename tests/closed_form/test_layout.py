"""Impossible layouts are refused with the way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdover.closed_form.errors import ConfigurationError
from holdover.closed_form.layout import Layout
from holdover.closed_form.presets import PRESETS
from holdover.errors import HoldoverError

LLAMA, GPT, MIXTRAL = PRESETS["llama3-8b"], PRESETS["gpt3-175b"], PRESETS["mixtral-8x7b"]


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ("llama3-8b", {"tp": 3}, "32 heads do not divide over tp 3: use a divisor: 1, 2, 4"),
        ("llama3-8b", {"tp": 16}, "tp 16 is above the 8 key-value heads: lower it to 8, or .*--replicate-kv"),
        ("llama3-8b", {"ep": 4}, "without experts: leave out --ep"),
        (
            "llama3-8b",
            {"pp": 5},
            r"32 layers do not divide over 5 pipeline chunks: .*--stage-layers 6,6,7,7,6",
        ),
        ("llama3-8b", {"pp": 64}, "32 layers are fewer than the 64 pipeline chunks: lower --pp"),
        ("llama3-8b", {"pp": 4, "stage_layers": (8, 8, 8)}, "must be 4 numbers that add up to 32, such as 8,8,8,8"),
        ("llama3-8b", {"virtual": 2, "pp": 4}, "virtual 2 needs --schedule interleaved"),
        ("llama3-8b", {"schedule": "interleaved", "pp": 4}, "at least two chunks a stage: --virtual 2"),
        ("llama3-8b", {"schedule": "zb-v"}, "schedule zb-v needs at least two stages"),
        (
            "llama3-8b",
            {"schedule": "interleaved", "pp": 4, "virtual": 2, "micro_batches": 6},
            "6 is not a multiple: use 8",
        ),
        ("llama3-8b", {"zero": 3}, "and there is one: raise --dp"),
        ("llama3-8b", {"tp": 0}, "tp is 0, but must be at least 1"),
        ("llama3-8b", {"cp": 3}, "does not divide over 3 context and sequence ranks: use --seq 8193"),
        ("llama3-8b", {"cp": 16, "context": "ulysses"}, r"tp 1 x cp 16 \(Ulysses\) is above the 8 key-value heads"),
        ("gpt3-175b", {"sequence": 4096}, "4096 is longer than the position table of 2048"),
        ("mixtral-8x7b", {"ep": 3, "dp": 3}, "8 experts do not divide over ep 3: use a divisor: 1, 2, 4, 8"),
        ("mixtral-8x7b", {"ep": 8}, "do not divide the 1 ranks of dp x cp x tp: raise --dp"),
        ("mixtral-8x7b", {"tp": 2}, "need their tokens sharded: add --sequence-parallel"),
        ("mixtral-8x7b", {"etp": 3, "dp": 3}, "expert width 14336 does not divide over etp 3"),
    ],
)
def test_refusals(model: str, layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        Layout(**layout).check(PRESETS[model])
    assert isinstance(caught.value, HoldoverError)
    assert isinstance(caught.value, ValueError)


def test_a_vocabulary_that_does_not_divide_names_the_padded_one() -> None:
    odd = dataclasses.replace(GPT, vocab=50257)
    with pytest.raises(ConfigurationError, match="pad it to --vocab 51200"):
        Layout(tp=8).check(odd)


def test_all_problems_are_told_at_once() -> None:
    assert len(Layout(tp=3, pp=5).problems(LLAMA)) >= 4


def test_key_value_heads_are_copied_when_allowed() -> None:
    layout = Layout(tp=16, replicate_kv=True)
    layout.check(LLAMA)
    assert layout.kv_copies(LLAMA) == 2
    assert Layout(tp=2, cp=8, context="ulysses", replicate_kv=True).kv_copies(LLAMA) == 2
    assert Layout(tp=8, cp=8).kv_copies(LLAMA) == 1


def test_sizes() -> None:
    layout = Layout(dp=2, tp=4, cp=2, pp=8, micro_batch=3, micro_batches=5)
    assert layout.gpus == 128
    assert layout.global_batch == 30
    assert layout.tokens(LLAMA) == 3 * 8192 // 2
