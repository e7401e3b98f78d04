"""Estimates for a card that is not here, against bytes counted by hand."""

from __future__ import annotations

import json

import pytest
import torch
from tests.memory.test_replay import chain
from torch import nn

import holdover
from holdover.cost.devices import Card, card
from holdover.errors import DeviceError, UnitError
from holdover.memory.allocator_config import MIB
from holdover.memory.card_workspace import card_workspace_bytes
from holdover.memory.on_card import card_memory, place_of
from holdover.memory.replay import replay
from holdover.trace.graph import Signature, TensorSpec


def small_card(usable_mib: int, context_mib: tuple[int, int] = (10, 20)) -> Card:
    low, high = context_mib
    return Card(
        name="toy", title="Toy", capability=(8, 0), usable_bytes=usable_mib * MIB, bandwidth=1e12, rates={"fp32": 1e13},
        host_link=1e10, peer_link=1e10, context_bytes=(low * MIB, high * MIB),
    )  # fmt: skip


# -- names ------------------------------------------------------------------------------------------------------------


def test_places() -> None:
    assert place_of(None).device is None
    assert place_of("cpu").device == torch.device("cpu")
    place = place_of("H200")
    assert place.card is card("h200-141gb")
    assert place.target is not None
    assert place.target.capability == (9, 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h1000", "unknown card 'h1000'; the table has t4-16gb, v100-16gb"),
        ("h100", "'h100' comes in several kinds: h100-80gb, h100-80gb-pcie; besides, 'cpu'"),
        ("cuda", "device='cuda' says no card's size"),
        ("cuda:1", "name a card, which need not be here: t4-16gb"),
        ("mps", "device='mps' is none that steps can be recorded for: known are 'cpu', the CUDA"),
        ("xpu:0", "`holdover devices` lists them: t4-16gb"),
        ("mi300x", "MI300X is AMD's: what PyTorch does on it is not known here"),
    ],
)
def test_names_that_are_refused(name: str, said: str) -> None:
    with pytest.raises(DeviceError) as error:
        holdover.estimate(nn.Linear(2, 2), (torch.ones(1, 2),), device=name)
    assert said in str(error.value)


# -- what a card shows ------------------------------------------------------------------------------------------------


def test_reserved_and_the_process() -> None:
    found = card_memory(chain().trace, small_card(200))  # 98 MiB allocated and reserved: see test_replay
    assert (found.allocated_bytes, found.reserved_bytes) == (98 * MIB, 98 * MIB)
    assert found.process_bytes == (108 * MIB, 118 * MIB)
    assert (found.fits, found.retries) == (True, 0)
    assert found.remarks() == [
        "The context of CUDA is taken as 10.00 MiB to 20.00 MiB; it depends on versions and on the kernels used."
    ]


def test_a_step_that_does_not_fit() -> None:
    found = card_memory(chain().trace, small_card(117))  # the largest context leaves 97
    assert (found.fits, found.retries) == (False, None)
    assert found.remarks()[-1] == "The step does not fit toy, which has 117.00 MiB."
    assert card_memory(chain().trace, small_card(118)).fits


def test_a_step_that_fits_by_giving_cached_memory_back() -> None:
    step = chain()
    step.op(makes=60 * MIB)  # when all activations are gone: 68 MiB are cached, none of them in a piece of 60
    assert replay(step.trace).reserved_bytes == 158 * MIB
    found = card_memory(step.trace, small_card(140))
    assert (found.fits, found.retries) == (True, 1)
    assert "given back 1 times" in found.remarks()[-1]


def test_the_allocators_settings_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found = card_memory(chain().trace, small_card(200))
    assert (found.reserved_bytes, found.settings) == (100 * MIB, "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:7")  # the newer name goes first
    with pytest.raises(UnitError, match="max_split_size_mb is 7, too small"):
        card_memory(chain().trace, small_card(200))


