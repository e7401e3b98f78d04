"""Deep copies of training steps.

`copy.deepcopy` shares functions between the original and the copy, and with them whatever their closures hold: a
loss written as `lambda out: criterion(out) + model.auxiliary` would go on looking at the original model. It also
refuses tensors that some earlier step computed. Here both are copied.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import types
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from holdover.errors import HoldoverError

T = TypeVar("T")

_OPAQUE = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType, types.FrameType, str, bytes, int, float)


def duplicate(subject: T) -> T:
    """A deep copy of models, arguments, functions and optimizers, in which everything shared stays shared.

    Args:
        subject: typically a tuple (model, args, kwargs, loss, optimizer): one call copies what they share once.

    Raises:
        HoldoverError: something in it cannot be copied.

    >>> def counter():
    ...     counts = []
    ...     return lambda: counts.append(1) or len(counts)
    >>> count = counter()
    >>> count(), duplicate(count)(), duplicate(count)(), count()
    (1, 2, 2, 2)
    """
    memo: dict[int, Any] = {}
    cells: dict[int, tuple[types.CellType, types.CellType]] = {}
    originals = list(_reachable(subject))  # held, so that no id in the memo is reused
    for obj in originals:
        if isinstance(obj, torch.Tensor):
            if obj.requires_grad and not obj.is_leaf:
                memo[id(obj)] = obj.detach().clone().requires_grad_()
        elif isinstance(obj, types.FunctionType) and obj.__closure__:
            for cell in obj.__closure__:
                cells.setdefault(id(cell), (cell, types.CellType()))
            memo[id(obj)] = _twin(obj, tuple(cells[id(cell)][1] for cell in obj.__closure__))
    try:
        twin = copy.deepcopy(subject, memo)
        for cell, fresh in cells.values():
            with contextlib.suppress(ValueError):  # a variable that is not bound yet
                fresh.cell_contents = copy.deepcopy(cell.cell_contents, memo)
        for obj in originals:
            if isinstance(obj, torch.Tensor) and obj.is_leaf and id(obj) in memo:
                _copy_hooks(obj, memo[id(obj)], memo)
    except Exception as error:
        raise HoldoverError(
            f"The step cannot be copied, and verifying must not touch the original ({type(error).__name__}: {error}). "
            "Give the object that refuses a __deepcopy__, or verify a freshly made model whose step has not run yet."
        ) from error
    return twin


def _twin(function: types.FunctionType, closure: tuple[types.CellType, ...]) -> types.FunctionType:
    twin = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    twin.__kwdefaults__, twin.__qualname__, twin.__module__ = (
        function.__kwdefaults__,
        function.__qualname__,
        function.__module__,
    )
    twin.__dict__.update(function.__dict__)
    return twin


def _copy_hooks(tensor: torch.Tensor, twin: torch.Tensor, memo: dict[int, Any]) -> None:
    """A tensor's own hooks, which may change gradients or even step an optimizer, are not part of its deep copy."""
    for hook in list((tensor._backward_hooks or {}).values()):
        twin.register_hook(copy.deepcopy(hook, memo))
    for hook in list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()):
        twin.register_post_accumulate_grad_hook(copy.deepcopy(hook, memo))


def _reachable(root: Any) -> Iterator[Any]:
    """Tensors and functions that can be reached without going through modules, classes or a function's globals."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        obj = todo.pop()
        if id(obj) in seen or isinstance(obj, _OPAQUE):
            continue
        seen.add(id(obj))
        if isinstance(obj, types.FunctionType):
            yield obj
            todo += [obj.__defaults__, obj.__kwdefaults__, obj.__dict__, obj.__closure__]
        else:
            if isinstance(obj, torch.Tensor):
                yield obj
            todo += gc.get_referents(obj)
