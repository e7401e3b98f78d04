"""The command line: one file for each command."""

from __future__ import annotations


def main() -> None:
    """Run the `holdover` command."""
    try:
        from holdover.cli.app import app

        app(prog_name="holdover")
    except KeyboardInterrupt:  # while PyTorch is still being imported; typer answers later ones itself
        raise SystemExit(130) from None
