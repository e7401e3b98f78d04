"""CUDA's autocast for pretended tensors: the lists of `rules.py`, applied as PyTorch's C++ applies them.

The C++ wrappers are there in every build, but ask the tensor itself whether it is on a card. These say yes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from holdover.trace._torch import AUTOCAST_CUDA, excluding
from holdover.trace.target import rules
from holdover.trace.target.pretend import CARD

Kernel = Callable[..., Any]


class Autocast:
    """The casting kernels of one recording, with their cache of cast parameters."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def kernels(self) -> dict[str, Kernel]:
        """One kernel per op in the lists, by the op's name."""
        table: dict[str, Kernel] = {}
        for names, wrap in (
            (rules.LOWER_PRECISION, partial(self.casting, lower)), (rules.PROMOTE, partial(self.casting, widest)),
            (rules.FLOAT32, partial(self.casting, float32)), (rules.FLOAT32_BY_DTYPE, self.float32_by_dtype),
            (rules.FLOAT32_BY_OTHER_OVERLOAD, self.float32_by_other_overload), (rules.REFUSED, self.refuse),
        ):  # fmt: skip
            for name in names:
                table[name] = wrap(name)
        return table

    def clear(self) -> None:
        self.cache.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """autocast_mode.cpp cached_cast: what is eligible is cast, a float32 leaf's cast is kept for the region."""
        if not eligible(value) or value.dtype == dtype:
            return value
        cached = (
            dtype == lower() and value.dtype == torch.float32 and value.requires_grad
            and value.is_leaf and not value._is_view() and torch.is_autocast_cache_enabled()
        )  # fmt: skip
        if not cached:
            return value.to(dtype)
        found = self.cache.get(id(value))
        if found is None:
            found = self.cache[id(value)] = value, value.to(dtype)
        return found[1]

    def casting(self, to: Callable[[Any], torch.dtype], name: str) -> Kernel:
        """Floating arguments are cast to the dtype that `to` says for them."""
        op = overload(name)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with excluding(AUTOCAST_CUDA):
                dtype = to((args, kwargs))
                args, kwargs = tree_map(lambda value: self.cast(value, dtype), (args, kwargs))
                return op(*args, **kwargs)

        return kernel

    def float32_by_dtype(self, name: str) -> Kernel:
        op = overload(name)
        position = [a.name for a in op._schema.arguments].index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given = args[position] if position < len(args) else kwargs.get("dtype")
            with excluding(AUTOCAST_CUDA):
                if given is None and eligible(args[0]):
                    return op(*args[:position], **{**kwargs, "dtype": torch.float32}) \
                        if op._schema.arguments[position].kwarg_only else \
                        op(*args[:position], torch.float32, *args[position + 1 :], **kwargs)  # fmt: skip
                return op(*args, **kwargs)

        return kernel

    def float32_by_other_overload(self, name: str) -> Kernel:
        op, other = overload(name), overload(rules.FLOAT32_BY_OTHER_OVERLOAD[name])

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with excluding(AUTOCAST_CUDA):
                if eligible(args[0]):
                    return other(*args, **kwargs, dtype=torch.float32)
                return op(*args, **kwargs)

        return kernel

    def refuse(self, name: str) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
                "binary_cross_entropy_with_logits."
            )

        return kernel


def lower(_: Any = None) -> torch.dtype:
    """The dtype of the region."""
    return torch.get_autocast_dtype("cuda")


def float32(_: Any) -> torch.dtype:
    return torch.float32


def widest(arguments: Any) -> torch.dtype:
    return torch.float32 if any(eligible(a) and a.dtype == torch.float32 for a in tree_leaves(arguments)) else lower()


def eligible(value: Any) -> bool:
    """autocast_mode.h is_autocast_eligible, and not float64 (is_eligible)."""
    return (
        isinstance(value, torch.Tensor)
        and value.device == CARD
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def overload(name: str) -> torch._ops.OpOverload:
    packet, _, variant = name.partition(".")
    op: torch._ops.OpOverload = getattr(getattr(torch.ops.aten, packet), variant or "default")
    return op