def test_an_estimate_for_a_card() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU())
    found = holdover.estimate(model, (torch.zeros(3072, 1024, device="meta"),), device="a100-80gb")
    on_card = found.on_card
    assert on_card is not None
    assert (found.device, on_card.card) == ("a100-80gb", "a100-80gb")
    # At the peak in backward: weight 4 MiB, input 12, what ReLU gave 12, the gradient of the product 12 and of the
    # weight 4, and two scalars of the loss. cuBLAS took 8.125 MiB in forward and again in backward.
    assert found.peak_bytes == 44 * MIB + 2 * 4
    assert on_card.cublas_bytes == 2 * 8_519_680
    assert on_card.allocated_bytes == 44 * MIB + 2 * 512 + 2 * 8_519_680
    # Segments: 20 (weight, input, later the weight's gradient), 20 (both of cuBLAS), 12 (the product, then its
    # gradient), 12 (what ReLU gave), 2 (scalars).
    assert on_card.reserved_bytes == (20 + 20 + 12 + 12 + 2) * MIB
    assert found.reserved_bytes == on_card.reserved_bytes
    low, high = card("a100-80gb").context_bytes
    assert found.process_bytes == (on_card.reserved_bytes + low, on_card.reserved_bytes + high)
    plain = json.loads(found.to_json())["on_card"]
    assert plain["reserved_bytes"] == on_card.reserved_bytes
    assert [p["phase"] for p in plain["phases"]] == ["forward", "loss", "backward"]
    assert plain["fits"] is True


def test_an_estimate_for_the_cpu_has_no_card() -> None:
    found = holdover.estimate(nn.Linear(8, 8), (torch.ones(4, 8),), device="cpu")
    assert (found.on_card, found.reserved_bytes, found.process_bytes) == (None, None, None)
    assert found.to_dict()["on_card"] is None


def test_the_view_tells_what_the_card_shows() -> None:
    with torch.device("meta"):
        model = nn.Linear(4096, 4096, bias=False)
    found = holdover.estimate(model, (torch.zeros(64, 4096, device="meta"),), device="h100-80gb")
    lines = [" ".join(line.split()) for line in str(found).splitlines()]
    assert any(line.startswith("allocated on h100-80gb ") and "cuBLAS's workspace 64.00 MiB" in line for line in lines)
    assert any(line.startswith("reserved ") for line in lines)
    assert any(line.startswith("process ") and "in nvidia-smi" in line for line in lines)
    assert "the card has 79.10 GiB enough" in lines
    assert any(line.startswith("uncertain: The context of CUDA is taken as 256.00 MiB to 1.42 GiB") for line in lines)


# -- workspace of kernels ---------------------------------------------------------------------------------------------


def heads(batch: int, number: int, length: int, width: int) -> TensorSpec:
    stride = (number * length * width, length * width, width, 1)
    return TensorSpec((batch, number, length, width), stride, "bfloat16", "cuda")


def flash_backward(query: TensorSpec, key: TensorSpec) -> dict[int, int]:
    name = "aten._scaled_dot_product_flash_attention_backward.default"
    other = Signature("aten.mm.default", (), ())
    return card_workspace_bytes([other, Signature(name, (query, query, key, key), ())])


def test_flash_attention_sums_the_querys_gradient_in_float32() -> None:
    # 250 positions are taken as 256, width 80 as 96; and one product of output and gradient per position.
    assert flash_backward(heads(2, 8, 250, 80), heads(2, 8, 250, 80)) == {1: 4 * 2 * 8 * 256 * (96 + 1)}
    assert flash_backward(heads(1, 1, 128, 160), heads(1, 1, 128, 160)) == {1: 4 * 128 * (192 + 1)}


def test_flash_attention_makes_the_gradients_of_shared_heads_for_each_query_head() -> None:
    shared = flash_backward(heads(2, 8, 256, 64), heads(2, 2, 300, 64))
    assert shared == {1: 4 * 2 * 8 * 256 * (64 + 1) + 2 * 2 * (2 * 300 * 8 * 64)}
