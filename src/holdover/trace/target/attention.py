"""scaled_dot_product_attention as the card runs it (aten/src/ATen/native/transformers/attention.cpp)."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from holdover.trace.target.card import Target
from holdover.trace.target.rules import CUDNN, EFFICIENT, FLASH, Attention, attention_backend

aten = torch.ops.aten


def scaled_dot_product_attention(
    target: Target,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Pick the backend by the rules, and call it with what the composite function prepares for it."""
    call = Attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    backend = attention_backend(call, target)
    mask = additive(attn_mask, query.dtype)
    if backend == CUDNN:
        out: torch.Tensor = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.requires_grad, dropout_p, is_causal, False, scale=scale
        )[0]
        return out
    if backend == FLASH:
        size = query.size(-1)
        padded = [pad_to(t, 8) for t in (query, key, value)]
        factor = 1 / math.sqrt(size) if scale is None else scale
        out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=factor)[0]
        return out if out.size(-1) == size else out[..., :size]
    if backend == EFFICIENT:
        if mask is not None:
            mask = aligned(mask).expand(query.size(0), query.size(1), query.size(2), key.size(2))
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, call.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
        return out
    out = aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """attention.cpp convert_boolean_attn_mask."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.scalar_tensor(0.0, dtype=dtype, device=mask.device)  # C++ evaluates the last argument first
    return torch.where(mask.logical_not(), -math.inf, zero)


def pad_to(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    """attention.cpp pad_last_dim."""
    missing = -tensor.size(-1) % multiple
    return pad(tensor, (0, missing)) if missing else tensor


def aligned(mask: torch.Tensor) -> torch.Tensor:
    """attention.cpp preprocess_mask: rows start at multiples of 8 elements, or the mask is copied with padding."""
    if all(s % 8 == 0 for s in mask.stride()[:-1]) and mask.stride(-1) == 1:
        return mask
    size = mask.size(-1)
    return pad(mask, (0, 8 - size % 8))[..., :size]
