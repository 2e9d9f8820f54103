"""`replay`: deliver archived messages again; backfills."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, cast

import typer

from mqlayer.cli.completion import group_names, topic_names
from mqlayer.cli.message_output import LimitOption, parse_identity_option
from mqlayer.cli.option_rules import RuledCommand, excludes, needs, planned
from mqlayer.cli.options import GroupArgument, PlanOption, TopicArgument, YesOption, echo_plan, parse_time_option
from mqlayer.cli.output import JsonOption, echo, pluralize, show_facts, show_rows
from mqlayer.cli.panels import CHANGE, LOOK
from mqlayer.cli.permissions import check_change
from mqlayer.cli.redelivery import BackgroundOption, JobCommands, KeyOption, RateOption, common_columns, ended_text
from mqlayer.cli.runtime import control_here, runtime_here
from mqlayer.errors import InvalidInput
from mqlayer.redelivery import (
    Replay,
    ReplayFilter,
    cancel_replay,
    count_archived,
    replay_of,
    replay_results,
    replays,
    resume_replay,
    start_replay,
    work_on_replay,
)
from mqlayer.redelivery.replay import Newer

IdArgument = Annotated[int, typer.Argument(metavar="ID", help="The replay's id.")]

replay = typer.Typer(no_args_is_help=True, help="Replays: archived messages, delivered to a group again.")


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(replay, name="replay")


@replay.command(cls=RuledCommand, rich_help_panel=CHANGE)
@excludes(
    "--all", "--key", "--tag", "--since", "--until", "--snapshot",
    why="say which messages: some by these options, or --all of them",
)  # fmt: skip
@planned
@needs("--newer", "--yes", why="a plan says how many there are")
@needs("--rate", "--yes", why="a plan sends nothing")
@needs("--background", "--yes", why="a plan is made at once")
@excludes("--background", "--json", why="the worker ends it later: mqlayer replay show --json has the result")
def start(
    topic: TopicArgument,
    group: GroupArgument,
    key: KeyOption = None,
    tag: Annotated[str | None, typer.Option(help="Only with this tag.")] = None,
    since: Annotated[str | None, typer.Option(help="Published then or later: a time with its zone.")] = None,
    until: Annotated[str | None, typer.Option(help="Published before: a time with its zone.")] = None,
    snapshot: Annotated[str | None, typer.Option(help="Only what this snapshot holds.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All that the archive holds of the topic.")] = False,
    from_export: Annotated[
        str | None,
        typer.Option(
            "--from-export", metavar="PATH", help="Take days that Postgres dropped from this export of the archive."
        ),
    ] = None,
    newer: Annotated[
        str | None,
        typer.Option(
            help="Newer messages meanwhile: wait (those of the key, or all), or between; wait where order is kept."
        ),
    ] = None,
    rate: RateOption = 0.0,
    _plan: PlanOption = False,
    yes: YesOption = False,
    background: BackgroundOption = False,
    as_json: JsonOption = False,
) -> None:
    """Deliver archived messages again that the group has passed, in order per key."""
    wanted = ReplayFilter(key, tag, parse_time_option(since), parse_time_option(until), snapshot)
    if (wanted == ReplayFilter()) != every:
        raise InvalidInput("say which: --key, --tag, --since, --until, --snapshot; or --all of them")
    wanted = replace(wanted, export=from_export)
    with runtime_here() as runtime:
        if not yes:
            found = count_archived(runtime.control, topic, group, wanted)
            if as_json:
                show_rows([{"records": found}], as_json=True, nothing="")
            else:
                echo_plan(f"{pluralize(found, 'record')} of the archive would be given to the group again")
            return
        check_change(runtime.control)
        begin = partial(start_replay, runtime, topic, group, wanted, newer=cast("Newer | None", newer), per_s=rate)
        REPLAY.begin(runtime.control, lambda worker: begin(worker=worker), background=background, as_json=as_json)


@replay.command(rich_help_panel=CHANGE)
def resume(replay_id: IdArgument, as_json: JsonOption = False) -> None:
    """Take over and continue a replay or backfill."""
    REPLAY.resume(replay_id, lambda runtime, worker: resume_replay(runtime, replay_id, worker=worker), as_json=as_json)


@replay.command("list", rich_help_panel=LOOK)
def list_(
    topic: Annotated[str | None, typer.Argument(help="Only of this topic.", autocompletion=topic_names)] = None,
    group: Annotated[str | None, typer.Argument(help="Only of this group.", autocompletion=group_names)] = None,
    limit: LimitOption = 50,
    after: Annotated[int | None, typer.Option(help="Start after this replay, the last of the page before.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List replays and backfills, newest first."""
    with control_here() as database:
        found = replays(database, topic=topic, group=group, after=after, limit=limit)
    show_rows(map(_row, found), as_json=as_json, nothing="nothing was ever replayed")


@replay.command(rich_help_panel=LOOK)
def show(replay_id: IdArgument, as_json: JsonOption = False) -> None:
    """Show a replay or backfill with its progress."""
    with control_here() as database:
        found = replay_of(database, replay_id)
    if as_json:
        show_rows([_row(found)], as_json=True, nothing="")
        return
    show_facts(_row(found))


@replay.command(rich_help_panel=LOOK)
def results(
    replay_id: IdArgument,
    limit: LimitOption = 50,
    after: Annotated[str | None, typer.Option(help="Start after this message, the last of the page before.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List messages left out: already (waiting), dead, ahead (yet to come)."""
    with control_here() as database:
        behind = None if after is None else parse_identity_option(after)
        found = replay_results(database, replay_id, after=behind, limit=limit)
    rows = ({"message": str(one.identity), "result": one.result, "at": one.at} for one in found)
    show_rows(rows, as_json=as_json, nothing="no more messages")
    if len(found) == limit and not as_json:
        echo(f"there may be more: --after {found[-1].identity}")


@replay.command(rich_help_panel=CHANGE)
def cancel(replay_id: IdArgument) -> None:
    """Cancel a replay or backfill; sent messages are still handled."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        found = cancel_replay(runtime, replay_id)
    echo(f"{found.kind} {replay_id} is cancelled: {_counts(found)}")


def _report(done: Replay, as_json: bool) -> None:
    if as_json:
        show_rows([_row(done)], as_json=True, nothing="")
        return
    number = done.replay_id
    echo(f"{done.kind} {number} is {ended_text(done)}: {_counts(done)}; mqlayer replay results {number}")


REPLAY = JobCommands("replay", "replay", work_on_replay, _report)


def _counts(found: Replay) -> str:
    others = ", ".join(f"{count} {word}" for word, count in sorted(found.results.items()) if word != "sent" and count)
    return f"{pluralize(found.sent, 'message')} given" + (f", {others}" if others else "")


def _row(one: Replay) -> dict[str, Any]:
    return {
        "replay": one.replay_id,
        "kind": one.kind,
        "topic": one.topic,
        "group": one.group,
        "state": one.state,
        "results": dict(one.results),
        "waiting": one.waiting,
        "at_batch": one.at_batch,
        "upto_batch": one.upto_batch,
        "per_s": one.per_s,
        "newer": one.newer,
        "blocked_by": one.blocked_by,
        **common_columns(one),
    }
