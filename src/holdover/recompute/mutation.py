"""Ops that write to a storage: what recipes need of its content is saved before."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from holdover.recompute.geometry import oddity
from holdover.recompute.recipe import Pins, Source, Twin, Value, flat
from holdover.recompute.rules import Op
from holdover.trace.ops import statistics_given


def written(op: Op, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that this call writes to."""
    found: list[torch.Tensor] = []
    if op.updates(args):
        found += statistics_given(op.func, args)
    for position, name in op.writes:
        a = args[position] if position < len(args) else kwargs.get(name)
        found += [t for t in flat(a) if isinstance(t, torch.Tensor)]
    return found


def tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an op's arguments."""
    return [t for t in flat([*args, *kwargs.values()]) if isinstance(t, torch.Tensor)]


def forget_dead_pins(tensor: torch.Tensor) -> None:
    """Take the note of past pins off a storage that no recipe reads any more."""
    if oddity(tensor):
        return
    storage: Any = tensor.untyped_storage()
    note = getattr(storage, "_holdover", None)
    if type(note) is Pins and all(ref() is None for ref in note):
        del storage._holdover


def about_to_write(tensor: torch.Tensor, twin: Twin | None = None, counted: int = 0) -> None:
    """Save what recipes need of a storage that is going to be written to, and forget what made its content."""
    if oddity(tensor):
        return
    storage: Any = tensor.untyped_storage()
    note = getattr(storage, "_holdover", None)
    if note is None:
        return
    pins: list[weakref.ref[Source]] = note if type(note) is Pins else []
    if type(note) is Value:
        note.original = None
        pins = [note.pin] if note.pin is not None else []
    for ref in pins:
        source = ref()
        if source is not None and not (twin is not None and twin.serve(source)):
            source.copy_on_write(counted)
    del storage._holdover
