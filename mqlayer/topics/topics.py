"""Create topics; change limits and archiving.

States of a creation; after a crash, creating again continues:

1. Rows exist, partitions ``importing``; without a route version no process sees the topic.
2. The partitions' metas exist in Redis.
3. Route version 1 is in force, partitions ``open``.
4. The application database knows the topic. Relays repeat this at start and every minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from mqlayer.domain.durability import Durability
from mqlayer.domain.names import BODY_LIMIT, DEFAULT_BODY_LIMIT, check_name, check_zone
from mqlayer.domain.retention import RETENTION_FIELDS, Retention
from mqlayer.domain.routing import NodeId, Route, even_ranges, spread
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.partition_scripts import create
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.route_cache import load_nodes, load_route
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.partition_creation import put_ended_sources

log = event_logger(__name__)

DEFAULT_PARTITIONS: Final = 8

Strategy = Literal["strict", "best_effort"]

TIMEOUTS: Final = {"lock_wait": "5s", "idle": "30s"}


@dataclass(frozen=True, slots=True)
class TopicSummary:
    """A topic as lists show it. No `version`: creation is unfinished. No `retention_days`: kept for ever."""

    topic_id: int
    name: str
    strategy: Strategy
    body_limit: int
    backlog_limit: int
    version: int | None
    partitions: int
    archived: bool
    retention_days: int | None
    keep_until_exported: bool
    deleting: bool
    durability: Durability
    retention: Retention


def create_topic(
    runtime: Runtime,
    name: str,
    *,
    partitions: int | None = None,
    strategy: Strategy = "strict",
    body_limit: int = DEFAULT_BODY_LIMIT,
    backlog_limit: int = 0,
    archived: bool = False,
    home_zone: str = "",
) -> Route:
    """Create a topic, its partitions (default 8) over all nodes, and its first route version.

    Idempotent, also concurrently. `backlog_limit`: messages per partition, 0 for none. `archived`: see `set_archived`.
    `home_zone`: its nodes are preferred.
    The application database, if any, knows the topic at once. Raises Conflict if the topic has other limits or
    another number of created partitions.
    """
    check_name("topic", name)
    ranges = even_ranges(DEFAULT_PARTITIONS if partitions is None else partitions)
    if not 1 <= body_limit <= BODY_LIMIT or backlog_limit < 0 or strategy not in ("strict", "best_effort"):
        raise InvalidInput(f"a topic takes bodies of 1 to {BODY_LIMIT} bytes, a backlog limit of 0 or more, and "
                           "the strategy strict or best_effort")  # fmt: skip
    nodes = _homes(runtime.control, check_zone(home_zone))
    limits = {
        "strategy": strategy,
        "body_limit": body_limit,
        "backlog_limit": backlog_limit,
        "archived": archived,
        "home_zone": home_zone,
    }

    def allocate(connection: Connection) -> int:
        connection.execute(query("topic_insert"), {"name": name} | limits)
        row = connection.execute(query("topic_lock"), {"name": name}).fetchone()
        if row is None:
            raise NotFound("topic", name, "somebody removed it while it was created: try again")
        _refuse_deleting(name, deleting=row[6])
        _check_same(name, dict(zip(limits, (*row[1:4], row[5], row[7]), strict=True)), limits)
        _check_partitions(connection, name, row[0], partitions)
        if not connection.execute(query("partition_list"), {"topic_id": row[0]}).fetchall():
            for (lp_from, lp_to), node in zip(ranges, spread(len(ranges), nodes), strict=True):
                facts = {"topic_id": row[0], "node_id": node, "lp_from": lp_from, "lp_to": lp_to}
                if connection.execute(query("partition_insert"), facts).fetchone() is None:
                    raise Conflict(f"node {node} began to drain meanwhile", f"again: mqlayer topic create {name}")
            if archived:
                connection.execute(query("archive_topic_put"), {"topic_id": row[0]})
            write_audit(connection, runtime.actor, "topic create", name, limits | {"partitions": len(ranges)})
        return int(row[0])

    topic_id = runtime.control.transaction(allocate)
    failpoint("topic.after_allocate")
    _make_partitions(runtime, name, topic_id)
    failpoint("topic.after_make")
    _activate(runtime.control, name, topic_id)
    failpoint("topic.after_activate")
    if runtime.application is not None:
        _attach(runtime.application, topic_id, name, body_limit)
    return load_route(runtime.control, name)


def set_archived(runtime: Runtime, name: str, *, archived: bool) -> bool:
    """Switch a topic's archiving; return whether that changed anything. Audited.

    On: archive from the streams' first record; trimming waits. Off: trimming goes on, so a later switch-on leaves a
    gap. Raises NotFound; TransactionConflict while trimming or an archiver blocks it for
    seconds.
    """

    def work(connection: Connection) -> bool:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        row = connection.execute(query("topic_archived"), {"name": name}).fetchone()
        if row is None:
            raise NotFound("topic", name, f"create it: mqlayer topic create {name}")
        topic_id, before = row
        if before == archived:
            return False
        # A running pass of trimming would go by the groups' positions alone.
        connection.execute(query("trim_keep_out"))
        if archived:
            connection.execute(query("archive_topic_put"), {"topic_id": topic_id})
        connection.execute(query("topic_archived_set"), {"topic_id": topic_id, "archived": archived})
        write_audit(
            connection, runtime.actor, "topic set", name, {"archived": archived, "before": {"archived": before}}
        )
        return True

    return runtime.control.transaction(work)


def set_home_zone(runtime: Runtime, name: str, zone: str) -> bool:
    """Say which zone's nodes a topic's partitions prefer, "" for any; return whether that changed. Audited.

    Moves nothing by itself. Raises NotFound, InvalidInput.
    """
    check_zone(zone)

    def work(connection: Connection) -> bool:
        row = connection.execute(query("topic_home_zone"), {"name": name}).fetchone()
        if row is None:
            raise NotFound("topic", name, f"create it: mqlayer topic create {name}")
        topic_id, before = row
        if before == zone:
            return False
        connection.execute(query("topic_home_zone_put"), {"topic_id": topic_id, "home_zone": zone})
        facts = {"home_zone": zone, "before": {"home_zone": before}}
        write_audit(connection, runtime.actor, "topic set", name, facts)
        return True

    return runtime.control.transaction(work)


def set_limits(runtime: Runtime, name: str, *, body_limit: int | None = None, backlog_limit: int | None = None) -> bool:
    """Change the limits of a topic in use; return whether that changed anything. Audited.

    Relays follow at once, direct producers within 5 s (1 s once a partition is full). Stored messages stay. The outbox
    of the runtime follows a body limit at once, others within a minute. Raises NotFound, InvalidInput.
    """
    if body_limit is None and backlog_limit is None:
        raise InvalidInput("nothing to set: name a limit")
    if not 1 <= (body_limit or 1) <= BODY_LIMIT or body_limit == 0 or (backlog_limit or 0) < 0:
        raise InvalidInput(f"a topic takes bodies of 1 to {BODY_LIMIT} bytes, and a backlog limit of 0 or more")

    def work(connection: Connection) -> tuple[int, int, bool]:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        row = connection.execute(query("topic_lock"), {"name": name}).fetchone()
        if row is None:
            raise NotFound("topic", name, f"create it: mqlayer topic create {name}")
        _refuse_deleting(name, deleting=row[6])
        facts = {"topic_id": row[0], "body_limit": body_limit, "backlog_limit": backlog_limit}
        ((body, backlog, _),) = connection.execute(query("topic_limits_put"), facts).fetchall()
        changed = (body, backlog) != (row[2], row[3])
        if changed:
            said = {"body_limit": body, "backlog_limit": backlog}
            was = {"body_limit": row[2], "backlog_limit": row[3]}
            write_audit(connection, runtime.actor, "topic set", name, said | {"before": was})
        return int(row[0]), int(body), changed

    topic_id, body, changed = runtime.control.transaction(work)
    failpoint("topic.after_limits")
    if runtime.application is not None:
        _attach(runtime.application, topic_id, name, body)
    return changed


def list_topics(database: Database) -> list[TopicSummary]:
    """Return all topics by name."""
    with database.connection() as connection:
        rows = connection.execute(query("topic_list")).fetchall()
    return [TopicSummary(*[*row[:-RETENTION_FIELDS], Retention(*row[-RETENTION_FIELDS:])]) for row in rows]


def attach_topics(runtime: Runtime) -> int:
    """Let the application database publish to all topics with a route, but those being deleted; return their number.
    Idempotent.

    Skips and logs a topic known under another id.
    """
    ready = [topic for topic in list_topics(runtime.control) if topic.version is not None and not topic.deleting]
    with runtime.outbox.connection() as connection:
        known = {row[0]: row[2] for row in connection.execute(query("outbox_topics")).fetchall()}
    for topic in ready:
        if known.get(topic.topic_id) != topic.body_limit:
            try:
                _attach(runtime.outbox, topic.topic_id, topic.name, topic.body_limit)
            except Conflict as error:
                log.error("topic_not_attached", extra={"topic": topic.name, "reason": str(error)})
    attach_groups(runtime)
    return len(ready)


def attach_groups(runtime: Runtime) -> None:
    """Copy group names to the application database, for rights to consume. Idempotent."""
    with runtime.control.connection() as connection:
        groups = dict(connection.execute(query("groups_named")).fetchall())
    with runtime.outbox.connection() as connection:
        known = dict(connection.execute(query("known_groups")).fetchall())
        if new := {group: scope for group, scope in groups.items() if known.get(group) != scope}:
            facts = {"group_ids": list(new), "scopes": list(new.values())}
            connection.execute(query("known_groups_put"), facts)


def _refuse_deleting(name: str, *, deleting: bool) -> None:
    if deleting:
        raise Conflict(f"topic {name!r} is being deleted", f"finish that first: mqlayer topic delete {name} --yes")


def _homes(database: Database, zone: str) -> list[NodeId]:
    """Return the nodes for a topic's first partitions. Raises NotFound."""
    nodes = load_nodes(database)
    if not nodes:
        raise NotFound("node", "(any)", "register one first: mqlayer node register NAME URL")
    taking = [node for node in nodes if node.draining_at is None]
    if not taking:
        raise NotFound("node", "(any that is not being drained)", "register another: mqlayer node register NAME URL")
    at_home = [node for node in taking if zone and node.zone == zone]
    return [node.node_id for node in at_home or taking]


