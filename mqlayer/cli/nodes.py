"""`node`: Redis nodes and their users."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mqlayer.autopilot.node_balance import plan_balance
from mqlayer.cli.addresses import settings_here
from mqlayer.cli.curves import HoursOption, PointsOption, show_history
from mqlayer.cli.node_drain import show_balance, show_plan, show_report, show_step
from mqlayer.cli.option_rules import RuledCommand, excludes, needs, planned
from mqlayer.cli.options import PlanOption, YesOption, echo_plan
from mqlayer.cli.output import JsonOption, echo, pluralize, show_rows
from mqlayer.cli.panels import CHANGE, LOOK, REPAIR, START
from mqlayer.cli.permissions import check_change
from mqlayer.cli.runtime import control_here, runtime_here
from mqlayer.domain.durability import REPLICAS_LIMIT
from mqlayer.domain.node_runs import short_run
from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from mqlayer.redis.access import read_secret
from mqlayer.redis.acl import acl_file_line, setuser_command
from mqlayer.redis.acl_check import RequiredAccess
from mqlayer.redis.node_connection import Node
from mqlayer.redis.roles import RedisRole
from mqlayer.redis.server_info import describe_access, read_access
from mqlayer.routes import carry_out_moves, drain_node, give_up_node, plan_drain, refuse_class_loss
from mqlayer.settings import Settings
from mqlayer.topics import (
    find_node,
    list_nodes,
    rearm_node,
    register_node,
    remove_node,
    set_node_address,
    set_node_replicas,
    set_node_zone,
    stop_drain,
)

AcceptLossOption = Annotated[bool, typer.Option(help="Accept the loss of messages that no outbox holds any more.")]
ReplicasOption = Annotated[
    int | None, typer.Option(min=0, max=REPLICAS_LIMIT, help="How many replicas it has, for topics that wait for them.")
]
FormerOption = Annotated[bool, typer.Option(help="Take an old primary back, and accept the messages that it lacks.")]


class Role(StrEnum):
    """Roles of Redis users."""

    PUBLISHER = "publisher"
    CONSUMER = "consumer"
    RELAY = "relay"
    WORKER = "worker"
    VIEWER = "viewer"
    OPERATOR = "operator"


class RedisRelease(StrEnum):
    """Redis releases whose ACL rules differ."""

    SIX = "6.2"
    SEVEN = "7.0"
    SEVEN_TWO = "7.2"


ACL_VERSIONS: Final = {
    RedisRelease.SIX: (6, 2, 0),
    RedisRelease.SEVEN: (7, 0, 0),
    RedisRelease.SEVEN_TWO: (7, 2, 0),
}

nodes = typer.Typer(no_args_is_help=True, help="Redis nodes: register, list, arm again, give another address.")


def add_to(app: typer.Typer) -> None:
    """Add commands."""
    app.add_typer(nodes, name="node")


@nodes.command(rich_help_panel=START)
def register(
    name: Annotated[str, typer.Argument(help="a-z first, then a-z 0-9 _ . -")],
    url: Annotated[str, typer.Argument(help="redis://… or rediss://… of the primary, sentinel://… or cluster://….")],
    zone: Annotated[str, typer.Option(help="Where it is, such as eu-1a.")] = "",
    replicas: ReplicasOption = None,
) -> None:
    """Register a Redis as a node and arm it. Repeatable."""
    with runtime_here() as runtime:
        check_change(runtime.control)
        node = register_node(runtime, name=name, url=url, zone=zone)
        if replicas is not None:
            set_node_replicas(runtime, name, replicas)
    echo(f"{node.name} is {node.address}")


@nodes.command("list", rich_help_panel=LOOK)
def list_(as_json: JsonOption = False) -> None:
    """List the nodes with their armed runs."""
    with control_here() as database:
        found = list_nodes(database)
    show_rows(map(_row, found), as_json=as_json, nothing="no nodes: mqlayer node register NAME URL")


def _row(node: Node) -> dict[str, Any]:
    armed = short_run(node.armed_run_id)
    where = {"name": node.name, "address": node.address, "zone": node.zone}
    return where | {"replicas": node.replicas, "armed_run": armed, "draining_at": node.draining_at}


@nodes.command(rich_help_panel=REPAIR)
def rearm(
    name: Annotated[str, typer.Argument(help="The node's name.")],
    empty: Annotated[bool, typer.Option(help="Its data are gone: the data there belong to another system.")] = False,
    accept_loss: AcceptLossOption = False,
    former: FormerOption = False,
) -> None:
    """Arm a restarted or replaced node. Repeatable."""
    with runtime_here() as runtime:
        check_change(runtime.control, Right.RELAY, Right.WORK)
        node, count = rearm_node(runtime, name, empty=empty, accept_loss=accept_loss, former=former)
    echo(f"{node.name} is armed; {count} assignments got a new epoch")


@nodes.command(cls=RuledCommand, rich_help_panel=LOOK)
@excludes(
    "--check", "--password-file", "--password-stdin", "--acl-file", "--redis", "--cluster",
    why="--check asks the nodes about the user that is there, and prints no rules",
)  # fmt: skip
@excludes("--password-file", "--password-stdin", why="a user has one password")
def acl(
    roles: Annotated[list[Role], typer.Argument(help="Kinds of process that log in as the user; rights add up.")],
    user: Annotated[str, typer.Option(help="The user's name; else mqlayer- and the first role.")] = "",
    password_file: Annotated[Path | None, typer.Option(help="The file that holds the password.")] = None,
    password_stdin: Annotated[bool, typer.Option("--password-stdin", help="Read the password from stdin.")] = False,
    acl_file: Annotated[bool, typer.Option("--acl-file", help="Print a line for an ACL file.")] = False,
    redis: Annotated[RedisRelease, typer.Option(help="The oldest server that must take it.")] = RedisRelease.SEVEN,
    cluster: Annotated[bool, typer.Option("--cluster", help="For the servers of a Redis Cluster.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Ask every node whether the user may do all that.")] = False,
) -> None:
    """Print the rules of a Redis user: exactly what its processes need.

    The password appears as a hash or placeholder. `--check` changes nothing.
    """
    settings, chosen = settings_here(), [RedisRole(role.value) for role in roles]
    name = user or f"mqlayer-{chosen[0]}"
    if check:
        _check(settings, chosen, name)
        return
    password = read_secret(str(password_file)) if password_file else None
    if password_stdin:
        password = typer.get_text_stream("stdin").readline().rstrip("\r\n")
        if not password:
            raise InvalidInput("there is no password on stdin")
    line = acl_file_line(
        name, chosen, prefix=settings.key_prefix, password=password, version=ACL_VERSIONS[redis], cluster=cluster
    )
    # A rule is copied as a whole.
    echo(line if acl_file else setuser_command(line), lines=True)


def _check(settings: Settings, roles: list[RedisRole], user: str) -> None:
    failed = False
    with Database(settings.control_dsn()) as database:
        found = list_nodes(database)
    for node in found:
        for role in roles:
            required = RequiredAccess(role, settings.key_prefix, node.is_cluster)
            rights = read_access(node, required, user=user)
            failed = failed or bool(rights.missing)
            echo(f"{node.name} ({node.address}), {role}: {describe_access(rights, required)}")
    if failed:
        raise typer.Exit(1)


@nodes.command(rich_help_panel=LOOK)
def history(
    name: Annotated[str, typer.Argument(help="The node's name.")],
    hours: HoursOption = 24.0,
    points: PointsOption = 40,
    as_json: JsonOption = False,
) -> None:
    """Show a node's memory and operations per second over time, by samples of each minute."""
    show_history("node", name, None, hours, points, as_json=as_json)


