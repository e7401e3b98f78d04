"""Comparing what two runs of a step left behind, to the last bit.

A NaN equals the same NaN and 0.0 differs from -0.0; None, layouts, dtypes and the structure of containers count too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Item = tuple[str, str, Any]
"""A name, the qualified name of the module that owns it ("" for none), and a tensor or plain value."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor (or other result) that the planned step left otherwise than the plain one."""

    kind: str  # "gradient", "buffer", "output", "rng", "loss"
    name: str  # qualified name of a parameter or buffer, "args[0]", "output[1]", "torch"
    module: str  # qualified name of the module that owns it, "" for the model itself and for what no module owns
    elements: int  # how many elements differ; 0 where they cannot be compared
    largest: float  # the largest absolute difference; nan where there is none
    detail: str

    def __str__(self) -> str:
        owner = f" of module {self.module!r}" if self.module else ""
        return f"{self.kind} {self.name!r}{owner}: {self.detail}"


def flatten(name: str, value: Any) -> Iterator[Item]:
    """Tensors and plain values of nested containers, each with the way to it."""
    if isinstance(value, torch.Tensor):
        yield name, "", value.detach()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from flatten(f"{name}.{f.name}", getattr(value, f.name, None))
    elif isinstance(value, Mapping):
        for key in value:
            yield from flatten(f"{name}[{key!r}]", value[key])
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from flatten(f"{name}[{i}]", item)
    else:
        plain = isinstance(value, (int, float, str, bool, type(None)))
        yield name, "", value if plain else type(value).__qualname__


def compare(kind: str, expected: list[Item], found: list[Item]) -> list[Difference]:
    """One `Difference` for each item of `found` that is not what it is in `expected`."""
    names, others = [item[0] for item in expected], [item[0] for item in found]
    if names != others:
        odd = sorted(set(names) ^ set(others)) or names
        return [Difference(kind, odd[0], "", 0, math.nan, f"there are {len(others)} {kind}s instead of {len(names)}")]
    differences = []
    for (name, module, a), (_, _, b) in zip(expected, found, strict=True):
        how = unlike(a, b)
        if how is not None:
            differences.append(Difference(kind, name, module, *how))
    return differences


def unlike(a: Any, b: Any) -> tuple[int, float, str] | None:
    """Elements that differ, the largest difference and the same in words; None for equal to the last bit."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        same = type(a) is type(b) and a == b
        return None if same else (0, math.nan, f"{_short(b)} instead of {_short(a)}")
    if a.is_nested and b.is_nested and a.size(0) == b.size(0):  # shapes of their own, each with its own symbols
        return next((how for x, y in zip(a.unbind(), b.unbind(), strict=True) if (how := unlike(x, y))), None)
    for what in ("layout", "dtype", "shape", "device"):
        if getattr(a, what) != getattr(b, what):
            return 0, math.nan, f"{what} {getattr(b, what)} instead of {getattr(a, what)}"
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if torch.equal(_bits(a), _bits(b)):
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    distance = (a.to(wide) - b.to(wide)).abs()
    differing = (_bits(a).reshape(a.numel(), -1) != _bits(b).reshape(b.numel(), -1)).any(1)
    count, largest = int(differing.sum()), float(distance.max())
    return count, largest, f"{count:,} of {a.numel():,} elements differ, the largest difference is {largest:.3g}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8)


def _short(value: Any) -> str:
    text = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 60 else f"another {type(value).__name__}"
