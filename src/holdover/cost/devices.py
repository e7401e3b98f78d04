"""Cards by name: memory a program can use, bandwidths and dense rates, for planning without the card.

Memory is what PyTorch sees as total, before the CUDA context, from out-of-memory messages and device queries that users
published; rates and bandwidths are the vendors' dense figures. What could not be confirmed in a source is listed in
`Card.unconfirmed`. Where a card is present, ask it (`torch.cuda.mem_get_info`) instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdover.errors import DeviceError

_GIB = 2**30


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
    rates: dict[str, float]
    """Dense FLOPs a second by dtype: "bf16", "fp16", "tf32", "fp32". A missing one has no such hardware."""
    host_link: float
    """Bytes a second to the host, each way."""
    peer_link: float
    """Bytes a second to the other cards of the node, each way."""
    unconfirmed: frozenset[str] = frozenset()
    """Fields (and dtypes of `rates`) whose figure is from memory, not from a source."""
    source: str = "vendor's data sheet; usable memory from published out-of-memory messages"

    def __hash__(self) -> int:
        return hash(self.name)

    def rate(self, dtype: str) -> float:
        """FLOPs a second in a dtype.

        Raises:
            DeviceError: the card has no hardware for it.
        """
        if dtype not in self.rates:
            raise DeviceError(f"{self.title} has no {dtype} matrix rate; it has {', '.join(self.rates)}")
        return self.rates[dtype]


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
    names = ("bf16", "fp16", "tf32", "fp32")
    return Card(
        name=name,
        title=title,
        capability=capability,
        usable_bytes=int(usable_gib * _GIB),
        bandwidth=bandwidth_tb * 1e12,
        rates={dtype: rate * 1e12 for dtype, rate in zip(names, rates, strict=True) if rate is not None},
        host_link=host_gb * 1e9,
        peer_link=peer_gb * 1e9,
        # The links between cards are the vendors' NVLink (or PCIe) figures halved, none of them measured.
        unconfirmed=frozenset([*unconfirmed.split(), "peer_link"]),
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
"""Cards by name."""


def card(name: str) -> Card:
    """The card of a name; the memory may be left out where only one size has it.

    Raises:
        DeviceError: no such card, or several.

    >>> card("h100-80gb").title, card("H200").name
    ('H100 80 GB SXM', 'h200-141gb')
    """
    wanted = name.lower().replace(" ", "").replace("_", "-")
    if wanted in CARDS:
        return CARDS[wanted]
    started = [known for known in CARDS if known.split("-")[0] == wanted]
    if len(started) == 1:
        return CARDS[started[0]]
    if started:
        raise DeviceError(f"{name!r} comes in several kinds: {', '.join(started)}")
    raise DeviceError(f"unknown card {name!r}; the table has {', '.join(CARDS)}")
