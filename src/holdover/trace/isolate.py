"""Run something without leaving a mark: in a forked child where that is safe, else on deep copies.

A training step may change anything: buffers, counters, caches, module globals, the state of hooks, three random
generators. Copying all of it is guesswork; a child process is not. The child sees the very objects of the caller,
changes them as it likes, sends back plain data and disappears.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from holdover.duplicate import duplicate
from holdover.errors import TraceError
from holdover.trace._torch import cuda_is_initialised

T = TypeVar("T")


def can_fork() -> bool:
    """A forked child is usable on Linux as long as no CUDA context exists (a child cannot use its parent's)."""
    return sys.platform == "linux" and not cuda_is_initialised()


def isolated(work: Callable[[Any], T], subject: Any) -> T:
    """Return `work(subject)` while leaving `subject`, and all else the caller can see, as it was.

    Args:
        work: gets `subject` or a deep copy of it; its result must be picklable plain data.
        subject: any object, typically (model, args, kwargs, loss, optimizer).

    Raises:
        TraceError: the child died (for example killed for memory).
        Exception: whatever `work` raised, as a `ForeignError` that carries the original's text and traceback.
    """
    if can_fork():
        return _in_child(work, subject)
    with random_state_restored():
        return work(duplicate(subject))


class ForeignError(Exception):
    """An exception raised by the user's code in isolation: its type's name, text and traceback."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(kind, text, trace)
        self.kind, self.text, self.trace = kind, text, trace

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def _in_child(work: Callable[[Any], T], subject: Any) -> T:
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # The child runs one thread of ours and never waits for a lock of another; Python 3.12 warns all the same.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _child_main(work, subject, read_end, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        payload = pipe.read()
    _, status = os.waitpid(child, 0)
    if not payload:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        raise TraceError(
            f"The process that recorded the training step ended with {how} and no result. "
            "If that is signal 9, the machine ran out of memory: record a smaller batch, or build the model on meta."
        )
    outcome, result = pickle.loads(payload)
    if outcome == "error":
        raise result
    return result  # type: ignore[no-any-return]


def _child_main(work: Callable[[Any], Any], subject: Any, read_end: int, write_end: int) -> None:
    """Never returns: a child that fell back into the caller's code would run it twice."""
    try:
        os.close(read_end)
        gc.freeze()  # keeps the collector off the parent's pages, which are shared until written
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.stdout = sys.stderr = os.fdopen(quiet, "w")  # notebooks and test runners put their own there
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)  # the parent's thread pool does not exist here, and waiting for it would hang
        try:
            payload = pickle.dumps(("ok", work(subject)), protocol=pickle.HIGHEST_PROTOCOL)
        except BaseException as error:
            failure = ForeignError(type(error).__name__, str(error), traceback.format_exc())
            payload = pickle.dumps(("error", failure))
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(payload)
    finally:
        os._exit(0)


@contextmanager
def random_state_restored() -> Iterator[None]:
    """Leave the random generators of torch (every device), numpy and python as they were found."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    cuda_states = torch.cuda.get_rng_state_all() if cuda_is_initialised() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)