@nodes.command("set", cls=RuledCommand, rich_help_panel=CHANGE)
@needs("--empty", "--url", why="it accepts another server's state")
@needs("--accept-loss", "--url", why="a zone loses nothing")
@needs("--former", "--url", why="it accepts another server")
def set_(
    name: Annotated[str, typer.Argument(help="The node's name.")],
    url: Annotated[
        str | None, typer.Option(help="Where it is from now on: redis://…, rediss://…, sentinel://… or cluster://….")
    ] = None,
    zone: Annotated[str | None, typer.Option(help="Its zone, such as eu-1a; '' for none.")] = None,
    replicas: ReplicasOption = None,
    empty: Annotated[bool, typer.Option(help="It starts empty there: messages only on the old one are lost.")] = False,
    accept_loss: AcceptLossOption = False,
    former: FormerOption = False,
) -> None:
    """Change a node's zone, its replicas, or its address, and arm that server."""
    if (url, zone, replicas) == (None, None, None):
        raise InvalidInput("say what to set: --url URL, --zone ZONE, --replicas NUMBER")
    with runtime_here() as runtime:
        check_change(runtime.control)
        if zone is not None:
            changed = set_node_zone(runtime, name, zone)
            echo(f"{name} is {f'in zone {zone}' if zone else 'in no zone'}{'' if changed else ', as before'}")
        if replicas is not None:
            changed = set_node_replicas(runtime, name, replicas)
            echo(f"{name} has {pluralize(replicas, 'replica')}{'' if changed else ', as before'}")
        if url is None:
            return
        node, count = set_node_address(runtime, name, url, empty=empty, accept_loss=accept_loss, former=former)
    echo(f"{node.name} is {node.address}; {count} assignments got a new epoch")


