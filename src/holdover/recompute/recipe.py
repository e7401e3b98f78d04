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
 3. Pins of storages of at most 4 KiB (SMALL_PIN_BYTES) that existed before the session (buffers of the model,
    tensors among the root call's arguments) hold a copy of the storage, made when first pinned, so that
    later changes do no harm. All pins of one content of one storage share one copy. Parameters are never copied.
    The running statistics that a batch norm in evaluation mode reads are copied whatever their size: one in training
    would change them without a sign of it.
 4. A random op adds the generator's state (5,056 bytes on CPU, 16 on CUDA), except where its dropout probability is 0.
    While an op without a generator argument is replayed on the CPU, the state that the process is in is put aside:
    5,056 bytes more. Ops with one are given a generator of their own.

Copy on write
 5. Before any op of the session (recorded or not) writes to a pinned storage, that storage is copied once (all of it)
    for all of its pins, and they let go of the original. Copies of rule 3 are not copied again. Batch norm's running
    statistics in training count as written, though the schema hides it. A pin whose content has changed before, by
    what is no op (a custom function that says so by mark_dirty), gets no copy: its recipes are refused in backward.
    Where the op just before, in the same call, is a recorded `clone` of that content that autograd has saved (as it
    does before an op in place whose backward reads what it overwrites), the pins go over to the clone instead, if that
    lies on its storage the same way. Its replay is then to return what is pinned: no bytes, no time.
 6. A write that is not recorded ends the storage's recipe: from then on its content is kept. Saved tensors and recipes
    that refer to the content before the write stay right (they hold the old recipe), and take no bytes.
 7. A recorded write makes a new value whose recipe refers to (or pins: then rule 5 copies right away) the old content,
    unless it overwrites all of the storage without reading it (`ops.OVERWRITES`, `out=`): then it refers to nothing.

Replay, in backward, at the moment autograd unpacks a saved tensor of a value that has a recipe
 8. If the tensor that the op made in forward is still alive (the program holds it) and was not written to since, nor
    given other memory (by assigning to its .data), it is used: no replay. A view that is still alive does the same
    only where autograd keeps the view's base alive.
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
    was never handed to autograd; else it works on a copy of the whole storage. A clone right before it (as in rule 5)
    of an old content that has a recipe is made first, if it is wanted in this pass: often nobody else is left then.
14. A packed value (action "pack") is a recipe with no inputs that holds the packed bytes from the moment its op has
    run; unpacking is its replay, and rules 8 to 12 hold for it. Its storage in forward is not affected.

Stages (what a plan of nested replays adds)
15. A plan may give an op a stage, and a stage that it is held from. A replay happens on behalf of the stage of the
    value that autograd unpacks. Where that is higher than the `held_from` of a recipe that has to run, the run is a
    passage: what it makes is not cached, whoever wants it, and the recipe does not count as replayed for rule 11, so
    that it keeps wanting its inputs. It runs again when a stage asks that it is held from.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from holdover.errors import ReplayError
from holdover.memory.timeline import FOREVER
from holdover.recompute._torch import view_of
from holdover.recompute.geometry import Geometry, copy_with_storage, geometry, rebuild
from holdover.recompute.random import Draw, default_generator
from holdover.recompute.settings import now

if TYPE_CHECKING:
    from holdover.recompute.ledger import Ledger, Replay

NO_PASS = -1


class Source:
    """A pin: one content of a kept storage, shared by the recipes of one session that read it."""

    __slots__ = ("__weakref__", "ledger", "nbytes", "origin", "owner", "storage", "tensor", "version")

    def __init__(
        self, tensor: torch.Tensor, version: int, ledger: Ledger, owner: torch.nn.Module | None = None
    ) -> None:
        self.tensor, self.origin, self.ledger = tensor, version, ledger
        self.owner = owner  # frees the storage after forward, and can fill it again with the same content
        self.version: int | None = version  # None: the copy is ours
        self.storage: torch.UntypedStorage | None = tensor.untyped_storage()  # `.data = ` gives a tensor another
        self.nbytes = self.storage.nbytes()

    def copy_on_write(self, counted: int = 0) -> None:
        """Let go of the storage, which is about to be written to, for a copy of it.

        What was changed before, unseen, is left as it is, to be refused. `counted`: writes that may be counted already.
        """
        if self.version is None or self.owner is not None:  # an owner writes what was there before
            return
        if self.tensor._version - self.version in (0, counted) and self.tensor.untyped_storage() is self.storage:
            self.tensor, self.version, self.storage = copy_with_storage(self.tensor.detach()), None, None

    def go_over(self, clone: torch.Tensor) -> None:
        """Let go of the storage, which is about to be written to, for that of an equal tensor."""
        self.tensor, self.version, self.storage = clone, clone._version, clone.untyped_storage()

    def freed(self) -> bool:
        """Whether the storage was given back."""
        return self.tensor.untyped_storage().nbytes() < self.nbytes

    def way_out(self) -> str:
        """What to do about a content that changed."""
        if self.freed():
            return (
                "Keep it until backward has run. Of parameters that FullyShardedDataParallel frees: shard with "
                "fully_shard, or with ShardingStrategy.SHARD_GRAD_OP."
            )
        return (
            "Write to it after backward; or make a new tensor in place of writing (self.x = self.x * 2 for "
            "self.x.mul_(2)); or write in the model's forward with gradients on, where it is seen and copied before."
        )

    def changed(self) -> str:
        """What happened to the content since it was pinned; "" if nothing did."""
        if self.version is not None and self.tensor._version != self.version:
            return f"was modified in place (version {self.tensor._version}, {self.version} when it was read)"
        if self.storage is not None and self.tensor.untyped_storage()._cdata != self.storage._cdata:
            return "was given other memory (by assigning to its .data)"
        if self.freed():
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
        tensor, at: the replayed content, while cached, and its version when it was made.
        handed: `tensor` was given to autograd, or is pinned: not to be written to.
        claims: living saved tensors of it, and living and claimed recipes that refer to it.
        done, done_in: how many of the claims are satisfied in that pass.
        original: the tensor made in forward, while it lives unchanged.
        version, slack: `original`'s version then; an in-place op's own increment may come after us.
        storage: what `original` lay on then; assigning to its .data changes no version.
        saved: autograd has saved it.
        pin: the pin that lies on the same storage, where one has gone over to a clone.
    """

    # Defaults on the class, and no __slots__: most values never need most of these, and making one must be quick.
    tensor: torch.Tensor | None = None
    handed = saved = False
    claims = done = at = 0
    done_in = NO_PASS
    pin: weakref.ref[Source] | None = None

    def __init__(self, recipe: Recipe, slot: int, tensor: torch.Tensor, slack: int) -> None:
        self.recipe, self.slot, self.slack, self.version = recipe, slot, slack, tensor._version
        self.original: weakref.ref[torch.Tensor] | None = weakref.ref(tensor)
        self.storage = weakref.ref(tensor.untyped_storage())

    def alive(self) -> torch.Tensor | None:
        """The tensor that forward made, if it is still there unchanged."""
        original = self.original
        if original is None:
            return None
        tensor = original()
        if tensor is None:
            self.original = None
        elif (
            tensor._version != self.version and tensor._version != self.version + self.slack
        ) or tensor.untyped_storage() is not self.storage():
            self.original = None
            return None
        return tensor

    def wanted(self, task: int) -> bool:
        return self.claims > (self.done if self.done_in == task else 0)


class Ref:
    """A tensor argument of a recipe: the value or pin it lies on, and where."""

    __slots__ = ("geometry", "node")

    def __init__(self, node: Value | Source, geometry: Geometry) -> None:
        self.node, self.geometry = node, geometry


class Write:
    """A tensor argument that the op writes to: what it lies on, and where (None: it is the whole of it).

    Without a node, it starts from fresh memory on `device`.
    """

    __slots__ = ("device", "geometry", "node")

    def __init__(self, node: Value | Source | None, geometry: Geometry | None, device: torch.device) -> None:
        self.node, self.geometry, self.device = node, geometry, device


class Recipe:
    """An op that can run again.

    Attributes:
        inputs: the values that its references lie on, one entry for each reference, in order.
        args: as in forward, with a Ref, Write, Value or Source (the whole of it) in place of each tensor.
        values: what it makes that somebody may ask for (one, or several), weakly: a cycle would keep pins until the
            collector comes.
        claims: the sum of its values' claims. While there are none, it makes no claims on its inputs.
        finished: the pass in which it has run for good, or turned out not to be needed.
        stage, held_from: the plan's, for rule 15.
        returns_pin: it is a clone, and what it read is pinned as that clone.
        clone: the value that a clone made right before of what this op overwrites, to be made first (rule 13).
        owned: the pins that it holds of what an owner may have freed.
        grad: whether gradients were on; some kernels ask.
        settings: what else was set that kernels ask for.
    """

    claims = 0
    finished = NO_PASS
    stage, held_from = 0, FOREVER
    returns_pin = False
    clone: weakref.ref[Value] | None = None
    owned: Sequence[Source] = ()

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
        self.values: weakref.ref[Value] | Sequence[weakref.ref[Value]] = ()
        self.grad, self.settings = torch.is_grad_enabled(), now()

    def run(self, replay: Replay) -> list[Any]:
        """Run the op again: its results, then the written arguments, last one first, so that slot ~n is the n-th."""
        if self.returns_pin:
            return [self._argument(self.args[0], replay, [])]
        written: list[torch.Tensor] = []
        held, args = replay.held, []
        for a in self.args:
            args.append(held[a] if type(a) is Value else self._argument(a, replay, written))
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
        aside = generator.get_state()
        generator.set_state(draw.state)
        try:
            return self.function(*args, **kwargs)
        finally:
            generator.set_state(aside)

    def _argument(self, a: Any, replay: Replay, written: list[torch.Tensor]) -> Any:
        kind = type(a)
        if kind is Ref:
            node = a.node
            return rebuild(replay.held[node] if type(node) is Value else self._pinned(node), a.geometry)
        if kind is Value:
            return replay.held[a]
        if kind is Source:
            return self._pinned(a)
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
                f"{self.ledger.describe(source.tensor)}. {source.way_out()} "
                "Or take the plan off: holdover.remove_(model)."
            )
        return source.tensor

    def _target(self, a: Write, replay: Replay) -> torch.Tensor:
        node, where = a.node, a.geometry
        if node is None:
            assert where is not None
            return torch.empty_strided(where[1], where[2], dtype=where[0], device=a.device)
        if isinstance(node, Value):
            base = replay.held[node]
            if node not in replay.owned or replay.uses[node] > 1 or node.tensor is not None:
                base = copy_with_storage(base.detach())
        else:
            base = copy_with_storage(self._pinned(node).detach())
        return base if where is None else rebuild(base, where)


class Twin:
    """A recorded clone, until the next op, which may be what writes over the content that it read (rules 5 and 13)."""

    __slots__ = ("clone", "index", "read", "value")

    def __init__(self, read: Value | Source, value: Value, clone: torch.Tensor | None, index: int) -> None:
        self.read, self.value, self.clone, self.index = read, value, clone, index

    def serve(self, source: Source) -> bool:
        """Let the pin go over to the clone, if it is a pin of what was cloned. Returns whether it did."""
        pinned = source.tensor
        if source is not self.read or self.clone is None or not self.value.saved or pinned._version != source.version:
            return False
        if self.clone._version != self.value.version:
            return False
        dtype, size, stride, offset, bits = geometry(pinned)
        if dtype != self.clone.dtype or bits:
            return False
        source.go_over(view_of(self.clone, size, stride, offset))
        self.value.pin, self.value.recipe.returns_pin = weakref.ref(source), True
        return True


def living_values(recipe: Recipe) -> list[Value]:
    """What the recipe makes that somebody may still ask for."""
    values = recipe.values
    refs = values if isinstance(values, (tuple, list)) else (values,)
    return [v for ref in refs if (v := ref()) is not None]


def flat(out: Any) -> list[Any]:
    """An op's results in one list."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [x for o in out for x in (o if isinstance(o, (list, tuple)) else (o,))]
    return [out]
