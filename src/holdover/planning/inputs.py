"""The shapes that a plan was made for, and what it promises at each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from holdover.errors import PlanError

if TYPE_CHECKING:
    from holdover.planning.plan import Plan

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of all tensors among a call's arguments, in order, those of keyword arguments by name."""


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Shapes:
    """The shapes of the tensors in a call's arguments, containers included.

    >>> shapes_of((torch.ones(2, 3), [torch.ones(4)]), {"mask": torch.ones(2), "ids": torch.ones(2, 8)})
    ((2, 3), (4,), (2, 8), (2,))
    """
    found: list[tuple[int, ...]] = []
    todo: list[Any] = [dict(kwargs or {}), *reversed(args)]
    while todo:
        a = todo.pop()
        if isinstance(a, torch.Tensor):
            found.append(tuple(a.shape))
        elif isinstance(a, Mapping):
            todo.extend(a[name] for name in sorted(a, key=str, reverse=True))
        elif isinstance(a, (list, tuple)):
            todo.extend(reversed(a))
    return tuple(found)


def checked_pairs(also: Sequence[Any]) -> list[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """The `(args, kwargs)` of further shapes.

    Raises:
        PlanError: one is not such a pair.
    """
    for i, pair in enumerate(also):
        well = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not well or not isinstance(pair[0], (tuple, list)) or not isinstance(pair[1], Mapping):
            raise PlanError(
                f"also[{i}] is not a pair (args, kwargs) of a tuple and a dict, but {type(pair).__name__}: "
                "write also=[((x,), {})] for a call model(x)."
            )
    return [(tuple(args), kwargs) for args, kwargs in also]


def elements(shapes: Shapes) -> int:
    """How many numbers tensors of these shapes hold together."""
    return sum(math.prod(shape) for shape in shapes)


def covers(large: Shapes, small: Shapes) -> bool:
    """Whether no dimension of any tensor is smaller than in `small`.

    >>> covers(((8, 512),), ((8, 500),)), covers(((8, 512),), ((9, 16),))
    (True, False)
    """
    return len(large) == len(small) and all(
        len(a) == len(b) and all(m >= n for m, n in zip(a, b, strict=True)) for a, b in zip(large, small, strict=True)
    )


def show(shapes: Shapes) -> str:
    """The shapes as text, each distinct one once.

    >>> show(((8, 512), (8, 512)))
    '8x512'
    """
    return ", ".join("x".join(map(str, shape)) or "()" for shape in dict.fromkeys(shapes)) or "no tensor"


FIXED = ("parameter", "buffer", "gradient", "optimizer")
"""Parts of a peak that do not grow with the inputs."""


@dataclass(frozen=True)
class PlannedShape:
    """Input shapes that a plan holds for.

    Attributes:
        shapes: of the tensors among the arguments, as `shapes_of` gives them.
        predicted_peak_bytes, unplanned_peak_bytes: the peak at these shapes, with the plan and without.
        extra_time: time that the replays add at these shapes, as a fraction of the step.
        fixed_bytes: what of the peak does not grow with the inputs: weights, buffers, gradients, optimizer state.
        variant: which plan is followed at these shapes: 0 for the one that this stands in, n for the n-th of its
            `variants`.
    """

    shapes: Shapes
    predicted_peak_bytes: int
    unplanned_peak_bytes: int
    extra_time: float
    fixed_bytes: int
    variant: int = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlannedShape:
        """From plain data, as `dataclasses.asdict` and JSON leave it."""
        return cls(**{**data, "shapes": tuple(tuple(int(n) for n in shape) for shape in data["shapes"])})

    def estimated_peak_bytes(self, seen: Shapes) -> int:
        """The peak at other shapes, were all of it but the fixed part to grow as the inputs do."""
        growth = elements(seen) / max(elements(self.shapes), 1)
        return self.fixed_bytes + int((self.predicted_peak_bytes - self.fixed_bytes) * growth)


def planned_shape(shapes: Shapes, plan: Plan) -> PlannedShape:
    """What a plan promises at the shapes that its figures are for."""
    fixed = sum(plan.peak_parts.get(name, 0) for name in FIXED)
    return PlannedShape(shapes, plan.predicted_peak_bytes, plan.unplanned_peak_bytes, plan.extra_time, fixed)
