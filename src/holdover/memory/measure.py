"""The memory that a piece of code really takes, as told by PyTorch and by nothing of ours.

On CPU the profiler's own allocation events are added up in order of time; on CUDA the caching allocator keeps the
count itself. Either way the peak includes what existed before, which is counted once per storage.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile

from holdover.trace.replace import replace_tensors

T = TypeVar("T")


def existing_bytes(*subjects: Any, device: torch.device | None = None) -> int:
    """Bytes of all storages that can be reached from models, arguments, optimizers, functions; each counted once.

    Args:
        subjects: any objects; their tensors are found in attributes, containers and closures, gradients included.
        device: count this device type only; None counts all.

    >>> import torch
    >>> layer = torch.nn.Linear(3, 5)
    >>> existing_bytes(layer, [layer.weight.data])
    80
    """
    sizes: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        for part in _strided_parts(tensor):
            if device is None or part.device.type == device.type:
                storage = part.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
        return tensor

    for subject in subjects:
        replace_tensors(subject, count)
    return sum(sizes.values())


def _strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if torch.nn.parameter.is_lazy(tensor):
        return
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    if tensor.is_leaf and tensor.grad is not None:
        yield from _strided_parts(tensor.grad)


def measure_peak(work: Callable[[], T], *subjects: Any, device: torch.device | None = None) -> tuple[T, int]:
    """Run `work()` once and see how much memory was alive at most meanwhile.

    Args:
        work: the code to run.
        subjects: what existed before and belongs to the count: model, arguments, optimizer.
        device: the device whose memory counts; None is the CPU.

    Returns:
        What `work` returned, and the peak in bytes, `existing_bytes(*subjects)` included.

    >>> import torch
    >>> x = torch.ones(2500)
    >>> measure_peak(lambda: (x + x).sum().item(), x)  # x, x + x and their sum: 10,000 + 10,000 + 4 bytes
    (5000.0, 20004)
    """
    device = device or torch.device("cpu")
    before = existing_bytes(*subjects, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        others = torch.cuda.memory_allocated(device) - before
        result = work()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - others
    with _quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    return result, before + peak_of_events(profiler)


def peak_of_events(profiler: profile) -> int:
    """The highest number of bytes that the profiled code had allocated and not yet freed."""
    events = []
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    nodes = list(profiler.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes.extend(node.children)
        fields = node.extra_fields
        if isinstance(fields, _ExtraFields_Allocation) and fields.device.type == "cpu":
            events.append((node.start_time_ns, fields.ptr, fields.alloc_size))
    events.sort(key=lambda event: event[0])
    now = peak = 0
    alive: dict[int, int] = {}  # older blocks are freed at times too, and were never added
    for _, address, size in events:
        if size > 0:
            alive[address] = size
            now += size
        else:
            now -= alive.pop(address, 0)
        peak = max(peak, now)
    return peak


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Set at its birth, this keeps the profiler's C++ side from writing to stderr each time it starts and stops."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
