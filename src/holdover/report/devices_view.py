"""The table of cards as text for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from holdover.cost.devices import DTYPES, Card


def devices_view(cards: Iterable[Card]) -> Group:
    """A row per card; a figure that is not confirmed by a source carries a question mark."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("card", no_wrap=True)
    for name in ("cc", "GiB", "TB/s", *DTYPES, "host", "context", "cuBLAS"):
        table.add_column(name, justify="right", no_wrap=True)
    for card in cards:
        low, high = (round(n / 2**20) for n in card.context_bytes)
        table.add_row(
            card.name,
            "AMD" if card.capability is None else "{}.{}".format(*card.capability),
            _figure(card, "usable_bytes", card.usable_bytes / 2**30),
            _figure(card, "bandwidth", card.bandwidth / 1e12),
            *(_figure(card, d, card.rates[d] / 1e12) if d in card.rates else "none" for d in DTYPES),
            _figure(card, "host_link", card.host_link / 1e9),
            f"{low}-{high}{_mark(card, 'context_bytes')}",
            _figure(card, "cublas_bytes", card.cublas_bytes / 2**20),
        )
    legend = (
        "GiB: memory a program can allocate, before the context. bf16 to fp32: dense TFLOPS. host: GB/s each way. "
        "context: MiB that a process takes outside PyTorch's allocator, as seen. cuBLAS: MiB of workspace per thread, "
        "from the allocator. ?: not confirmed by a source."
    )
    return Group(table, Text(legend, style="dim"))


def _figure(card: Card, field: str, value: float) -> str:
    return f"{value:,.4g}{_mark(card, field)}"


def _mark(card: Card, field: str) -> str:
    return "?" if card.source_of(field) == "unconfirmed" else ""
