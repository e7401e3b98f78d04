"""A plan's choices in the form that the runtime looks them up in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

Script = Mapping[str, Mapping[int, tuple[str, str]]]
"""Call key -> position of an op in that call -> (name of the op, "recompute" or "pack")."""

ACTIONS = frozenset({"recompute", "pack"})
EMPTY: Mapping[int, tuple[str, str]] = MappingProxyType({})


class Compiled:
    """A script, with what the runtime asks of it.

    Attributes:
        scripts: the script without empty calls.
        quiet: calls during which the dispatch mode may be off.
        open: calls with something planned in them or below them.
    """

    __slots__ = ("open", "quiet", "scripts")

    def __init__(self, script: Script, quiet: Iterable[str] = ()) -> None:
        self.scripts = {key: dict(entries) for key, entries in script.items() if entries}
        for key, entries in self.scripts.items():
            for index, (name, action) in entries.items():
                if action not in ACTIONS:
                    raise ValueError(f"unknown action {action!r} for {name} at {key!r}, {index}: use recompute or pack")
        self.quiet = frozenset(quiet)
        self.open = frozenset(k for key in self.scripts for k in _upwards(key))


def _upwards(key: str) -> list[str]:
    """The key and those of all calls around it. A "/" within a module's name gives one more, which does no harm."""
    return [key, *(key[:i] for i, c in enumerate(key) if c == "/")]
