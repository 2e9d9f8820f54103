"""`bulk`: acts on many parked keys or dead messages, planned first."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, get_args

import typer

from mqlayer.cli.completion import group_names, topic_names
from mqlayer.cli.message_output import LimitOption
from mqlayer.cli.option_rules import RuledCommand, excludes
from mqlayer.cli.options import GroupArgument, TopicArgument, parse_time_option
from mqlayer.cli.output import JsonOption, echo, format_key, pluralize, show_facts, show_rows
from mqlayer.cli.panels import LOOK, REPAIR
from mqlayer.cli.permissions import check_change
from mqlayer.cli.redelivery import BackgroundOption, JobCommands, KeyOption, ended_text
from mqlayer.cli.runtime import control_here, runtime_here
from mqlayer.errors import InvalidInput
from mqlayer.redelivery import (
    BULK_LIMIT,
    BulkAct,
    BulkAction,
    BulkItem,
    BulkState,
    DeadFilter,
    ParkedFilter,
    bulk_action,
    bulk_actions,
    bulk_items,
    cancel_bulk,
    find_dead,
    plan_bulk,
    resume_bulk,
    start_bulk,
    work_on,
)

ACTS = get_args(BulkAct)
STATES = get_args(BulkState)
SHOWN = 10

BulkArgument = Annotated[int, typer.Argument(metavar="ID", help="The bulk action's id.")]
ActArgument = Annotated[str, typer.Argument(help="redrive or keep dead messages; release or discard parked keys.")]

bulk = typer.Typer(no_args_is_help=True, help="Bulk actions: one act on many parked keys or dead messages.")


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(bulk, name="bulk")


@bulk.command(cls=RuledCommand, rich_help_panel=REPAIR)
@excludes(
    "--all", "--message", "--key", "--cause", "--error", "--since", "--until", "--min-attempts", "--waiting",
    why="say which ones: some by these options, or --all of them",
)  # fmt: skip
@excludes("--message", "--waiting", why="a dead message waits for nothing")
def plan(
    act: ActArgument,
    topic: TopicArgument,
    group: GroupArgument,
    message: Annotated[
        list[str] | None, typer.Option("--message", metavar="MESSAGE", help="One dead message; may be repeated.")
    ] = None,
    key: KeyOption = None,
    cause: Annotated[str | None, typer.Option(help="Why they died, or were parked.")] = None,
    error: Annotated[str | None, typer.Option(help="A part of an attempt's error.")] = None,
    since: Annotated[str | None, typer.Option(help="Died or parked then or later: a time with its zone.")] = None,
    until: Annotated[str | None, typer.Option(help="Died or parked before: a time with its zone.")] = None,
    min_attempts: Annotated[int | None, typer.Option(min=0, help="With so many failed attempts, or more.")] = None,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only keys that wait for an operator.")] = False,
    every: Annotated[bool, typer.Option("--all", help="All of the group.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Refuse a larger set.")] = BULK_LIMIT,
    first: Annotated[bool, typer.Option("--first", help="Take the first ones of a larger set.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fix the set of a bulk action and its order; nothing is done before `bulk start`."""
    if act not in ACTS:
        raise InvalidInput(f"{act!r} is no act: choose of {', '.join(ACTS)}")
    times = parse_time_option(since), parse_time_option(until)
    with runtime_here() as runtime:
        check_change(runtime.control)
        wanted: DeadFilter | ParkedFilter
        if act in ("redrive", "keep"):
            _refuse_option("--waiting", waiting, "parked keys")
            named = tuple(find_dead(runtime.control, one, topic=topic, group=group) for one in message or ()) or None
            wanted = DeadFilter(key, cause, error, *times, named, min_attempts)
        else:
            _refuse_option("--message", bool(message), "dead messages")
            wanted = ParkedFilter(None, None, key, cause, error, *times, waiting, min_attempts)
        if (wanted == type(wanted)()) != every:
            raise InvalidInput("say which ones by options, such as --error or --key; or --all of them")
        found = plan_bulk(runtime, act, topic, group, wanted, limit=limit, first=first)  # type: ignore[arg-type]  # checked
        items = bulk_items(runtime.control, found.bulk_id, limit=SHOWN)
    if as_json:
        show_rows([_facts(found) | {"items": list(map(_item_facts, items))}], as_json=True, nothing="")
        return
    more = f", the first of {found.matched}" if found.matched > found.size else ""
    echo(f"bulk action {found.bulk_id} is planned: {act} {_items(found)}{more}, in this order")
    show_rows(map(_item_row, items), as_json=False, nothing="nothing matches")
    if found.size > len(items):
        echo(f"and {found.size - len(items)} more: mqlayer bulk show {found.bulk_id}")
    echo(f"nothing is done yet; within an hour: mqlayer bulk start {found.bulk_id} --reason WHY")


