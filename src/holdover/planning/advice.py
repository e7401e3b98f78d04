"""Which constraint is the tighter one, memory or time, and what follows: plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from holdover.planning.levers import Lever
from holdover.planning.plan import Plan

SCHEMA_VERSION = 1

AS_IS = "store everything"
RECOMPUTE = "recompute"
ACCUMULATE = "accumulate"
BOTH = "accumulate and recompute"
SMALLER = "a smaller batch"


@dataclass(frozen=True)
class Option:
    """One way to take a step over the whole batch within the memory.

    Attributes:
        kind: "store everything", "recompute", "accumulate", "accumulate and recompute", or, where none of them fits,
            "a smaller batch".
        micro_batch, micro_steps: samples at once, and how often.
        peak_bytes: the peak.
        seconds: of the whole batch, micro-steps and the optimizer's step together.
        extra_time: against the step that stores everything, as a fraction of it; of a smaller batch, per sample.
        plan: what to recompute, where anything is.
    """

    kind: str
    micro_batch: int
    micro_steps: int
    peak_bytes: int
    seconds: float
    extra_time: float
    plan: Plan | None = None


@dataclass(frozen=True)
class Rate:
    """Samples per second at one batch size, with the best plan within the memory."""

    batch: int
    peak_bytes: int
    extra_time: float
    seconds: float
    samples_per_second: float


@dataclass(frozen=True)
class Growth:
    """How the peak grows with the batch.

    Attributes:
        scaled, fixed: the arguments that grow with the batch, and those that do not.
        peaks: (batch, peak without a plan) of every recording that was made.
        linear: whether they lie on one line, to the byte, three of them at least.
        largest: the largest batch whose step fits without a plan, recorded, as is the next larger one; None if unknown.
        largest_accumulating: the same with the gradients of earlier micro-batches held.
        limit: what stands against more than `largest`, where it is not the memory; "" where it is.
        reason: why the batch cannot be changed; "" where it can.
    """

    scaled: tuple[str, ...]
    fixed: tuple[str, ...]
    peaks: tuple[tuple[int, int], ...]
    linear: bool
    largest: int | None
    largest_accumulating: int | None
    limit: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Floor:
    """The lowest peak that recomputation reaches at the given batch: where it stands and what it is made of."""

    peak_bytes: int
    extra_time: float
    at: str
    parts: tuple[tuple[str, int], ...]
    loss_bytes: int  # of the parts: logits, what the loss makes of them, and their gradients
    helps: bool  # whether it is below the step's own peak
    reason: str  # why it is no lower


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to do with a training step and so much memory.

    Attributes:
        memory_bytes: what was said to be there; on a card, for the whole process.
        batch: samples of the step as given; 0 where no argument shows it.
        unplanned_peak_bytes: the step's own peak.
        step_seconds: its time, as the sum of its ops.
        priced: how ops were priced.
        constraint: the tighter one: "time" if everything fits, "memory" if it takes a plan or a smaller batch.
        verdict: one sentence that says what follows, and what it costs.
        options: the ways that fit, quickest first; empty where nothing fits.
        floor: the lowest peak at the given batch; None where everything fits and nobody needs it.
        levers: what else lowers that peak.
        rates: samples per second against batch size, smallest batch first.
        growth: how the peak grows with the batch.
        notes: what a reader should know.
    """

    model: str
    inputs: str
    optimizer: str
    precision: str | None
    device: str
    memory_bytes: int
    batch: int
    unplanned_peak_bytes: int
    step_seconds: float
    priced: str
    constraint: str
    verdict: str
    options: tuple[Option, ...]
    floor: Floor | None
    levers: tuple[Lever, ...]
    rates: tuple[Rate, ...]
    growth: Growth
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether there is any way to take the step within the memory."""
        return bool(self.options)

    @property
    def best_rate(self) -> Rate | None:
        """The batch size of most samples per second."""
        return max(self.rates, key=lambda r: r.samples_per_second, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; plans as `Plan.to_dict` gives them."""
        plain = {"schema_version": SCHEMA_VERSION, "fits": self.fits} | asdict(self)
        plain["options"] = [
            asdict(o) | {"plan": None if o.plan is None else o.plan.to_dict()} for o in self.options
        ]  # fmt: skip
        plain["best_batch"] = None if self.best_rate is None else self.best_rate.batch
        return plain

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        from holdover.report.advice_view import advice_view
        from holdover.report.text import render

        return render(advice_view(self))
