"""What PyTorch 2.13 does on a CUDA card and not on a CPU: the table that the emulation stands on.

Every row names the function in PyTorch's source that it was read in, so that a reader can check it; docs/cuda-target.md
shows the same rows. Where no row is given the card and the CPU run the same ops (checked by the ops' own schemas:
tests/trace/target/test_rules.py reads PyTorch's operator table for kernels that only one of the two has).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from holdover.trace.target.card import Target


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that differs on the card."""

    op: str  # what the program calls
    does: str  # what runs on the card
    saves: str  # what autograd keeps of it, beside its inputs where these are needed
    source: str  # file (below aten/src/ATen/native unless it says otherwise) and function


RULES: tuple[Rule, ...] = (
    Rule(
        "scaled_dot_product_attention",
        "the first backend of the priority order that is allowed: see ATTENTION",
        "q, k, v, out, logsumexp (float32), random state; math: the probabilities, in float32 where the input is half",
        "transformers/attention.cpp scaled_dot_product_attention; transformers/cuda/sdp_utils.cpp select_sdp_backend",
    ),
    Rule(
        "dropout",
        "native_dropout if 0 < p < 1; the in-place form stays a product",
        "a bool mask (the CPU keeps a mask of the input's dtype)",
        "Dropout.cpp is_fused_kernel_acceptable, dropout",
    ),
    Rule(
        "batch_norm",
        "cudnn_batch_norm or native_batch_norm: see batch_norm_is_cudnn",
        "input, mean and inverse deviation in float32, and cuDNN's reserve",
        "Normalization.cpp _select_batch_norm_backend, _batch_norm_impl_index",
    ),
    Rule(
        "rms_norm",
        "_fused_rms_norm, where weight and input have one dtype",
        "input and the inverse root mean square in float32",
        "layer_norm.cpp rms_norm_symint; native_functions.yaml _fused_rms_norm",
    ),
    Rule(
        "lstm, gru, rnn_tanh, rnn_relu",
        "_cudnn_rnn over one flat buffer of weights, time first in memory: see rnn_is_cudnn",
        "input, hidden states, output, the flat weights and cuDNN's reserve",
        "RNN.cpp use_cudnn, lstm, ONE_HIDDEN_RNN; cudnn/RNN.cpp _cudnn_impl",
    ),
    Rule(
        "lstm_cell, gru_cell",
        "_thnn_fused_lstm_cell, _thnn_fused_gru_cell",
        "a workspace with the gates, and the old and new cell state",
        "RNN.cpp LSTMCell::operator(), GRUCell::operator()",
    ),
    Rule(
        "softmax, log_softmax",
        "float16 with dtype=float32 is one op; bfloat16 is cast first",
        "the float32 result, and no float32 copy of a float16 input",
        "SoftMax.cpp softmax, log_softmax",
    ),
    Rule(
        "convolution",
        "cuDNN; the result and the gradients are channels last if the input or the weight is, but in float64",
        "input and weight",
        "ConvUtils.h cudnn_conv_suggest_memory_format; Convolution.cpp _determine_backend_memory_format",
    ),
    Rule(
        "grid_sampler",
        "cudnn_grid_sampler for bilinear, zero padding, align_corners, four dimensions, at most 1024 channels",
        "input and grid",
        "GridSampler.cpp grid_sampler; GridSamplerUtils.h cond_cudnn_grid_sampler",
    ),
    Rule(
        "silu_backward, mish_backward",
        "one kernel each, where the CPU build alone would take them apart",
        "-",
        "native_functions.yaml silu_backward.grad_input, mish_backward",
    ),
    Rule(
        "native_layer_norm, native_group_norm",
        "statistics in float32 whatever the input's dtype",
        "input, mean and inverse deviation in float32",
        "cuda/layer_norm_kernel.cu layer_norm_cuda; cuda/group_norm_kernel.cu",
    ),
    Rule(
        "autocast",
        "the cast lists of CUDA: see LOWER_PRECISION and the lists after it",
        "what was cast, in the dtype it was cast to; casts of float32 leaves are made once per region",
        "aten/src/ATen/autocast_mode.h AT_FORALL_*; autocast_mode.cpp TORCH_LIBRARY_IMPL(aten, Autocast), cached_cast",
    ),
    Rule(
        "_cudnn_rnn under autocast",
        "float16 even where autocast says bfloat16, with the weights cast into a new flat buffer",
        "the same, in float16",
        "aten/src/ATen/cudnn/AutocastRNN.cpp _cudnn_rnn_cast_reflatten",
    ),
    Rule(
        "optimizers, clip_grad_norm_",
        "foreach by default",
        "-",
        "torch/optim/optimizer.py _default_to_fused_or_foreach; torch/utils/_foreach_utils.py",
    ),
)


# -- attention --------------------------------------------------------------------------------------------------------

FLASH, EFFICIENT, MATH, CUDNN = "flash", "efficient", "math", "cudnn"


