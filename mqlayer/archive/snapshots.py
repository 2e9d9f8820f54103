"""Unchanging cuts through the archive: `docs/design/archive.md`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from typing import Final, NamedTuple

from mqlayer.archive.read_ranges import BatchRange, batch_shares
from mqlayer.domain.body_schemas import JsonSchema
from mqlayer.domain.names import check_name
from mqlayer.domain.schema_versions import SchemaVersion, versions_that_hold
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.postgres.arrow_reader import bound
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

CREATE_HINT: Final = "mqlayer snapshot list shows what there is; mqlayer snapshot create NAME makes one"
TIMEOUTS: Final = {"lock_wait": "10s", "idle": "30s"}
CREATE_S: Final = 60.0
SAMPLE: Final = 20_000


@dataclass(frozen=True, slots=True)
class SnapshotTopic:
    """A topic's last batch, route version, records and seq ranges."""

    topic: str
    batch: int
    version: int
    records: int
    ranges: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cut through the archive; `upto_at` excludes records published later."""

    snapshot_id: int
    name: str
    created_at: datetime
    upto_at: datetime | None
    topics: tuple[SnapshotTopic, ...] = field(default=())

    @property
    def records(self) -> int:
        """All records."""
        return sum(topic.records for topic in self.topics)


class SeqRange(NamedTuple):
    """Consecutive seqs of one (source, LP), both ends included."""

    topic: str
    source: int
    lp: int
    first_seq: int
    last_seq: int


class BrokenRange(NamedTuple):
    """A damaged range: wanted seqs, rows, distinct seqs."""

    topic: str
    source: int
    lp: int
    wanted: int
    rows: int
    seqs: int


def create_snapshot(
    runtime: Runtime, name: str, *, topics: Sequence[str] | None = None, at: datetime | None = None
) -> Snapshot:
    """Cut archived topics (default all) at the archive's current end.

    With `at` (zone required), each (source, LP) ends before its first later record, by publishers' clocks; archivers
    wait meanwhile. Raises NotFound for unknown topics, InvalidInput for unarchived ones, Conflict for a taken name.
    """
    check_name("snapshot", name)
    if at is not None and at.utcoffset() is None:
        raise InvalidInput(f"{at.isoformat()} has no time zone: say it with one, such as 2026-11-21T09:30:00+00:00")
    wanted = None if topics is None else sorted(set(topics))

    def work(connection: Connection) -> Snapshot:
        connection.execute(query("transaction_patience"), TIMEOUTS)
        if _find(connection, name) is not None:
            raise _name_taken(name)
        _check_topics(connection, wanted)
        locked = connection.execute(query("snapshot_topics_lock"), {"topics": wanted}).fetchall()
        failpoint("snapshot.after_lock")
        row = connection.execute(query("snapshot_insert"), {"name": name, "upto_at": at}).fetchone()
        if row is None:
            raise _name_taken(name)
        facts = {"snapshot_id": row[0], "topic_ids": [topic_id for (topic_id,) in locked], "upto_at": at}
        connection.execute(query("snapshot_cut_all" if at is None else "snapshot_cut_until"), facts)
        connection.execute(query("snapshot_topic_insert"), facts)
        made = _find(connection, name)
        if made is None:
            raise NotFound("snapshot", name, "somebody removed it while it was created: try again")
        audited = {"topics": [topic.topic for topic in made.topics], "records": made.records}
        write_audit(
            connection, runtime.actor, "snapshot create", name, audited | ({"at": at.isoformat()} if at else {})
        )
        failpoint("snapshot.before_commit")
        return made

    return runtime.control.transaction(work, timeout_s=CREATE_S)


def list_snapshots(database: Database) -> list[Snapshot]:
    """Return all snapshots, oldest first."""
    with database.connection() as connection, connection.transaction():
        found = [Snapshot(*row) for row in connection.execute(query("snapshot_list")).fetchall()]
        return _with_topics(connection, found)


def find_snapshot(database: Database, name: str) -> Snapshot:
    """Return a snapshot. Raises NotFound."""
    with database.connection() as connection, connection.transaction():
        found = _find(connection, name)
    if found is None:
        raise NotFound("snapshot", name, CREATE_HINT)
    return found


def snapshot_cut(database: Database, snapshot_id: int) -> list[SeqRange]:
    """Return a snapshot's seq ranges."""
    with database.connection() as connection:
        rows = connection.execute(query("snapshot_cut"), {"snapshot_id": snapshot_id}).fetchall()
    return [SeqRange(*row) for row in rows]


def snapshot_ranges(database: Database, snapshot_id: int) -> list[tuple[int, int, int, int, int]]:
    """Return a snapshot's seq ranges by topic id: topic, source, LP, first and last seq."""
    with database.connection() as connection:
        rows = connection.execute(query("snapshot_ranges"), {"snapshot_id": snapshot_id}).fetchall()
    return [(topic_id, source, lp, first, last) for topic_id, source, lp, first, last in rows]


