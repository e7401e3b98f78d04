"""Weights beside activations: what each layer of a recorded step holds from forward to backward."""

from __future__ import annotations

from dataclasses import dataclass

from holdover.report.tables import layer_name
from holdover.trace.graph import Category, Phase, Trace

LOSS = "loss, outside the model"
ROOT = "the model itself"


@dataclass
class Layer:
    """A layer's weights (parameters and buffers) and what autograd saves of what it makes, in bytes."""

    weights_bytes: int = 0
    saved_bytes: int = 0


def stack_of(trace: Trace) -> dict[str, Layer]:
    """Layers in order of first use; their saved bytes add up to the estimate's `activations_bytes`.

    >>> import torch
    >>> from holdover.trace.record import record
    >>> blocks = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    >>> stack_of(record(blocks, (torch.ones(2, 4),)))
    {'0': Layer(weights_bytes=80, saved_bytes=0), '1': Layer(weights_bytes=0, saved_bytes=32)}
    """
    last = trace.last_step
    layers: dict[str, Layer] = {}
    for call in trace.calls:
        if call.path:
            layers.setdefault(layer_name(call.path), Layer())
    for s in trace.storages:
        if s.category in (Category.PARAMETER, Category.BUFFER):
            path = s.name.rpartition(".")[0] if s.name != "attribute" else ""
            layers.setdefault(layer_name(path) if path else ROOT, Layer()).weights_bytes += s.nbytes
    seen: set[int] = set()
    for slot in trace.slots:
        value = trace.values[slot.value]
        storage = trace.storages[value.storage]
        if storage.category is not Category.ACTIVATION or value.maker < 0 or storage.id in seen:
            continue
        seen.add(storage.id)
        op = trace.ops[value.maker]
        if op.step == last:
            layers.setdefault(_home(trace, op.call, op.phase), Layer()).saved_bytes += storage.nbytes
    return {name: layer for name, layer in layers.items() if layer.weights_bytes or layer.saved_bytes}


def _home(trace: Trace, call: int, phase: Phase) -> str:
    if not trace.calls[call].key or phase is Phase.LOSS:
        return LOSS
    return layer_name(trace.calls[call].path) if trace.calls[call].path else ROOT
