"""`parked`: keys whose messages wait in Postgres."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from mqlayer.cli.completion import group_names, topic_names
from mqlayer.cli.message_output import (
    LimitOption,
    MessageOption,
    RawOption,
    ReasonOption,
    marked_size,
    parse_identity_option,
    show_message,
)
from mqlayer.cli.option_rules import RuledCommand, excludes, needs
from mqlayer.cli.options import GroupArgument, TopicArgument, parse_time_option
from mqlayer.cli.output import JsonOption, echo, format_age, format_key, pluralize, show_facts, show_rows
from mqlayer.cli.panels import LOOK, REPAIR
from mqlayer.cli.permissions import check_change
from mqlayer.cli.rows import failure_facts, failure_row
from mqlayer.cli.runtime import control_here, runtime_here
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.redelivery import (
    ListPage,
    ParkedFilter,
    ParkedKey,
    ParkedMessage,
    discard_parked,
    failure_counts,
    parked_keys,
    parked_messages,
    release_all,
    release_parked,
    show_parked,
)

KeyArgument = Annotated[str | None, typer.Argument(help="The message key; or name a message.")]

parked = typer.Typer(no_args_is_help=True, help="Parked keys: what waits outside of the stream, and why.")


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(parked, name="parked")


@parked.command("list", rich_help_panel=LOOK)
def list_(
    topic: Annotated[str | None, typer.Argument(help="Only of this topic.", autocompletion=topic_names)] = None,
    group: Annotated[str | None, typer.Argument(help="Only of this group.", autocompletion=group_names)] = None,
    key: Annotated[str | None, typer.Option(help="Only this message key.")] = None,
    cause: Annotated[str | None, typer.Option(help="retry, exhausted, rejected, paused, redriven or replayed.")] = None,
    error: Annotated[str | None, typer.Option(help="A part of a failed attempt's error.")] = None,
    since: Annotated[str | None, typer.Option(help="Parked then or later: a time with its zone.")] = None,
    until: Annotated[str | None, typer.Option(help="Parked before: a time with its zone.")] = None,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only those that wait for an operator.")] = False,
    limit: LimitOption = 50,
    after: Annotated[str | None, typer.Option(help="Start after this place, which the page before named.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List parked keys: messages, cause, time, next attempt."""
    wanted = ParkedFilter(topic, group, key, cause, error, parse_time_option(since), parse_time_option(until), waiting)
    with control_here() as database:
        found = parked_keys(database, wanted, after=after, limit=limit)
        while len(found) < limit and found.next is not None:
            more = parked_keys(database, wanted, after=found.next, limit=limit - len(found))
            found = ListPage([*found, *more], more.next)
    show_rows(map(_facts if as_json else _row, found), as_json=as_json, nothing="nothing is parked", by=3)
    if found.next is not None and not as_json:
        echo(f"there may be more: --after {found.next}")


@parked.command(rich_help_panel=LOOK)
def stats(
    topic: Annotated[str | None, typer.Argument(help="Only of this topic.", autocompletion=topic_names)] = None,
    group: Annotated[str | None, typer.Argument(help="Only of this group.", autocompletion=group_names)] = None,
    as_json: JsonOption = False,
) -> None:
    """Count parked and dead messages per group, with lifetime totals."""
    with control_here() as database:
        found = failure_counts(database, topic, group)
    show_rows(
        map(failure_facts if as_json else failure_row, found), as_json=as_json, nothing="there is no such group", by=2
    )


