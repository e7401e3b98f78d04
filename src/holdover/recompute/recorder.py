"""Watching forward: which op of the plan is running, what it would take to run it again, and what autograd saves.

A storage object's attribute `_holdover` tells what is known of its content: the Value that it holds, or the Pins that
recipes have on it. Storage objects keep their identity while the storage lives.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdover.recompute import random
from holdover.recompute._torch import (
    TorchDispatchMode,
    alias,
    current_graph_task_id,
    dispatch_mode_at,
    dispatch_modes,
    plain_kernels,
    pop_dispatch_mode,
    pop_saved_tensors_hooks,
    push_dispatch_mode,
    push_saved_tensors_hooks,
    saves_own_output,
    skip_in_dynamo,
    top_saved_tensors_hooks,
    yielding_to_transforms,
)
from holdover.recompute.geometry import covers_storage, geometry, oddity
from holdover.recompute.packing import pack as pack_storage
from holdover.recompute.recipe import SMALL_PIN_BYTES, Ledger, Pins, Recipe, Ref, SavedRef, Source, Value, Write, flat
from holdover.recompute.rules import OPS, Op, describe
from holdover.recompute.script import EMPTY, Compiled, call_key

PACK = "pack"
PART_OF_ARGUMENT = "returns part of an argument"


class Running(threading.local):
    """The session that this thread is in."""

    session: Session | None = None


RUNNING = Running()


class Unsafe(Exception):  # noqa: N818 - caught here, never seen outside
    """This op cannot be recorded; the message says why."""


class Frame:
    """A call of a module, with the position of its next op."""

    __slots__ = ("children", "index", "key", "script", "seen")

    def __init__(self, key: str, script: Mapping[int, tuple[str, str]]) -> None:
        self.key, self.script, self.index = key, script, 0
        self.children: dict[str, int] = {}
        self.seen: list[int] = []  # positions in the script that were reached


class Passed:
    """A kept tensor in the care of saved-tensor hooks that were on before ours."""

    __slots__ = ("packed", "unpack")

    def __init__(self, unpack: Callable[[Any], torch.Tensor], packed: Any) -> None:
        self.unpack, self.packed = unpack, packed


class Session(TorchDispatchMode):
    """One forward pass under a plan: a dispatch mode and a pair of saved-tensor hooks.

    Args:
        compiled: the script.
        key: the call that ops belong to until a frame is entered.
        owner: the installation whose frames count; None until one is entered.
    """

    supports_higher_order_operators = True
    yields_to_transforms = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its wrapper would cost a microsecond per op; skip_in_dynamo below does the same for nothing

    def __init__(self, compiled: Compiled, key: str, owner: object = None) -> None:
        self.compiled, self.owner = compiled, owner
        self.ledger = Ledger()
        self.frame = Frame(key, compiled.scripts.get(key, EMPTY))
        self.idle = Frame("", EMPTY)
        self.frames = [self.frame]
        self.modules: list[torch.nn.Module] = []  # on the call stack
        self.inputs: set[int] = set()  # storages of the model's arguments
        self.made: list[weakref.ref[Any]] = []  # storages that hold a recipe's value
        self.home = current_graph_task_id()
        self.mismatches: list[tuple[str, int, str, str]] = []
        self.unsafe: dict[tuple[str, str], int] = {}
        self.matched = 0
        self.outer: tuple[Any, Any] | None = None
        self.lift = yielding_to_transforms()

    # -- being there ----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Start watching this thread."""
        self.outer = top_saved_tensors_hooks(False)
        self.lift.__enter__()
        push_saved_tensors_hooks(self.pack, unpack)
        push_dispatch_mode(self)
        RUNNING.session = self

    def leave(self) -> None:
        """Stop watching. Recipes live on where autograd has saved what they make, or what is made from that."""
        RUNNING.session = None
        pop_dispatch_mode(None)
        pop_saved_tensors_hooks()
        self.lift.__exit__()
        self.modules.clear()
        self.outer = None
        for ref in self.made:
            storage: Any = ref()
            note = getattr(storage, "_holdover", None)
            if type(note) is Value and note.recipe.ledger is self.ledger:
                del storage._holdover
        self.made.clear()

    def call(
        self, path: str, module: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run a module's `forward` in a frame of its own."""
        parent = self.frame
        if parent is self.idle:
            return forward(*args, **kwargs)
        occurrence = parent.children.get(path, 0)
        parent.children[path] = occurrence + 1
        key = call_key(parent.key, path, occurrence)
        compiled = self.compiled
        if key not in compiled.open:
            self.frame = self.idle
            quiet = key in compiled.quiet and dispatch_mode_at(dispatch_modes() - 1) is self
            if quiet:
                pop_dispatch_mode(None)
            try:
                return forward(*args, **kwargs)
            finally:
                self.frame = parent
                if quiet:
                    push_dispatch_mode(self)
        self.frame = frame = Frame(key, compiled.scripts.get(key, EMPTY))
        self.frames.append(frame)
        self.modules.append(module)
        try:
            return forward(*args, **kwargs)
        finally:
            self.frame = parent
            self.modules.pop()

    # -- ops ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = OPS.get(id(func)) or describe(func)
        if op.simple and current_graph_task_id() == self.home:
            frame = self.frame
            index = frame.index
            frame.index = index + 1
            if index in frame.script:
                return self._planned(op, frame, index, args, kwargs or {})
            return func._op(*args, **kwargs) if kwargs else func._op(*args)
        return self._unusual(op, args, kwargs or {})

    def _unusual(self, op: Op, args: Any, kwargs: Any) -> Any:
        """An op that writes to something, is not counted, or runs in a backward pass inside forward."""
        if not op.counted:
            return op.func(*args, **kwargs)
        if current_graph_task_id() == self.home:
            frame = self.frame
            index = frame.index
            frame.index = index + 1
            if index in frame.script:
                return self._planned(op, frame, index, args, kwargs)
        return self._left_alone(op, args, kwargs)

    def _left_alone(self, op: Op, args: Any, kwargs: Any) -> Any:
        if not op.simple:
            for t in written(op, args, kwargs):
                about_to_write(t)
        return op.func(*args, **kwargs)

    def _planned(self, op: Op, frame: Frame, index: int, args: Any, kwargs: Any) -> Any:
        name, action = frame.script[index]
        frame.seen.append(index)
        if name != op.name:
            self.mismatches.append((frame.key, index, name, op.name))
            return self._left_alone(op, args, kwargs)
        self.matched += 1
        if op.obstacle:
            return self._refused(op, op.obstacle, args, kwargs)
        if action == PACK:
            return self._packed(op, args, kwargs)
        if torch.is_inference_mode_enabled():
            return self._refused(op, "inference mode", args, kwargs)
        try:
            draft = Draft(self, op, args, kwargs)
        except Unsafe as why:
            return self._refused(op, str(why), args, kwargs)
        for t in draft.overwritten:
            about_to_write(t)
        out = op.func(*args, **kwargs)
        if why_not := draft.finish(out):
            self._note_unsafe(op, why_not)
        return out

    def remember(self, storage: Any, value: Value) -> None:
        """Note on a storage what its content was made by. The note lasts until the session ends."""
        storage._holdover = value
        self.made.append(weakref.ref(storage))

    def _refused(self, op: Op, why: str, args: Any, kwargs: Any) -> Any:
        self._note_unsafe(op, why)
        return self._left_alone(op, args, kwargs)

    def _note_unsafe(self, op: Op, why: str) -> None:
        self.unsafe[op.name, why] = self.unsafe.get((op.name, why), 0) + 1

    def _packed(self, op: Op, args: Any, kwargs: Any) -> Any:
        """Run an op whose outputs are kept packed where that makes them smaller."""
        out = self._left_alone(op, args, kwargs)
        targets = written(op, args, kwargs) if op.writes else []
        taken = {id(t.untyped_storage()) for t in tensors_in(args, kwargs) if not oddity(t)}
        results = [t for t in flat(out) if isinstance(t, torch.Tensor)]
        fresh = [t for t in results if not oddity(t) and id(t.untyped_storage()) not in taken]
        with plain_kernels():
            for t, slack in [*((t, 0) for t in fresh), *((t, 1) for t in targets if not oddity(t))]:
                packed = pack_storage(t.detach())
                if packed is None:
                    continue
                recipe = Recipe(self.ledger, "", packed[0], packed[1], None, [], None)
                storage: Any = t.untyped_storage()
                value = Value(recipe, 0, t, slack)
                recipe.values = (weakref.ref(value),)
                self.remember(storage, value)
                self.ledger.packed_bytes += packed[1][0].nbytes
                self.ledger.packed_from_bytes += storage.nbytes()
        return out

    # -- saved tensors --------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd is to hold in place of `tensor`."""
        storage: Any
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, or wrapped by a function transform
            return self._kept(tensor)
        note = getattr(storage, "_holdover", None)
        if type(note) is Value and note.recipe.ledger is self.ledger and not oddity(tensor):
            gap = tensor._version - note.version
            if gap == 0 or gap == note.slack:
                return SavedRef(note, geometry(tensor), storage)
            del storage._holdover
        return self._kept(tensor)

    def _kept(self, tensor: torch.Tensor) -> Any:
        if self.outer is None and not saves_own_output(tensor):
            return tensor, tensor._version
        frame, self.frame = self.frame, self.idle  # what is done here, and what hooks do, is no op of forward
        try:
            if self.outer is None:
                return alias(tensor), tensor._version
            pack, unpack = self.outer
            return Passed(unpack, pack(tensor))
        finally:
            self.frame = frame


def unpack(packed: Any) -> torch.Tensor:
    """The tensor that autograd saved, from what `Session.pack` gave it.

    Raises:
        RuntimeError: a kept tensor was modified in place since, as autograd itself would say without hooks.
        ReplayError: what it would have to be made from was.
    """
    kind = type(packed)
    if kind is tuple:
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
                "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
                "with torch.autograd.set_detect_anomaly(True)."
            )
        return tensor  # type: ignore[no-any-return]
    if kind is Passed:
        return packed.unpack(packed.packed)  # type: ignore[no-any-return]
    session = RUNNING.session
    if session is None:
        return packed.get()  # type: ignore[no-any-return]
    frame, session.frame = session.frame, session.idle  # what is replayed now is no op of forward
    try:
        return packed.get()  # type: ignore[no-any-return]
    finally:
        session.frame = frame


