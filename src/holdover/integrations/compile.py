"""Plans under torch.compile: the backend that follows one, and putting it on a model.

    plan = holdover.plan(model, args, budget="2GiB", compiled=True)
    holdover.apply_(model, plan)            # or: torch.compile(model, backend=backend(plan))

The plan's choices go in through PyTorch's own slot for a partition function, so everything else about the compiled
code is the compiler's.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from holdover import __version__
from holdover.errors import ApplyError
from holdover.integrations._torch import aot_autograd, boxed_nop, inductor
from holdover.integrations.capture import GRAPH
from holdover.integrations.partition import Partition
from holdover.integrations.regions import Former, compile_regions, is_compiled, regions
from holdover.recompute.apply import installation_of
from holdover.recompute.shapes import users_level

if TYPE_CHECKING:
    from holdover.planning.plan import Plan


class PlannedBackend:
    """A backend for `torch.compile` that follows a plan. Made by `backend`.

    Attributes:
        plan: the plan.
        partition: what splits the graphs; says which of them the plan knew.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        told = json.dumps([__version__, plan.compiled, sorted((c.call, c.index) for c in plan.choices)])
        identity = ("holdover", hashlib.sha256(told.encode()).hexdigest())
        self.partition = Partition(script_of(plan), identity, fused=plan.compiled == "inductor")
        self.warned = False

    def __call__(self, gm: fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        if self.plan.compiled == "inductor":
            patches = {**options.get("options", {}), "custom_partitioner_fn": self.partition}
            run = inductor(gm, inputs, patches)
        else:
            split = aot_autograd(
                fw_compiler=boxed_nop, partition_fn=self.partition, keep_inference_input_mutations=True
            )
            run = split(gm, inputs)
        if self.partition.script and self.partition.unmatched and not self.partition.matched and not self.warned:
            self.warned = True
            warnings.warn(_unknown_graph(self.plan), stacklevel=users_level())
        return run


def script_of(plan: Plan) -> dict[str, frozenset[int]]:
    """The plan's choices by graph, as the partition function takes them."""
    return {call.removeprefix(GRAPH): frozenset(ops) for call, ops in plan.script.items()}


def _unknown_graph(plan: Plan) -> str:
    known = len({c.call for c in plan.choices})
    return (
        f"torch.compile made a graph that the plan for this {plan.model} does not know, and compiles it without "
        f"recomputation. The plan is for {plan.inputs or 'no inputs'}; it knows {known} other "
        f"graph{'s' * (known > 1)}. What is compiled (whole model or single blocks), train and eval mode, precision "
        "and which parameters are trained must be as when it was planned"
    )


def backend(plan: Plan) -> PlannedBackend:
    """The backend that makes compiled code follow `plan`, for `torch.compile(model, backend=backend(plan))`.

    Args:
        plan: from `holdover.plan(..., compiled=...)`. It is for whatever was compiled when it was made: the whole
            model, or each of the modules that were compiled by themselves.

    Raises:
        ApplyError: the plan was made for eager mode.

    >>> import torch, holdover
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> x = torch.ones(100, 8)
    >>> plan = holdover.plan(model, (x,), budget="min", compiled="aot_eager")
    >>> torch.compile(model, backend=backend(plan))(x).shape
    torch.Size([100, 1])
    """
    if not plan.compiled:
        raise ApplyError(
            "this plan was made for eager mode, and torch.compile needs one of the compiler's graphs: "
            "plan again with compiled=True"
        )
    return PlannedBackend(plan)


def apply_compiled(model: torch.nn.Module, plan: Plan) -> None:
    """`holdover.apply_` for a plan of compiled code: compile the plan's regions, in place, by its backend.

    Raises:
        ApplyError: other modules of the model are compiled than those that were planned for, or the model follows a
            plan already.
    """
    if model in _APPLIED or installation_of(model) is not None:
        raise ApplyError(
            f"this {type(model).__name__} already follows a plan: remove it first with holdover.remove_(model)"
        )
    found, wanted = regions(model), plan.regions
    compiled = {name for name, module in found.items() if is_compiled(module)}
    if compiled - set(wanted):
        raise ApplyError(
            f"this plan is for {_named(wanted)} compiled {'each by itself' if len(wanted) > 1 else 'as a whole'}, and "
            f"in this {type(model).__name__} {_named(sorted(compiled))} is compiled: the graphs would be others. Plan "
            "again for the model as it is now, or apply the plan to a model in which nothing is compiled"
        )
    planned = backend(plan)
    _APPLIED[model] = planned, compile_regions(model, planned, wanted)


def remove_compiled(model: torch.nn.Module) -> bool:
    """Take a plan of compiled code off again; what was compiled before is so as before. False if there is none."""
    applied = _APPLIED.pop(model, None)
    if applied is None:
        return False
    for former in applied[1]:
        former.restore()
    return True


def backend_of(model: torch.nn.Module) -> PlannedBackend | None:
    """The backend of the plan of compiled code that the model follows; None if there is none."""
    applied = _APPLIED.get(model)
    return None if applied is None else applied[0]


def _named(names: Iterable[str]) -> str:
    shown = [name or "the whole model" for name in names]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


_APPLIED: weakref.WeakKeyDictionary[torch.nn.Module, tuple[PlannedBackend, list[Former]]] = weakref.WeakKeyDictionary()
