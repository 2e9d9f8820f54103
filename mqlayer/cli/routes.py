"""`route`: split, merge, move; show and history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mqlayer.cli.auto_routes import add_auto
from mqlayer.cli.drain_watch import watch_draining
from mqlayer.cli.option_rules import RuledCommand, excludes, needs, planned
from mqlayer.cli.options import PlanOption, TopicArgument, YesOption, echo_plan
from mqlayer.cli.output import JsonOption, echo, show_rows
from mqlayer.cli.panels import CHANGE, LOOK, REPAIR
from mqlayer.cli.permissions import check_change
from mqlayer.cli.runtime import control_here, runtime_here
from mqlayer.domain.routing import LP_COUNT, NodeId, Route
from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from mqlayer.routes import (
    ChangePlan,
    RouteChange,
    RouteRange,
    SplitReport,
    apply_change,
    apply_plan,
    drop_change,
    finish_changes,
    finish_earlier,
    planned_merge,
    planned_move,
    planned_split,
    planned_splits,
    read_split_report,
    reopen_forgotten,
    route_history,
    route_ranges,
)
from mqlayer.runtime.route_cache import load_route, node_names
from mqlayer.runtime.runtime import Runtime

STRIP: Final = 32

PartitionArgument = Annotated[int, typer.Argument(help="A partition in force: mqlayer route show TOPIC.")]
WatchOption = Annotated[bool, typer.Option("--watch", help="With --yes: then watch until every group has drained.")]
TimeoutOption = Annotated[float | None, typer.Option(min=0, help="Watch for so many seconds at most.")]
VersionOption = Annotated[int | None, typer.Option(min=1, help="Refuse unless the route is at this version.")]
NodeOption = Annotated[str | None, typer.Option("--to", metavar="NODE", help="The node of the new partition.")]

UnreachableOption = Annotated[bool, typer.Option(help="Go on where a node does not answer; it seals when it is back.")]
LossOption = Annotated[bool, typer.Option(help="Even if direct producers lose messages; these are told.")]

routes = typer.Typer(no_args_is_help=True, help="Routes: split, merge and move partitions while messages flow.")


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    add_auto(routes)
    app.add_typer(routes, name="route")


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """What to do with a plan."""

    apply: bool
    watch: bool
    timeout_s: float | None
    if_version: int | None


@routes.command(cls=RuledCommand, rich_help_panel=CHANGE)
@planned
@needs("--watch", "--yes", why="to watch what was applied before: mqlayer route watch TOPIC")
@needs("--timeout", "--watch", why="it ends the watching")
@excludes("--from-report", "--at", "--measure", why="a split is where the report says, or where you do")
@excludes("--at", "--measure", why="a split is at the LPs named, or where the measured load is halved, not both")
def split(
    topic: TopicArgument,
    partition: Annotated[
        int | None, typer.Argument(help="A partition in force; all that the report splits without one.")
    ] = None,
    at: Annotated[
        list[int] | None,
        typer.Option(metavar="LP", help="Split at this LP; may be repeated. Else where the load is halved."),
    ] = None,
    from_report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Split where this report of mqlayer analytics skew says.")
    ] = None,
    to: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="One node for all new partitions, or one for each.")
    ] = None,
    measure: Annotated[
        float, typer.Option(min=0, help="Measure the load for so many seconds; 0: all messages ever.")
    ] = 0.0,
    if_version: VersionOption = None,
    _plan: PlanOption = False,
    yes: YesOption = False,
    watch: WatchOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Split a partition at LPs or half its load, or several by a report."""
    options = ChangeOptions(yes, watch, timeout, if_version)
    if from_report is not None:
        _split_by_report(topic, partition, read_split_report(from_report), to or (), options)
        return
    if partition is None:
        raise InvalidInput(f"name the partition to split (mqlayer route show {topic}), or a report: --from-report FILE")
    chosen = partition

    def planned(runtime: Runtime) -> ChangePlan:
        return planned_split(runtime, topic, chosen, at=at or (), to=to or (), measure_s=measure, if_version=if_version)

    _change(topic, planned, options)


