"""Why a tensor is held over to backward, what it would save at the peak to drop it, and what that would cost."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from holdover.memory.estimate import peak_of, workspaces
from holdover.memory.life import Fate, Life, lives_of, name_of
from holdover.memory.simulate import simulate
from holdover.memory.timeline import NOTHING, Choices, Timeline
from holdover.planning.address import find
from holdover.planning.api import priced_problem, same_places
from holdover.planning.choices import choices_of
from holdover.planning.plan import Plan
from holdover.planning.steps import Recorded
from holdover.trace.graph import EXISTING, Phase
from holdover.units import format_bytes, format_share

MOST_OPS = 40
"""Of a module that makes more, the largest are explained one by one."""


@dataclass(frozen=True)
class Effect:
    """What dropping the results of some ops does to the step: its peak before and after, and the replays' time."""

    dropped: int
    peak_before_bytes: int
    peak_after_bytes: int
    seconds: float
    extra_time: float  # as a fraction of the step
    replays: int

    @property
    def saved_bytes(self) -> int:
        """By how much the peak falls."""
        return self.peak_before_bytes - self.peak_after_bytes


@dataclass(frozen=True)
class Needed:
    """An argument of the op that would run again, and how it comes to be there in backward."""

    name: str
    op: str
    nbytes: int
    how: str


@dataclass(frozen=True)
class Planned:
    """What a plan does with a value, and why."""

    fate: Fate
    why: str
    life: Life
    peak_bytes: int


@dataclass(frozen=True)
class Explanation:
    """All about one value.

    Attributes:
        life: its life in the step as it is.
        why_saved: for each op whose backward reads it: that op, its module, and the backward op.
        obstacle: why it cannot be dropped; "" where it can.
        at_peak: whether it is in memory when the step's memory is highest.
        alone: what dropping just this one would do; None where it cannot be dropped.
        alike: what dropping it and its twins in all like modules would do; None where there are no twins.
        with_it: ops that would run again too, since what they make for it is not kept otherwise.
        needs: what the recomputation reads.
        planned: what the plan does, where one was given.
    """

    life: Life
    why_saved: tuple[str, ...]
    obstacle: str
    at_peak: bool
    alone: Effect | None
    alike: Effect | None
    with_it: tuple[str, ...]
    needs: tuple[Needed, ...]
    planned: Planned | None = None


