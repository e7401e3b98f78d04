"""A plan's choices in the form that the runtime looks them up in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from holdover.memory.timeline import FOREVER


class Entry(NamedTuple):
    """What a plan says of one op.

    Attributes:
        name: the op, as "aten.gelu.default".
        action: "recompute" or "pack".
        stage: the stage of backward that its results belong to. Backward goes through the stages downwards.
        held_from: a replay on behalf of this stage, or of a lower one, holds the results for whoever wants them later;
            one on behalf of a higher stage drops them again (rule 15 of recipe.py).
    """

    name: str
    action: str
    stage: int = 0
    held_from: int = FOREVER


Script = Mapping[str, Mapping[int, Sequence[Any]]]
"""Call key -> position of an op in that call -> the fields of an Entry; the last two may be left out."""

ACTIONS = frozenset({"recompute", "pack"})
EMPTY: Mapping[int, Entry] = MappingProxyType({})


class Compiled:
    """A script, with what the runtime asks of it.

    Attributes:
        scripts: the script without empty calls.
        quiet: calls during which the dispatch mode may be off.
        open: calls with something planned in them or below them.
    """

    __slots__ = ("open", "quiet", "scripts")

    def __init__(self, script: Script, quiet: Iterable[str] = ()) -> None:
        self.scripts = {
            key: {index: Entry(*entry) for index, entry in entries.items()}
            for key, entries in script.items()
            if entries
        }
        for key, entries in self.scripts.items():
            for index, entry in entries.items():
                if entry.action not in ACTIONS:
                    raise ValueError(
                        f"unknown action {entry.action!r} for {entry.name} at {key!r}, {index}: use recompute or pack"
                    )
        self.quiet = frozenset(quiet)
        self.open = frozenset(k for key in self.scripts for k in _upwards(key))


def _upwards(key: str) -> list[str]:
    """The key and those of all calls around it. A "/" within a module's name gives one more, which does no harm."""
    return [key, *(key[:i] for i, c in enumerate(key) if c == "/")]
