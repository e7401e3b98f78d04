"""Seconds of a layer's ops on a card: a roofline with stated efficiencies, not a measurement.

A matrix product takes its FLOPs over the card's dense rate, an element-wise op its bytes over the memory's bandwidth, a
collective its bytes over the link. Backward takes twice the products and twice the traffic of forward; its collectives
hide behind the weight gradients. `docs/closed-form.md` sets the result beside the paper's measured layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdover.closed_form.formula import total
from holdover.closed_form.tensors import Op
from holdover.cost.devices import Card
from holdover.cost.efficiency import EFFICIENCY


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Cards, nodes and the share of each peak that code reaches."""

    card: Card
    per_node: int = 8
    """Cards of a node, joined by `card.peer_link`."""
    network: float = 25e9
    """Bytes a second of each card to another node, each way (200 Gb/s)."""
    matmul: float = EFFICIENCY["matmul"].flops
    """Share of the dense rate that matrix products reach."""
    attention: float = 0.5
    """Share of the dense rate that fused attention reaches, of the half of its FLOPs that the causal mask leaves."""
    memory: float = EFFICIENCY["pointwise"].nbytes
    """Share of the memory bandwidth that element-wise ops reach."""
    link: float = 0.7
    """Share of a link that collectives reach."""

    def rate(self, element_bytes: int) -> float:
        """Dense FLOPs a second for activations of a size: bf16, or fp16 where there is none, or tf32 or fp32."""
        order = ("bf16", "fp16") if element_bytes == 2 else ("tf32", "fp32")
        return next(self.card.rates[dtype] for dtype in order if dtype in self.card.rates)

    def link_between(self, span: Any, stride: Any = None) -> Any:
        """Bytes a second that each rank of a group can take in.

        Args:
            span: neighbouring cards that the group reaches over; up to a node's, they are joined by `card.peer_link`.
            stride: for a gather, scatter or reduction, cards from one member to the next. Members of one node then
                share its cards' network links and pass on what comes in. None: each card has its own link alone, as
                in an exchange of all with all, or between neighbours.
        """
        members = 1.0 if stride is None else np.maximum(1.0, self.per_node / np.asarray(stride, dtype=float))
        outside = np.minimum(self.card.peer_link, self.network * members)
        return self.link * np.where(np.asarray(span) <= self.per_node, self.card.peer_link, outside)


def cluster_of(card: Card) -> Cluster:
    """Nodes of eight of a card, with the network usual for its time: 400 Gb/s a card from Hopper on, else 200."""
    recent = card.capability is None or card.capability >= (9, 0)
    return Cluster(card=card, network=50e9 if recent else 25e9)


@dataclass(frozen=True)
class Seconds:
    """A time in its parts. Each is a number, or an array over layouts."""

    products: Any
    traffic: Any
    collectives: Any
    exchanges: Any

    @property
    def forward(self) -> Any:
        """Seconds of running it once."""
        return self.products + self.traffic + self.collectives + self.exchanges

    @property
    def backward(self) -> Any:
        """Seconds of its backward. Its tensor-parallel collectives run beside the weight gradients' products."""
        exposed = np.maximum(0.0, self.collectives - self.products)
        return 2 * (self.products + self.traffic) + exposed + self.exchanges


def op_seconds(
    ops: Iterable[Op], values: Mapping[str, Any], tokens: Any, cluster: Cluster, element_bytes: int
) -> Seconds:
    """Seconds that ops take for one micro-batch.

    Args:
        ops: the ops.
        values: what the symbols stand for: numbers, or arrays over layouts. "ranks_tp" and "ranks_ep" are the
            neighbouring ranks that a tensor- or expert-parallel group spans.
        tokens: tokens of a micro-batch on one rank.
        cluster: the cards.
        element_bytes: bytes of an activation's element.
    """
    ops = tuple(ops)
    rate = cluster.rate(element_bytes)
    dense = total(op.flops for op in ops if not op.fused_attention).at(values)
    fused = total(op.flops for op in ops if op.fused_attention).at(values)
    traffic = total(op.traffic for op in ops).at(values)
    collective = total(op.collective for op in ops).at(values)
    exchange = total(op.exchange for op in ops).at(values)
    tp, ep = np.asarray(values["t"], dtype=float), np.asarray(values["ep"], dtype=float)
    products = tokens * (_float(dense) / (rate * cluster.matmul) + _float(fused) / 2 / (rate * cluster.attention))
    over_tensor = _float(collective) * (tp - 1) / tp / cluster.link_between(values["ranks_tp"], 1)
    over_experts = _float(exchange) * (ep - 1) / ep / cluster.link_between(values["ranks_ep"])
    return Seconds(
        products,
        tokens * _float(traffic) / (cluster.card.bandwidth * cluster.memory),
        tokens * over_tensor,
        tokens * over_experts,
    )


def _float(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) else float(value)
