"""Saved-tensor hooks that torch.func's transforms can live with, and the private names that takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks

__all__ = [
    "pop_saved_tensors_hooks",
    "push_saved_tensors_hooks",
    "top_saved_tensors_hooks",
    "yielding_to_transforms",
]

_patching = threading.Lock()
_yielding = 0
_disable_hooks = torch.autograd.graph.disable_saved_tensors_hooks


class yielding_to_transforms:  # noqa: N801 - a context manager, entered for every session
    """While entered, torch.func's transforms find the saved-tensor hooks gone whose object has `yields_to_transforms`.

    They refuse to run under hooks (`torch.autograd.graph.disable_saved_tensors_hooks` raises), and they ask for that
    function by its name in torch.autograd.graph each time. What they save inside is kept as PyTorch does.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        global _yielding
        with _patching:
            _yielding += 1
            torch.autograd.graph.disable_saved_tensors_hooks = _disable_hooks_after_lifting

    def __exit__(self, *exc: object) -> None:
        global _yielding
        with _patching:
            _yielding -= 1
            if not _yielding:
                torch.autograd.graph.disable_saved_tensors_hooks = _disable_hooks


def _yields(pack: Callable[..., Any]) -> bool:
    return getattr(getattr(pack, "__self__", None), "yields_to_transforms", False)


@contextmanager
def _disable_hooks_after_lifting(error_message: str) -> Iterator[None]:
    ours = []
    while (top := top_saved_tensors_hooks(False)) is not None and _yields(top[0]):
        pop_saved_tensors_hooks()
        ours.append(top)
    try:
        with _disable_hooks(error_message):
            yield
    finally:
        for pack, unpack in reversed(ours):
            push_saved_tensors_hooks(pack, unpack)
