"""`key`: explain, history, pause, resume, skip-head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import typer

from mqlayer.cli.completion import group_names
from mqlayer.cli.message_life import found_json, found_row, show_steps
from mqlayer.cli.message_output import MessageOption, ReasonOption, parse_identity_option
from mqlayer.cli.options import GroupArgument, TopicArgument
from mqlayer.cli.output import JsonOption, echo, format_age, format_key, pluralize, show_rows
from mqlayer.cli.panels import CHANGE, LOOK, REPAIR
from mqlayer.cli.permissions import check_change, check_group_change
from mqlayer.cli.rows import describe_waiting, head_facts, partition_facts
from mqlayer.cli.runtime import runtime_here
from mqlayer.inspect import KeyHistory, KeySearch, KeyStatus, ParkedKeyStatus, explain_key, history_of_key
from mqlayer.redelivery import pause_key, resume_key, skip_head

keys = typer.Typer(no_args_is_help=True, help="Keys: their partitions, waiting messages, pauses.")


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(keys, name="key")


@keys.command(rich_help_panel=LOOK)
def explain(
    topic: TopicArgument,
    key: Annotated[str, typer.Argument(help="The message key.")],
    group: Annotated[str, typer.Option(help="For which group.", autocompletion=group_names)],
    as_json: JsonOption = False,
) -> None:
    """Show a key's partitions, its waiting messages and why, and the next command; no bodies."""
    with runtime_here() as runtime:
        found = explain_key(runtime, topic, key, group)
    if as_json:
        show_rows([_json(found)], as_json=True, nothing="")
        return
    echo(f"key {format_key(found.key)} of topic {topic}: LP {found.lp}, published to partition "
               f"{found.publishes_to.partition} on {found.publishes_to.node}")  # fmt: skip
    show_rows(map(_crossed, map(asdict, found.locations)), as_json=False, nothing="")
    for line in _text_lines(found):
        echo(line)


