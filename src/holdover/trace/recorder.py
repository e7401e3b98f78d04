"""The dispatch mode that watches a step and writes a Trace.

It stands above the fake tensor mode (or above real kernels) and below autograd, so it sees the ops that really run:
after autocast, after composite functions are taken apart, in backward as in forward.

Autograd's own hold on tensors is taken away while recording: a saved tensor is replaced by a note of its geometry, and
made anew when backward asks for it. What then keeps a storage alive is the program alone, and the trace can tell a
value that only autograd keeps (which a plan may drop) from one that the program holds anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from holdover.trace._torch import (
    ASKS_FOR_VALUES,
    TorchDispatchMode,
    current_autograd_node,
    sequence_number,
)
from holdover.trace.fake import STAND_INS
from holdover.trace.frames import call_key
from holdover.trace.graph import (
    EXISTING,
    OUTSIDE,
    Call,
    Event,
    Op,
    Phase,
    Signature,
    Slot,
    Storage,
    TensorSpec,
    Trace,
)
from holdover.trace.known import KnownValues
from holdover.trace.live import LiveStorages, version_of
from holdover.trace.ops import (
    OVERWRITES,
    UNINITIALISED,
    draws,
    obstacle,
    op_name,
    statistics_given,
    takes_a_place,
    written_arguments,
)
from holdover.trace.passes import Passes
from holdover.trace.plain_backward import PlainBackward
from holdover.trace.tensors import Frame, Packed, covers_storage, device_of, is_plain, plain_parts
from holdover.trace.varying import why_varying
from holdover.trace.wrapped import refuse_collective

UNSEEN = "written to since by something that is no op, as a custom function's mark_dirty says"


class Recorder(TorchDispatchMode):
    """Records into `self.trace`. Also a `frames.Counter`.

    Args:
        corrections: for ops whose fake kernels give wrong outputs, a function from the op's signature to what each
            output truly is (or None for ops that tell the truth).
        known: values of fake tensors that are known all the same.
        real: tensors hold data, so saved ones are copied where otherwise a note of their geometry is enough.
    """

    supports_higher_order_operators = True
    yields_to_transforms = True  # see transforms.py

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each op passes through two wrappers that only matter inside a compiled frame

    def __init__(
        self,
        *,
        real: bool,
        corrections: Callable[[Signature], list[TensorSpec | None] | None] | None = None,
        known: KnownValues | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.real, self.corrections, self.known = real, corrections, known
        self.phase, self.step = Phase.FORWARD, 0
        self.live = LiveStorages(self.trace)
        self.signatures: dict[Any, int] = {}
        self.keys: dict[tuple[int, str], int] = {}
        self.paused = False
        self.plain = PlainBackward(self)
        self.passes = Passes(lambda task: self.trace.events.append((Event.PASS, task)))
        self.escaped: dict[int, str] = {}  # storage -> how its memory was handed out
        self.fresh_slots: list[int] = []  # saved since the last op
        self.last_sequence = sequence_number()
        self.op_of_node: dict[int, int] = {}
        self.trace.calls.append(Call(0, OUTSIDE, "", "", -1))
        self.frames = [Frame(0)]

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """What the recorder itself does with tensors is no part of the step."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    # -- module calls ---------------------------------------------------------------------------------------------

    def begin(self, step: int, phase: Phase) -> None:
        """From now on ops belong to this phase of this training step."""
        if step != self.step:
            self.frames = [Frame(0)]
        self.step, self.phase = step, phase

    def enter(self, path: str, kind: str) -> None:
        parent = self.frames[-1]
        occurrence = parent.children.get(path, 0)
        parent.children[path] = occurrence + 1
        key = call_key(self.trace.calls[parent.call].key, path, occurrence)
        call = self.keys.get((parent.call, key))
        if call is None:
            call = self.keys[parent.call, key] = len(self.trace.calls)
            self.trace.calls.append(Call(call, key, path, kind, parent.call))
        self.frames.append(Frame(call))

    def leave(self) -> None:
        self.frames.pop()

    # -- ops ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or getattr(func, "namespace", "") == "prim":
            return func(*args, **kwargs)
        if self.real:
            refuse_collective(func)
        return self.plain.run(func, args, kwargs) if self.passes.look() else self.record(func, args, kwargs)

    def record(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the op and note what it did."""
        trace = self.trace
        number = len(trace.ops)
        in_backward = self.passes.look()
        if in_backward:
            call, index, of = self.place_in_backward()
        else:
            call, index, of = self.place_in_forward(func, number)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        odd = [t for t in tensors if not is_plain(t)]
        written = self.written(func, args, kwargs)
        forgotten = {id(t) for t, full in written if full}
        parts = [p for t in tensors for p in plain_parts(t) if id(p) not in forgotten]
        read = [self.live.lookup(p) for p in parts]
        if index >= 0 and not in_backward:
            for part in parts:
                self.expect_seen(part)
        inputs = tuple(dict.fromkeys(live.value for live in read))
        signature = self.signature(func, args, kwargs)
        op = Op(
            number, op_name(func), Phase.BACKWARD if in_backward else self.phase, self.step, call, index, signature,
            inputs, (), random=draws(func, args, kwargs), of=of, statistics=self.statistics(func, args),
        )  # fmt: skip
        trace.ops.append(op)
        trace.events.append((Event.OP, number))

        out = self.run(func, args, kwargs, tensors)

        if op.name.startswith("aten.unsafe_"):  # the CPU's GRU: what is written to one part, the others do not count
            self.escaped.update((live.storage, "parts with version counters of their own") for live in read)
        out = self.corrected(out, signature)
        outputs, writes = [], []
        for t, full in written:
            if op.name.startswith("aten.set_.") and self.live.find(t.untyped_storage()):
                continue  # now a view of memory that exists, whose content stays
            live = self.live.lookup(t)
            if t.untyped_storage().nbytes() != live.nbytes:  # resize_ or set_
                live = self.live.reallocate(t, live)
            before = live.value
            after = self.live.rewrite(live, t, number)
            writes.append((-1 if full else before, after))
            if full:
                self.retarget(before, after)
            outputs.append(after)
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        for t in results:
            if not is_plain(t):
                odd.append(t)
            for plain in plain_parts(t):
                if self.live.find(plain.untyped_storage()) is None:
                    outputs.append(self.live.allocate(plain, maker=number).value)
        self.fresh_slots.clear()
        op.outputs, op.writes = tuple(outputs), tuple(writes)
        op.keep = obstacle(func) or why_varying(func, args, kwargs)
        if odd and not op.keep:
            op.keep = f"{type(odd[0]).__name__} that is not a plain strided tensor"
        return out

    def place_in_forward(self, func: Any, number: int) -> tuple[int, int, int]:
        """The call that the op belongs to and its index there; -1, as it computes no gradient."""
        frame = self.frames[-1]
        index = frame.index if takes_a_place(func) else -1
        frame.index += index >= 0
        sequence = sequence_number()
        for made in range(self.last_sequence, sequence):
            self.op_of_node[made] = number
        self.last_sequence = sequence
        return frame.call, index, -1

    def place_in_backward(self) -> tuple[int, int, int]:
        """The call whose gradient is computed, no index, and the op of forward whose gradient it is (-1: unknown)."""
        node = current_autograd_node()
        of = self.op_of_node.get(node._sequence_nr(), -1) if node is not None else -1
        return self.trace.ops[of].call if of >= 0 else self.frames[-1].call, -1, of

    def run(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Call the op; where fake tensors cannot answer, and the values are known, answer for them."""
        if self.known is None:
            return func(*args, **kwargs)
        try:
            out = STAND_INS.get(func, func)(*args, **kwargs)
        except ASKS_FOR_VALUES:
            out = self.known.answer(func, args, kwargs)
            if out is NotImplemented:
                raise
            return out
        self.known.follow(func, args, kwargs, tensors, out)
        return out

    def written(self, func: Any, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, bool]]:
        """The plain tensors that the op writes to, and whether it forgets all that their storage held."""
        found = []
        for position, name in written_arguments(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for t in tree_leaves(value):
                if isinstance(t, torch.Tensor):
                    found += [(p, covers_storage(p) and forgets(func, name)) for p in plain_parts(t)]
        return found

    def statistics(self, func: Any, args: Any) -> tuple[int, ...]:
        """The storages of a batch norm's running statistics."""
        return tuple(self.live.lookup(t).storage for t in statistics_given(func, args) if is_plain(t))

    def corrected(self, out: Any, signature: int) -> Any:
        """The outputs as the real kernel makes them, where that is known to differ from what the fake one says."""
        if self.corrections is None or self.real:
            return out
        with self.unwatched():  # the kernel may have to be run for this
            truth = self.corrections(self.trace.signatures[signature])
        if truth is None:
            return out
        several = isinstance(out, (tuple, list))
        fixed = [
            t if spec is None else self.made_like(t, spec)
            for t, spec in zip(out if several else [out], truth, strict=True)
        ]
        return type(out)(fixed) if several else fixed[0]

    def made_like(self, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        dtype = getattr(torch, spec.dtype)
        same = tensor.untyped_storage().nbytes() == spec.storage_bytes and tensor.stride() == spec.stride
        if same and tensor.dtype == dtype:
            return tensor
        with self.unwatched():
            base = torch.empty(spec.storage_bytes // dtype.itemsize, dtype=dtype, device=tensor.device)
            return base.as_strided(spec.shape, spec.stride)

    def signature(self, func: Any, args: Any, kwargs: Any) -> int:
        runnable = True

        def spec(a: Any) -> Any:
            nonlocal runnable
            if isinstance(a, torch.Tensor):
                if not is_plain(a):
                    runnable = False
                    return None
                return TensorSpec(tuple(a.shape), a.stride(), str(a.dtype).removeprefix("torch."), str(device_of(a)),
                                  int(a.storage_offset()), a.untyped_storage().nbytes())  # fmt: skip
            if isinstance(a, (list, tuple)):
                return tuple(spec(x) for x in a)
            if a is None or isinstance(a, (bool, int, float, str, torch.dtype, torch.device, torch.layout,
                                           torch.memory_format, complex)):  # fmt: skip
                return a
            runnable = False
            return None

        shape = (op_name(func), tuple(spec(a) for a in args), tuple((k, spec(v)) for k, v in kwargs.items()), runnable)
        key = (shape, tuple(type(a) for a in args))  # 1, 1.0 and True are equal, yet not the same argument
        number = self.signatures.get(key)
        if number is None:
            number = self.signatures[key] = len(self.trace.signatures)
            self.trace.signatures.append(Signature(*shape))
        return number

    # -- saved tensors --------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        if not is_plain(tensor):
            return tensor
        live = self.live.lookup(tensor)
        self.expect_seen(tensor)
        trace = self.trace
        slot = len(trace.slots)
        trace.slots.append(Slot(slot, live.value, len(trace.ops) - 1, self.frames[-1].call))
        trace.events.append((Event.PACK, slot))
        self.fresh_slots.append(slot)
        if trace.storages[live.storage].category in EXISTING and trace.values[live.value].maker < 0:
            return Packed(self, slot, tensor, tensor)
        return Packed(self, slot, tensor, self.copy_of(tensor) if self.real else None)

    def expect_seen(self, tensor: torch.Tensor) -> None:
        """What was written to by no op (a custom function that marks it dirty says so) is not what its op made."""
        live = self.live.lookup(tensor)
        maker = self.trace.values[live.value].maker
        if maker >= 0 and live.unseen(tensor):
            self.trace.ops[maker].keep = self.trace.ops[maker].keep or UNSEEN

    def retarget(self, before: int, after: int) -> None:
        """What this op's own autograd saved of a tensor that the op then filled is the new content (RReLU's noise)."""
        for slot in self.fresh_slots:
            if self.trace.slots[slot].value == before:
                self.trace.slots[slot].value = after
                self.trace.events.remove((Event.PACK, slot))  # it is among the last few
                self.trace.events.append((Event.PACK, slot))

    def copy_of(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        with self.unwatched():
            copy: torch.UntypedStorage = tensor.untyped_storage().clone()
            return copy

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, Packed):
            return packed  # type: ignore[no-any-return]
        self.passes.look()
        self.trace.events.append((Event.UNPACK, packed.slot))
        if isinstance(packed.backup, torch.Tensor):
            return packed.backup
        value = self.trace.values[self.trace.slots[packed.slot].value]
        storage = self.trace.storages[value.storage]
        with self.unwatched(), torch.no_grad():
            tensor = self.made_again(packed, storage)
        if packed.known is not None and self.known is not None:
            self.known.learn(tensor, packed.known)
        self.live.watch(tensor.untyped_storage(), value.storage, value.id, storage.nbytes, version_of(tensor))
        return tensor

    def made_again(self, packed: Packed, storage: Storage) -> torch.Tensor:
        """A tensor of the saved geometry on a storage of its own."""
        size, stride, offset = packed.geometry
        if self.real:
            tensor = torch.empty(0, dtype=packed.dtype, device=storage.device)
            tensor.set_(packed.backup, offset, size, stride)
        else:
            item = packed.dtype.itemsize
            tensor = torch.empty(max(storage.nbytes // item, 1), dtype=packed.dtype, device=storage.device)
            tensor = torch.as_strided(tensor, size, stride, offset)
        if packed.conj:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if packed.neg else tensor


def forgets(func: Any, argument: str) -> bool:
    packet = func._schema.name.split("::")[1]
    return packet in OVERWRITES or packet in UNINITIALISED or (packet == "rrelu_with_noise" and argument == "noise")
