"""A chain of equal transformer blocks with known sizes and prices: planning problems without a model or a machine.

    python benchmarks/block_model.py [--blocks 32] [--seconds 20]

prints what our plans cost at shares of the footprint of a step without activation checkpointing, beside what a dynamic
programme over menus of each block reaches on the same model.

Sizes are multiples of t = 2 b s h bytes (bfloat16). Backward reads, per block: the block's input (t), the output of
norm 1 (t), queries, keys and values (3t), the attention's output with its statistics (1.02t), the sum after attention
(t), the output of norm 2 (t), of the first MLP layer (4t) and of GELU (4t). Two more tensors exist while a block goes
back: the gradients of its output and of its input, t each; gradients inside a block, weights and workspaces are left
out. A matmul runs at 171.6 TFLOP/s and a pointwise op at 1.5 TB/s; backward takes twice the forward, op by op.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdover.planning.api import same_places
from holdover.planning.bound import bound_seconds
from holdover.planning.problem import build
from holdover.planning.search import Search
from holdover.trace.graph import Call, Category, Event, Op, Phase, Signature, Slot, Storage, TensorSpec, Trace, Value

FLOPS_PER_SECOND = 171.6e12
BYTES_PER_SECOND = 1.5e12
TARGETS = {0.80: 0.5, 0.65: 0.8, 0.50: 5.3, 0.30: 13.5, 0.25: 15.6, 0.15: 19.7, 0.10: 22.0, 0.07: 28.2}
"""Share of the footprint -> extra time in % of the step, which a plan should not exceed."""


@dataclass(frozen=True)
class Kind:
    """One op of a block. Names stand for tensors; "x" is the block's input and "y" its output."""

    name: str
    reads: tuple[str, ...]
    makes: str
    saves: tuple[str, ...]
    nbytes: int
    seconds: float


