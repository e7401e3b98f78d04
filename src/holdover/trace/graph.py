"""The Trace: one training step as plain data.

Everything later (timeline, plan, report) is a pure function of this. Nothing here holds a tensor.

A *storage* is one allocation. A *value* is the content of a storage between two in-place writes, so that an in-place
op makes a new value of the same storage. A *slot* is one tensor that autograd saved for backward. The *events* give
the order of everything that matters for memory:

    (Event.OP, op)         the op is about to run
    (Event.HOLD, storage)  the program holds the storage once more (first time: it is allocated)
    (Event.DROP, storage)  one such holder is gone; without holders and without slots the storage is freed
    (Event.PACK, slot)     autograd saved a tensor
    (Event.UNPACK, slot)   backward asked for it
    (Event.RELEASE, slot)  autograd let go of it
    (Event.PASS, number)   from here on this run of autograd's engine asks; -1: none does. A step may have several, and
                           one within another: then the outer number comes again when the inner run has ended

Holders never include autograd's saved tensors: the recorder takes those away, which is what makes "what would be
live if this value were not kept" a question that the trace alone can answer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

OUTSIDE = ""
"""Key of the call that stands for all code outside the model (the loss, the optimizer)."""


class Event(enum.IntEnum):
    OP = 0
    HOLD = 1
    DROP = 2
    PACK = 3
    UNPACK = 4
    RELEASE = 5
    PASS = 6


class Category(enum.StrEnum):
    """What a storage is, for the reader of an estimate."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    INPUT = "input"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"


EXISTING = (Category.PARAMETER, Category.BUFFER, Category.INPUT)
"""What is there before the step, and after it."""


class Phase(enum.StrEnum):
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Metadata of a tensor argument: enough to make another one like it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str  # "float32"
    device: str  # "cpu"
    offset: int = 0
    storage_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Signature:
    """An op with the metadata of its arguments: ops of equal signature cost the same.

    `args` and `kwargs` mirror the call's own structure with each tensor replaced by its TensorSpec. Arguments that
    cannot be made again (a private generator, a process group) are replaced by None, and `runnable` is False.
    """

    name: str  # "aten.addmm.default"
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    runnable: bool = True


@dataclass(slots=True)
class Storage:
    id: int
    nbytes: int
    device: str
    category: Category
    name: str = ""  # qualified name of a parameter or buffer, "args.0" of an input


@dataclass(slots=True)
class Value:
    """The content of a storage after its `version`-th write; made by op `maker` (-1: existed before the step)."""

    id: int
    storage: int
    version: int
    maker: int
    dtype: str
    escapes: str = ""  # why its memory may be read or written behind the dispatcher's back


@dataclass(slots=True)
class Call:
    """One call of a module: `key` is unique in the step and stable across batch sizes, `path` the module's name."""

    id: int
    key: str
    path: str
    kind: str  # class name
    parent: int


@dataclass(slots=True)
class Op:
    id: int
    name: str
    phase: Phase
    step: int  # 0 for the first training step, 1 for the second
    call: int
    index: int  # position among the ops of this call, nested calls not counted
    signature: int
    inputs: tuple[int, ...]  # values read, each once
    outputs: tuple[int, ...]  # values made: new storages and new versions of written ones
    writes: tuple[tuple[int, int], ...] = ()  # (value before, value after) of storages written in place
    keep: str = ""  # why its outputs cannot be made again by replay; "" when they can
    random: bool = False
    of: int = -1  # for backward ops: the forward op whose gradient this computes
    statistics: tuple[int, ...] = ()  # storages of running statistics, which a batch norm in training writes to unsaid


@dataclass(slots=True)
class Slot:
    """One tensor saved for backward."""

    id: int
    value: int
    op: int  # the op that was running when it was saved
    call: int


@dataclass(slots=True)
class Trace:
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    signatures: list[Signature] = field(default_factory=list)
    events: list[tuple[Event, int]] = field(default_factory=list)
    model: str = ""  # class name
    fingerprint: str = ""
    inputs: str = ""  # shapes and dtypes of args and kwargs, readable
    recorded_on: str = "fake"  # or "real", with the reason in notes
    optimizer: str = ""
    notes: list[str] = field(default_factory=list)
    uncertainties: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The step that plans are made for: it has all that the ones before left behind."""
        return max((op.step for op in self.ops), default=0)

    @property
    def device(self) -> str:
        """The kind of device that the step ran on."""
        return self.storages[0].device if self.storages else "cpu"
