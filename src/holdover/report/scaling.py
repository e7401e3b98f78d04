"""What a step saves at other batch sizes, lengths and depths: from recordings of it, never from a guess.

The step is recorded at a few sizes. Bytes of a layer are then a polynomial, of first degree in the batch size and of
second degree in the sequence length, if that polynomial, which some recordings determine, also gives what further
recordings hold, byte for byte. Where it does not, only the recorded sizes are offered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

from holdover.errors import HoldoverError
from holdover.memory.on_card import Place
from holdover.report.stack import Layer, stack_of
from holdover.trace.graph import Category, TensorSpec, Trace
from holdover.trace.isolate import ForeignError, isolated
from holdover.trace.record import Loss
from holdover.trace.resize import with_shapes
from holdover.trace.step import tensors_in

Sizes = tuple[int, int, int]
"""Batch size, sequence length (1 where there is none), blocks (0: all of them)."""


@dataclass(frozen=True)
class Subject:
    """A training step whose sizes may be changed."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss | None
    precision: str | None = None
    place: Place = field(default_factory=Place)


@dataclass(frozen=True)
class Repeated:
    """The container of equal blocks: its name, how many there are."""

    path: str
    count: int

    def layer(self, i: int) -> str:
        return f"{self.path}.{i}" if self.path else str(i)


def scaling_of(subject: Subject, trace: Trace, say: Callable[[str], None] = lambda _: None) -> dict[str, Any] | None:
    """What the page needs to show the step at other sizes; None where nothing can be varied.

    Args:
        subject: the step that `trace` is a recording of.
        say: told of each recording, before it is made.
    """
    return _Study(subject, trace, say).result()


