"""Seconds per op on a card that is not here: its FLOPs and bytes against the card's peaks.

An op takes as long as the slower of arithmetic and memory (Williams et al. 2009, Roofline), each at the share of the
peak that its class reaches (`efficiency.py`), and never less than a kernel takes at all. Python's time is not in it: in
a step that keeps the card busy, it passes behind the card's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from holdover.cost.devices import Card
from holdover.cost.efficiency import EFFICIENCY, FLASH2_ON_HOPPER, KERNEL_SECONDS, Efficiency, class_of
from holdover.cost.flops import work_of
from holdover.cost.measured import OpCost
from holdover.measuring.arguments import UnrunnableError, is_view_or_factory, resolve, tensors_of
from holdover.trace.graph import Signature


def modelled(signatures: Sequence[Signature], card: Card) -> list[OpCost]:
    """Seconds that each op takes on a card, from its FLOPs and bytes.

    Args:
        signatures: the distinct ops of a trace.
        card: the card; it need not be here.

    Returns:
        One cost per signature, in order, all with source "modelled".

    >>> from holdover.cost.devices import card
    >>> from holdover.trace.graph import TensorSpec
    >>> x = TensorSpec((4096, 4096), (4096, 1), "bfloat16", "cpu")
    >>> (cost,) = modelled([Signature("aten.mm.default", (x, x), ())], card("h100-80gb"))
    >>> round(cost.seconds * 1e6)  # 2 * 4096**3 FLOPs at 0.7 of 989 TFLOPS
    199
    """
    return [OpCost(_seconds(signature, card), "modelled") for signature in signatures]


def copy_seconds_per_byte(card: Card) -> float:
    """Seconds per byte that is copied on the card: read once and written once."""
    return 2 / (card.bandwidth * EFFICIENCY["pointwise"].nbytes)


def _seconds(signature: Signature, card: Card) -> float:
    if is_view_or_factory(signature.name):
        return 0.0  # a view runs nothing on the card, and memory is handed out without touching it
    work = work_of(signature)
    reached = efficiency_of(signature, card)
    arithmetic = work.flops / (card.rates[rate_of(signature, card)] * reached.flops) if work.flops else 0.0
    return max(KERNEL_SECONDS, arithmetic, work.nbytes / (card.bandwidth * reached.nbytes))


def efficiency_of(signature: Signature, card: Card) -> Efficiency:
    """The shares of the card's peaks that the op reaches.

    A causal mask leaves half of fused attention's products undone, which counts as twice the share of the rate.
    """
    kind = class_of(signature)
    found = EFFICIENCY[kind]
    if kind in ("attention", "attention_backward"):
        if "flash" in signature.name and card.capability is not None and card.capability >= (9, 0):
            found = FLASH2_ON_HOPPER
        if _argument(signature, "is_causal") is True:
            found = dataclasses.replace(found, flops=2 * found.flops)
    return found


def rate_of(signature: Signature, card: Card) -> str:
    """The dtype whose rate binds the op's arithmetic: that of its first floating tensor.

    As PyTorch is set by default, float32 convolutions and RNNs run in TF32 where the card has it, and matrix products
    do not. What the card has no units for runs at its float32 rate.

    >>> from holdover.cost.devices import card
    >>> from holdover.trace.graph import TensorSpec
    >>> x = TensorSpec((8, 8), (8, 1), "float32", "cpu")
    >>> rate_of(Signature("aten.mm.default", (x, x), ()), card("a100-80gb"))
    'fp32'
    """
    dtype = next((s.dtype for s in tensors_of(signature) if "float" in s.dtype), "float32")
    wanted = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32")
    if wanted == "fp32" and class_of(signature) in ("convolution", "rnn"):
        wanted = "tf32"
    return wanted if wanted in card.rates else "fp32"


def _argument(signature: Signature, name: str) -> object:
    """An argument by its name in the op's schema; None where it is not given."""
    given = dict(signature.kwargs)
    if name in given:
        return given[name]
    try:
        names = [argument.name for argument in resolve(signature.name)._schema.arguments]
    except UnrunnableError:
        return None
    place = names.index(name) if name in names else len(signature.args)
    return signature.args[place] if place < len(signature.args) else None
