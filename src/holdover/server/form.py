"""The form: what may be asked, and what is wrong with what was asked, field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdover.errors import DeviceError, UnitError
from holdover.memory.on_card import place_of
from holdover.trace.step import OPTIMIZERS, PRECISIONS
from holdover.units import parse_budget

MOST_BATCH, MOST_SEQ, MOST_TEXT = 65_536, 1_048_576, 100
LIBRARIES = ("transformers:", "timm:", "torchvision:")


@dataclass(frozen=True)
class Wanted:
    """A job as the form describes it. `seq` None and "" elsewhere mean the default."""

    model: str
    batch: int = 8
    seq: int | None = None
    precision: str = ""
    optimizer: str = "adamw"
    device: str = ""
    budget: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the worker."""
        return asdict(self)


class FormError(Exception):
    """What is wrong, by field."""

    def __init__(self, errors: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{field}: {text}" for field, text in errors.items()))
        self.errors = dict(errors)


def read_form(data: Any, models: Sequence[str]) -> Wanted:
    """Check what a browser, or anybody, sent.

    Args:
        data: the decoded JSON.
        models: those named on the command line; nothing else is ever loaded.

    Raises:
        FormError: with a message for each field that is not right.

    >>> read_form({"model": "timm:resnet18", "batch": "4"}, ["timm:resnet18"]).batch
    4
    >>> read_form({"model": "/etc/passwd:x", "batch": 0}, ["timm:resnet18"])
    Traceback (most recent call last):
    holdover.server.form.FormError: model: not among the models named on the command line: timm:resnet18; batch: a \
whole number from 1 to 65,536
    """
    if not isinstance(data, dict):
        raise FormError({"": "send the form's fields as a JSON object"})
    errors: dict[str, str] = {}
    known = Wanted.__dataclass_fields__
    if strange := [str(k)[:MOST_TEXT] for k in data if k not in known]:
        errors[""] = f"unknown fields: {', '.join(strange[:5])}"
    texts = {
        name: _text(data.get(name, getattr(Wanted, name, "")), name, errors)
        for name in known
        if name not in ("batch", "seq")
    }
    model = texts["model"]
    if model not in models:
        errors.setdefault("model", f"not among the models named on the command line: {', '.join(models)}")
    from_library = model.startswith(LIBRARIES)
    batch = _number(data.get("batch", 8), "batch", MOST_BATCH, errors) or 8
    seq = _number(data.get("seq"), "seq", MOST_SEQ, errors)
    for name in ("batch", "seq"):
        if data.get(name) not in (None, "") and not from_library and "model" not in errors:
            errors.setdefault(name, "leave it out: the file's own factory decides")
    if texts["optimizer"].lower() not in (*OPTIMIZERS, "none"):
        errors.setdefault("optimizer", f"one of {', '.join(sorted(OPTIMIZERS))}, or none")
    if texts["precision"] not in ("", *PRECISIONS):
        errors.setdefault("precision", f"one of {', '.join(PRECISIONS)}, or nothing")
    try:
        place_of(texts["device"] or None)
    except DeviceError as error:
        errors.setdefault("device", str(error))
    try:
        if texts["budget"]:
            parse_budget(texts["budget"])
    except UnitError as error:
        errors.setdefault("budget", str(error))
    if errors:
        raise FormError(errors)
    return Wanted(batch=batch, seq=seq, **texts)


def _text(value: Any, name: str, errors: dict[str, str]) -> str:
    if not isinstance(value, str) or len(value) > MOST_TEXT * (4 if name == "model" else 1):
        errors[name] = "a short text"
        return ""
    return value.strip()


def _number(value: Any, name: str, most: int, errors: dict[str, str]) -> int | None:
    """A whole number, as a number or as text; None where nothing was given."""
    if value is None or value == "":
        return None
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal() and len(value) < 12:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        errors[name] = f"a whole number from 1 to {most:,}"
        return None
    return value
