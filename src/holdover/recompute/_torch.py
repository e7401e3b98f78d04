"""The private PyTorch names that the runtime depends on, checked by tests/recompute/test_private_names.py.

No public name gives the same: where the dispatch mode stands, which backward pass is running, and what has to be off
while recorded ops run again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _get_dispatch_stack_at as dispatch_mode_at
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _pop_torch_dispatch_stack as pop_dispatch_mode
from torch._C import _push_on_torch_dispatch_stack as push_dispatch_mode
from torch._C._autograd import _get_sequence_nr as sequence_number
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._functorch import peek_interpreter_stack as functorch_transform
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_non_overlapping_and_dense
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from holdover.trace._torch import at_end_of_pass
from holdover.trace.transforms import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
    yielding_to_transforms,
)

__all__ = [
    "FakeTensor",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "alias",
    "at_end_of_pass",
    "breaks_graphs",
    "current_graph_task_id",
    "dispatch_mode_at",
    "dispatch_modes",
    "foreign_modes",
    "freed_between",
    "functorch_transform",
    "in_modes",
    "is_non_overlapping_and_dense",
    "others_hooks",
    "plain_kernels",
    "pop_dispatch_mode",
    "pop_saved_tensors_hooks",
    "precision_settings",
    "push_dispatch_mode",
    "push_saved_tensors_hooks",
    "saves_own_output",
    "skip_in_dynamo",
    "switches",
    "top_saved_tensors_hooks",
    "view_of",
    "watching_module_calls",
    "yielding_to_transforms",
]


F = TypeVar("F", bound=Callable[..., Any])

_VERSIONS = torch._C.DispatchKey.ADInplaceOrView


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, counting in-place writes together with it.

    Inside a dispatch mode, `detach` alone would give it a count of its own.
    """
    with torch._C._SetExcludeDispatchKeyGuard(_VERSIONS, False):
        return tensor.detach()


def view_of(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    """Another look at the tensor's storage, counting in-place writes together with it, as `alias` does."""
    with torch._C._SetExcludeDispatchKeyGuard(_VERSIONS, False):
        return torch.as_strided(tensor, size, stride, offset)


def saves_own_output(tensor: torch.Tensor) -> bool:
    """Whether the node that is saving `tensor` now is the one that made it.

    Held as it is, the tensor would hold the node that holds it, for ever if no backward comes. The node is then the
    newest of all; of nodes written in Python that cannot be said, since their forward may have made nodes.
    """
    node = tensor.grad_fn
    return node is not None and (
        node._sequence_nr() + 1 == sequence_number() or isinstance(node, torch.autograd.function.BackwardCFunction)
    )


class plain_kernels:  # noqa: N801 - a context manager, entered for every replay
    """Below autograd, without autocast and inference mode: kernels run in it as a dispatch mode saw them in forward."""

    __slots__ = ("autocast", "autograd", "grad", "inference")

    def __enter__(self) -> None:
        self.inference = torch._C._InferenceMode(False) if torch.is_inference_mode_enabled() else None
        if self.inference is not None:  # a custom backward may unpack in it; others get what it made, and count writes
            self.inference.__enter__()
        self.grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)  # kernels may ask (oneDNN's recurrent layers do); recipes made without say so
        self.autograd = torch._C._AutoDispatchBelowADInplaceOrView()
        self.autocast = torch._C._DisableAutocast()
        self.autograd.__enter__()
        self.autocast.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.autocast.__exit__(*exc)
        self.autograd.__exit__(*exc)
        torch._C._set_grad_enabled(self.grad)
        if self.inference is not None:
            self.inference.__exit__(*exc)


def foreign_modes() -> list[TorchDispatchMode]:
    """The user's own dispatch modes that are on, outermost first: what ops give may depend on them."""
    modes = [dispatch_mode_at(i) for i in range(dispatch_modes())]
    return [m for m in modes if not type(m).__module__.startswith(("torch.", "holdover."))]


@contextmanager
def in_modes(modes: list[TorchDispatchMode]) -> Iterator[None]:
    """Run below these modes. They are not entered: that may mean something to them."""
    there = [dispatch_mode_at(i) for i in range(dispatch_modes())]
    missing = [m for m in modes if not any(m is t for t in there)]
    for mode in missing:
        push_dispatch_mode(mode)
    try:
        yield
    finally:
        for _ in missing:
            pop_dispatch_mode(None)


