"""`route auto`, `route why`: routes that change by themselves."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mqlayer.autopilot import PartitionReport, RouteDecision, RouteReport, explain_routes, set_policy
from mqlayer.autopilot.policy import format_quiet, parse_quiet
from mqlayer.cli.option_rules import RuledCommand, excludes
from mqlayer.cli.options import TopicArgument
from mqlayer.cli.output import JsonOption, echo, format_age, format_key, show_facts, show_rows
from mqlayer.cli.panels import CHANGE, LOOK
from mqlayer.cli.permissions import check_change
from mqlayer.cli.runtime import runtime_here


def add_auto(routes: typer.Typer) -> None:
    """Add commands."""
    routes.command(cls=RuledCommand, rich_help_panel=CHANGE)(auto)
    routes.command(rich_help_panel=LOOK)(why)


@excludes("--on", "--report", "--off", why="a topic has one mode")
@excludes("--report", "--off", why="a topic has one mode")
def auto(
    topic: TopicArgument,
    on: Annotated[bool, typer.Option("--on", help="Split and merge by itself; again, if it stopped itself.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Change nothing: note the changes it would make.")] = False,
    off: Annotated[bool, typer.Option("--off", help="Neither look nor change.")] = False,
    min_partitions: Annotated[int | None, typer.Option(min=1, max=1024, help="Merge to no fewer.")] = None,
    max_partitions: Annotated[int | None, typer.Option(min=1, max=1024, help="Split to no more.")] = None,
    capacity: Annotated[
        float | None, typer.Option(min=0, help="Messages per second that a partition can take; 0: as measured.")
    ] = None,
    changes_per_hour: Annotated[int | None, typer.Option(min=1, max=720, help="No more changes than these.")] = None,
    cool_down: Annotated[float | None, typer.Option(min=5, max=3600, help="Seconds between two changes.")] = None,
    rest: Annotated[
        float | None, typer.Option(min=5, max=86400, help="Seconds before a partition moves again.")
    ] = None,
    quiet: Annotated[
        str | None, typer.Option(metavar="HH:MM-HH:MM", help="Change nothing in this time of the day (UTC); or none.")
    ] = None,
) -> None:
    """Let a topic's routes change by themselves, within bounds. Bounds that are not named stay."""
    named: dict[str, Any] = {
        "mode": "on" if on else "report" if report else "off" if off else None,
        "min_partitions": min_partitions,
        "max_partitions": max_partitions,
        "capacity_per_s": capacity,
        "changes_per_hour": changes_per_hour,
        "cool_down_s": cool_down,
        "rest_s": rest,
    }
    changes = {name: value for name, value in named.items() if value is not None}
    if capacity == 0:
        changes["capacity_per_s"] = None
    if quiet is not None:
        changes["quiet"] = parse_quiet(quiet)
    with runtime_here() as runtime:
        check_change(runtime.control)
        policy = set_policy(runtime, topic, **changes)
    show_facts({
        "topic": topic,
        "mode": policy.mode,
        "partitions": f"{policy.min_partitions} to {policy.max_partitions}",
        "capacity": "measured" if policy.capacity_per_s is None else f"{policy.capacity_per_s:g} messages/s",
        "changes per hour": policy.changes_per_hour,
        "cool-down": format_age(policy.cool_down_s),
        "rest": format_age(policy.rest_s),
        "quiet": format_quiet(policy.quiet),
    })  # fmt: skip


def why(
    topic: TopicArgument,
    last: Annotated[int, typer.Option(min=0, max=500, help="So many of the last decisions.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Say why a topic's routes changed by themselves, or did not: loads, bounds, last decisions."""
    with runtime_here() as runtime:
        found = explain_routes(runtime, topic, last=last)
    if as_json:
        show_rows([_whole(found)], as_json=True, nothing="")
        return
    _show(found)


def _show(found: RouteReport) -> None:
    policy, state = found.policy, found.state
    show_facts({
        "topic": found.topic,
        "mode": f"{policy.mode}, but it stopped itself: {state.stopped_because}" if state.stopped_at else policy.mode,
        "capacity of a partition": f"{found.capacity_per_s:,.0f} messages/s, {found.capacity_from}",
        "partitions": f"{len(found.partitions)}, {policy.min_partitions} to {policy.max_partitions} are allowed",
        "changes left this hour": f"{found.changes_left} of {policy.changes_per_hour}",
        "waits for": found.waits or None,
    })  # fmt: skip
    if state.stopped_at:
        echo(f"it begins again with: mqlayer route auto {found.topic} --on")
    echo("")
    show_rows((_drawn(one) for one in found.partitions), as_json=False, nothing="no partition")
    echo("")
    show_rows((_told(one) for one in found.decisions), as_json=False, nothing="no decision yet")


def _drawn(one: PartitionReport) -> dict[str, Any]:
    return {
        "partition": one.partition,
        "LPs": f"[{one.lp_from}, {one.lp_to})",
        "node": one.node,
        "per_s": None if one.per_s is None else f"{one.per_s:,.0f}",
        "load": None if one.load is None else f"{one.load:.0%}",
        "lag": one.lag,
        "verdict": one.verdict,
        "reason": one.reason,
    }


def _told(one: RouteDecision) -> dict[str, Any]:
    before, after = one.facts.get("heaviest_per_s"), one.facts.get("after_heaviest_per_s")
    helped = {True: "helped", False: "did not help", None: "not to be told"}[one.helped] if one.judged_at else None
    return {
        "at": one.at,
        "verdict": one.verdict if one.state in (None, "done") else f"{one.verdict}, {one.state}",
        "change": one.change_id,
        "kind": one.kind,
        "partitions": ", ".join(map(str, one.partitions)),
        "reason": one.reason,
        "key": None if one.key is None else format_key(one.key),
        "heaviest": None if before is None else f"{before:,.0f}" + ("" if after is None else f" -> {after:,.0f}"),
        "helped": helped,
    }


def _whole(found: RouteReport) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(found)
