"""How a dropped tensor is made again: recipes, what they hold, and when their outputs live.

The rules below are the contract with whoever simulates memory. A *value* is the content of a storage between two
writes. "Pass" is one run of autograd's engine (one graph task); "bytes of a value" are the bytes of its whole storage.

What a recipe holds
 1. A recorded op leaves one recipe. It holds the op, its plain arguments, and for each tensor argument either a
    *reference* (the storage's content was made by a recipe of the same session: no bytes) or a *pin* (it was not:
    the storage is kept alive). A view never has a recipe: it refers to, or pins, the storage it looks at.
 2. A recipe lives while autograd holds a saved tensor of one of its values, or another living recipe refers to it, or
    (only until the session ends: at the end of the root's forward, or of the block) the storage of one of its outputs
    lives with the content the recipe made. A pin holds its storage until the last recipe that holds the pin dies.
    A recipe costs no bytes of its own but its pins: an argument that nobody else would have kept becomes kept.
 3. Pins of storages of at most 4 KiB (SMALL_PIN_BYTES) that existed before the session (buffers of the modules on
    the call stack, tensors among the root call's arguments) hold a copy of the storage, made when first pinned, so that
    later changes do no harm. All pins of one content of one storage share one copy. Parameters are never copied.
 4. A random op adds the generator's state (5,056 bytes on CPU, 16 on CUDA), except where its dropout probability is 0.

Copy on write
 5. Before any op of the session (recorded or not) writes to a pinned storage, that storage is copied once (all of it)
    for all of its pins, and they let go of the original. Copies of rule 3 are not copied again. Batch norm's running
    statistics in training count as written, though the schema hides it.
 6. A write that is not recorded ends the storage's recipe: from then on its content is kept. Saved tensors and recipes
    that refer to the content before the write stay right (they hold the old recipe), and take no bytes.
 7. A recorded write makes a new value whose recipe refers to (or pins: then rule 5 copies right away) the old content,
    unless it overwrites all of the storage without reading it (`rules.OVERWRITES`, `out=`): then it refers to nothing.

Replay, in backward, at the moment autograd unpacks a saved tensor of a value that has a recipe
 8. If the tensor that the op made in forward is still alive (the program holds it) and was not written to since, it is
    used: no replay. A view that is still alive does the same only where autograd keeps the view's base alive.
 9. Otherwise the recipes needed run, each once, depth first: the inputs of a recipe in the order of its arguments
    (positional, then keyword), left to right, then the recipe itself. A value that is cached (rule 11) or alive
    (rule 8) ends the descent.
10. During one such replay an intermediate value is freed right after the last recipe of this replay that reads it has
    run, unless rule 11 keeps it. Outputs of an op that nobody asks for are freed as soon as the op returns.
11. A replayed value is cached while it is wanted in this pass: there is a saved tensor of it not unpacked yet in this
    pass, or a recipe that refers to it, is itself wanted in this pass (by this same rule, recursively), and has not
    been replayed in this pass. The moment the last such want goes away (an unpack, a replay, autograd releasing a
    saved tensor unread, a recipe dying), the cache lets go of it; what was handed to autograd lives on as long as
    autograd's node needs it.
12. What is still cached when the pass ends is freed then. Unpacking outside of a pass caches nothing.
13. A replayed in-place op takes over the storage of its old content if that was replayed, is wanted by nobody else, and
    was never handed to autograd; else it works on a copy of the whole storage.
14. A packed value (action "pack") is a recipe with no inputs that holds the packed bytes from the moment its op has
    run; unpacking is its replay, and rules 8 to 12 hold for it. Its storage in forward is not affected.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdover.errors import ReplayError
from holdover.recompute._torch import at_end_of_pass, current_graph_task_id, plain_kernels
from holdover.recompute.geometry import Geometry, copy_with_storage, rebuild
from holdover.recompute.random import Draw, default_generator

SMALL_PIN_BYTES = 4096
NO_PASS = -1


class Source:
    """A pin: one content of a kept storage, shared by the recipes of one session that read it."""

    __slots__ = ("__weakref__", "ledger", "nbytes", "origin", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int, ledger: Ledger) -> None:
        self.tensor, self.origin, self.ledger = tensor, version, ledger
        self.version: int | None = version  # None: the copy is ours
        self.nbytes = tensor.untyped_storage().nbytes()

    def copy_on_write(self) -> None:
        """Let go of the storage, which is about to be written to, for a copy of it."""
        if self.version is not None:
            self.tensor, self.version = copy_with_storage(self.tensor.detach()), None

    def changed(self) -> str:
        """What happened to the content since it was pinned; "" if nothing did."""
        if self.version is not None and self.tensor._version != self.version:
            return f"was modified in place (version {self.tensor._version}, {self.version} when it was read)"
        if self.tensor.untyped_storage().nbytes() < self.nbytes:
            return "had its memory freed"
        return ""


class Pins(list["weakref.ref[Source]"]):
    """The pins of one storage's present content: of several sessions, and of views that count versions apart."""

    def find(self, version: int, ledger: Ledger) -> Source | None:
        """The pin that this session made of the content at that version."""
        for ref in self:
            source = ref()
            if source is not None and source.origin == version and source.ledger is ledger:
                return source
        return None

    def add(self, source: Source) -> None:
        self[:] = [ref for ref in self if ref() is not None]
        self.append(weakref.ref(source))


