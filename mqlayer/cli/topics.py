"""`topic`: create, list, show, set, schema, pause, resume, delete."""

from __future__ import annotations

import re
from dataclasses import asdict, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mqlayer.archive import set_keep_until_exported, set_retention
from mqlayer.cli.curves import HoursOption, PointsOption, show_history
from mqlayer.cli.option_rules import RuledCommand, needs, planned
from mqlayer.cli.options import PlanOption, TopicArgument, YesOption, echo_plan
from mqlayer.cli.output import JsonOption, Size, echo, format_age, format_size, pluralize, show_facts, show_rows
from mqlayer.cli.panels import CHANGE, LOOK, START
from mqlayer.cli.pauses import WaitOption, print_running
from mqlayer.cli.permissions import check_change
from mqlayer.cli.rows import group_row, group_text_row
from mqlayer.cli.runtime import control_here, runtime_here
from mqlayer.cli.schemas import schema
from mqlayer.domain.names import BODY_LIMIT, DEFAULT_BODY_LIMIT
from mqlayer.domain.retention import Retention
from mqlayer.domain.routing import LP_COUNT
from mqlayer.errors import InvalidInput
from mqlayer.groups.pauses import pause_topic, resume_topic, wait_paused
from mqlayer.inspect import TopicPartition, TopicStatus, topic_status
from mqlayer.topics import (
    TopicSummary,
    create_topic,
    list_topics,
    refuse_class,
    set_archived,
    set_durability,
    set_home_zone,
    set_limits,
    set_schema_mode,
    set_stream_retention,
)

if TYPE_CHECKING:
    from mqlayer.maintenance.topic_deletion import TopicDeletionPlan

topics = typer.Typer(no_args_is_help=True, help="Topics: create, list, set, schema.")
topics.command(cls=RuledCommand, rich_help_panel=CHANGE)(schema)

FOR_EVER: Final = "forever"
_AGE: Final = re.compile(r"(\d{1,6})([dw])")
_DURATION: Final = re.compile(r"(\d{1,9})([smhdw])")


class SchemaModeOption(StrEnum):
    """Which readers a topic's next schema may not break."""

    BACKWARD = "backward"
    FORWARD = "forward"
    FULL = "full"
    NONE = "none"


class UnsettledOption(StrEnum):
    """What limits of a topic's streams do to unsettled records."""

    KEEP = "keep"
    DROP = "drop"


class ExpiredOption(StrEnum):
    """What messages become whose time to live ended."""

    SETTLE = "settle"
    DEAD = "dead"


class DropDaysOption(StrEnum):
    """Days that retention drops."""

    EXPORTED = "exported"
    ANY = "any"


MessageTtlOption = Annotated[
    str | None,
    typer.Option(
        "--message-ttl",
        metavar="AGE",
        help="How old a message may be when a handler gets it: such as 90s, 12h, 7d, or none for no end.",
    ),
]
ExpiredMessagesOption = Annotated[
    ExpiredOption | None,
    typer.Option("--expired", help="settle: older messages are settled, and counted; dead: they become dead messages."),
]
RetainAgeOption = Annotated[
    str | None,
    typer.Option(
        "--retain-age", metavar="AGE", help="How long streams keep records: such as 90s, 12h, 7d, or none for no limit."
    ),
]
RetainBytesOption = Annotated[
    int | None, typer.Option("--retain-bytes", min=0, help="Bytes that a partition keeps in Redis; 0 for no limit.")
]
RetainMessagesOption = Annotated[
    int | None, typer.Option("--retain-messages", min=0, help="Records that a partition keeps; 0 for no limit.")
]
RetainUnsettledOption = Annotated[
    UnsettledOption | None,
    typer.Option("--retain-unsettled", help="keep: limits are for settled records; drop: for all."),
]


class DurabilityOption(StrEnum):
    """Where a message must be before it counts as stored."""

    NODE = "node"
    DISK = "disk"
    REPLICA = "replica"
    QUORUM = "quorum"


DurabilityChoice = Annotated[
    DurabilityOption | None, typer.Option("--durability", help="Where a message must be before it counts as stored.")
]