@nodes.command(cls=RuledCommand, rich_help_panel=CHANGE)
@planned
@excludes("--stop", "--plan", "--yes", "--timeout", why="--stop lets the node get partitions again, and moves none")
@needs("--timeout", "--yes", why="it ends the waiting; what is left goes on with the same command")
def drain(
    name: Annotated[str, typer.Argument(help="The node's name.")],
    _plan: PlanOption = False,
    yes: YesOption = False,
    timeout: Annotated[float | None, typer.Option(min=0, help="Wait for groups so many seconds at most.")] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Let it get partitions again; moved ones stay away.")] = False,
) -> None:
    """Move all partitions off a node under load, and wait until every group is through.

    Repeatable: it goes on where it was interrupted. Exit code 1 if something is left.
    """
    with runtime_here() as runtime:
        if stop:
            check_change(runtime.control)
            word = "gets partitions again" if stop_drain(runtime, name) else "is not being drained"
            echo(f"node {name} {word}")
            return
        if yes:
            check_change(runtime.control)
        show_plan(plan_drain(runtime, name))
        if not yes:
            echo("nothing was changed: --yes does this")
            return
        report = drain_node(runtime, name, timeout_s=timeout, tell=show_step)
    show_report(name, report)


@nodes.command(cls=RuledCommand, rich_help_panel=CHANGE)
@planned
def balance(_plan: PlanOption = False, yes: YesOption = False) -> None:
    """Move partitions off loaded nodes under load, as automatic routes would.

    Repeatable: each run plans anew. Exit code 1 if a move failed.
    """
    with runtime_here() as runtime:
        if yes:
            check_change(runtime.control)
        plan = plan_balance(runtime)
        show_balance(plan)
        if not yes:
            echo("nothing was changed: --yes does this")
            return
        failed = carry_out_moves(runtime, [one.move for one in plan.moves], tell=show_step)
    if failed:
        raise typer.Exit(1)


@nodes.command(cls=RuledCommand, rich_help_panel=CHANGE)
@planned
def remove(
    name: Annotated[str, typer.Argument(help="The node's name.")], _plan: PlanOption = False, yes: YesOption = False
) -> None:
    """Forget an empty node; its name is free then. Refused while it holds partitions."""
    with runtime_here() as runtime:
        if not yes:
            find_node(runtime.control, name)
            echo_plan(f"node {name} would be forgotten, if it is empty")
            return
        check_change(runtime.control)
        remove_node(runtime, name)
    echo(f"node {name} is removed: its Redis is used no more")


@nodes.command(cls=RuledCommand, rich_help_panel=REPAIR)
@planned
def lost(
    name: Annotated[str, typer.Argument(help="The node's name.")], _plan: PlanOption = False, yes: YesOption = False
) -> None:
    """Give up a node that never comes back: move its partitions, report the loss."""
    with runtime_here() as runtime:
        if not yes:
            refuse_class_loss(runtime, find_node(runtime.control, name))
            echo_plan(f"node {name} would be given up, and messages that only it holds are lost: better wait for it")
            return
        check_change(runtime.control)
        loss = give_up_node(runtime, name)
    echo(f"{len(loss.moved)} partitions moved, {len(loss.recreated)} sealed ones made anew")
    echo(f"{loss.resent} messages are sent again from the outbox; the fence knows those that were applied")
    echo(f"{loss.only_on_node} messages are in no outbox any more: a group loses those that it had not settled")
    if loss.direct:
        echo("direct producers published there: a group loses the messages of these that it had not settled")
