"""Rotor, as a contender: optimal replay of whole blocks of a chain, with segments inside segments.

After Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains", 2019, with one
thing more than there: PyTorch stops a replay after the last tensor that backward needs, so that the end of a replayed
segment's last block costs nothing. Executed by `torch.utils.checkpoint` regions inside one another.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from frontier_blocks import Case
from frontier_measure import MARK, Point, Setting, UnavailableError, _curve
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

SLOTS = 400
SHARES = (0.7, 0.5, 0.35, 0.25, 0.18, 0.13, 0.1, 0.07)
QUICK_SHARES = (0.6, 0.35, 0.2, 0.12)


@dataclass(frozen=True)
class Stage:
    """One block: seconds forward, of that after the last saved tensor, and backward; bytes it makes and needs."""

    forward: float
    tail: float
    backward: float
    output: int
    tape: int
    transient: int


@dataclass(frozen=True)
class Keep:
    """Run stage `stage` and keep its tape."""

    stage: int


@dataclass(frozen=True)
class Replay:
    """Run `parts` keeping only the input; they are run again in backward, as they say."""

    parts: tuple[Keep | Replay, ...]


Schedule = tuple[Keep | Replay, ...]


class Table:
    """C(i, j, m): the least seconds to run stages i..j forward and back in m slots, the input of i already stored."""

    def __init__(self, stages: list[Stage], slot_bytes: float, slots: int) -> None:
        self.stages, self.slots = stages, slots
        number = len(stages)

        def up(nbytes: float) -> int:
            return int(-(-nbytes // slot_bytes))

        self.output = [up(s.output) for s in stages]
        self.tape = [up(s.tape) for s in stages]
        self.cost: dict[tuple[int, int], np.ndarray] = {}
        self.choice: dict[tuple[int, int], np.ndarray] = {}  # -1: keep stage i; p: drop up to p
        forward = np.concatenate([[0.0], np.cumsum([s.forward for s in stages])])
        room = np.arange(slots + 1)
        for i, stage in enumerate(stages):
            needed = up(stage.output + stage.tape + stage.transient)
            tail = stage.tail if i < number - 1 else 0.0
            self.cost[i, i] = np.where(room >= needed, stage.forward - tail + stage.backward, np.inf)
            self.choice[i, i] = np.full(slots + 1, -1, np.int16)
        for length in range(2, number + 1):
            for i in range(number - length + 1):
                j = i + length - 1
                first, least = stages[i], up(stages[i].tape + stages[i].transient) + self.output[j]
                best = first.forward + first.backward + self._less(i + 1, j, self.tape[i])
                best = np.where(room >= least, best, np.inf)
                chosen = np.full(slots + 1, -1, np.int16)
                for p in range(i + 1, j + 1):
                    cost = forward[p] - forward[i] + self._less(p, j, self.output[p - 1]) + self.cost[i, p - 1]
                    better = cost < best
                    best = np.where(better, cost, best)
                    chosen[better] = p
                self.cost[i, j], self.choice[i, j] = best, chosen

    def _less(self, i: int, j: int, taken: int) -> np.ndarray:
        """C(i, j) where `taken` slots are used up."""
        if taken > self.slots:
            return np.full(self.slots + 1, np.inf)
        return np.concatenate([np.full(taken, np.inf), self.cost[i, j][: self.slots + 1 - taken]])

    def schedule(self, i: int, j: int, room: int) -> Schedule | None:
        """What to do in `room` slots; None if it cannot be done."""
        if not np.isfinite(self.cost[i, j][room]):
            return None
        parts: list[Keep | Replay] = []
        while i <= j:
            p = int(self.choice[i, j][room])
            if p < 0:
                parts.append(Keep(i))
                room, i = room - self.tape[i], i + 1
            else:
                inner = self.schedule(i, p - 1, room)
                assert inner is not None
                parts.append(Replay(inner))
                room, i = room - self.output[p - 1], p
        return tuple(parts)


def run_schedule(schedule: Schedule, blocks: Any, x: torch.Tensor, *shared: torch.Tensor) -> torch.Tensor:
    """The chain's forward under a schedule."""
    for part in schedule:
        if isinstance(part, Keep):
            x = blocks[part.stage](x, *shared)
        else:
            inner = functools.partial(run_schedule, part.parts, blocks)
            x = checkpoint(inner, x, *shared, use_reentrant=False)
    return x


def rotor(case: Case, setting: Setting) -> Iterator[Point]:
    """Schedules at shares of each chain's own bytes; a model without a chain of blocks has none."""
    if not case.chains:
        raise UnavailableError("the blocks are no chain: skips connect far ends, which Rotor does not model")
    stages = {name: _measured(case, name) for name in case.chains}
    begun = time.perf_counter()
    tables = {}
    for name, of_chain in stages.items():
        total = sum(s.tape for s in of_chain) + max(s.transient + s.output for s in of_chain)
        tables[name] = Table(of_chain, total / SLOTS, SLOTS)
    seconds = time.perf_counter() - begun
    seen = set()
    for share in QUICK_SHARES if setting.quick else SHARES:
        offered = {n: table.schedule(0, len(stages[n]) - 1, int(share * SLOTS)) for n, table in tables.items()}
        found = {n: schedule for n, schedule in offered.items() if schedule is not None}
        if len(found) < len(offered) or str(found) in seen:
            continue
        seen.add(str(found))
        yield Point(f"share {share:g}", functools.partial(_follow, found), solve_seconds=seconds)


def _follow(found: dict[str, Schedule], model: torch.nn.Module) -> None:
    for name, schedule in found.items():
        chain = model.get_submodule(name)
        chain.forward = functools.partial(run_schedule, schedule, chain.blocks)


def _measured(case: Case, chain: str) -> list[Stage]:
    """Each block of the chain by itself, on the inputs that it gets in the model."""
    inputs: list[tuple[torch.Tensor, ...]] = []
    blocks = list(case.model.get_submodule(chain).blocks)  # type: ignore[arg-type]
    hooks = [b.register_forward_pre_hook(lambda _, args: inputs.append(args)) for b in blocks]
    with torch.no_grad():
        case.model(*case.args)
    for hook in hooks:
        hook.remove()
    return [_stage(block, args) for block, args in zip(blocks, inputs, strict=True)]


def _stage(block: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Stage:
    leaves = [a.detach().requires_grad_() for a in args]
    last_saved = [0.0]

    def note(tensor: torch.Tensor) -> torch.Tensor:
        last_saved[0] = time.process_time()
        return tensor

    best = [float("inf")] * 3
    output: torch.Tensor = block(*leaves)
    gradient = torch.ones_like(output)
    for _ in range(4):
        begun = time.process_time()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            output = block(*leaves)
        middle = time.process_time()
        output.backward(gradient)
        taken = (middle - begun, middle - last_saved[0], time.process_time() - middle)
        best = [min(a, b) for a, b in zip(best, taken, strict=True)]
    for tensor in (*leaves, *block.parameters()):
        tensor.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        output = block(*leaves)
        with record_function(MARK):
            pass
        output.backward(gradient)
    peak, saved = _curve(memory)
    for p in block.parameters():
        p.grad = None
    forward, tail, backward = best
    return Stage(forward, tail, backward, output.nbytes, saved, max(peak - saved, 0))
