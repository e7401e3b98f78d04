"""Small random steps built by hand, without a model: any graph of forward, any choice of what is saved."""

from __future__ import annotations

from random import Random

from holdover.trace.graph import Call, Category, Event, Op, Phase, Signature, Slot, Storage, TensorSpec, Trace, Value

KIB = 1024


class Step:
    """A step under construction. Every value has a storage of its own, of the same number."""

    def __init__(self, random: Random, ops: int) -> None:
        self.random, self.trace = random, Trace(model="Random", inputs="none", recorded_on="hand")
        self.trace.calls = [Call(0, "", "", "", -1), Call(1, "model", "", "Random", 0)]
        self.costs: dict[int, float] = {}
        self.tape: list[tuple[int, list[int]]] = []
        self.forward(ops)
        self.backward()

    def event(self, kind: Event, number: int) -> None:
        self.trace.events.append((kind, number))

    def value(self, nbytes: int, category: Category, maker: int = -1) -> int:
        number = len(self.trace.values)
        self.trace.values.append(Value(number, number, 0, maker, "uint8"))
        self.trace.storages.append(Storage(number, nbytes, "cpu", category))
        self.event(Event.HOLD, number)
        return number

    def op(self, phase: Phase, call: int, inputs: tuple[int, ...], nbytes: int, seconds: float) -> Op:
        number = len(self.trace.ops)
        self.event(Event.OP, number)
        self.costs[number] = seconds
        spec = TensorSpec((nbytes,), (1,), "uint8", "cpu")
        self.trace.signatures.append(Signature("test.op.default", (spec,), (), runnable=False))
        category = Category.ACTIVATION if phase is Phase.FORWARD else Category.TEMPORARY
        outputs = (self.value(nbytes, category, number),)
        index = number if phase is Phase.FORWARD else -1
        made = Op(number, "test.op.default", phase, 0, call, index, number, inputs, outputs)
        self.trace.ops.append(made)
        return made

    def forward(self, ops: int) -> None:
        random = self.random
        there = [self.value(random.choice([1, 4]) * KIB, Category.INPUT)]
        for _ in range(ops):
            recent = there[-4:]
            inputs = tuple(sorted(set(random.choices(recent, k=random.choice([1, 1, 2])))))
            keep = "cannot be made again" if random.random() < 0.1 else ""
            op = self.op(Phase.FORWARD, 1, inputs, random.choice([1, 2, 4, 8]) * KIB, random.choice([1, 2, 5, 20]))
            op.keep = keep
            saved = [v for v in (*inputs, *op.outputs) if random.random() < 0.6]
            slots = []
            for v in saved:
                slots.append(len(self.trace.slots))
                self.trace.slots.append(Slot(slots[-1], v, op.id, 1))
                self.event(Event.PACK, slots[-1])
            self.tape.append((op.id, slots))
            there.append(op.outputs[0])
            if len(there) > 4 and random.random() < 0.8:
                self.event(Event.DROP, there[-5])
        for v in there[max(len(there) - 4, 0) :]:
            self.event(Event.DROP, v)

    def backward(self) -> None:
        self.event(Event.PASS, 0)
        gradient = self.op(Phase.BACKWARD, 0, (), KIB, 1.0).outputs[0]
        for forward, slots in reversed(self.tape):
            for slot in slots:
                self.event(Event.UNPACK, slot)
                self.event(Event.HOLD, self.trace.slots[slot].value)
            nbytes = self.random.choice([1, 2, 8]) * KIB
            made = self.op(Phase.BACKWARD, 0, (gradient,), nbytes, 2 * self.costs[forward]).outputs[0]
            for slot in slots:
                self.event(Event.DROP, self.trace.slots[slot].value)
                self.event(Event.RELEASE, slot)
            self.event(Event.DROP, gradient)
            gradient = made
        self.event(Event.DROP, gradient)


def random_step(seed: int) -> tuple[Trace, dict[int, float]]:
    """A trace with at most seven ops of forward, and seconds by signature."""
    random = Random(seed)
    step = Step(random, random.randint(2, 7))
    return step.trace, step.costs
