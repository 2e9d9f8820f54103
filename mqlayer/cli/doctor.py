"""`doctor` and `verify`: is it well, do all stores say the same, and what to do where not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Final

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.output import JsonOption, show_rows
from mqlayer.doctor import CheckStatus, Finding, diagnose
from mqlayer.doctor.verify import verify as verify_stores
from mqlayer.postgres.database import Database

EXIT_UNKNOWN: Final = 3
"""Exit code of `verify` where nothing differs, and not everything could be compared."""


def add_to(app: typer.Typer) -> None:
    """Put the command into the application."""
    app.command()(doctor)
    app.command()(verify)


def doctor(as_json: JsonOption = False) -> None:
    """Check servers, settings, schemas and what waits, and say how to repair it; exit code 1 if something is broken.

    Changes nothing. Works on MQLAYER_DSN, MQLAYER_APP_DSN, MQLAYER_BROKER_URL and the registered nodes.
    """
    _show(diagnose(settings_here()), as_json=as_json, nothing="nothing to check")


def verify(
    topic: Annotated[str | None, typer.Argument(help="All topics where none is named.")] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every record's identity on the nodes, and count the archive.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare what Postgres, the nodes and the archive say of a topic; exit code 1 where they differ.

    Marks, counters, seals, positions, and with --deep chains. Changes nothing, and may run while everything else does.
    Exit code 3 where nothing differs, and something could not be told, such as of a node that is away.
    """
    settings = settings_here()
    with Database(settings.control_dsn()) as database, Database(settings.application_dsn()) as application:
        found = verify_stores(
            database,
            topic,
            application=application,
            prefix=settings.key_prefix,
            deep=deep,
            unsafe=settings.allow_unsafe_redis,
        )
    _show(found, as_json=as_json, nothing="no topic to verify")
    if any(finding.verdict is CheckStatus.UNKNOWN for finding in found):
        raise typer.Exit(EXIT_UNKNOWN)


def _show(findings: Iterable[Finding], *, as_json: bool, nothing: str) -> None:
    found = list(findings)
    rows = ({name: str(value) for name, value in asdict(finding).items()} for finding in found)
    show_rows(rows, as_json=as_json, nothing=nothing)
    if any(finding.verdict is CheckStatus.BROKEN for finding in found):
        raise typer.Exit(1)
