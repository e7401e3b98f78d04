"""Parameters that torch.distributed takes away between forward and backward."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from holdover.recompute._torch import freed_between

FREED = "reads a parameter that is sharded, and freed after forward"


def is_freed(storage: torch.UntypedStorage, modules: Iterable[torch.nn.Module]) -> bool:
    """Whether one of the running modules frees this storage when its forward has ended, as fully_shard has it."""
    sharding: Any = sys.modules.get("torch.distributed.fsdp")
    if sharding is None:
        return False
    kinds = (sharding.FSDPModule, sharding.FullyShardedDataParallel)
    own = [freed_between(m) for m in modules if isinstance(m, kinds)]
    return any(t.untyped_storage() is storage for tensors in own for t in tensors)
