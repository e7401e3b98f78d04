"""One self-contained file: the page, its style and script, and its data, which `read_page` gets back."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from jinja2 import Environment

from holdover.errors import HoldoverError
from holdover.units import format_bytes

SCRIPTS = ("base.js", "stack.js", "memory.js", "frontier.js", "life.js", "tables.js", "main.js")
"""In the order in which they are put together: parts of one ES module."""

NO_SIZES = "The command holdover report records other batch sizes, lengths and depths too, and puts their controls here."


def render_page(data: Mapping[str, Any], *, priced: str = "", no_sizes: str = NO_SIZES) -> str:
    """The page for what `data.page_data` returns.

    Args:
        priced: how ops were priced, as plans say it.
        no_sizes: what stands in the place of the controls for other sizes where there are none.
    """
    return fill(
        data=data, encoded=encode(data), figures=_figures(data), priced=priced, no_sizes=no_sizes,
        script="\n".join(asset(f"js/{name}") for name in SCRIPTS),
    )  # fmt: skip


def fill(**values: Any) -> str:
    """The page's template filled; names that the values leave out are taken as absent."""
    from holdover import __version__

    return _template().render(style=asset("style.css"), version=__version__, torch=torch.__version__, **values)


def asset(name: str) -> str:
    """The text of a file beside this one."""
    return files("holdover.report.html").joinpath(name).read_text()


@cache
def _template() -> Any:
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(asset("page.html"))


def encode(data: Mapping[str, Any]) -> str:
    """Data as the page carries it: JSON, gzip (always the same bytes for the same data), base64."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def read_page(page: str) -> dict[str, Any]:
    """The data that a page was made from.

    Raises:
        HoldoverError: the text is no report page.

    >>> read_page(render_page({"plans": [], "peak_bytes": 7}))["peak_bytes"]
    7
    """
    found = re.search(r'<script type="application/json" id="data"[^>]*>([^<]*)</script>', page)
    if found is None:
        raise HoldoverError("this is no page that holdover made: it carries no data")
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found.group(1))))
    return data


def _figures(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The numbers at the head of the page."""
    where = f"in {data.get('peak_phase', '')}"
    rows = [
        ("peak", "peak_bytes", where),
        ("weights", "weights_bytes", "parameters and buffers"),
        ("gradients", "gradients_bytes", ""),
        ("optimizer", "optimizer_bytes", str(data.get("optimizer") or "")),
        ("activations", "activations_bytes", "saved for backward"),
    ]
    figures = [
        {"name": name, "key": key, "nbytes": data[key], "text": format_bytes(data[key]), "remark": remark}
        for name, key, remark in rows
        if data.get(key)
    ]
    plans = data.get("plans") or ()
    if len(plans) > 1:
        floor = plans[-1]["peak_bytes"]
        figures.append({
            "name": "lowest peak", "key": "floor", "nbytes": floor, "text": format_bytes(floor),
            "remark": f"of {len(plans)} plans, {plans[-1]['extra_time']:+.1%} time",
        })  # fmt: skip
    return figures
