"""Which script a forward follows where a plan knows several input shapes, and what is said of unknown ones."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import holdover
from holdover.planning.inputs import PlannedShape, Shapes, covers, elements, shapes_of, show
from holdover.recompute.script import Compiled
from holdover.units import format_bytes

if TYPE_CHECKING:
    from holdover.planning.plan import Plan


OURS = tuple(path + os.sep for package in (holdover, torch) for path in package.__path__)
"""Where the frames of a call lie that are not the user's."""


class Guide:
    """The scripts of a plan by the input shapes that they were made for.

    The choice changes time and memory only: any script gives the same gradients at any shape.

    Args:
        planned: each planned shape with its script, as it stands in the plan.
    """

    def __init__(self, planned: Sequence[tuple[PlannedShape, Compiled]]) -> None:
        self.planned = sorted(planned, key=lambda p: elements(p[0].shapes))
        self.known: dict[Shapes, Compiled] = {}
        self.warned = False

    def choose(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compiled:
        """The script for a call: that of equal shapes, else of the nearest not smaller, else of the largest."""
        seen = shapes_of(args, kwargs)
        compiled = self.known.get(seen)
        if compiled is None:
            compiled = self.known[seen] = self._found(seen)
        return compiled

    def _found(self, seen: Shapes) -> Compiled:
        equal = next((c for shape, c in self.planned if shape.shapes == seen), None)
        if equal is not None:
            return equal
        larger = next((c for shape, c in self.planned if covers(shape.shapes, seen)), None)
        if larger is not None:
            return larger
        # Other proportions than any planned (a longer sequence in a smaller batch): as many elements are enough.
        enough = next((c for shape, c in self.planned if elements(shape.shapes) >= elements(seen)), None)
        if enough is not None:
            return enough
        largest, compiled = self.planned[-1]
        if not self.warned:
            self.warned = True
            warnings.warn(_larger(largest, seen), stacklevel=users_level())
        return compiled


def guide_of(plan: Plan) -> Guide | None:
    """The guide of a plan; None where it does not know its shapes."""
    planned = []
    for each in (plan, *plan.variants):
        compiled = Compiled(each.script, each.quiet)
        planned += [(shape, compiled) for shape in each.shapes if not shape.variant]
    return Guide(planned) if planned else None


def users_level() -> int:
    """The `stacklevel` with which a warning by the caller names the user's line that led here: the first frame that is
    neither PyTorch's nor holdover's. (`skip_file_prefixes` does this from Python 3.12 on.)"""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame, level = frame.f_back, level + 1
    return level


def _larger(planned: PlannedShape, seen: Shapes) -> str:
    growth = elements(seen) / max(elements(planned.shapes), 1)
    return (
        f"The plan was made for inputs of {show(planned.shapes)}, peak {format_bytes(planned.predicted_peak_bytes)}; "
        f"this forward has {show(seen)}, {growth:.2f} times as many elements. The gradients are right all the same, "
        f"but the peak is higher, about {format_bytes(planned.estimated_peak_bytes(seen))} if it grows as inputs do. "
        "Plan for these inputs too, with plan(..., also=[(args, kwargs)]). Said once."
    )
