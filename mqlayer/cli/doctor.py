"""`doctor` and `verify`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Final

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.output import JsonOption, show_rows
from mqlayer.cli.runtime import runtime_here
from mqlayer.doctor import CheckStatus, Finding, diagnose
from mqlayer.doctor.verify import verify as verify_stores

EXIT_UNKNOWN: Final = 3
"""Nothing differs, but not everything was compared."""


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command()(doctor)
    app.command()(verify)


def doctor(as_json: JsonOption = False) -> None:
    """Check servers, settings, schemas and waiting work; exit code 1 if something is broken.

    Changes nothing. Findings name the repair.
    """
    _show(diagnose(settings_here()), as_json=as_json, nothing="nothing to check")


def verify(
    topic: Annotated[str | None, typer.Argument(help="All topics where none is named.")] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every record's identity on the nodes, and count the archive.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare Postgres, nodes and archive; exit code 1 for differences, 3 if some could not be compared.

    Changes nothing; safe on a live system.
    """
    with runtime_here() as runtime:
        found = verify_stores(runtime, topic, deep=deep)
    _show(found, as_json=as_json, nothing="no topic to verify")
    if any(finding.verdict is CheckStatus.UNKNOWN for finding in found):
        raise typer.Exit(EXIT_UNKNOWN)


def _show(findings: Iterable[Finding], *, as_json: bool, nothing: str) -> None:
    found = list(findings)
    rows = ({name: str(value) for name, value in asdict(finding).items()} for finding in found)
    show_rows(rows, as_json=as_json, nothing=nothing)
    if any(finding.verdict is CheckStatus.BROKEN for finding in found):
        raise typer.Exit(1)
