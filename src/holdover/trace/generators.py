"""Generator states that the step itself takes, as activation checkpointing does for each of its regions.

They are tensors (5,056 bytes on the CPU) that C++ fills past the dispatcher, and that live as long as their holder:
from forward to backward, or inside `torch.random.fork_rng`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from holdover.trace.graph import Category
from holdover.trace.recorder import Recorder

_exchanging = threading.Lock()
_recorders: dict[int, Recorder] = {}  # by thread
_take: Callable[[], torch.Tensor] = torch.get_rng_state


@contextmanager
def seeing_states(recorder: Recorder) -> Iterator[None]:
    """Record each state that this thread takes within of the CPU's default generator, by `torch.get_rng_state`.

    The function is exchanged for all threads; to those that record nothing, such as one that loads data, it is what it
    always was.
    """
    global _take
    thread = threading.get_ident()
    with _exchanging:
        if not _recorders:
            _take = torch.get_rng_state
            torch.get_rng_state = torch.random.get_rng_state = _taken
        _recorders[thread] = recorder
    try:
        yield
    finally:
        with _exchanging:
            del _recorders[thread]
            if not _recorders:
                torch.get_rng_state = torch.random.get_rng_state = _take


def _taken() -> torch.Tensor:
    state = _take()
    recorder = _recorders.get(threading.get_ident())
    if recorder is not None and not recorder.paused:
        recorder.live.know(state, Category.TEMPORARY, "generator state")
    return state
