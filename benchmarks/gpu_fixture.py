"""What a step really ran and saved on a device, as small JSON, and how a recording for that device differs from it.

`benchmarks/gpu.py` writes such files on a card; `tests/test_gpu_fixtures.py` compares the recordings made without one.
The recorder here shares nothing with holdover's own: a dispatch mode that writes names down, and saved-tensor hooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import CellType, FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from holdover.measuring.arguments import is_view_or_factory
from holdover.trace.graph import EXISTING, Trace

SCHEMA_VERSION = 1
Loss = Callable[[Any], torch.Tensor] | None
UNSEEN = ("aten.detach.", "aten.lift_fresh", "aten.alias.", "aten._local_scalar_dense.", "profiler.", "prim.")
"""Ops that only look at tensors, and that versions and recorders differ in."""


AS_WATCHED = {"aten.add_.Tensor": "aten.add.Tensor"}
"""Gradients of one tensor are added in place in a plain step, as in a recording; under a dispatch mode they are not."""


class Names(TorchDispatchMode):
    """Writes down the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ran(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss, precision: str,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Run forward and backward once on a device; the ops by phase, and the bytes of each storage saved for backward."""

    model, args, kwargs, loss, given = on_device(model, args, kwargs, loss, device)
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), *given]}
    saved: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no two storages have the same address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.nbytes():
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    lower = precision == "bf16-mixed"
    forward, backward = Names(), Names()
    cast = torch.autocast(device.type, torch.bfloat16) if lower else nullcontext()
    with forward, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), cast:
        output = model(*args, **kwargs)
        value = loss(output) if loss is not None else output.loss
    with backward:
        value.backward()
    model.zero_grad(set_to_none=True)
    return {"forward": seen(forward.names), "backward": seen(backward.names), "saved": sorted(saved.values())}


def on_device(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss, device: torch.device
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], Loss, list[torch.Tensor]]:
    """The step with everything on a device, what its loss has captured included, and the tensors that it is given."""
    given: list[torch.Tensor] = []

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.to(device)
            given.append(value)
        return value

    if isinstance(loss, FunctionType) and loss.__closure__:
        cells = tuple(CellType(moved(cell.cell_contents)) for cell in loss.__closure__)
        loss = FunctionType(loss.__code__, loss.__globals__, loss.__name__, loss.__defaults__, cells)
    args, kwargs = tree_map(moved, (args, dict(kwargs)))
    return model.to(device).train(), args, kwargs, loss, given


def seen(names: list[str]) -> dict[str, int]:
    """How often each op ran, without views and what only looks."""
    counted = Counter(n for n in names if not n.startswith(UNSEEN) and not is_view_or_factory(n))
    return dict(sorted(counted.items()))


def recorded(trace: Trace) -> dict[str, Any]:
    """The same of a recording, of its first step."""
    phases: dict[str, list[str]] = {"forward": [], "backward": []}
    for op in trace.ops:
        if op.step == 0 and op.phase.value != "optimizer":
            if op.phase.value == "backward":
                phases["backward"].append(AS_WATCHED.get(op.name, op.name))
            else:
                phases["forward"].append(op.name)
    kept = {trace.values[s.value].storage for s in trace.slots if trace.ops[s.op].step == 0}
    sizes = [trace.storages[s].nbytes for s in kept if trace.storages[s].category not in EXISTING]
    return {**{name: seen(names) for name, names in phases.items()}, "saved": sorted(n for n in sizes if n)}


def differences(measured: Mapping[str, Any], trace: Trace) -> list[str]:
    """What the recording has otherwise than the device: one sentence per op and size; none if it is right."""
    ours = recorded(trace)
    found = []
    for phase in ("forward", "backward"):
        there, here = Counter(measured[phase]), Counter(ours[phase])
        for name in sorted({*there, *here}):
            if there[name] != here[name]:
                found.append(f"{phase}: {name} ran {there[name]} times on the device, {here[name]} in the recording")
    there, here = Counter(measured["saved"]), Counter(ours["saved"])
    for size in sorted({*there, *here}):
        if there[size] != here[size]:
            found.append(f"saved: {there[size]} storages of {size:,} B on the device, {here[size]} in the recording")
    return found
