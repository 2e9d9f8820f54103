"""Run the command line inside `manage.py`, with Django's settings."""

from __future__ import annotations

from collections.abc import Sequence


def run_command(words: Sequence[str]) -> None:
    """Run `mqlayer …`. Raises SystemExit where it fails."""
    from mqlayer.cli.main import app

    try:
        app(list(words), prog_name="mqlayer")
    except SystemExit as end:
        if end.code:
            raise
