"""Values kept in fewer bytes, without loss: booleans as bits, integers as the smallest type that holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdover.recompute._torch import FakeTensor
from holdover.recompute.geometry import Geometry, covers_storage, geometry, rebuild

NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)
INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})

Packed = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]
"""A function and its arguments that give the tensor back."""


def pack(tensor: torch.Tensor) -> Packed | None:
    """The storage of `tensor` in fewer bytes; None where it would not get smaller.

    >>> mask = torch.tensor([True, False, True])
    >>> function, arguments = pack(mask)
    >>> arguments[0].nbytes, function(*arguments)
    (1, tensor([ True, False,  True]))
    """
    if not covers_storage(tensor) or tensor.numel() == 0 or tensor.is_meta:
        return None
    if tensor.dtype is torch.bool:
        return from_bits, (to_bits(_whole(tensor, torch.uint8)), geometry(tensor))
    if tensor.dtype in INTEGERS and type(tensor) is not FakeTensor:
        low, high = (int(x) for x in torch.aminmax(tensor))
        for dtype in NARROW:
            info = torch.iinfo(dtype)
            if info.min <= low and high <= info.max:
                if dtype.itemsize >= tensor.dtype.itemsize:
                    return None
                return from_narrow, (_whole(tensor, tensor.dtype).to(dtype), geometry(tensor))
    return None


def _whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole storage as a vector."""
    storage = tensor.untyped_storage()
    return rebuild(tensor, (dtype, (storage.nbytes() // dtype.itemsize,), (1,), 0, 0))


def to_bits(flags: torch.Tensor) -> torch.Tensor:
    """A vector of bytes, zero or not, as bits: bit k of byte i is entry 8 i + k."""
    bits = torch.zeros((flags.numel() + 7) // 8, dtype=torch.uint8, device=flags.device)
    for k in range(8):
        column = flags[k::8]
        bits[: column.numel()] |= (column != 0).to(torch.uint8) << k
    return bits


def from_bits(bits: torch.Tensor, where: Geometry) -> torch.Tensor:
    """The inverse of `to_bits`, as a boolean tensor of the given geometry."""
    size = where[1].numel()
    flags = torch.empty(size, dtype=torch.uint8, device=bits.device)
    for k in range(8):
        column = flags[k::8]
        column.copy_((bits[: column.numel()] >> k) & 1)
    return rebuild(flags, where)


def from_narrow(narrow: torch.Tensor, where: Geometry) -> torch.Tensor:
    """Integers in their own type again."""
    return rebuild(narrow.to(where[0]), where)
