"""Memory that CUDA kernels take from PyTorch's allocator inside themselves, by rules read in PyTorch's source.

It cannot be measured without the card. What no rule is known for is named as unknown where the step is recorded for it
(cuDNN's workspaces above all), or is small beside the op's own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdover.measuring.arguments import dtype_of
from holdover.trace.graph import Signature, TensorSpec

FLOAT_BYTES = 4


def card_workspace_bytes(signatures: Sequence[Signature]) -> dict[int, int]:
    """Bytes that each op's kernel takes beyond its outputs while it runs, by position; those without a rule left out.

    >>> q = TensorSpec((2, 8, 256, 64), (131072, 16384, 64, 1), "bfloat16", "cuda")
    >>> flash = Signature("aten._scaled_dot_product_flash_attention_backward.default", (q, q, q, q), ())
    >>> card_workspace_bytes([flash]) == {0: 4 * 2 * 8 * 256 * 64 + 4 * 2 * 8 * 256}
    True
    """
    found = {}
    for i, signature in enumerate(signatures):
        rule = _RULES.get(signature.name)
        if rule is not None:
            found[i] = rule(*signature.args[:4])
    return {i: nbytes for i, nbytes in found.items() if nbytes}


def _flash_backward(grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec) -> int:
    """`mha_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.

    The gradient of the query is summed up in float32 (`dq_accum`), and each row has the product of output and gradient
    (`softmax_d`), both with the length rounded up to 128. With fewer heads of keys than of queries, the gradients of
    keys and values are first made for every head of queries (`dk_expanded`, `dv_expanded`).
    """
    batch, heads, length, width = query.shape
    length, rounded = _up(length, 128), _up(width, 32) if width <= 128 else _up(width, 64)
    summed = batch * length * heads * rounded * FLOAT_BYTES + batch * heads * length * FLOAT_BYTES
    _, key_heads, key_length, _ = key.shape
    expanded = 2 * batch * key_length * heads * _up(width, 8) * dtype_of(key).itemsize if key_heads != heads else 0
    return summed + expanded


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_RULES: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
}
