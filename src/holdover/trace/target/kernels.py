"""What ops give back on the card where PyTorch's own fake kernels do not say, or say less than the card can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdover.trace._torch import disable_current_modes, suggest_memory_format
from holdover.trace.fake import STAND_INS
from holdover.trace.target import recurrent

aten = torch.ops.aten


def convolution(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any
) -> torch.Tensor:  # fmt: skip
    """The shape that PyTorch says, in the layout that cuDNN chooses; its own fake kernel knows the CPU's choice."""
    with disable_current_modes():
        like = [
            None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (input, weight, bias)
        ]
        shape = aten.convolution.default(*like, *settings).shape
    return torch.empty(shape, dtype=input.dtype, device=input.device, memory_format=cudnn_layout(input, weight))


def convolution_backward(
    grad: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias_sizes: list[int] | None, *rest: Any
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    layout = cudnn_layout(input, weight)
    wanted = rest[-1]
    return (
        torch.empty_like(input, memory_format=layout) if wanted[0] else None,
        torch.empty_like(weight, memory_format=layout) if wanted[1] else None,
        grad.new_empty(grad.size(1)) if wanted[2] else None,
    )


def cudnn_layout(input: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """ConvUtils.h cudnn_conv_suggest_memory_format: channels last if either operand is, but not in float64."""
    if input.dtype != torch.float64 and torch.backends.cudnn.enabled:
        for operand in (input, weight):
            layout: torch.memory_format = suggest_memory_format(operand)
            if layout != torch.contiguous_format:
                return layout
    return torch.contiguous_format


def grid_sampler(input: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return input.new_empty(input.size(0), input.size(1), grid.size(1), grid.size(2))


def grid_sampler_backward(input: torch.Tensor, grid: torch.Tensor, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.empty_like(input), torch.empty_like(grid)


FAKE_KERNELS: dict[Any, Callable[..., Any]] = {
    **STAND_INS,
    **recurrent.FAKE_KERNELS,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.cudnn_grid_sampler.default: grid_sampler,
    aten.cudnn_grid_sampler_backward.default: grid_sampler_backward,
}
