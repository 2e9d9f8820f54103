"""`grant`, `revoke`, `grants`: rights of Postgres roles."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer
from psycopg.sql import Composed, Identifier

from mqlayer.cli.addresses import settings_here, settings_of_owner
from mqlayer.cli.option_rules import RuledCommand, excludes
from mqlayer.cli.output import JsonOption, echo, show_rows
from mqlayer.errors import InvalidInput
from mqlayer.postgres import rights
from mqlayer.postgres.rights import Right, SchemaName
from mqlayer.settings import Settings

Topics = Annotated[list[str], typer.Option("--topic", metavar="TOPIC", help="publish: only to this topic; repeat it.")]
Groups = Annotated[
    list[str], typer.Option("--group", metavar="TOPIC/GROUP", help="consume: only this group; repeat it.")
]
AsSql = Annotated[bool, typer.Option("--sql", help="Print the SQL for a database administrator; run nothing.")]
SCHEMAS: Final[tuple[SchemaName, ...]] = ("control", "application")
SEEING: Final = (Right.VIEW, Right.WORK, Right.OPERATE)
"""Rights of programs that look for open transactions."""


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.command(cls=RuledCommand)(grant)
    app.command()(revoke)
    app.command()(grants)


@excludes("--password-file", "--sql", why="printed SQL holds no password: let the administrator make the login")
def grant(
    right: Right,
    role: Annotated[str, typer.Argument(help="A Postgres role.")],
    topics: Topics = [],  # noqa: B006
    groups: Groups = [],  # noqa: B006
    password_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Make the role where it is not there; let it log in with this password."),
    ] = None,
    sql: AsSql = False,
) -> None:
    """Grant a role a right, in both schemas."""
    scopes = rights.scopes_of(right, topics, groups)
    if sql:
        _print({schema: rights.grant_statements(schema, role, right, scopes) for schema in SCHEMAS})
        return
    settings = settings_of_owner()
    for schema in SCHEMAS:
        if password_file is not None:
            rights.ensure_login(_dsn(settings, schema), role, _password(password_file))
        rights.grant(_dsn(settings, schema), schema, role, right, scopes)
    echo(f"{role} may {_format(right, scopes)}")
    if right in SEEING:
        name = Identifier(role).as_string(None)
        echo(f"to see open transactions of other roles, it needs besides: GRANT pg_read_all_stats TO {name}", err=True)


def revoke(
    right: Right,
    role: Annotated[str, typer.Argument(help="A Postgres role.")],
    topics: Topics = [],  # noqa: B006
    groups: Groups = [],  # noqa: B006
    sql: AsSql = False,
) -> None:
    """Revoke a right, or only some topics or groups of it."""
    scopes = rights.scopes_of(right, topics, groups)
    if sql:
        _print({schema: rights.revoke_statements(schema, role, right, scopes) for schema in SCHEMAS})
        return
    settings = settings_of_owner()
    for schema in SCHEMAS:
        rights.revoke(_dsn(settings, schema), schema, role, right, scopes)
    echo(f"{role} may no longer {_format(right, scopes)}")


def grants(as_json: JsonOption = False) -> None:
    """List granted rights: role, right, scope."""
    settings = settings_here()
    found = {one for schema in SCHEMAS for one in rights.grants(_dsn(settings, schema), schema)}
    rows = ({"role": one.role, "right": one.right, "scope": one.scope or "all"} for one in sorted(found, key=str))
    show_rows(rows, as_json=as_json, nothing="no right is granted: mqlayer grant RIGHT ROLE")


def _format(right: Right, scopes: tuple[str, ...]) -> str:
    return " ".join((right, ", ".join(scope for scope in scopes if scope))).strip()


def _password(path: Path) -> str:
    try:
        password = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} can't be read: {type(error).__name__}") from error
    if not password:
        raise InvalidInput(f"{path} is empty: write the role's password into it")
    return password


def _print(statements: Mapping[SchemaName, list[Composed]]) -> None:
    for schema, of_schema in statements.items():
        echo(f"-- In the database of the {schema} schema:\nBEGIN;\nSET LOCAL client_encoding = 'UTF8';", lines=True)
        # A superuser runs it, whose path others may have put functions and operators on.
        echo("SET LOCAL search_path = pg_catalog, pg_temp;", lines=True)
        for statement in of_schema:
            echo(f"{statement.as_string(None)};", lines=True)
        echo("COMMIT;")


def _dsn(settings: Settings, schema: SchemaName) -> str:
    return settings.control_dsn() if schema == "control" else settings.application_dsn()
