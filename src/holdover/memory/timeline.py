"""What a simulation of a step is given, and what it tells: the choices of a plan, and the bytes live over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdover.trace.graph import Category, Phase, Trace

CATEGORIES = tuple(Category)
RNG_STATE_BYTES = {"cpu": 5056, "cuda": 16}
"""Size of the generator state that a recipe of a random op carries (torch 2.13)."""
SMALL_PIN_BYTES = 1 << 12
"""Up to this size a recipe pins a copy of what existed before the step, not the thing itself (rule 3)."""
FOREVER = 1 << 30
"""As `held_from`: whatever stage asks, a replayed result is held for its later readers."""


@dataclass(frozen=True)
class Choices:
    """What a plan does to one trace: ops that leave a recipe, and values that are kept packed (with their bytes).

    `stages` gives recorded ops the stage and the stage they are held from of rule 15; without, replays are always held.
    Without `with_loss` it is in force inside the model's calls only: what the loss saves is held as in plain PyTorch.
    """

    recompute: frozenset[int] = frozenset()
    pack: Mapping[int, int] = field(default_factory=dict)
    with_loss: bool = False
    stages: Mapping[int, tuple[int, int]] = field(default_factory=dict)


NOTHING = Choices()


@dataclass(slots=True)
class Extra:
    """Bytes that only a plan brings: a cloned input, a generator state, a packed copy, a value replayed aside."""

    nbytes: int
    category: Category
    value: int


@dataclass
class Timeline:
    """Bytes live after each op.

    `live_bytes[i]` is the highest number of bytes live from the start of op `i` to the start of the next, the op's own
    workspace included; `category_bytes[i]` the same moment by category, in the order of `CATEGORIES`, the workspace
    counted as temporary. They add up exactly.
    """

    live_bytes: list[int]
    category_bytes: list[tuple[int, ...]]
    peak_op: int
    at_peak: dict[int, int]  # storage -> bytes, those live at the peak
    extra_at_peak: list[Extra]
    workspace_at_peak: int
    replays: dict[int, int]  # op -> how often it was replayed
    copied_bytes: int = 0  # before writes to what others need (rules 5, 13), in packing and in unpacking

    @property
    def peak_bytes(self) -> int:
        return self.live_bytes[self.peak_op] if self.live_bytes else 0


def phase_peaks(trace: Trace, timeline: Timeline) -> dict[tuple[int, Phase], int]:
    """The highest bytes live in each (step, phase)."""
    peaks: dict[tuple[int, Phase], int] = {}
    for op, nbytes in zip(trace.ops, timeline.live_bytes, strict=True):
        key = (op.step, op.phase)
        peaks[key] = max(peaks.get(key, 0), nbytes)
    return peaks