class Value:
    """The content of a storage after the op that made it.

    Attributes:
        recipe: how it is made.
        slot: which of the recipe's outputs it is: n for the n-th result, ~n for the n-th written argument.
        tensor: the replayed content, while cached.
        handed: `tensor` was given to autograd.
        claims: living saved tensors of it, and living and claimed recipes that refer to it.
        done, done_in: how many of the claims are satisfied in that pass.
        original: the tensor made in forward, while it lives unchanged.
        version, slack: `original`'s version then; an in-place op's own increment may come after us.
        saved: autograd has saved it.
    """

    # Defaults on the class, and no __slots__: most values never need most of these, and making one must be quick.
    tensor: torch.Tensor | None = None
    handed = saved = False
    claims = done = 0
    done_in = NO_PASS

    def __init__(self, recipe: Recipe, slot: int, tensor: torch.Tensor, slack: int) -> None:
        self.recipe, self.slot, self.slack, self.version = recipe, slot, slack, tensor._version
        self.original: weakref.ref[torch.Tensor] | None = weakref.ref(tensor)

    def alive(self) -> torch.Tensor | None:
        """The tensor that forward made, if it is still there unchanged."""
        original = self.original
        if original is None:
            return None
        tensor = original()
        if tensor is None:
            self.original = None
        elif tensor._version != self.version and tensor._version != self.version + self.slack:
            self.original = None
            return None
        return tensor

    def wanted(self, task: int) -> bool:
        return self.claims > (self.done if self.done_in == task else 0)


class Ref:
    """A tensor argument of a recipe: the value or pin it lies on, and where (None: it is what the op returned)."""

    __slots__ = ("geometry", "node")

    def __init__(self, node: Any, geometry: Geometry | None) -> None:
        self.node, self.geometry = node, geometry


class Write(Ref):
    """A tensor argument that the op writes to. Without a node, it starts from fresh memory on `device`."""

    __slots__ = ("device",)

    def __init__(self, node: Any, geometry: Geometry | None, device: torch.device) -> None:
        self.node, self.geometry, self.device = node, geometry, device


