"""The same training step at other batch sizes: recorded each time, never extrapolated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from holdover.errors import HoldoverError
from holdover.memory.estimate import workspaces
from holdover.memory.on_card import replay_on
from holdover.memory.simulate import simulate
from holdover.memory.timeline import CATEGORIES, Timeline
from holdover.planning.steps import Recorded, recorded
from holdover.trace.graph import Category, Phase
from holdover.trace.isolate import ForeignError, isolated
from holdover.trace.record import Loss
from holdover.trace.resize import with_shapes
from holdover.trace.step import OptimizerSpec, tensors_in

MOST, MOST_REAL = 1 << 30, 1 << 16
"""Batch sizes from which on none is tried; the second where the step can only be recorded on tensors with data."""


@dataclass(frozen=True)
class Subject:
    """A training step, its arguments as for `holdover.plan`."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss | None
    optimizer: OptimizerSpec
    precision: str | None
    device: str | None


@dataclass(frozen=True)
class Scale:
    """How a step's batch is changed: along dimension 0 of the tensors that share it.

    Attributes:
        batch: the batch size as given; 0 where no argument is a tensor.
        scaled, fixed: the arguments that grow with it, and those that do not, with their shapes.
    """

    batch: int
    scaled: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Need:
    """What a step without a plan takes at one batch size.

    Attributes:
        step: its recording.
        timeline: bytes live without a plan.
        peak_bytes: of tensors; on a card, of the whole process.
        accumulating_bytes: the same where gradients of earlier micro-batches are there throughout (no less than true).
    """

    step: Recorded
    timeline: Timeline
    peak_bytes: int
    accumulating_bytes: int


def scale_of(subject: Subject) -> Scale:
    """Which arguments share the batch dimension: the commonest size of their dimension 0, the first's if in doubt.

    >>> x, y, mask = torch.ones(4, 8), torch.ones(4), torch.ones(8, 8)
    >>> scale_of(Subject(torch.nn.Linear(8, 8), (x, y, mask), {}, None, None, None, None))
    Scale(batch=4, scaled=('float32[4, 8]', 'float32[4]'), fixed=('float32[8, 8]',))
    """
    tensors = [t for t in tensors_in((subject.args, subject.kwargs)) if t.dim()]
    if not tensors:
        return Scale(0)
    batch = Counter(t.shape[0] for t in tensors).most_common(1)[0][0]
    told: dict[bool, list[str]] = {True: [], False: []}
    for t in tensors:
        grows = t.shape[0] == batch or t.shape[0] in _flattened(subject, batch)
        told[grows].append(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}")
    return Scale(batch, tuple(told[True]), tuple(told[False]))


def _flattened(subject: Subject, batch: int) -> set[int]:
    """Sizes that are the batch times a length: targets are often flattened so."""
    tensors = [t for t in tensors_in((subject.args, subject.kwargs)) if t.dim() == 2 and not t.is_floating_point()]
    return {batch * t.shape[1] for t in tensors if t.shape[0] == batch and t.shape[1] > 1}


