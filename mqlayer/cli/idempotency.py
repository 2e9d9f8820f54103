"""`inbox` and `versions`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from mqlayer.cli.message_output import LimitOption
from mqlayer.cli.option_rules import RuledCommand, excludes, planned
from mqlayer.cli.options import GroupArgument, PlanOption, TopicArgument, YesOption, echo_plan
from mqlayer.cli.output import JsonOption, echo, format_key, pluralize, show_rows
from mqlayer.cli.panels import LOOK, REPAIR
from mqlayer.cli.permissions import check_group_change
from mqlayer.cli.runtime import application_here, control_here, runtime_here
from mqlayer.domain.names import parse_identity
from mqlayer.errors import InvalidInput
from mqlayer.groups import find_group
from mqlayer.idempotency import (
    InboxStats,
    WaitingEntity,
    find_effect,
    held_versions,
    inbox_stats,
    set_version,
    version_gaps,
)
from mqlayer.inspect import group_facts

NameArgument = Annotated[str, typer.Argument(help="The name that the program gave its Versions.")]
EntityArgument = Annotated[str, typer.Argument(help="The entity, as the program names it.")]
WhyOption = Annotated[str, typer.Option("--reason", help="Why: it is kept in the audit row.")]

inbox = typer.Typer(no_args_is_help=True, help="The inbox of MQLAYER_APP_DSN: messages that have their effects.")
versions = typer.Typer(no_args_is_help=True, help="Versions of entities: held events and gaps.")


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(inbox, name="inbox")
    app.add_typer(versions, name="versions")


@inbox.command(rich_help_panel=LOOK)
def stats(as_json: JsonOption = False) -> None:
    """Count inbox rows per group, up to a million."""
    with control_here() as control, application_here() as application:
        names = {group.group_id: (group.topic, group.name) for group in group_facts(control)}
        found = inbox_stats(application)
    rows = (_stats(row, names.get(row.group_id, ("", ""))) for row in found)
    show_rows(rows, as_json=as_json, nothing="the inbox is empty", by=2)


def _stats(row: InboxStats, names: tuple[str, str]) -> dict[str, Any]:
    return {"topic": names[0], "group": names[1], **asdict(row)}


@inbox.command(cls=RuledCommand, rich_help_panel=LOOK)
@excludes("MESSAGE", "--name", why="an effect is noted under one of them")
def show(
    topic: TopicArgument,
    group: GroupArgument,
    message: Annotated[str | None, typer.Argument(metavar="SOURCE:LP:SEQ", help="The message's identity.")] = None,
    name: Annotated[str | None, typer.Option(help="In place of it: a name that the handler gave.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show whether a message, or a name, has its effect."""
    if (message is None) == (name is None):
        raise InvalidInput("say either a message's identity, or --name")
    id_ = f"={name}" if message is None else str(parse_identity(message))
    with control_here() as control, application_here() as application:
        found = find_effect(application, find_group(control, topic, group).group_id, id_)
    rows = [] if found is None else [asdict(found)]
    show_rows(rows, as_json=as_json, nothing="the inbox has no effect of it, or forgot it after the horizon")


@versions.command(rich_help_panel=LOOK)
def gaps(
    name: Annotated[str | None, typer.Argument(help="Only of these Versions.")] = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
) -> None:
    """List entities that wait for a version, longest wait first."""
    with application_here() as application:
        found = version_gaps(application, name, limit=limit)
    show_rows(map(asdict if as_json else _gap, found), as_json=as_json, nothing="no version is missing")


def _gap(gap: WaitingEntity) -> dict[str, Any]:
    return {
        "name": gap.name,
        "entity": format_key(gap.entity),
        "missing": gap.missing,
        "for_s": gap.missing_s,
        "held": gap.held,
        "from": gap.first_held,
        "bytes": gap.held_bytes,
        "state": "released" if gap.released else "overdue" if gap.overdue else "waiting",
    }


@versions.command(rich_help_panel=LOOK)
def held(name: NameArgument, entity: EntityArgument, as_json: JsonOption = False) -> None:
    """List an entity's held versions, without bodies."""
    with application_here() as application:
        found = held_versions(application, name, entity)
    show_rows(map(asdict, found), as_json=as_json, nothing="no event of it is held")


@versions.command("set", cls=RuledCommand, rich_help_panel=REPAIR)
@planned
def set_(
    name: NameArgument,
    entity: EntityArgument,
    version: Annotated[int, typer.Argument(min=0, help="The last version that counts as applied.")],
    reason: WhyOption,
    drop_held: Annotated[bool, typer.Option("--drop-held", help="Also drop its held events.")] = False,
    _plan: PlanOption = False,
    yes: YesOption = False,
) -> None:
    """Set an entity's applied version; drops held ones up to it."""
    if not yes:
        count = pluralize(_held(name, entity, None if drop_held else version), "held event")
        echo_plan(f"{format_key(entity)} would go on with {version + 1}, and {count} be dropped")
        return
    dropped = _set(name, entity, version, reason, drop_held=drop_held)
    echo(f"{format_key(entity)} goes on with {version + 1}; {pluralize(dropped, 'held event')} dropped")


@versions.command(cls=RuledCommand, rich_help_panel=REPAIR)
@planned
def forget(
    name: NameArgument, entity: EntityArgument, reason: WhyOption, _plan: PlanOption = False, yes: YesOption = False
) -> None:
    """Forget an entity and its held versions."""
    if not yes:
        count = pluralize(_held(name, entity, None), "held event")
        echo_plan(f"{format_key(entity)} would be forgotten, and {count} be dropped")
        return
    dropped = _set(name, entity, None, reason)
    echo(f"{format_key(entity)} is forgotten; {pluralize(dropped, 'held event')} dropped")


def _held(name: str, entity: str, upto: int | None) -> int:
    with application_here() as application:
        found = held_versions(application, name, entity)
    return sum(upto is None or one.version <= upto for one in found)


def _set(name: str, entity: str, version: int | None, reason: str, *, drop_held: bool = False) -> int:
    with runtime_here() as runtime:
        check_group_change(runtime.control)
        return set_version(runtime, name=name, entity=entity, version=version, drop_held=drop_held, reason=reason)