def _check_same(name: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    other = {key: value for key, value in found.items() if value != wanted[key]}
    if other:
        shown = ", ".join(f"{key}={value}" for key, value in other.items())
        raise Conflict(f"topic {name!r} exists with {shown}", "nothing was changed")


def _check_partitions(connection: Connection, name: str, topic_id: int, wanted: int | None) -> None:
    ((created,),) = connection.execute(query("topic_created_partitions"), {"topic_id": topic_id}).fetchall()
    if wanted is not None and created not in (0, wanted):
        raise Conflict(
            f"topic {name!r} was created with {created} partitions, not {wanted}",
            f"nothing was changed; for more or fewer: mqlayer route split {name} PARTITION, mqlayer route merge",
        )


def _make_partitions(runtime: Runtime, name: str, topic_id: int) -> None:
    with runtime.control.connection() as connection:
        rows = connection.execute(query("partition_list"), {"topic_id": topic_id}).fetchall()
    # A route change creates its own importing successors.
    rows = [row for row in rows if row[4] == "importing" and row[5] is None]
    with NodePool.of_registered(runtime) as connections:
        for partition, node_id, lp_from, lp_to, *_ in rows:
            node_connection = connections.to(NodeId(node_id))
            if node_connection.is_cluster:
                with runtime.control.connection() as connection:
                    put_ended_sources(connection, node_connection, runtime.prefix, [partition])
            word = create(node_connection, runtime.prefix, partition, name, lp_from, lp_to, "open", "")
            if word == "conflict":
                raise Conflict(
                    f"partition {partition} exists on {node_connection.node.address} with another range",
                    "this Redis holds data of another control database: use another MQLAYER_KEY_PREFIX",
                )


def _activate(database: Database, name: str, topic_id: int) -> None:
    def work(connection: Connection) -> None:
        row = connection.execute(query("topic_lock"), {"name": name}).fetchone()
        if row is None or row[0] != topic_id or row[4] is not None:
            return
        connection.execute(query("partition_open"), {"topic_id": topic_id})
        connection.execute(query("route_insert_first"), {"topic_id": topic_id})
        connection.execute(query("topic_version_raise"), {"topic_id": topic_id, "version": None})

    database.transaction(work)


def _attach(application: Database, topic_id: int, name: str, body_limit: int) -> None:
    def work(connection: Connection) -> None:
        facts = {"topic_id": topic_id, "name": name, "body_limit": body_limit}
        connection.execute(query("outbox_topic_put"), facts)
        if connection.execute(query("outbox_topic_limit"), facts).fetchone() is None:
            raise Conflict(
                f"the outbox knows topic {name!r} by another id than {topic_id}, or the id by another name",
                "the control database lost a topic: the page 'Handle a Postgres fail-over' says how to go on with it",
            )
        connection.execute(query("outbox_counters_put"), facts)
        connection.execute(query("outbox_counters_limit"), facts)

    application.transaction(work)
