"""`topic`: create, list and set topics."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from mqlayer.cli.actor import actor
from mqlayer.cli.addresses import settings_here
from mqlayer.cli.options import TopicArgument
from mqlayer.cli.showing import JsonOption, show_rows
from mqlayer.domain.names import BODY_LIMIT, DEFAULT_BODY_LIMIT
from mqlayer.domain.routing import LP_COUNT
from mqlayer.postgres.database import Database
from mqlayer.topics import create_topic, list_topics, set_archived

topics = typer.Typer(no_args_is_help=True, help="Topics: create, list, set.")


class Strategy(StrEnum):
    """A topic's strategy as the command line names it."""

    STRICT = "strict"
    BEST_EFFORT = "best_effort"


def add_to(app: typer.Typer) -> None:
    """Put the commands into the application."""
    app.add_typer(topics, name="topic")


@topics.command()
def create(
    name: Annotated[str, typer.Argument(help="a-z first, then a-z 0-9 _ . -")],
    partitions: Annotated[int, typer.Option(min=1, max=LP_COUNT, help="Spread over all nodes.")] = 8,
    strategy: Annotated[Strategy, typer.Option(help="Whether order is kept always, or where it costs nothing.")] = (
        Strategy.STRICT
    ),
    body_limit: Annotated[int, typer.Option(min=1, max=BODY_LIMIT, help="Bytes.")] = DEFAULT_BODY_LIMIT,
    backlog_limit: Annotated[int, typer.Option(min=0, help="Messages per partition; 0 for no limit.")] = 0,
    archived: Annotated[bool, typer.Option("--archived", help="Keep every record in the archive.")] = False,
) -> None:
    """Create a topic with its partitions and first route. The same again finishes or changes nothing."""
    settings = settings_here()
    with Database(settings.control_dsn()) as database, Database(settings.application_dsn()) as application:
        route = create_topic(
            database,
            name,
            prefix=settings.key_prefix,
            partitions=partitions,
            strategy=strategy.value,
            body_limit=body_limit,
            backlog_limit=backlog_limit,
            archived=archived,
            application=application,
            actor=actor(),
            unsafe=settings.allow_unsafe_redis,
        )
    typer.echo(f"{name} has {len(route.ranges)} partitions, route version {route.version}")


@topics.command("set")
def set_(
    name: TopicArgument,
    archived: Annotated[bool, typer.Option("--archived/--not-archived", help="Whether its records are archived.")],
) -> None:
    """Switch a topic's archiving. What is published while it is off is a gap in the archive for ever."""
    with Database(settings_here().control_dsn()) as database:
        changed = set_archived(database, name, archived=archived, actor=actor())
    typer.echo(f"topic {name} is {'archived' if archived else 'not archived'}{'' if changed else ', as before'}")


@topics.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the topics."""
    with Database(settings_here().control_dsn()) as database:
        found = list_topics(database)
    rows = (
        {
            "topic": topic.name,
            "strategy": topic.strategy,
            "partitions": topic.partitions,
            "version": topic.version,
            "body_limit": topic.body_limit,
            "backlog_limit": topic.backlog_limit,
            "archived": topic.archived,
        }
        for topic in found
    )
    show_rows(rows, as_json=as_json, nothing="no topics: mqlayer topic create NAME")
