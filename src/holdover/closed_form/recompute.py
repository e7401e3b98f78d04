"""What Megatron's recompute switches keep, free and run again, read off a layer's list."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from holdover.closed_form.architecture import Architecture, Kernels, Kind
from holdover.closed_form.errors import ConfigurationError
from holdover.closed_form.formula import Formula, total
from holdover.closed_form.layout import Layout
from holdover.closed_form.tensors import INPUT, Layer, Op, Shard, Value

Granularity = Literal["none", "selective", "full", "optimal"]

NORMAL_MODULES = ("core_attn", "mlp", "moe", "shared_experts")
"""Modules that are run again from their inputs; their output stays, because the next op keeps it."""
DISCARDING_MODULES = ("layernorm", "moe_act", "mla_up_proj")
"""Modules whose output is freed once its consumer has run, and made again before backward needs it."""
MODULES = NORMAL_MODULES + DISCARDING_MODULES

Mode = Literal["all", "selective", "boundary", "inside"]
"""How a layer is treated: everything kept, modules dropped, only its input kept, or nothing (inside a group)."""


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What is recomputed."""

    granularity: Granularity = "none"
    method: Literal["uniform", "block"] = "uniform"
    """Full: groups of `num_layers` layers each keep their first input; or the first `num_layers` layers of each chunk
    are recomputed one by one and the rest keep everything."""
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)
    """Selective: Megatron's module names."""
    distribute_saved: bool = False
    """Full: each tensor-parallel rank keeps its part of the stored input, and gathers it in backward."""
    store_all_micro_batches: int = 0
    """So many of the micro-batches in flight keep everything (the paper's appendix C)."""
    offload: float = 0.0
    """This share of the layers' activations waits in host memory."""

    def check(self, architecture: Architecture, layout: Layout) -> None:
        """Refuse a contradictory setting.

        Raises:
            ConfigurationError: the message says what to change.
        """
        unknown = [name for name in self.modules if name not in MODULES]
        if self.granularity == "selective" and unknown:
            raise ConfigurationError(
                f"unknown recompute module {', '.join(unknown)}: the closed form knows {', '.join(MODULES)}"
            )
        if self.granularity == "selective":
            self._check_modules(architecture)
        if self.num_layers < 1:
            raise ConfigurationError(f"recompute-num-layers is {self.num_layers}; it must be at least 1")
        if self.distribute_saved:
            if self.granularity != "full":
                raise ConfigurationError("distributing saved activations needs --recompute full")
            if layout.tp == 1:
                raise ConfigurationError("distributing saved activations over one tensor-parallel rank: raise --tp")
            if layout.sequence_parallel:
                raise ConfigurationError(
                    "under sequence parallelism the saved input is sharded already: leave out --distribute-saved"
                )
        if self.store_all_micro_batches < 0:
            raise ConfigurationError("the micro-batches that keep everything cannot be fewer than 0")
        if self.store_all_micro_batches and self.granularity not in ("full", "selective"):
            raise ConfigurationError("micro-batches that keep everything need --recompute full or selective for others")
        if not 0 <= self.offload <= 1:
            raise ConfigurationError(f"an offload share of {self.offload} is not between 0 and 1")

    def _check_modules(self, architecture: Architecture) -> None:
        wanted = set(self.modules)
        if wanted & {"moe", "moe_act", "shared_experts"} and architecture.experts is None:
            raise ConfigurationError(f"{architecture.name} has no experts: leave out moe, moe_act and shared_experts")
        if "shared_experts" in wanted and architecture.experts and not architecture.experts.shared_ffn:
            raise ConfigurationError(f"{architecture.name} has no shared experts: leave out shared_experts")
        if "mla_up_proj" in wanted and architecture.latent is None:
            raise ConfigurationError(f"{architecture.name} has no latent attention: leave out mla_up_proj")
        if "mlp" in wanted and "dense" not in architecture.layer_kinds:
            raise ConfigurationError(f"{architecture.name} has no dense MLP: recompute moe instead of mlp")

    def notes(self, kernels: Kernels) -> list[str]:
        """What a reader of the result should know."""
        if self.granularity == "selective" and "core_attn" in self.modules and kernels.attention == "fused":
            return [
                "core_attn under fused attention frees only the log-sum-exp: query, key and value stay as the "
                "checkpoint's inputs, and the output stays as the next linear's; the attention still runs twice"
            ]
        return []


