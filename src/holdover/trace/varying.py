"""Kernels whose result depends on which thread comes first: run again, they may give other bits.

Source: the list of operations in the documentation of `torch.use_deterministic_algorithms` (torch 2.13), as far as
they can run in forward, and its notes on duplicate indices. Where that setting is on, they are deterministic or raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

ATOMIC_ON_CARDS = frozenset(
    {
        "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add", "index_add_", "index_reduce",
        "index_reduce_", "cumsum", "cumsum_", "histc", "nll_loss2d_forward",
    }
)  # fmt: skip
"""Float sums of which the order changes from run to run on a card."""

CHOICE_ON_CARDS = frozenset({"median", "kthvalue", "mode"})
"""Which of equal elements' positions is told may change on a card."""

WRITE_BY_INDEX = frozenset(
    {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "index_copy", "index_copy_", "put", "put_"}
)
"""With an index twice among the indices, the last to write wins, or they add up in any order."""

WRITE_BY_INDEX_ON_CARDS = frozenset({"scatter", "scatter_", "max_unpool2d", "max_unpool3d"})

MASKS = (torch.bool, torch.uint8)

SUMS = "adds in an order that changes from run to run"
RACES = "writes by index, where the same index twice gives a result that changes from run to run"
PICKS = "picks a transposed convolution that may add in an order that changes from run to run"
CHOOSES = "tells the position of any of equal elements"

ASKED = ATOMIC_ON_CARDS | CHOICE_ON_CARDS | WRITE_BY_INDEX | WRITE_BY_INDEX_ON_CARDS | {"bincount", "convolution"}
"""The ops of whose calls `varies` has to be asked."""


def why_varying(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """`varies` of any op's call."""
    packet = op._schema.name.split("::")[1]
    return varies(packet, args, kwargs) if packet in ASKED else ""


def varies(packet: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why this call may give other bits when it is run again; "" when it gives the same.

    Args:
        packet: one of `ASKED`, the op's name without namespace and overload.
        args, kwargs: of the call.

    >>> varies("index_put", (torch.zeros(4), [torch.tensor([1, 1])], torch.ones(2)), {})
    'writes by index, where the same index twice gives a result that changes from run to run'
    >>> varies("index_put", (torch.zeros(4), [torch.zeros(4, dtype=torch.bool)], torch.ones(1)), {})
    ''
    """
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return ""
    if packet in WRITE_BY_INDEX:
        index = _argument(args, kwargs, 2 if "copy" in packet else 1, "index")
        indices = index if isinstance(index, (list, tuple)) else [index]
        return RACES if any(isinstance(i, torch.Tensor) and i.dtype not in MASKS for i in indices) else ""
    first = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if first is None or first.device.type != "cuda":
        return ""
    if packet in ATOMIC_ON_CARDS:
        dtype = kwargs.get("dtype") or first.dtype
        return SUMS if dtype.is_floating_point or dtype.is_complex else ""
    if packet in CHOICE_ON_CARDS:
        return CHOOSES
    if packet in WRITE_BY_INDEX_ON_CARDS:
        return RACES if "unpool" in packet or isinstance(_argument(args, kwargs, 3, "src"), torch.Tensor) else ""
    if packet == "bincount":
        return SUMS if _argument(args, kwargs, 1, "weights") is not None else ""
    transposed = bool(_argument(args, kwargs, 6, "transposed"))
    return PICKS if transposed and not torch.backends.cudnn.deterministic else ""


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)