@dataclass(frozen=True, slots=True)
class Attention:
    """What the choice of an attention backend looks at."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    gqa: bool

    @property
    def requires_grad(self) -> bool:
        wanted = self.query.requires_grad or self.key.requires_grad or self.value.requires_grad
        return wanted and torch.is_grad_enabled()


def attention_backend(call: Attention, target: Target) -> str:
    """The kernel that the card's PyTorch would pick, by sdp_utils.cpp select_sdp_backend.

    Raises:
        RuntimeError: as PyTorch does, when every backend that could run is switched off.
    """
    allowed = {
        CUDNN: cudnn_attention_obstacles,
        FLASH: flash_attention_obstacles,
        EFFICIENT: efficient_attention_obstacles,
    }
    for backend in attention_order(target):
        if backend == MATH:
            if torch.backends.cuda.math_sdp_enabled():
                return MATH
        elif next(allowed[backend](call, target), None) is None:
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def attention_order(target: Target) -> tuple[str, ...]:
    """cuDNN comes first on sm90, sm100 and sm103 from cuDNN 9.15.1 on (sdp_utils.cpp check_prefer_cudnn_attention)."""
    if target.cudnn > 91500 and target.capability in ((9, 0), (10, 0), (10, 3)):
        return (CUDNN, FLASH, EFFICIENT, MATH)
    return (FLASH, EFFICIENT, MATH, CUDNN)


def flash_attention_obstacles(call: Attention, target: Target) -> Iterator[str]:
    """Why flash attention cannot be taken (sdp_utils.cpp can_use_flash_attention); nothing when it can."""
    dims = {t.size(-1) for t in (call.query, call.key, call.value)}
    if not torch.backends.cuda.flash_sdp_enabled():
        yield "switched off"
    if any(t.dim() != 4 for t in (call.query, call.key, call.value)):
        yield "not four-dimensional"  # check_tensor_shapes
        return
    if call.mask is not None:
        yield "a mask"  # check_for_attn_mask
    if len(dims) > 1 or max(dims) > 256:
        yield "head size"  # check_head_dim_size_flash
    if not (8, 0) <= target.capability <= (12, 1):
        yield "compute capability"  # check_flash_attention_hardware_support
    if call.requires_grad and ((8, 6) <= target.capability <= (8, 9) or target.capability[0] == 12):
        size = call.query.size(-1)  # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
        if size > 192 and not (size > 224 and call.dropout == 0.0):
            yield "head size above 192 in training on this card"
    if call.causal and call.query.size(-2) != call.key.size(-2):
        yield "causal with unequal lengths"  # check_flash_causal_non_square_seqlens
    if not half_precision(call, target):
        yield "dtype"  # check_dtypes_low_precision
    yield from dense_obstacles(call, gqa=True)


def efficient_attention_obstacles(call: Attention, target: Target) -> Iterator[str]:
    """Why memory-efficient attention cannot be taken (sdp_utils.cpp can_use_mem_efficient_attention)."""
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        yield "switched off"
    if any(t.dim() != 4 for t in (call.query, call.key, call.value)):
        yield "not four-dimensional"  # check_tensor_shapes
        return
    if not (5, 0) <= target.capability <= (12, 1):
        yield "compute capability"  # check_mem_efficient_hardware_support
    alignment = gemm_alignment(call.query.dtype, target)
    if call.query.size(-1) != call.key.size(-1) or call.query.size(-1) % alignment or call.value.size(-1) % alignment:
        yield "head size"  # check_head_dim_size_mem_efficient
    wide = (torch.float16, torch.float32, torch.bfloat16) if target.capability >= (8, 0) else (
        torch.float16, torch.float32)  # fmt: skip
    if len({t.dtype for t in (call.query, call.key, call.value)}) > 1 or call.query.dtype not in wide:
        yield "dtype"  # check_tensor_dtype
    yield from dense_obstacles(call, gqa=False, any_stride_of_one=False)


def cudnn_attention_obstacles(call: Attention, target: Target) -> Iterator[str]:
    """Why cuDNN's attention cannot be taken (sdp_utils.cpp can_use_cudnn_attention)."""
    if not torch.backends.cuda.cudnn_sdp_enabled() or target.cudnn < 90000:
        yield "switched off"
    if any(t.dim() != 4 for t in (call.query, call.key, call.value)):
        yield "not four-dimensional"  # check_tensor_shapes
        return
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        yield "deterministic algorithms"  # check_cudnn_deterministic
    if not half_precision(call, target):
        yield "dtype"  # check_dtypes_low_precision
    if call.mask is not None and not mask_fits(call):
        yield "mask's shape or gradient"  # check_attn_mask_shape
    if not (8, 0) <= target.capability <= (12, 1):
        yield "compute capability"  # check_cudnn_hardware_support
    if call.dropout * 16 != int(call.dropout * 16) or (call.dropout > 0 and 91100 < target.cudnn < 91400):
        yield "dropout that is no multiple of 1/16"  # check_cudnn_dropout
    key_size, value_size, length = call.query.size(3), call.value.size(3), call.key.size(2)  # check_cudnn_tensor_shapes
    large = 192 if target.cudnn >= 91100 and target.capability[0] in (9, 10) and (key_size, value_size) == (192, 128) \
        else 128  # fmt: skip
    if max(key_size, value_size) > large or key_size % 8 or value_size % 8:
        yield "head size"
    if length == 1 or (call.dropout != 0.0 and call.query.size(2) == 1):
        yield "length of 1"
    yield from dense_obstacles(call, gqa=True, same_heads=False)