class StrategyOption(StrEnum):
    """A topic's strategy."""

    STRICT = "strict"
    BEST_EFFORT = "best_effort"


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(topics, name="topic")


@topics.command(rich_help_panel=START)
def create(
    name: Annotated[str, typer.Argument(help="a-z first, then a-z 0-9 _ . -")],
    partitions: Annotated[
        int | None, typer.Option(min=1, max=LP_COUNT, help="Spread over all nodes; 8 where not said.")
    ] = None,
    strategy: Annotated[
        StrategyOption, typer.Option(help="strict keeps order always; best_effort keeps it where that costs nothing.")
    ] = (StrategyOption.STRICT),
    body_limit: Annotated[int, typer.Option(min=1, max=BODY_LIMIT, help="Bytes.")] = DEFAULT_BODY_LIMIT,
    backlog_limit: Annotated[int, typer.Option(min=0, help="Messages per partition; 0 for no limit.")] = 0,
    archived: Annotated[bool, typer.Option("--archived", help="Keep every record in the archive.")] = False,
    retain_age: RetainAgeOption = None,
    retain_bytes: RetainBytesOption = None,
    retain_messages: RetainMessagesOption = None,
    retain_unsettled: RetainUnsettledOption = None,
    message_ttl: MessageTtlOption = None,
    expired: ExpiredMessagesOption = None,
    home_zone: Annotated[str, typer.Option(help="Its partitions prefer nodes of this zone.")] = "",
    durability: DurabilityChoice = None,
) -> None:
    """Create a topic with its partitions and first route. Repeatable."""
    limits = _stream_limits(retain_age, retain_bytes, retain_messages, retain_unsettled)
    limits |= _life_limits(message_ttl, expired)
    Retention(**limits).check()
    with runtime_here() as runtime:
        check_change(runtime.control)
        if durability is not None:
            refuse_class(runtime, durability.value)
        route = create_topic(
            runtime,
            name,
            partitions=partitions,
            strategy=strategy.value,
            body_limit=body_limit,
            backlog_limit=backlog_limit,
            archived=archived,
            home_zone=home_zone,
        )
        if durability is not None:
            set_durability(runtime, name, durability.value)
        if limits:
            set_stream_retention(runtime, name, **limits)
    echo(f"{name} has {len(route.ranges)} partitions, route version {route.version}")


@topics.command("set", rich_help_panel=CHANGE)
def set_(
    name: TopicArgument,
    archived: Annotated[
        bool | None, typer.Option("--archived/--not-archived", help="Whether its records are archived.")
    ] = None,
    body_limit: Annotated[int | None, typer.Option(min=1, max=BODY_LIMIT, help="Bytes.")] = None,
    backlog_limit: Annotated[int | None, typer.Option(min=0, help="Messages per partition; 0 for no limit.")] = None,
    retention: Annotated[
        str | None, typer.Option(metavar="AGE", help="How long its archive is kept: such as 30d, 12w, or forever.")
    ] = None,
    drop_days: Annotated[
        DropDaysOption | None, typer.Option(help="Which days retention drops: exported and verified ones, or any.")
    ] = None,
    schema_mode: Annotated[
        SchemaModeOption | None, typer.Option(help="Which readers the next schema of its bodies may not break.")
    ] = None,
    retain_age: RetainAgeOption = None,
    retain_bytes: RetainBytesOption = None,
    retain_messages: RetainMessagesOption = None,
    retain_unsettled: RetainUnsettledOption = None,
    message_ttl: MessageTtlOption = None,
    expired: ExpiredMessagesOption = None,
    home_zone: Annotated[str | None, typer.Option(help="New partitions prefer nodes of this zone; '' for any.")] = None,
    durability: DurabilityChoice = None,
) -> None:
    """Change a topic's limits, times to live, archiving, archive retention, schema mode, home zone or
    durability.

    The archive never gets messages published while archiving is off.
    """
    limits = {"body_limit": body_limit, "backlog_limit": backlog_limit}
    streams = _stream_limits(retain_age, retain_bytes, retain_messages, retain_unsettled)
    life = _life_limits(message_ttl, expired)
    if not streams | life and (
        archived, retention, drop_days, schema_mode, body_limit, backlog_limit, home_zone, durability,
    ) == (None,) * 8:  # fmt: skip
        raise InvalidInput(
            "say what to set: --backlog-limit, --body-limit, --archived, --not-archived, --retention AGE, "
            "--drop-days DAYS, "
            "--retain-age AGE, --retain-bytes, --retain-messages, --retain-unsettled, --message-ttl AGE, --expired, "
            "--schema-mode MODE, --home-zone ZONE, or --durability CLASS"
        )
    if retention is not None and retention != FOR_EVER:
        # Before anything is changed.
        _days(retention)
    if any(limit is not None for limit in limits.values()):
        _set_limits(name, limits)
    if schema_mode is not None:
        _set_schema_mode(name, schema_mode)
    _set_retention(name, retention, drop_days)
    if streams:
        _set_stream_limits(name, streams)
    if life:
        _set_life_limits(name, life)
    with runtime_here() as runtime:
        check_change(runtime.control)
        if durability is not None:
            changed = set_durability(runtime, name, durability.value)
            echo(f"topic {name} has durability {durability}{'' if changed else ', as before'}")
        if home_zone is not None:
            changed = set_home_zone(runtime, name, home_zone)
            echo(f"topic {name} is at home in {home_zone or 'no zone'}{'' if changed else ', as before'}")
        if archived is not None:
            changed = set_archived(runtime, name, archived=archived)
            is_now = "archived" if archived else "not archived"
            echo(f"topic {name} is {is_now}{'' if changed else ', as before'}")


