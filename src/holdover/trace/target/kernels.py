"""What ops give back on the card where PyTorch's own fake kernels do not say, or say less than the card can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdover.trace.target import recurrent

aten = torch.ops.aten


def grid_sampler(input: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return input.new_empty(input.size(0), input.size(1), grid.size(1), grid.size(2))


def grid_sampler_backward(input: torch.Tensor, grid: torch.Tensor, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.empty_like(input), torch.empty_like(grid)


def grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """cuda/GroupedBlas.cpp _grouped_mm_cuda: any dtype, rows of the result padded to 16 bytes."""
    dtype = out_dtype or a.dtype
    shape: tuple[int, ...] = (a.size(-2), b.size(-1))
    if a.dim() == b.dim():
        groups = a.size(0) if a.dim() == 3 else offs.size(0)  # type: ignore[union-attr]
        shape = (groups, *shape)
    width = -(-shape[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize
    strides = (shape[-2] * width, width, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=a.device)


FAKE_KERNELS: dict[Any, Callable[..., Any]] = {
    **recurrent.FAKE_KERNELS,
    aten.cudnn_grid_sampler.default: grid_sampler,
    aten.cudnn_grid_sampler_backward.default: grid_sampler_backward,
    aten._grouped_mm.default: grouped_mm,
}
