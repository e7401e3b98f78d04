"""The partition function: PyTorch's own, with the plan's answer to what is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from holdover.integrations._torch import (
    CustomPartitionerFn,
    NodeInfo,
    choosing,
    min_cut_rematerialization_partition,
)

Choose = Callable[[fx.Graph, NodeInfo, list[fx.Node]], list[fx.Node]]


class Partition(CustomPartitionerFn):
    """Splits joint graphs as PyTorch does, except that `choose` decides what is saved.

    Args:
        choose: gets the joint graph, what PyTorch knows of its nodes, and what it would save itself.
        identity: what tells this choice from others, for the compiler's caches; None keeps out of them.
    """

    def __init__(self, choose: Choose, identity: object | None = None) -> None:
        self.choose, self.identity = choose, identity

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        with choosing(self.choose):
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> object | None:
        return self.identity
