"""Names near an unknown one."""

from __future__ import annotations

import pytest

import holdover
from holdover.cli.model_spec import load
from holdover.closed_form.presets import PRESETS
from holdover.closed_form.settings import Settings
from holdover.cost.devices import CARDS, card
from holdover.names import near, nearest


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("llama-3-70B", "llama3-70b"),  # but for case and punctuation
        ("llama3", "llama3-8b"),  # the beginning of it
        ("mixtrall-8x7", "mixtral-8x7b"),
        ("gpt3", "gpt3-175b"),
    ],
)
def test_the_likest_preset_comes_first(name: str, first: str) -> None:
    assert nearest(name, PRESETS)[0] == first


def test_nothing_is_offered_where_nothing_is_alike() -> None:
    assert near("abacus", CARDS) == ""
    assert nearest("", CARDS) == []


def test_unknown_presets_and_cards_are_answered_with_the_list_and_the_nearest() -> None:
    with pytest.raises(holdover.HoldoverError) as caught:
        Settings(model="llama-3-70B").run()
    said = str(caught.value)
    assert said.startswith("unknown model 'llama-3-70B': give the path of a config.json, or one of gpt-22b, gpt3-175b")
    assert "; near it: llama3-70b, " in said
    with pytest.raises(holdover.DeviceError) as refused:
        card("4090")
    assert str(refused.value).startswith("unknown card '4090'; the table has t4-16gb, v100-16gb")
    assert str(refused.value).endswith("; near it: rtx4090-24gb")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("transformer:GPT2Model", "'transformer:GPT2Model' is of no library that is known, transformers, timm, "
         "torchvision; near it: transformers"),
        ("tim:resnet18", "; near it: timm"),
        ("nowhere:make", "there is no file nowhere"),
    ],
)  # fmt: skip
def test_a_library_spelt_wrong_is_not_taken_for_a_file(spec: str, said: str) -> None:
    with pytest.raises(holdover.ModelSpecError) as caught:
        load(spec, meta=True)
    assert said in str(caught.value)
