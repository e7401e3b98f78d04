"""The composite functions in which PyTorch asks whether a tensor is on a card, as they go when it is.

Each is registered for CUDA's autograd key while a step is recorded, and calls the ops that the C++ function calls. The
table in `rules.py` has a row for each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from holdover.trace._torch import COMPOSITE, has_kernel
from holdover.trace.known import KnownValues
from holdover.trace.target import packed, recurrent
from holdover.trace.target.attention import scaled_dot_product_attention
from holdover.trace.target.autocast import Autocast
from holdover.trace.target.card import Target
from holdover.trace.target.pretend import CARD, replaced
from holdover.trace.target.rules import batch_norm_is_cudnn

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


def composite(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run PyTorch's own composite implementation."""
    return op._op_dk(COMPOSITE, *args, **kwargs)


def dropout(target: Target, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and 0 < p < 1 and input.numel() > 0:
        out: torch.Tensor = torch.native_dropout(input, p, train)[0]
        return out
    out = composite(aten.dropout.default, input, p, train)
    return out


def batch_norm_impl_index(
    target: Target,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    if batch_norm_is_cudnn(input, weight, bias, running_mean, running_var, training, eps, cudnn_enabled, target):
        channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
        last = channels_last is not None and input.is_contiguous(memory_format=channels_last)
        dense = input if last or input.is_contiguous() else input.contiguous()
        out = aten.cudnn_batch_norm(dense, weight, bias, running_mean, running_var, training, momentum, eps)
        return (*out, 1)
    reserve = torch.empty(0, dtype=torch.uint8, device=input.device)
    out = aten.native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)
    return (*out, reserve, 0)


def softmax(
    op: Any, kernel: Any, target: Target, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if input.dtype == torch.float16 and dtype == torch.float32:
        out: torch.Tensor = kernel(input, dim, True)
        return out
    out = composite(op, input, dim, dtype)
    return out


def grid_sampler(
    target: Target, input: torch.Tensor, grid: torch.Tensor, interpolation: int, padding: int, align_corners: bool
) -> torch.Tensor:
    known = (torch.float64, torch.float32, torch.float16)
    small = max(input.numel(), grid.numel()) < 2**31
    if (
        interpolation == 0 and padding == 0 and align_corners and input.dim() == 4 and input.size(1) <= 1024
        and input.dtype in known and grid.dtype in known and small and target.cudnn and torch.backends.cudnn.enabled
    ):  # fmt: skip
        out: torch.Tensor = aten.cudnn_grid_sampler(input, grid)
        return out
    out = composite(aten.grid_sampler.default, input, grid, interpolation, padding, align_corners)
    return out


def to_dtype_layout(
    target: Target,
    self: torch.Tensor,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """C++ would find that a pretended tensor is not where it is, and copy it."""
    if device is not None and torch.device(device.type, device.index or 0) == self.device == CARD:
        device = None
    out: torch.Tensor
    if device is None and layout in (None, torch.strided):
        out = self if dtype is None and not copy and memory_format is None else composite(
            aten.to.dtype, self, self.dtype if dtype is None else dtype, non_blocking, copy, memory_format)  # fmt: skip
        return out
    out = composite(
        aten.to.dtype_layout, self, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory,
        non_blocking=non_blocking, copy=copy, memory_format=memory_format,
    )  # fmt: skip
    return out


def to_device(
    target: Target,
    self: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    return to_dtype_layout(
        target, self, dtype, None, device, None, non_blocking=non_blocking, copy=copy, memory_format=memory_format
    )


COMPOSITES: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "dropout": dropout,
    "_batch_norm_impl_index": batch_norm_impl_index,
    "softmax.int": partial(softmax, aten.softmax.int, aten._softmax),
    "log_softmax.int": partial(softmax, aten.log_softmax.int, aten._log_softmax),
    "grid_sampler": grid_sampler,
    "to.dtype_layout": to_dtype_layout,
    "to.device": to_device,
    "lstm.input": recurrent.lstm,
    "gru.input": partial(recurrent.one_hidden, "gru"),
    "rnn_tanh.input": partial(recurrent.one_hidden, "rnn_tanh"),
    "rnn_relu.input": partial(recurrent.one_hidden, "rnn_relu"),
    "lstm_cell": recurrent.lstm_cell,
    "gru_cell": recurrent.gru_cell,
}
"""By the name of the op that the program calls."""

KERNELS = ("_fused_rms_norm", "silu_backward", "mish_backward")
"""Composite in a build without CUDA, kernels on the card."""


@contextmanager
def rules_in_effect(target: Target, known: KnownValues) -> Iterator[None]:
    """Register all of it with PyTorch's dispatcher, and take it back."""
    autocast = Autocast()
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns of the C++ kernels that give way
            register(library, target, known, autocast)
        with replaced(torch, "clear_autocast_cache", autocast.clear):
            yield
    finally:
        library._destroy()


def register(library: torch.library.Library, target: Target, known: KnownValues, autocast: Autocast) -> None:
    for name, function in (COMPOSITES | packed.composites(known)).items():
        library.impl(name, bound(function, target), "AutogradCUDA")
    for name in KERNELS:
        if not has_kernel(f"aten::{name}", "CUDA"):
            library.impl(name, unreachable, "CUDA")
    for name, kernel in (*autocast.kernels().items(), ("_cudnn_rnn", recurrent.under_autocast)):
        library.impl(name, kernel, "AutocastCUDA", allow_override=True)


def bound(function: Callable[..., Any], target: Target) -> Callable[..., Any]:
    """`function` for this target; those for several ops take what tells them apart first."""
    if isinstance(function, partial):
        return partial(function.func, *function.args, target)
    return partial(function, target)


def unreachable(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("A kernel for real CUDA tensors was called.")