@dataclass(frozen=True)
class Account:
    """The answer to `holdover explain`: one value, or all that a module makes and autograd saves.

    Attributes:
        target: the name that was asked for.
        model, inputs: the step.
        unplanned_peak_bytes, peak_at: the step's own peak and where it is.
        step_seconds, priced: the step's own time, and how ops were priced.
        held: how many values it keeps for backward, and their bytes; `explanations` are of the largest only, if many.
        together: what dropping all of `explanations` would do, where there are several.
        plan: the plan that was asked about.
        phases: the step's phases in order, each with the position of its first op.
    """

    target: str
    model: str
    inputs: str
    unplanned_peak_bytes: int
    peak_at: str
    peak_position: int
    step_seconds: float
    priced: str
    phases: tuple[tuple[str, int], ...]
    held: tuple[int, int]
    explanations: tuple[Explanation, ...]
    together: Effect | None = None
    plan: Plan | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; of the plan only its promise."""
        plain = asdict(self)
        plan = self.plan
        plain["plan"] = None if plan is None else {
            "budget_bytes": plan.budget_bytes, "predicted_peak_bytes": plan.predicted_peak_bytes,
            "extra_time": plan.extra_time,
        }  # fmt: skip
        return plain

    def __str__(self) -> str:
        from holdover.report.explain_view import explain_view
        from holdover.report.text import render

        return render(explain_view(self))


def explain_of(step: Recorded, target: str, *, plan: Plan | None = None) -> Account:
    """Explain a tensor or a module of a recorded step.

    Args:
        step: as `planning.steps.recorded` gives it.
        target: a name as `planning.address.find` takes it.
        plan: also say what this plan does, and why.

    Raises:
        HoldoverError: there is no such tensor or module; says what is near.

    >>> import torch
    >>> from torch.nn import GELU, Linear, Sequential
    >>> from holdover.planning.steps import recorded
    >>> step = recorded(Sequential(Linear(8, 64), GELU(), Linear(64, 8), GELU()), (torch.ones(1000, 8),))
    >>> (found,) = explain_of(step, "1:gelu").explanations
    >>> found.why_saved
    ('aten.mm.default, for the gradient of aten.addmm.default in 2',)
    >>> [(need.name, need.how) for need in found.needs]
    [('0:0', 'kept for a backward of its own')]
    """
    return _Explainer(step, plan).account(target)


class _Explainer:
    def __init__(self, step: Recorded, plan: Plan | None) -> None:
        trace = self.trace = step.trace
        self.plan = plan
        self.with_loss = plan is not None and plan.with_loss
        self.workspace, _ = workspaces(trace)
        self.problem, self.priced = priced_problem(trace, self.workspace, with_loss=self.with_loss, card=step.card)
        self.everywhere = same_places(self.problem)
        self.plain = simulate(trace, workspace=self.workspace)
        self.chosen = choices_of(trace, plan) if plan is not None else NOTHING
        self.eligible = frozenset(self.problem.eligible)
        self.saved = {slot.value for slot in trace.slots}

    def account(self, target: str) -> Account:
        trace = self.trace
        values = find(trace, target)
        lives = lives_of(trace, values)
        planned = lives_of(trace, values, self.chosen) if self.plan is not None else {}
        peak = peak_of(trace, self.plain)
        largest = self.largest(lives.values())
        explanations = tuple(self.explain(life, planned.get(v)) for v, life in lives.items() if life.op in largest)
        droppable = {o for life in lives.values() if life.op in self.eligible for o in self.chain(life.op)}
        last = trace.last_step
        ops = [op for op in trace.ops if op.step == last]
        phases = {op.phase.value: op.id - ops[0].id for op in reversed(ops)}
        return Account(
            target, trace.model, trace.inputs, self.plain.peak_bytes,
            peak.place, self.plain.peak_op - ops[0].id, self.problem.step_seconds, self.priced,
            tuple(sorted(phases.items(), key=lambda item: item[1])),
            (len(lives), sum(life.nbytes for life in lives.values())), explanations,
            self.effect(droppable) if len(explanations) > 1 and droppable else None, self.plan,
        )  # fmt: skip

    def largest(self, lives: Iterable[Life]) -> set[int]:
        sizes: dict[int, int] = defaultdict(int)
        for life in lives:
            sizes[life.op] += life.nbytes
        return set(sorted(sizes, key=lambda o: -sizes[o])[:MOST_OPS])

    def explain(self, life: Life, planned: Life | None) -> Explanation:
        obstacle = self.obstacle(life)
        readers = dict.fromkeys(
            f"{read.name}, for the gradient of {self.told(read.of)}" if read.of >= 0 else read.name
            for read in life.reads
        )
        chain = self.chain(life.op) if not obstacle else []
        twins = self.twins(life.op) if not obstacle else []
        return Explanation(
            life, tuple(readers), obstacle, life.storage in self.plain.at_peak,
            self.effect(chain) if chain else None,
            self.effect(o for twin in twins for o in self.chain(twin)) if len(twins) > 1 else None,
            tuple(self.told(o) for o in chain[:-1]),
            tuple(self.needs(chain)), self.planned(planned) if planned is not None and not obstacle else None,
        )  # fmt: skip

    def told(self, number: int) -> str:
        op = self.trace.ops[number]
        return f"{op.name} in {self.trace.calls[op.call].path or 'the model itself'}"

    def chain(self, number: int) -> list[int]:
        """The op and those before it whose results are kept for nothing else, so that they would run again with it."""
        found = {number}
        stack = [number]
        while stack:
            for v in self.trace.ops[stack.pop()].inputs:
                maker = self.trace.values[v].maker
                if maker in self.eligible and maker not in found and v not in self.saved:
                    found.add(maker)
                    stack.append(maker)
        return sorted(found)

    def obstacle(self, life: Life) -> str:
        """Why no plan can drop it."""
        trace = self.trace
        if life.op < 0:
            kind = trace.storages[life.storage].category.value
            return f"it is a {kind}, there before the step and after it"
        op = trace.ops[life.op]
        if life.op in self.eligible:
            return "" if life.value in self.saved else "backward does not read it, so it is not kept in the first place"
        if op.keep:
            return f"its op cannot be run again: {op.keep}"
        escapes = [trace.values[v].escapes for v in (*op.inputs, *op.outputs) if trace.values[v].escapes]
        if escapes:
            return f"its memory may be read or written unseen: {escapes[0]}"
        if op.phase is Phase.LOSS or not trace.calls[op.call].key:
            return "it is made by the loss, outside the model: only a plan made with with_loss=True reaches it"
        return "backward reads neither it nor anything made from it again"

    def effect(self, ops: Iterable[int], base: Choices = NOTHING, *, keep: bool = False) -> Effect:
        """Drop the results of some ops of the last step (or keep them), beside what `base` does."""
        chosen = sorted(set(ops))
        everywhere = frozenset(n for o in chosen for n in self.everywhere[o])
        recompute = base.recompute - everywhere if keep else base.recompute | everywhere
        made = {v for o in recompute for v in self.trace.ops[o].outputs}
        pack = {v: n for v, n in base.pack.items() if v not in made}
        before = self.simulated(base)
        after = self.simulated(Choices(recompute, pack, self.with_loss, base.stages))
        seconds = self.problem.replay_seconds(after) - self.problem.replay_seconds(before)
        dropped = sum(any(v in self.saved for v in self.trace.ops[o].outputs) for o in chosen)
        replays = sum(n for o, n in after.replays.items() if o in self.problem.positions)
        share = seconds / max(self.problem.step_seconds, 1e-12)
        return Effect(dropped, before.peak_bytes, after.peak_bytes, seconds, share, replays)

    def simulated(self, choices: Choices) -> Timeline:
        if choices is NOTHING:
            return self.plain
        return simulate(self.trace, choices, self.workspace, detail=False)

    def twins(self, op: int) -> list[int]:
        """The same op of all modules that are called alike but for a number in their names."""
        kind = self.kind(op)
        return [o for o in self.problem.eligible if self.kind(o) == kind]

    def kind(self, op: int) -> tuple[str, int, str]:
        made = self.trace.ops[op]
        return re.sub(r"(?<=[./])\d+(?=[./]|$)", "*", self.trace.calls[made.call].key), made.index, made.name

    def needs(self, chain: Iterable[int]) -> Iterable[Needed]:
        """What the replay of a chain of ops reads from outside it."""
        trace, ops = self.trace, set(chain)
        for v in dict.fromkeys(v for o in ops for v in trace.ops[o].inputs if trace.values[v].maker not in ops):
            value = trace.values[v]
            storage = trace.storages[value.storage]
            maker = trace.ops[value.maker].name if value.maker >= 0 else ""
            if storage.category in EXISTING:
                how = f"there anyway ({storage.category.value})"
            elif value.maker in self.chosen.recompute:
                how = "dropped by the plan, made again in turn"
            elif v in self.saved:
                how = "kept for a backward of its own"
            else:
                how = "not kept otherwise, and cannot be made again: would be held for this"
            yield Needed(name_of(trace, v), maker, storage.nbytes, how)

    def planned(self, life: Life) -> Planned:
        assert self.plan is not None
        return Planned(life.fate, self.why(life), life, self.plan.predicted_peak_bytes)

    def why(self, life: Life) -> str:
        """Why the plan keeps or drops it: what the other choice would do to the plan."""
        assert self.plan is not None
        plan, chosen = self.plan, self.chosen
        if life.fate is Fate.PACKED:
            return "packed without loss: smaller than keeping it, and cheaper than making it again"
        kept = life.fate is not Fate.DROPPED
        other = self.effect(self.chain(life.op) if kept else [life.op], chosen, keep=not kept)
        peak, time = format_bytes(other.peak_after_bytes), format_share(abs(other.extra_time))
        limit = plan.predicted_peak_bytes
        if plan.budget_bytes is not None and plan.budget_kind == "allocated":
            limit = plan.budget_bytes  # else it is for what a card's allocator reserves
        if not kept:
            if other.peak_after_bytes > limit:
                return (
                    f"kept, the peak would be {peak}, above {format_bytes(limit)}; dropping it costs {time} of the step"
                )
            return f"kept, the peak would be {peak}, which still fits; others are made again through it"
        if not plan.choices:
            return "the step fits as it is: nothing is dropped"
        if other.saved_bytes <= 0:
            return f"dropping it as well would not lower the plan's peak of {format_bytes(other.peak_before_bytes)}"
        gain = format_bytes(other.saved_bytes)
        return f"the budget is met without: dropping it too would lower the peak by {gain} for {time} of the step"
