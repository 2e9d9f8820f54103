"""Delete topics (docs/design/deleting-topics.md).

*live* -> *deleting* (relays attach it no more) -> dropped by its outboxes (publishers are refused) -> *deleted* (groups
are retired, the name is free) -> tombstones on nodes. After a crash the command again goes on; the job `repair_routes`
makes the tombstones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from psycopg import errors as pg_errors

from mqlayer.archive import archive_status
from mqlayer.domain.protocol import PRODUCER_TOPICS
from mqlayer.errors import Conflict, NotFound, TransactionConflict
from mqlayer.failpoints import failpoint
from mqlayer.groups.retirement import retire_locked
from mqlayer.inspect import GroupStatus, topic_status
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.bounded_delete import forget_rows
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.protocol import InForce, read_protocols
from mqlayer.postgres.queries import query
from mqlayer.routes import retire_partitions
from mqlayer.runtime.presence import LEASE_S
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

TIMEOUTS: Final = {"lock_wait": "5s", "idle": "30s"}
DROP_TIMEOUTS: Final = {"lock_wait": "500ms", "idle": "30s"}
"""Below Postgres's `deadlock_timeout`: publishers that lock LPs in another order are never the ones that give way."""
DROP_TIME: Final = "2s"
"""In all: it waits for one LP after another, and publishers of those that it has wait for it."""
LOCKS: Final = ("topic_changes_lock", "topic_groups_lock")
UNKNOWN: Final = "see those that there are: mqlayer topic list"


@dataclass(frozen=True, slots=True)
class TopicDeletionPlan:
    """`obstacles`: reasons against an unforced deletion. `deleted_as`: its name if it is deleted already."""

    topic: str
    deleted_as: str | None
    partitions: int
    records: int
    groups: tuple[str, ...]
    obstacles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TopicDeletionReport:
    """A deleted topic. `deleted_as`: the name of its archive; `left`: partitions per node that did not answer."""

    topic: str
    deleted_as: str
    left: dict[str, int]


class _DeletionTarget(NamedTuple):
    topic_id: int
    name: str
    deleted_as: str | None


class _LockedGroup(NamedTuple):
    group_id: int
    name: str
    living: int


def planned_deletion(runtime: Runtime, name: str) -> TopicDeletionPlan:
    """Plan the deletion of a topic; change nothing. Raises NotFound."""
    topic = _find(runtime.control, name)
    if topic.deleted_as is not None:
        return TopicDeletionPlan(topic.name, topic.deleted_as, 0, 0, (), ())
    status = topic_status(runtime, topic.name)
    groups = tuple(one.facts.name for one in status.groups if one.facts.state != "retired")
    records = sum(one.records or 0 for one in status.partitions)
    obstacles = (*_obstacles(runtime, topic), *_other_outboxes(runtime, topic))
    return TopicDeletionPlan(topic.name, None, len(status.partitions), records, groups, obstacles)


def delete_topic(runtime: Runtime, name: str, *, force: bool = False) -> TopicDeletionReport:
    """Delete a topic with its groups and messages; its archive stays, as NAME@ID. Repeatable.

    Raises NotFound; Conflict while something still needs the topic, unless `force`, and while publishers hold its LPs.
    """
    topic = _find(runtime.control, name)
    if topic.deleted_as is None:
        _refuse_obstacles(runtime, topic, force=force)
        _begin(runtime, topic, force=force)
        failpoint("topic_delete.after_begin")
    _drop_from_outbox(runtime, topic, force=force)
    if topic.deleted_as is None:
        # Publishers are refused by now, so this is the last look.
        _refuse_obstacles(runtime, topic, force=force)
        deleted_as = _end(runtime, topic, force=force)
        failpoint("topic_delete.after_end")
    else:
        deleted_as = topic.deleted_as
    retire_partitions(runtime)
    return TopicDeletionReport(topic.name, deleted_as, _left(runtime.control, topic))


def _find(database: Database, name: str) -> _DeletionTarget:
    with database.connection() as connection:
        row = connection.execute(query("topic_to_delete"), {"name": name}).fetchone()
    if row is None:
        raise NotFound("topic", name, UNKNOWN)
    return _DeletionTarget(*row)


