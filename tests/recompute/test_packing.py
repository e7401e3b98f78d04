"""Packed values come back bit for bit, in the sizes promised, and stay as they are where that saves nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.recompute.helpers import assert_same, script, step
from torch import nn

from holdover.recompute.apply import install
from holdover.recompute.inspect import inspect
from holdover.recompute.packing import pack


def unpacked(t: torch.Tensor) -> torch.Tensor:
    packed = pack(t)
    assert packed is not None
    return packed[0](*packed[1])


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_booleans_take_an_eighth(flags: list[bool]) -> None:
    mask = torch.tensor(flags)
    packed = pack(mask)
    assert packed is not None
    assert packed[1][0].nbytes == (len(flags) + 7) // 8
    assert torch.equal(packed[0](*packed[1]), mask)


@given(
    st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1), st.sampled_from([torch.int64, torch.int32])
)  # fmt: skip
def test_integers_take_the_smallest_type_that_holds_them(low: int, high: int, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    numbers = torch.tensor([min(max(n, info.min), info.max) for n in (low, high, 0)], dtype=dtype)
    packed = pack(numbers)
    low, high = int(numbers.min()), int(numbers.max())
    fits = [t for t in (torch.uint8, torch.int8, torch.int16, torch.int32)
            if torch.iinfo(t).min <= low and high <= torch.iinfo(t).max and t.itemsize < dtype.itemsize]  # fmt: skip
    if packed is None:
        assert not fits
    else:
        assert packed[1][0].dtype is fits[0]
        assert torch.equal(packed[0](*packed[1]), numbers)


def test_layout_is_kept() -> None:
    for t in (
        torch.rand(5, 3).t() > 0.5,
        (torch.rand(2, 3, 5, 7) > 0.5).contiguous(memory_format=torch.channels_last),
        torch.arange(30).view(5, 6).t(),
        torch.tensor(True),
    ):
        again = unpacked(t)
        assert torch.equal(again, t)
        assert again.stride() == t.stride()
        assert again.dtype is t.dtype


@pytest.mark.parametrize(
    "t",
    [
        torch.rand(4),
        torch.zeros(0, dtype=torch.bool),
        (torch.rand(8) > 0.5)[::2],
        torch.ones(4, dtype=torch.uint8),
        torch.tensor([2**40]),
        torch.ones(3, dtype=torch.bool, device="meta"),
    ],
)
def test_what_does_not_get_smaller_is_left_alone(t: torch.Tensor) -> None:
    assert pack(t) is None


class Masked(nn.Module):
    """A mask saved twice, indices of two kinds, and a mask that is written to later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        mask = y > 0
        y = y.masked_fill(mask, 0.5) * y.masked_fill(mask, 2.0)
        pooled, where = F.max_pool1d(y[None], 2, return_indices=True)
        top, order = y.topk(3, -1)
        mask2 = y < 0.3
        z = y.masked_fill(mask2, 0.0)
        mask3 = mask2.clone()
        mask3.logical_not_()
        gathered = y.gather(-1, order) + top * y.masked_fill(mask3, 1.0).sum()
        return pooled.sum() + gathered.sum() + z.sum() + where.sum()


def only_packing(key: str, i: int, name: str) -> str:
    return "pack"


def test_in_a_model() -> None:
    torch.manual_seed(1)
    plain, x = Masked(), torch.randn(6, 8)
    model = Masked()
    model.load_state_dict(plain.state_dict())
    install(model, script(model, (x,), None, only_packing))
    assert_same(step(plain, (x,)), step(model, (x,)))
    done = inspect(model)
    assert done.replayed_ops == 0
    assert done.packed_from_bytes > 4 * done.packed_bytes
    assert "packed" in str(done)


def test_recipes_read_packed_values() -> None:
    torch.manual_seed(1)
    plain, x = Masked(), torch.randn(6, 8)
    model = Masked()
    model.load_state_dict(plain.state_dict())
    packs = ("gt", "lt", "topk", "clone", "logical_not_")
    install(model, script(model, (x,), None, lambda k, i, n: "pack" if n.split(".")[1] in packs else "recompute"))
    for _ in range(2):
        assert_same(step(plain, (x,)), step(model, (x,)))
    assert inspect(model).replayed_ops > 0
