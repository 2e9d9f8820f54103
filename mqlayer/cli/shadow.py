"""`analytics shadow`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqlayer.cli.addresses import settings_here, use_stack_here
from mqlayer.cli.analytics import SnapshotOption
from mqlayer.cli.options import TopicArgument
from mqlayer.cli.output import JsonOption, echo, format_key, pluralize, show_rows
from mqlayer.cli.panels import LOOK
from mqlayer.postgres.database import Database

if TYPE_CHECKING:
    from mqlayer.testing.shadow_run import ShadowResult


def add_shadow(analytics: typer.Typer) -> None:
    """Add the command."""
    analytics.command("shadow", rich_help_panel=LOOK)(shadow)


def shadow(
    topic: TopicArgument,
    snapshot: SnapshotOption,
    handler: Annotated[str, typer.Option(metavar="MODULE:NAME", help="The new handler.")],
    against: Annotated[str, typer.Option(metavar="MODULE:NAME", help="The old handler.")],
    table: Annotated[list[str], typer.Option(help="A table that they write; may be repeated.")],
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="TABLE.COLUMN", help="Do not compare it; may be repeated.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Only this key.")] = None,
    trust_names: Annotated[
        bool, typer.Option("--trust-names", help="They name no schema, so their role may have rights on the tables.")
    ] = False,
    allow_unfenced: Annotated[
        bool, typer.Option("--allow-unfenced", help="Go on where a handler gives no connection to ctx.fence.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a new handler beside the old one over a snapshot; exit code 1 if their effects differ.

    Effects go to scratch schemas that are dropped. Requests, mails and files of handlers have their effects.
    """
    use_stack_here()
    from mqlayer.consuming.api.consumer_loader import load_consumer
    from mqlayer.testing.scratch_schema import shadow_tables
    from mqlayer.testing.shadow_run import ShadowOptions, ShadowRun, check_handler

    new = check_handler(handler, load_consumer(handler, topic))
    old = check_handler(against, load_consumer(against, topic))
    settings = settings_here()
    name = "mqlayer shadow"
    with (
        Database(settings.control_dsn(), application=name) as control,
        Database(settings.application_dsn(), application=name) as application,
    ):
        run = ShadowRun(control, snapshot, topic, ShadowOptions(trust_names, allow_unfenced, key))
        with application.connection() as connection:
            tables = shadow_tables(connection, table, ignore or ())
            found = run.compare(old, new, connection, tables)
    _show(found, as_json=as_json)
    if found.differing:
        raise typer.Exit(1)


def _show(found: ShadowResult, *, as_json: bool) -> None:
    if as_json:
        rows = [_row(one, key=one.key) for one in found.differences]
        show_rows([{**asdict(found), "differences": rows}], as_json=True, nothing="")
        return
    echo(f"{pluralize(found.messages, 'message')} of {pluralize(found.keys, 'key')}; "
         f"failed: {found.failed_old:,} in the old handler, {found.failed_new:,} in the new one")  # fmt: skip
    if found.left_out:
        echo(f"{pluralize(found.left_out, 'message')} with a large body left out")
    show_rows(
        [_row(one, key=None if one.key is None else format_key(one.key)) for one in found.differences],
        as_json=False,
        nothing="no key differs",
    )
    if found.differing > len(found.differences):
        echo(f"{found.differing - len(found.differences):,} more keys differ")


def _row(one: Any, *, key: str | None) -> dict[str, Any]:
    return {
        "key": key,
        "messages": one.messages,
        "first": one.first,
        "old": one.old,
        "new": one.new,
        "tables": "; ".join(f"{t.table}: {t.only_old} rows of the old, {t.only_new} of the new" for t in one.tables),
    }
