"""The private PyTorch names that recording depends on, checked by tests/trace/test_private_names.py.

Each is here because no public name gives the same: where in the autograd graph a backward op belongs, when a
backward pass ends, and which tensors are wrapped by a function transform.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._C import _current_autograd_node as current_autograd_node
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch._C import _ExcludeDispatchKeyGuard as ExcludeDispatchKeyGuard
from torch._C import _storage_Use_Count as storage_use_count
from torch._C._autograd import _get_sequence_nr as sequence_number
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

disable_current_modes = _disable_current_modes
ASKS_FOR_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
AUTOCAST_CUDA = DispatchKey.AutocastCUDA
ENGINE = torch.autograd.graph._engine_run_backward.__code__
COMPOSITE = DispatchKey.CompositeImplicitAutograd

__all__ = [
    "ASKS_FOR_VALUES",
    "AUTOCAST_CUDA",
    "COMPOSITE",
    "ENGINE",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "at_end_of_pass",
    "cuda_is_initialised",
    "current_autograd_node",
    "current_graph_task_id",
    "disable_current_modes",
    "engines_running",
    "excluding",
    "foreach_types",
    "has_kernel",
    "held_once",
    "is_functorch_wrapped_tensor",
    "is_traceable_wrapper_subclass",
    "sequence_number",
    "suggest_memory_format",
]


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is running on this thread has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def engines_running() -> int:
    """How many runs of autograd's engine this thread is in, one within another."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        count += frame.f_code is ENGINE
        frame = frame.f_back  # type: ignore[assignment]
    return count


def cuda_is_initialised() -> bool:
    """Whether this process holds a CUDA context, which a forked child could not use."""
    return bool(torch.cuda.is_initialized())


def excluding(key: DispatchKey) -> ExcludeDispatchKeyGuard:
    """Ops within pass over the kernels of this key."""
    return ExcludeDispatchKeyGuard(DispatchKeySet(key))


def foreach_types() -> tuple[list[Any], list[Any]]:
    """The tensor types that optimizers and gradient clipping put through foreach ops: PyTorch's own lists."""
    return _optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types


def held_once(tensor: torch.Tensor, modes: int) -> bool:
    """Whether the caller of an op that has come through so many dispatch modes alone holds this argument.

    Then the tensor is held by the caller, the dispatcher's stack, the one on which each mode is run, and its Python
    object; its storage by the tensor and the storage's Python object.
    """
    holders: int = tensor._use_count()  # type: ignore[attr-defined]
    return holders <= 3 + modes and bool(storage_use_count(tensor.untyped_storage()._cdata) <= 2)