def _set_schema_mode(name: str, mode: SchemaModeOption) -> None:
    with runtime_here() as runtime:
        check_change(runtime.control)
        changed = set_schema_mode(runtime, name, mode.value)
    echo(f"the schema of topic {name} has mode {mode}{'' if changed else ', as before'}")


def _set_retention(name: str, retention: str | None, drop_days: DropDaysOption | None) -> None:
    if retention is None and drop_days is None:
        return
    with runtime_here() as runtime:
        check_change(runtime.control)
        if retention is not None:
            days = None if retention == FOR_EVER else _days(retention)
            changed = set_retention(runtime, name, days=days)
            kept = "for ever" if days is None else f"for {days} days"
            echo(f"the archive of topic {name} is kept {kept}{'' if changed else ', as before'}")
        if drop_days is not None:
            keep = drop_days is DropDaysOption.EXPORTED
            changed = set_keep_until_exported(runtime, name, keep=keep)
            waits = "waits for its export" if keep else "does not wait for an export"
            echo(f"retention of topic {name} {waits}{'' if changed else ', as before'}")


def _stream_limits(
    age: str | None, size: int | None, messages: int | None, unsettled: UnsettledOption | None
) -> dict[str, Any]:
    said = {
        "retain_s": None if age is None else _seconds(age),
        "retain_bytes": size,
        "retain_messages": messages,
        "retain_unsettled": None if unsettled is None else unsettled.value,
    }
    return {name: value for name, value in said.items() if value is not None}


def _life_limits(ttl: str | None, expired: ExpiredOption | None) -> dict[str, Any]:
    said = {
        "message_ttl_s": None if ttl is None else _seconds(ttl),
        "expired": None if expired is None else expired.value,
    }
    return {name: value for name, value in said.items() if value is not None}


def _set_life_limits(name: str, limits: dict[str, Any]) -> None:
    with runtime_here() as runtime:
        check_change(runtime.control)
        changed = set_stream_retention(runtime, name, **limits)
        status = next(one for one in list_topics(runtime.control) if one.name == name)
    echo(f"messages of topic {name} live {_lived(status.retention)}{'' if changed else ', as before'}")


def _set_stream_limits(name: str, limits: dict[str, Any]) -> None:
    with runtime_here() as runtime:
        check_change(runtime.control)
        changed = set_stream_retention(runtime, name, **limits)
        status = next(one for one in list_topics(runtime.control) if one.name == name)
    echo(f"streams of topic {name} keep {_retained(status.retention)}{'' if changed else ', as before'}")