@parked.command(cls=RuledCommand, rich_help_panel=LOOK)
@excludes("KEY", "--message", why="a key is shown with what waits in it, a message by itself")
@excludes("--message", "--limit", why="a message is one")
@needs("--raw", "--message", why="it writes the body of one message")
@excludes("--raw", "--json", why="--raw writes nothing but the body")
def show(
    topic: TopicArgument,
    group: GroupArgument,
    key: KeyArgument = None,
    message: MessageOption = None,
    limit: LimitOption = 50,
    raw: RawOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a parked key's messages, or one with body and attempts."""
    with control_here() as database:
        if message is not None:
            found = show_parked(database, topic, group, parse_identity_option(message))
            show_message(found, as_json=as_json, raw=raw)
            return
        if key is None:
            raise InvalidInput("name a key, or a message: --message SOURCE:LP:SEQ")
        keys = parked_keys(database, ParkedFilter(topic, group, key), limit=1)
        if not keys:
            raise NotFound("parked key", f"{topic}/{group}/{key}", f"see those that are: mqlayer parked list {topic}")
        line = parked_messages(database, keys[0], limit=limit)
    rows = [
        {
            "message": str(one.identity),
            "partition": one.partition,
            "offset": one.offset,
            **({"at_ms": one.at_ms} if as_json else {"published_at": datetime.fromtimestamp(one.at_ms / 1000, UTC)}),
            **_size(one, as_json=as_json),
            "attempts": one.attempts,
            "redriven": one.redriven,
        }
        for one in line
    ]
    if as_json:
        show_rows([_facts(keys[0]) | {"line": rows}], as_json=True, nothing="")
        return
    show_facts(_row(keys[0]))
    echo()
    show_rows(rows, as_json=False, nothing="nothing waits in it: its owner ends the parking by itself")
    if keys[0].messages > len(rows):
        echo(f"and {pluralize(keys[0].messages - len(rows), 'message')} more")


def _size(one: ParkedMessage, *, as_json: bool) -> dict[str, Any]:
    return {"bytes": one.bytes, "large": one.large} if as_json else {"bytes": marked_size(one.bytes, large=one.large)}


@parked.command(cls=RuledCommand, rich_help_panel=REPAIR)
@excludes("KEY", "--message", "--all", why="a key, the key of a message, or all keys")
@excludes("--message", "--all", why="a key, the key of a message, or all keys")
@needs("--cause", "--all", why="it chooses among all keys")
def release(
    topic: TopicArgument,
    group: GroupArgument,
    key: KeyArgument = None,
    message: MessageOption = None,
    every: Annotated[bool, typer.Option("--all", help="All parked keys of the group.")] = False,
    cause: Annotated[str | None, typer.Option(help="With --all: only those of this cause.")] = None,
) -> None:
    """Try parked keys at once, with all attempts again."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        if every:
            count = release_all(runtime, topic, group, cause=cause)
            echo(f"{pluralize(count, 'parked key')} of group {group} of topic {topic} will be tried now")
            return
        release_parked(runtime, topic, group, key=key, message=parse_identity_option(message))
    echo(f"{_named(key, message)} will be tried now")


@parked.command(cls=RuledCommand, rich_help_panel=REPAIR)
@excludes("KEY", "--message", why="a message names the key that it waits in")
def discard(
    topic: TopicArgument,
    group: GroupArgument,
    reason: ReasonOption,
    key: KeyArgument = None,
    message: MessageOption = None,
    head: Annotated[bool, typer.Option("--head", help="Only the message that the key waits for.")] = False,
) -> None:
    """Move a parked key's messages to the dead ones."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        count = discard_parked(
            runtime, topic, group, key=key, message=parse_identity_option(message), head=head, reason=reason
        )
    echo(f"{pluralize(count, 'message')} of {_named(key, message)} discarded: see mqlayer dead list {topic} {group}")


def _named(key: str | None, message: str | None) -> str:
    return f"the key of message {message}" if key is None else f"key {format_key(key)}"


def _row(one: ParkedKey) -> dict[str, Any]:
    return {
        "topic": one.topic,
        "group": one.group,
        "key": format_key(one.key),
        "messages": one.messages,
        "bytes": one.bytes,
        "head": one.head and str(one.head),
        "cause": one.cause,
        "attempts": one.attempts,
        "since": one.parked_at,
        "next_attempt": _due(one),
    }


def _due(one: ParkedKey) -> str:
    if one.due_in_s is None:
        return "when released"
    return f"in {format_age(one.due_in_s)}" if one.due_in_s > 0 else "now"


def _facts(one: ParkedKey) -> dict[str, Any]:
    return {
        "topic": one.topic,
        "group": one.group,
        "lp": one.lp,
        "key": one.key,
        "alone": one.alone,
        "messages": one.messages,
        "bytes": one.bytes,
        "head": one.head and str(one.head),
        "cause": one.cause,
        "attempts": one.attempts,
        "parked_at": one.parked_at,
        "due_at": one.due_at,
        "due_in_s": one.due_in_s,
        "cursor": one.cursor,
    }
