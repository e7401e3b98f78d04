"""The words a layer is written in: values, the ops that make them, and the list of both."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from holdover.closed_form.formula import Formula, symbols, total

INPUT = "layer input"
"""Name of the value that enters a layer, and of the op that stands for its maker."""

RESIDUAL = "attention residual"
"""Name of the residual stream after attention, the only value that both halves of a layer use."""

_t, _t_s, _t_e, _copies = symbols("t t_s t_e kv_copies")


class Shard(enum.StrEnum):
    """What divides a value within one pipeline stage. Context parallelism divides the tokens, so every value."""

    NONE = "none"
    TENSOR = "tensor"
    """By the tensor-parallel size."""
    SEQUENCE = "sequence"
    """By the tensor-parallel size under sequence parallelism, else by nothing."""
    KV = "tensor, key-value heads"
    """By the tensor-parallel size, times the copies of a head when there are more ranks than heads."""
    ROUTED = "expert"
    """By the tensor-parallel size: expert parallelism trades tokens between ranks and does not divide them."""
    GATHERED = "expert, gathered"
    """As ROUTED, times the expert tensor-parallel size, whose ranks all hold the same tokens."""

    @property
    def factor(self) -> Formula:
        """What a value's bytes are multiplied by on one rank."""
        one = Formula() + 1
        return {
            Shard.NONE: one,
            Shard.TENSOR: one / _t,
            Shard.SEQUENCE: one / _t_s,
            Shard.KV: _copies / _t,
            Shard.ROUTED: one / _t,
            Shard.GATHERED: _t_e / _t,
        }[self]


@dataclass(frozen=True)
class Value:
    """A tensor of a layer.

    `bytes` is per token, before sharding; `stored` says that autograd keeps it for backward when nothing is
    recomputed; `dropped_by` names Megatron's recompute modules that free it. `small` marks bookkeeping that the paper
    leaves out (norm statistics, token ids). `gradient` is false for what backward makes no gradient of.
    """

    name: str
    op: str
    bytes: Formula
    shard: Shard = Shard.NONE
    stored: bool = False
    dropped_by: frozenset[str] = frozenset()
    small: bool = False
    gradient: bool = True

    @property
    def rank_bytes(self) -> Formula:
        """Bytes per token on one rank."""
        return self.bytes * self.shard.factor


@dataclass(frozen=True)
class Op:
    """One step of a layer's forward, with what it costs per token on one rank.

    `flops` are those of matrix products (a multiply and an add are two); `traffic` the bytes that an element-wise op
    moves; `collective` the bytes that enter a tensor-parallel collective; `exchange` those of an expert all-to-all.
    """

    name: str
    inputs: tuple[str, ...]
    flops: Formula = field(default_factory=Formula)
    traffic: Formula = field(default_factory=Formula)
    collective: Formula = field(default_factory=Formula)
    exchange: Formula = field(default_factory=Formula)
    gathered: Formula = field(default_factory=Formula)
    """Bytes per token of an input gathered over the tensor-parallel ranks while the op runs."""
    modules: frozenset[str] = frozenset()
    """Megatron's recompute modules that run it again."""
    fused_attention: bool = False
    """Its FLOPs are a fused attention's, which skips the masked half."""


@dataclass(frozen=True, eq=False)  # by identity: layers are cached, and are the keys of other caches
class Layer:
    """A layer (or an end of the model) as its values and ops, in forward order. Every total is a sum over them."""

    name: str
    values: tuple[Value, ...]
    ops: tuple[Op, ...]

    @property
    def stored(self) -> tuple[Value, ...]:
        """What backward needs: the layer's list."""
        return tuple(value for value in self.values if value.stored)

    def value(self, name: str) -> Value:
        """The value of a name."""
        return next(value for value in self.values if value.name == name)

    def bytes(self, *, small: bool = True) -> Formula:
        """Stored bytes per token on one rank, nothing recomputed."""
        return total(value.rank_bytes for value in self.stored if small or not value.small)

    @property
    def flops(self) -> Formula:
        """FLOPs of matrix products per token on one rank, forward only."""
        return total(op.flops for op in self.ops)


class Builder:
    """Collects a layer's ops and values; each method returns names for the next op to use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._values: list[Value] = []
        self._ops: list[Op] = []

    def op(self, name: str, inputs: Iterable[str], **costs: Formula | frozenset[str] | bool) -> str:
        """Add an op. Returns its name."""
        self._ops.append(Op(name, tuple(inputs), **costs))  # type: ignore[arg-type]
        return name

    def value(
        self,
        name: str,
        op: str,
        size: Formula,
        shard: Shard = Shard.NONE,
        *,
        stored: bool = True,
        dropped_by: Iterable[str] = (),
        small: bool = False,
        gradient: bool = True,
    ) -> str:
        """Add a value. Returns its name."""
        self._values.append(Value(name, op, size, shard, stored, frozenset(dropped_by), small=small, gradient=gradient))
        return name

    def keep(self, name: str) -> str:
        """Autograd keeps a value declared before. Returns its name."""
        self._values = [replace(value, stored=True) if value.name == name else value for value in self._values]
        return name

    def build(self) -> Layer:
        """The finished list."""
        for names in ([value.name for value in self._values], [op.name for op in self._ops]):
            assert len(names) == len(set(names)), "values and ops are looked up by name"
        return Layer(self._name, tuple(self._values), tuple(self._ops))
