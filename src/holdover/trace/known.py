"""Values that are known although the tensors are fake: what follows from integer inputs and constants alone.

Models look at positions, masks and lengths (`if mask.all()`, `lengths.max().item()`), and those are small integers
that the caller gave or that `arange` made. Ops that read nothing but known values are run on the side for real, so
that such a question gets the true answer, while activations stay without memory.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from holdover.trace._torch import FakeTensor, disable_current_modes
from holdover.trace.ops import is_random, op_name, written_arguments

CONSTANTS = frozenset({"arange", "full", "ones", "zeros", "scalar_tensor", "eye", "linspace"})
CONSTANTS_LIKE = frozenset({"full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros"})
MOST_ELEMENTS = 1 << 24
FAILED = object()  # not None, which ops that only write give back
MOST_FLOATING_ELEMENTS = 1 << 16


class KnownValues:
    """The real tensors beside fake ones, for as long as the fake ones live."""

    def __init__(self) -> None:
        self._real: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def learn(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """From now on `fake` is known to hold what `real` holds."""
        key, table = id(fake), self._real
        table[key] = weakref.ref(fake, lambda _: table.pop(key, None)), real

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real tensor beside a fake one; None when its values are not known."""
        found = self._real.get(id(tensor))
        if found is not None:
            return found[1] if found[0]() is tensor else None
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and few(tensor):
            return tensor  # a constant from `torch.tensor(...)` is not fake yet
        return None

    def follow(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], out: Any) -> None:
        """After an op on fake tensors (`tensors` among its arguments): learn its results if all it reads is known."""
        packet = packet_name(func)
        if packet not in CONSTANTS_LIKE:
            known = sum(self.of(t) is not None for t in tensors)
            if known == 0 and (tensors or packet not in CONSTANTS):
                return  # the common case: nothing known comes in, so nothing known is written over either
            if known < len(tensors) or is_random(func):
                self._forget_written(func, args, kwargs)
                return
        real = self._compute(func, args, kwargs) if small(out) else FAILED
        if real is FAILED:
            self._forget_written(func, args, kwargs)
            return
        fakes, values = ([t for t in tree_leaves(o) if isinstance(t, torch.Tensor)] for o in (out, real))
        for fake, value in zip(fakes, values, strict=True):
            if isinstance(fake, FakeTensor):
                self.learn(fake, value)

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op that fake tensors cannot follow; NotImplemented when it reads what is not known."""
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not inputs or any(self.of(t) is None for t in inputs):
            return NotImplemented
        real = self._run(func, args, kwargs)

        def as_fake(value: torch.Tensor) -> torch.Tensor:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=inputs[0].device)
            self.learn(fake, value)
            return fake

        return tree_map_only(torch.Tensor, as_fake, real)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return self._run(func, args, kwargs)
        except (RuntimeError, NotImplementedError, TypeError, IndexError):  # for example another device
            return FAILED

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(tensor: torch.Tensor) -> torch.Tensor:
            known = self.of(tensor)  # None only where the op looks at nothing but the shape
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) if known is None else known

        with disable_current_modes():
            args, kwargs = tree_map_only(torch.Tensor, real, (args, kwargs))
            if torch.device(kwargs.get("device") or "cpu").type == "cuda":
                kwargs = {**kwargs, "device": "cpu"}  # where the known values are, and perhaps the only device here
            return func(*args, **kwargs)

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """An unknown result written over a known tensor makes all views of it unknown."""
        for position, name in written_arguments(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                found = self._real.get(id(tensor))
                if found is not None:
                    memory = found[1].untyped_storage()._cdata
                    stale = [k for k, (_, r) in self._real.items() if r.untyped_storage()._cdata == memory]
                    for key in stale:
                        del self._real[key]


@cache
def packet_name(func: Any) -> str:
    name = op_name(func)
    return name.split(".")[1] if "." in name else ""


def few(tensor: torch.Tensor) -> bool:
    """Whether so few elements that computing them on the side costs nothing that matters."""
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (MOST_FLOATING_ELEMENTS if floating else MOST_ELEMENTS)


def small(result: Any) -> bool:
    return all(few(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor))