def dense_obstacles(
    call: Attention, *, gqa: bool, same_heads: bool = True, any_stride_of_one: bool = True
) -> Iterator[str]:
    """sdp_utils_cpp.h check_batch_size_and_num_heads_dense, and the functions named below."""
    q, k, v = call.query, call.key, call.value
    if not q.size(0) == k.size(0) == v.size(0):
        yield "batch sizes"
    if call.gqa and gqa:
        if (same_heads and k.size(1) != v.size(1)) or q.size(1) % k.size(1) or q.size(1) % v.size(1):
            yield "number of heads"
    elif not q.size(1) == k.size(1) == v.size(1):
        yield "number of heads"
    if 0 in (q.size(2), k.size(2)):
        yield "length of 0"  # check_nonzero_sequence_lengths_dense
    # check_last_dim_stride_equals_1_dense
    contiguous = all(t.stride(-1) == 1 for t in (q, k, v)) or (any_stride_of_one and q.size(-1) == 1)
    if not contiguous or (call.mask is not None and call.mask.stride(-1) != 1):
        yield "last stride"


def half_precision(call: Attention, target: Target) -> bool:
    """Whether q, k and v share a 16-bit dtype that the card's fused kernels take (check_dtypes_low_precision)."""
    known = (torch.float16, torch.bfloat16) if target.capability >= (8, 0) else (torch.float16,)
    return call.query.dtype in known and call.query.dtype == call.key.dtype == call.value.dtype


def mask_fits(call: Attention) -> bool:
    """sdp_utils_cpp.h check_attn_mask_shape."""
    mask, q, k = call.mask, call.query, call.key
    if mask is None or mask.requires_grad or mask.dim() not in (2, 4):
        return mask is None
    wanted = (q.size(0), q.size(1), q.size(2), k.size(2))[-mask.dim() :]
    return all(have in (want, 1) for have, want in zip(mask.shape, wanted, strict=True))


def gemm_alignment(dtype: torch.dtype, target: Target) -> int:
    """Elements that a head's size must be a multiple of (sdp_utils.cpp minimum_gemm_alignment)."""
    half = dtype in (torch.float16, torch.bfloat16)
    tensor_cores = target.capability >= (8, 0) or (target.capability >= (7, 0) and half)
    base = 4 if target.capability >= (8, 0) else 1
    return max(base, 128 // (16 if half else 32)) if tensor_cores else base


# -- cuDNN ------------------------------------------------------------------------------------------------------------


def batch_norm_is_cudnn(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    eps: float,
    cudnn_enabled: bool,
    target: Target,
) -> bool:
    """Normalization.cpp _select_batch_norm_backend."""
    if weight is None or bias is None or not cudnn_enabled or target.cudnn < 5110 or eps < 0.0:
        return False
    statistics = (running_mean is not None and running_var is not None) or (
        running_mean is None and running_var is None and training
    )
    return (
        torch.bfloat16 not in (input.dtype, weight.dtype)
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and statistics
        and input.dim() >= 3
        and input.size(0) <= (880801 if training else 65535)
        and input.numel() < 2**31 - 1
    )


def rnn_is_cudnn(input: torch.Tensor, target: Target) -> bool:
    """RNN.cpp use_cudnn; bfloat16 from cuDNN 9.13 and sm80 on (CUDAHooks.cpp supportsBFloat16RNNWithCuDNN)."""
    known = {torch.float64, torch.float32, torch.float16}
    if target.cudnn >= 91300 and target.capability >= (8, 0):
        known.add(torch.bfloat16)
    return target.cudnn > 0 and torch.backends.cudnn.enabled and input.dtype in known and input.numel() > 0


RNN_SAVED_PER_STEP = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}
"""Values per hidden unit that cuDNN's reserve is taken to hold for each time step: gates, cell state and output. cuDNN
does not publish its size; this is a guess by what backward needs, and the trace says so."""


# -- autocast (autocast_mode.h) ---------------------------------------------------------------------------------------

LOWER_PRECISION = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention", "cudnn_convolution",
    "cudnn_convolution_transpose",
)  # fmt: skip
"""AT_FORALL_LOWER_PRECISION_FP: floating arguments are cast to autocast's dtype."""

FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""AT_FORALL_FP32: floating arguments are cast to float32."""

FLOAT32_BY_DTYPE = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
"""AT_FORALL_FP32_SET_OPT_DTYPE: the op's own dtype argument is set to float32 where the caller gave none."""

FLOAT32_BY_OTHER_OVERLOAD = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
}
"""AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: the overload that takes a dtype is called, with float32."""

PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
"""AT_FORALL_PROMOTE: floating arguments are cast to the widest dtype among them."""

REFUSED = ("binary_cross_entropy",)
"""Refused under autocast (autocast_mode.cpp binary_cross_entropy_banned)."""
