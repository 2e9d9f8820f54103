"""`dead`: dead messages and their redrive."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from mqlayer.cli.bulk import BULK
from mqlayer.cli.completion import group_names, topic_names
from mqlayer.cli.message_output import LimitOption, RawOption, ReasonOption, marked_size, show_message
from mqlayer.cli.option_rules import RuledCommand, excludes, needs, planned
from mqlayer.cli.options import GroupArgument, PlanOption, TopicArgument, YesOption, echo_plan, parse_time_option
from mqlayer.cli.output import JsonOption, echo, format_key, pluralize, show_rows
from mqlayer.cli.panels import LOOK, REPAIR
from mqlayer.cli.permissions import check_change, check_group_change
from mqlayer.cli.redelivery import BackgroundOption, KeyOption, RateOption
from mqlayer.cli.runtime import control_here, runtime_here
from mqlayer.errors import InvalidInput
from mqlayer.redelivery import (
    DeadFilter,
    DeadMessage,
    ListPage,
    count_dead,
    dead_messages,
    discard_dead,
    find_dead,
    show_dead,
    start_redrive,
)

OnlyTopic = Annotated[str | None, typer.Argument(help="Only of this topic.", autocompletion=topic_names)]
OnlyGroup = Annotated[str | None, typer.Argument(help="Only of this group.", autocompletion=group_names)]
CauseOption = Annotated[str | None, typer.Option(help="exhausted, rejected, skipped, discarded or expired.")]
ErrorOption = Annotated[str | None, typer.Option(help="A part of the reason, or of an attempt's error.")]
SinceOption = Annotated[str | None, typer.Option(help="Died then or later: a time with its zone.")]
UntilOption = Annotated[str | None, typer.Option(help="Died before: a time with its zone.")]
NamedArgument = Annotated[str, typer.Argument(metavar="MESSAGE", help="Its dead id, or its identity source:lp:seq.")]
OfTopic = Annotated[str | None, typer.Option("--topic", help="The topic, if the message is dead in several.")]
OfGroup = Annotated[str | None, typer.Option("--group", help="The group, if the message is dead in several.")]

dead = typer.Typer(no_args_is_help=True, help="Dead messages: why they died, and redrive.")


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(dead, name="dead")


@dead.command("list", rich_help_panel=LOOK)
def list_(
    topic: OnlyTopic = None,
    group: OnlyGroup = None,
    key: KeyOption = None,
    cause: CauseOption = None,
    error: ErrorOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    redriven: Annotated[bool, typer.Option("--redriven", help="Redriven ones too.")] = False,
    limit: LimitOption = 50,
    after: Annotated[int | None, typer.Option(help="Start after this dead id, the last of the page before.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List dead messages, newest death first."""
    wanted = DeadFilter(key, cause, error, parse_time_option(since), parse_time_option(until))
    with control_here() as database:
        found = dead_messages(database, wanted, topic=topic, group=group, redriven=redriven, after=after, limit=limit)
        while len(found) < limit and found.next is not None:
            rest = {"after": found.next, "limit": limit - len(found)}
            more = dead_messages(database, wanted, topic=topic, group=group, redriven=redriven, **rest)
            found = ListPage([*found, *more], more.next)
    show_rows(map(_facts if as_json else _row, found), as_json=as_json, nothing="no message is dead")
    if found.next is not None and not as_json:
        echo(f"there may be more: --after {found.next}")