def freed_between(module: torch.nn.Module) -> list[torch.Tensor]:
    """What this module, which torch.distributed shards, frees after forward and gathers again in backward."""
    state: Any = module
    if hasattr(module, "_get_fsdp_state"):
        groups = [g for g in state._get_fsdp_state()._fsdp_param_groups if g._reshard_after_forward]
        gathered = [getattr(p, "_unsharded_param", None) for g in groups for p in g.fsdp_params]
        return [t for t in gathered if type(t) is torch.nn.Parameter]
    flat = state._handle.flat_param if state._handle is not None else None
    names = ("_full_param_padded", "_full_prec_full_param_padded")
    return [t for n in names if isinstance(t := getattr(flat, n, None), torch.Tensor)]


Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How a setting is read, and how it is written."""


def switches() -> list[Setting]:
    """The switches that kernels look at."""
    c: Any = torch._C
    found: list[Setting] = [
        (c._get_mkldnn_enabled, c._set_mkldnn_enabled),
        (c._get_mkldnn_deterministic, c._set_mkldnn_deterministic),
        (c._get_cpu_allow_fp16_reduced_precision_reduction, c._set_cpu_allow_fp16_reduced_precision_reduction),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),  # off, warnings, errors
    ]
    if torch.backends.cuda.is_built():
        found += [
            (c._get_cudnn_enabled, c._set_cudnn_enabled),
            (c._get_cudnn_benchmark, c._set_cudnn_benchmark),
            (c._get_cudnn_deterministic, c._set_cudnn_deterministic),
        ]
    return found


def precision_settings() -> list[Setting]:
    """In what precision products of 32-bit numbers are made, by backend and kind of op."""
    backends = ["mkldnn", "cuda"] if torch.backends.cuda.is_built() else ["mkldnn"]
    return [_precision(backend, kind) for backend in backends for kind in ("matmul", "conv", "rnn")]


def _precision(backend: str, kind: str) -> Setting:
    def write(wanted: str) -> None:
        torch._C._set_fp32_precision_setter(backend, kind, "none")  # as the backend has it, and PyTorch as a whole
        if read() != wanted:
            torch._C._set_fp32_precision_setter(backend, kind, wanted)

    read = partial(torch._C._get_fp32_precision_getter, backend, kind)
    return read, write


def others_hooks() -> bool:
    """Whether saved-tensor hooks are on that are not ours, nor such as only move what is saved to the CPU and back."""
    hooks = top_saved_tensors_hooks(False)
    if hooks is None or getattr(getattr(hooks[0], "__self__", None), "yields_to_transforms", False):
        return False
    return not getattr(hooks[0], "__qualname__", "").startswith("save_on_cpu.")


def skip_in_dynamo(*functions: Callable[..., Any]) -> None:
    """Keep torch.compile from tracing these functions where its frame callback is active around them."""
    for function in functions:
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def breaks_graphs(reason: str) -> Callable[[F], F]:
    """As `torch.compiler.disable(reason=...)`, without loading the compiler: compiled code calls it in Python."""

    def mark(function: F) -> F:
        function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
        skip_in_dynamo(function)
        return function

    return mark


_patching = threading.Lock()


_watchers: list[Callable[[torch.nn.Module], None]] = []
_module_call = torch.nn.Module.__call__


@contextmanager
def watching_module_calls(watcher: Callable[[torch.nn.Module], None]) -> Iterator[None]:
    """Tell `watcher` of each module that is called, on any thread, before anything of the call has happened.

    A global forward pre-hook comes too late: the module's `forward` has been looked up by then.
    """
    with _patching:
        _watchers.append(watcher)
        torch.nn.Module.__call__ = _watched_call  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _patching:
            _watchers.remove(watcher)
            if not _watchers:
                torch.nn.Module.__call__ = _module_call  # type: ignore[method-assign]


def _watched_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    for watcher in list(_watchers):
        watcher(self)
    return _module_call(self, *args, **kwargs)
