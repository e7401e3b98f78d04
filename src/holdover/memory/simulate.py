"""Bytes live over a step, with or without a plan: a pure function of the trace and the choices.

Without choices this walks the trace's events and adds up what is held. With choices it also acts out what the runtime
would do, by the rules in `recompute/recipe.py`: which storages recipes pin, when a replay makes values again and in
which order, and when each of them is let go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from holdover.trace.graph import Category, Event, Phase, Trace

CATEGORIES = tuple(Category)
RNG_STATE_BYTES = {"cpu": 5056, "cuda": 16}
"""Size of the generator state that a recipe of a random op carries (torch 2.13)."""
SMALL_PIN_BYTES = 1 << 12
FOREVER = 1 << 30
"""As `held_from`: whatever stage asks, a replayed result is held for its later readers."""


@dataclass(frozen=True)
class Choices:
    """What a plan does to one trace: ops that leave a recipe, and values that are kept packed (with their bytes).

    `stages` gives recorded ops the stage and the stage they are held from of rule 15; without, replays are always held.
    Without `with_loss` it is in force inside the model's calls only: what the loss saves is held as in plain PyTorch.
    """

    recompute: frozenset[int] = frozenset()
    pack: Mapping[int, int] = field(default_factory=dict)
    with_loss: bool = False
    stages: Mapping[int, tuple[int, int]] = field(default_factory=dict)


NOTHING = Choices()


@dataclass(slots=True)
class Extra:
    """Bytes that only a plan brings: a cloned input, a generator state, a packed copy, a value replayed aside."""

    nbytes: int
    category: Category
    value: int
    held: int = 0


@dataclass
class Timeline:
    """Bytes live after each op.

    `live_bytes[i]` is the highest number of bytes live from the start of op `i` to the start of the next, the op's own
    workspace included; `category_bytes[i]` the same moment by category, in the order of `CATEGORIES`, the workspace
    counted as temporary. They add up exactly.
    """

    live_bytes: list[int]
    category_bytes: list[tuple[int, ...]]
    peak_op: int
    at_peak: dict[int, int]  # storage -> bytes, those live at the peak
    extra_at_peak: list[Extra]
    workspace_at_peak: int
    replays: dict[int, int]  # op -> how often it was replayed
    copied_bytes: int = 0  # before writes to what others need (rules 5, 13), in packing and in unpacking

    @property
    def peak_bytes(self) -> int:
        return self.live_bytes[self.peak_op] if self.live_bytes else 0


Observer = Callable[[int, int], None]
"""Told of every allocation and release of a simulated step, in order: `(holding, bytes)`, bytes negative when it is let
go. An op `n` about to run is told as `(~n, 0)`, and a kernel of op `n` that takes workspace while it makes its outputs
as `(~n, bytes)`; a replayed op is told only of its workspace."""


def simulate(
    trace: Trace, choices: Choices = NOTHING, workspace: Mapping[int, int] | None = None, *, detail: bool = True,
    observer: Observer | None = None,
) -> Timeline:  # fmt: skip
    """Act out the step under `choices`.

    Args:
        workspace: bytes that the kernel of a signature allocates beside its outputs, by signature number.
        detail: also find what is live at the peak (a second walk).
        observer: told of each allocation and release, once.
    """
    first = _Walk(trace, choices, workspace or {}, observer)
    first.run(stop=-1)
    if detail and first.live_bytes:
        second = _Walk(trace, choices, workspace or {})
        second.run(stop=first.peak_moment)
        return second.timeline(first)
    return first.timeline(first)


def reachable_events(trace: Trace, *, with_loss: bool) -> Iterator[tuple[Event, int]]:
    """The trace's events, where a slot that no plan reaches is one more holder of its storage, asked for or not."""
    for kind, number in trace.events:
        if Event.PACK <= kind <= Event.RELEASE and not with_loss and not trace.slots[number].call:
            if kind is not Event.UNPACK:
                storage = trace.values[trace.slots[number].value].storage
                yield (Event.HOLD if kind is Event.PACK else Event.DROP), storage
        else:
            yield kind, number


