"""What share of a card's peak the ops of each class reach: for pricing a card that is not here.

Published figures are few and depend on sizes, so most shares are assumptions, and say so. A planner needs proportions
between ops more than the last percent; `benchmarks/gpu.py` measures where a card is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdover.trace.graph import Signature

OpClass = Literal[
    "matmul", "convolution", "rnn", "attention", "attention_backward", "pointwise", "reduction", "gather"
]  # fmt: skip


@dataclass(frozen=True)
class Efficiency:
    """Shares of a card's dense rate and of its memory bandwidth, and where they come from."""

    flops: float
    nbytes: float
    source: str


EFFICIENCY: dict[OpClass, Efficiency] = {
    "matmul": Efficiency(
        0.7, 0.8,
        "assumption; above the 0.52 to 0.56 that whole steps of GPT-3 reach on A100 (Korthikanti et al. 2022, table 5)",
    ),
    "convolution": Efficiency(0.5, 0.8, "assumption"),
    "rnn": Efficiency(0.3, 0.6, "assumption; a step of the sequence waits for the one before"),
    "attention": Efficiency(0.6, 0.8, "assumption; at most 0.73 on A100 (Dao 2023, FlashAttention-2, section 4)"),
    "attention_backward": Efficiency(
        0.5, 0.8, "assumption; at most 0.63 on A100 (Dao 2023, FlashAttention-2, section 4)"
    ),
    "pointwise": Efficiency(0.7, 0.8, "assumption"),
    "reduction": Efficiency(0.7, 0.7, "assumption"),
    "gather": Efficiency(0.7, 0.5, "assumption"),
}  # fmt: skip
"""By class of op. The FLOPs of pointwise ops, reductions and gathers are not counted: bytes bind them."""

FLASH2_ON_HOPPER = Efficiency(0.35, 0.8, "FlashAttention-2 reaches 0.35 on H100 (Shah et al. 2024, FlashAttention-3)")
"""Flash attention as PyTorch has it, from compute capability 9.0 on, forward and (assumed) backward."""

KERNEL_SECONDS = 3e-6
"""What the smallest kernel takes on the card. An assumption."""

_MATMUL = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "_scaled_mm", "_grouped_mm",
           "_scaled_grouped_mm")  # fmt: skip
_REDUCTIONS = ("norm", "softmax", "sum", "mean", "var", "loss", "logsumexp", "amax", "amin", "max", "min", "cumsum",
               "topk", "sort", "pool")  # fmt: skip
_GATHERS = ("embedding", "index", "gather", "scatter", "grid_sampler")


def class_of(signature: Signature) -> OpClass:
    """The class of an op, by its name.

    >>> class_of(Signature("aten._scaled_dot_product_flash_attention_backward.default", (), ()))
    'attention_backward'
    >>> class_of(Signature("aten.native_layer_norm.default", (), ())), class_of(Signature("aten.gelu.default", (), ()))
    ('reduction', 'pointwise')
    """
    packet = signature.name.split(".")[1]
    if packet in _MATMUL:
        return "matmul"
    if "attention" in packet:
        return "attention_backward" if "backward" in packet else "attention"
    if "convolution" in packet:
        return "convolution"
    if "rnn" in packet:
        return "rnn"
    if any(part in packet for part in _GATHERS):
        return "gather"
    if any(part in packet for part in _REDUCTIONS) and not packet.startswith("_foreach"):
        return "reduction"
    return "pointwise"