def resized(subject: Subject, old: int, new: int) -> Subject:
    """The step with another batch: rows of the arguments again and again, those in the loss's closure too.

    Changes mutable containers and closures in place, as `replace_tensors` does.
    """
    flattened = _flattened(subject, old)

    def shape_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
        rows, *rest = tensor.shape
        if rows != old and rows not in flattened:
            return None
        return (rows // old * new, *rest)

    parts = subject.args, dict(subject.kwargs), subject.loss
    args, kwargs, loss = with_shapes(parts, subject.model, shape_of)
    return replace(subject, args=args, kwargs=kwargs, loss=loss)


def _record(subject: Subject) -> Recorded:
    return recorded(
        subject.model, subject.args, subject.kwargs, loss=subject.loss, optimizer=subject.optimizer,
        precision=subject.precision, device=subject.device,
    )  # fmt: skip


@dataclass
class Batches:
    """Recordings of one step, by batch size. `say` is told before each is made."""

    subject: Subject
    scale: Scale
    say: Callable[[str], None] = lambda _: None
    reason: str = ""  # why the last recording failed
    _needs: dict[int, Need | None] = field(default_factory=dict)

    def at(self, batch: int) -> Need | None:
        """What the step takes at a batch size; None where it cannot be run at it.

        Raises:
            TraceError: the step fails at the batch size that was given.
        """
        if batch not in self._needs:
            self._needs[batch] = self._recorded(batch)
        return self._needs[batch]

    def given(self) -> Need:
        """The step as it was given."""
        need = self.at(self.scale.batch)
        assert need is not None
        return need

    def _recorded(self, batch: int) -> Need | None:
        if batch == self.scale.batch:
            return need_of(_record(self.subject))
        self.say(f"batch {batch}")
        try:
            step = isolated(lambda s: _record(resized(s, self.scale.batch, batch)), self.subject)
        except (HoldoverError, ForeignError) as error:
            self.reason = str(error).splitlines()[0][:200]
            return None
        return need_of(step)

    @property
    def most(self) -> int:
        """Smaller batch sizes are tried."""
        return MOST_REAL if self.given().step.trace.recorded_on == "real" else MOST

    def known(self) -> dict[int, Need]:
        """All that were recorded, smallest first."""
        return {b: n for b, n in sorted(self._needs.items()) if n is not None}

    def largest(self, memory_bytes: int, taken: Callable[[Need], int]) -> int:
        """The largest batch that takes at most `memory_bytes`; 0 if not even one sample does, `most - 1` if all do.

        The line through two recordings says where to look; where that does not close in fast, the middle is taken. The
        answer itself and the next larger batch are recorded too, so nothing rests on the line being straight.
        """
        low, high = 0, self.most
        guess, tries = self.scale.batch, 0
        while high - low > 1:
            need = self.at(guess)
            if need is None or taken(need) > memory_bytes:
                high = guess
            else:
                low = guess
            tries += 1
            guess = self._on_line(memory_bytes, taken, low)
            if tries % 3 == 0:
                guess = (low + high) // 2 if high < self.most else 4 * guess
            guess = min(max(guess, low + 1), high - 1)
        return low

    def _on_line(self, memory_bytes: int, taken: Callable[[Need], int], low: int) -> int:
        """Where the line through the two nearest recordings meets the memory; just above `low` if that is there."""
        points = sorted((abs(taken(n) - memory_bytes), b, taken(n)) for b, n in self.known().items())[:2]
        if len(points) < 2:
            return 2 * low if low else self.scale.batch // 2
        (_, b1, n1), (_, b2, n2) = points
        slope = (n2 - n1) / (b2 - b1)
        wanted = int((memory_bytes - n1) / slope + b1) if slope > 0 else 2 * low
        return wanted + (wanted == low)


def need_of(step: Recorded) -> Need:
    """What a recorded step takes without a plan."""
    workspace, _ = workspaces(step.trace)
    timeline = simulate(step.trace, workspace=workspace)
    peak = timeline.peak_bytes
    more = accumulating_peak(step, timeline) - peak
    if step.card is not None:
        peak = replay_on(step.trace, step.card, workspace=workspace).reserved_bytes + step.card.context_bytes[1]
    return Need(step, timeline, peak, peak + more)


def accumulating_peak(step: Recorded, timeline: Timeline) -> int:
    """The peak where the gradients of earlier micro-batches are held all along, and the new ones are added to them.

    Each new gradient exists beside the old one until it is added; the largest is taken for every moment.
    """
    trace = step.trace
    last = trace.last_step
    gradients = {s.name: s.nbytes for s in trace.storages if s.category is Category.GRADIENT}
    place = CATEGORIES.index(Category.GRADIENT)
    total, largest = sum(gradients.values()), max(gradients.values(), default=0)
    peak = timeline.peak_bytes
    for op in trace.ops:
        if op.step == last and op.phase is not Phase.OPTIMIZER:
            beside = largest if op.phase is Phase.BACKWARD else 0
            held = timeline.category_bytes[op.id][place]
            peak = max(peak, timeline.live_bytes[op.id] - held + total + beside)
    return peak


def is_linear(peaks: Mapping[int, int]) -> bool:
    """Whether at least three points lie on one line, to the byte."""
    (b1, p1), (b2, p2), *rest = sorted(peaks.items()) if len(peaks) > 2 else [(0, 0), (1, 1)]
    return bool(rest) and all((p - p1) * (b2 - b1) == (p2 - p1) * (b - b1) for b, p in rest)
