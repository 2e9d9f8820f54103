"""`group`: send a group back to what is kept, or forward."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from datetime import datetime
from typing import Annotated

import typer

from mqlayer.cli.actor import actor
from mqlayer.cli.addresses import settings_here
from mqlayer.cli.options import ApplyOption, PlanOption, TopicArgument, check_wish
from mqlayer.errors import InvalidInput
from mqlayer.membership import SeekPlan, Start, apply_seek, planned_seek
from mqlayer.postgres.database import Database
from mqlayer.routes.cache import RouteCache

groups = typer.Typer(no_args_is_help=True, help="Groups: where they stand.")


def add_to(app: typer.Typer) -> None:
    """Put the commands into the application."""
    app.add_typer(groups, name="group")


@groups.callback()
def group() -> None:
    """Keep `seek` a command of its own also while it is the only one."""


@groups.command()
def seek(
    topic: TopicArgument,
    group: Annotated[str, typer.Argument(help="The group's name.")],
    to: Annotated[
        str, typer.Option(metavar="WHERE", help="earliest, latest, or a time with zone: 2026-11-21T09:30:00+00:00.")
    ],
    replay: Annotated[
        bool, typer.Option("--replay", help="Apply fenced effects again; else those that were applied are passed over.")
    ] = False,
    plan: PlanOption = False,
    apply: ApplyOption = False,
) -> None:
    """Send a living group elsewhere: it is given what follows again, in order; its members need no restart."""
    check_wish(plan=plan, apply=apply)
    start = _start(to)
    settings = settings_here()
    with Database(settings.control_dsn()) as database:
        with closing(RouteCache(database)) as routes:
            planned = planned_seek(
                database,
                routes,
                topic=topic,
                name=group,
                to=start,
                prefix=settings.key_prefix,
                unsafe=settings.allow_unsafe_redis,
            )
        for line in _plan_lines(planned, replay=replay):
            typer.echo(line)
        if not apply:
            typer.echo("nothing was changed; --apply does this")
            return
        missed = apply_seek(
            database,
            planned,
            prefix=settings.key_prefix,
            actor=actor(),
            replay=replay,
            unsafe=settings.allow_unsafe_redis,
        )
    typer.echo(f"group {group} of topic {topic} goes on from there")
    for name in missed:
        typer.echo(f"node {name} does not answer: what earlier owners do there is refused once it does", err=True)


def _start(text: str) -> Start:
    places: dict[str, Start] = {"earliest": "earliest", "latest": "latest"}
    try:
        return places.get(text) or datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is no place to go: say earliest, latest, or a time with its zone") from None


def _plan_lines(plan: SeekPlan, *, replay: bool) -> Iterable[str]:
    again = "fenced effects are applied again" if replay else "fenced effects that were applied are passed over"
    yield f"seek of group {plan.group.name} of topic {plan.group.topic}; {again}"
    for kept, beginning in zip(plan.partitions, plan.beginnings, strict=True):
        where = "behind all of it" if beginning.drained else f"from offset {beginning.offset}"
        yield f"  partition {kept.partition}, LPs [{kept.lp_from}, {kept.lp_to}): {where}"