class Recipe:
    """An op that can run again.

    Attributes:
        inputs: the values that its references lie on, one entry for each reference, in order.
        values: what it makes that somebody may ask for, weakly: a cycle would keep pins until the collector comes.
        claims: the sum of its values' claims. While there are none, it makes no claims on its inputs.
        finished: the pass in which it has run, or turned out not to be needed.
        grad: whether gradients were on; some kernels ask.
    """

    claims = 0
    finished = NO_PASS

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        inputs: list[Value],
        draw: Draw | None,
    ) -> None:
        self.ledger, self.name, self.function, self.args, self.kwargs = ledger, name, function, args, kwargs
        self.inputs, self.draw = inputs, draw
        self.values: Sequence[weakref.ref[Value]] = ()
        self.grad = torch.is_grad_enabled()

    def run(self, replay: Replay) -> list[Any]:
        """Run the op again: its results, then the written arguments, last one first, so that slot ~n is the n-th."""
        written: list[torch.Tensor] = []
        held, args = replay.held, []
        for a in self.args:
            if type(a) is Ref and type(a.node) is Value:  # by far the most frequent, so not a call of its own
                base = held[a.node]
                args.append(base if a.geometry is None else rebuild(base, a.geometry))
            else:
                args.append(self._argument(a, replay, written))
        kwargs = {k: self._argument(a, replay, written) for k, a in self.kwargs.items()} if self.kwargs else {}
        if self.grad:
            out = self._call(args, kwargs)
        else:
            with torch.no_grad():
                out = self._call(args, kwargs)
        written.reverse()
        return [*flat(out), *written]

    def _call(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        draw = self.draw
        if draw is None:
            return self.function(*args, **kwargs)
        if draw.argument:
            kwargs[draw.argument] = draw.private()
            return self.function(*args, **kwargs)
        generator = default_generator(draw.device)
        now = generator.get_state()
        generator.set_state(draw.state)
        try:
            return self.function(*args, **kwargs)
        finally:
            generator.set_state(now)

    def _argument(self, a: Any, replay: Replay, written: list[torch.Tensor]) -> Any:
        kind = type(a)
        if kind is Ref:
            node = a.node
            base = replay.held[node] if type(node) is Value else self._pinned(node)
            return base if a.geometry is None else rebuild(base, a.geometry)
        if kind is Write:
            tensor = self._target(a, replay)
            written.append(tensor)
            return tensor
        if kind is list or kind is tuple:
            return [self._argument(x, replay, written) for x in a]
        return a

    def _pinned(self, source: Source) -> torch.Tensor:
        if trouble := source.changed():
            raise ReplayError(
                f"backward has to run {self.name} again, but a tensor that it read in forward {trouble} since: "
                f"{self.ledger.describe(source.tensor)}. Change it after backward, or keep {self.name}'s output."
            )
        return source.tensor

    def _target(self, a: Write, replay: Replay) -> torch.Tensor:
        node, where = a.node, a.geometry
        if node is None:
            assert where is not None
            return torch.empty_strided(where[1], where[2], dtype=where[0], device=a.device)
        if type(node) is Value:
            base = replay.held[node]
            if node not in replay.owned or replay.uses[node] > 1 or node.tensor is not None:
                base = copy_with_storage(base.detach())
        else:
            base = copy_with_storage(self._pinned(node).detach())
        return base if where is None else rebuild(base, where)


def _deref(value: weakref.ref[Value]) -> Value | None:
    return value()


def flat(out: Any) -> list[Any]:
    """An op's results in one list."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [x for o in out for x in (o if isinstance(o, (list, tuple)) else (o,))]
    return [out]


class Replay:
    """What one replay holds: tensors by value, how many runs to come read each, and which are ours to change."""

    __slots__ = ("held", "owned", "uses")

    def __init__(self) -> None:
        self.held: dict[Value, torch.Tensor] = {}
        self.uses: dict[Value, int] = {}
        self.owned: set[Value] = set()


class Ledger:
    """Who wants which value: the bookkeeping of one session's recipes, alive as long as they are.

    Attributes:
        lock: autograd runs the nodes of each device in a thread of its own.
        cached: values with a cached tensor.
        task: the pass that `cached` belongs to.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.cached: set[Value] = set()
        self.task = NO_PASS
        self.model: weakref.ref[torch.nn.Module] | None = None
        self.replayed_ops = self.replayed_bytes = self.dropped_bytes = 0
        self.packed_bytes = self.packed_from_bytes = 0

    def describe(self, tensor: torch.Tensor) -> str:
        """The parameter's or buffer's name, where it is one, and its shape."""
        model = self.model() if self.model is not None else None
        name = ""
        if model is not None:
            named = [*model.named_parameters(), *model.named_buffers()]
            name = next((n for n, t in named if t.untyped_storage() is tensor.untyped_storage()), "")
        kind = f"{name or 'a tensor that is no parameter'} of shape {list(tensor.shape)}"
        return f"{kind} and type {str(tensor.dtype).removeprefix('torch.')}"

    # -- claims ---------------------------------------------------------------------------------------------------

    def claim(self, value: Value) -> None:
        """Somebody new may ask for `value`."""
        value.claims += 1
        recipe = value.recipe
        recipe.claims += 1
        if recipe.claims > 1:
            return
        todo = [*recipe.inputs]
        while todo:
            v = todo.pop()
            v.claims += 1
            recipe = v.recipe
            recipe.claims += 1
            if recipe.claims == 1:
                todo.extend(recipe.inputs)

    def drop(self, value: Value, satisfied_in: int) -> None:
        """One who might have asked for `value` is gone; `satisfied_in` is the last pass in which they got it."""
        todo = [(value, satisfied_in)]
        while todo:
            v, satisfied = todo.pop()
            v.claims -= 1
            if satisfied == v.done_in and satisfied != NO_PASS:
                v.done -= 1
            if v.tensor is not None and not v.wanted(self.task):
                self._forget(v)
            recipe = v.recipe
            recipe.claims -= 1
            if recipe.claims == 0:
                todo.extend([(w, recipe.finished) for w in recipe.inputs])
                recipe.finished = NO_PASS
            elif v.done_in == self.task != NO_PASS:
                self._give_up(recipe, self.task)

    def satisfy(self, value: Value, task: int) -> None:
        """One who wanted `value` in this pass got it, or turned out not to need it."""
        todo = [value]
        while todo:
            v = todo.pop()
            if v.done_in != task:
                v.done_in, v.done = task, 0
            v.done += 1
            if v.claims > v.done:
                continue
            if v.tensor is not None:
                self._forget(v)
            todo.extend(self._not_needed(v.recipe, task))

    def _give_up(self, recipe: Recipe, task: int) -> None:
        for w in self._not_needed(recipe, task):
            self.satisfy(w, task)

    def _not_needed(self, recipe: Recipe, task: int) -> list[Value]:
        """The inputs of a recipe that will not run in this pass, if that has just become clear."""
        if recipe.finished == task or any(u is not None and u.wanted(task) for u in map(_deref, recipe.values)):
            return []
        recipe.finished = task
        return recipe.inputs

    def _forget(self, value: Value) -> None:
        value.tensor = None
        self.cached.discard(value)

    def _enter_pass(self, task: int) -> None:
        if self.cached:
            self._leave_pass()
        self.task = task
        at_end_of_pass(self._leave_pass)

    def _leave_pass(self) -> None:
        with self.lock:
            for v in list(self.cached):
                v.tensor = None
            self.cached.clear()

    # -- replay ---------------------------------------------------------------------------------------------------

    def get(self, value: Value, task: int) -> torch.Tensor:
        """The content of `value`. The caller holds the lock."""
        tensor = value.tensor
        if tensor is None:
            tensor = value.alive()
        if tensor is None:
            tensor = self._replay(value, task)
        return tensor

    def _replay(self, target: Value, task: int) -> torch.Tensor:
        if task != NO_PASS and task != self.task:
            self._enter_pass(task)
        replay = Replay()
        held = replay.held
        replay.uses[target] = 1
        order = self._order(target, replay)
        with plain_kernels():
            self._run(order, replay, task)
        return held[target]

    def _run(self, order: list[Recipe], replay: Replay, task: int) -> None:
        held, uses, owned = replay.held, replay.uses, replay.owned
        for recipe in order:
            if task != NO_PASS and recipe.finished != task:
                recipe.finished = task
                for v in recipe.inputs:
                    self.satisfy(v, task)
            results = recipe.run(replay)
            if recipe.name:
                self.replayed_ops += 1
            for v in recipe.inputs:
                uses[v] -= 1
                if not uses[v]:
                    held.pop(v, None)
                    owned.discard(v)
            for made in map(_deref, recipe.values):
                if made is not None:
                    self._hold(made, results[made.slot], replay, task)
            del results

    def _hold(self, value: Value, tensor: torch.Tensor, replay: Replay, task: int) -> None:
        """Hold what a recipe has just made, for the rest of this replay, for the rest of the pass, or not at all."""
        needed = replay.uses.get(value, 0) > 0
        wanted = task != NO_PASS and value.wanted(task)
        if needed:
            replay.held[value] = tensor
            replay.owned.add(value)
        if wanted:
            value.tensor, value.handed = tensor, False
            self.cached.add(value)
        if (needed or wanted) and value.recipe.name:
            self.replayed_bytes += tensor.untyped_storage().nbytes()

    def _order(self, target: Value, replay: Replay) -> list[Recipe]:
        """The recipes to run, inputs first. Fills `replay` with what is there already, and with the numbers of uses."""
        held, uses = replay.held, replay.uses
        order: list[Recipe] = []
        planned = {target.recipe}
        stack = [(target.recipe, 0)]
        while stack:
            recipe, i = stack.pop()
            inputs = recipe.inputs
            while i < len(inputs):
                v = inputs[i]
                i += 1
                uses[v] = uses.get(v, 0) + 1
                if v in held or v.recipe in planned:
                    continue
                if v.tensor is not None:
                    held[v] = v.tensor
                    if not v.handed:
                        replay.owned.add(v)
                elif (tensor := v.alive()) is not None:
                    held[v] = tensor
                else:
                    planned.add(v.recipe)
                    stack.append((recipe, i))
                    stack.append((v.recipe, 0))
                    break
            else:
                order.append(recipe)
        return order


class SavedRef:
    """What autograd holds in place of a saved tensor whose value has a recipe."""

    __slots__ = ("geometry", "satisfied_in", "value")

    def __init__(self, value: Value, geometry: Geometry, storage: torch.UntypedStorage) -> None:
        self.value, self.geometry, self.satisfied_in = value, geometry, NO_PASS
        ledger = value.recipe.ledger
        with ledger.lock:
            ledger.claim(value)
            if not value.saved:
                value.saved = True
                ledger.dropped_bytes += storage.nbytes()

    def __del__(self) -> None:
        ledger = self.value.recipe.ledger
        with ledger.lock:
            ledger.drop(self.value, self.satisfied_in)

    def get(self) -> torch.Tensor:
        """The saved tensor, made again if need be."""
        value = self.value
        ledger = value.recipe.ledger
        task = current_graph_task_id()
        with ledger.lock:
            base = ledger.get(value, task)
            if base is value.tensor:
                value.handed = True
            tensor = rebuild(base.detach() if base.requires_grad else base, self.geometry)
            if task != NO_PASS and self.satisfied_in != task:
                self.satisfied_in = task
                ledger.satisfy(value, task)
        return tensor
