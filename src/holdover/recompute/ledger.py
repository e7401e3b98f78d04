"""Who wants which value, and making the wanted ones again: the rules 8 to 14 of recipe.py."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext

import torch

from holdover.recompute._torch import TorchDispatchMode, at_end_of_pass, in_modes, plain_kernels
from holdover.recompute.recipe import NO_PASS, Recipe, Value, living_values
from holdover.recompute.settings import now, under
from holdover.recompute.sharded import gathered


class Replay:
    """What one replay holds: tensors by value, how many runs to come read each, and which are ours to change.

    `stage` is the one on whose behalf it happens.
    """

    __slots__ = ("held", "owned", "stage", "uses")

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.held: dict[Value, torch.Tensor] = {}
        self.uses: dict[Value, int] = {}
        self.owned: set[Value] = set()


class Ledger:
    """Who wants which value: the bookkeeping of one session's recipes, alive as long as they are.

    Attributes:
        lock: autograd runs the nodes of each device in a thread of its own.
        cached: values with a cached tensor.
        task: the pass that `cached` belongs to.
        modes: the user's dispatch modes around forward.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.cached: set[Value] = set()
        self.task = NO_PASS
        self.modes: list[TorchDispatchMode] = []
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
        if recipe.finished == task or any(u.wanted(task) for u in living_values(recipe)):
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

    def _cached(self, value: Value) -> torch.Tensor | None:
        """The replayed content, unless it was written to since: a custom function's backward may, once it has it."""
        tensor = value.tensor
        if tensor is not None and value.handed and tensor._version != value.at:
            self._forget(value)
            return None
        return tensor

    # -- replay ---------------------------------------------------------------------------------------------------

    def get(self, value: Value, task: int) -> torch.Tensor:
        """The content of `value`. The caller holds the lock."""
        tensor = self._cached(value)
        if tensor is None:
            tensor = value.alive()
        if tensor is None:
            tensor = self._replay(value, task)
        return tensor

    def _replay(self, target: Value, task: int) -> torch.Tensor:
        if task != NO_PASS and task != self.task:
            self._enter_pass(task)
        replay = Replay(target.recipe.stage)
        held = replay.held
        replay.uses[target] = 1
        order = self._order(target, replay, task)
        away = [s.owner for recipe in order for s in recipe.owned if s.freed()]
        with gathered(away) if away else nullcontext(), plain_kernels():
            if self.modes:
                with in_modes(self.modes):
                    self._run(order, replay, task)
            else:
                self._run(order, replay, task)
        return held[target]

    def _run(self, order: list[Recipe], replay: Replay, task: int) -> None:
        held, uses, owned, present = replay.held, replay.uses, replay.owned, now()
        for recipe in order:
            lasting = task != NO_PASS and replay.stage <= recipe.held_from
            if lasting and recipe.finished != task:
                recipe.finished = task
                for v in recipe.inputs:
                    self.satisfy(v, task)
            if recipe.settings is present:
                results = recipe.run(replay)
            else:
                with under(recipe.settings, present):
                    results = recipe.run(replay)
            if recipe.name and not recipe.returns_pin:
                self.replayed_ops += 1
            for v in recipe.inputs:
                uses[v] -= 1
                if not uses[v]:
                    held.pop(v, None)
                    owned.discard(v)
            for made in living_values(recipe):
                self._hold(made, results[made.slot], replay, lasting and made.wanted(task))
            del results

    def _hold(self, value: Value, tensor: torch.Tensor, replay: Replay, wanted: bool) -> None:
        """Hold what a recipe has just made, for the rest of this replay, for the rest of the pass, or not at all."""
        needed = replay.uses.get(value, 0) > 0
        pinned = value.recipe.returns_pin
        if needed:
            replay.held[value] = tensor
            if not pinned:
                replay.owned.add(value)
        if wanted:
            value.tensor, value.handed = tensor, pinned
            value.at = tensor._version
            self.cached.add(value)
        if (needed or wanted) and value.recipe.name and not pinned:
            self.replayed_bytes += tensor.untyped_storage().nbytes()

    def _clone_first(self, recipe: Recipe, replay: Replay, task: int) -> Recipe | None:
        """The clone to be made before this op writes over what it copies, if it is wanted and not there."""
        clone = recipe.clone() if recipe.clone is not None else None
        if clone is None or task == NO_PASS or not clone.wanted(task) or replay.stage > clone.recipe.held_from:
            return None
        there = clone.recipe.returns_pin or self._cached(clone) is not None or clone.alive() is not None
        return None if there else clone.recipe

    def _order(self, target: Value, replay: Replay, task: int) -> list[Recipe]:
        """The recipes to run, inputs first. Fills `replay` with what is there already, and with the numbers of uses."""
        held, uses = replay.held, replay.uses
        order: list[Recipe] = []
        planned = {target.recipe}
        stack = [(target.recipe, 0)]
        while stack:
            recipe, i = stack.pop()
            first = self._clone_first(recipe, replay, task) if not i else None
            if first is not None and first not in planned:
                planned.add(first)
                stack += [(recipe, 0), (first, 0)]
                continue
            inputs = recipe.inputs
            while i < len(inputs):
                v = inputs[i]
                i += 1
                uses[v] = uses.get(v, 0) + 1
                if v in held or v.recipe in planned:
                    continue
                if (tensor := self._cached(v)) is not None:
                    held[v] = tensor
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
