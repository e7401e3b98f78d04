"""The command line: one file for each command."""

from __future__ import annotations


def main() -> None:
    """Run the `holdover` command."""
    from holdover.cli.app import app

    app(prog_name="holdover")
