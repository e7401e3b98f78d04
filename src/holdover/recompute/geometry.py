"""A tensor's place on its storage, as plain data, and back."""

from __future__ import annotations

from typing import Any

import torch

from holdover.recompute._torch import FakeTensor, is_non_overlapping_and_dense

Geometry = tuple[torch.dtype, Any, tuple[int, ...], Any, int]
"""(dtype, size, stride, storage offset, bits): bits is 1 for a conjugate view, 2 for a negative view, 3 for both."""

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


def geometry(tensor: torch.Tensor) -> Geometry:
    """Where on its storage the tensor lies.

    >>> geometry(torch.zeros(2, 3).t())
    (torch.float32, torch.Size([3, 2]), (1, 3), 0, 0)
    """
    dtype = tensor.dtype
    bits = (1 if dtype.is_complex and tensor.is_conj() else 0) | (2 if tensor.is_neg() else 0)
    return dtype, tensor.size(), tensor.stride(), tensor.storage_offset(), bits


def rebuild(base: torch.Tensor, where: Geometry) -> torch.Tensor:
    """The tensor that lies there on the storage of `base`, whatever `base` itself looks like (maybe `base` itself).

    >>> rebuild(torch.arange(4.0), geometry(torch.zeros(2, 2).t()))
    tensor([[0., 2.],
            [1., 3.]])
    """
    dtype, size, stride, offset, bits = where
    if dtype is base.dtype and not bits and not (dtype.is_complex and base.is_conj()) and not base.is_neg():
        if base.size() == size and base.stride() == stride and base.storage_offset() == offset:
            return base
        return torch.as_strided(base, size, stride, offset)
    tensor = torch._conj(base) if base.is_conj() else base  # views, which count writes together
    tensor = torch._neg_view(tensor) if tensor.is_neg() else tensor
    if tensor.dtype is not dtype:
        tensor = _all_of(tensor, dtype)
    tensor = torch.as_strided(tensor, size, stride, offset)
    if bits & 1:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if bits & 2 else tensor


def _all_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The storage from its beginning as a vector of another type."""
    unit = max(dtype.itemsize, tensor.itemsize)
    nbytes = tensor.untyped_storage().nbytes() // unit * unit
    return torch.as_strided(tensor, (nbytes // tensor.itemsize,), (1,), 0).view(dtype)


def oddity(tensor: torch.Tensor) -> str:
    """Why the tensor is not one strided storage that can be rebuilt; "" when it is."""
    kind = type(tensor)
    if kind not in PLAIN_TYPES:
        return f"tensor subclass {kind.__name__}"
    if tensor.layout is not torch.strided:
        return f"{str(tensor.layout).removeprefix('torch.')} tensor"
    if tensor.is_nested:
        return "nested tensor"
    return "quantized tensor" if tensor.is_quantized else ""


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether every byte of the storage is one element's, and each element's alone."""
    if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
        return False
    return tensor.is_contiguous() or is_non_overlapping_and_dense(tensor)


def copy_with_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same geometry on a copy of the whole storage."""
    if covers_storage(tensor) and not tensor.is_conj() and not tensor.is_neg():
        return tensor.clone()
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole.set_(storage, 0, (storage.nbytes(),), (1,))
    return rebuild(whole.clone(), geometry(tensor))
