"""Names that are like one that nobody knows: what somebody may have meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MOST = 5
ALIKE = 0.6
"""How alike two spellings have to be, as `difflib` counts, from 0 to 1."""


LONG = 2
"""Letters from which on a name that contains another is like it."""


def nearest(name: str, known: Iterable[str], most: int = MOST) -> list[str]:
    """Known names like `name`, the most alike first: those that contain it, then like spellings; case and punctuation
    do not count.

    >>> nearest("llama-3-70b", ["gpt3-175b", "llama3-8b", "llama3-70b"], 1), nearest("zzz", ["gpt3-175b"])
    (['llama3-70b'], [])
    """
    wanted = _plain(name)
    alike: dict[str, float] = {}
    for other in known:
        plain = _plain(other)
        ratio = difflib.SequenceMatcher(None, wanted, plain).ratio() if plain else 0.0
        if len(wanted) >= LONG and wanted in plain:
            ratio += 1.0  # part of a longer name, such as a card without its memory
        if ratio >= ALIKE:
            alike[other] = ratio
    return sorted(alike, key=lambda other: -alike[other])[:most]


def near(name: str, known: Iterable[str], most: int = MOST) -> str:
    """The same as words to go on with after "there is no such thing"; nothing where nothing is alike.

    >>> near("rtx4080-24gb", ["rtx4090-24gb", "t4-16gb"])
    '; near it: rtx4090-24gb'
    """
    found = nearest(name, known, most)
    return f"; near it: {', '.join(found)}" if found else ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