@routes.command(cls=RuledCommand, rich_help_panel=CHANGE)
@planned
@needs("--watch", "--yes", why="to watch what was applied before: mqlayer route watch TOPIC")
@needs("--timeout", "--watch", why="it ends the watching")
def merge(
    topic: TopicArgument,
    partitions: Annotated[list[int], typer.Argument(metavar="PARTITION PARTITION …", help="Adjacent partitions.")],
    to: NodeOption = None,
    if_version: VersionOption = None,
    _plan: PlanOption = False,
    yes: YesOption = False,
    watch: WatchOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Merge adjacent partitions, on the named node or the first's."""
    _change(
        topic,
        lambda runtime: planned_merge(runtime.control, topic, partitions, to=to, if_version=if_version),
        ChangeOptions(yes, watch, timeout, if_version),
    )


@routes.command(cls=RuledCommand, rich_help_panel=CHANGE)
@planned
@needs("--watch", "--yes", why="to watch what was applied before: mqlayer route watch TOPIC")
@needs("--timeout", "--watch", why="it ends the watching")
@needs("--accept-loss", "--unreachable", why="nothing is lost while the node answers")
def move(
    topic: TopicArgument,
    partition: PartitionArgument,
    to: NodeOption = None,
    unreachable: UnreachableOption = False,
    accept_loss: LossOption = False,
    if_version: VersionOption = None,
    _plan: PlanOption = False,
    yes: YesOption = False,
    watch: WatchOption = False,
    timeout: TimeoutOption = None,
) -> None:
    """Move a partition to the named node, or to the other with the fewest."""

    def planned(runtime: Runtime) -> ChangePlan:
        return planned_move(
            runtime.control,
            topic,
            partition,
            to=to,
            unreachable=unreachable,
            accept_loss=accept_loss,
            if_version=if_version,
        )

    _change(topic, planned, ChangeOptions(yes, watch, timeout, if_version))


@routes.command(rich_help_panel=LOOK)
def show(
    topic: TopicArgument,
    version: Annotated[int | None, typer.Option(min=1, help="This version; else the one in force.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a route: LPs, partitions, nodes, states, parents."""
    with control_here() as database:
        lines = route_ranges(database, topic, version)
    rows = (asdict(line) for line in lines) if as_json else map(_drawn, lines)
    if not as_json:
        echo(f"topic {topic}, route version {lines[0].version}")
    show_rows(rows, as_json=as_json, nothing="")


@routes.command(rich_help_panel=LOOK)
def history(topic: TopicArgument, as_json: JsonOption = False) -> None:
    """List route changes, with milliseconds per step."""
    with control_here() as database:
        found = route_history(database, topic)
    rows = (_json(change, as_json=as_json) for change in found)
    show_rows(rows, as_json=as_json, nothing=f"version 1 of topic {topic} was never changed")


@routes.command("watch", rich_help_panel=LOOK)
def watch_(topic: TopicArgument, timeout: TimeoutOption = None) -> None:
    """Watch groups drain sealed partitions; exit code 1 at the timeout."""
    with runtime_here() as runtime:
        load_route(runtime.control, topic)
        watch_draining(runtime, topic, timeout)


@routes.command(cls=RuledCommand, rich_help_panel=REPAIR)
@needs("--accept-loss", "--unreachable", why="nothing is lost while the nodes answer")
def repair(
    topic: Annotated[str | None, typer.Argument(help="Only this topic.")] = None,
    unreachable: UnreachableOption = False,
    accept_loss: LossOption = False,
) -> None:
    """Finish interrupted changes; exit code 1 if one has to wait."""
    with runtime_here() as runtime:
        check_change(runtime.control, Right.WORK)
        if topic is not None:
            load_route(runtime.control, topic)
        came_to = finish_changes(runtime, topic=topic, unreachable=unreachable, accept_loss=accept_loss)
    waiting = {change: word for change, word in came_to.items() if word not in ("done", "dropped")}
    for change, word in came_to.items():
        echo(f"change {change} waits: {word}" if change in waiting else f"change {change} is {word}",
                   err=change in waiting)  # fmt: skip
    if not came_to:
        echo("no change is open")
    if waiting:
        raise typer.Exit(1)


@routes.command(cls=RuledCommand, rich_help_panel=REPAIR)
@planned
def reopen(topic: TopicArgument, _plan: PlanOption = False, yes: YesOption = False) -> None:
    """Undo a change that the control database lost in a fail-over."""
    with runtime_here() as runtime:
        if not yes:
            load_route(runtime.control, topic)
            echo_plan(f"messages that only forgotten partitions hold are lost: see mqlayer verify {topic} first")
            return
        check_change(runtime.control)
        done = reopen_forgotten(runtime, topic)
    for partition, count in done.deleted.items():
        echo(f"partition {partition}, which Postgres does not know, is deleted; it had {count} messages")
    for partition in done.opened:
        echo(f"partition {partition} is open again")
    if not done.opened:
        echo("nothing is sealed for a change that is not known")


@routes.command(rich_help_panel=REPAIR)
def drop(topic: TopicArgument) -> None:
    """Give up an open change while nothing is sealed."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        load_route(runtime.control, topic)
        change = drop_change(runtime, topic)
    echo(f"change {change} is dropped; the route is as before")


def _change(topic: str, planned: Callable[[Runtime], ChangePlan], options: ChangeOptions) -> None:
    with runtime_here() as runtime:
        if options.apply:
            check_change(runtime.control)
        # Finishing an earlier change changes the version, which --if-version would refuse.
        if options.apply and options.if_version is None:
            finish_earlier(runtime, topic)
        plan = planned(runtime)
        _show_plans(runtime.control, [plan])
        if not options.apply:
            echo("nothing was changed: --yes does this")
            return
        # Nothing is open: this or the plan saw to that.
        _show_applied(plan, apply_plan(runtime, plan))
        if options.watch:
            watch_draining(runtime, topic, options.timeout_s)


def _split_by_report(
    topic: str, partition: int | None, report: SplitReport, to: Sequence[str], options: ChangeOptions
) -> None:
    if options.if_version not in {None, report.version}:
        raise InvalidInput(f"--if-version {options.if_version}, but the report is of route version {report.version}")
    with runtime_here() as runtime:
        if options.apply:
            check_change(runtime.control)

        def planned(done: int) -> list[ChangePlan]:
            return planned_splits(runtime, topic, report, partition=partition, to=to, done=done)

        plans = planned(0)
        _show_plans(runtime.control, plans)
        if not options.apply:
            echo("nothing was changed: --yes does this")
            return
        for done in range(len(plans)):
            plan = planned(done)[0]
            _show_applied(plan, apply_change(runtime, plan))
        if options.watch:
            watch_draining(runtime, topic, options.timeout_s)


def _show_plans(database: Database, plans: Iterable[ChangePlan]) -> None:
    names = node_names(database)
    for plan in plans:
        for line in _plan_lines(plan, names):
            echo(line)


def _show_applied(plan: ChangePlan, route: Route) -> None:
    echo(f"route version {route.version} of topic {plan.topic} is in force")


def _plan_lines(plan: ChangePlan, names: dict[NodeId, str]) -> Iterable[str]:
    without = ", without the parent's node where it does not answer" if plan.mode == "unreachable" else ""
    yield f"{plan.kind} of topic {plan.topic}: route version {plan.base} -> {plan.version}{without}"
    for parent in plan.parents:
        yield f"  ends partition {parent.partition}: LPs [{parent.lp_from}, {parent.lp_to}) on {names[parent.node]}"
    for made in plan.successors:
        yield f"  makes a partition: LPs [{made.lp_from}, {made.lp_to}) on {names[made.node]}"


def _drawn(line: RouteRange) -> dict[str, Any]:
    cells = range(0, LP_COUNT, LP_COUNT // STRIP)
    strip = "".join("#" if line.lp_from < at + LP_COUNT // STRIP and at < line.lp_to else "." for at in cells)
    return {
        "partition": line.partition,
        "LPs": f"[{line.lp_from}, {line.lp_to})",
        "of all": strip,
        "node": line.node,
        "state": line.state,
        "from": _numbers(line.parents),
    }


def _json(change: RouteChange, *, as_json: bool) -> dict[str, Any]:
    parents, successors = list(change.parents), list(change.successors)
    moved: dict[str, Any] = (
        {"parents": parents, "successors": successors}
        if as_json
        else {"partitions": f"{_numbers(parents) or '-'} -> {_numbers(successors) or '-'}"}
    )
    planned_at = change.planned_at
    return {
        "version": change.version,
        "change": change.change_id,
        "kind": change.kind,
        "state": change.state,
        **moved,
        "actor": change.actor,
        "planned_at": planned_at,
        "seal_ms": _ms(change.planned_at, change.sealed_at),
        "open_ms": _ms(change.sealed_at, change.opened_at),
        "done_ms": _ms(change.opened_at, change.ended_at),
    }


def _ms(since: datetime | None, until: datetime | None) -> float | None:
    return None if since is None or until is None else round((until - since).total_seconds() * 1000, 1)


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
