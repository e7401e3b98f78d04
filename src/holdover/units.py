"""Bytes, shares and seconds: the only place where they are read from text or written as text.

Inside holdover bytes are whole numbers; KiB, MiB and GiB appear only here.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any, Literal

from holdover.errors import UnitError

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES = _BINARY | _DECIMAL
_NUMBER = r"(\d+(?:_\d+)*(?:\.\d+)?|\.\d+)"
_SIZE = re.compile(rf"\s*{_NUMBER}\s*([A-Za-z]*)\s*")
_SHARE = re.compile(rf"\s*{_NUMBER}\s*%\s*")
_BARE = 2**20
"""Bytes from which text may do without a unit."""


def parse_bytes(size: int | str) -> int:
    """Read a number of bytes.

    Args:
        size: a whole number of bytes, or text: "24GiB", "1.5 MiB", "16GB" (10^9), "4096B". Text may do without a unit
            from 1 MiB on; below, the unit was forgotten.

    Returns:
        The bytes, rounded down.

    Raises:
        UnitError: the size cannot be read, is negative, its unit has two readings ("16gb") or is missing ("70").

    >>> parse_bytes("1.5KiB"), parse_bytes("1kB"), parse_bytes(7)
    (1536, 1000, 7)
    """
    if not isinstance(size, str):
        return _whole(size)
    match = _SIZE.fullmatch(size)
    if match is None:
        raise UnitError(f"cannot read {size!r} as a size: write a number and a unit, such as 24GiB, 512MiB or 4096B")
    number, unit = match.group(1).replace("_", ""), match.group(2)
    factor = _SIZES.get(unit or "B")
    if factor is None and unit.lower() in ("kib", "mib", "gib", "tib"):
        factor = _BINARY[unit[0].upper() + "iB"]
    if factor is None:
        raise UnitError(_unknown_unit(size, number, unit))
    if "." not in number:
        if not unit and 0 < int(number) < _BARE:
            raise UnitError(
                f"{size.strip()!r} has no unit, and would be {int(number):,} bytes: write {number}MiB or {number}GiB, "
                f"or {number}B if bytes are meant"
            )
        return int(number) * factor
    if factor == 1:
        raise UnitError(f"{size!r} is not a whole number of bytes: give it a unit, such as {number}GiB")
    return int(float(number) * factor)


def _whole(size: Any) -> int:
    try:
        if isinstance(size, bool):
            raise TypeError
        whole = operator.index(size)
    except TypeError:
        raise UnitError(
            f"cannot read {size!r} as a size: give a whole number of bytes, or text such as '24GiB'"
        ) from None
    if whole < 0:
        raise UnitError(f"a size cannot be negative: {whole}")
    return whole


def _unknown_unit(size: str, number: str, unit: str) -> str:
    letter = unit[0].upper()
    if unit.lower() in ("k", "m", "g", "t", "kb", "mb", "gb", "tb"):
        binary, decimal = f"{number}{letter}iB", f"{number}{'k' if letter == 'K' else letter}B"
        return (
            f"{size.strip()!r} can be read in two ways: write {binary} ({parse_bytes(binary):,} bytes) "
            f"or {decimal} ({parse_bytes(decimal):,} bytes)"
        )
    return f"unknown unit {unit!r} in {size!r}: the units are {', '.join(_BINARY)} and {', '.join(_DECIMAL)}"


def parse_budget(budget: int | str) -> int | float | Literal["min"]:
    """Read a memory budget.

    Args:
        budget: bytes as `parse_bytes` takes them, a share of the step's own unplanned peak ("80%"), or "min".

    Returns:
        An int is bytes, a float is a share (0.8), "min" is itself.

    Raises:
        UnitError: the budget cannot be read, or is not above nothing.

    >>> parse_budget("2KiB"), parse_budget("80%"), parse_budget("min")
    (2048, 0.8, 'min')
    """
    if isinstance(budget, str):
        if budget.strip().lower() == "min":
            return "min"
        match = _SHARE.fullmatch(budget)
        if match is not None:
            share = float(match.group(1).replace("_", "")) / 100
            if not 0 < share <= 1:
                raise UnitError(
                    f"a budget of {budget.strip()} makes no sense: it is a share of the step's own peak, above 0% and "
                    "at most 100%, which is the step as it is"
                )
            return share
    try:
        size = parse_bytes(budget)
    except UnitError as error:
        example = _share_like(budget)
        raise UnitError(
            f'{error}. A budget may also be a share of the step\'s own peak ("{example}") or "min"'
        ) from None
    if size == 0:
        raise UnitError('a budget of 0 bytes makes no sense: "min" asks for the lowest peak that can be reached')
    return size


def _share_like(budget: Any) -> str:
    """The share that a number without a unit may have meant, 70 as well as 0.7; else an example."""
    try:
        number = float(budget)
    except (TypeError, ValueError):
        return "80%"
    percent = 100 * number if number < 1 else number
    return f"{percent:g}%" if 0 < percent <= 100 else "80%"


def binary_unit(nbytes: int) -> str:
    """The largest of B, KiB, MiB, GiB and TiB in which a size is at least 1.

    >>> binary_unit(3 * 2**20)
    'MiB'
    """
    return max((unit for unit in _BINARY if abs(nbytes) >= _BINARY[unit]), key=_BINARY.__getitem__, default="B")


def format_bytes(nbytes: int, unit: str | None = None) -> str:
    """Write a size for people.

    Args:
        nbytes: bytes.
        unit: B, KiB, MiB, GiB or TiB, for sizes that stand together; None takes the largest that fits. A size below 1
            of it takes its own all the same, so that at least three digits of any size are told.

    >>> format_bytes(1536), format_bytes(0), format_bytes(25 * 2**30, "MiB"), format_bytes(1536, "GiB")
    ('1.50 KiB', '0 B', '25,600.00 MiB', '1.50 KiB')
    """
    own = binary_unit(nbytes)
    unit = unit if unit is not None and _BINARY[unit] < _BINARY[own] else own
    return f"{nbytes:,} B" if unit == "B" else f"{figure(nbytes, unit)} {unit}"


def figure(nbytes: int, unit: str) -> str:
    """A size in a unit that is written elsewhere, as above a column.

    >>> figure(1536, "KiB"), figure(1536, "MiB")
    ('1.50', '0.00')
    """
    return f"{nbytes / _BINARY[unit]:,.2f}"


def format_seconds(seconds: float) -> str:
    """Write a time for people.

    >>> format_seconds(0.0421), format_seconds(3.2e-05), format_seconds(75)
    ('42.1 ms', '32.0 us', '75.0 s')
    """
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def checked_seconds(limit: float) -> float:
    """A time limit.

    Args:
        limit: seconds, above 0.

    Raises:
        UnitError: it is no such number.

    >>> checked_seconds(2.5)
    2.5
    """
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < float("inf"):
        raise UnitError(f"a time limit of {limit!r} makes no sense: give a number of seconds above 0")
    return float(limit)


def format_share(share: float, *, sign: bool = False) -> str:
    """Write a fraction as a percentage.

    >>> format_share(0.0534), format_share(0.0534, sign=True)
    ('5.3 %', '+5.3 %')
    """
    percent = round(share * 100, 1) + 0.0  # -0.0 would show its sign
    return f"{percent:{'+' if sign else ''}.1f} %"


def format_parts(parts: Sequence[int], unit: str) -> list[str]:
    """Write sizes that are listed above their total so that the printed figures add up to the printed total.

    Args:
        parts: bytes.
        unit: the unit of all figures, which carry none themselves.

    Returns:
        One figure for each part, and last the total's.

    >>> format_parts([100, 100, 100], "KiB")  # 0.0977 each, 0.2930 together
    ['0.10', '0.10', '0.09', '0.29']
    """
    step = 1 if unit == "B" else 100
    exact = [part * step / _BINARY[unit] for part in parts]
    total = round(sum(parts) * step / _BINARY[unit])
    floors = [int(value) for value in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: floors[i] - exact[i])
    for i in by_remainder[: total - sum(floors)]:
        floors[i] += 1
    return [f"{value / step:,.{0 if step == 1 else 2}f}" for value in [*floors, total]]
