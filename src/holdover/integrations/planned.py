"""Plans for steps under torch.compile: the problem of `holdover.planning`, on the ops of the compiler's graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from holdover.cost.measured import price
from holdover.errors import ApplyError, PlanError, TraceError
from holdover.integrations._torch import inductor_config
from holdover.integrations.capture import GRAPH, Recording, capture
from holdover.integrations.compile import script_of
from holdover.memory.estimate import peak_of, workspaces
from holdover.memory.simulate import simulate
from holdover.memory.workspace import true_outputs
from holdover.planning import milp
from holdover.planning.api import below_floor
from holdover.planning.bound import bound_seconds
from holdover.planning.describe import described
from holdover.planning.plan import RECOMPUTE, Choice, Plan
from holdover.planning.problem import Problem, build
from holdover.planning.search import Candidate, Search
from holdover.recompute.apply import installation_of
from holdover.trace.graph import Category, Phase
from holdover.trace.record import Loss
from holdover.trace.step import OptimizerSpec

BACKENDS = ("inductor", "aot_eager")
TRIES = 4
"""How often a budget is aimed at lower, because the compiled step that follows the plan was over it."""
NEAR = 0.005
"""If the lowest plan, followed, is this far above what the search expected of it, others are looked at."""
INDUCTOR_MARGIN = 0.07
"""Small transformers, compiled whole, were up to 6.6 % above the simulated peak under Inductor."""


def plan_compiled(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, *, budget: int | float | str,
    backend: str, loss: Loss | None, optimizer: OptimizerSpec, precision: str | None, device: torch.device | None,
    with_loss: bool, time_limit: float,
) -> Plan:  # fmt: skip
    """`holdover.plan` for a step that `backend` compiles; `budget` as `units.parse_budget` returns it.

    Raises:
        PlanError: an unknown backend, or a plan that is to reach into the loss.
        ApplyError: the model follows a plan for eager mode.
        TraceError: nothing of the step is compiled into a graph with a backward.
        BudgetError: as for `holdover.plan`.
    """
    if backend not in BACKENDS:
        raise PlanError(f"compiled={backend!r}: plans are made for the backends {', '.join(BACKENDS)}.")
    if with_loss:
        raise PlanError(
            "with_loss=True plans the loss's own ops, and under the compiler a plan reaches only what is compiled: "
            "put the loss into the module that is compiled instead."
        )
    if installation_of(model) is not None:
        raise ApplyError(
            f"this {type(model).__name__} follows a plan for eager mode, which torch.compile would not see: "
            "take it off with holdover.remove_(model) first"
        )
    again = partial(
        capture, model, args, kwargs, backend=backend, loss=loss, optimizer=optimizer, precision=precision,
        device=device, corrections=true_outputs,
    )  # fmt: skip
    recording = again()
    if not recording.graphs:
        raise TraceError(
            f"torch.compile made no graph with a backward of this {type(model).__name__}: there is nothing to plan. "
            "Frozen parameters, a graph break at every op or torch.compiler.disable may be why."
        )
    number_graphs(recording)
    return _solved(recording, again, budget, backend, precision, time_limit)


def number_graphs(recording: Recording) -> None:
    """Call graphs what people can read, in the order in which they come: "graph 0". Their keys stay fingerprints."""
    names = {f"{GRAPH}{fingerprint}": f"graph {n}" for n, fingerprint in enumerate(recording.graphs)}
    for i, call in enumerate(recording.trace.calls):
        recording.trace.calls[i] = replace(call, path=names.get(call.key, call.path))


def _solved(
    recording: Recording, again: Callable[..., Recording], budget: int | float | str, backend: str,
    precision: str | None, time_limit: float,
) -> Plan:  # fmt: skip
    workspace, unknown = workspaces(recording.trace)
    problem, priced = _priced(recording, workspace)
    search = GraphSearch(problem, workspace, same_places(problem), seconds=time_limit / 3)
    plain = search.judge(())
    limit = None if budget == "min" else int(plain.peak_bytes * budget) if isinstance(budget, float) else int(budget)
    fits = limit is not None and plain.peak_bytes <= limit
    floor = search.lowest()
    least = 0.0 if fits else bound_seconds(problem, limit if limit is not None else floor.peak_bytes)

    def planned(best: Candidate) -> Plan:
        plan = described(search, best, plain, floor, limit, least, priced=priced, precision=precision, unknown=unknown)
        choices = dict.fromkeys([*plan.choices, *_inline(recording, best)])
        notes = (*plan.notes, *_graph_notes(recording), *_layout_notes(recording, backend))
        return replace(
            plan, choices=tuple(choices), quiet=(), compiled=backend, regions=recording.regions, notes=notes
        )  # fmt: skip

    if fits:
        return planned(plain)
    promises = Promises(search, planned, again)
    found = promises.within(limit, floor, least) if limit is not None else None
    if found is not None:
        return found
    lowest = promises.lowest(floor)
    if limit is not None and lowest.predicted_peak_bytes > limit:
        raise below_floor(search, replace(floor, peak_bytes=lowest.predicted_peak_bytes), plain, limit)
    return lowest


@dataclass
class Promises:
    """Plans that promise what is in memory when the compiler follows them.

    The search knows the graphs as they are without a plan. What the partitioner makes of a plan, in which order and
    with which copies, is seen by compiling and recording the step once more with the plan in it. What Inductor then
    fuses is not to be seen: on a whole model its promise has a margin instead.
    """

    search: GraphSearch
    planned: Callable[[Candidate], Plan]
    again: Callable[..., Recording]

    def of(self, best: Candidate) -> Plan:
        """The plan that `best` is, with the peak of the step that follows it."""
        plan = self.planned(self.search.judge(self.search.closed(best.recorded)))
        if plan.compiled == "inductor":
            return with_margin(plan)
        recording = self.again(names=plan.regions, script=script_of(plan))
        number_graphs(recording)
        workspace, _ = workspaces(recording.trace)
        peak = peak_of(recording.trace, simulate(recording.trace, workspace=workspace))
        return replace(
            plan, predicted_peak_bytes=peak.nbytes, peak_at=peak.place,
            peak_parts={kind.value: nbytes for kind, nbytes in peak.parts.items()},
        )  # fmt: skip

    def within(self, limit: int, floor: Candidate, least: float) -> Plan | None:
        """The cheapest plan found that promises at most `limit` bytes."""
        aim = limit
        for _ in range(TRIES):
            if aim < floor.peak_bytes:
                break
            plan = self.of(self.search.cheapest(aim, floor, least))
            if plan.predicted_peak_bytes <= limit:
                return plan
            aim -= plan.predicted_peak_bytes - limit
        return None

    def lowest(self, floor: Candidate) -> Plan:
        """The plan that promises the lowest peak found."""
        best = self.of(floor)
        above = best.predicted_peak_bytes - floor.peak_bytes
        if best.compiled != "inductor" and above > NEAR * floor.peak_bytes:
            aims = (floor.peak_bytes + above // 3, floor.peak_bytes + 2 * above // 3)
            others = [self.of(self.search.cheapest(aim, floor, 0.0)) for aim in aims]
            best = min([best, *others], key=lambda plan: plan.predicted_peak_bytes)
        return replace(best, floor_bytes=best.predicted_peak_bytes)


def with_margin(plan: Plan) -> Plan:
    """The same, promising so much more as Inductor may hold longer in the graph of a whole model."""
    if plan.regions != ("",) or not plan.choices:
        return plan
    more = int(INDUCTOR_MARGIN * plan.predicted_peak_bytes)
    parts = {**plan.peak_parts, Category.TEMPORARY.value: plan.peak_parts.get(Category.TEMPORARY.value, 0) + more}
    note = (
        f"Inductor fuses what is made again in a whole model with what reads it later. {INDUCTOR_MARGIN:.0%} of the "
        "peak are added for what it then holds longer; blocks that are compiled by themselves need no margin."
    )
    return replace(
        plan, predicted_peak_bytes=plan.predicted_peak_bytes + more, peak_parts=parts, notes=(*plan.notes, note),
        floor_bytes=plan.floor_bytes + int(INDUCTOR_MARGIN * plan.floor_bytes),
    )  # fmt: skip


def _inline(recording: Recording, best: Candidate) -> list[Choice]:
    """What runs again inside the kernels of what runs again."""
    trace = recording.trace
    ops = [trace.ops[f] for o in sorted(best.recorded) for f in sorted(recording.inline.get(o, ()))]
    return [Choice(trace.calls[op.call].key, op.index, op.name, RECOMPUTE) for op in ops]


def _graph_notes(recording: Recording) -> list[str]:
    graphs = recording.graphs
    if list(graphs.values()) == [1]:
        return []
    numbers = enumerate(graphs.values())
    calls = ", ".join(f"graph {n} ({number} calls)" if number > 1 else f"graph {n}" for n, number in numbers)
    counted = f"{len(graphs)} compiled graph{'s' * (len(graphs) > 1)}"
    return [f"{counted}: {calls}. Calls of one graph share its choices."]


def _layout_notes(recording: Recording, backend: str) -> list[str]:
    """Inductor decides on the layout of what convolutions read and make when it generates code, after the partition."""
    convolved = any(op.name == "aten.convolution.default" for op in recording.trace.ops)
    if backend != "inductor" or not convolved or not inductor_config.layout_optimization:
        return []
    return [
        "Inductor lays out anew what convolutions read and make, after the plan. Copies of what blocks read are "
        "counted; ResNet-18 held 3 % more than was promised. Measure it with holdover.verify, or set "
        "torch._inductor.config.layout_optimization = False, which keeps the promise."
    ]


def _priced(recording: Recording, workspace: Mapping[int, int]) -> tuple[Problem, str]:
    """The problem with each op's cost on this machine; what is computed inside another op's kernel is free."""
    trace = recording.trace
    replayed = {op.signature for op in trace.ops if op.phase is Phase.FORWARD and not op.keep}
    device = trace.device
    costs = price(trace.signatures, device=device, replayed=replayed)
    problem = build(trace, {i: c.seconds for i, c in enumerate(costs)}, workspace)
    free = sum(costs[trace.ops[o].signature].seconds for o in recording.fused if o in problem.positions)
    problem.cost = {o: costs[trace.ops[o].signature].replay_seconds for o in problem.eligible}
    problem.step_seconds -= free
    measured = sum(c.source == "measured" for c in costs)
    return problem, f"{measured} of {len(costs)} distinct ops measured here, the rest modelled"


def same_places(problem: Problem) -> dict[int, tuple[int, ...]]:
    """Op -> the ops at the same place in every call of an equal graph, in all steps."""
    trace = problem.trace
    by_place: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    places = {}
    for op in trace.ops:
        key = trace.calls[op.call].key
        if op.index >= 0 and op.phase is not Phase.BACKWARD and key.startswith(GRAPH) and not op.keep:
            places[op.id] = (key, op.index, op.name)
            by_place[places[op.id]].append(op.id)
    return {o: tuple(by_place[place]) for o, place in places.items() if o in problem.positions}


class GraphSearch(Search):
    """A search in which the calls of one graph are decided together, since they run the same compiled code."""

    def closed(self, recorded: frozenset[int]) -> frozenset[int]:
        """With the twins of each op in the step planned for, but those that nobody in backward asks for."""
        cost = self.problem.cost
        return frozenset(twin for o in recorded for twin in self.everywhere[o] if twin in cost)

    def model(self, part: Mapping[int, int], near: Candidate | None = None) -> milp.Model:
        cost = self.problem.cost
        tied = {o: [twin for twin in self.everywhere[o] if twin in cost][-1] for o in self.problem.eligible}
        assumed = self.closed(near.recorded) if near is not None else None
        return milp.build_model(self.problem, part, tied, assumed)
