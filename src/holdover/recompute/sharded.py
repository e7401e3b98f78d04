"""Parameters that torch.distributed takes away between forward and backward."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from holdover.recompute._torch import freed_between

FREED = "reads a parameter that FullyShardedDataParallel frees after forward"
MARK = "FSDP::"
"""How fully_shard labels what it does before and after a module's forward."""


class Frees:
    """Who frees parameters when a forward has ended, in one session.

    The running modules that fully_shard has taken over, and all that FullyShardedDataParallel wraps inside the model:
    no frame tells when these run.
    """

    def __init__(self, running: list[torch.nn.Module]) -> None:
        self.running = running
        self.sharding: Any = sys.modules.get("torch.distributed.fsdp")
        self.wrapped: list[torch.nn.Module] | None = None

    def find(self, storage: torch.UntypedStorage) -> torch.nn.Module | None:
        """The module that frees this storage, if any does."""
        if self.sharding is None:
            return None
        if self.wrapped is None and self.running:
            wrapper = self.sharding.FullyShardedDataParallel
            self.wrapped = [m for m in self.running[0].modules() if isinstance(m, wrapper)]
        modules = [*(m for m in self.running if isinstance(m, self.sharding.FSDPModule)), *(self.wrapped or ())]
        return next((m for m in modules if any(t.untyped_storage() is storage for t in freed_between(m))), None)


def can_gather(module: Any) -> bool:
    """Whether what the module frees can be had back at any time."""
    return hasattr(module, "unshard")


@contextmanager
def gathered(modules: Iterable[Any]) -> Iterator[None]:
    """The parameters of these modules of fully_shard are there. All processes get here in the same order.

    In a module's own backward they are there anyway; a replay that reaches back into another one comes too early.
    """
    modules = list(dict.fromkeys(modules))
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()
