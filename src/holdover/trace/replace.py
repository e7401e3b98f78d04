"""Put other tensors in the place of an object graph's own, wherever they hide.

Parameters and buffers are the easy part. Tensors also sit in plain attributes, in lists that a module keeps, in the
closures of hooks and losses, and in optimizers; tied weights must stay one tensor. The walk changes mutable
containers in place and rebuilds tuples, so it is only ever run on what `isolate` allows to be changed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

_LEAVES = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, torch.dtype, torch.device)


def replace_tensors(root: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `root` with every reachable tensor `t` replaced by `convert(t)`.

    >>> import torch
    >>> replace_tensors({"a": [torch.ones(2)]}, lambda t: t * 3)
    {'a': [tensor([3., 3.])]}
    """
    return _Walk(convert)(root)


class _Walk:
    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.convert = convert
        self.done: dict[int, Any] = {}
        self.alive: list[Any] = []  # ids are only unique among living objects
        self.queue: list[Any] = []

    def __call__(self, root: Any) -> Any:
        result = self.swap(root)
        while self.queue:
            self.visit(self.queue.pop())
        return result

    def swap(self, value: Any) -> Any:
        """What stands in for `value`; mutable objects stand for themselves and are queued for a visit."""
        if isinstance(value, _LEAVES):
            return value
        key = id(value)
        if key in self.done:
            return self.done[key]
        self.alive.append(value)
        if isinstance(value, torch.Tensor):
            self.done[key] = new = self.convert(value)
            self.alive.append(new)
            self.done[id(new)] = new
            return new
        if isinstance(value, tuple):
            items = [self.swap(v) for v in value]
            if any(a is not b for a, b in zip(items, value, strict=True)):
                value = type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
            self.done[key] = value
            return value
        self.done[key] = value
        self.queue.append(value)
        return value

    def visit(self, obj: Any) -> None:
        if isinstance(obj, dict):
            # A tensor as a key (an optimizer's state) is swapped too, in the same order.
            items = [(self.swap(k), self.swap(v)) for k, v in obj.items()]
            if any(a is not k or b is not v for (a, b), (k, v) in zip(items, list(obj.items()), strict=True)):
                obj.clear()
                obj.update(items)
        elif isinstance(obj, list):
            obj[:] = [self.swap(v) for v in obj]
        elif isinstance(obj, set):
            items = [self.swap(v) for v in obj]
            if any(a is not b for a, b in zip(items, list(obj), strict=True)):
                obj.clear()
                obj.update(items)
        elif isinstance(obj, types.FunctionType):
            for cell in obj.__closure__ or ():
                try:
                    new = self.swap(cell.cell_contents)
                except ValueError:  # an empty cell: a name not bound yet
                    continue
                if new is not cell.cell_contents:
                    cell.cell_contents = new
            if obj.__defaults__:
                obj.__defaults__ = self.swap(obj.__defaults__)
            self.visit_attributes(obj)
        elif isinstance(obj, types.MethodType):
            self.swap(obj.__self__)
            self.swap(obj.__func__)
        elif isinstance(obj, functools.partial):
            self.swap(obj.func)
            obj.__setstate__(  # type: ignore[attr-defined]
                (obj.func, self.swap(obj.args), self.swap(obj.keywords), obj.__dict__)
            )
        else:
            self.visit_attributes(obj)

    def visit_attributes(self, obj: Any) -> None:
        attributes = getattr(obj, "__dict__", None)
        if isinstance(attributes, dict):
            for name, value in list(attributes.items()):
                new = self.swap(value)
                if new is not value:
                    attributes[name] = new
        for cls in type(obj).__mro__:
            for name in getattr(cls, "__slots__", ()) or ():
                if isinstance(name, str) and hasattr(obj, name):
                    value = getattr(obj, name)
                    new = self.swap(value)
                    if new is not value:
                        setattr(obj, name, new)
