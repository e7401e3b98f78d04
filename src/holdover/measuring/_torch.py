"""The private PyTorch names that measuring needs, in one place: check this file against each torch release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._C import _AutoDispatchBelowAutograd, _DisableAutocast
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig, _RecordFunctionFast
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["FakeTensorMode", "TorchDispatchMode", "bare_kernels", "mark", "memory_log"]

mark = _RecordFunctionFast


@contextmanager
def bare_kernels() -> Iterator[None]:
    """Call kernels as autograd calls them: autocast and Python modes out of the way; random states put back.

    Gradients are enabled, though nothing below autograd records them: oneDNN's RNNs ask for the mode, and keep no
    workspace for backward without it.
    """
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_DisableAutocast())
        stack.enter_context(_AutoDispatchBelowAutograd())
        yield


class memory_log:  # noqa: N801 - used as a context manager, like torch.no_grad
    """Collects the sizes of this thread's allocations (+) and frees (-) by the innermost open mark.

    The older of PyTorch's two profilers: it starts in microseconds, prints nothing, and keeps events in the order
    in which they happened. Frees of memory that was allocated before it started are not seen.
    """

    def __enter__(self) -> memory_log:
        config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        _enable_profiler_legacy(config)
        self.by_mark: dict[str, list[int]] = {}
        return self

    def __exit__(self, *exc: object) -> None:
        stack: list[str] = []
        for thread in _disable_profiler_legacy():
            for event in thread:
                kind = str(event.kind())
                if kind == "push":
                    stack.append(event.name())
                elif kind == "pop":
                    stack.pop()
                elif kind == "memory_alloc" and stack:
                    for name in stack:
                        if name.startswith("holdover:"):
                            self.by_mark.setdefault(name, []).append(event.cpu_memory_usage())
                            break
