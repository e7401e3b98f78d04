from __future__ import annotations


def verify() -> None:
    """Later."""
