"""`holdover.advise`: with so much memory, what to do with this training step, and what each way costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypedDict

import torch

from holdover.cost.measured import price
from holdover.cost.roofline import modelled
from holdover.errors import BudgetError, UnitError
from holdover.memory.estimate import workspaces
from holdover.planning.advice import ACCUMULATE, AS_IS, BOTH, RECOMPUTE, SMALLER, Advice, Floor, Growth, Option, Rate
from holdover.planning.api import priced_problem
from holdover.planning.batch import Batches, Subject, is_linear, scale_of
from holdover.planning.choices import choices_of
from holdover.planning.levers import Lever, levers, loss_bytes
from holdover.planning.plan import Plan
from holdover.planning.steps import Recorded
from holdover.trace.graph import Phase
from holdover.trace.record import Loss
from holdover.trace.step import OptimizerSpec
from holdover.units import checked_seconds, format_bytes, format_share, parse_bytes

PLANNED_RATES = 4
"""Batch sizes above the largest that fits for which a plan is made."""

MOST_SECONDS = 5.0
"""Batch sizes whose step takes longer on this machine are not timed."""

NO_HELP = 0.99
"""A floor above this share of the step's own peak is no help."""

Say = Callable[[str], None]


class Recordings(TypedDict):
    """What of a `Growth` is known only when all recordings have been made."""

    peaks: tuple[tuple[int, int], ...]
    linear: bool


def advise(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory: int | str,
    loss: Loss | None = None,
    optimizer: OptimizerSpec = None,
    precision: str | None = None,
    device: str | None = None,
    time_limit: float = 30.0,
) -> Advice:
    """Say which constraint is the tighter one, memory or time, and what follows: never one cost without the other.

    The step is recorded at several batch sizes: dimension 0 of every argument that shares it grows, and so do tensors
    in the loss's closure.

    Args:
        model, args, kwargs, loss, optimizer, precision, device: the training step, as for `holdover.plan`.
        memory: bytes that there are for the step, or "24GiB"; on a card, for the whole process.
        time_limit: seconds that the solver may take for one plan, about; some ten plans are made at most.

    Raises:
        UnitError: the memory or the time limit cannot be read.
        TraceError: the step fails, or gives no loss.
        DeviceError: an unknown device.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    >>> advice = advise(model, (torch.ones(100, 8),), memory="1MiB")
    >>> advice.constraint, advice.options[0].kind, advice.options[0].extra_time
    ('time', 'store everything', 0.0)
    >>> advice.growth.linear, advice.growth.largest > 100
    (True, True)
    """
    checked_seconds(time_limit)
    subject = Subject(model, tuple(args), dict(kwargs or {}), loss, optimizer, precision, device)
    return advice_for(subject, parse_bytes(memory), time_limit=time_limit)


def advice_for(subject: Subject, memory_bytes: int, *, time_limit: float = 30.0, say: Say = lambda _: None) -> Advice:
    """The same, for a step whose parts are together; `say` is told before each recording and plan."""
    if memory_bytes <= 0:
        raise UnitError("memory of 0 bytes makes no sense: give what the device has, such as 24GiB")
    return _Adviser(subject, memory_bytes, time_limit, say).advice()


