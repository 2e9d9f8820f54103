"""`problems`: the overview of the console, on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mqlayer.cli.option_rules import RuledCommand, needs
from mqlayer.cli.output import JsonOption, echo, format_age, format_time, show_facts, show_rows
from mqlayer.cli.runtime import runtime_here

if TYPE_CHECKING:
    from mqlayer.doctor.health import SystemHealth
    from mqlayer.doctor.problem_history import NotedProblem, Problem

LIMIT: Final = 200
WEEK_HOURS: Final = 168.0

HoursOption = Annotated[
    float | None, typer.Option(min=0.02, max=WEEK_HOURS, help="Those that ended within so many hours; else 24.")
]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=RuledCommand)(problems)


@needs("--hours", "--ended", why="it is about problems that ended")
def problems(
    ended: Annotated[bool, typer.Option("--ended", help="Show problems that ended, the last one first.")] = False,
    hours: HoursOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show present problems with their beginning, effect and help; or those that ended.

    The worker's job note_problems looks once a minute and keeps problems for a week. Changes nothing.
    """
    # The doctor's parts take long to load; help does without.
    from mqlayer.doctor.health import system_health
    from mqlayer.doctor.problem_history import ended_problems

    with runtime_here() as runtime:
        if ended:
            found = ended_problems(runtime.control, last_s=3_600 * (24.0 if hours is None else hours), limit=LIMIT)
            show_rows(map(_ended_json if as_json else _ended_row, found), as_json=as_json, nothing="no problem ended")
            return
        health = system_health(runtime)
    if as_json:
        show_rows(map(_json, health.problems), as_json=True, nothing="")
    else:
        _show(health)


def _show(health: SystemHealth) -> None:
    for one in health.problems:
        echo(f"{one.alert.severity}: {one.alert.title}{_place(one)}")
        facts = {"seen": one.text, "since": _since(one), "effect": one.effect,
                 "repair": one.advice or one.alert.advice, "command": one.command, "alert": one.alert.name}  # fmt: skip
        show_facts({name: value for name, value in facts.items() if value}, indent="  ")
    for reason in health.unread:
        echo(f"not looked at: {reason}")
    if not health.problems:
        echo(f"no problem is known{' of what could be looked at' if health.unread else ''}")


def _place(one: Problem) -> str:
    return f", {_named(one)}" if _named(one) else ""


def _named(one: Problem | NotedProblem) -> str:
    names: Iterable[str] = (f"node {one.node}" if one.node else "", "/".join(filter(None, (one.topic, one.group))))
    return ", ".join(filter(None, names))


def _since(one: Problem) -> str:
    if one.after is None:
        return "" if one.since is None else format_time(one.since, exact=True)
    after = f"some time after {format_time(one.after, exact=True)}"
    return after if one.since is None else f"{after}, before {format_time(one.since, exact=True)}"


def _json(one: Problem) -> dict[str, Any]:
    return {
        "alert": one.alert.name, "severity": one.alert.severity, "title": one.alert.title, "topic": one.topic,
        "group": one.group, "node": one.node, "text": one.text, "since": one.since, "after": one.after,
        "effect": one.effect, "advice": one.advice or one.alert.advice, "command": one.command,
    }  # fmt: skip


def _ended_row(one: NotedProblem) -> dict[str, Any]:
    return {
        "problem": one.title, "place": _named(one) or one.item, "severity": one.severity,
        "from": f"{one.began_at:%Y-%m-%d %H:%M:%S}", "to": f"{one.ended_at:%Y-%m-%d %H:%M:%S}",
        "lasted": format_age(one.lasted_s),
    }  # fmt: skip


def _ended_json(one: NotedProblem) -> dict[str, Any]:
    return {
        "number": one.number, "alert": one.name, "severity": one.severity, "title": one.title, "topic": one.topic,
        "group": one.group, "node": one.node, "item": one.item, "text": one.text, "effect": one.effect,
        "since": one.since, "first_seen_at": one.first_seen_at, "last_seen_at": one.last_seen_at,
        "ended_at": one.ended_at, "lasted_s": one.lasted_s,
    }  # fmt: skip