def _seconds(text: str) -> int:
    if text == "none":
        return 0
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidInput(f"{text!r} is no age: say for example 90s, 30m, 12h, 7d, 4w, or none")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}[match[2]]


def _set_limits(name: str, limits: dict[str, int | None]) -> None:
    with runtime_here() as runtime:
        check_change(runtime.control)
        changed = set_limits(runtime, name, **limits)
    said = ", ".join(f"{limit.replace('_', ' ')} {value}" for limit, value in limits.items() if value is not None)
    echo(f"topic {name} has {said}{'' if changed else ', as before'}")


def _days(text: str) -> int:
    match = _AGE.fullmatch(text)
    if match is None:
        raise InvalidInput(f"{text!r} is no age in days or weeks: say for example 30d, 12w or {FOR_EVER}")
    return int(match[1]) * (7 if match[2] == "w" else 1)


@topics.command(rich_help_panel=CHANGE)
def pause(name: TopicArgument, wait: WaitOption = 0.0) -> None:
    """Pause a topic's groups: running handlers finish; publishing continues."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        done = pause_topic(runtime, name)
        echo(f"topic {name} {'is paused' if done else 'is paused already'}")
        print_running(wait_paused(runtime.control, name, timeout_s=wait))


@topics.command(rich_help_panel=CHANGE)
def resume(name: TopicArgument) -> None:
    """Resume a topic's groups, except individually paused ones."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        done = resume_topic(runtime, name)
    echo(f"topic {name} {'goes on' if done else 'was not paused'}")


@topics.command(cls=RuledCommand, rich_help_panel=CHANGE)
@planned
@needs("--force", "--yes", why="the plan names what it would pass over")
def delete(
    name: TopicArgument,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also with living members, unhandled or unarchived messages."),
    ] = False,
    _plan: PlanOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a topic with its groups and messages; its archive stays. Repeatable."""
    # It loads all that a topic has: other commands of topics need not.
    from mqlayer.maintenance.topic_deletion import delete_topic, planned_deletion

    with runtime_here() as runtime:
        if not yes:
            _print_plan(planned_deletion(runtime, name), as_json=as_json)
            return
        check_change(runtime.control)
        done = delete_topic(runtime, name, force=force)
    if as_json:
        show_rows([asdict(done)], as_json=True, nothing="")
        return
    echo(f"topic {done.topic} is deleted; its archive and records of its groups are under {done.deleted_as}")
    for node, count in done.left.items():
        echo(f"keys of {pluralize(count, 'partition')} are left on node {node}: the worker removes them", err=True)


def _print_plan(plan: TopicDeletionPlan, *, as_json: bool) -> None:
    if as_json:
        show_rows([asdict(plan)], as_json=True, nothing="")
        return
    if plan.deleted_as is not None:
        echo_plan(f"topic {plan.topic} is deleted, as {plan.deleted_as}; its leftovers would be removed")
        return
    for obstacle in plan.obstacles:
        echo(f"in the way: {obstacle}")
    counts = {"partition": plan.partitions, "message": plan.records, "group": len(plan.groups)}
    what = ", ".join(pluralize(count, name) for name, count in counts.items())
    echo_plan(f"topic {plan.topic} would be deleted with {what}; its archive stays")


@topics.command("list", rich_help_panel=LOOK)
def list_(as_json: JsonOption = False) -> None:
    """List topics."""
    with control_here() as database:
        found = list_topics(database)
    rows = (
        _row(topic)
        if not as_json
        else {
            "topic": topic.name,
            "strategy": topic.strategy,
            "partitions": topic.partitions,
            "version": topic.version,
            "body_limit": topic.body_limit,
            "backlog_limit": topic.backlog_limit,
            "archived": topic.archived,
            "durability": topic.durability,
            "retention_days": topic.retention_days,
            "keep_until_exported": topic.keep_until_exported,
            **asdict(topic.retention),
            "deleting": topic.deleting,
        }
        for topic in found
    )
    show_rows(rows, as_json=as_json, nothing="no topics: mqlayer topic create NAME")


@topics.command(rich_help_panel=LOOK)
def show(name: TopicArgument, as_json: JsonOption = False) -> None:
    """Show a topic's limits, its partitions with sizes and rates, and its groups."""
    with runtime_here() as runtime:
        found = topic_status(runtime, name)
    if as_json:
        show_rows([_status_json(found)], as_json=True, nothing="")
        return
    show_facts(
        {
            "topic": found.topic,
            "strategy": found.strategy,
            "route": f"version {found.version}" if found.version else "none yet: its creation is unfinished",
            "body_limit": Size(found.body_limit),
            "backlog_limit": f"{found.backlog_limit} messages per partition" if found.backlog_limit else "none",
            "archived": _kept(archived=found.archived, days=found.retention_days),
            "durability": found.durability,
            "streams_keep": _retained(found.retention),
            "messages_live": _lived(found.retention),
            "created_at": found.created_at,
            "paused_at": found.paused_at,
            "paused_by": found.paused_by,
        }
    )
    echo()
    rows = (_partition_row(found, one) for one in found.partitions)
    show_rows(rows, as_json=False, nothing="it has no partitions yet")
    echo()
    groups = ({name: value for name, value in group_text_row(one).items() if name != "topic"} for one in found.groups)
    show_rows(groups, as_json=False, nothing="it has no groups: a group is created by its first member")
    for node, reason in sorted(found.unreachable.items()):
        echo(f"node {node} does not answer: {reason}", err=True)