def _begin(runtime: Runtime, topic: _DeletionTarget, *, force: bool) -> None:
    def work(connection: Connection) -> None:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        facts = {"topic_id": topic.topic_id}
        if connection.execute(query("topic_deletion_begin"), facts).fetchone():
            write_audit(connection, runtime.actor, "topic delete", topic.name, facts | {"force": force})

    runtime.control.transaction(work)


def _drop_from_outbox(runtime: Runtime, topic: _DeletionTarget, *, force: bool) -> None:
    if runtime.application is None:
        return
    facts = {"topic_id": topic.topic_id, "name": topic.name, "force": force}

    def work(connection: Connection) -> None:
        connection.execute(query("transaction_patience"), DROP_TIMEOUTS)
        connection.execute(query("statement_time"), {"wait": DROP_TIME})
        try:
            row = connection.execute(query("topic_drop"), facts).fetchone()
        except pg_errors.QueryCanceled as error:
            raise _busy(topic) from error
        if row is not None and not row[0]:
            raise Conflict(
                f"topic {topic.name!r} is being deleted, but {'; '.join(_waiting(*row[1:]))}",
                "stop its publishers and repeat the command once relays sent that, or delete it with --force",
            )

    try:
        runtime.application.transaction(work)
    except TransactionConflict as error:
        raise _busy(topic) from error
    failpoint("topic_delete.after_drop")
    while forget_rows(runtime.application, query("topic_rows_drop"), {"topic_id": topic.topic_id}):
        failpoint("topic_delete.after_rows")
    source = _source_of(runtime.control, runtime.application)
    if source is not None:
        with runtime.control.connection() as connection:
            connection.execute(query("topic_detach"), {"topic_id": topic.topic_id, "source_id": source})
    failpoint("topic_delete.after_detach")


def _busy(topic: _DeletionTarget) -> Conflict:
    return Conflict(f"publishers hold LPs of topic {topic.name!r}", "end their transactions, then repeat")


def _end(runtime: Runtime, topic: _DeletionTarget, *, force: bool) -> str:
    facts = {"topic_id": topic.topic_id}

    def work(connection: Connection) -> str:
        deleted_as, groups = _lock(connection, topic)
        if deleted_as is not None:
            return deleted_as
        if not force:
            _refuse([*_living(groups), *_outboxes(connection, topic), *_producers(connection, topic)])
        connection.execute(query("topic_changes_drop"), facts)
        gone = connection.execute(query("topic_partitions_delete"), facts).fetchall()
        for group_id, *_ in groups:
            retire_locked(connection, group_id)
        ((deleted_as, _),) = connection.execute(query("topic_deletion_end"), facts).fetchall()
        told = {"groups": [name for _, name, _ in groups], "partitions": len(gone), "deleted_as": deleted_as}
        write_audit(connection, runtime.actor, "topic deleted", topic.name, facts | told | {"force": force})
        failpoint("topic_delete.before_end")
        return str(deleted_as)

    deleted_as = runtime.control.transaction(work)
    log.warning("topic_deleted", extra={"topic": topic.name, "deleted_as": deleted_as})
    return deleted_as


def _lock(connection: Connection, topic: _DeletionTarget) -> tuple[str | None, list[_LockedGroup]]:
    """Lock the topic with its groups and open change; return its name if it is deleted, and the groups."""
    facts = {"topic_id": topic.topic_id}
    connection.execute(query("transaction_patience"), TIMEOUTS)
    # A driver locks its change before the topic, a new instance of a broadcast group that group before the topic.
    changes, groups = (connection.execute(query(name), facts).fetchall() for name in LOCKS)
    ((deleted_as,),) = connection.execute(query("topic_deletion_lock"), facts).fetchall()
    if connection.execute(query("topic_open_work"), facts).fetchone() != (len(changes), len(groups)):
        raise TransactionConflict("", f"topic {topic.name!r} got a group or route change meanwhile")
    return deleted_as, [_LockedGroup(*row) for row in groups]


