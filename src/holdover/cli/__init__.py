"""The command line: `holdover estimate | plan | verify | demo`, one file for each."""

from __future__ import annotations


def main() -> None:
    """Run the `holdover` command."""
    from holdover.cli.app import app

    app(prog_name="holdover")