@topics.command(rich_help_panel=LOOK)
def history(
    name: TopicArgument, hours: HoursOption = 24.0, points: PointsOption = 40, as_json: JsonOption = False
) -> None:
    """Show a topic's messages per second over time: committed, relayed, stored; by samples of each minute."""
    show_history("topic", name, None, hours, points, as_json=as_json)


def _partition_row(found: TopicStatus, one: TopicPartition) -> dict[str, Any]:
    return {
        "partition": one.partition,
        "LPs": f"[{one.lp_from}, {one.lp_to})",
        "node": found.nodes[one.node],
        "state": one.state,
        "published": one.published,
        "kept": one.records,
        "bytes": one.bytes,
        "per_s": one.per_s,
    }


def _status_json(found: TopicStatus) -> dict[str, Any]:
    facts = {one.name: getattr(found, one.name) for one in fields(found)}
    del facts["nodes"]
    facts |= asdict(facts.pop("retention"))
    partitions = [asdict(one) | {"node": found.nodes[one.node]} for one in found.partitions]
    return facts | {"partitions": partitions, "groups": list(map(group_row, found.groups))}


def _kept(*, archived: bool, days: int | None, exported: bool = False) -> str:
    if not archived:
        return "no"
    kept = "for ever" if days is None else f"for {days} d"
    return f"{kept}, until exported" if exported and days is not None else kept


def _retained(limits: Retention) -> str:
    said = [f"{format_age(limits.retain_s)}"] if limits.retain_s else []
    said += [f"{format_size(limits.retain_bytes)} per partition"] if limits.retain_bytes else []
    said += [f"{pluralize(limits.retain_messages, 'message')} per partition"] if limits.retain_messages else []
    if not said:
        return "what some group has not settled"
    which = "records" if limits.drops else "settled records"
    return f"{which} for {' or '.join(said)}, what comes first" if len(said) > 1 else f"{which} for {said[0]}"


def _lived(limits: Retention) -> str:
    end = "die" if limits.expired == "dead" else "are settled"
    if not limits.message_ttl_s:
        return "for ever" if limits.expired == "settle" else f"for ever; those with an end of their own {end} then"
    return f"for {format_age(limits.message_ttl_s)}, then {end}"


def _row(topic: TopicSummary) -> dict[str, Any]:
    return {
        "topic": topic.name,
        "strategy": topic.strategy,
        "partitions": topic.partitions,
        "route": f"{topic.version}, being deleted" if topic.deleting else topic.version,
        "body_limit": Size(topic.body_limit),
        "backlog": topic.backlog_limit or "no limit",
        "archived": _kept(archived=topic.archived, days=topic.retention_days, exported=topic.keep_until_exported),
    }
