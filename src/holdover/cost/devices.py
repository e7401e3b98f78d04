"""Cards by name: memory a program can use, bandwidths and dense rates, for planning without the card.

Memory is what PyTorch sees as total, before the CUDA context, from out-of-memory messages and device queries that users
published; rates and bandwidths are the vendors' dense figures. What could not be confirmed in a source is listed in
`Card.unconfirmed`. Where a card is present, ask it (`torch.cuda.mem_get_info`) instead. A file of your own adds cards
(`add_cards`, or the environment variable `HOLDOVER_DEVICES`).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from holdover.errors import DeviceError, UnitError
from holdover.names import near
from holdover.units import parse_bytes

_GIB = 2**30
_MIB = 2**20
DTYPES = ("bf16", "fp16", "tf32", "fp32")
FILE_VARIABLE = "HOLDOVER_DEVICES"

_DATA_SHEET = "vendor's data sheet, dense"
SOURCES = {
    "usable_bytes": "published out-of-memory messages and device queries",
    "bandwidth": _DATA_SHEET,
    **dict.fromkeys(DTYPES, _DATA_SHEET),
    "host_link": "PCI Express, of its generation; GB200: measured on a GB300 station",
    "peer_link": "vendor's NVLink or PCIe figure, halved",
    "context_bytes": "measured by users: T4, RTX 3090, RTX 6000 Ada, A100, H200, V100",
    "cublas_bytes": "PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp",
}
"""Where the figures of a field come from, unless the card lists the field as unconfirmed."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One accelerator."""

    name: str
    title: str
    capability: tuple[int, int] | None
    """CUDA compute capability; None for AMD's."""
    usable_bytes: int
    """Memory a program can allocate, before the context; the lowest of the figures seen."""
    bandwidth: float
    """Bytes a second to and from its memory."""
    rates: Mapping[str, float]
    """Dense FLOPs a second by dtype: "bf16", "fp16", "tf32", "fp32". A missing one has no such hardware."""
    host_link: float
    """Bytes a second to the host, each way."""
    peer_link: float
    """Bytes a second to the other cards of the node, each way."""
    context_bytes: tuple[int, int] = (_GIB // 4, 1454 * _MIB)
    """Least and most that the context and the loaded kernels take outside PyTorch's allocator. It grows with the
    kernels that a program touches and differs between CUDA versions: measure it where it matters."""
    unconfirmed: frozenset[str] = frozenset()
    """Fields (and dtypes of `rates`) whose figure is from memory, not from a source."""
    source: str = "holdover's table"

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def cublas_bytes(self) -> int:
        """What cuBLAS takes from PyTorch's allocator per thread and stream: it shows in allocated memory.

        By compute capability: 32 MiB from 9.0 on, 8.125 MiB before. cuBLASLt shares it (in PyTorch 2.13 as it is
        distributed). AMD: 32 MiB; 128 MiB on the MI300's.
        """
        if self.capability is None:
            return (128 if self.name.startswith("mi3") else 32) * _MIB
        return 32 * _MIB if self.capability >= (9, 0) else 8320 * 1024

    def rate(self, dtype: str) -> float:
        """FLOPs a second in a dtype.

        Raises:
            DeviceError: the card has no hardware for it.
        """
        if dtype not in self.rates:
            raise DeviceError(f"{self.title} has no {dtype} matrix rate; it has {', '.join(self.rates)}")
        return self.rates[dtype]

    def source_of(self, field: str) -> str:
        """Where a figure comes from: a source, or "unconfirmed".

        Args:
            field: a field of this class, "cublas_bytes", or a dtype of `rates`.

        >>> card("t4").source_of("bandwidth"), card("h100-80gb").source_of("bf16")
        ('unconfirmed', "vendor's data sheet, dense")
        """
        if field in self.unconfirmed:
            return "unconfirmed"
        return SOURCES[field] if self.source == "holdover's table" else self.source

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with each figure's source; `add_cards` reads it back."""
        figures = ["usable_bytes", "bandwidth", *self.rates, "host_link", "peer_link", "context_bytes", "cublas_bytes"]
        return {
            "name": self.name, "title": self.title, "capability": self.capability, "usable_bytes": self.usable_bytes,
            "bandwidth": self.bandwidth, "rates": dict(self.rates), "host_link": self.host_link,
            "peer_link": self.peer_link, "context_bytes": list(self.context_bytes), "cublas_bytes": self.cublas_bytes,
            "sources": {figure: self.source_of(figure) for figure in figures},
        }  # fmt: skip


_CONTEXT_MIB = {
    "t4-16gb": (105, 141), "v100-16gb": (256, 1343), "v100-32gb": (256, 1343), "rtx3090-24gb": (256, 1001),
    "a100-40gb": (481, 942), "a100-80gb": (481, 942), "a100-80gb-pcie": (481, 942), "h200-141gb": (563, 1454),
}  # fmt: skip
"""Least and most MiB seen: at start and after first kernels (T4, H200), with lazy and eager loading (A100), of CUDA 12
and CUDA 11 (V100, RTX 3090)."""


def _card(
    name: str,
    title: str,
    capability: tuple[int, int] | None,
    usable_gib: float,
    bandwidth_tb: float,
    rates: tuple[float | None, float, float | None, float],
    host_gb: float,
    peer_gb: float,
    unconfirmed: str = "",
) -> Card:
    # A context that was not measured on the card is taken to lie between those of the cards where it was.
    low, high = _CONTEXT_MIB.get(name, (256, 1454))
    return Card(
        name=name,
        title=title,
        capability=capability,
        usable_bytes=int(usable_gib * _GIB),
        bandwidth=bandwidth_tb * 1e12,
        rates={dtype: rate * 1e12 for dtype, rate in zip(DTYPES, rates, strict=True) if rate is not None},
        host_link=host_gb * 1e9,
        peer_link=peer_gb * 1e9,
        context_bytes=(low * _MIB, high * _MIB),
        # The links between cards are the vendors' NVLink (or PCIe) figures halved, none of them measured.
        unconfirmed=frozenset(
            [*unconfirmed.split(), "peer_link", *([] if name in _CONTEXT_MIB else ["context_bytes"])]
        ),
    )


_R = "bf16 fp16 tf32 fp32"
_TABLE = (
    _card("t4-16gb", "T4", (7, 5), 14.56, 0.32, (None, 65, None, 8.1), 12, 12, f"bandwidth {_R} host_link"),
    _card(
        "v100-16gb", "V100 16 GB", (7, 0), 15.75, 0.90, (None, 125, None, 15.7), 12, 150, f"bandwidth {_R} host_link"
    ),
    _card(
        "v100-32gb", "V100 32 GB", (7, 0), 31.72, 0.90, (None, 125, None, 15.7), 12, 150, f"bandwidth {_R} host_link"
    ),
    _card("a10g-24gb", "A10G", (8, 6), 21.99, 0.60, (70, 70, 35, 31), 31, 31, f"bandwidth {_R}"),
    _card("a100-40gb", "A100 40 GB", (8, 0), 39.4, 1.555, (312, 312, 156, 19.5), 31, 300, "usable_bytes"),
    _card("a100-80gb", "A100 80 GB SXM", (8, 0), 79.15, 2.04, (312, 312, 156, 19.5), 31, 300),
    _card("a100-80gb-pcie", "A100 80 GB PCIe", (8, 0), 79.15, 1.94, (312, 312, 156, 19.5), 31, 31),
    _card("l4-24gb", "L4", (8, 9), 22.05, 0.30, (121, 121, 60, 30.3), 31, 31, f"usable_bytes bandwidth {_R}"),
    _card("l40s-48gb", "L40S", (8, 9), 44.40, 0.864, (362, 362, 183, 91.6), 31, 31),
    _card(
        "rtx3090-24gb", "RTX 3090", (8, 6), 23.7, 0.936, (71, 71, 35.6, 35.6), 31, 31, f"usable_bytes bandwidth {_R}"
    ),
    _card("rtx4090-24gb", "RTX 4090", (8, 9), 23.53, 1.008, (165, 165, 82.6, 82.6), 31, 31, f"bandwidth {_R}"),
    _card("rtx5090-32gb", "RTX 5090", (12, 0), 31.36, 1.792, (209, 209, 105, 104.8), 63, 63, f"bandwidth {_R}"),
    _card("h100-80gb", "H100 80 GB SXM", (9, 0), 79.10, 3.35, (989, 989, 494.5, 67), 63, 450),
    _card("h100-80gb-pcie", "H100 80 GB PCIe", (9, 0), 79.1, 2.0, (756, 756, 378, 51), 63, 63),
    _card("h200-141gb", "H200", (9, 0), 139.8, 4.8, (989, 989, 494.5, 67), 55, 450),
    _card("b200-180gb", "B200", (10, 0), 178.35, 8.0, (2250, 2250, 1125, 80), 63, 900),
    _card("gb200-186gb", "GB200", (10, 0), 184.0, 8.0, (2500, 2500, 1250, 80), 359, 900, "usable_bytes"),
    _card("mi250x-64gb", "MI250X, one GCD", None, 63.98, 1.64, (191, 191, None, 24), 31, 50, "usable_bytes"),
    _card("mi300x-192gb", "MI300X", None, 191.98, 5.3, (1307, 1307, 654, 163.4), 63, 448, "usable_bytes"),
)

CARDS: dict[str, Card] = {card.name: card for card in _TABLE}
"""Cards of the table by name; `all_cards` also has those of the user's files."""

_added: dict[str, Card] = {}


def all_cards() -> dict[str, Card]:
    """Every card by name: the table's, those of the file that `HOLDOVER_DEVICES` names, and those of `add_cards`.

    Raises:
        DeviceError: the file cannot be read.
    """
    named = os.environ.get(FILE_VARIABLE)
    return {**CARDS, **(_read(named) if named else {}), **_added}


def add_cards(path: str | os.PathLike[str]) -> list[Card]:
    """Add the cards of a JSON file, for this process.

    Args:
        path: a file with one object, or a list of them: "name", "title", "capability" ([9, 0], null for AMD's),
            "usable_bytes" and "context_bytes" (numbers of bytes, or text such as "79.1GiB"), "bandwidth", "host_link",
            "peer_link" (bytes a second), "rates" (FLOPs a second by dtype), "unconfirmed" (names of fields). Only name,
            capability, usable_bytes, bandwidth and rates must be there. A name of the table is replaced.

    Raises:
        DeviceError: the file cannot be read, or misses something.
    """
    found = _read(os.fspath(path))
    _added.update(found)
    return list(found.values())


@functools.cache
def _read(path: str) -> dict[str, Card]:
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise DeviceError(f"cannot read the cards of {path}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:
        raise DeviceError(f"the cards of {path} are not JSON: {error}") from None
    rows = data if isinstance(data, list) else [data]
    return {found.name: found for found in (_from_file(row, path) for row in rows)}


def _from_file(row: Any, path: str) -> Card:
    needed = ("name", "capability", "usable_bytes", "bandwidth", "rates")
    if not isinstance(row, dict) or any(field not in row for field in needed):
        raise DeviceError(f"a card of {path} must be an object with {', '.join(needed)}; found {str(row)[:200]}")
    known = {field.name for field in fields(Card)} - {"source"}
    unknown = set(row) - known - {"cublas_bytes", "sources"}  # which to_dict writes
    if unknown:
        raise DeviceError(f"{path}: card {row['name']!r} has unknown fields {', '.join(sorted(unknown))}")
    try:
        capability = row["capability"]
        low, high = row.get("context_bytes") or (_GIB // 4, 1454 * _MIB)
        return Card(
            name=_normal(str(row["name"])), title=str(row.get("title", row["name"])),
            capability=None if capability is None else (int(capability[0]), int(capability[1])),
            usable_bytes=parse_bytes(row["usable_bytes"]), bandwidth=_positive(row["bandwidth"]),
            rates={_dtype(dtype): _positive(rate) for dtype, rate in row["rates"].items()},
            host_link=_positive(row.get("host_link", 31e9)), peer_link=_positive(row.get("peer_link", 31e9)),
            context_bytes=(parse_bytes(low), parse_bytes(high)),
            unconfirmed=frozenset(row.get("unconfirmed", ())), source=path,
        )  # fmt: skip
    except (TypeError, ValueError, IndexError, AttributeError, UnitError) as error:
        raise DeviceError(f"{path}: card {row['name']!r} cannot be read: {error}") from None


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ValueError(f"{value!r} is not a number above 0")
    return float(value)


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"{name!r} is no dtype of a rate: {', '.join(DTYPES)}")
    return name


def _normal(name: str) -> str:
    return name.lower().replace(" ", "").replace("_", "-")


def card(name: str) -> Card:
    """The card of a name; the memory may be left out where only one size has it.

    Raises:
        DeviceError: no such card, or several.

    >>> card("h100-80gb").title, card("H200").name
    ('H100 80 GB SXM', 'h200-141gb')
    """
    cards = all_cards()
    wanted = _normal(name)
    if wanted in cards:
        return cards[wanted]
    started = [known for known in cards if known.split("-")[0] == wanted]
    if len(started) == 1:
        return cards[started[0]]
    if started:
        raise DeviceError(f"{name!r} comes in several kinds: {', '.join(started)}")
    raise DeviceError(f"unknown card {name!r}; the table has {', '.join(cards)}{near(name, cards)}")
