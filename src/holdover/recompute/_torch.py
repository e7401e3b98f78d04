"""The private PyTorch names that the runtime depends on, checked by tests/recompute/test_private_names.py.

No public name gives the same: where the dispatch mode stands, which backward pass is running, and what has to be off
while recorded ops run again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    "functorch_transform",
    "is_non_overlapping_and_dense",
    "plain_kernels",
    "pop_dispatch_mode",
    "pop_saved_tensors_hooks",
    "push_dispatch_mode",
    "push_saved_tensors_hooks",
    "saves_own_output",
    "skip_in_dynamo",
    "top_saved_tensors_hooks",
    "watching_module_calls",
    "yielding_to_transforms",
]


F = TypeVar("F", bound=Callable[..., Any])


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is running on this thread has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_VERSIONS = torch._C.DispatchKey.ADInplaceOrView


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, counting in-place writes together with it.

    Inside a dispatch mode, `detach` alone would give it a count of its own.
    """
    with torch._C._SetExcludeDispatchKeyGuard(_VERSIONS, False):
        return tensor.detach()


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
    """Below autograd and without autocast: what runs inside are the kernels that a dispatch mode saw in forward."""

    __slots__ = ("autocast", "autograd", "grad")

    def __enter__(self) -> None:
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
