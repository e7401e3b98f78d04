"""Bytes live over a step, with or without a plan: a pure function of the trace and the choices.

Without choices this walks the trace's events and adds up what is held. With choices it also acts out what the runtime
would do, by the rules in `recompute/recipe.py`: which storages recipes pin, when a replay makes values again and in
which order, and when each of them is let go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from holdover.memory.holdings import Holdings, Observer
from holdover.memory.recorded import Recipe
from holdover.memory.timeline import NOTHING, RNG_STATE_BYTES, SMALL_PIN_BYTES, Choices, Timeline
from holdover.trace.clones import clone_before
from holdover.trace.events import after_forward, reachable_events
from holdover.trace.graph import Category, Event, Trace
from holdover.trace.ops import LETS_GO, generator_argument, resolve


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
    first = Walk(trace, choices, workspace or {}, observer=observer)
    first.run()
    seen = first.memory
    if detail and seen.live_bytes:
        second = Walk(trace, choices, workspace or {}, stop=seen.peak_moment)
        second.run()
        at_peak = second.memory.snapshot
    else:
        at_peak = seen.snapshot
    return Timeline(
        seen.live_bytes, seen.category_bytes, seen.peak_op, *at_peak, dict(first.replays), first.copied_bytes
    )


class Walk:
    """One pass over the events."""

    def __init__(
        self, trace: Trace, choices: Choices, workspace: Mapping[int, int], *, stop: int = -1,
        observer: Observer | None = None,
    ) -> None:  # fmt: skip
        self.trace, self.choices, self.workspace = trace, choices, workspace
        self.memory = Holdings(trace, stop, observer)
        self.content = [-1] * len(trace.storages)
        self.recipes: dict[int, Recipe] = {}  # value -> recipe
        self.awaited: dict[int, Recipe] = {}  # storages about to be allocated by a recorded op
        self.referred: dict[int, Recipe] = {}  # storages that the program holds -> recipe of their content
        self.pinned: dict[int, list[list[int]]] = defaultdict(list)
        self.copies: dict[int, int] = {}  # value -> holding of its replayed copy
        self.wants: dict[int, int] = defaultdict(int)  # value -> how many want it in this pass
        self.small_copies: dict[int, int] = {}  # value -> holding of the copy that its pins share
        self.lent: set[int] = set()  # storages that the program holds because a replay gave them to autograd
        self.resaved: set[int] = set()  # slots that autograd saved of such: the runtime keeps them
        self.after_session = after_forward(trace, with_loss=choices.with_loss)
        self.passed_on: set[int] = set()  # values whose memory outlives the tensor that their op made (rule 8)
        self.unpacked = [False] * len(trace.slots)
        self.slots_alive: set[int] = set()  # of recipes
        self.asking = self.last_pass = -1
        self.replays: dict[int, int] = defaultdict(int)
        self.copied_bytes = 0
        for v in (v for v in trace.values if v.maker < 0 and v.version == 0):
            self.content[v.storage] = v.id

    def run(self) -> None:
        act = {
            Event.OP: self.on_op, Event.HOLD: self.on_hold, Event.DROP: self.on_drop,
            Event.PACK: self.on_pack, Event.UNPACK: self.on_unpack, Event.RELEASE: self.on_release,
            Event.PASS: self.on_pass,
        }  # fmt: skip
        for kind, number in reachable_events(self.trace, with_loss=self.choices.with_loss):
            act[kind](number)

    def on_op(self, number: int) -> None:
        op = self.trace.ops[number]
        if number in self.after_session:  # what the program still holds keeps no recipe any longer (rule 2)
            for storage in list(self.referred):
                self.forget(storage)
        self.memory.begin_op(number)
        record = number in self.choices.recompute
        recipe = self.record(number) if record else self.packed(number)
        for before, after in op.writes:
            storage = self.trace.values[after].storage
            pins = self.pinned.pop(storage, None)
            if pins:
                self.copy_on_write(storage, pins, before, self.twin(number, before) if record else None)
            self.forget(storage)
            self.content[storage] = after
        if recipe is not None:
            for v in recipe.outputs:
                self.recipes[v] = recipe
                storage = self.trace.values[v].storage
                self.content[storage] = v
                if self.memory.program[storage]:  # written in place: the storage refers to the recipe from now on
                    self.refer(storage, recipe)
                else:
                    self.awaited[storage] = recipe
        self.passed_on.update(op.inputs if op.name.split(".")[1] in LETS_GO else ())
        self.run_kernel(number)

    def size(self, value: int) -> int:
        return self.memory.sizes[self.trace.values[value].storage]

    def refer(self, storage: int, recipe: Recipe) -> None:
        recipe.refs += 1
        self.referred[storage] = recipe

    def run_kernel(self, number: int, aside: int = 0) -> None:
        op = self.trace.ops[number]
        workspace = self.workspace.get(op.signature, 0) + aside
        if workspace:
            made = sum(self.size(v) for v in op.outputs if not self.trace.values[v].version)
            self.memory.run_kernel(number, made, workspace)

    def record(self, number: int) -> Recipe:
        op = self.trace.ops[number]
        recipe = Recipe(number, op.outputs, *self.choices.stages.get(number, ()))
        for value in op.inputs:
            source = self.recipes.get(value)
            if source is not None and not source.dead:
                source.refs += 1
                recipe.inputs.append((source, value))
            else:
                self.pin(recipe, value, copied=self.trace.values[value].storage in op.statistics)
        if op.random:
            device = self.trace.storages[self.trace.values[op.outputs[0]].storage].device if op.outputs else "cpu"
            state_bytes = RNG_STATE_BYTES.get(device, 16)
            recipe.state = self.memory.extra(state_bytes, Category.TEMPORARY, -1)
            if device == "cpu" and not generator_argument(resolve(op.name)):
                recipe.aside = state_bytes  # while it runs again, the state that all others see is put aside
        return recipe

    def packed(self, number: int) -> Recipe | None:
        """A kept value in packed form: a recipe without inputs that carries the bytes (rule 14)."""
        op = self.trace.ops[number]
        nbytes = [self.choices.pack[v] for v in op.outputs if v in self.choices.pack]
        if not nbytes:
            return None
        recipe = Recipe(number, tuple(v for v in op.outputs if v in self.choices.pack))
        recipe.state = self.memory.extra(sum(nbytes), Category.ACTIVATION, recipe.outputs[0])
        self.copied_bytes += self.packed_bytes(recipe)
        return recipe

    def packed_bytes(self, recipe: Recipe) -> int:
        return sum(self.size(v) for v in recipe.outputs)

    def pin(self, recipe: Recipe, value: int, *, copied: bool) -> None:
        """Keep an argument that no recipe can make: its storage, or a copy of it if small and from before the step."""
        storage = self.trace.values[value].storage
        existed = self.trace.storages[storage].category in (Category.BUFFER, Category.INPUT)
        if copied or (existed and self.memory.sizes[storage] <= SMALL_PIN_BYTES):
            copy = self.small_copies.get(value)
            if copy is None or not self.memory.ours[copy]:
                self.small_copies[value] = self.memory.extra(self.memory.sizes[storage], Category.ACTIVATION, value)
            else:
                self.memory.hold(copy)
            recipe.pins.append([self.small_copies[value]])
            return
        pin = [storage]
        self.memory.hold(storage)
        self.pinned[storage].append(pin)
        recipe.pins.append(pin)

    def twin(self, number: int, value: int) -> Recipe | None:
        """The recorded clone of a pinned value, right before the op that writes over the value, if it was saved."""
        clone = clone_before(self.trace, number, value)
        recipe = self.recipes.get(clone)
        return recipe if recipe is not None and recipe.pins and self.wants[clone] else None

    def copy_on_write(self, storage: int, pins: list[list[int]], value: int, twin: Recipe | None) -> None:
        if twin is not None:
            clone, twin.returns_pin = self.trace.values[twin.outputs[0]].storage, True
            self.memory.hold(clone)
            self.pinned[clone] += pins
        else:
            clone = self.memory.extra(self.memory.sizes[storage], Category.ACTIVATION, value)
            self.copied_bytes += self.memory.sizes[storage]
        for pin in pins:
            self.memory.hold(clone)
            self.memory.free(storage)
            pin[0] = clone
        self.memory.free(clone)

    def forget(self, storage: int) -> None:
        """The storage's content goes, and with it the storage's claim on the recipe that made it."""
        recipe = self.referred.pop(storage, None)
        if recipe is not None:
            self.unref(recipe)

    def on_hold(self, storage: int) -> None:
        self.memory.program_holds(storage)
        if self.memory.program[storage] == 1:
            recipe = self.awaited.pop(storage, None)
            if recipe is not None:
                self.refer(storage, recipe)

    def on_drop(self, storage: int) -> None:
        self.memory.program_drops(storage)
        if not self.memory.program[storage]:
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
            self.memory.hold(self.trace.values[value].storage)

    def on_unpack(self, number: int) -> None:
        value = self.trace.slots[number].value
        recipe = self.recipes.get(value)
        if recipe is None or number in self.resaved:
            return
        self.begin_pass(self.asking)
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
            self.memory.free(self.trace.values[value].storage)
            return
        self.slots_alive.discard(number)
        if not self.unpacked[number]:
            self.want(recipe, value, -1)
        self.unref(recipe)

    def on_pass(self, number: int) -> None:
        self.asking = number
        if number < 0:
            for value in list(self.copies):
                self.let_go(value)

    def begin_pass(self, number: int) -> None:
        """Another backward over the same graph asks: what an earlier one got may all be asked for again."""
        if number <= self.last_pass:
            return  # back from a run within this one
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

    def want(self, recipe: Recipe, value: int, change: int) -> None:
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
            self.memory.free(copy)

    def unref(self, recipe: Recipe) -> None:
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
                self.memory.free(pin[0])
            if r.state:
                self.memory.free(r.state)
            stack.extend(source for source, _ in r.inputs)

    def available(self, value: int) -> bool:
        storage = self.trace.values[value].storage
        there = self.memory.program[storage] and self.content[storage] == value and storage not in self.lent
        return value in self.copies or bool(there and value not in self.passed_on)

    def materialise(self, target: Recipe, asked: int) -> None:
        """Replay what is missing, inputs before outputs; what only this replay needed goes with its last reader."""
        order: list[Recipe] = []
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
            if (clone := self.clone_first(r, target.stage)) is not None:
                stack.append((clone, False))
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

    def place(self, value: int, recipe: Recipe, taken: int | None) -> int:
        """Where a replayed value is held. Backward's holders of a storage mean its last content, whoever made it."""
        storage, memory = self.trace.values[value].storage, self.memory
        if recipe.returns_pin:
            holding = recipe.pins[0][0]
            memory.hold(holding)
            return holding
        if taken is not None:
            memory.free(taken)
        if self.content[storage] != value or memory.holders(storage):
            return memory.extra(memory.sizes[storage], Category.ACTIVATION, value)
        memory.hold(storage)
        return storage

    def clone_first(self, recipe: Recipe, stage: int) -> Recipe | None:
        """The clone to be made before an op writes over what it copies, if it is wanted and not there (rule 13)."""
        writes = self.trace.ops[recipe.op].writes if recipe.op in self.choices.recompute else ()
        value = next((v for before, _ in writes if (v := clone_before(self.trace, recipe.op, before)) >= 0), -1)
        clone = self.recipes.get(value)
        if clone is None or not clone.inputs or clone.dead or not self.wants[value] or self.available(value):
            return None
        return clone if stage <= clone.held_from and clone.op in self.choices.recompute else None

    def replay(self, recipe: Recipe, readers: dict[int, int], passing: set[int], lasting: bool) -> None:
        op = self.trace.ops[recipe.op]
        if recipe.op not in self.choices.recompute:
            self.copied_bytes += self.packed_bytes(recipe)
        elif not recipe.returns_pin:
            self.replays[recipe.op] += 1
            self.run_kernel(recipe.op, recipe.aside)
        for _, value in recipe.inputs:
            readers[value] -= 1
        taken: dict[int, int] = {}
        rewritten = {after for before, after in op.writes if before >= 0}
        for before, after in op.writes:
            own = lasting and not recipe.replayed and recipe.wanted > 0
            unwanted = before in passing or self.wants[before] <= own
            if before in self.copies and not readers[before] and unwanted and not self.recipes[before].returns_pin:
                taken[after] = self.copies.pop(before)  # nobody else needs the old content: written in place
        for v in recipe.outputs:
            if v in self.copies:
                continue
            self.copies[v] = self.place(v, recipe, taken.get(v))
            if v in rewritten and v not in taken:
                self.copied_bytes += self.size(v)
        if lasting and not recipe.replayed:
            recipe.replayed = True
            if recipe.wanted:
                for source, value in recipe.inputs:
                    self.want(source, value, -1)