@dataclass(frozen=True)
class Treatment:
    """One layer under one mode: the values kept, the ops run again, the values made again."""

    kept: tuple[Value, ...]
    replayed: tuple[Op, ...]
    remade: tuple[Value, ...]

    def kept_bytes(self, *, small: bool = True) -> Formula:
        """Bytes per token on one rank."""
        return total(value.rank_bytes for value in self.kept if small or not value.small)

    def remade_bytes(self, *, small: bool = True) -> Formula:
        """Bytes per token on one rank of what replay makes, all of it live at once."""
        return total(value.rank_bytes for value in self.remade if small or not value.small)


def treat(layer: Layer, dropped: Iterable[Value], replayed: Iterable[Op]) -> Treatment:
    """A layer of which values are dropped and ops run again; inputs of those ops that nobody keeps are kept now."""
    gone, again = set(dropped), tuple(replayed)
    remade_by = {op.name for op in again}
    kept = [value for value in layer.stored if value not in gone]
    held = {value.name for value in kept}
    for op in again:
        for name in op.inputs:
            value = layer.value(name)
            if name not in held and value.op not in remade_by:
                held.add(name)
                kept.append(value)
    return Treatment(tuple(kept), again, tuple(value for value in layer.stored if value in gone))


@lru_cache(maxsize=1024)
def treatment(layer: Layer, mode: Mode, recompute: Recompute) -> Treatment:
    """What one layer keeps, runs again and makes again under a mode."""
    if mode == "all":
        return Treatment(layer.stored, (), ())
    if mode == "selective":
        modules = set(recompute.modules)
        dropped = [value for value in layer.stored if value.dropped_by & modules]
        return treat(layer, dropped, [op for op in layer.ops if op.modules & modules])
    start = layer.value(INPUT)
    if recompute.distribute_saved:
        start = Value(start.name, start.op, start.bytes, Shard.TENSOR)
    remade = tuple(value for value in layer.stored if value.name != INPUT or mode == "inside")
    return Treatment((start,) if mode == "boundary" else (), layer.ops, remade)


@dataclass(frozen=True)
class Assignment:
    """How the layers of one chunk are treated: how many of each kind and mode, and the groups replayed at once."""

    counts: tuple[tuple[Kind, Mode, int], ...]
    groups: tuple[tuple[tuple[Kind, Mode], ...], ...]


@lru_cache(maxsize=4096)
def assign(recompute: Recompute, kinds: tuple[Kind, ...]) -> Assignment:
    """Treat the layers of one chunk.

    >>> assign(Recompute(granularity="full", num_layers=2), ("dense",) * 3).counts
    (('dense', 'boundary', 2), ('dense', 'inside', 1))
    """
    modes: list[Mode]
    size = recompute.num_layers
    if recompute.granularity == "full" and recompute.method == "uniform":
        modes = ["inside" if index % size else "boundary" for index in range(len(kinds))]
        starts = range(0, len(kinds), size)
    elif recompute.granularity == "full":
        modes = ["boundary" if index < size else "all" for index in range(len(kinds))]
        starts, size = range(len(kinds)), 1
    else:
        modes = ["selective" if recompute.granularity == "selective" else "all"] * len(kinds)
        starts, size = range(len(kinds)), 1
    treated = list(zip(kinds, modes, strict=True))
    counts = {pair: treated.count(pair) for pair in dict.fromkeys(treated)}
    groups = dict.fromkeys(tuple(treated[start : start + size]) for start in starts)
    return Assignment(tuple((kind, mode, count) for (kind, mode), count in counts.items()), tuple(groups))