def there_statement(snapshot_id: int, exported: Mapping[int, int]) -> str:
    """Return the first statement of a reader's transaction. `exported`: its last batch from an export, by topic."""
    brought = json.dumps({str(int(topic_id)): int(batch) for topic_id, batch in exported.items()})
    return bound("snapshot_there", {"snapshot_id": snapshot_id}).replace("'{}'", f"'{brought}'")


def snapshot_schemas(database: Database, snapshot_id: int) -> dict[str, list[JsonSchema]]:
    """Return topics' schemas that hold, the oldest first."""
    found: dict[str, list[SchemaVersion]] = {}
    with database.connection() as connection:
        rows = connection.execute(query("snapshot_schemas"), {"snapshot_id": snapshot_id}).fetchall()
    for topic, version, mode, text in rows:
        found.setdefault(topic, []).append(SchemaVersion(version, mode, json.loads(text)))
    return {topic: [one.schema for one in versions_that_hold(known)] for topic, known in found.items()}


def lp_weights(database: Database, snapshot_id: int) -> dict[int, int]:
    """Return a snapshot's records per LP."""
    with database.connection() as connection:
        return dict(connection.execute(query("snapshot_weights"), {"snapshot_id": snapshot_id}).fetchall())


def is_whole(database: Database, snapshot_id: int) -> bool:
    """Whether a snapshot has all records of its batches."""
    with database.connection() as connection:
        row = connection.execute(query("snapshot_whole"), {"snapshot_id": snapshot_id}).fetchone()
    return bool(row and row[0])


def shares_of(database: Database, snapshot_id: int, count: int) -> list[tuple[BatchRange, ...]]:
    """Return at most `count` shares of a snapshot's batches, with about equal records."""
    with database.connection() as connection:
        ((size,),) = connection.execute(query("archive_size")).fetchall()
        percent = min(100.0, 100.0 * SAMPLE / size) if size else 100.0
        facts = {"snapshot_id": snapshot_id, "percent": percent}
        rows = connection.execute(query("snapshot_spread"), facts).fetchall()
    lasts = {topic_id: last for topic_id, last, *_ in rows}
    seen = [(topic_id, batch, weight) for topic_id, _, batch, weight in rows if batch is not None]
    return batch_shares(lasts, seen, count)


def sample_width(database: Database, snapshot_id: int) -> int:
    """Return a record's estimated variable bytes."""
    with database.connection() as connection:
        row = connection.execute(query("snapshot_width"), {"snapshot_id": snapshot_id}).fetchone()
    return int(row[0]) if row else 0


def verify_snapshot(database: Database, name: str) -> list[BrokenRange]:
    """Return ranges whose seqs are not archived once each. Reads all records. Raises NotFound."""
    found = find_snapshot(database, name)
    with database.connection() as connection, connection.transaction():
        connection.execute(query("snapshot_plan"))
        rows = connection.execute(query("snapshot_verify"), {"snapshot_id": found.snapshot_id}).fetchall()
    return [BrokenRange(*row) for row in rows]


def drop_snapshot(runtime: Runtime, name: str) -> None:
    """Drop a snapshot, not its records. Unfinished readers fail. Raises NotFound."""

    def work(connection: Connection) -> None:
        if not connection.execute(query("snapshot_delete"), {"name": name}).rowcount:
            raise NotFound("snapshot", name, CREATE_HINT)
        write_audit(connection, runtime.actor, "snapshot drop", name, {})

    runtime.control.transaction(work)


def _name_taken(name: str) -> Conflict:
    return Conflict(f"snapshot {name!r} exists", f"choose another name, or drop it: mqlayer snapshot drop {name}")


def _check_topics(connection: Connection, wanted: list[str] | None) -> None:
    rows = connection.execute(query("snapshot_topics"), {"topics": wanted}).fetchall()
    kept = {name for _, name, archived, routed in rows if archived and routed}
    if wanted is None:
        if not kept:
            raise InvalidInput(
                "no topic is archived: mqlayer topic set TOPIC --archived keeps what is published from then on"
            )
        return
    known = {name for _, name, *_ in rows}
    if len({name.partition("@")[0] for name in wanted}) < len(set(wanted)):
        raise InvalidInput("a snapshot has NAME@ID under NAME: take topics of one name into snapshots of their own")
    for name in wanted:
        if name not in known:
            raise NotFound("topic", name, "mqlayer topic list shows what there is")
        if name not in kept:
            raise InvalidInput(f"topic {name!r} is not archived: mqlayer topic set {name} --archived")


def _find(connection: Connection, name: str) -> Snapshot | None:
    row = connection.execute(query("snapshot_find"), {"name": name}).fetchone()
    return None if row is None else _with_topics(connection, [Snapshot(*row)])[0]


def _with_topics(connection: Connection, found: list[Snapshot]) -> list[Snapshot]:
    facts = {"snapshot_ids": [snapshot.snapshot_id for snapshot in found]}
    rows = connection.execute(query("snapshot_topic_list"), facts).fetchall()
    topics = {key: tuple(SnapshotTopic(*row[1:]) for row in group) for key, group in groupby(rows, lambda row: row[0])}
    return [
        Snapshot(one.snapshot_id, one.name, one.created_at, one.upto_at, topics.get(one.snapshot_id, ()))
        for one in found
    ]
