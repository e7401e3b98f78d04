"""The partition function: PyTorch's own, with a plan's answer to what is saved, and replays where they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from holdover.integrations._torch import (
    CustomPartitionerFn,
    NodeInfo,
    choosing,
    is_getitem,
    min_cut_rematerialization_partition,
)
from holdover.integrations.joint_graph import made_in_backward, read, saved_values
from holdover.integrations.masks import without_masks

Script = Mapping[str, frozenset[int]]
"""Fingerprint of a joint graph -> the places of the ops that are made again in backward."""

Copy = tuple[bool, fx.Node]
"""A node of backward, and whether it is the copy that replays read."""


class Partition(CustomPartitionerFn):
    """Splits joint graphs as PyTorch does, except that ops of the script are made again in backward.

    Args:
        script: graphs that are not in it are split as without a plan.
        fused: whether pointwise ops of backward are computed inside the kernels of their readers.
        identity: what tells this script from others, for the compiler's caches; None keeps out of them.

    Attributes:
        matched, unmatched: fingerprints of the graphs that were in the script, and were not.
    """

    def __init__(self, script: Script, identity: object | None = None, *, fused: bool = False) -> None:
        self.script, self.identity, self.fused = script, identity, fused
        self.matched: list[str] = []
        self.unmatched: list[str] = []
        self.own: frozenset[str] | None = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        self.own = None
        with choosing(self.choose):
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if self.own is not None:
            backward = replayed_late(backward, self.own, self.forward_ops)
        if self.fused:
            hand_out_as_told(backward, frozenset(kwargs.get("static_lifetime_input_indices") or ()))
        return forward, backward

    def choose(self, graph: fx.Graph, info: NodeInfo, stock: list[fx.Node]) -> list[fx.Node]:
        """What forward saves; called by PyTorch's partitioner."""
        if self.fused:
            stock = without_masks(graph, info, stock)
        joint = read(graph, info)
        again = self.script.get(joint.fingerprint)
        (self.matched if again is not None else self.unmatched).append(joint.fingerprint)
        if not again:
            return stock
        self.own = made_in_backward(graph, info, stock)
        self.forward_ops = frozenset(joint.numbers)
        return saved_values(graph, info, stock, again, joint.numbers)

    def uuid(self) -> object | None:
        return self.identity


def hand_out_as_told(backward: fx.GraphModule, parameters: frozenset[int]) -> None:
    """Have gradients of images, not those of parameters, leave the graph in the layout that they were traced with.

    Where Inductor has laid out a convolution's input anew, its gradient comes in that layout too, and those who get it
    copy it, and with it what they have saved: max-pooling its whole input. Written as told, it costs nothing more.
    """
    graph = backward.graph
    if not graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default):
        return
    output = next(iter(graph.find_nodes(op="output")))
    told = list(output.args[0])
    for i, node in enumerate(told):
        value = node.meta.get("val") if isinstance(node, fx.Node) and i not in parameters else None
        if isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_contiguous():
            with graph.inserting_before(output):
                kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
                told[i] = graph.create_node(
                    "call_function", torch.ops.aten.clone.default, (node,), kwargs, f"{node.name}_as_told"
                )
            told[i].meta.update(node.meta)
    output.args = (tuple(told), *output.args[1:])
    backward.recompile()


def replayed_late(backward: fx.GraphModule, own: frozenset[str], forward_ops: frozenset[str]) -> fx.GraphModule:
    """The same backward, with each op of forward where it is first read, and nothing held longer than a plan counts.

    An op that backward makes again for itself anyway (`own`: PyTorch takes pointwise ops to be free) may also stand on
    the way of a replay, much earlier. One result for both would be held all the time between, so there are two copies
    then.
    """
    wanted = _copies(backward.graph, own, forward_ops)
    graph = fx.Graph()
    done: dict[Copy, fx.Node] = {}
    for node in backward.graph.find_nodes(op="placeholder"):
        done[False, node] = done[True, node] = graph.node_copy(node)
    members = {copy: [u for u in copy[1].users if is_getitem(u)] for copy in wanted}
    for node in backward.graph.nodes:
        if node.op == "placeholder" or (False, node) not in wanted or node.name in forward_ops:
            continue
        todo: list[Copy] = [(False, node)]
        while todo:  # depth first, in the order in which an op reads its arguments
            copy = todo[-1]
            missing = [] if copy in done else [c for c in wanted[copy] if c not in done]
            if missing:
                todo.append(missing[0])
                continue
            todo.pop()
            if copy in done:
                continue
            made = {c[1]: done[c] for c in wanted[copy]}
            done[copy] = graph.node_copy(copy[1], made.__getitem__)
            for member in members[copy]:  # a tuple would hold all of its members
                if (taken := (copy[0], member)) in wanted and taken not in done:
                    done[taken] = graph.node_copy(member, {copy[1]: done[copy]}.__getitem__)
    return fx.GraphModule(backward, graph)


def _copies(graph: fx.Graph, own: frozenset[str], forward_ops: frozenset[str]) -> dict[Copy, list[Copy]]:
    """The copies of each node that are needed, and which copies each of them reads."""
    reads: dict[Copy, list[Copy]] = {}
    todo: list[Copy] = [
        (False, node) for node in graph.nodes if node.op != "placeholder" and node.name not in forward_ops
    ]
    while todo:
        copy = todo.pop()
        if copy in reads:
            continue
        replays, node = copy
        reads[copy] = [(_for_replays(replays, n, own, forward_ops), n) for n in node.all_input_nodes]
        todo.extend(c for c in reads[copy] if c[1].op != "placeholder")
    return reads


def _for_replays(reader_replays: bool, node: fx.Node, own: frozenset[str], forward_ops: frozenset[str]) -> bool:
    """Which copy of `node` is read: replays have their own, unless running it twice would not be the same."""
    if node.op == "get_attr" or node.name not in forward_ops or not isinstance(node.target, torch._ops.OpOverload):
        return node.name in forward_ops and is_getitem(node) and reader_replays
    return reader_replays or node.name not in own
