"""Making an op's arguments again from its Signature.

Values only have to be valid and typical of speed: indices are 0, masks True, everything else random between 0.25 and
0.75 (neither zero, nor denormal, nor growing fast under repeated in-place ops; where all are equal, kernels that branch
on values, such as max pooling, run three times as fast as in a step); groups of a grouped product are of one size.
Arguments of one call never share memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from holdover.measuring._torch import FakeTensorMode, bare_kernels
from holdover.trace.graph import Signature, TensorSpec

_ALIGNMENT_BYTES = 64
_PATTERN = 1 << 20  # random values before they repeat: more than a branch predictor remembers
_REPLACES_MEMORY = frozenset({"resize_", "resize_as_", "set_", "_resize_output_"})


class UnrunnableError(Exception):
    """The op of a signature cannot be called here, or its arguments cannot be made."""


def resolve(name: str) -> torch._ops.OpOverload:
    """The op of that name, e.g. "aten.addmm.default"; `UnrunnableError` when this build of PyTorch has none.

    >>> resolve("aten.relu.default")
    <OpOverload(op='aten.relu', overload='default')>
    """
    try:
        namespace, packet, overload = name.split(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (ValueError, AttributeError) as error:
        raise UnrunnableError(f"there is no op named {name!r}") from error
    if not isinstance(op, torch._ops.OpOverload):
        raise UnrunnableError(f"{name!r} is not an ATen overload")
    return op


def tensors_of(signature: Signature) -> Iterator[TensorSpec]:
    """Every tensor argument, in call order, those inside lists included."""
    yield from _walk(signature.args)
    for _name, value in signature.kwargs:
        yield from _walk(value)


def _walk(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _walk(item)


def numel(spec: TensorSpec) -> int:
    """Elements the tensor shows (an expanded tensor has more of them than its memory holds)."""
    return math.prod(spec.shape)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnrunnableError(f"unknown dtype {spec.dtype!r}")
    return dtype


def extent_bytes(spec: TensorSpec) -> int:
    """Bytes from the tensor's first to its last element: what must exist for it to be read."""
    if not all(spec.shape):
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    return span * dtype_of(spec).itemsize


def argument_bytes(signature: Signature) -> int:
    """Memory that the arguments take when they are made again."""
    return sum(extent_bytes(spec) + 2 * _ALIGNMENT_BYTES for spec in tensors_of(signature))


class Arena:
    """One buffer per dtype from which the arguments of one call after the other are cut.

    Filling memory anew for each call would cost more than the kernels that are to be measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._used: dict[torch.dtype, int] = {}

    def call(self, signature: Signature) -> tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]:
        """The op with arguments like the recorded ones; they are valid until the next call of this method."""
        if not signature.runnable:
            raise UnrunnableError(f"{signature.name} has an argument that cannot be made again")
        op = resolve(signature.name)
        if op._schema.name.split("::")[1] in _REPLACES_MEMORY:
            raise UnrunnableError(f"{signature.name} would replace the memory it is given")
        if "rnn" in signature.name and not all(all(spec.shape) for spec in tensors_of(signature)):
            raise UnrunnableError(f"{signature.name} would read an empty argument beyond its end")  # and crash
        self._reserve(signature)
        names = [argument.name for argument in op._schema.arguments]
        kinds = {argument.name: str(argument.real_type) for argument in op._schema.arguments}
        args = tuple(
            self._make(value, kinds[names[i]]) if i < len(names) else value for i, value in enumerate(signature.args)
        )
        kwargs = {name: self._make(value, kinds.get(name, "")) for name, value in signature.kwargs}
        if "grouped_mm" in signature.name:
            args, kwargs = _with_groups(names, args, kwargs)
        return op, args, kwargs

    def _reserve(self, signature: Signature) -> None:
        needed: dict[torch.dtype, int] = {}
        for spec in tensors_of(signature):
            dtype = dtype_of(spec)
            needed[dtype] = needed.get(dtype, 0) + (extent_bytes(spec) + 2 * _ALIGNMENT_BYTES) // dtype.itemsize
        for dtype, count in needed.items():
            buffer = self._buffers.get(dtype)
            if buffer is None or buffer.numel() < count:
                self._buffers.pop(dtype, None)
                buffer = None
                self._buffers[dtype] = _filled(count, dtype, self.device)
        self._used = dict.fromkeys(needed, 0)

    def _make(self, value: Any, kind: str) -> Any:
        if isinstance(value, TensorSpec):
            return self._cut(value)
        if isinstance(value, (tuple, list)):
            return [self._make(item, kind) for item in value]
        if isinstance(value, str) and ("ScalarType" in kind or "Layout" in kind or "MemoryFormat" in kind):
            return getattr(torch, value.removeprefix("torch."))
        if value is not None and "Device" in kind:
            return self.device
        return value

    def _cut(self, spec: TensorSpec) -> torch.Tensor:
        dtype = dtype_of(spec)
        if torch.device(spec.device).type not in (self.device.type, "meta"):
            raise UnrunnableError(f"an argument lies on {spec.device}, not on {self.device}")
        unit = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
        start = self._used[dtype] + spec.offset % unit  # alignment is all that an offset means to a kernel
        length = extent_bytes(spec) // dtype.itemsize
        self._used[dtype] += -(-(spec.offset % unit + length) // unit) * unit
        return self._buffers[dtype].as_strided(spec.shape, spec.stride, start)

    def restore(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put back the values of the arguments that the op has written to."""
        for i, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, list) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        _fill(tensor)


