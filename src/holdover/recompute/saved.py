"""What autograd holds in place of the tensors that it saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from holdover.recompute._torch import current_graph_task_id
from holdover.recompute.geometry import Geometry, geometry, rebuild
from holdover.recompute.recipe import NO_PASS, Value

if TYPE_CHECKING:
    from holdover.recompute.recorder import Frame


def unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """A kept tensor, of which autograd's own check would be gone.

    Raises:
        RuntimeError: it was modified in place since, as autograd itself would say without hooks.
    """
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
            "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
            "with torch.autograd.set_detect_anomaly(True)."
        )
    return tensor


class SavedRef:
    """What autograd holds in place of a saved tensor whose value has a recipe."""

    __slots__ = ("geometry", "satisfied_in", "value")

    def __init__(self, value: Value, geometry: Geometry, storage: torch.UntypedStorage) -> None:
        self.value, self.geometry, self.satisfied_in = value, geometry, NO_PASS
        ledger = value.recipe.ledger
        with ledger.lock:
            ledger.claim(value)
            if not value.saved:
                value.saved = True
                ledger.dropped_bytes += storage.nbytes()

    def __del__(self) -> None:
        ledger = self.value.recipe.ledger
        with ledger.lock:
            ledger.drop(self.value, self.satisfied_in)

    def get(self) -> torch.Tensor:
        """The saved tensor, made again if need be."""
        value = self.value
        ledger = value.recipe.ledger
        task = current_graph_task_id()
        with ledger.lock:
            base = ledger.get(value, task)
            if base is value.tensor:
                value.handed = True
            tensor = rebuild(base.detach() if base.requires_grad else base, self.geometry)
            if task != NO_PASS and self.satisfied_in != task:
                self.satisfied_in = task
                ledger.satisfy(value, task)
        return tensor


class Passed:
    """A kept tensor in the care of saved-tensor hooks that were on before ours."""

    __slots__ = ("packed", "unpack")

    def __init__(self, unpack: Callable[[Any], torch.Tensor], packed: Any) -> None:
        self.unpack, self.packed = unpack, packed


class Awaiting:
    """A kept tensor that was saved just before an op of the plan, which may be what fills it (RReLU's noise)."""

    __slots__ = ("__weakref__", "filled", "frame", "index", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, frame: Frame) -> None:
        self.frame, self.index = frame, frame.index
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version
        self.filled: SavedRef | None = None

    def settle(self, forgotten: set[int]) -> None:
        """The op has run: if it filled the tensor whole, the tensor can be made again."""
        tensor = self.tensor
        assert tensor is not None
        storage: Any = tensor.untyped_storage()
        value = getattr(storage, "_holdover", None)
        if id(storage) in forgotten and type(value) is Value:
            self.filled, self.tensor = SavedRef(value, geometry(tensor), storage), None

    def get(self) -> torch.Tensor:
        if self.filled is not None:
            return self.filled.get()
        assert self.tensor is not None
        return unchanged(self.tensor, self.version)
