"""`key`: what becomes of one key for one group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from mqlayer.cli.addresses import settings_here
from mqlayer.cli.options import TopicArgument
from mqlayer.cli.showing import JsonOption, counted, show_rows, shown_age, shown_key
from mqlayer.cli.standings import head_facts, partition_facts, waiting_words
from mqlayer.inspecting import KeyStanding, Search, explain_key
from mqlayer.postgres.database import Database

keys = typer.Typer(no_args_is_help=True, help="Keys: where they are, and what they wait for.")


def add_to(app: typer.Typer) -> None:
    """Put the commands into the application."""
    app.add_typer(keys, name="key")


@keys.callback()
def key() -> None:
    """Keep `explain` a command of its own also while it is the only one."""


@keys.command()
def explain(
    topic: TopicArgument,
    key: Annotated[str, typer.Argument(help="The message key.")],
    group: Annotated[str, typer.Option(help="For which group.")],
    as_json: JsonOption = False,
) -> None:
    """Say where a key was and is, what of it waits and why, and what to run next. Bodies are never shown."""
    settings = settings_here()
    with Database(settings.control_dsn()) as database:
        found = explain_key(database, topic, key, group, prefix=settings.key_prefix, unsafe=settings.allow_unsafe_redis)
    if as_json:
        show_rows([_told(found)], as_json=True, nothing="")
        return
    typer.echo(f"key {shown_key(found.key)} of topic {topic}: LP {found.lp}, published to partition "
               f"{found.publishes_to.partition} on {found.publishes_to.node}")  # fmt: skip
    show_rows(map(_crossed, map(asdict, found.crossings)), as_json=False, nothing="")
    for line in _lines(found):
        typer.echo(line)


def _crossed(crossing: dict[str, Any]) -> dict[str, Any]:
    first, last = crossing["first_version"], crossing["last_version"]
    return {
        "versions": f"{first} …" if last is None else f"{first}" if first == last else f"{first} to {last}",
        "partition": crossing["partition"],
        "node": crossing["node"],
        "LPs": f"[{crossing['lp_from']}, {crossing['lp_to']})",
        "state": crossing["state"],
        "for_the_group": crossing["sight"],
    }


def _lines(found: KeyStanding) -> Iterable[str]:
    group, current = found.group.facts, found.current
    where = "is in no partition yet" if current is None else f"is in partition {current.facts.partition}"
    if current is not None and current.facts.owner is not None:
        where += f": owner {current.facts.owner}, epoch {current.facts.epoch}"
    elif current is not None:
        where += ": nobody owns it"
    yield f"group {group.name} {where}; it is at route version {group.version} of {group.topic_version}"
    yield from _search_lines(found.search)
    for one in found.holds_up:
        left = "its node does not answer" if one.lag is None else f"{counted(one.lag, 'message')} left"
        yield f"hidden behind partition {one.facts.partition}: {left}; {waiting_words(one)}"
    if not found.holds_up and current is not None and current.stall is not None:
        yield f"partition {current.facts.partition}: {waiting_words(current)}"
    yield f"run next: {found.run_next}"


def _search_lines(search: Search) -> Iterable[str]:
    head = search.head
    if head is None:
        yield f"head: none among {search.looked_at} offsets"
    else:
        tries = counted(head.attempts, "failed attempt")
        failed = f", {tries} since {_second(head.failing_since)}" if head.attempts else ""
        again = "" if head.retry_in_s is None else f", next attempt in {shown_age(head.retry_in_s)}"
        yield (
            f"head: partition {search.partition}, offset {head.offset}, message {head.identity}, "
            f"{shown_age(head.age_s)} old{failed}{again}"
            f"{', does not match the filter of the group: it is passed over' if head.unmatched else ''}"
        )
        yield f"behind it: {counted(search.following, 'message')} of the key"
    if search.cut:
        yield f"the search ended at its bound of {search.looked_at} offsets: more may be behind"
    for partition in search.blind:
        yield f"partition {partition} could not be searched: its node does not answer"


def _second(at: Any) -> str:
    return "" if at is None else at.isoformat(timespec="seconds")


def _told(found: KeyStanding) -> dict[str, Any]:
    search = found.search
    return {
        "topic": found.group.facts.topic,
        "key": found.key,
        "lp": found.lp,
        "group": found.group.facts.name,
        "version": found.group.facts.version,
        "topic_version": found.group.facts.topic_version,
        "crossed": [asdict(one) for one in found.crossings],
        "publishes_to": found.publishes_to.partition,
        "current": None if found.current is None else partition_facts(found.current),
        "head": None if search.head is None else {"partition": search.partition, **head_facts(search.head)},
        "behind_it": search.following,
        "looked_at": search.looked_at,
        "cut": search.cut,
        "not_searched": list(search.blind),
        "hidden_behind": [partition_facts(one) for one in found.holds_up],
        "run_next": found.run_next,
    }
