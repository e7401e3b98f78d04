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

from holdover.recompute._torch import (
    TorchDispatchMode,
    alias,
    current_graph_task_id,
    dispatch_mode_at,
    dispatch_modes,
    foreign_modes,
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
from holdover.recompute.draft import Draft, Unsafe
from holdover.recompute.geometry import geometry, oddity
from holdover.recompute.ledger import Ledger
from holdover.recompute.mutation import about_to_write, tensors_in, written
from holdover.recompute.packing import pack as pack_storage
from holdover.recompute.recipe import Recipe, Twin, Value, flat
from holdover.recompute.rules import OPS, Op, describe
from holdover.recompute.saved import Awaiting, Passed, SavedRef, unchanged
from holdover.recompute.script import EMPTY, Compiled, Entry
from holdover.recompute.shapes import Guide
from holdover.recompute.sharded import MARK, Frees
from holdover.trace.frames import call_key
from holdover.trace.varying import varies

PACK = "pack"


class Running(threading.local):
    """The session that this thread is in."""

    session: Session | None = None


RUNNING = Running()


class Frame:
    """A call of a module, with the position of its next op."""

    __slots__ = ("children", "index", "key", "script", "seen")

    def __init__(self, key: str, script: Mapping[int, Entry]) -> None:
        self.key, self.script, self.index = key, script, 0
        self.children: dict[str, int] = {}
        self.seen: list[int] = []  # positions in the script that were reached


class Session(TorchDispatchMode):
    """One forward pass under a plan: a dispatch mode and a pair of saved-tensor hooks.

    Args:
        compiled: the script.
        key: the call that ops belong to until a frame is entered.
        owner: the installation whose frames count; None until one is entered.
        guide: chooses another script when the model is called; None to stay with this one.
    """

    supports_higher_order_operators = True
    yields_to_transforms = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its wrapper would cost a microsecond per op; skip_in_dynamo below does the same for nothing

    def __init__(self, compiled: Compiled, key: str, owner: object = None, guide: Guide | None = None) -> None:
        self.compiled, self.owner, self.guide = compiled, owner, guide
        self.ledger = Ledger()
        self.frame = Frame(key, compiled.scripts.get(key, EMPTY))
        self.idle = Frame("", EMPTY)
        self.frames = [self.frame]
        self.modules: list[torch.nn.Module] = []  # on the call stack
        self.frees = Frees(self.modules)
        self.inputs: set[int] = set()  # storages of the model's arguments
        self.buffers: set[int] | None = None  # and of its buffers
        self.made: list[weakref.ref[Any]] = []  # storages that hold a recipe's value
        self.home = current_graph_task_id()
        self.mismatches: list[tuple[str, int, str, str]] = []
        self.unsafe: dict[tuple[str, str], int] = {}
        self.awaiting: list[weakref.ref[Awaiting]] = []
        self.twin: Twin | None = None
        self.asides, self.present = 0, self.frame  # labels within one of fully_shard's, and the frame before it
        self.matched = 0
        self.outer: tuple[Any, Any] | None = None
        self.lift, self.lifted = yielding_to_transforms(), False

    # -- being there ----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Start watching this thread. Whatever comes of it, an interrupt too, `leave` has to be called."""
        self.outer, self.ledger.modes = top_saved_tensors_hooks(False), foreign_modes()
        self.lift.__enter__()
        self.lifted = True
        push_saved_tensors_hooks(self.pack, unpack)
        push_dispatch_mode(self)
        RUNNING.session = self

    def leave(self) -> None:
        """Stop watching, however far `enter` had come.

        Recipes live on where autograd has saved what they make, or what is made from that.
        """
        RUNNING.session = None
        if dispatch_modes() and dispatch_mode_at(dispatch_modes() - 1) is self:
            pop_dispatch_mode(None)
        hooks = top_saved_tensors_hooks(False)
        if hooks is not None and hooks[0] == self.pack:
            pop_saved_tensors_hooks()
        if self.lifted:
            self.lifted = False
            self.lift.__exit__()
        self.modules.clear()
        self.outer = None
        for ref in self.made:
            storage: Any = ref()
            note = getattr(storage, "_holdover", None)
            if type(note) is Value and note.recipe.ledger is self.ledger:
                del storage._holdover
        self.made.clear()

    def stand_back(self) -> None:
        """Plan nothing: what others' hooks around forward do with what is saved may matter, in value and in number."""
        planned = sum(len(entries) for entries in self.compiled.scripts.values())
        self.unsafe["all that is planned", "inside saved-tensor hooks, as of activation checkpointing"] = planned
        self.compiled, self.guide = Compiled({}), None
        self.frame.script = EMPTY

    def follow(self, compiled: Compiled) -> None:
        """Go on by another script, from the present frame on."""
        if compiled is not self.compiled:
            self.compiled = compiled
            self.frame.script = compiled.scripts.get(self.frame.key, EMPTY)

    def call(
        self, path: str, module: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run a module's `forward` in a frame of its own."""
        parent, self.twin = self.frame, None
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
            self.frame, self.twin = parent, None
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
            if op.labels:
                self._set_aside(op, args)
            return op.func._op(*args, **kwargs)
        if current_graph_task_id() == self.home:
            frame = self.frame
            index = frame.index
            frame.index = index + 1
            if index in frame.script:
                return self._planned(op, frame, index, args, kwargs)
        return self._left_alone(op, args, kwargs)

    def _set_aside(self, op: Op, args: Any) -> None:
        """What fully_shard does around a module's forward, by its labels, is no op of the module that calls it."""
        if op.labels < 0:
            if self.asides:
                self.asides -= 1
                if not self.asides:
                    self.frame = self.present
        elif self.asides or str(args[0]).startswith(MARK):
            if not self.asides:
                self.present, self.frame = self.frame, self.idle
            self.asides += 1

    def _left_alone(self, op: Op, args: Any, kwargs: Any) -> Any:
        if not op.simple:
            for t in written(op, args, kwargs):
                about_to_write(t, counted=op.counted_before)
        return op.func(*args, **kwargs)

    def _planned(self, op: Op, frame: Frame, index: int, args: Any, kwargs: Any) -> Any:
        entry = frame.script[index]
        frame.seen.append(index)
        twin, self.twin = self.twin, None
        if entry.name != op.name:
            self.mismatches.append((frame.key, index, entry.name, op.name))
            return self._left_alone(op, args, kwargs)
        self.matched += 1
        if op.obstacle:
            return self._refused(op, op.obstacle, args, kwargs)
        if torch.is_inference_mode_enabled():
            return self._refused(op, "inference mode", args, kwargs)
        if entry.action == PACK:
            return self._packed(op, args, kwargs)
        if op.may_vary and (why := varies(op.packet, args, kwargs)):
            return self._refused(op, why, args, kwargs)
        try:
            draft = Draft(self, op, args, kwargs, entry)
        except Unsafe as why:
            return self._refused(op, str(why), args, kwargs)
        if twin is not None and twin.index + 1 == index:
            draft.follow(twin)
        else:
            twin = None
        for t in draft.overwritten:
            about_to_write(t, twin)
        twin = None
        out = op.func(*args, **kwargs)
        if why_not := draft.finish(out):
            self._note_unsafe(op, why_not)
        elif op.clones and index + 1 in frame.script:
            self.twin = draft.twin(out, index)
        for waiting in [w() for w in self.awaiting]:
            if waiting is not None and not why_not and waiting.frame is frame and waiting.index == index:
                waiting.settle(draft.forgotten)
        self.awaiting.clear()
        return out

    def is_buffer(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is a buffer's: one that the model had when it was first asked, or a running module's now."""
        if self.buffers is None:
            whole = self.modules[0].buffers() if self.modules else ()
            self.buffers = {b.untyped_storage()._cdata for b in whole if not oddity(b)}
        if storage._cdata in self.buffers:
            return True
        running = (b for m in self.modules for b in m._buffers.values() if b is not None)
        return any(not oddity(b) and b.untyped_storage() is storage for b in running)

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
                recipe.values = weakref.ref(value)
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
            if self.frame.index in self.frame.script and not oddity(tensor):
                waiting = Awaiting(tensor, self.frame)
                self.awaiting.append(weakref.ref(waiting))
                return waiting
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
        return unchanged(*packed)
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


skip_in_dynamo(
    Session.__torch_dispatch__, Session._unusual, Session._left_alone, Session._planned, Session._packed, Session.pack,
    Session.call, Session._set_aside, unpack, unchanged, Draft.__init__, Draft.finish, about_to_write, written,
)  # fmt: skip
