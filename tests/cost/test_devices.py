"""The table of cards: complete, found by name, honest about what is from memory."""

from __future__ import annotations

import dataclasses

import pytest

from holdover.cost.devices import CARDS, card
from holdover.errors import DeviceError


def test_names_are_lower_case_and_say_the_memory() -> None:
    for name, found in CARDS.items():
        assert name == found.name == name.lower()
        nominal = int(name.split("-")[1].removesuffix("gb"))
        # Less than the round number of the name, unless that counts 10^9 and is rounded down itself (B200).
        assert 0.85 * nominal * 2**30 <= found.usable_bytes <= nominal * 2**30


def test_rates_fall_with_precision() -> None:
    for found in CARDS.values():
        order = [found.rates[dtype] for dtype in ("bf16", "tf32", "fp32") if dtype in found.rates]
        assert order == sorted(order, reverse=True)
        assert all(value > 1e12 for value in order)
        assert found.bandwidth > 1e11
        assert found.peer_link >= 1e10


def test_what_is_from_memory_is_marked() -> None:
    fields = {field.name for field in dataclasses.fields(CARDS["t4-16gb"])} | {"bf16", "fp16", "tf32", "fp32"}
    for found in CARDS.values():
        assert found.unconfirmed <= fields
        assert "peer_link" in found.unconfirmed
    assert "bandwidth" in card("t4").unconfirmed
    assert "bandwidth" not in card("h100-80gb").unconfirmed


@pytest.mark.parametrize(("asked", "name"), [("T4", "t4-16gb"), ("H200", "h200-141gb"), ("a100-80gb", "a100-80gb")])
def test_short_names_of_one_kind(asked: str, name: str) -> None:
    assert card(asked).name == name


def test_several_kinds_are_named() -> None:
    with pytest.raises(DeviceError, match="comes in several kinds: h100-80gb, h100-80gb-pcie"):
        card("h100")
    with pytest.raises(DeviceError, match="unknown card 'tpu'; the table has t4-16gb"):
        card("tpu")


def test_a_rate_that_is_not_there() -> None:
    assert card("v100-16gb").rate("fp16") == 125e12
    with pytest.raises(DeviceError, match="V100 16 GB has no bf16 matrix rate; it has fp16, fp32"):
        card("v100-16gb").rate("bf16")
