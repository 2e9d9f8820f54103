"""`outbox`: quarantine, delayed messages, recovery."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Annotated

import typer

from mqlayer.cli.option_rules import RuledCommand, planned
from mqlayer.cli.options import PlanOption, YesOption, echo_plan
from mqlayer.cli.output import JsonOption, echo, show_rows
from mqlayer.cli.panels import CHANGE, LOOK, REPAIR
from mqlayer.cli.permissions import check_change
from mqlayer.cli.runtime import application_here, runtime_here
from mqlayer.errors import NotFound
from mqlayer.outbox import (
    adopt,
    cancel_delayed,
    discard_quarantined,
    list_delayed,
    list_quarantined,
    renew,
    retry_quarantined,
    rotate,
)
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from mqlayer.relay import recover_now

outbox = typer.Typer(
    no_args_is_help=True, help="The outbox of MQLAYER_APP_DSN: rows quarantined, delayed messages, rotation."
)
quarantine = typer.Typer(
    no_args_is_help=True, help="Rows that can never be sent: held, or passed over in best_effort topics."
)
outbox.add_typer(quarantine, name="quarantine", rich_help_panel=REPAIR)
delayed = typer.Typer(no_args_is_help=True, help="Messages that wait for their time.")
outbox.add_typer(delayed, name="delayed", rich_help_panel=LOOK)


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(outbox, name="outbox")


@quarantine.command("list", rich_help_panel=LOOK)
def list_(as_json: JsonOption = False) -> None:
    """List quarantined rows with their reasons."""
    with _application() as database:
        show_rows(
            (asdict(row) for row in list_quarantined(database)), as_json=as_json, nothing="nothing is quarantined"
        )


@quarantine.command(rich_help_panel=REPAIR)
def retry(
    topic: Annotated[str | None, typer.Argument(help="Only this topic.")] = None,
    lp: Annotated[int | None, typer.Argument(min=0, max=1023, help="Only this LP of it.")] = None,
) -> None:
    """Retry quarantined rows; skipped ones are published at the end, unrepaired ones stay."""
    with _application() as database:
        check_change(database, schema="application")
        chosen = retry_quarantined(database, topic=topic, lp=lp)
    for row in chosen:
        done = f"tried again from seq {row.seq}" if row.number is None else f"row {row.number} is published anew"
        echo(f"topic {row.topic or row.topic_id}, LP {row.lp}: {done}")
    if not chosen:
        echo("nothing is quarantined")


@quarantine.command(cls=RuledCommand, rich_help_panel=REPAIR)
@planned
def discard(
    number: Annotated[int, typer.Argument(help="The row's number, as the list has it.")],
    _plan: PlanOption = False,
    yes: YesOption = False,
) -> None:
    """Discard a skipped row: its message is lost."""
    if not yes:
        echo_plan(f"the message of row {number} would be lost")
        return
    with _application() as database:
        check_change(database, schema="application")
        discard_quarantined(database, number)
    echo(f"row {number} is discarded")


@delayed.command("list", rich_help_panel=LOOK)
def list_delayed_(
    topic: Annotated[str | None, typer.Argument(help="Only this topic.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at the most.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List delayed messages, earliest first."""
    with _application() as database:
        found = list_delayed(database, topic=topic, limit=limit)
    show_rows((asdict(row) for row in found), as_json=as_json, nothing="nothing is delayed")


@delayed.command(rich_help_panel=CHANGE)
def cancel(delayed_id: Annotated[int, typer.Argument(help="Its number, as publishing returned it.")]) -> None:
    """Cancel a delayed message."""
    with _application() as database, database.connection() as connection:
        gone = cancel_delayed(connection, delayed_id)
    if not gone:
        raise NotFound("delayed message", delayed_id, "it was published or cancelled before")
    echo(f"{delayed_id} is cancelled")


@outbox.command("rotate", rich_help_panel=CHANGE)
def rotate_() -> None:
    """Empty old time slots whose rows are all relayed."""
    with _application() as database:
        check_change(database, Right.WORK, schema="application")
        for slot, answer in rotate(database).items():
            echo(f"slot {slot}: {answer}")


@outbox.command("recover", rich_help_panel=REPAIR)
def recover_(
    unproven: Annotated[
        bool, typer.Option("--unproven", help="Go on without nodes that are away: their messages are sent again.")
    ] = False,
    anew: Annotated[
        bool, typer.Option("--anew", help="Say that the outbox did not move to another server, though nodes report it.")
    ] = False,
) -> None:
    """Recover an outbox whose Postgres lost commits, as relays do while all nodes answer."""
    with runtime_here() as runtime:
        check_change(runtime.outbox, Right.RELAY, Right.WORK, schema="application")
        recovered = recover_now(runtime, unproven=unproven, anew=anew)
    if recovered is None:
        echo("nothing to do: the outbox is on the timeline that its relays know")
        return
    echo(f"the next relay opens a new source; {recovered.waiting} messages wait for it")
    if recovered.count:
        echo(f"{recovered.count} messages in Redis are in no commit, or can't be proven: see the audit")
    if recovered.missing:
        echo(f"{recovered.missing_count} messages that nodes lost are not in the outbox any more; their LPs wait:")
        echo("mqlayer outbox quarantine list names these once a relay runs; see the page 'Handle a Postgres fail-over'")


@outbox.command("adopt", cls=RuledCommand, rich_help_panel=REPAIR)
@planned
def adopt_(_plan: PlanOption = False, yes: YesOption = False) -> None:
    """Let a restored or moved database replace its original; unconfirmed messages are repeated."""
    if not yes:
        echo_plan("this database would take the place of its original, which has to be gone for good")
        return
    with _application() as database:
        check_change(database, schema="application")
        echo(f"the next relay opens a new source; {adopt(database)} messages wait for it")


@outbox.command("renew", cls=RuledCommand, rich_help_panel=REPAIR)
@planned
def renew_(_plan: PlanOption = False, yes: YesOption = False) -> None:
    """Give a copy of a database a new identity and an empty outbox."""
    if not yes:
        echo_plan("all messages of this copy's outbox would be removed")
        return
    with _application() as database:
        check_change(database, schema="application")
        renew(database)
    echo("the outbox is empty, with an identity of its own")


def _application() -> AbstractContextManager[Database]:
    return application_here()
