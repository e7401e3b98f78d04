"""What kernels ask of the process besides their arguments: a replay runs under what was set in forward.

`with torch.backends.mkldnn.flags(enabled=False):` around forward alone is over when backward begins, and so is another
number of threads, another default type, a lower precision of matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdover.recompute._torch import precision_settings, switches

Settings = tuple[Any, ...]
"""One entry for each of `READ`."""

LEAST = torch.finfo(torch.float64).tiny


def _keeps_denormals() -> bool:
    """Whether this thread's processor makes a result too small for a normal number; PyTorch has no getter for it."""
    return LEAST * 0.5 != 0.0


def _keep_denormals(keep: bool) -> None:
    torch.set_flush_denormal(not keep)


_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (_keeps_denormals, _keep_denormals),
    *switches(),
    *precision_settings(),
]
READ = tuple(read for read, _ in _SETTINGS)
WRITE = tuple(write for _, write in _SETTINGS)

_met: dict[Settings, Settings] = {}
_last: Settings = ()


def now() -> Settings:
    """What is set at present. Equal settings are one object."""
    global _last
    found = tuple([read() for read in READ])
    last = _last
    if found == last:
        return last
    _last = last = _met.setdefault(found, found)
    return last


@contextmanager
def under(wanted: Settings, present: Settings) -> Iterator[None]:
    """Set what is `wanted`, for a while."""
    changed = [(write, w, p) for write, w, p in zip(WRITE, wanted, present, strict=True) if w != p]
    try:
        for write, w, _ in changed:
            write(w)
        yield
    finally:
        for write, _, p in changed:
            write(p)
