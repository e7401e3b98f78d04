"""Where a step failed that was being recorded: in which phase, in which module, at which line of whose code."""

from __future__ import annotations

import linecache
import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

import holdover
from holdover.errors import HoldoverError
from holdover.trace import frames
from holdover.trace.graph import Phase
from holdover.trace.isolate import ForeignError, isolated

T = TypeVar("T")

MOST_BYTES = 1 << 20
"""Larger exceptions are not sent from one process to another."""

OURS = tuple(path + os.sep for package in (holdover, torch) for path in package.__path__)
"""Where lines of code lie that are not the user's; those of other packages are, if none of the user's own led there."""

STANDARD = os.path.dirname(os.__file__) + os.sep
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


RECORDING = "_one_step"  # of record.py
PHASES = {Phase.LOSS: "the loss", Phase.OPTIMIZER: "the optimizer's step"}


@dataclass(frozen=True)
class _Failed:
    """An error of a step as plain data; `error` is itself, where it can go from one process to another."""

    kind: str
    text: str
    trace: str
    where: str
    error: Exception | None


class StepFailedError(ForeignError):
    """The step failed while it was recorded. `where` is a sentence, `original` the error as it was raised."""

    def __init__(self, kind: str, text: str, trace: str, where: str = "", original: Exception | None = None) -> None:
        super().__init__(kind, text, trace)
        self.where, self.original = where, original

    @property
    def cause(self) -> Exception:
        """What the user's code raised; where that cannot be had, this error with its text."""
        return self if self.original is None else self.original


def isolated_step(work: Callable[[Any], T], step: Any) -> T:
    """`isolate.isolated` for the recording of a step.

    Raises:
        HoldoverError: what the recording itself refuses.
        StepFailedError: whatever the user's code raised.
    """
    try:
        outcome = isolated(lambda subject: _caught(work, subject), step)
    except HoldoverError:
        raise
    except ForeignError as error:  # as SystemExit
        raise StepFailedError(error.kind, error.text, error.trace) from None
    except Exception as error:  # the step cannot be copied
        raise StepFailedError(type(error).__name__, str(error), "", original=error) from error
    if not isinstance(outcome, _Failed):
        return outcome
    if isinstance(outcome.error, HoldoverError):
        raise outcome.error
    if outcome.error is not None and outcome.error.__traceback__ is None:  # it comes from another process
        outcome.error.add_note(f"In the process that recorded the step:\n{outcome.trace}")
    raise StepFailedError(outcome.kind, outcome.text, outcome.trace, outcome.where, outcome.error)


def _caught(work: Callable[[Any], T], subject: Any) -> T | _Failed:
    try:
        return work(subject)
    except Exception as error:
        whole = "".join(traceback.format_exception(error))
        return _Failed(type(error).__name__, str(error), whole, where_of(error), _portable(error))


def _portable(error: Exception) -> Exception | None:
    """The error, if a copy of it can be made in another process."""
    try:
        text = pickle.dumps(error)
        return error if len(text) <= MOST_BYTES and type(pickle.loads(text)) is type(error) else None
    except Exception:
        return None


def where_of(error: BaseException) -> str:
    """A sentence that says where in a step an error was raised: "" if it was not raised in one.

    The module is the innermost one that was running.
    """
    module, phase = "", None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frames.is_frame(frame):
            path, kind = frame.f_locals["path"], frame.f_locals["kind"]
            module = f"{path} ({kind})" if path else f"the model itself ({kind})"
        elif frame.f_code.co_name == RECORDING and "recorder" in frame.f_locals:
            phase = frame.f_locals["recorder"].phase
    if phase is None:
        return ""
    line = users_line(error)
    told = f"It fails in {PHASES.get(phase, phase)}"
    told += f", in {module}" if module else ""
    return told + (f", at {line}." if line else ".")


def users_line(error: BaseException) -> str:
    """The innermost line that led to an error of the user's own code, else of a package's; "" if there is none."""
    passed = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__) if _is_users(f)]
    own = [each for each in passed if not any(part in each[0] for part in INSTALLED)]
    return _line(*(own or passed)[-1]) if passed else ""


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    standard = file.startswith(("<frozen", STANDARD)) and not any(part in file for part in INSTALLED)
    return not standard and not file.startswith(OURS)


def _line(file: str, number: int) -> str:
    """A line of code with its text."""
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    text = linecache.getline(file, number).strip()
    return f"line {number} of {shown}" + (f": {text}" if text else "")
