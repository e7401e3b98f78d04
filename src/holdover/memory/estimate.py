"""What a training step will hold in memory, before it runs."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from holdover.cost.devices import Card
from holdover.cost.devices import card as card_named
from holdover.errors import DeviceError
from holdover.memory.card_workspace import card_workspace_bytes
from holdover.memory.loss import logits_and_loss
from holdover.memory.on_card import CardMemory, card_memory, place_of, replay_on
from holdover.memory.simulate import simulate
from holdover.memory.snapshot import write_snapshot
from holdover.memory.timeline import CATEGORIES, Timeline, phase_peaks
from holdover.memory.workspace import workspace_bytes
from holdover.trace.graph import Category, Phase, Trace
from holdover.trace.record import Loss
from holdover.trace.step import OptimizerSpec

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ModuleRow:
    """One module's share. `saved_bytes` counts what its own ops made and autograd keeps, children not included."""

    path: str
    kind: str
    weights_bytes: int
    saved_bytes: int
    at_peak_bytes: int


@dataclass(frozen=True)
class OpRow:
    """One kind of op: how often its results are saved for backward, and their bytes."""

    name: str
    count: int
    saved_bytes: int


@dataclass(frozen=True)
class Peak:
    """The moment of most memory, and what it is made of: `parts` adds up to `nbytes` exactly."""

    nbytes: int
    step: int
    phase: Phase
    op: str
    module: str
    parts: Mapping[Category, int]

    @property
    def place(self) -> str:
        """Its phase, op and module, for people."""
        return f"{self.phase}, {self.op}" + (f" in {self.module}" if self.module else "")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory of a training step, from a recording of it.

    Attributes:
        peak_bytes: most bytes live at once over the step (over both steps, with an optimizer).
        peak_phase: "forward", "loss", "backward" or "optimizer".
        peak: where it is and what it is made of.
        weights_bytes: parameters and buffers (tensors that modules hold unregistered included).
        gradients_bytes: gradients of parameters and inputs.
        optimizer_bytes: the optimizer's state, which exists from the end of the first step on.
        activations_bytes: what autograd saves for backward, each storage once, parameters and inputs not counted.
        loss_bytes: the part of it that is logits and loss.
        temporaries_bytes: live at the peak, neither saved nor any of the others; workspace of kernels included.
        inputs_bytes: the model's arguments.
        first_step_peak_bytes, later_step_peak_bytes: the peaks of the first step and of every later one.
        on_card: what a CUDA card shows: allocated and reserved by PyTorch's allocator, taken by the process. None for a
            step on the CPU.
        uncertainties: what the numbers leave out.
    """

    model: str
    inputs: str
    optimizer: str
    precision: str
    device: str
    recorded_on: str
    peak: Peak
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    loss_bytes: int
    temporaries_bytes: int
    inputs_bytes: int
    first_step_peak_bytes: int
    later_step_peak_bytes: int
    on_card: CardMemory | None = None
    notes: tuple[str, ...] = ()
    uncertainties: tuple[str, ...] = ()
    trace: Trace = field(repr=False)
    timeline: Timeline = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        return self.peak.nbytes

    @property
    def peak_phase(self) -> str:
        return self.peak.phase.value

    @property
    def reserved_bytes(self) -> int | None:
        """What PyTorch reserves on the card at most, as `torch.cuda.max_memory_reserved()`; None without a card."""
        return None if self.on_card is None else self.on_card.reserved_bytes

    @property
    def process_bytes(self) -> tuple[int, int] | None:
        """What nvidia-smi shows for the process, least and most; None without a card."""
        return None if self.on_card is None else self.on_card.process_bytes

    def by_module(self) -> list[ModuleRow]:
        """A row per module that has weights or saves activations, in order of first use."""
        return _by_module(self.trace, self.timeline)

    def by_op(self) -> list[OpRow]:
        """A row per op whose results are saved, largest first; the rows add up to `activations_bytes`."""
        counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        last = self.trace.last_step
        for storage, maker in _saved_storages(self.trace):
            if self.trace.ops[maker].step != last:
                continue
            entry = counts[self.trace.ops[maker].name]
            entry[0] += 1
            entry[1] += self.trace.storages[storage].nbytes
        rows = [OpRow(name, count, nbytes) for name, (count, nbytes) in counts.items()]
        return sorted(rows, key=lambda r: -r.saved_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `schema_version` changes when a name or meaning does."""
        plain = (
            "model inputs optimizer precision device recorded_on peak_bytes peak_phase weights_bytes gradients_bytes "
            "optimizer_bytes activations_bytes loss_bytes temporaries_bytes inputs_bytes first_step_peak_bytes "
            "later_step_peak_bytes"
        )
        return {
            "schema_version": SCHEMA_VERSION,
            **{name: getattr(self, name) for name in plain.split()},
            "peak": {
                "step": self.peak.step, "op": self.peak.op, "module": self.peak.module,
                "parts": {k.value: n for k, n in self.peak.parts.items()},
            },
            "on_card": None if self.on_card is None else self.on_card.to_dict(),
            "notes": list(self.notes),
            "uncertainties": list(self.uncertainties),
            "modules": [asdict(r) for r in self.by_module()],
            "ops": [asdict(r) for r in self.by_op()],
        }  # fmt: skip

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write the step on the card as a memory snapshot of PyTorch, which https://pytorch.org/memory_viz opens.

        Raises:
            DeviceError: an estimate for the CPU has no card's allocator to show.
            HoldoverError: the file cannot be written.
        """
        if self.on_card is None:
            raise DeviceError("a memory snapshot is of a card's allocator: estimate with device=, such as 'h100-80gb'")
        known, _ = workspaces(self.trace)
        write_snapshot(replay_on(self.trace, card_named(self.on_card.card), workspace=known, record=True), path)

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        from holdover.report.text import render_estimate

        return render_estimate(self)

    def to_html(self) -> str:
        """The report page for this step: one self-contained file as text, without plans.

        >>> page = estimate(torch.nn.Linear(4, 2), (torch.ones(3, 4),)).to_html()
        >>> page.startswith("<!doctype html>")
        True
        """
        from holdover.report.html.page import estimate_page

        return estimate_page(self)

    def _repr_html_(self) -> str:
        from holdover.report.html.notebook import estimate_fragment

        return estimate_fragment(self)


def estimate(
    model: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerSpec = None,
    precision: str | None = None,
    device: str | None = None,
) -> Estimate:
    """What this training step will hold in memory, without running it on real data where that can be avoided.

    Args:
        model: any module, real or built on `torch.device("meta")`; nothing of its size is allocated, nothing changed.
        args, kwargs: the model's arguments, as for `torch.export`.
        loss: a function of the output that gives a scalar. Default: the output itself if it is a scalar, its `.loss`,
            else the sum of its floating tensors.
        optimizer: None (forward, loss and backward only), a name ("adamw"), a `params -> Optimizer` callable, or an
            Optimizer. With one, two steps are looked at: the optimizer's state exists only in the second.
        precision: None, "32-true", "bf16-mixed", "bf16-true", "16-mixed" or "16-true".
        device: None, for the device of the tensors; "cpu"; or a CUDA card that need not be here, by its name in the
            table of `holdover devices`, such as "h100-80gb". The allocator is then set as `PYTORCH_CUDA_ALLOC_CONF`
            says in this process.

    Raises:
        TraceError: the step fails, or gives no loss.
        DeviceError: an unknown device; says which are known.

    >>> import torch
    >>> e = estimate(torch.nn.Linear(100, 10, bias=False), (torch.ones(5, 100),))
    >>> e.weights_bytes, e.inputs_bytes, e.activations_bytes  # backward needs the input, which exists anyway
    (4000, 2000, 0)
    >>> sum(e.peak.parts.values()) == e.peak_bytes
    True
    """
    place = place_of(device)
    trace = place.record(model, args, kwargs, loss=loss, optimizer=optimizer, precision=precision)
    return estimate_of(trace, precision=precision, card=place.card)


def workspaces(trace: Trace) -> tuple[dict[int, int], list[str]]:
    """Bytes that kernels allocate inside, by signature, and what is not known about them."""
    device = trace.device
    known: dict[int, int] = card_workspace_bytes(trace.signatures) if device.startswith("cuda") else {}
    unknown: dict[str, int] = defaultdict(int)
    for number, nbytes in workspace_bytes(trace.signatures, device).items():
        if nbytes is None:
            unknown[trace.signatures[number].name] += 1
        else:
            known[number] = nbytes
    return known, [f"Workspace of {name} is unknown ({n} shapes) and not counted." for name, n in unknown.items()]


def estimate_of(trace: Trace, *, precision: str | None = None, card: Card | None = None) -> Estimate:
    """The estimate that a recorded step amounts to, on the card that it was recorded for."""
    workspace, unknown = workspaces(trace)
    timeline = simulate(trace, workspace=workspace)
    by_category: dict[Category, int] = defaultdict(int)
    for s in trace.storages:
        by_category[s.category] += s.nbytes
    last = trace.last_step
    peaks = phase_peaks(trace, timeline)
    by_step = {n: max(v for (step, _), v in peaks.items() if step == n) for n in range(last + 1)}
    loss_storages = logits_and_loss(trace, last)
    saved = [s for s, maker in _saved_storages(trace) if trace.ops[maker].step == last]
    peak = peak_of(trace, timeline)
    existing = [s for s in trace.storages if s.category in (Category.PARAMETER, Category.BUFFER)]
    gradients = {(s.name, s.nbytes) for s in trace.storages if s.category is Category.GRADIENT}
    on_card = None if card is None else card_memory(trace, card, workspace=workspace)
    remarks = [] if on_card is None else on_card.remarks()
    return Estimate(
        model=trace.model, inputs=trace.inputs, optimizer=trace.optimizer, precision=precision or "as given",
        device=card.name if card is not None else trace.device,
        recorded_on=trace.recorded_on, peak=peak,
        weights_bytes=sum(s.nbytes for s in existing),
        gradients_bytes=sum(nbytes for _, nbytes in gradients),
        optimizer_bytes=by_category[Category.OPTIMIZER],
        activations_bytes=sum(trace.storages[s].nbytes for s in saved),
        loss_bytes=sum(trace.storages[s].nbytes for s in saved if s in loss_storages),
        temporaries_bytes=peak.parts[Category.TEMPORARY],
        inputs_bytes=by_category[Category.INPUT],
        first_step_peak_bytes=by_step.get(0, 0), later_step_peak_bytes=by_step.get(last, 0),
        on_card=on_card, notes=tuple(trace.notes), uncertainties=(*trace.uncertainties, *unknown, *remarks),
        trace=trace, timeline=timeline,
    )  # fmt: skip


def peak_of(trace: Trace, timeline: Timeline) -> Peak:
    """Where the timeline is highest and what it is made of."""
    op = trace.ops[timeline.peak_op]
    parts = dict(zip(CATEGORIES, timeline.category_bytes[timeline.peak_op], strict=True))
    return Peak(timeline.peak_bytes, op.step, op.phase, op.name, trace.calls[op.call].path, parts)


def _saved_storages(trace: Trace) -> list[tuple[int, int]]:
    """(storage, op that made it) of each activation, in order of making."""
    makers: dict[int, int] = {}
    for slot in trace.slots:
        value = trace.values[slot.value]
        if trace.storages[value.storage].category is Category.ACTIVATION and value.maker >= 0:
            makers.setdefault(value.storage, value.maker)
    return sorted(makers.items(), key=lambda item: item[1])


def _by_module(trace: Trace, timeline: Timeline) -> list[ModuleRow]:
    last = trace.last_step
    kinds = {c.path: c.kind for c in trace.calls}
    weights: dict[str, int] = defaultdict(int)
    saved: dict[str, int] = defaultdict(int)
    at_peak: dict[str, int] = defaultdict(int)
    for s in trace.storages:
        if s.category in (Category.PARAMETER, Category.BUFFER) and s.name:
            weights[s.name.rpartition(".")[0] if s.name != "attribute" else ""] += s.nbytes
    for storage, maker in _saved_storages(trace):
        path = trace.calls[trace.ops[maker].call].path
        if trace.ops[maker].step == last:
            saved[path] += trace.storages[storage].nbytes
        at_peak[path] += timeline.at_peak.get(storage, 0)
    order = dict.fromkeys([c.path for c in trace.calls] + list(weights))
    return [
        ModuleRow(path, kinds.get(path, ""), weights[path], saved[path], at_peak[path])
        for path in order
        if weights[path] or saved[path] or at_peak[path]
    ]
