"""Which storage of the trace, and which of its values, is behind a tensor that lives now."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from holdover.trace.graph import Category, Event, Storage, Trace, Value
from holdover.trace.tensors import device_of, plain_parts


@dataclass(slots=True)
class LiveStorage:
    """A storage object while it lives: its storage in the trace, and the value that is its content now."""

    ref: weakref.ref[torch.UntypedStorage]
    storage: int
    value: int
    nbytes: int
    version: int  # of the tensor, when the value was made
    slack: int = 0  # an op in place counts one more only after it has been seen

    def unseen(self, tensor: torch.Tensor) -> bool:
        """Whether something has counted a write to the tensor since, though no op did."""
        return version_of(tensor) - self.version not in (0, self.slack)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was written to in place."""
    return 0 if tensor.is_inference() else tensor._version


class LiveStorages:
    """Registers storages in `trace` as they are first seen, and lets their lives be holders there."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._found: dict[int, LiveStorage] = {}

    def know(self, tensor: torch.Tensor, category: Category, name: str = "") -> None:
        """Register what exists before the step: a parameter, a buffer, an input."""
        for plain in plain_parts(tensor):
            self.lookup(plain, category, name)

    def inside(self, tensor: torch.Tensor) -> list[LiveStorage]:
        """The storages inside a tensor."""
        return [self.lookup(plain) for plain in plain_parts(tensor)]

    def find(self, storage: torch.UntypedStorage) -> LiveStorage | None:
        """The record of a storage object; None if it was never seen."""
        live = self._found.get(storage._cdata)
        return live if live is not None and live.ref() is storage else None

    def lookup(self, tensor: torch.Tensor, category: Category = Category.TEMPORARY, name: str = "") -> LiveStorage:
        """The record of a tensor's storage; a storage never seen before is registered as having existed."""
        return self.find(tensor.untyped_storage()) or self.allocate(tensor, category, name, maker=-1)

    def allocate(
        self, tensor: torch.Tensor, category: Category = Category.TEMPORARY, name: str = "", *, maker: int
    ) -> LiveStorage:
        """Register the storage of a tensor that op `maker` made."""
        storage = tensor.untyped_storage()
        number, nbytes = len(self.trace.storages), storage.nbytes()
        self.trace.storages.append(Storage(number, nbytes, device_of(tensor).type, category, name))
        return self.watch(storage, number, self._new_value(number, 0, maker, tensor), nbytes, version_of(tensor))

    def reallocate(self, tensor: torch.Tensor, live: LiveStorage) -> LiveStorage:
        """A storage that changed its size is another allocation: the old one goes, a new one comes."""
        self.trace.events.append((Event.DROP, live.storage))
        old = self.trace.storages[live.storage]
        made = self.allocate(tensor, old.category, old.name, maker=-1)
        live.ref = made.ref  # the one before would tell of the old one's end a second time
        return made

    def rewrite(self, live: LiveStorage, tensor: torch.Tensor, maker: int) -> int:
        """Op `maker` writes in place: the number of the new value."""
        version = self.trace.values[live.value].version + 1
        live.value = self._new_value(live.storage, version, maker, tensor)
        live.version, live.slack = version_of(tensor), 1
        return live.value

    def watch(self, storage: torch.UntypedStorage, number: int, value: int, nbytes: int, version: int) -> LiveStorage:
        """Let the life of `storage` be a holder of the trace's storage `number`."""
        key, events, found = storage._cdata, self.trace.events, self._found

        def dead(_: Any) -> None:
            found.pop(key, None)
            events.append((Event.DROP, number))

        live = found[key] = LiveStorage(weakref.ref(storage, dead), number, value, nbytes, version)
        events.append((Event.HOLD, number))
        return live

    def _new_value(self, storage: int, version: int, maker: int, tensor: torch.Tensor) -> int:
        value = len(self.trace.values)
        self.trace.values.append(Value(value, storage, version, maker, str(tensor.dtype).removeprefix("torch.")))
        return value