def kinds_of(h: int, s: int, b: int) -> list[Kind]:
    """The ops of one block, in order."""
    t = 2 * b * s * h

    def matmul(i: int, o: int) -> float:
        return 2 * b * s * i * o / FLOPS_PER_SECOND

    def pointwise(nbytes: int) -> float:
        return nbytes / BYTES_PER_SECOND

    attention = 2 * b * s * s * h / FLOPS_PER_SECOND
    return [
        Kind("norm", ("x",), "n1", ("x",), t, pointwise(2 * t)),
        Kind("matmul", ("n1",), "qkv", ("n1",), 3 * t, matmul(h, 3 * h)),
        Kind("attention", ("qkv",), "a", ("qkv", "a"), t * 102 // 100, attention),
        Kind("matmul_add", ("a", "x"), "x2", ("a",), t, matmul(h, h) + pointwise(3 * t)),
        Kind("norm", ("x2",), "n2", ("x2",), t, pointwise(2 * t)),
        Kind("matmul", ("n2",), "up", ("n2",), 4 * t, matmul(h, 4 * h)),
        Kind("gelu", ("up",), "g", ("up",), 4 * t, pointwise(8 * t)),
        Kind("matmul_add", ("g", "x2"), "y", ("g",), t, matmul(4 * h, h) + pointwise(3 * t)),
    ]


@dataclass
class _Writer:
    """Adds to a trace, in order of time."""

    trace: Trace
    costs: dict[int, float] = field(default_factory=dict)
    numbers: dict[tuple[str, int, float], int] = field(default_factory=dict)

    def signature(self, name: str, nbytes: int, seconds: float) -> int:
        key = name, nbytes, seconds
        if key not in self.numbers:
            number = self.numbers[key] = len(self.trace.signatures)
            spec = TensorSpec((nbytes // 2,), (1,), "bfloat16", "cpu", storage_bytes=nbytes)
            self.trace.signatures.append(Signature(f"block_model.{name}.default", (spec,), (), runnable=False))
            self.costs[number] = seconds
        return self.numbers[key]

    def value(self, nbytes: int, category: Category, maker: int = -1) -> int:
        """A value in a storage of its own (both have the same number), held by the program."""
        number = len(self.trace.values)
        self.trace.values.append(Value(number, number, 0, maker, "bfloat16"))
        self.trace.storages.append(Storage(number, nbytes, "cpu", category))
        self.event(Event.HOLD, number)
        return number

    def event(self, kind: Event, number: int) -> None:
        self.trace.events.append((kind, number))

    def op(
        self, name: str, phase: Phase, call: int, index: int, inputs: tuple[int, ...], nbytes: int, seconds: float,
        *, category: Category = Category.TEMPORARY, of: int = -1,
    ) -> Op:  # fmt: skip
        """An op that makes one value of `nbytes`, or none of 0."""
        number = len(self.trace.ops)
        signature = self.signature(f"{name}_backward" if phase is Phase.BACKWARD else name, nbytes, seconds)
        self.event(Event.OP, number)
        outputs = (self.value(nbytes, category, number),) if nbytes else ()
        made = Op(number, f"block_model.{name}.default", phase, 0, call, index, signature, inputs, outputs, of=of)
        self.trace.ops.append(made)
        return made

    def pack(self, value: int, op: int, call: int) -> int:
        slot = len(self.trace.slots)
        self.trace.slots.append(Slot(slot, value, op, call))
        self.event(Event.PACK, slot)
        return slot


def block_model(
    blocks: int = 32, h: int = 4096, s: int = 2048, b: int = 1
) -> tuple[Trace, dict[int, float], dict[int, int]]:
    """The step as a trace, seconds by signature, and workspace bytes by signature (none).

    Args:
        blocks: how many, each a module call of its own.
        h, s, b: width, sequence length and batch size.

    >>> trace, costs, workspace = block_model(blocks=2, h=8, s=4)
    >>> len(trace.ops), len(trace.slots), len(costs), len(workspace)
    (34, 18, 16, 0)
    """
    kinds, t = kinds_of(h, s, b), 2 * b * s * h
    trace = Trace(model="BlockModel", inputs=f"bfloat16[{b}, {s}, {h}]", recorded_on="hand")
    trace.calls = [Call(0, "", "", "", -1), Call(1, "model", "", "BlockModel", 0)]
    trace.calls += [Call(2 + i, f"model/blocks.{i}", f"blocks.{i}", "Block", 1) for i in range(blocks)]
    write = _Writer(trace)
    x = write.value(t, Category.INPUT)
    tapes: list[list[tuple[Op, list[int]]]] = []
    for i in range(blocks):
        tape, x = _forward(write, kinds, x, 2 + i, last=i == blocks - 1)
        tapes.append(tape)
    loss = write.op("loss", Phase.LOSS, 0, 0, (x,), 4, 0.0)
    write.event(Event.DROP, x)
    gradient = write.op("loss", Phase.BACKWARD, 0, -1, loss.outputs, t, 0.0, of=loss.id).outputs[0]
    write.event(Event.PASS, 0)
    for tape in reversed(tapes):
        gradient = _backward(write, kinds, tape, gradient, t)
    for value in (gradient, *loss.outputs):
        write.event(Event.DROP, value)
    return trace, write.costs, {}


def _forward(
    write: _Writer, kinds: list[Kind], x: int, call: int, *, last: bool
) -> tuple[list[tuple[Op, list[int]]], int]:
    """One block forward: its ops with the slots that each saved, and the block's output."""
    named = {"x": x}
    last_reader = {name: i for i, kind in enumerate(kinds) for name in kind.reads}
    tape: list[tuple[Op, list[int]]] = []
    for i, kind in enumerate(kinds):
        slots = [write.pack(named[n], len(write.trace.ops) - 1, call) for n in kind.saves if n in named]
        inputs = tuple(named[n] for n in kind.reads)
        category = Category.TEMPORARY if last and kind.makes == "y" else Category.ACTIVATION
        op = write.op(kind.name, Phase.FORWARD, call, i, inputs, kind.nbytes, kind.seconds, category=category)
        named[kind.makes] = op.outputs[0]
        slots += [write.pack(named[n], op.id, call) for n in kind.saves if n == kind.makes]
        for name in kind.reads:
            if last_reader[name] == i and write.trace.values[named[name]].maker >= 0:
                write.event(Event.DROP, named[name])
        tape.append((op, slots))
    return tape, named["y"]


def _backward(write: _Writer, kinds: list[Kind], tape: list[tuple[Op, list[int]]], gradient: int, t: int) -> int:
    """One block backward. Its first op makes the gradient of the block's input, which stands for all inside it."""
    of_input = -1
    for kind, (forward, slots) in zip(reversed(kinds), reversed(tape), strict=True):
        saved = [write.trace.slots[slot].value for slot in slots]
        for slot, value in zip(slots, saved, strict=True):
            write.event(Event.UNPACK, slot)
            write.event(Event.HOLD, value)
        nbytes = t if of_input < 0 else 0
        op = write.op(
            kind.name, Phase.BACKWARD, forward.call, -1, (gradient, *saved), nbytes, 2 * kind.seconds, of=forward.id
        )
        of_input = op.outputs[0] if nbytes else of_input
        for value in saved:
            write.event(Event.DROP, value)
        for slot in slots:
            write.event(Event.RELEASE, slot)
    write.event(Event.DROP, gradient)
    return of_input


def input_bytes(trace: Trace) -> int:
    """What exists before the step: no plan changes it, so shares of the footprint are taken above it."""
    return sum(s.nbytes for s in trace.storages if s.category is Category.INPUT)


def search_of(trace: Trace, costs: Mapping[int, float], workspace: Mapping[int, int], seconds: float) -> Search:
    problem = build(trace, costs, workspace)
    return Search(problem, workspace, same_places(problem), seconds=seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0, help="time limit of each solve, default 20")
    chosen = parser.parse_args()
    trace, costs, workspace = block_model(chosen.blocks)
    search = search_of(trace, costs, workspace, chosen.seconds)
    step, fixed = search.problem.step_seconds, input_bytes(trace)
    footprint = search.judge(()).peak_bytes - fixed
    start = time.perf_counter()
    floor = search.lowest()
    lowest, took = (floor.peak_bytes - fixed) / footprint, time.perf_counter() - start
    print(f"floor {lowest:.3f} of the footprint at {floor.seconds / step:.1%}, found in {took:.1f} s")
    print(f"{'share':>6} {'extra %':>8} {'bound %':>8} {'target %':>9} {'peak':>6} {'solve s':>8}")
    missed = 0
    for share, target in TARGETS.items():
        start, budget = time.perf_counter(), fixed + int(share * footprint)
        bound = bound_seconds(search.problem, budget)
        if floor.peak_bytes > budget:
            print(f"{share:6.2f} {'none':>8} {bound / step:8.1%} {target:9.1f}  below the floor  <--")
            missed += 1
            continue
        found = search.cheapest(budget, floor, bound)
        extra = 100 * found.seconds / step
        above = round(extra, 1) > target
        missed += above
        print(f"{share:6.2f} {extra:8.2f} {100 * bound / step:8.2f} {target:9.1f} "
              f"{(found.peak_bytes - fixed) / footprint:6.3f} {time.perf_counter() - start:8.1f}"
              f"{'  <--' if above else ''}", flush=True)  # fmt: skip
    print(f"{missed} of {len(TARGETS)} targets missed")
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