@keys.command(rich_help_panel=LOOK)
def history(
    topic: TopicArgument,
    key: Annotated[str, typer.Argument(help="The message key.")],
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many messages, at most.")] = 20,
    after: Annotated[str | None, typer.Option(help="Go on: the value that the page before printed.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a key's messages, the latest first, their states, and the acts on the key; no bodies."""
    with runtime_here() as runtime:
        found = history_of_key(runtime, topic, key, limit=limit, after=after)
    if as_json:
        show_rows(_history_json(found), as_json=True, nothing="")
        return
    rows = (found_row(one.found) | {"key": None, "states": _states(one.groups)} for one in found.messages)
    show_rows(rows, as_json=False, nothing=f"no message of key {format_key(key)} is known from here on")
    if after is None:
        echo()
        show_steps(found.steps, found.missing)
    if found.after is not None:
        echo(f"earlier messages: --after {found.after}")


@keys.command("skip-head", rich_help_panel=REPAIR)
def skip_head_(
    topic: TopicArgument,
    group: GroupArgument,
    key: Annotated[str, typer.Argument(help="The message key.")],
    reason: ReasonOption,
    message: MessageOption = None,
) -> None:
    """Move a key's first waiting message to the dead ones; `dead redrive` restores it.

    With --message only this one. A running handler's ack is refused.
    """
    with runtime_here() as runtime:
        check_group_change(runtime.control, topic, group)
        skipped = skip_head(runtime, topic, group, key, reason=reason, only=parse_identity_option(message))
    echo(f"message {skipped.identity} is passed over: dead message {skipped.dead_id}")
    if not skipped.fenced:
        echo("if a handler is running it, its effect may still commit; its ack is refused", err=True)


@keys.command(rich_help_panel=CHANGE)
def pause(
    topic: TopicArgument,
    key: Annotated[str, typer.Argument(help="The message key.")],
    group: Annotated[str, typer.Option(help="For which group.", autocompletion=group_names)],
) -> None:
    """Pause a key: its messages wait in Postgres; other keys continue."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        done = pause_key(runtime, topic, group, key)
    echo(f"key {format_key(key)} {'is paused' if done else 'is paused already'} for group {group} of topic {topic}")


@keys.command(rich_help_panel=CHANGE)
def resume(
    topic: TopicArgument,
    key: Annotated[str, typer.Argument(help="The message key.")],
    group: Annotated[str, typer.Option(help="For which group.", autocompletion=group_names)],
) -> None:
    """Resume a paused key, waiting messages first."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        done = resume_key(runtime, topic, group, key)
    echo(f"key {format_key(key)} {'goes on' if done else 'was not paused'} for group {group} of topic {topic}")


def _states(groups: Mapping[str, str]) -> str:
    return ", ".join(f"{group} {state}" for group, state in groups.items())


def _history_json(found: KeyHistory) -> Iterable[dict[str, Any]]:
    for one in found.messages:
        yield found_json(one.found) | {"groups": dict(one.groups)}
    yield {
        "topic": found.topic,
        "key": found.key,
        "lp": found.lp,
        "steps": [msgspec.to_builtins(one) for one in found.steps],
        "missing": [msgspec.to_builtins(one) for one in found.missing],
        "looked": found.looked,
        "after": found.after,
    }


def _crossed(crossing: dict[str, Any]) -> dict[str, Any]:
    first, last = crossing["first_version"], crossing["last_version"]
    return {
        "versions": f"{first} …" if last is None else f"{first}" if first == last else f"{first} to {last}",
        "partition": crossing["partition"],
        "node": crossing["node"],
        "LPs": f"[{crossing['lp_from']}, {crossing['lp_to']})",
        "state": crossing["state"],
        "for_the_group": crossing["visibility"],
    }


def _text_lines(found: KeyStatus) -> Iterable[str]:
    group, current = found.group.facts, found.current
    where = "is in no partition yet" if current is None else f"is in partition {current.facts.partition}"
    if current is not None and current.facts.owner is not None and not current.facts.alive:
        where += f": the lease of its owner {current.facts.owner} is over"
    elif current is not None and current.facts.owner is not None:
        where += f": owner {current.facts.owner}, epoch {current.facts.epoch}"
    elif current is not None:
        where += ": nobody owns it"
    newest = group.version == group.topic_version
    version = "" if newest else f"; it is at route version {group.version} of {group.topic_version}"
    yield f"group {group.name} {where}{version}"
    yield from _parked_lines(found.parked)
    yield from _search_lines(found.search)
    for one in found.holds_up:
        left = "its node does not answer" if one.lag is None else f"{pluralize(one.lag, 'message')} left"
        yield f"hidden behind partition {one.facts.partition}: {left}; {describe_waiting(one)}"
    if not found.holds_up and current is not None and current.stall is not None:
        yield f"partition {current.facts.partition}: {describe_waiting(current)}"
    yield f"run next: {found.run_next}"


def _parked_lines(parked: ParkedKeyStatus | None) -> Iterable[str]:
    if parked is None:
        return
    if parked.paused_at is not None:
        waits = f"{pluralize(parked.messages, 'message')} of it parked"
        yield f"paused since {_second(parked.paused_at)} by {parked.paused_by}: {waits}"
        return
    again = "when an operator says so" if parked.due_in_s is None else f"in {format_age(max(0.0, parked.due_in_s))}"
    yield (
        f"parked since {_second(parked.since)}, cause {parked.cause}: {pluralize(parked.messages, 'message')}, the "
        f"first "
        f"is {parked.head}, {pluralize(parked.attempts, 'failed attempt')}, next attempt {again}"
    )


def _search_lines(search: KeySearch) -> Iterable[str]:
    head = search.head
    if head is None:
        among = f" among the {pluralize(search.scanned, 'record')} read" if search.scanned else ""
        yield f"no message of the key waits in a partition{among}"
    else:
        tries = pluralize(head.attempts, "failed attempt")
        failed = f", {tries} since {_second(head.failing_since)}" if head.attempts else ""
        again = "" if head.retry_in_s is None else f", next attempt in {format_age(head.retry_in_s)}"
        yield (
            f"head: partition {search.partition}, offset {head.offset}, message {head.identity}, "
            f"{format_age(head.age_s)} old{failed}{again}"
            f"{', does not match the filter of the group: it is passed over' if head.unmatched else ''}"
        )
        yield f"behind it: {pluralize(search.following, 'message')} of the key"
    if search.cut:
        yield f"the search ended after {search.scanned} offsets: more messages may follow"
    for partition in search.blind:
        yield f"partition {partition} could not be searched: its node does not answer"


def _second(at: Any) -> str:
    return "" if at is None else at.isoformat(timespec="seconds")


def _json(found: KeyStatus) -> dict[str, Any]:
    search = found.search
    return {
        "topic": found.group.facts.topic,
        "key": found.key,
        "lp": found.lp,
        "group": found.group.facts.name,
        "version": found.group.facts.version,
        "topic_version": found.group.facts.topic_version,
        "crossed": [asdict(one) for one in found.locations],
        "publishes_to": found.publishes_to.partition,
        "current": None if found.current is None else partition_facts(found.current),
        "parked": None if found.parked is None else _parked_json(found.parked),
        "head": None if search.head is None else {"partition": search.partition, **head_facts(search.head)},
        "behind_it": search.following,
        "scanned": search.scanned,
        "cut": search.cut,
        "not_searched": list(search.blind),
        "hidden_behind": [partition_facts(one) for one in found.holds_up],
        "run_next": found.run_next,
    }


def _parked_json(parked: ParkedKeyStatus) -> dict[str, Any]:
    return {
        "cause": parked.cause,
        "since": parked.since,
        "due_at": parked.due_at,
        "due_in_s": parked.due_in_s,
        "attempts": parked.attempts,
        "messages": parked.messages,
        "head": parked.head and str(parked.head),
        "paused_at": parked.paused_at,
        "paused_by": parked.paused_by,
    }