def _with_groups(
    names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments of a grouped product with groups of one size: where all end at 0 there is nothing to do."""
    given = dict(zip(names, args, strict=False)) | kwargs
    a, b, ends = given[names[0]], given[names[1]], given.get("offs")
    if not isinstance(ends, torch.Tensor):
        return args, kwargs
    grouped = b.shape[-1] if a.dim() == 3 else a.shape[0] if b.dim() == 3 else a.shape[1]
    groups = ends.numel()
    even = torch.tensor([grouped * (i + 1) // groups for i in range(groups)], dtype=ends.dtype, device=ends.device)
    return tuple(even if x is ends else x for x in args), {k: even if x is ends else x for k, x in kwargs.items()}


def _filled(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    try:
        made = torch.empty(count, dtype=dtype, device=device)
        _fill(made)
    except (RuntimeError, NotImplementedError) as error:
        raise UnrunnableError(f"no tensor of {dtype} can be filled here") from error
    return made


def _fill(tensor: torch.Tensor) -> None:
    """Write valid values from the first to the last element, whatever lies between the tensor's own."""
    if not tensor.numel():
        return
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat, dtype = tensor.as_strided((span,), (1,)), tensor.dtype
    if not dtype.is_floating_point:
        flat.fill_(True if dtype is torch.bool else 0.5 if dtype.is_complex else 0)
        return
    pattern = _pattern(dtype, tensor.device)
    for start in range(0, span, _PATTERN):
        part = flat[start : start + _PATTERN]
        part.copy_(pattern[: len(part)])


@functools.cache
def _pattern(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(_PATTERN, generator=generator) / 2 + 0.25).to(dtype=dtype, device=device)


_FACTORIES = frozenset(
    {
        "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "zeros",
        "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full",
        "scalar_tensor", "arange", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like",
        "lift_fresh", "_unsafe_view",
    }
)  # fmt: skip


@functools.cache
def is_view_or_factory(name: str) -> bool:
    """Whether the op makes a view of its argument or a tensor out of nothing: no operand is read.

    >>> is_view_or_factory("aten.transpose.int"), is_view_or_factory("aten.add_.Tensor")
    (True, False)
    """
    if name.split(".")[1] in _FACTORIES:
        return True
    try:
        returns = resolve(name)._schema.returns
    except UnrunnableError:
        return False
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def on_fake_tensors(signature: Signature) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Arguments and result without memory; the result is None when the op does not run on fake tensors."""
    with bare_kernels(), FakeTensorMode():
        args = tuple(_fake(value) for value in signature.args)
        kwargs = {name: _fake(value) for name, value in signature.kwargs}
        try:
            return args, kwargs, resolve(signature.name)(*args, **kwargs)
        except Exception:  # fake kernels raise whatever they like; the answer is the same: unknown
            return args, kwargs, None


def result_bytes(result: Any) -> int:
    """Bytes that the tensors of a result show, whether they are new or written in place."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(result) if isinstance(t, torch.Tensor))


def _fake(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return torch.empty_strided(value.shape, value.stride, dtype=dtype_of(value), device="cpu")
    if isinstance(value, tuple):
        return [_fake(item) for item in value]
    return value
