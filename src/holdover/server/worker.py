"""The process that works on one job: the form on standard input, progress on standard output, data in a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdover.errors import HoldoverError
from holdover.server.form import LIBRARIES


def work(wanted: dict[str, Any], say: Callable[[dict[str, str]], None], time_limit: float) -> dict[str, Any]:
    """Build the model, record and plan; return the page's data.

    Args:
        wanted: `form.Wanted` as plain data.
        say: told of each stage as it begins.
        time_limit: seconds for the frontier, about.
    """
    say({"stage": "starting"})
    from holdover.cli.model_spec import load
    from holdover.report.html.work import Request, page_for

    @contextmanager
    def stage(what: str) -> Iterator[None]:
        say({"stage": what})
        yield

    model = wanted["model"]
    say({"stage": f"building {model}"})
    of_library = model.startswith(LIBRARIES)  # a file's factory decides for itself
    step = load(model, batch=wanted["batch"] if of_library else None, seq=wanted["seq"], meta=of_library)
    optimizer = wanted["optimizer"].lower()
    budget = wanted["budget"]
    request = Request(
        budget=budget or None,
        optimizer=None if optimizer == "none" else optimizer, precision=wanted["precision"] or None,
        device=wanted["device"] or None, time_limit=time_limit,
    )  # fmt: skip
    return page_for(step.model, step.args, step.kwargs, step.loss, request, stage)


def main() -> int:
    """Run as `python -m holdover.server.worker SECONDS FILE`."""
    progress = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the model's own code prints is no progress

    def say(message: dict[str, str]) -> None:
        progress.write(json.dumps(message) + "\n")

    try:
        data = work(json.load(sys.stdin), say, float(sys.argv[1]))
    except HoldoverError as error:
        say({"error": str(error)})
        return 1
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return 1
    Path(sys.argv[2]).write_text(json.dumps(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