@bulk.command(cls=RuledCommand, rich_help_panel=REPAIR)
@excludes("--background", "--json", why="the worker ends it later: mqlayer bulk show --json has the result")
def start(
    bulk_id: BulkArgument,
    reason: Annotated[str, typer.Option(help="Why: it is kept in the audit rows.")],
    rate: Annotated[float, typer.Option(min=0, help="Messages or keys a second, at most; 0: no limit.")] = 0.0,
    background: BackgroundOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start a planned bulk action, and work on it to its end."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        begin = partial(start_bulk, runtime, bulk_id, reason=reason, per_s=rate)
        BULK.begin(runtime.control, lambda worker: begin(worker=worker).bulk_id, background=background, as_json=as_json)


@bulk.command(rich_help_panel=REPAIR)
def resume(bulk_id: BulkArgument, as_json: JsonOption = False) -> None:
    """Go on with a bulk action that was cut off."""
    BULK.resume(bulk_id, lambda runtime, worker: resume_bulk(runtime, bulk_id, worker=worker), as_json=as_json)


@bulk.command("list", rich_help_panel=LOOK)
def list_(
    topic: Annotated[str | None, typer.Argument(help="Only of this topic.", autocompletion=topic_names)] = None,
    group: Annotated[str | None, typer.Argument(help="Only of this group.", autocompletion=group_names)] = None,
    state: Annotated[str | None, typer.Option(help="planned, running, done or cancelled.")] = None,
    limit: LimitOption = 50,
    after: Annotated[int | None, typer.Option(help="Start after this id, the last of the page before.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List bulk actions, newest first: act, set, progress."""
    if state is not None and state not in STATES:
        raise InvalidInput(f"{state!r} is no state: choose of {', '.join(STATES)}")
    with control_here() as database:
        found = bulk_actions(database, topic=topic, group=group, state=state, after=after, limit=limit)  # type: ignore[arg-type]  # checked
    show_rows(map(_facts if as_json else _row, found), as_json=as_json, nothing="no bulk action is known", by=4)


@bulk.command(rich_help_panel=LOOK)
def show(
    bulk_id: BulkArgument,
    failed: Annotated[bool, typer.Option("--failed", help="Only items that failed.")] = False,
    limit: LimitOption = 50,
    after: Annotated[int, typer.Option(help="Start after this number, the last of the page before.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show a bulk action with its items, in the order in which it takes them."""
    with control_here() as database:
        found = bulk_action(database, bulk_id)
        items = bulk_items(database, bulk_id, after=after, failed=failed, limit=limit)
    if as_json:
        show_rows([_facts(found) | {"items": list(map(_item_facts, items))}], as_json=True, nothing="")
        return
    show_facts(_row(found))
    echo()
    show_rows(map(_item_row, items), as_json=False, nothing="no more items")
    if len(items) == limit:
        echo(f"there may be more: --after {items[-1].number}")


@bulk.command(rich_help_panel=REPAIR)
def cancel(bulk_id: BulkArgument) -> None:
    """Cancel a bulk action after the batch in hand; its results stay."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        found = cancel_bulk(runtime, bulk_id)
    echo(f"bulk action {bulk_id} is cancelled: {counts_text(found)}")


def _report(done: BulkAction, as_json: bool) -> None:
    if as_json:
        show_rows([_facts(done)], as_json=True, nothing="")
        return
    echo(f"bulk action {done.bulk_id} is {ended_text(done)}: {counts_text(done)}; mqlayer bulk show {done.bulk_id}")
    if done.matched > done.size:
        echo(f"{done.matched - done.size} more matched: do it again for these")


BULK = JobCommands("bulk action", "bulk", work_on, _report)


def counts_text(found: BulkAction) -> str:
    """Return the counts in words."""
    verb = {"redrive": "given back", "keep": "kept dead", "release": "released", "discard": "discarded"}[found.act]
    what = "message" if found.act in ("redrive", "keep") else "key"
    return f"{pluralize(found.done, what)} {verb}, {found.skipped} skipped, {found.failed} failed"


def _refuse_option(option: str, said: bool, what: str) -> None:
    if said:
        raise InvalidInput(f"{option} is of {what}: leave it out, or choose another act")


def _items(found: BulkAction) -> str:
    what = "dead message" if found.act in ("redrive", "keep") else "parked key"
    return f"{pluralize(found.size, what)} of group {found.group} of topic {found.topic}"


def _row(one: BulkAction) -> dict[str, Any]:
    return {
        "bulk": one.bulk_id,
        "topic": one.topic,
        "group": one.group,
        "act": one.act,
        "state": one.state,
        "size": one.size,
        "done": one.done,
        "skipped": one.skipped,
        "failed": one.failed,
        "filter": one.filter.as_json(),
        "by": one.actor,
        "reason": one.reason,
        "planned_at": one.planned_at,
        "ended_at": one.ended_at,
        "blocked_by": one.blocked_by,
    }


def _facts(one: BulkAction) -> dict[str, Any]:
    return {
        "bulk": one.bulk_id,
        "topic": one.topic,
        "group": one.group,
        "act": one.act,
        "state": one.state,
        "size": one.size,
        "matched": one.matched,
        "done": one.done,
        "skipped": one.skipped,
        "failed": one.failed,
        "per_s": one.per_s,
        "filter": one.filter.as_json(),
        "actor": one.actor,
        "reason": one.reason,
        "planned_at": one.planned_at,
        "started_at": one.started_at,
        "ended_at": one.ended_at,
        "worked_on": one.worked_on,
        "blocked_by": one.blocked_by,
    }


def _item_row(one: BulkItem) -> dict[str, Any]:
    row = {"number": one.number, "dead_id": one.dead_id, "message": one.identity and str(one.identity)}
    row |= {"key": format_key(one.key), "messages": one.messages, "result": one.result, "error": one.error}
    return row | {"at": one.at}


def _item_facts(one: BulkItem) -> dict[str, Any]:
    return _item_row(one) | {"key": one.key}