class Draft:
    """The recipe of an op that is about to run.

    Raises:
        Unsafe: the op cannot be made to run again on these arguments.
    """

    __slots__ = ("args", "draw", "inputs", "kwargs", "op", "overwritten", "session", "storages", "targets")

    def __init__(self, session: Session, op: Op, args: Any, kwargs: Any) -> None:
        self.session, self.op = session, op
        self.inputs: list[Value] = []
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.targets: list[tuple[torch.Tensor, int]] = []
        self.overwritten: list[torch.Tensor] = []
        self.draw = None
        if not op.simple:
            self.overwritten = written(op, args, kwargs)
            if op.hidden_writes is not None and op.hidden_writes(args):
                args = (*args[:3], None, None, *args[5:])
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
            return Write(None, where, a.device)
        ref = self._reference(a)
        return Write(ref.node, ref.geometry, a.device)

    def _reference(self, tensor: torch.Tensor) -> Ref:
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
                return Ref(note, None if same else geometry(tensor))
            del storage._holdover  # written to while nobody watched
        return self._pin(tensor, storage, note)

    def _pin(self, tensor: torch.Tensor, storage: Any, note: Any) -> Ref:
        if tensor.is_inference():
            raise Unsafe("inference tensor")
        version, ledger = tensor._version, self.session.ledger
        if type(note) is not Pins:
            note = Pins()
            storage._holdover = note
        source = note.find(version, ledger)
        if source is None:
            source = Source(tensor if tensor.grad_fn is None else alias(tensor), version, ledger)
            if storage.nbytes() <= SMALL_PIN_BYTES and self._existed(tensor, storage):
                source.copy_on_write()
            note.add(source)
        return Ref(source, None if source.tensor is tensor else geometry(tensor))

    def _existed(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether it is one of the model's arguments, or a buffer of a module that is running."""
        if storage._cdata in self.session.inputs:
            return True
        if tensor.requires_grad:
            return False
        buffers = (b for m in self.session.modules for b in m._buffers.values() if b is not None)
        return any(not oddity(b) and b.untyped_storage() is storage for b in buffers)

    def finish(self, out: Any) -> str:
        """Leave the recipe on what the op made. Returns why not, where that turns out to be impossible only now."""
        op, targets = self.op, self.targets
        if not targets and isinstance(out, torch.Tensor):
            storage: Any = out.untyped_storage() if (why := oddity(out)) == "" else None
            if storage is None or id(storage) in self.storages:
                return why or PART_OF_ARGUMENT
            recipe = Recipe(self.session.ledger, op.name, op.func._op, self.args, self.kwargs, self.inputs, self.draw)
            value = Value(recipe, 0, out, 0)
            recipe.values = (weakref.ref(value),)
            self.session.remember(storage, value)
            return ""
        return self._finish_several(out)

    def _finish_several(self, out: Any) -> str:
        op = self.op
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
        recipe = Recipe(self.session.ledger, op.name, op.func._op, self.args, self.kwargs, self.inputs, self.draw)
        values = []
        for slot, t, storage, slack in made:
            value = Value(recipe, slot, t, slack)
            values.append(weakref.ref(value))
            self.session.remember(storage, value)
        recipe.values = values
        return ""


def written(op: Op, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that this call writes to."""
    if op.hidden_writes is not None and op.hidden_writes(args):
        return [t for t in args[3:5] if t is not None]
    found: list[torch.Tensor] = []
    for position, name in op.writes:
        a = args[position] if position < len(args) else kwargs.get(name)
        found += [t for t in flat(a) if isinstance(t, torch.Tensor)]
    return found


def tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an op's arguments."""
    return [t for t in flat([*args, *kwargs.values()]) if isinstance(t, torch.Tensor)]


def about_to_write(tensor: torch.Tensor) -> None:
    """Save what recipes need of a storage that is going to be written to, and forget what made its content."""
    if oddity(tensor):
        return
    storage: Any = tensor.untyped_storage()
    note = getattr(storage, "_holdover", None)
    if note is None:
        return
    if type(note) is Value:
        note.original = None
    else:
        for ref in note:
            if (source := ref()) is not None:
                source.copy_on_write()
    del storage._holdover


skip_in_dynamo(
    Session.__torch_dispatch__, Session._unusual, Session._left_alone, Session._planned, Session._packed, Session.pack,
    Session.call, unpack, Draft.__init__, Draft.finish, about_to_write, written,
)  # fmt: skip
