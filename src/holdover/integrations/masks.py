"""Boolean masks that compiled code need not save.

What says which elements an activation let through is computed from what backward reads anyway, in the kernel that reads
it. PyTorch's partitioner saves it all the same, as one byte is less than the four of what it is computed from. Under
Inductor that is slow on a processor, where a kernel takes about 8 ns to store one element of a mask and less than half
of one to compute it again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from holdover.integrations._torch import NodeInfo, fuses
from holdover.integrations.joint_graph import known_in_forward

SMALL = 16
"""A value with so many times fewer elements than the mask may be saved for it, such as the mean of each channel."""


def without_masks(graph: fx.Graph, info: NodeInfo, stock: Iterable[fx.Node]) -> list[fx.Node]:
    """What to save in place of `stock`, so that backward computes masks again from what else is saved."""
    saved = set(stock)
    for mask in [node for node in saved if _is_mask(node) and known_in_forward(node, info)]:
        readers = [user for user in mask.users if user in info.tangents_closure]
        more = _sources(mask, info, saved - {mask}) if all(fuses(mask, reader) for reader in readers) else None
        if more is not None:
            saved = saved - {mask} | more
    return [node for node in graph.nodes if node in saved]


def _is_mask(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _sources(mask: fx.Node, info: NodeInfo, saved: set[fx.Node]) -> set[fx.Node] | None:
    """The small values to save so that one kernel computes the mask from them and from `saved`; None if none does."""
    more: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = [mask]
    while todo:
        node = todo.pop()
        if node in seen or node in saved:
            continue
        seen.add(node)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.numel() * SMALL <= mask.meta["val"].numel():
            more.add(node)
        elif _computed_in_place(node, mask, info):
            todo.extend(node.all_input_nodes)
        else:
            return None
    return more


def _computed_in_place(node: fx.Node, mask: fx.Node, info: NodeInfo) -> bool:
    """Whether a kernel over the mask's elements can have this op in it."""
    value = node.meta.get("val")
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and known_in_forward(node, info)
        and fuses(node, node)
        and isinstance(value, torch.Tensor)
        and value.numel() == mask.meta["val"].numel()
    )
