"""Memory that kernels take inside themselves, and outputs whose size fake tensors get wrong.

The dispatcher never sees what a kernel allocates and frees before it returns: a convolution that reorders its
operands, a mixed-type addition that casts a copy first. Which kernels do so depends on dtypes, strides, sizes,
threads and the build, so it is measured: each distinct op is run once on arguments of the recorded geometry, and
PyTorch reports its allocations. Only kernels known to take nothing are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from holdover.measuring._torch import bare_kernels, mark, memory_log
from holdover.measuring.arguments import (
    Arena,
    UnrunnableError,
    argument_bytes,
    extent_bytes,
    is_view_or_factory,
    numel,
    on_fake_tensors,
    result_bytes,
    tensors_of,
)
from holdover.measuring.machine import free_bytes
from holdover.measuring.store import open_store
from holdover.trace.graph import Signature, TensorSpec

POINTWISE = frozenset(
    {
        "abs", "add", "add_", "addcdiv", "addcdiv_", "addcmul", "addcmul_", "bernoulli_", "bitwise_and",
        "bitwise_not", "bitwise_or", "clamp", "clamp_min", "clone", "copy_", "cos", "div", "div_", "elu",
        "elu_backward", "eq", "erf", "exp", "fill_", "ge", "gelu", "gelu_backward", "gt", "hardsigmoid",
        "hardsigmoid_backward", "hardswish", "hardswish_", "hardswish_backward", "hardtanh", "hardtanh_",
        "hardtanh_backward", "le", "leaky_relu", "leaky_relu_", "leaky_relu_backward", "lerp", "lerp_", "log",
        "log_sigmoid_backward", "log_sigmoid_forward", "logical_and", "logical_not", "logical_or", "lt",
        "masked_fill", "masked_fill_", "maximum", "minimum", "mish", "mish_backward", "mul", "mul_", "ne", "neg",
        "pow", "reciprocal", "relu", "relu_", "rsqrt", "rsub", "sigmoid", "sigmoid_backward", "silu", "silu_",
        "silu_backward", "sin", "softplus", "softplus_backward", "sqrt", "sub", "sub_", "tanh", "tanh_backward",
        "threshold_backward", "where", "zero_", "_to_copy",
    }
)  # fmt: skip
"""Kernels that take nothing when their operands agree in dtype and are contiguous (measured over PyTorch's own op
samples); with mixed dtypes some of them cast a copy, so then they are measured like all others."""

TAKES_A_MASK = frozenset(
    {"bitwise_and", "bitwise_not", "bitwise_or", "logical_and", "logical_not", "logical_or", "masked_fill",
     "masked_fill_", "where"}
)  # fmt: skip
"""Those of them that read booleans as they are; the others cast them to the dtype of the other operand first."""

CLEAN_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
"""Take nothing in float32 when each operand is contiguous or the transpose of it; in half precision oneDNN reorders."""

MISTAKEN_BY_FAKE_TENSORS = frozenset(
    {
        "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "native_batch_norm", "_native_batch_norm_legit",
        "_batch_norm_with_update", "native_layer_norm", "native_group_norm", "native_group_norm_backward",
        "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss", "_embedding_bag",
        "col2im",
    }
)  # fmt: skip
"""Ops whose fake kernels give an output of another size than the CPU's kernels do: the workspace of oneDNN's RNNs,
statistics of norms in mixed precision, scalar losses that keep the memory of their unreduced form, and images put
together from blocks, which keep the memory of the blocks."""

LAID_OUT_OTHERWISE = frozenset(
    {
        "_log_softmax_backward_data", "binary_cross_entropy_backward", "elu_backward", "hardsigmoid_backward",
        "hardswish_backward", "hardtanh_backward", "logit_backward", "native_batch_norm_backward",
        "native_layer_norm_backward", "rrelu_with_noise_backward", "softplus_backward", "xlogy",
    }
)  # fmt: skip
"""Ops whose fake kernels give an output of other strides than the CPU's kernels do, where the gradient lies otherwise
than what it is a gradient of."""

_LARGE_BYTES = 96 << 20
_LARGE_OPERATIONS = 4e10  # about a second; smaller ones take other ways, so that what they need does not scale
_FREE_SHARE = 4  # at most a quarter of the free memory is taken


def workspace_bytes(signatures: Sequence[Signature], device: str = "cpu") -> dict[int, int | None]:
    """Bytes that each op's kernel has allocated at most beyond its outputs, while it runs.

    Args:
        signatures: the distinct ops of a trace.
        device: where they run. Only "cpu" is measured: other allocators have counters of their own.

    Returns:
        By position in `signatures`; those that take nothing are left out. None where it could not be measured: the op
        does not run on made-up arguments, or is too large and does not scale.

    Very large ops are measured at smaller sizes and scaled. Results are kept on disk. Random states are left as found.
    """
    if torch.device(device).type != "cpu":
        return {}
    target = torch.device("cpu")
    store, arena = open_store(target), Arena(target)
    found: dict[int, int | None] = {}
    missing: list[int] = []
    for i, signature in enumerate(signatures):
        if takes_nothing(signature):
            continue
        known = store.get("workspace", signature)
        if known is None:
            missing.append(i)
        else:
            found[i] = known
    if missing:
        for i in missing:
            found[i] = _workspace(signatures[i], arena)
            if (measured := found[i]) is not None:
                store.put("workspace", signatures[i], measured)
        store.save()
    return {i: n for i, n in found.items() if n != 0}


def takes_nothing(signature: Signature) -> bool:
    """Whether the kernel is known by name and operands to allocate nothing but its outputs."""
    namespace, _, rest = signature.name.partition(".")
    packet = rest.split(".")[0]
    if namespace not in ("aten", "prims"):
        return namespace in ("prim", "profiler")
    if packet.startswith(("_foreach", "_fused")) or is_view_or_factory(signature.name):
        return True
    specs = list(tensors_of(signature))
    if packet in POINTWISE:
        specs = [spec for spec in specs if spec.shape]
        if packet in ("_to_copy", "clone", "copy_"):
            return not any(_is_flipped_matrix(spec) for spec in specs)
        unlike = {spec.dtype for spec in specs} - ({"bool"} if packet in TAKES_A_MASK else set())
        return len(unlike) <= 1 and all(_is_contiguous(spec) for spec in specs)
    if packet in CLEAN_MATMULS:
        return all(s.dtype == "float32" and (_is_contiguous(s) or _is_contiguous(_transposed(s))) for s in specs)
    return False


def true_outputs(signature: Signature) -> list[TensorSpec | None] | None:
    """What the CPU's kernel really returns, for an op whose fake kernel is known to be wrong; else None.

    The op is run once on made-up arguments, so that this also works while recording on fake tensors. An entry is None
    where an output is no tensor. None for an op that cannot be run, or is too large to be.
    """
    packet = signature.name.split(".")[1] if "." in signature.name else ""
    if not _may_differ(packet, signature):
        return None
    device = torch.device("cpu")
    store = open_store(device)
    known = store.get("outputs", signature)
    if known is None:
        if argument_bytes(signature) > free_bytes() // _FREE_SHARE:
            return None
        try:
            with bare_kernels():
                op, args, kwargs = Arena(device).call(signature)
                result = op(*args, **kwargs)
        except (RuntimeError, UnrunnableError, TypeError, ValueError, NotImplementedError, IndexError):
            return None
        known = [_geometry(t) for t in (result if isinstance(result, (tuple, list)) else [result])]
        store.put("outputs", signature, known)
        store.save()
    return [None if k is None else TensorSpec(tuple(k[0]), tuple(k[1]), k[2], "cpu", 0, k[3]) for k in known]


def _may_differ(packet: str, signature: Signature) -> bool:
    """Whether the fake kernel is to be doubted: of norms only where low precision meets float32."""
    specs = list(tensors_of(signature))
    if packet in LAID_OUT_OTHERWISE:
        alike = [spec for spec in specs if spec.shape == specs[0].shape and len(spec.shape) > 1]
        return len({spec.stride for spec in alike}) > 1
    if packet not in MISTAKEN_BY_FAKE_TENSORS:
        return False
    return "norm" not in packet or any(s.dtype in ("bfloat16", "float16") for s in specs)


def _geometry(value: Any) -> tuple[tuple[int, ...], tuple[int, ...], str, int] | None:
    if not isinstance(value, torch.Tensor):
        return None
    nbytes = value.untyped_storage().nbytes()
    return tuple(value.shape), value.stride(), str(value.dtype).removeprefix("torch."), nbytes


def _is_contiguous(spec: TensorSpec) -> bool:
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_flipped_matrix(spec: TensorSpec) -> bool:
    """A matrix that lies column by column is copied through a small buffer."""
    return len(spec.shape) == 2 and not _is_contiguous(spec) and _is_contiguous(_transposed(spec))


def _transposed(spec: TensorSpec) -> TensorSpec:
    if len(spec.shape) < 2:
        return spec
    shape, stride = spec.shape, spec.stride
    return replace(spec, shape=(*shape[:-2], shape[-1], shape[-2]), stride=(*stride[:-2], stride[-1], stride[-2]))


# -- measuring --------------------------------------------------------------------------------------------------------


def _workspace(signature: Signature, arena: Arena) -> int | None:
    return _scaled(signature, arena) if _is_large(signature) else _measured(signature, arena)


def _measured(signature: Signature, arena: Arena) -> int | None:
    if _bytes(signature) > free_bytes() // _FREE_SHARE:
        return None
    try:
        with bare_kernels():
            op, args, kwargs = arena.call(signature)
            with memory_log() as log, mark("holdover:op"):
                result = op(*args, **kwargs)
            kept = _new_bytes(result, args, kwargs)
            arena.restore(op, args, kwargs)
    except (RuntimeError, UnrunnableError, TypeError, ValueError, NotImplementedError, IndexError):
        return None
    now = peak = 0
    for size in log.by_mark.get("holdover:op", ()):
        now += size
        peak = max(peak, now)
    return max(0, peak - kept)


def _new_bytes(result: Any, args: Any, kwargs: Any) -> int:
    old = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    new = {}
    for t in tree_leaves(result):
        if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in old:
            new[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
    return sum(new.values())


def _operations(signature: Signature) -> float:
    """A guess, cheap to make: matrix products and convolutions grow faster than their operands."""
    packet = signature.name.split(".")[1]
    specs = [s for s in tensors_of(signature) if len(s.shape) > 1]
    if not specs:
        return 0
    if packet in ("convolution", "convolution_backward"):  # at stride 1; backward is two of them
        *gradient, image, weight = specs[:3] if packet == "convolution_backward" else specs[:2]
        return 2.0 * (1 + len(gradient)) * numel(image) / max(image.shape[1], 1) * numel(weight)
    if "mm" in packet or "convolution" in packet or "rnn" in packet or "attention" in packet:
        sizes = sorted((numel(s) for s in specs), reverse=True)[:2]
        return 2 * sizes[0] * max(specs[-1].shape[-1], math.isqrt(sizes[-1]))
    return float(sum(numel(s) for s in specs))


def _scaled(signature: Signature, arena: Arena) -> int | None:
    """Shrink one size of the largest operand, wherever it occurs, and follow the growth back up."""
    largest = max((s for s in tensors_of(signature) if s.shape), key=numel, default=None)
    if largest is None:
        return None
    first, *others = largest.shape
    for size in dict.fromkeys([first, *sorted(others, reverse=True)]):
        small = size // 4
        while small > 4 and _is_large(_with_size(signature, size, 2 * small)):
            small //= 2
        if small == 0 or _is_large(_with_size(signature, size, 2 * small)):
            continue
        low, high = (_measured(_with_size(signature, size, s), arena) for s in (small, 2 * small))
        if low is None or high is None:
            continue
        if high > 2 * low > 0:
            return int(high * (size / (2 * small)) ** math.log2(high / low))
        return int(low + (high - low) * (size - small) / small)
    return None


def _is_large(signature: Signature) -> bool:
    """Whether running the op takes long or much memory."""
    return _bytes(signature) > _LARGE_BYTES or _operations(signature) > _LARGE_OPERATIONS


def _bytes(signature: Signature) -> int:
    return argument_bytes(signature) + result_bytes(on_fake_tensors(signature)[2])


def _with_size(signature: Signature, size: int, other: int) -> Signature:
    """The signature with every size `size` replaced by `other`; strides of what lies outside shrink with it."""

    def change(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return _spec_with_size(value, size, other)
        if isinstance(value, tuple):
            return tuple(change(v) for v in value)
        return other if type(value) is int and value == size else value

    return replace(
        signature,
        args=tuple(change(value) for value in signature.args),
        kwargs=tuple((name, change(value)) for name, value in signature.kwargs),
    )


def _spec_with_size(spec: TensorSpec, size: int, other: int) -> TensorSpec:
    if size not in spec.shape:
        return spec
    order = sorted(range(len(spec.shape)), key=lambda i: (spec.stride[i], -i))
    stride, shrunk = list(spec.stride), Fraction(1)
    for i in order:
        stride[i] = max(int(spec.stride[i] * shrunk), min(1, spec.stride[i]))
        if spec.shape[i] == size and spec.stride[i]:
            shrunk *= Fraction(other, size)
    shape = tuple(other if s == size else s for s in spec.shape)
    changed = replace(spec, shape=shape, stride=tuple(stride), offset=0)
    return replace(changed, storage_bytes=extent_bytes(changed))
