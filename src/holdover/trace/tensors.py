"""What the recorder knows of the tensors of a running step, and what it can tell from a tensor alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from holdover.trace._torch import FakeTensor, is_functorch_wrapped_tensor
from holdover.trace.graph import Event

if TYPE_CHECKING:
    from holdover.trace.recorder import Recorder

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Frame:
    __slots__ = ("call", "children", "index")

    def __init__(self, call: int) -> None:
        self.call, self.index = call, 0
        self.children: dict[str, int] = {}


class Packed:
    """What autograd holds in place of a saved tensor: its geometry, and whose content it was."""

    __slots__ = ("backup", "conj", "dtype", "geometry", "known", "neg", "recorder", "slot")

    def __init__(self, recorder: Recorder, slot: int, tensor: torch.Tensor, backup: Any) -> None:
        self.backup = backup
        self.recorder, self.slot, self.dtype = recorder, slot, tensor.dtype
        self.geometry = (tuple(tensor.size()), tensor.stride(), tensor.storage_offset())
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()
        self.known = None if recorder.known is None else recorder.known.of(tensor)

    def __del__(self) -> None:
        self.recorder.trace.events.append((Event.RELEASE, self.slot))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is one strided storage that the dispatcher handles without a wrapper (fake ones count)."""
    kind = type(tensor)
    return (
        (kind in PLAIN_TYPES or kind.__name__ == "FakeTensor")
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not is_functorch_wrapped_tensor(tensor)
    )


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided storages inside a tensor: itself, or what a wrapper or sparse tensor is made of."""
    if is_plain(tensor):
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [p for n in names for p in plain_parts(getattr(tensor, n))]
    return []


def device_of(tensor: torch.Tensor) -> torch.device:
    """The tensor's device; asking a fake tensor itself would go through the dispatcher and every mode."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie one after another without gap or overlap, in whatever order of dimensions."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: -strides[d])
    return tensor.is_contiguous() or tensor.permute(order).is_contiguous()


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor has an element at every place of its storage, once."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() and is_dense(tensor)
