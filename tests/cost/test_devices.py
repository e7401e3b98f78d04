"""The table of cards: complete, found by name, honest about what is from memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from holdover.cost import devices
from holdover.cost.devices import CARDS, SOURCES, add_cards, all_cards, card
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


def test_every_figure_has_a_source_or_is_unconfirmed() -> None:
    for found in CARDS.values():
        figures = ["usable_bytes", "bandwidth", *found.rates, "host_link", "peer_link", "context_bytes", "cublas_bytes"]
        sources = {figure: found.source_of(figure) for figure in figures}
        assert all(source in (*SOURCES.values(), "unconfirmed") for source in sources.values())
        assert sources["peer_link"] == "unconfirmed"


def test_cublas_takes_its_workspace_by_capability() -> None:
    # 2 x 4 MiB and 8 x 16 KiB before Hopper, as the 8,519,680 bytes that users see; 32 MiB since.
    assert card("t4").cublas_bytes == card("a100-80gb").cublas_bytes == card("l40s").cublas_bytes == 8_519_680
    assert card("h100-80gb").cublas_bytes == card("b200").cublas_bytes == card("rtx5090").cublas_bytes == 32 * 2**20
    assert (card("mi250x").cublas_bytes, card("mi300x").cublas_bytes) == (32 * 2**20, 128 * 2**20)


def test_contexts_are_ranges_and_confirmed_only_where_measured() -> None:
    for found in CARDS.values():
        low, high = found.context_bytes
        assert 100 * 2**20 <= low < high <= 1.5 * 2**30
    confirmed = {name for name, found in CARDS.items() if "context_bytes" not in found.unconfirmed}
    assert {name.split("-")[0] for name in confirmed} == {"t4", "v100", "rtx3090", "a100", "h200"}


# -- cards of a user's own --------------------------------------------------------------------------------------------

OWN: dict[str, Any] = {
    "name": "Lab 48GB", "capability": [8, 6], "usable_bytes": "47.49GiB", "bandwidth": 768e9,
    "rates": {"bf16": 155e12, "fp32": 38.7e12}, "context_bytes": ["200MiB", "1GiB"], "unconfirmed": ["bf16"],
}  # fmt: skip


@pytest.fixture
def no_cards_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_added", {})


@pytest.mark.usefixtures("no_cards_added")
def test_a_file_adds_a_card_for_this_process(tmp_path: Path) -> None:
    path = tmp_path / "cards.json"
    path.write_text(json.dumps(OWN))
    (added,) = add_cards(path)
    assert card("lab 48gb") is added is all_cards()["lab48gb"]
    assert added.context_bytes == (200 * 2**20, 2**30)
    assert (added.source_of("bf16"), added.source_of("fp32")) == ("unconfirmed", str(path))
    path2 = tmp_path / "again.json"
    path2.write_text(json.dumps([added.to_dict(), {**OWN, "name": "t4-16gb", "capability": None}]))
    add_cards(path2)
    assert card("lab48gb").usable_bytes == added.usable_bytes
    assert card("t4").capability is None  # a name of the table is replaced


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "are not JSON"),
        ('{"name": "x"}', "must be an object with name, capability, usable_bytes, bandwidth, rates"),
        ("[3]", "must be an object"),
        (json.dumps({**OWN, "speed": 1}), "card 'Lab 48GB' has unknown fields speed"),
        (json.dumps({**OWN, "bandwidth": "fast"}), "card 'Lab 48GB' cannot be read: 'fast' is not a number above 0"),
        (json.dumps({**OWN, "rates": {"int8": 1e12}}), "'int8' is no dtype of a rate: bf16, fp16, tf32, fp32"),
        (json.dumps({**OWN, "usable_bytes": "48gb"}), "can be read in two ways"),
        (json.dumps({**OWN, "capability": 9}), "card 'Lab 48GB' cannot be read"),
    ],
    ids=["no-json", "too-little", "no-object", "unknown-field", "no-number", "no-dtype", "unit", "capability"],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cards.json"
    path.write_text(text)
    with pytest.raises(DeviceError) as error:
        add_cards(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)
