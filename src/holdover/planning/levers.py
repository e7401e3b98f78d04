"""What lowers a floor that recomputation cannot get below, and by how much: each modelled on the recorded step.

The trace is taken as it is, some of its storages are made smaller, and the same plan is simulated again.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from holdover.memory.estimate import workspaces
from holdover.memory.loss import logits_and_loss
from holdover.memory.simulate import simulate
from holdover.memory.timeline import Choices
from holdover.planning.steps import Recorded
from holdover.trace.graph import Category, Phase, Trace
from holdover.units import format_bytes

CHUNKS = 8
RANKS = 8
SMALL_BYTES = 4096

WORTH = 0.005
"""Levers that lower the peak by a smaller share are not told."""


@dataclass(frozen=True)
class Lever:
    """One thing to do besides recomputation.

    Attributes:
        name: what to do.
        peak_before_bytes, peak_after_bytes: the lowest peak without it and with it.
        how: "modelled" from this recording, or "recorded" anew.
        price: what it costs.
    """

    name: str
    peak_before_bytes: int
    peak_after_bytes: int
    how: str
    price: str


def levers(step: Recorded, choices: Choices, floor_bytes: int) -> list[Lever]:
    """What would lower the peak under `choices`, which is `floor_bytes`, the strongest first."""
    trace = step.trace
    workspace, _ = workspaces(trace)
    before = simulate(trace, choices, workspace, detail=False).peak_bytes

    def lever(name: str, sizes: Mapping[int, int], more: int, price: str) -> Lever:
        changed = with_sizes(trace, sizes)
        after = simulate(changed, choices, workspace, detail=False).peak_bytes + more
        return Lever(name, floor_bytes, floor_bytes - before + after, "modelled", price)

    found = []
    loss = loss_storages(trace)
    if loss:
        sizes = {s: -(-trace.storages[s].nbytes // CHUNKS) for s in loss}
        price = "the logits are made and differentiated chunk by chunk: the same arithmetic, a few more launches"
        found.append(lever(f"the loss in {CHUNKS} chunks", sizes, 0, price))
    state = optimizer_sizes(trace)
    if state:
        price = "other numerics: the state is rounded to 8 bits each step"
        found.append(lever("an 8-bit optimizer", state, 0, price))
    sharded = {
        s.id: -(-s.nbytes // RANKS)
        for s in trace.storages
        if s.category in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER)
    }
    if sharded:
        weights = sum(s.nbytes for s in trace.storages if s.category is Category.PARAMETER)
        price = f"{RANKS} devices; each step moves about three times the weights ({format_bytes(weights)}) between them"
        found.append(lever(f"sharding over {RANKS} devices", sharded, 2 * largest_layer(trace), price))
    worth = [x for x in found if x.peak_before_bytes - x.peak_after_bytes > WORTH * x.peak_before_bytes]
    return sorted(worth, key=lambda x: x.peak_after_bytes)


def with_sizes(trace: Trace, sizes: Mapping[int, int]) -> Trace:
    """The trace with some storages of other sizes."""
    storages = [dataclasses.replace(s, nbytes=sizes.get(s.id, s.nbytes)) for s in trace.storages]
    return dataclasses.replace(trace, storages=storages)


def loss_storages(trace: Trace) -> set[int]:
    """Logits, what the loss makes of them, and their gradients: what a loss in chunks holds one chunk of."""
    last = trace.last_step
    found = {s for step in range(last + 1) for s in logits_and_loss(trace, step)}
    sizes = {trace.storages[s].nbytes for s in found if trace.storages[s].nbytes > SMALL_BYTES}
    makers = {trace.values[v].maker for v in range(len(trace.values)) if trace.values[v].storage in found}
    for op in trace.ops:
        if op.phase is Phase.BACKWARD and (op.of in makers or trace.ops[op.of].phase is Phase.LOSS):
            made = {trace.values[v].storage for v in op.outputs}
            found.update(s for s in made if trace.storages[s].nbytes in sizes)
    return {s for s in found if trace.storages[s].category in (Category.ACTIVATION, Category.TEMPORARY)}


def loss_bytes(trace: Trace, choices: Choices) -> int:
    """What of the loss is live at the peak."""
    workspace, _ = workspaces(trace)
    live = simulate(trace, choices, workspace).at_peak
    return sum(live.get(s, 0) for s in loss_storages(trace))


def optimizer_sizes(trace: Trace) -> dict[int, int]:
    """The optimizer's state at one byte per number, where it holds two numbers per parameter; else nothing.

    As in Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, without the scale of each block.
    """
    parameters = sum(s.nbytes for s in trace.storages if s.category is Category.PARAMETER)
    states = {s.id: s.nbytes for s in trace.storages if s.category is Category.OPTIMIZER}
    if not parameters or sum(states.values()) < 1.5 * parameters:
        return {}
    sizes = {}
    for value in trace.values:
        if value.storage in states:
            width = 4 if value.dtype == "float32" else 2 if "16" in value.dtype else 0
            if width and states[value.storage] > SMALL_BYTES:  # small tensors are kept as they are
                sizes[value.storage] = states[value.storage] // width
    return sizes


def largest_layer(trace: Trace) -> int:
    """Bytes of the weights that are gathered at once: those of the largest layer."""
    layers: dict[str, int] = defaultdict(int)
    for s in trace.storages:
        if s.category is Category.PARAMETER:
            numbered = re.match(r".*?\.?\d+(?=\.)", s.name)
            layers[numbered.group() if numbered else s.name] += s.nbytes
    return max(layers.values(), default=0)
