"""What the commands share: their options, how they fail, what they print where."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, get_type_hints

import typer
from rich.console import Console, RenderableType

from holdover.errors import HoldoverError
from holdover.report.text import render
from holdover.trace.step import OPTIMIZERS, PRECISIONS

if TYPE_CHECKING:
    from holdover.cli.model_spec import ModelStep
    from holdover.memory.on_card import Place

P = ParamSpec("P")

BROKEN_PROMISE = 1
BAD_INPUT = 2

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="path/to/file.py:factory (a function that returns (model, args, kwargs, loss)), transformers:CONFIG.json, "
        "transformers:CLASS, timm:NAME or torchvision:NAME.",
        show_default=False,
    ),
]
OPTIMIZER_HELP = f"{', '.join(sorted(OPTIMIZERS))}; none for forward and backward alone."
PRECISION_HELP = f"{', '.join(PRECISIONS)}."
OptimizerOption = Annotated[str, typer.Option("--optimizer", help=OPTIMIZER_HELP)]
PrecisionOption = Annotated[
    str | None, typer.Option("--precision", help=PRECISION_HELP, show_default="as the model is")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="The device to estimate for: cpu, or a card that need not be here, such as h100-80gb (`holdover devices` "
        "lists them).",
        show_default="where the tensors are",
    ),
]
DevicesOption = Annotated[
    Path | None,
    typer.Option(
        "--devices", help="A JSON file with cards of your own. HOLDOVER_DEVICES names one too.", show_default=False
    ),
]
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch",
        min=1,
        help="Batch size, for the models of a library, and for a factory with a parameter of this name.",
        show_default="8, or the factory's own",
    ),
]
SeqOption = Annotated[
    int | None,
    typer.Option(
        "--seq",
        min=1,
        help="Tokens per sample, for text, and for a factory with a parameter of this name.",
        show_default="512, or the model's most",
    ),
]


def _finite(seconds: float | None) -> float | None:
    if seconds is not None and not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is no number of seconds.")
    return seconds


def time_limit_option(what: str) -> Any:
    """`--time-limit`, for `what` the seconds are."""
    return typer.Option("--time-limit", min=1.0, callback=_finite, help=what)


PlanTimeOption = Annotated[
    float,
    time_limit_option(
        "Seconds that the solver may take for the plan, about: what it has found by then is the plan, told with its "
        "gap to the best that any plan could be."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead.")]

_stderr = Console(stderr=True, highlight=False)


def named_optimizer(name: str) -> str | None:
    """`--optimizer none` is no optimizer.

    Raises:
        TraceError: there is none of this name.
    """
    from holdover.trace.step import check_optimizer

    if name.lower() == "none":
        return None
    check_optimizer(name)
    return name


def add_devices(path: Path | None) -> None:
    """The cards of a user's file can be named from here on.

    Raises:
        DeviceError: the file cannot be read.
    """
    if path is not None:
        from holdover.cost.devices import add_cards

        add_cards(path)


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Which training step a command is about, beside its MODEL; the fields are its options, in the order of --help."""

    optimizer: OptimizerOption = "adamw"
    precision: PrecisionOption = None
    device: DeviceOption = None
    devices: DevicesOption = None
    batch: BatchOption = None
    seq: SeqOption = None

    def checked(self) -> Place:
        """Where the step is to run. What is wrong is told before the work.

        Raises:
            HoldoverError: there is no such device, optimizer or precision, or the file of cards cannot be read.
        """
        from holdover.memory.on_card import place_of
        from holdover.trace.step import check_precision

        add_devices(self.devices)
        named_optimizer(self.optimizer)
        check_precision(self.precision)
        return place_of(self.device)

    def build(self, model: str) -> ModelStep:
        """The model that MODEL stands for, with its inputs, where possible without their memory."""
        from holdover.cli.model_spec import load

        with stage(f"building {model}"):
            return load(model, batch=self.batch, seq=self.seq, meta=True)

    @property
    def keywords(self) -> dict[str, Any]:
        """As `holdover.estimate` and `holdover.plan` take them."""
        return {
            "optimizer": named_optimizer(self.optimizer), "precision": self.precision, "device": self.device,
        }  # fmt: skip


def with_step_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gather the options of a training step in the command's argument `options`; typer sees one parameter for each."""
    hints = get_type_hints(StepOptions, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    step = [
        inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name]) for f in fields(StepOptions)
    ]
    seen: list[inspect.Parameter] = []
    for own in inspect.signature(command, eval_str=True).parameters.values():
        seen += step if own.name == "options" else [own.replace(kind=keyword)]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(options=StepOptions(**{each.name: given.pop(each.name) for each in step}), **given)

    run.__dict__["__signature__"] = inspect.Signature(seen)
    run.__annotations__ = {each.name: each.annotation for each in seen}
    return run


def fails_politely(command: Callable[P, None]) -> Callable[P, None]:
    """Errors become one message on stderr and exit status 2; a traceback never reaches the user of a command."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except HoldoverError as error:
            fail(str(error))
        except KeyboardInterrupt:
            fail("interrupted", status=130)
        except BrokenPipeError:  # the reader of our output has seen enough, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except Exception as error:
            from holdover.trace.failure import users_line

            at = users_line(error)
            fail(f"{type(error).__name__}: {error}" + (f" (at {at})" if at else ""))

    return run


def fail(message: str, status: int = BAD_INPUT) -> NoReturn:
    """Say what is wrong on stderr, and exit."""
    _stderr.print(f"[bold red]error:[/] {_escaped(message)}", soft_wrap=True)
    raise typer.Exit(status)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Say on stderr what is being done, and how long it took.

    No spinner: steps are recorded in a forked child, and a fork must not meet a thread that holds the terminal.
    """
    _stderr.print(f"[dim]{_escaped(what)} ...[/]", end="", soft_wrap=True)
    began = time.perf_counter()
    try:
        yield
    except BaseException:
        _stderr.print()
        raise
    _stderr.print(f"[dim] {time.perf_counter() - began:.1f} s[/]")


def show(view: RenderableType) -> None:
    """Print a view on stdout: in colour on a terminal, as plain text of a fixed width elsewhere."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(view)
    else:
        typer.echo(render(view))


def show_json(data: Any) -> None:
    """Print plain data on stdout."""
    typer.echo(json.dumps(data, indent=1))


def check_writable(path: Path) -> None:
    """Fail before the work rather than after it.

    Raises:
        HoldoverError: nothing can be written at `path`.
    """
    if path.is_dir():
        raise HoldoverError(f"cannot write {path}: it is a directory; give the name of a file in it")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        hint = "" if path.parent.exists() else f"; there is no directory {path.parent}, make it first"
        raise HoldoverError(f"cannot write {path}: {error.strerror or error}{hint}") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file wholly or not at all: what stood there stays until the new text is on disk.

    Raises:
        HoldoverError: it cannot be written.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())  # a temporary file is private, a plan need not be
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        raise HoldoverError(f"cannot write {path}: {error.strerror or error}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
