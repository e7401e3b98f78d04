"""From an op that is about to run to the recipe that it leaves."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from holdover.memory.timeline import FOREVER, SMALL_PIN_BYTES
from holdover.recompute import random
from holdover.recompute._torch import alias
from holdover.recompute.geometry import covers_storage, geometry, oddity
from holdover.recompute.mutation import written
from holdover.recompute.recipe import Pins, Recipe, Ref, Source, Twin, Value, Write, flat
from holdover.recompute.rules import Op
from holdover.recompute.script import Entry
from holdover.recompute.sharded import FREED, can_gather
from holdover.trace.ops import statistics_given

if TYPE_CHECKING:
    from holdover.recompute.recorder import Session

PART_OF_ARGUMENT = "returns part of an argument"


class Unsafe(Exception):  # noqa: N818 - caught here, never seen outside
    """This op cannot be recorded; the message says why."""


class Draft:
    """The recipe of an op that is about to run.

    Raises:
        Unsafe: the op cannot be made to run again on these arguments.
    """

    __slots__ = (
        "args", "cloned", "draw", "entry", "forgotten", "inputs", "kwargs", "op", "overwritten", "owned", "session",
        "storages", "targets", "unsaid",
    )  # fmt: skip

    def __init__(self, session: Session, op: Op, args: Any, kwargs: Any, entry: Entry) -> None:
        self.session, self.op, self.entry = session, op, entry
        self.inputs: list[Value] = []
        self.owned: list[Source] = []
        self.cloned: weakref.ref[Value] | None = None
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.targets: list[tuple[torch.Tensor, int]] = []
        self.overwritten: list[torch.Tensor] = []
        self.forgotten: set[int] = set()  # ids of storages that the op fills, whatever they held
        self.draw = None
        self.unsaid: set[int] = set()  # ids of tensors that may be written to without a sign of it
        if not op.simple:
            self.overwritten = written(op, args, kwargs)
            if op.updates(args):
                args = tuple(None if i in op.statistics else a for i, a in enumerate(args))
            self.unsaid = {id(t) for t in statistics_given(op.func, args)}
        if op.random and op.draws(args, kwargs):
            try:
                self.draw = random.before(op, args, kwargs)
            except LookupError as e:
                raise Unsafe(str(e)) from None
            if op.generator:
                args = args[: op.argument_names.index(op.generator)]
                kwargs = {k: v for k, v in kwargs.items() if k != op.generator}
        if op.writes:
            self._with_targets(args, kwargs)
        else:
            self.args = [
                self._reference(a) if isinstance(a, torch.Tensor) else self._argument(a) if type(a) is list else a
                for a in args
            ]
            self.kwargs = {k: self._argument(a) for k, a in kwargs.items()} if kwargs else None

    def _with_targets(self, args: Any, kwargs: Any) -> None:
        forgets = {i: self.op.forgets(name, args) for i, name in self.op.writes}
        named = {name: forgets[i] for i, name in self.op.writes}
        self.args = [self._target(a, forgets[i]) if i in forgets else self._argument(a) for i, a in enumerate(args)]
        self.kwargs = {k: self._target(a, named[k]) if k in named else self._argument(a) for k, a in kwargs.items()}
        if len({id(t.untyped_storage()) for t, _ in self.targets}) < len(self.targets):
            raise Unsafe("writes to one storage twice")

    def _argument(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return self._reference(a)
        if type(a) is list or type(a) is tuple:
            return [self._argument(x) for x in a]
        return a

    def _target(self, a: Any, forgets: bool) -> Any:
        if isinstance(a, (list, tuple)):
            return [self._target(x, forgets) for x in a]
        if a is None:
            return None
        if why := oddity(a):
            raise Unsafe(why)
        self.targets.append((a, a.untyped_storage().nbytes()))
        where = geometry(a)
        if forgets and not where[4] and covers_storage(a):
            storage = a.untyped_storage()
            self.storages[id(storage)] = storage
            self.forgotten.add(id(storage))
            return Write(None, where, a.device)
        ref = self._reference(a)
        return Write(ref.node, ref.geometry, a.device) if type(ref) is Ref else Write(ref, None, a.device)

    def _reference(self, tensor: torch.Tensor) -> Any:
        if why := oddity(tensor):
            raise Unsafe(why)
        storage: Any = tensor.untyped_storage()
        self.storages[id(storage)] = storage
        note = getattr(storage, "_holdover", None)
        if type(note) is Value and note.recipe.ledger is self.session.ledger:
            gap = tensor._version - note.version
            if gap == 0 or gap == note.slack:
                self.inputs.append(note)
                original = note.original
                same = original is not None and original() is tensor
                return note if same else Ref(note, geometry(tensor))
            del storage._holdover  # written to while nobody watched
        return self._pin(tensor, storage, note)

    def _pin(self, tensor: torch.Tensor, storage: Any, note: Any) -> Any:
        if tensor.is_inference():
            raise Unsafe("inference tensor")
        version, ledger = tensor._version, self.session.ledger
        if type(note) is not Pins:
            note = Pins()
            storage._holdover = note
        source = note.find(version, ledger)
        if source is None:
            owner = self.session.frees.find(storage)
            if owner is not None and not can_gather(owner):
                raise Unsafe(FREED)
            source = Source(tensor if tensor.grad_fn is None else alias(tensor), version, ledger, owner)
            if storage.nbytes() <= SMALL_PIN_BYTES and self._existed(tensor, storage):
                source.copy_on_write()
            note.add(source)
        if source.owner is not None:
            self.owned.append(source)
        if id(tensor) in self.unsaid:
            source.copy_on_write()
        return source if source.tensor is tensor else Ref(source, geometry(tensor))

    def _existed(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether it is one of the model's arguments, or one of its buffers."""
        if storage._cdata in self.session.inputs:
            return True
        return not tensor.requires_grad and self.session.is_buffer(storage)

    def finish(self, out: Any) -> str:
        """Leave the recipe on what the op made. Returns why not, where that turns out to be impossible only now."""
        targets = self.targets
        if not targets and isinstance(out, torch.Tensor):
            storage: Any = out.untyped_storage() if (why := oddity(out)) == "" else None
            if storage is None or id(storage) in self.storages:
                return why or PART_OF_ARGUMENT
            recipe = self._recipe()
            value = Value(recipe, 0, out, 0)
            recipe.values = weakref.ref(value)
            self.session.remember(storage, value)
            return ""
        return self._finish_several(out)

    def twin(self, clone: torch.Tensor, index: int) -> Twin | None:
        """What this op, a clone at that position, leaves for the op after it.

        None if what it read is pinned, but does not cover its storage as the clone does.
        """
        read, storage = self.args[0], clone.untyped_storage()
        node: Value | Source = read.node if type(read) is Ref else read
        note = getattr(storage, "_holdover", None)
        if type(note) is not Value:
            return None
        if isinstance(node, Value):
            return Twin(node, note, None, index)
        where = read.geometry if type(read) is Ref else geometry(node.tensor)
        same = node.nbytes == storage.nbytes() and geometry(clone) == where
        return Twin(node, note, alias(clone), index) if same else None

    def follow(self, twin: Twin) -> None:
        """The op before this one cloned what this one may write over."""
        if any(type(a) is Write and a.node is twin.read for a in self.args):
            self.cloned = weakref.ref(twin.value)

    def _recipe(self) -> Recipe:
        op, entry = self.op, self.entry
        recipe = Recipe(self.session.ledger, op.name, op.func._op, self.args, self.kwargs, self.inputs, self.draw)
        if entry.held_from != FOREVER or entry.stage:
            recipe.stage, recipe.held_from = entry.stage, entry.held_from
        recipe.clone = self.cloned
        if self.owned:
            recipe.owned = self.owned
        return recipe

    def _finish_several(self, out: Any) -> str:
        made: list[tuple[int, torch.Tensor, Any, int]] = []
        targets = [t.untyped_storage() for t, _ in self.targets]
        seen: list[torch.UntypedStorage] = []
        for k, t in enumerate(flat(out)):
            if not isinstance(t, torch.Tensor):
                continue
            if why := oddity(t):
                return why
            storage = t.untyped_storage()
            if any(storage is s for s in targets) or any(storage is s for s in seen):
                continue
            if id(storage) in self.storages:
                return PART_OF_ARGUMENT
            seen.append(storage)
            made.append((k, t, storage, 0))
        for n, ((t, nbytes), storage) in enumerate(zip(self.targets, targets, strict=True)):
            if storage.nbytes() != nbytes:
                return "resizes what it writes to"
            made.append((~n, t, storage, 1))
        recipe = self._recipe()
        values = []
        for slot, t, storage, slack in made:
            value = Value(recipe, slot, t, slack)
            values.append(weakref.ref(value))
            self.session.remember(storage, value)
        recipe.values = values
        return ""