class _Recipe:
    __slots__ = (
        "dead", "held_from", "inputs", "op", "outputs", "pins", "refs", "replayed", "spent", "stage", "state", "wanted"
    )  # fmt: skip

    def __init__(self, op: int, outputs: tuple[int, ...], stage: int = 0, held_from: int = FOREVER) -> None:
        self.op, self.outputs, self.stage, self.held_from = op, outputs, stage, held_from
        self.inputs: list[tuple[_Recipe, int]] = []  # (recipe, value); each claimed while this one wants it
        self.pins: list[list[int]] = []  # one-element lists: the holding they point to moves on copy-on-write
        self.refs = self.wanted = self.state = 0
        self.replayed = self.spent = self.dead = False  # spent: asked for in this pass


class _Walk:
    """One pass over the events. Holdings are numbered: storages first, extras after them."""

    def __init__(
        self, trace: Trace, choices: Choices, workspace: Mapping[int, int], observer: Observer | None = None
    ) -> None:
        self.trace, self.choices, self.workspace, self.observer = trace, choices, workspace, observer
        number = len(trace.storages)
        self.sizes = [s.nbytes for s in trace.storages]
        order = {c: i for i, c in enumerate(CATEGORIES)}
        self.order = order
        self.kinds = [order[s.category] for s in trace.storages]
        self.program = [0] * number  # holders in the program, as recorded
        self.ours = [0] * number  # holders that are ours or autograd's: kept slots, pins, replayed copies
        self.extras: dict[int, Extra] = {}
        self.content = [-1] * number
        self.recipes: dict[int, _Recipe] = {}  # value -> recipe
        self.awaited: dict[int, _Recipe] = {}  # storages about to be allocated by a recorded op
        self.referred: dict[int, _Recipe] = {}  # storages that the program holds -> recipe of their content
        self.pinned: dict[int, list[list[int]]] = defaultdict(list)
        self.copies: dict[int, int] = {}  # value -> holding of its replayed copy
        self.wants: dict[int, int] = defaultdict(int)  # value -> how many want it in this pass
        self.small_copies: dict[int, int] = {}  # value -> holding of the copy that its pins share
        self.lent: set[int] = set()  # storages that the program holds because a replay gave them to autograd
        self.resaved: set[int] = set()  # slots that autograd saved of such: the runtime keeps them
        self.unpacked = [False] * len(trace.slots)
        self.slots_alive: set[int] = set()  # of recipes
        self.last_pass = -1
        self.now, self.by_kind = 0, [0] * len(CATEGORIES)
        self.live_bytes: list[int] = []
        self.category_bytes: list[tuple[int, ...]] = []
        self.moment = self.peak_moment = -1
        self.peak, self.peak_op, self.top, self.spare = -1, 0, -1, 0
        self.stop = -1
        self.snapshot: tuple[dict[int, int], list[Extra], int] | None = None
        self.replays: dict[int, int] = defaultdict(int)
        self.copied_bytes = 0
        for v in trace.values:
            if v.maker < 0 and v.version == 0:
                self.content[v.storage] = v.id

    # -- bytes ----------------------------------------------------------------------------------------------------

    def add(self, holding: int, sign: int) -> None:
        nbytes = self.sizes[holding]
        self.now += sign * nbytes
        self.by_kind[self.kinds[holding]] += sign * nbytes
        if self.observer is not None:
            self.observer(holding, sign * nbytes)
        if sign > 0:
            self.look(0)

    def look(self, workspace: int) -> None:
        """Is this the most so far, of this op and of the step?"""
        self.moment += 1
        total = self.now + workspace
        if total > self.top:
            self.top = total
            if self.live_bytes:
                self.live_bytes[-1] = total
                kinds = list(self.by_kind)
                kinds[self.order[Category.TEMPORARY]] += workspace
                self.category_bytes[-1] = tuple(kinds)
        if total > self.peak:
            self.peak, self.peak_moment, self.spare = total, self.moment, workspace
            self.peak_op = max(len(self.live_bytes) - 1, 0)
        if self.moment == self.stop:
            live = {s.id: s.nbytes for s in self.trace.storages if self.program[s.id] + self.ours[s.id]}
            self.snapshot = live, [e for h, e in self.extras.items() if self.ours[h]], workspace

    def hold(self, holding: int) -> None:
        self.ours[holding] += 1
        if self.ours[holding] == 1 and (holding >= len(self.program) or not self.program[holding]):
            self.add(holding, 1)

    def free(self, holding: int) -> None:
        self.ours[holding] -= 1
        if self.ours[holding] == 0 and (holding >= len(self.program) or not self.program[holding]):
            self.add(holding, -1)

    def extra(self, nbytes: int, category: Category, value: int) -> int:
        holding = len(self.sizes)
        self.sizes.append(nbytes)
        self.kinds.append(self.order[category])
        self.ours.append(0)
        self.extras[holding] = Extra(nbytes, category, value)
        self.hold(holding)
        return holding

    # -- events ---------------------------------------------------------------------------------------------------

    def run(self, stop: int) -> None:
        self.stop = stop
        act = {
            Event.OP: self.on_op, Event.HOLD: self.on_hold, Event.DROP: self.on_drop,
            Event.PACK: self.on_pack, Event.UNPACK: self.on_unpack, Event.RELEASE: self.on_release,
            Event.PASS: self.on_pass,
        }  # fmt: skip
        for kind, number in reachable_events(self.trace, with_loss=self.choices.with_loss):
            act[kind](number)

    def on_op(self, number: int) -> None:
        op = self.trace.ops[number]
        if self.observer is not None:
            self.observer(~number, 0)
        self.live_bytes.append(self.now)
        self.category_bytes.append(tuple(self.by_kind))
        self.top = self.now
        record = number in self.choices.recompute
        recipe = self.record(number) if record else self.packed(number)
        for before, after in op.writes:
            storage = self.trace.values[after].storage
            pins = self.pinned.pop(storage, None)
            if pins:
                self.copy_on_write(storage, pins, before)
            self.forget(storage)
            self.content[storage] = after
        if recipe is not None:
            for v in recipe.outputs:
                self.recipes[v] = recipe
                storage = self.trace.values[v].storage
                self.content[storage] = v
                if self.program[storage]:  # written in place: the storage refers to the recipe from now on
                    self.refer(storage, recipe)
                else:
                    self.awaited[storage] = recipe
        self.run_kernel(number)

    def refer(self, storage: int, recipe: _Recipe) -> None:
        recipe.refs += 1
        self.referred[storage] = recipe

    def run_kernel(self, number: int) -> None:
        op = self.trace.ops[number]
        workspace = self.workspace.get(op.signature, 0)
        if workspace:
            made = sum(self.sizes[self.trace.values[v].storage] for v in op.outputs if not self.trace.values[v].version)
            if self.observer is not None:
                self.observer(~number, workspace)
            self.look(made + workspace)

    def record(self, number: int) -> _Recipe:
        op = self.trace.ops[number]
        recipe = _Recipe(number, op.outputs, *self.choices.stages.get(number, ()))
        for value in op.inputs:
            source = self.recipes.get(value)
            if source is not None and not source.dead:
                source.refs += 1
                recipe.inputs.append((source, value))
            else:
                self.pin(recipe, value, copied=self.trace.values[value].storage in op.statistics)
        if op.random:
            device = self.trace.storages[self.trace.values[op.outputs[0]].storage].device if op.outputs else "cpu"
            recipe.state = self.extra(RNG_STATE_BYTES.get(device, 16), Category.TEMPORARY, -1)
        return recipe

    def packed(self, number: int) -> _Recipe | None:
        """A kept value in packed form: a recipe without inputs that carries the bytes (rule 14)."""
        op = self.trace.ops[number]
        nbytes = [self.choices.pack[v] for v in op.outputs if v in self.choices.pack]
        if not nbytes:
            return None
        recipe = _Recipe(number, tuple(v for v in op.outputs if v in self.choices.pack))
        recipe.state = self.extra(sum(nbytes), Category.ACTIVATION, recipe.outputs[0])
        self.copied_bytes += self.packed_bytes(recipe)
        return recipe

    def packed_bytes(self, recipe: _Recipe) -> int:
        return sum(self.sizes[self.trace.values[v].storage] for v in recipe.outputs)

    def pin(self, recipe: _Recipe, value: int, *, copied: bool) -> None:
        """Keep an argument that no recipe can make: its storage, or a copy of it if small and from before the step."""
        storage = self.trace.values[value].storage
        existed = self.trace.storages[storage].category in (Category.BUFFER, Category.INPUT)
        if copied or (existed and self.sizes[storage] <= SMALL_PIN_BYTES):
            copy = self.small_copies.get(value)
            if copy is None or not self.ours[copy]:
                self.small_copies[value] = self.extra(self.sizes[storage], Category.ACTIVATION, value)
            else:
                self.hold(copy)
            recipe.pins.append([self.small_copies[value]])
            return
        pin = [storage]
        self.hold(storage)
        self.pinned[storage].append(pin)
        recipe.pins.append(pin)

    def copy_on_write(self, storage: int, pins: list[list[int]], value: int) -> None:
        clone = self.extra(self.sizes[storage], Category.ACTIVATION, value)
        self.copied_bytes += self.sizes[storage]
        for pin in pins:
            self.hold(clone)
            self.free(storage)
            pin[0] = clone
        self.free(clone)

    def forget(self, storage: int) -> None:
        """The storage's content goes, and with it the storage's claim on the recipe that made it."""
        recipe = self.referred.pop(storage, None)
        if recipe is not None:
            self.unref(recipe)

    def on_hold(self, storage: int) -> None:
        self.program[storage] += 1
        if self.program[storage] == 1:
            if not self.ours[storage]:
                self.add(storage, 1)
            recipe = self.awaited.pop(storage, None)
            if recipe is not None:
                self.refer(storage, recipe)

    def on_drop(self, storage: int) -> None:
        self.program[storage] -= 1
        if self.program[storage] == 0:
            if not self.ours[storage]:
                self.add(storage, -1)
            self.forget(storage)
            self.lent.discard(storage)

    def on_pack(self, number: int) -> None:
        value = self.trace.slots[number].value
        recipe = self.recipes.get(value)
        if recipe is not None and self.trace.values[value].storage in self.lent:
            self.resaved.add(number)
        if recipe is not None and number not in self.resaved:
            recipe.refs += 1
            self.slots_alive.add(number)
            self.want(recipe, value, 1)
        else:
            self.hold(self.trace.values[value].storage)

    def on_unpack(self, number: int) -> None:
        value = self.trace.slots[number].value
        recipe = self.recipes.get(value)
        if recipe is None or number in self.resaved:
            return
        if not self.available(value):
            self.materialise(recipe, value)
        if value in self.copies:
            self.lent.add(self.trace.values[value].storage)
        if not self.unpacked[number]:
            self.unpacked[number] = recipe.spent = True
            self.want(recipe, value, -1)
        if not self.wants[value]:
            self.let_go(value)

    def on_release(self, number: int) -> None:
        value = self.trace.slots[number].value
        recipe = self.recipes.get(value)
        if recipe is None or number in self.resaved:
            self.free(self.trace.values[value].storage)
            return
        self.slots_alive.discard(number)
        if not self.unpacked[number]:
            self.want(recipe, value, -1)
        self.unref(recipe)

    def on_pass(self, number: int) -> None:
        """Another backward over the same graph: what the last one cached is freed, and all may be asked for again."""
        if number <= self.last_pass:
            return  # back from a nested run to the one around it
        self.last_pass = number
        if not any(r.replayed or r.spent for r in self.recipes.values() if not r.dead):
            return
        for value in list(self.copies):
            self.let_go(value)
        self.wants.clear()
        for recipe in {id(r): r for r in self.recipes.values() if not r.dead}.values():
            recipe.wanted, recipe.replayed, recipe.spent = 0, False, False
        for slot in self.slots_alive:
            self.unpacked[slot] = False
            value = self.trace.slots[slot].value
            self.want(self.recipes[value], value, 1)

    # -- recipes --------------------------------------------------------------------------------------------------

    def want(self, recipe: _Recipe, value: int, change: int) -> None:
        """Somebody more, or less, wants the value; a recipe of which anything is wanted wants its inputs (rule 11)."""
        stack = [(recipe, value)]
        while stack:
            r, v = stack.pop()
            before = r.wanted
            r.wanted += change
            self.wants[v] += change
            if not self.wants[v]:
                self.let_go(v)
            if bool(before) != bool(r.wanted) and not r.replayed:
                stack.extend(r.inputs)

    def let_go(self, value: int) -> None:
        copy = self.copies.pop(value, None)
        if copy is not None:
            self.free(copy)

    def unref(self, recipe: _Recipe) -> None:
        stack = [recipe]
        while stack:
            r = stack.pop()
            r.refs -= 1
            if r.refs or r.dead:
                continue
            r.dead = True
            for v in r.outputs:
                self.let_go(v)
            for pin in r.pins:
                pins = self.pinned.get(pin[0])
                if pins is not None:
                    self.pinned[pin[0]] = [p for p in pins if p is not pin]
                self.free(pin[0])
            if r.state:
                self.free(r.state)
            stack.extend(source for source, _ in r.inputs)

    def available(self, value: int) -> bool:
        storage = self.trace.values[value].storage
        original = self.program[storage] and self.content[storage] == value and storage not in self.lent
        return value in self.copies or bool(original)

    def materialise(self, target: _Recipe, asked: int) -> None:
        """Replay what is missing, inputs before outputs; what only this replay needed goes with its last reader."""
        order: list[_Recipe] = []
        readers: dict[int, int] = defaultdict(int)
        readers[asked] = 1
        seen: set[int] = set()
        stack = [(target, False)]
        while stack:
            r, ready = stack.pop()
            if ready:
                order.append(r)
                continue
            if id(r) in seen:
                continue
            seen.add(id(r))
            stack.append((r, True))
            for source, value in reversed(r.inputs):
                readers[value] += 1
                if not self.available(value):
                    stack.append((source, False))
        passing: set[int] = set()  # copies that are only for this replay, whoever wants their values
        for r in order:
            lasting = target.stage <= r.held_from
            there = {v for v in r.outputs if v in self.copies}
            self.replay(r, readers, passing, lasting)
            if not lasting:
                passing.update(v for v in r.outputs if v not in there)
            for value in (*(v for _, v in r.inputs), *r.outputs):
                if value in self.copies and not readers[value] and (value in passing or not self.wants[value]):
                    self.let_go(value)

    def replay(self, recipe: _Recipe, readers: dict[int, int], passing: set[int], lasting: bool) -> None:
        op = self.trace.ops[recipe.op]
        if recipe.op in self.choices.recompute:
            self.replays[recipe.op] += 1
            self.run_kernel(recipe.op)
        else:
            self.copied_bytes += self.packed_bytes(recipe)
        for _, value in recipe.inputs:
            readers[value] -= 1
        taken: dict[int, int] = {}
        rewritten = {after for before, after in op.writes if before >= 0}
        for before, after in op.writes:
            own = lasting and not recipe.replayed and recipe.wanted > 0
            unwanted = before in passing or self.wants[before] <= own
            if before in self.copies and not readers[before] and unwanted:
                taken[after] = self.copies.pop(before)  # nobody else needs the old content: written in place
        for v in recipe.outputs:
            if v in self.copies:
                continue
            storage = self.trace.values[v].storage
            if v in taken:
                self.copies[v] = taken[v]
            elif self.program[storage] + self.ours[storage]:
                self.copies[v] = self.extra(self.sizes[storage], Category.ACTIVATION, v)
            else:
                self.hold(storage)
                self.copies[v] = storage
            if v in rewritten and v not in taken:
                self.copied_bytes += self.sizes[storage]
        if lasting and not recipe.replayed:
            recipe.replayed = True
            if recipe.wanted:
                for source, value in recipe.inputs:
                    self.want(source, value, -1)

    def timeline(self, first: _Walk) -> Timeline:
        live, extras, spare = self.snapshot or ({}, [], 0)
        return Timeline(
            first.live_bytes, first.category_bytes, first.peak_op, live, extras, spare, dict(first.replays),
            first.copied_bytes,
        )  # fmt: skip


def phase_peaks(trace: Trace, timeline: Timeline) -> dict[tuple[int, Phase], int]:
    """The highest bytes live in each (step, phase)."""
    peaks: dict[tuple[int, Phase], int] = {}
    for op, nbytes in zip(trace.ops, timeline.live_bytes, strict=True):
        key = (op.step, op.phase)
        peaks[key] = max(peaks.get(key, 0), nbytes)
    return peaks
