"""The simulator on traces written by hand, against bytes counted by hand: a test for each rule of the runtime."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from tests.memory.programs import ROWS, WIDTH, Program

from holdover.memory.simulate import simulate
from holdover.memory.timeline import NOTHING, Choices, phase_peaks
from holdover.trace.graph import Call, Category, Event, Op, Phase, Signature, Slot, Storage, Trace, Value
from holdover.trace.record import record

K = 10_000  # bytes; more than the 4 KiB up to which pins of inputs are copies
STATE = 5056


class Step:
    """Writes a trace: each method appends what the recorder would."""

    def __init__(self) -> None:
        self.trace = Trace(calls=[Call(0, "", "", "", -1), Call(1, "model", "", "Module", 0)])
        self.indices = itertools.count()

    def exists(self, nbytes: int, category: Category = Category.PARAMETER) -> int:
        return self._value(self._storage(nbytes, category), 0, -1)

    def op(
        self, *inputs: int, makes: int | tuple[int, ...] = (), writes: int = -1, phase: Phase = Phase.FORWARD,
        random: str = "",
    ) -> Any:  # fmt: skip
        """Run an op, `random` the name of one that is; returns the value it makes (a tuple for several), or the new
        version of what it writes.
        """
        trace, number = self.trace, len(self.trace.ops)
        index = next(self.indices) if phase is Phase.FORWARD else -1
        op = Op(
            number, random or f"aten.op{number}.default", phase, 0, 1, index, len(trace.signatures), inputs, (),
            random=bool(random),
        )  # fmt: skip
        trace.signatures.append(Signature(op.name, (), ()))
        trace.ops.append(op)
        trace.events.append((Event.OP, number))
        if writes >= 0:
            old = trace.values[writes]
            new = self._value(old.storage, old.version + 1, number)
            op.writes, op.outputs, op.inputs = ((writes, new),), (new,), tuple(dict.fromkeys((*inputs, writes)))
            return new
        sizes = (makes,) if isinstance(makes, int) else makes
        op.outputs = tuple(self._value(self._storage(n, Category.TEMPORARY), 0, number) for n in sizes)
        return op.outputs[0] if isinstance(makes, int) else op.outputs

    def backward(self, *inputs: int, makes: int = 0) -> int:
        made: int = self.op(*inputs, makes=makes, phase=Phase.BACKWARD)
        return made

    def drop(self, *values: int) -> None:
        for v in values:
            self.trace.events.append((Event.DROP, self.trace.values[v].storage))

    def save(self, value: int) -> int:
        slot = len(self.trace.slots)
        self.trace.slots.append(Slot(slot, value, len(self.trace.ops) - 1, 1))
        self.trace.events.append((Event.PACK, slot))
        storage = self.trace.storages[self.trace.values[value].storage]
        if storage.category is Category.TEMPORARY:
            storage.category = Category.ACTIVATION
        return slot

    def ask(self, slot: int) -> int:
        """Autograd unpacks: it holds the storage until `drop`."""
        value = self.trace.slots[slot].value
        self.trace.events += [(Event.UNPACK, slot), (Event.HOLD, self.trace.values[value].storage)]
        return value

    def release(self, slot: int) -> None:
        self.trace.events.append((Event.RELEASE, slot))

    def use(self, slot: int, *, makes: int = 0) -> int:
        """The usual life in backward: unpack, run an op on it, let it go."""
        value = self.ask(slot)
        made = self.backward(value, makes=makes)
        self.drop(value)
        self.release(slot)
        return made

    def begin_pass(self, number: int) -> None:
        self.trace.events.append((Event.PASS, number))

    def _storage(self, nbytes: int, category: Category) -> int:
        number = len(self.trace.storages)
        self.trace.storages.append(Storage(number, nbytes, "cpu", category))
        self.trace.events.append((Event.HOLD, number))
        return number

    def _value(self, storage: int, version: int, maker: int) -> int:
        number = len(self.trace.values)
        self.trace.values.append(Value(number, storage, version, maker, "float32"))
        return number


def curve(step: Step, recompute: tuple[int, ...] = (), **more: Any) -> list[int]:
    timeline = simulate(step.trace, Choices(frozenset(recompute), **more))
    assert [sum(parts) for parts in timeline.category_bytes] == timeline.live_bytes
    held = sum(timeline.at_peak.values()) + sum(e.nbytes for e in timeline.extra_at_peak)
    assert held + timeline.workspace_at_peak == timeline.peak_bytes
    return timeline.live_bytes


def chain() -> Step:
    """x -> a -> b -> c; all three saved and let go; backward uses c, b, a in turn and makes nothing."""
    step = Step()
    value, slots = step.exists(K), []
    for n in (1, 2, 3):
        old, value = value, step.op(value, makes=n * K)
        slots.append(step.save(value))
        if n > 1:
            step.drop(old)
    step.drop(value)
    step.begin_pass(0)
    for slot in reversed(slots):
        step.use(slot)
    return step


def test_plain() -> None:
    # x; a; b (a saved); c; backward frees c, b, a after use.
    assert curve(chain()) == [2 * K, 4 * K, 7 * K, 7 * K, 4 * K, 2 * K]


def test_one_value_dropped() -> None:
    # b is gone after c is made, and comes back from a before its own backward op, when c is gone.
    assert curve(chain(), (1,)) == [2 * K, 4 * K, 7 * K, 5 * K, 4 * K, 2 * K]
    # c is needed first, and its recipe pins b, which is kept anyway.
    assert curve(chain(), (2,)) == [2 * K, 4 * K, 7 * K, 7 * K, 4 * K, 2 * K]


def test_a_chain_is_replayed_from_its_start_once() -> None:
    timeline = simulate(chain().trace, Choices(frozenset({0, 1, 2})))
    # Forward holds neighbours only: x+a, x+a+b, x+b+c (a went when b was there), and x after c is let go.
    # c's backward needs a, b, c; a and b stay cached for their own.
    assert timeline.live_bytes[:2] == [2 * K, 4 * K]
    assert timeline.live_bytes[2] == 7 * K  # replayed before backward's first op: x + a + b + c
    assert timeline.live_bytes[3:] == [7 * K, 4 * K, 2 * K]
    assert timeline.replays == {0: 1, 1: 1, 2: 1}


def wide() -> Step:
    """A small input, a wide saved value, and later a wide temporary, where the peak of forward stands."""
    step = Step()
    x = step.exists(K)
    wide = step.op(x, makes=8 * K)
    slot = step.save(wide)
    narrow = step.op(wide, makes=K)
    step.drop(wide)
    temporary = step.op(narrow, makes=6 * K)
    step.drop(temporary, narrow)
    step.begin_pass(0)
    step.use(slot)
    return step


def test_dropping_what_is_live_at_the_peak() -> None:
    assert curve(wide()) == [9 * K, 10 * K, 16 * K, 9 * K]
    # Gone while the temporary is there; back, unpacked, after the temporary's op is over.
    assert curve(wide(), (0,)) == [9 * K, 10 * K, 9 * K, 9 * K]


def test_a_recipe_pins_an_argument_that_nobody_else_keeps() -> None:
    def build() -> Step:
        step = Step()
        x = step.exists(K)
        a = step.op(x, makes=4 * K)
        b = step.op(a, makes=2 * K)
        slot = step.save(b)
        step.drop(a, b)
        step.op(x, makes=0)
        step.begin_pass(0)
        step.use(slot)
        return step

    assert curve(build()) == [5 * K, 7 * K, 3 * K, 3 * K]
    assert curve(build(), (1,)) == [5 * K, 7 * K, 7 * K, 7 * K]  # a, pinned; then b replayed beside it
    # Both recorded: nothing is held; a goes again as soon as b is replayed, but is there together with it.
    assert curve(build(), (0, 1)) == [5 * K, 7 * K, 7 * K, 3 * K]


def test_an_original_that_is_alive_is_used() -> None:
    step = Step()
    x = step.exists(K)
    a = step.op(x, makes=2 * K)
    slot = step.save(a)
    step.begin_pass(0)
    step.use(slot)
    step.drop(a)
    timeline = simulate(step.trace, Choices(frozenset({0})))
    assert timeline.live_bytes == [3 * K, 3 * K]
    assert timeline.replays == {}


def overwriting() -> Step:
    """a -> b (saved, dropped); then a is written to."""
    step = Step()
    x = step.exists(K)
    a = step.op(x, makes=4 * K)
    b = step.op(a, makes=2 * K)
    slot = step.save(b)
    step.drop(b)
    step.op(writes=a)
    step.drop(a)
    step.begin_pass(0)
    step.use(slot)
    return step


def test_a_pinned_storage_is_copied_before_a_write() -> None:
    assert curve(overwriting()) == [5 * K, 7 * K, 7 * K, 3 * K]
    # b's recipe pins a: copied when it is written to (x + a + copy), then the copy alone; b beside it in backward.
    assert curve(overwriting(), (1,)) == [5 * K, 7 * K, 9 * K, 7 * K]
    # a's recipe makes the old content again: no copy. In backward a and b, then b.
    assert curve(overwriting(), (0, 1)) == [5 * K, 7 * K, 7 * K, 3 * K]


def test_small_inputs_are_copied_when_pinned() -> None:
    def build(category: Category) -> Step:
        step = Step()
        x = step.exists(4096, category)
        a = step.op(x, makes=K)
        b = step.op(x, makes=K)
        slots = [step.save(a), step.save(b)]
        step.drop(a, b)
        step.begin_pass(0)
        for slot in reversed(slots):
            step.use(slot)
        return step

    peak = 4096 + 2 * K
    assert max(curve(build(Category.PARAMETER), (0, 1))) == peak
    assert max(curve(build(Category.INPUT), (0, 1))) == peak + 4096  # one copy for both
    assert max(curve(build(Category.BUFFER), (0, 1))) == peak + 4096
    assert max(curve(build(Category.BUFFER))) == peak


def test_random_ops_carry_the_generator_state() -> None:
    def build(name: str) -> Step:
        step = Step()
        a = step.op(step.exists(K), makes=2 * K, random=name)
        slot = step.save(a)
        step.drop(a)
        step.backward()
        step.use(slot)
        return step

    for name in ("aten.bernoulli.p", "aten.native_dropout.default"):
        step = build(name)
        assert curve(step) == [3 * K, 3 * K, 3 * K]
        assert simulate(step.trace, Choices(frozenset({0}))).replays == {0: 1}
    # Replayed between the second op and the third. What takes a generator gets one of its own.
    assert curve(build("aten.bernoulli.p"), (0,)) == [3 * K + STATE, 3 * K + STATE, 3 * K + STATE]
    # Else the state that others see is put aside for the time of the replay.
    assert curve(build("aten.native_dropout.default"), (0,)) == [3 * K + STATE, 3 * K + 2 * STATE, 3 * K + STATE]


def test_outputs_that_nobody_asks_for_go_at_once() -> None:
    def build() -> Step:
        step = Step()
        x = step.exists(K)
        a, b = step.op(x, makes=(2 * K, 5 * K))
        slot = step.save(a)
        step.drop(a, b)
        step.begin_pass(0)
        value = step.ask(slot)
        step.backward(makes=6 * K)
        step.drop(value)
        step.release(slot)
        return step

    assert curve(build()) == [8 * K, 9 * K]
    assert curve(build(), (0,)) == [8 * K, 9 * K]  # b is not beside the six


def test_each_output_goes_with_its_own_last_want() -> None:
    """Like layer norm: the result is asked for first, the statistics later, with a wide temporary between."""
    step = Step()
    x = step.exists(K)
    out, statistics = step.op(x, makes=(4 * K, K))
    first, second = step.save(out), step.save(statistics)
    step.drop(out, statistics)
    step.begin_pass(0)
    step.use(first)
    step.drop(step.backward(makes=6 * K))
    step.use(second)
    timeline = simulate(step.trace, Choices(frozenset({0})))
    assert timeline.live_bytes == [6 * K, 6 * K, 8 * K, 2 * K]
    assert timeline.replays == {0: 1}


def test_an_in_place_op_takes_over_what_only_it_needs() -> None:
    step = Step()
    x = step.exists(K)
    a = step.op(x, makes=4 * K)
    b = step.op(writes=a)
    slot = step.save(b)
    step.drop(b)
    step.begin_pass(0)
    step.use(slot)
    assert curve(step, (0, 1)) == [5 * K, 5 * K, 5 * K]
    assert simulate(step.trace, Choices(frozenset({0, 1}))).replays == {0: 1, 1: 1}


def test_packed_values_live_in_both_forms_only_while_needed() -> None:
    packed: Mapping[int, int] = {1: K // 8}
    # Beside its packed form until the program lets go; then that alone, and both again in backward.
    assert curve(wide(), pack=packed) == [9 * K + K // 8, 10 * K + K // 8, 9 * K + K // 8, 9 * K + K // 8]


def test_two_passes_replay_twice() -> None:
    step = Step()
    x = step.exists(K)
    a = step.op(x, makes=4 * K)
    slot = step.save(a)
    step.drop(a)
    for number in (0, 1):
        step.begin_pass(number)
        value = step.ask(slot)
        step.backward(value)
        step.drop(value)
        step.op(phase=Phase.LOSS)
    step.release(slot)
    timeline = simulate(step.trace, Choices(frozenset({0})))
    assert timeline.replays == {0: 2}
    assert timeline.live_bytes == [5 * K, 5 * K, 5 * K, 5 * K, K]


def asked_around_another_run(*, inner: int, after: int) -> Step:
    """a is saved twice and asked for before and after another run of the engine, which takes 2 K for itself."""
    step = Step()
    a = step.op(step.exists(K), makes=4 * K)
    slots = [step.save(a), step.save(a)]
    step.drop(a)
    step.begin_pass(0)
    step.use(slots[0])
    step.begin_pass(inner)
    step.drop(step.backward(makes=2 * K))
    step.begin_pass(after)
    step.use(slots[1])
    return step


def test_a_run_within_another_leaves_alone_what_that_one_has_replayed() -> None:
    step = asked_around_another_run(inner=1, after=0)
    assert simulate(step.trace, Choices(frozenset({0}))).replays == {0: 1}
    # x; a; then x and the replayed a, and the 2 K of the inner run beside them.
    assert curve(step, (0,)) == [5 * K, 5 * K, 7 * K, 5 * K]


def test_what_is_cached_goes_when_the_run_ends() -> None:
    step = asked_around_another_run(inner=-1, after=1)
    assert simulate(step.trace, Choices(frozenset({0}))).replays == {0: 2}
    # Between the runs there is x with the 2 K; a comes back for the second one before its op begins.
    assert curve(step, (0,)) == [5 * K, 5 * K, 5 * K, 5 * K]


def test_workspace_is_beside_the_results_and_counts_as_temporary() -> None:
    step = wide()
    timeline = simulate(step.trace, NOTHING, {1: 3 * K})
    assert timeline.live_bytes == [9 * K, 13 * K, 16 * K, 9 * K]
    replayed = simulate(step.trace, Choices(frozenset({0})), {0: 7 * K})
    assert replayed.live_bytes == [16 * K, 10 * K, 16 * K, 9 * K]  # the workspace comes again with the replay
    # While the kernel runs its results are not allocated yet by the trace: they are counted with the workspace.
    assert (replayed.workspace_at_peak, sum(replayed.category_bytes[0])) == (8 * K + 7 * K, 16 * K)


def test_the_loss_is_left_alone_unless_asked() -> None:
    step = wide()
    step.trace.slots[0].call = 0
    assert curve(step, (0,)) == curve(step) == [9 * K, 10 * K, 16 * K, 9 * K]
    assert curve(step, (0,), with_loss=True) == [9 * K, 10 * K, 9 * K, 9 * K]


def test_nothing_at_all() -> None:
    timeline = simulate(Trace())
    assert (timeline.live_bytes, timeline.peak_bytes) == ([], 0)


def test_peaks_by_phase() -> None:
    trace = wide().trace
    assert phase_peaks(trace, simulate(trace)) == {(0, Phase.FORWARD): 16 * K, (0, Phase.BACKWARD): 9 * K}


def test_categories_add_up_in_a_real_step() -> None:
    model = Program([("norm", 0, 0), ("dropout", 0, 0), ("concat", 0, 1), ("relu_", 0, 0), ("batch_norm", 0, 0)])
    trace = record(model, (torch.rand(ROWS, WIDTH),), optimizer="adamw")
    for recorded in (frozenset(), frozenset(o.id for o in trace.ops if o.phase is Phase.FORWARD and o.outputs)):
        timeline = simulate(trace, Choices(recorded))
        assert len(timeline.live_bytes) == len(trace.ops)
        assert [sum(parts) for parts in timeline.category_bytes] == timeline.live_bytes
        assert timeline.peak_bytes == max(timeline.live_bytes)
        assert all(n >= 0 for parts in timeline.category_bytes for n in parts)
