"""What a plan sees of a joint graph, forward and backward in one: places that survive another batch size, and what has
to be saved when some of forward is made again in backward.

Ops of forward are numbered in the order of the joint graph, without the arithmetic on sizes that appears when shapes
are symbolic. Graphs of equal ops, wired alike, have the same fingerprint, whatever their sizes: the blocks of a
transformer are one graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from holdover.integrations._torch import CheckpointPolicy, NodeInfo, is_getitem, must_recompute
from holdover.trace.ops import op_name, takes_a_place

ALIASES = frozenset({"aten._unsafe_view.default", "aten.lift_fresh.default"})
"""Ops whose schema does not say that the result shares its argument's memory."""


@dataclass(frozen=True)
class JointGraph:
    """A joint graph as a plan addresses it.

    Attributes:
        fingerprint: of the ops of forward and how they are wired.
        numbers: node name -> place, for ops of forward.
        pinned: places that must not be made again, with the reason.
    """

    fingerprint: str
    numbers: Mapping[str, int]
    pinned: Mapping[int, str]


def read(graph: fx.Graph, info: NodeInfo) -> JointGraph:
    """Number the ops of forward and see which of them the user's own activation checkpointing decides."""
    names: dict[fx.Node, str] = {}
    numbers: dict[str, int] = {}
    pinned: dict[int, str] = {}
    text: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder" and holds_tensors(node):
            names[node] = f"p{len(names)}"
        elif known_in_forward(node, info) and holds_tensors(node):
            number = numbers[node.name] = len(numbers)
            names[node] = str(number)
            wired = ",".join(names[n] for n in node.all_input_nodes if n in names)
            text.append(f"{target_name(node)}({wired})")
            if node.meta.get("recompute") in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
                pinned[number] = "saved by the model's own activation checkpointing"
    digest = hashlib.sha256("\n".join(text).encode()).hexdigest()[:12]
    return JointGraph(digest, numbers, pinned)


def known_in_forward(node: fx.Node, info: NodeInfo) -> bool:
    """Whether the op needs nothing that only backward has: the gradients of the outputs."""
    return node.op == "call_function" and node not in info.tangents_closure


def target_name(node: fx.Node) -> str:
    return "getitem" if is_getitem(node) else op_name(node.target)


def holds_tensors(node: fx.Node) -> bool:
    """Whether the node's value is a tensor, or several."""
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(part, torch.Tensor) for part in parts)


def is_view(node: fx.Node) -> bool:
    """Whether the node only looks at its first argument's memory in another way."""
    if node.op != "call_function":
        return False
    return is_getitem(node) or not takes_a_place(node.target) or target_name(node) in ALIASES


def maker(node: fx.Node) -> fx.Node:
    """The op, or placeholder, whose memory the node looks at."""
    while is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def saved_values(
    graph: fx.Graph, info: NodeInfo, stock: Iterable[fx.Node], again: frozenset[int], numbers: Mapping[str, int]
) -> list[fx.Node]:
    """What forward has to hand to backward, when the ops with the numbers `again` are made again there.

    Args:
        stock: what is saved without a plan; everything else that backward reads, it makes from these.
    """
    made_again = {name for name, number in numbers.items() if number in again}
    saved: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = list(stock)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        inside = known_in_forward(node, info) and holds_tensors(node)
        if inside and (maker(node).name in made_again or must_recompute(node)):
            todo.extend(node.all_input_nodes)
        else:
            saved.add(node)
    return [node for node in graph.nodes if node in saved]


def made_in_backward(graph: fx.Graph, info: NodeInfo, stock: Iterable[fx.Node]) -> frozenset[str]:
    """Names of the ops of forward that backward makes again for itself when `stock` is saved."""
    saved = set(stock)
    found: set[fx.Node] = set()
    todo = [n for node in graph.nodes if node in info.tangents_closure for n in node.all_input_nodes]
    while todo:
        node = todo.pop()
        if node not in saved and node not in found and known_in_forward(node, info):
            found.add(node)
            todo.extend(node.all_input_nodes)
    return frozenset(node.name for node in found)