class _Study:
    def __init__(self, subject: Subject, trace: Trace, say: Callable[[str], None]) -> None:
        self.subject, self.say = subject, say
        self.base = stack_of(trace)
        self.names = list(self.base)
        self.on_fake = trace.recorded_on != "real"
        self.batch, self.seq = base_sizes(subject)
        self.blocks = repeated_blocks(subject.model, self.base)
        self.notes: list[str] = []
        tables = [rows for rows in position_rows(trace) if rows >= self.seq]  # smaller ones are no positions
        self.most_seq = min([2 * self.seq, *tables])
        self.recordings: dict[Sizes, dict[str, Layer] | None] = {}
        self.reason = ""
        self.depth = 0

    def result(self) -> dict[str, Any] | None:
        if not self.batch or not self.on_fake:
            return None
        least_depth = self._least_depth()
        top = self._longest() if self.seq > 1 else 1
        batches = [2, 4 * self.batch]
        seqs = [max(1, top // 8), top // 4, top] if top > 8 else [self.seq]
        if top <= 8:
            top = 1
        found = {(b, s): self.at(b, s) for b in batches for s in seqs}
        if any(layers is None for layers in found.values()):
            return self._nothing()
        polynomials = {
            name: fit(batches, seqs, {sizes: saved(layers, name) for sizes, layers in found.items()})
            for name in self._grid_names()
        }
        checks = [(self.batch, self.seq), (3, (3 * top // 8 + 1) if top > 1 else self.seq)]
        if not all(self._agrees(polynomials, b, s) for b, s in checks):
            return self._recorded_only(seqs)
        least = 1 if self._agrees(polynomials, 1, self.seq) else 2
        return self._polynomials(polynomials, least, seqs, least_depth)

    # -- recordings -----------------------------------------------------------------------------------------------

    def at(self, batch: int, seq: int, depth: int | None = None) -> dict[str, Layer] | None:
        """The stack at other sizes; None where the step cannot be run at them."""
        sizes = batch, seq, self.depth if depth is None else depth
        if sizes == (self.batch, self.seq, 0):
            return self.base
        if sizes not in self.recordings:
            self.say(_described(sizes, self.seq > 1))
            try:
                self.recordings[sizes] = isolated(lambda s: _record_at(s, self, sizes), self.subject)
            except (HoldoverError, ForeignError) as error:
                self.recordings[sizes] = None
                self.reason = str(error).splitlines()[0][:200]
        return self.recordings[sizes]

    def _least_depth(self) -> int:
        """The fewest blocks that the depth control offers; 0 where depth cannot be varied.

        Two blocks, and one, must hold what each of all blocks does, and everything else what it holds beside all.
        """
        if self.blocks is None:
            return 0
        inside = {self.blocks.layer(i) for i in range(self.blocks.count)}
        for depth in (2, 1):
            short = self.at(self.batch, self.seq, depth)
            kept = {self.blocks.layer(i) for i in range(depth)}
            if short is None or any(short.get(n) != self.base[n] for n in self.names if n in kept or n not in inside):
                break
            self.depth = 2
            least = depth
        return least if self.depth else 0

    def _longest(self) -> int:
        """Twice the recorded length, or as far as tables of positions go, else the recorded one; 1 if at no other."""
        if self.most_seq > self.seq and self.at(self.batch, self.most_seq) is not None:
            return self.most_seq
        if self.at(self.batch, max(1, self.seq // 2)) is not None:
            return self.seq
        self.notes.append(f"The sequence length cannot be varied: {self.reason}")
        return 1

    def _grid_names(self) -> list[str]:
        """The layers there are at the depth at which sizes are tried."""
        if not self.depth or self.blocks is None:
            return self.names
        left_out = {self.blocks.layer(i) for i in range(self.depth, self.blocks.count)}
        return [n for n in self.names if n not in left_out]

    def _agrees(self, polynomials: Mapping[str, list[list[Fraction]]], batch: int, seq: int) -> bool:
        there = self.at(batch, seq)
        return there is not None and all(value(p, batch, seq) == saved(there, n) for n, p in polynomials.items())

    # -- what comes out -------------------------------------------------------------------------------------------

    def _nothing(self) -> dict[str, Any] | None:
        self.notes.append(f"The batch size cannot be varied: {self.reason}")
        return {"axes": [], "recorded": None, "layers": [[[n]] for n in self._saved()], "denominator": 1,
                "blocks": [], "notes": self.notes}  # fmt: skip

    def _saved(self) -> list[int]:
        return [layer.saved_bytes for layer in self.base.values()]

    def _recorded_only(self, seqs: Sequence[int]) -> dict[str, Any]:
        self.depth = 0
        self.notes.append("Bytes are no polynomial of the sizes here, so that only recorded sizes are offered.")
        batches = sorted({1, max(1, self.batch // 2), self.batch, 2 * self.batch})
        rows = []
        for b, s in itertools.product(batches, sorted({*seqs, self.seq})):
            layers = self.at(b, s)
            if layers is not None:
                base = (b, s) == (self.batch, self.seq)
                rows.append({"batch": b, "seq": s, "base": base, "saved_bytes": [saved(layers, n) for n in self.names]})
        return {"axes": self._axes(1, seqs, 0), "recorded": rows, "blocks": [], "notes": self.notes}

    def _axes(self, least: int, seqs: Sequence[int], least_depth: int) -> list[dict[str, Any]]:
        axes = [_axis("batch", "batch size", least, 4 * self.batch, self.batch)]
        if len(seqs) > 1:
            axes.append(_axis("seq", "sequence length", seqs[0], seqs[-1], self.seq))
        if least_depth and self.blocks is not None:
            axes.append(_axis("depth", f"blocks of {self.blocks.path or 'the model'}", least_depth, self.blocks.count,
                              self.blocks.count))  # fmt: skip
        return axes

    def _polynomials(
        self, polynomials: Mapping[str, list[list[Fraction]]], least: int, seqs: Sequence[int], least_depth: int
    ) -> dict[str, Any]:
        blocks = self.blocks if least_depth else None
        inside = {blocks.layer(i): i for i in range(blocks.count)} if blocks else {}
        every = [polynomials[n] if n in polynomials else polynomials[blocks.layer(1)] for n in self.names] if blocks \
            else [polynomials[n] for n in self.names]  # fmt: skip
        denominator = math.lcm(*(c.denominator for rows in every for row in rows for c in row))
        self.notes.append(
            f"From {len([r for r in self.recordings.values() if r is not None]) + 1} recordings of the step: some "
            "determine the polynomial of each layer, the others agree with it byte for byte."
        )
        return {
            "axes": self._axes(least, seqs, least_depth),
            "recorded": None,
            "layers": [[[int(c * denominator) for c in row] for row in rows] for rows in every],
            "denominator": denominator,
            "blocks": [i for i, n in enumerate(self.names) if n in inside],
            "notes": self.notes,
        }


def _axis(name: str, label: str, least: int, most: int, base: int) -> dict[str, Any]:
    return {"name": name, "label": label, "least": least, "most": most, "base": base, "step": 1}


def _described(sizes: Sizes, with_seq: bool) -> str:
    batch, seq, depth = sizes
    return f"batch {batch}" + (f", length {seq}" if with_seq else "") + (f", {depth} blocks" if depth else "")


def saved(layers: Mapping[str, Layer] | None, name: str) -> int:
    """A layer's saved bytes; none where it keeps nothing."""
    layer = (layers or {}).get(name)
    return layer.saved_bytes if layer else 0


# -- changing a step's sizes ------------------------------------------------------------------------------------------


def base_sizes(subject: Subject) -> tuple[int, int]:
    """Batch size and sequence length as the arguments show them; 0 and 1 where they do not.

    The batch is the first dimension of the first argument, the length the second dimension of an argument of integers.

    >>> ids = torch.zeros(4, 16, dtype=torch.int64)
    >>> base_sizes(Subject(torch.nn.Embedding(9, 2), (ids,), {}, None))
    (4, 16)
    """
    tensors = [t for t in tensors_in((subject.args, subject.kwargs)) if t.dim()]
    if not tensors:
        return 0, 1
    batch = tensors[0].shape[0]
    seq = next(
        (t.shape[1] for t in tensors if t.dim() == 2 and t.shape[0] == batch and not t.is_floating_point()), 1
    )  # fmt: skip
    return batch, seq


def position_rows(trace: Trace) -> list[int]:
    """Rows of the tables that are looked up by something else than an input: positions, beyond which no sequence goes.

    Fake tensors would not notice an index past the end.
    """
    return [
        weight.shape[0]
        for op in trace.ops
        if op.name == "aten.embedding.default" and len(op.inputs) == 2
        and trace.storages[trace.values[op.inputs[1]].storage].category is not Category.INPUT
        and isinstance(weight := trace.signatures[op.signature].args[0], TensorSpec)
    ]  # fmt: skip


def repeated_blocks(model: torch.nn.Module, layers: Mapping[str, Layer]) -> Repeated | None:
    """The longest list of modules of one class that all hold the same, as a recording shows it."""
    best = None
    for path, module in model.named_modules():
        if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) or len(module) < 3:
            continue
        found = Repeated(path, len(module))
        parts = [layers.get(found.layer(i)) for i in range(len(module))]
        alike = len({type(m) for m in module}) == 1 and parts[0] is not None and all(p == parts[0] for p in parts)
        if alike and (best is None or found.count > best.count):
            best = found
    return best


def _record_at(subject: Subject, study: _Study, sizes: Sizes) -> dict[str, Layer]:
    """Record the step at other sizes; the subject is ours to change."""
    batch, seq, depth = sizes
    if depth and study.blocks is not None:
        container = subject.model.get_submodule(study.blocks.path)
        assert isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential))
        for i in range(study.blocks.count - 1, depth - 1, -1):
            del container[i]

    def shape_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
        rows, *rest = tensor.shape
        if study.seq > 1 and rows == study.batch * study.seq:
            return (batch * seq, *rest)
        if rows != study.batch:
            return None
        if study.seq > 1 and rest and rest[0] == study.seq:
            rest[0] = seq
        return (batch, *rest)

    args, kwargs, loss = with_shapes((subject.args, subject.kwargs, subject.loss), subject.model, shape_of)
    return stack_of(subject.place.record(subject.model, args, kwargs, loss=loss, precision=subject.precision))


# -- polynomials ------------------------------------------------------------------------------------------------------


def fit(
    batches: Sequence[int], seqs: Sequence[int], measured: Mapping[tuple[int, int], int]
) -> list[list[Fraction]]:  # fmt: skip
    """Coefficients c[i][j] of batch^i * seq^j of the polynomial through the given sizes, exactly.

    >>> fit([2, 8], [4, 8, 16], {(b, s): 7 + b * s * (s + 5) for b in (2, 8) for s in (4, 8, 16)})[1]
    [Fraction(0, 1), Fraction(5, 1), Fraction(1, 1)]
    """
    total = [[Fraction(0)] * len(seqs) for _ in batches]
    for b, s in itertools.product(batches, seqs):
        rows, columns = _basis(batches, b), _basis(seqs, s)
        for i, j in itertools.product(range(len(batches)), range(len(seqs))):
            total[i][j] += measured[b, s] * rows[i] * columns[j]
    return total


def _basis(nodes: Sequence[int], at: int) -> list[Fraction]:
    """Lagrange's polynomial that is 1 at one node and 0 at the others, lowest power first."""
    coefficients = [Fraction(1)]
    for node in nodes:
        if node != at:
            shifted = [Fraction(0), *coefficients]
            scaled = [*(c * -node for c in coefficients), Fraction(0)]
            coefficients = [(a + b) / (at - node) for a, b in zip(shifted, scaled, strict=True)]
    return coefficients


def value(polynomial: Sequence[Sequence[Fraction]], batch: int, seq: int) -> Fraction:
    """The polynomial at a size.

    >>> value([[Fraction(1)], [Fraction(3)]], 5, 1)
    Fraction(16, 1)
    """
    return sum((c * batch**i * seq**j for i, row in enumerate(polynomial) for j, c in enumerate(row)), Fraction(0))
