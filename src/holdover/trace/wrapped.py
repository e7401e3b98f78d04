"""Models that torch.distributed has taken over: a step of theirs cannot be recorded in a process of its own."""

from __future__ import annotations

import sys
from typing import Any

import torch

from holdover.errors import TraceError

ALONE = "exchanges data between processes, and a step is recorded in a process of its own, which the others do not know"


def refuse_wrapped(model: torch.nn.Module) -> None:
    """Say what to plan for instead of a model that is spread over processes.

    Raises:
        TraceError: the model is one, or has one in it.
    """
    sharded: Any = sys.modules.get("torch.distributed.fsdp")
    for path, module in model.named_modules():
        what = f"{path or 'the model'} is a {type(module).__name__}"
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            inside = f"model.{path}.module" if path else "model.module"
            raise TraceError(
                f"{what}, which {ALONE}. Plan for the module inside ({inside}) and apply the plan to that, before or "
                "after wrapping. The buckets that gradients travel in are not counted."
            )
        if sharded is not None and isinstance(module, sharded.FullyShardedDataParallel):
            raise TraceError(f"{what}, which {ALONE}. Plan for the model before it is wrapped; {SHARDED}")
        if sharded is not None and isinstance(module, sharded.FSDPModule):
            raise TraceError(
                f"{what}, so fully_shard has taken it over: it {ALONE}. Plan, and apply the plan, before fully_shard; "
                f"{SHARDED}"
            )
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise TraceError(
                f"{name} is a DTensor, so the model {ALONE}. Plan, and apply the plan, before the model is "
                "parallelized. What is computed with DTensors is kept."
            )


def refuse_collective(func: Any) -> None:
    """Called where a step is recorded on real tensors.

    Raises:
        TraceError: the op exchanges data between processes.
    """
    if "c10d" in getattr(func, "namespace", ""):
        raise TraceError(
            f"This step has to be recorded on real tensors, and {func} {ALONE}. Read no values of tensors in forward, "
            "so that it can be recorded without data, or plan for a variant of the model that runs in one process."
        )


SHARDED = (
    "what reads parameters that are freed after forward is then kept, unless they stay "
    "(fully_shard(..., reshard_after_forward=False))."
)
