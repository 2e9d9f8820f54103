"""`doctor`: is it well, and what to do where it is not."""

from __future__ import annotations

from dataclasses import asdict

import typer

from mqlayer.checking import Verdict, examine
from mqlayer.cli.addresses import settings_here
from mqlayer.cli.showing import JsonOption, show_rows


def add_to(app: typer.Typer) -> None:
    """Put the command into the application."""
    app.command()(doctor)


def doctor(as_json: JsonOption = False) -> None:
    """Check servers, settings, schemas and what waits, and say how to mend it; exit code 1 if something is broken.

    Changes nothing. Works on MQLAYER_DSN, MQLAYER_APP_DSN, MQLAYER_BROKER_URL and the registered nodes.
    """
    findings = examine(settings_here())
    rows = ({name: str(value) for name, value in asdict(finding).items()} for finding in findings)
    show_rows(rows, as_json=as_json, nothing="nothing to check")
    if any(finding.verdict is Verdict.BROKEN for finding in findings):
        raise typer.Exit(1)
