"""What all figures share: the sheet, its colours, and how it is written to a file.

Colours are Okabe and Ito's (2008), which people with any kind of colour vision can tell apart; lines and areas carry
their names themselves, so that nothing is told by colour alone.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdover.errors import HoldoverError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, FAINT = "#1a1a1a", "#6b6b6b", "#d9d9d9"
BLUE, ORANGE, GREEN, SKY, VERMILION, PURPLE = "#0072b2", "#e69f00", "#009e73", "#56b4e9", "#d55e00", "#cc79a7"

SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib's own, so that a figure looks the same everywhere
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "svg.fonttype": "path",
    "svg.hashsalt": "holdover",  # the same figure gives the same file
}


def check_drawable(path: Path) -> None:
    """Fail before the work rather than after it.

    Raises:
        HoldoverError: matplotlib is not installed, or cannot draw files of this ending.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise HoldoverError("drawing needs matplotlib: pip install matplotlib") from None
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise HoldoverError(f"cannot draw to {path}: its ending must be one of {', '.join(sorted(known))}")


def sheet(width: float, height: float, title: str, remark: str = "") -> tuple[Figure, Axes]:
    """An empty figure of so many inches with one set of axes, its statement at the top left."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.9 / width, 0.6 / height, 1 - 1.1 / width, 1 - 1.5 / height))
        axes.tick_params(length=3, width=0.8)
    figure.text(0.2 / width, 1 - 0.3 / height, title, fontsize=12.5, fontweight="bold", color=INK, va="center")
    if remark:
        figure.text(0.2 / width, 1 - 0.58 / height, remark, fontsize=9, color=SOFT, va="center")
    return figure, axes


def write(figure: Figure, path: Path) -> None:
    """Write a figure wholly or not at all, in the format that the file's ending names.

    Raises:
        HoldoverError: it cannot be written.
    """
    import matplotlib as mpl

    kind = path.suffix.removeprefix(".").lower()
    metadata = {"Date": None} if kind == "svg" else None
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with mpl.rc_context(SETTINGS), os.fdopen(handle, "wb") as file:
            figure.savefig(file, format=kind, dpi=160, metadata=metadata)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise HoldoverError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            os.unlink(temporary)