def _left(database: Database, topic: _DeletionTarget) -> dict[str, int]:
    with database.connection() as connection:
        return dict(connection.execute(query("topic_partitions_left"), {"topic_id": topic.topic_id}).fetchall())


def _refuse_obstacles(runtime: Runtime, topic: _DeletionTarget, *, force: bool) -> None:
    if not force:
        _refuse(_obstacles(runtime, topic))


def _refuse(obstacles: Sequence[str]) -> None:
    if obstacles:
        raise Conflict("; ".join(obstacles), "see to that, or delete the topic all the same with --force")


def _obstacles(runtime: Runtime, topic: _DeletionTarget) -> tuple[str, ...]:
    status = topic_status(runtime, topic.name)
    found = [line for group in status.groups for line in _needs(group)]
    found += [f"node {node} does not tell what it holds: {why}" for node, why in sorted(status.unreachable.items())]
    if status.archived:
        found += _unarchived(runtime, topic)
    if runtime.application is not None:
        facts = {"topic_id": topic.topic_id, "name": topic.name}
        with runtime.application.connection() as outbox:
            found += _waiting(*outbox.execute(query("topic_waiting"), facts).fetchall()[0])
    with runtime.control.connection() as connection:
        found += _producers(connection, topic)
    return tuple(found)


def _needs(group: GroupStatus) -> Iterator[str]:
    name = group.facts.name
    if group.facts.state == "retired":
        return
    if group.facts.alive:
        yield f"group {name} has {group.facts.alive} living members"
    if group.lag:
        yield f"group {name} has not settled {group.lag} messages"
    if group.parked.messages:
        yield f"group {name} has {group.parked.messages} parked messages"


def _living(groups: Sequence[_LockedGroup]) -> list[str]:
    return [f"group {name} has {living} living members" for _, name, living in groups if living]


def _unarchived(runtime: Runtime, topic: _DeletionTarget) -> Iterator[str]:
    for archive in archive_status(runtime, topic=topic.name):
        if archive.lag:
            yield f"{archive.lag} messages are not archived yet"
        if archive.gaps:
            yield f"the archive waits at {archive.gaps} gaps"


def _waiting(unsent: int, delayed: int, voided: int) -> list[str]:
    counts = {"no relay has sent": unsent, "are delayed": delayed, "were passed over": voided}
    return [f"{count} messages of the outbox {what}" for what, count in counts.items() if count]


def _other_outboxes(runtime: Runtime, topic: _DeletionTarget) -> list[str]:
    own = None if runtime.application is None else _source_of(runtime.control, runtime.application)
    with runtime.control.connection() as connection:
        return _outboxes(connection, topic, other_than=own)


def _outboxes(connection: Connection, topic: _DeletionTarget, *, other_than: int | None = None) -> list[str]:
    rows = connection.execute(query("topic_outboxes"), {"topic_id": topic.topic_id}).fetchall()
    return [
        f"the outbox of database {name!r} (source {source}) publishes to it: run this with MQLAYER_APP_DSN of that one"
        for source, name in rows
        if source != other_than
    ]


def _producers(connection: Connection, topic: _DeletionTarget) -> list[str]:
    # Before that, code may live that says nothing.
    if not InForce(read_protocols(connection, "control").served.in_force).has(PRODUCER_TOPICS):
        return []
    facts = {"topic_id": topic.topic_id, "since": PRODUCER_TOPICS.since}
    return [
        f"direct producer {name} on {host} (pid {pid}) "
        + (f"lives: stop it, or wait {LEASE_S:.0f} s if it was killed" if says else "does not say its topics yet: wait")
        for name, host, pid, says in connection.execute(query("topic_producers"), facts).fetchall()
    ]


def _source_of(control: Database, application: Database) -> int | None:
    with application.connection() as outbox:
        identity = outbox.execute(query("outbox_uuid")).fetchone()
    if identity is None:
        return None
    with control.connection() as connection:
        row = connection.execute(query("source_of_outbox"), {"outbox_uuid": identity[0]}).fetchone()
    return None if row is None else int(row[0])
