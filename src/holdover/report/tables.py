"""What the views of estimates and plans share.

Numbers in one table share one unit and are rounded so that what is printed adds up to the total that is printed.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from holdover.units import format_parts, format_share

if TYPE_CHECKING:
    from holdover.planning.plan import Plan

WIDTH = 100
MAX_LAYERS = 24
BAR = 24
MOST_RUNS = 4
_COLOURS = {
    "parameter": "blue",
    "buffer": "blue",
    "gradient": "magenta",
    "optimizer": "cyan",
    "input": "white",
    "activation": "yellow",
    "temporary": "red",
}


def bar(part: int, whole: int, width: int) -> str:
    """A bar in eighths of a character.

    >>> bar(3, 16, 8)
    '█▌'
    """
    eighths = round(part * width * 8 / whole) if whole else 0
    rest: str = " ▏▎▍▌▋▊▉"[eighths % 8]
    return "█" * int(eighths // 8) + rest.strip()


def layer_name(path: str) -> str:
    """The layer that a module belongs to: its name up to the first number, else its first two parts.

    >>> layer_name("model.layers.3.mlp.act"), layer_name("model.embed.norm.scale"), layer_name("")
    ('model.layers.3', 'model.embed', '(model itself, loss)')
    """
    if not path:
        return "(model itself, loss)"
    match = re.match(r"(.*?(?:^|\.)\d+)(?:\.|$)", path)
    return match.group(1) if match else ".".join(path.split(".")[:2])


def alike(layers: Mapping[str, Hashable]) -> dict[str, list[str]]:
    """Layers whose names differ in one number only, and whose figures do not, under one name.

    Args:
        layers: what a layer does, by its name.

    Returns:
        The names that stand for layers, in the order of their first ones, each with its layers.

    >>> alike({"embed": 9, "h.0": 4, "h.1": 4, "h.2": 5, "h.3": 4})
    {'embed': ['embed'], 'h.0-1,3 (3x)': ['h.0', 'h.1', 'h.3'], 'h.2': ['h.2']}
    """
    found: dict[tuple[str, Hashable], list[str]] = {}
    for name, figures in layers.items():
        before, number, after = _numbered(name)
        found.setdefault((f"{before}*{after}" if number else name, figures), []).append(name)
    return {_together(members): members for members in found.values()}


def _numbered(name: str) -> tuple[str, str, str]:
    """A name around its last number."""
    match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
    return (match[1], match[2], match[3]) if match else (name, "", "")


def _together(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    runs: list[list[int]] = []
    for n in sorted(int(_numbered(name)[1]) for name in names):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    told = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(told) > MOST_RUNS:
        told = [*told[: MOST_RUNS - 1], "...", told[-1]]
    before, _, after = _numbered(names[0])
    return f"{before}{','.join(told)}{after} ({len(names)}x)"


def knee_line(plan: Plan) -> str:
    """What to ask for instead of the lowest peak, where its last bytes are dear; else nothing."""
    if plan.knee is None:
        return ""
    here, there = format_share(plan.extra_time, sign=True), format_share(plan.knee.extra_time, sign=True)
    return f'the last bytes are dear: budget="{plan.knee.budget}" costs about {there}, this lowest peak {here}'


def parts_table(parts: dict[str, int], title: str, unit: str) -> Table:
    """Named bytes with bars, and their total."""
    shown = {name: nbytes for name, nbytes in parts.items() if nbytes}
    total = sum(shown.values())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True, padding=(0, 1))
    table.add_column(title, footer="total")
    figures = format_parts(list(shown.values()), unit)
    table.add_column(unit, footer=figures[-1], justify="right")
    table.add_column("share", footer="", justify="right")
    table.add_column("", footer="")
    for (name, nbytes), figure in zip(shown.items(), figures, strict=False):
        style = _COLOURS.get(name, "yellow")
        table.add_row(name, figure, format_share(nbytes / total), Text(bar(nbytes, total, BAR), style=style))
    return table