class _Adviser:
    def __init__(self, subject: Subject, memory_bytes: int, time_limit: float, say: Say) -> None:
        self.memory, self.time_limit, self.say = memory_bytes, time_limit, say
        self.scale = scale_of(subject)
        self.batches = Batches(subject, self.scale, lambda what: say(f"recording {what}"))
        self.notes: list[str] = []
        self._seconds: dict[int, tuple[float, float]] = {}
        self._plans: dict[tuple[int, int | str], Plan | BudgetError] = {}
        say("recording the step")
        self.need = self.batches.given()
        self.priced = self.seconds(self.need.step)[2]

    # -- facts ----------------------------------------------------------------------------------------------------

    def seconds(self, step: Recorded) -> tuple[float, float, str]:
        """Of a recorded step: forward and backward, the optimizer's step, and how they were priced."""
        trace = step.trace
        workspace, _ = workspaces(trace)
        problem, priced = priced_problem(trace, workspace, with_loss=False, card=step.card)
        device = trace.device
        costs = (
            modelled(trace.signatures, step.card) if step.card is not None else price(trace.signatures, device=device)
        )
        last = trace.last_step
        each = [(op.phase, costs[op.signature].seconds) for op in trace.ops if op.step == last]
        total = sum(s for _, s in each) or 1e-12
        share = sum(s for phase, s in each if phase is Phase.OPTIMIZER) / total
        return problem.step_seconds * (1 - share), problem.step_seconds * share, priced

    def times(self, batch: int) -> tuple[float, float]:
        """Seconds of forward and backward, and of the optimizer, at a batch size that was recorded."""
        if batch not in self._seconds:
            need = self.batches.at(batch)
            assert need is not None
            self._seconds[batch] = self.seconds(need.step)[:2]
        return self._seconds[batch]

    def plan(self, batch: int, budget: int | str) -> Plan | None:
        """The plan for a batch size; None below its floor."""
        key = batch, budget
        if key not in self._plans:
            need = self.batches.at(batch)
            assert need is not None
            told = "the lowest peak" if isinstance(budget, str) else format_bytes(budget)
            self.say(f"planning batch {batch} for {told}" if batch else f"planning for {told}")
            try:
                self._plans[key] = need.step.plan(budget, time_limit=self.time_limit)
            except BudgetError as error:
                self._plans[key] = error
        found = self._plans[key]
        return found if isinstance(found, Plan) else None

    def peak(self, plan: Plan, step: Recorded) -> int:
        """What a plan takes, on a card of the whole process."""
        if step.card is None or plan.reserved_bytes is None:
            return plan.predicted_peak_bytes
        return plan.reserved_bytes + step.card.context_bytes[1]

    # -- the branches ---------------------------------------------------------------------------------------------

    def advice(self) -> Advice:
        fits = self.need.peak_bytes <= self.memory
        growth = self.growth()
        options = self.options(fits, growth)
        floor, found = (None, ()) if fits else self.floor()
        rates = self.rates(growth, options)
        growth = replace(growth, **self.recorded())  # options, the floor and rates recorded more of them
        trace = self.need.step.trace
        return Advice(
            model=trace.model, inputs=trace.inputs, optimizer=trace.optimizer, precision=self.need.step.precision,
            device=self.need.step.card.name if self.need.step.card else trace.device,
            memory_bytes=self.memory, batch=self.scale.batch, unplanned_peak_bytes=self.need.peak_bytes,
            step_seconds=sum(self.times(self.scale.batch)), priced=self.priced,
            constraint="time" if fits else "memory", verdict=self.verdict(fits, growth, options, floor),
            options=options, floor=floor, levers=found, rates=rates, growth=growth, notes=(*trace.notes, *self.notes),
        )  # fmt: skip

    def growth(self) -> Growth:
        """Find the largest batches that fit without a plan."""
        if not self.scale.batch:
            return Growth(
                (), (), ((0, self.need.peak_bytes),), False, None, None, reason="no argument of the model is a tensor"
            )
        largest = self.batches.largest(self.memory, lambda need: need.peak_bytes)
        accumulating = self.batches.largest(self.memory, lambda need: need.accumulating_bytes)
        limit = reason = ""
        if len(self.batches.known()) == 1 and self.batches.reason:
            reason = f"the step cannot be recorded at another batch size: {self.batches.reason}"
        elif largest + 1 >= self.batches.most:
            limit = "larger ones were not tried"
        elif largest and self.batches.at(largest + 1) is None:
            limit = f"a larger one cannot be recorded: {self.batches.reason}"
        return Growth(
            self.scale.scaled, self.scale.fixed, largest=None if reason else largest,
            largest_accumulating=None if reason else accumulating, limit=limit, reason=reason, **self.recorded(),
        )  # fmt: skip

    def recorded(self) -> Recordings:
        """The peaks of all batch sizes that were recorded so far."""
        peaks = {b: n.peak_bytes for b, n in self.batches.known().items()}
        return {"peaks": tuple(peaks.items()), "linear": is_linear(peaks)}

    def options(self, fits: bool, growth: Growth) -> tuple[Option, ...]:
        """The ways to take the whole batch, quickest first."""
        batch = self.scale.batch
        plain = sum(self.times(batch))
        if fits:
            return (Option(AS_IS, batch, 1, self.need.peak_bytes, plain, 0.0),)
        found = []
        plan = self.plan(batch, self.memory)
        if plan is not None:
            seconds = plain + plan.extra_time * plan.step_seconds
            found.append(
                Option(RECOMPUTE, batch, 1, self.peak(plan, self.need.step), seconds, seconds / plain - 1, plan)
            )
        micro = growth.largest_accumulating or 0
        if 0 < micro < batch:
            steps = -(-batch // micro)
            found.append(self.accumulated(-(-batch // steps), steps, None))
        if not found:
            found += self.both()
        if not found and growth.largest:
            need = self.batches.at(growth.largest)
            assert need is not None
            seconds = sum(self.times(growth.largest))
            extra = seconds / growth.largest / (plain / batch) - 1
            found.append(Option(SMALLER, growth.largest, 1, need.peak_bytes, seconds, extra))
        return tuple(sorted(found, key=lambda o: o.seconds))

    def accumulated(self, micro: int, steps: int, plan: Plan | None) -> Option:
        need = self.batches.at(micro)
        assert need is not None
        forward_backward, optimizer = self.times(micro)
        peak = need.accumulating_bytes
        if plan is not None:
            forward_backward += plan.extra_time * plan.step_seconds
            peak = self.peak(plan, need.step) + need.accumulating_bytes - need.peak_bytes
        seconds = steps * forward_backward + optimizer
        plain = sum(self.times(self.scale.batch))
        return Option(ACCUMULATE if plan is None else BOTH, micro, steps, peak, seconds, seconds / plain - 1, plan)

    def both(self) -> list[Option]:
        """A smaller batch that fits with a plan, where neither does it alone."""
        micro = self.scale.batch
        while micro > 1:
            micro = (micro + 1) // 2
            need = self.batches.at(micro)
            if need is None:
                return []
            room = self.memory - (need.accumulating_bytes - need.peak_bytes)
            plan = self.plan(micro, room) if room > 0 else None
            if plan is not None:
                return [self.accumulated(micro, -(-self.scale.batch // micro), plan)]
        return []

    def floor(self) -> tuple[Floor | None, tuple[Lever, ...]]:
        """The lowest peak at the given batch, what it is made of, and what else would lower it."""
        plan = self.plan(self.scale.batch, "min")
        if plan is None:
            return None, ()
        step = self.need.step
        choices = choices_of(step.trace, plan)
        peak = self.peak(plan, step)
        helps = peak < NO_HELP * self.need.peak_bytes
        parts = {name: n for name, n in plan.peak_parts.items() if n}
        if peak > plan.predicted_peak_bytes:
            parts["context and allocator"] = peak - plan.predicted_peak_bytes
        logits = loss_bytes(step.trace, choices)
        floor = Floor(
            peak, plan.extra_time, plan.peak_at, tuple(sorted(parts.items(), key=lambda p: -p[1])), logits, helps,
            self.why_no_lower(plan, logits),
        )  # fmt: skip
        found = levers(step, choices, peak)
        half = self.halved(peak)
        if half is not None and half.peak_after_bytes < half.peak_before_bytes:
            found.append(half)
        return floor, tuple(sorted(found, key=lambda x: x.peak_after_bytes))

    def why_no_lower(self, plan: Plan, logits: int) -> str:
        parts = plan.peak_parts
        held = sum(parts.get(name, 0) for name in ("parameter", "buffer", "gradient", "optimizer"))
        if plan.peak_at.startswith(Phase.OPTIMIZER.value):
            return "it stands in the optimizer's step, where nothing that recomputation could drop is held"
        if 2 * logits > plan.predicted_peak_bytes - held:
            return "it stands where the logits and their gradients are, which no plan for the model can drop"
        if 2 * held > plan.predicted_peak_bytes:
            return "weights, gradients and optimizer state are most of it, and recomputation touches none of them"
        return "what is left is what one layer needs at once"

    def halved(self, peak: int) -> Lever | None:
        """The lever that is recorded rather than modelled: half the batch at a time."""
        half = (self.scale.batch + 1) // 2
        need = self.batches.at(half) if self.scale.batch > 1 else None
        plan = self.plan(half, "min") if need is not None else None
        if need is None or plan is None:
            return None
        option = self.accumulated(half, 2, plan)
        time = format_share(option.extra_time, sign=True)
        price = f"accumulation in two micro-steps: {time} time, recomputation included"
        return Lever(f"half the batch at once ({half})", peak, option.peak_bytes, "recorded", price)

    def rates(self, growth: Growth, options: tuple[Option, ...]) -> tuple[Rate, ...]:
        """Samples per second: of batches that fit as they are, and of larger ones with the cheapest plan that fits."""
        if not self.scale.batch or not options:
            return ()
        largest = growth.largest or 0
        plain = {b for b in (largest // 4, largest // 2, largest) if b}
        slow = {b for b in plain if not self.quick(b)}
        if self.need.peak_bytes <= self.memory:
            plain.add(self.scale.batch)
            plain |= {self.scale.batch * n for n in (4, 16)} if slow else set()
        plain = {b for b in plain if b <= max(largest, self.scale.batch) and (self.quick(b) or b == self.scale.batch)}
        found = {b: self.rate(b, None) for b in sorted(plain) if self.batches.at(b) is not None}
        batch = max(largest, 1)
        grow = [-(-batch * 3 // 2), batch * 2, batch * 3, batch * 4] if largest else [1, 2, 4, 8]
        for b in sorted({*grow[:PLANNED_RATES], *({self.scale.batch} if self.need.peak_bytes > self.memory else ())}):
            if not self.quick(b):
                slow.add(b)
            if growth.reason or growth.limit or b in slow or self.batches.at(b) is None:
                continue
            plan = self.plan(b, self.memory)
            if plan is None:
                break
            found[b] = self.rate(b, plan)
        if slow:
            self.notes.append(
                f"Batches from {min(slow):,} on would take more than {MOST_SECONDS:.0f} s for a step here, and were "
                "not timed."
            )
        return tuple(found[b] for b in sorted(found))

    def quick(self, batch: int) -> bool:
        """Whether a step at this batch size would be timed soon enough: on a card that is not here it is modelled."""
        at_once = sum(self.times(self.scale.batch)) * batch / self.scale.batch
        return self.need.step.card is not None or at_once <= MOST_SECONDS

    def rate(self, batch: int, plan: Plan | None) -> Rate:
        need = self.batches.at(batch)
        assert need is not None
        plain = sum(self.times(batch))
        seconds = plain + (plan.extra_time * plan.step_seconds if plan is not None else 0.0)
        peak = need.peak_bytes if plan is None else self.peak(plan, need.step)
        return Rate(batch, peak, seconds / plain - 1, seconds, batch / seconds)

    def verdict(self, fits: bool, growth: Growth, options: tuple[Option, ...], floor: Floor | None) -> str:
        if fits:
            left = format_bytes(self.memory - self.need.peak_bytes)
            more = f", enough for batch {growth.largest:,}" if growth.largest else ""
            more += f" ({growth.limit})" if growth.limit else ""
            return f"It fits as it is: store everything, 0 % extra time. {left} are left{more}."
        over = format_bytes(self.need.peak_bytes - self.memory)
        if not options:
            lowest = (
                f"; the lowest peak that recomputation reaches is {format_bytes(floor.peak_bytes)}" if floor else ""
            )
            return f"Nothing fits: the step takes {over} more than there is{lowest}, and no smaller batch fits either."
        if options[0].kind == SMALLER:
            return (
                f"It takes {over} more than there is, and neither recomputation nor accumulation makes it fit. "
                f"What fits: {_told(options[0])}."
            )
        ways = " or ".join(_told(o) for o in options)
        return f"It takes {over} more than there is. What fits: {ways}."


def _told(option: Option) -> str:
    time = f"{format_share(option.extra_time, sign=True)} time, peak {format_bytes(option.peak_bytes)}"
    times = f"{option.micro_steps} times batch {option.micro_batch:,}"
    return {
        RECOMPUTE: f"recomputation ({time})",
        ACCUMULATE: f"accumulation, {times} without recomputation ({time})",
        SMALLER: f"training with batch {option.micro_batch:,} ({time}; the time is per sample)",
        BOTH: f"both accumulation, {times}, and recomputation ({time})",
    }[option.kind]
