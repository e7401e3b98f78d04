"""A step's tensors in other shapes, for recording it at another batch size or length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch

from holdover.errors import TraceError
from holdover.trace.replace import replace_tensors

T = TypeVar("T")

MOST_BYTES = 1 << 28
"""Larger tensors on the CPU are made without data."""


def with_shapes(parts: T, model: torch.nn.Module, shape_of: Callable[[torch.Tensor], tuple[int, ...] | None]) -> T:
    """What a step is made of, with tensors that are not the model's own in other shapes, those in closures too.

    Changes mutable containers and closures in place, as `replace_tensors` does.

    Args:
        parts: arguments and loss.
        model: whose tensors stay.
        shape_of: the new shape of a tensor of at least one dimension; None where it stays as it is.

    Raises:
        TraceError: an empty dimension is to grow, which has nothing that could be repeated.

    >>> with_shapes((torch.tensor([[1, 2]]),), torch.nn.Identity(), lambda t: (2, 3))
    (tensor([[1, 2, 1],
            [1, 2, 1]]),)
    """
    own: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        own.add(id(tensor))
        return tensor

    replace_tensors(model, note)

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        shape = shape_of(tensor) if tensor.dim() and id(tensor) not in own else None
        return tensor if shape is None else _repeated(tensor, shape)

    made: T = replace_tensors(parts, convert)
    return made


def _repeated(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor's own slices again and again: what an index may be stays what it may be."""
    with torch.no_grad():
        if tensor.device.type == "cpu" and math.prod(shape) * tensor.itemsize > MOST_BYTES:
            made = torch.empty(shape, dtype=tensor.dtype, device="meta")
        else:
            made = tensor.detach()
            for dim, (old, new) in enumerate(zip(tensor.shape, shape, strict=True)):
                if old != new:
                    if not old:
                        raise TraceError(
                            f"A tensor of shape {tuple(tensor.shape)} cannot be taken at {tuple(shape)}: dimension "
                            f"{dim} is empty, so it has nothing to repeat. Pass a step whose arguments have at least "
                            "one row in each dimension that is to be resized."
                        )
                    made = made.index_select(dim, torch.arange(new, device=tensor.device) % old)
    return made.requires_grad_(tensor.requires_grad)