@dead.command(cls=RuledCommand, rich_help_panel=LOOK)
@excludes("--raw", "--json", why="--raw writes nothing but the body")
def show(
    message: NamedArgument,
    topic: OfTopic = None,
    group: OfGroup = None,
    raw: RawOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a dead message: origin, headers, attempts, body."""
    _check_named(message, topic, group)
    with control_here() as database:
        found = show_dead(database, find_dead(database, message, topic=topic, group=group))
    show_message(found, as_json=as_json, raw=raw)


@dead.command(cls=RuledCommand, rich_help_panel=REPAIR)
@excludes(
    "--all", "--message", "--key", "--cause", "--error", "--since", "--until",
    why="say which messages: some by these options, or --all of them",
)  # fmt: skip
@planned
@needs("--rate", "--yes", why="a plan sends nothing")
@needs("--reason", "--yes", why="a plan is not kept: mqlayer bulk plan keeps one")
@needs("--background", "--yes", why="a plan is made at once")
@excludes("--background", "--json", why="the worker ends it later: mqlayer bulk show --json has the result")
def redrive(
    topic: TopicArgument,
    group: GroupArgument,
    message: Annotated[
        list[str] | None, typer.Option("--message", metavar="MESSAGE", help="One message; may be repeated.")
    ] = None,
    key: KeyOption = None,
    cause: CauseOption = None,
    error: ErrorOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    every: Annotated[bool, typer.Option("--all", help="All dead messages of the group.")] = False,
    rate: RateOption = 0.0,
    reason: Annotated[str | None, typer.Option(help="Why: it is kept in the audit rows.")] = None,
    _plan: PlanOption = False,
    yes: YesOption = False,
    background: BackgroundOption = False,
    as_json: JsonOption = False,
) -> None:
    """Send dead messages to their group again, in order per key: a bulk action."""
    with runtime_here() as runtime:
        if yes:
            check_change(runtime.control)
        named = tuple(find_dead(runtime.control, one, topic=topic, group=group) for one in message or ()) or None
        wanted = DeadFilter(key, cause, error, parse_time_option(since), parse_time_option(until), named)
        if (wanted == DeadFilter()) != every:
            raise InvalidInput("say which: --message, --key, --cause, --error, --since, --until; or --all of them")
        if not yes:
            _show_plan(*count_dead(runtime.control, topic, group, wanted), as_json=as_json)
            return
        begin = partial(start_redrive, runtime, topic, group, wanted, per_s=rate, reason=reason)
        BULK.begin(runtime.control, lambda worker: begin(worker=worker), background=background, as_json=as_json)


@dead.command(rich_help_panel=REPAIR)
def discard(message: NamedArgument, reason: ReasonOption, topic: OfTopic = None, group: OfGroup = None) -> None:
    """Discard a dead message; its body is kept."""
    _check_named(message, topic, group)
    with runtime_here() as runtime:
        check_group_change(runtime.control, topic, group)
        dead_id = find_dead(runtime.control, message, topic=topic, group=group)
        discard_dead(runtime, dead_id, reason=reason)
    echo(f"dead message {dead_id} is discarded")


def _show_plan(found: int, bodiless: int, *, as_json: bool) -> None:
    if as_json:
        show_rows([{"messages": found, "without_body": bodiless}], as_json=True, nothing="")
    else:
        echo_plan(f"{pluralize(found, 'dead message')} would be sent, but {bodiless} of them have no body")


def _check_named(message: str, topic: str | None, group: str | None) -> None:
    if message.isdecimal() and (topic, group) != (None, None):
        raise InvalidInput(f"{message} is a dead id, of one message in one group: leave --topic and --group out")


def _row(one: DeadMessage) -> dict[str, Any]:
    reason = one.reason.splitlines()[0] if one.reason else ""
    row = {
        "dead_id": one.dead_id,
        "topic": one.topic,
        "group": one.group,
        "message": str(one.identity),
        "key": format_key(one.key),
        "bytes": marked_size(one.bytes, large=one.large),
        "cause": one.cause,
        "reason": reason[:100],
        "attempts": one.attempts,
        "died_at": one.died_at,
        "by": one.actor,
    }
    return row | {"redriven_at": one.redriven_at}


def _facts(one: DeadMessage) -> dict[str, Any]:
    return {
        "dead_id": one.dead_id,
        "topic": one.topic,
        "group": one.group,
        "message": str(one.identity),
        "partition": one.partition,
        "offset": one.offset,
        "key": one.key,
        "bytes": one.bytes,
        "large": one.large,
        "cause": one.cause,
        "reason": one.reason,
        "attempts": one.attempts,
        "actor": one.actor,
        "died_at": one.died_at,
        "redriven_at": one.redriven_at,
    }
