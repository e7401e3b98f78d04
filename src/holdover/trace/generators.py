"""Generator states that the step itself takes, as activation checkpointing does for each of its regions.

They are tensors (5,056 bytes on the CPU) that C++ fills past the dispatcher, and that live as long as their holder:
from forward to backward, or inside `torch.random.fork_rng`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from holdover.trace.graph import Category
from holdover.trace.recorder import Recorder


@contextmanager
def seeing_states(recorder: Recorder) -> Iterator[None]:
    """Record each state that the code within takes of the CPU's default generator by `torch.get_rng_state`."""
    take = torch.get_rng_state

    def taken() -> torch.Tensor:
        state = take()
        if not recorder.paused:
            recorder.live.know(state, Category.TEMPORARY, "generator state")
        return state

    torch.get_rng_state = torch.random.get_rng_state = taken
    try:
        yield
    finally:
        torch.get_rng_state = torch.random.get_rng_state = take
