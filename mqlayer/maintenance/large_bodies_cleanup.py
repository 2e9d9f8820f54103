"""Remove large bodies that nothing names (docs/design/large-bodies.md).

*fresh* -> *cut* (its messages are below known seqs) -> *logged* (the outbox emptied those; below known ends of
partitions) -> *trimmed* -> *free* since a time -> *removing* -> gone. Each step is repeatable, and any run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, Final, NamedTuple
from uuid import uuid4

from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.large_bodies import LargeBodyOptions
from mqlayer.large_bodies.object_store import object_store
from mqlayer.logs import event_logger
from mqlayer.metrics import LARGE_BODY_BYTES
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import raise_for_reply
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

CUT_LIMIT: Final = 10_000
LOOK_LIMIT: Final = 500
REMOVE_LIMIT: Final = 200
STRAY_PAGES: Final = 3
"""Of 1,000 objects, from a random one on: in time, passes meet all."""


@dataclass(slots=True)
class LargeBodyReport:
    """What a pass did; `failed`: objects that S3 did not delete."""

    removed: int = 0
    removed_bytes: int = 0
    strays: int = 0
    failed: int = 0


class _Removable(NamedTuple):
    body_id: str
    bucket: str | None
    location: str | None
    size: int


def clean_large_bodies(runtime: Runtime, *, hold_s: float | None = None) -> LargeBodyReport:
    """Remove bodies that nothing has named for the hold. Safe to run concurrently.

    Nodes that don't answer keep the bodies of their topics.
    """
    hold_s = runtime.settings.large_body_hold_s if hold_s is None else hold_s
    report = LargeBodyReport()
    _one(runtime.outbox, "large_body_cut", {"limit": CUT_LIMIT, "hold_s": hold_s})
    _follow_cuts(runtime)
    _look(runtime, hold_s)
    _remove(runtime, report)
    _remove_strays(runtime, hold_s, report)
    if report.removed or report.strays or report.failed:
        facts = {"bodies": report.removed, "bytes": report.removed_bytes, "strays": report.strays}
        log.info("large_bodies_removed", extra=facts | {"failed": report.failed})
    return report


def _follow_cuts(runtime: Runtime) -> None:
    sent = _rows(runtime.outbox, "large_body_cuts_sent", {})
    logged = _rows(runtime.outbox, "large_body_cuts_logged", {})
    if not sent and not logged:
        return
    with NodePool.of_registered(runtime, RedisRole.WORKER) as nodes:
        for topic_id, cuts in groupby(sorted(sent, key=_topic_of), key=_topic_of):
            ends = _bounds(runtime, nodes, topic_id, _next_offset)
            for cut_id, _ in cuts if ends is not None else ():
                failpoint("large_body.before_ends")
                _do(runtime.outbox, "large_body_cut_ends", {"cut_id": cut_id, "ends": json.dumps(ends)})
        for topic_id, cuts in groupby(sorted(logged, key=_topic_of), key=_topic_of):
            firsts = _bounds(runtime, nodes, topic_id, _first_offset)
            if firsts is not None:
                passed = [cut_id for cut_id, _, ends in cuts if _is_trimmed(ends, firsts)]
                _do(runtime.outbox, "large_body_cuts_trimmed", {"cut_ids": passed})
                failpoint("large_body.after_trimmed")


def _topic_of(cut: Sequence[Any]) -> int:
    return int(cut[1])


def _is_trimmed(ends: dict[str, int], firsts: dict[str, int | None]) -> bool:
    """Whether no partition has a record below the ends; a deleted one has none."""
    return all((first := firsts.get(partition)) is None or first >= end for partition, end in ends.items())


def _bounds(runtime: Runtime, nodes: NodePool, topic_id: int, ask: Any) -> dict[str, Any] | None:
    """Return a bound per partition of a topic; None where a node does not answer."""
    found: dict[str, Any] = {}
    try:
        for partition, node_id, *_ in _rows(runtime.control, "partition_list", {"topic_id": topic_id}):
            found[str(partition)] = ask(nodes.to(node_id), runtime.prefix, partition)
    except (MqlayerError, KeyError) as error:
        log.warning("large_bodies_kept", extra={"topic_id": topic_id, "reason": str(error)})
        return None
    return found


def _next_offset(node: Any, prefix: str, partition: int) -> int:
    entry = _entry(node, "XREVRANGE", partition_keys(prefix, partition).log, b"+", b"-")
    return 0 if entry is None else entry + 1


def _first_offset(node: Any, prefix: str, partition: int) -> int | None:
    return _entry(node, "XRANGE", partition_keys(prefix, partition).log, b"-", b"+")


def _entry(node: Any, command: str, key: bytes, start: bytes, end: bytes) -> int | None:
    (reply,) = node.call([(command, key, start, end, "COUNT", 1)])
    entries = raise_for_reply(reply, node.node.address)
    return int(entries[0][0].partition(b"-")[0]) if entries else None


def _look(runtime: Runtime, hold_s: float) -> None:
    rows = _rows(runtime.outbox, "large_bodies_to_look_at", {"limit": LOOK_LIMIT})
    if not rows:
        return
    ids = [body_id for body_id, _ in rows]
    named = {body_id for (body_id,) in _rows(runtime.control, "large_bodies_referenced", {"ids": ids})}
    facts = {"ids": ids, "referenced": [waits or body_id in named for body_id, waits in rows]}
    failpoint("large_body.after_look")
    _do(runtime.outbox, "large_bodies_looked", facts)
    free = [body_id for body_id, referenced in zip(ids, facts["referenced"], strict=True) if not referenced]
    _do(runtime.outbox, "large_bodies_remove", {"ids": free, "hold_s": hold_s})
    failpoint("large_body.after_remove")


def _remove(runtime: Runtime, report: LargeBodyReport) -> None:
    """Delete objects, then rows: a row whose object is gone is deleted by the next run."""
    rows = _rows(runtime.outbox, "large_bodies_removing", {"limit": REMOVE_LIMIT})
    if not rows:
        return
    scopes = _scopes(runtime)
    gone: list[_Removable] = []
    for one in (_Removable(*row) for row in rows):
        try:
            _delete_object(runtime, one, scopes)
            gone.append(one)
        except MqlayerError as error:
            report.failed += 1
            log.warning("large_body_not_removed", extra={"body": one.body_id, "reason": str(error)})
    failpoint("large_body.after_objects")
    _do(runtime.outbox, "large_bodies_delete", {"ids": [one.body_id for one in gone]})
    for one in gone:
        LARGE_BODY_BYTES.add("removed", "postgres" if one.bucket is None else "s3", one.size)
    report.removed += len(gone)
    report.removed_bytes += sum(one.size for one in gone)


def _delete_object(runtime: Runtime, one: _Removable, scopes: Sequence[str]) -> None:
    # A copy of a database has its own identity by then, and removes nothing of its original.
    if one.bucket is None or one.location is None or one.location.split("/")[-2] not in scopes:
        return
    object_store(LargeBodyOptions.of(runtime.settings)).delete(one.bucket, one.location)


def _remove_strays(runtime: Runtime, hold_s: float, report: LargeBodyReport) -> None:
    """Delete old objects without a row: their transactions rolled back."""
    options = LargeBodyOptions.of(runtime.settings)
    if not options.bucket:
        return
    store, before = object_store(options), datetime.now(UTC) - timedelta(seconds=hold_s)
    for scope in _scopes(runtime)[-1:]:
        prefix = f"{options.prefix}{scope}/"
        for page in _pages(store, options.bucket, prefix):
            old = {one.location.rpartition("/")[2]: one for one in page if one.changed_at <= before}
            known = {body_id for (body_id,) in _rows(runtime.outbox, "large_bodies_known", {"ids": _uuids(old)})}
            for body_id in _uuids(old):
                if body_id not in known:
                    store.delete(options.bucket, old[body_id].location)
                    report.strays += 1
        for upload in store.uploads(options.bucket, prefix):
            if upload.begun_at <= before:
                store.abort(options.bucket, upload)
                report.strays += 1


def _pages(store: Any, bucket: str, prefix: str) -> Iterator[list[Any]]:
    for start in (f"{prefix}{uuid4()}", prefix):
        for number, page in enumerate(store.list(bucket, prefix, start)):
            yield page
            if number + 1 == STRAY_PAGES:
                return


def _uuids(names: Any) -> list[str]:
    return [name for name in names if len(name) == 36 and name.count("-") == 4]


def _scopes(runtime: Runtime) -> list[str]:
    rows = _rows(runtime.outbox, "large_bodies_scopes", {})
    return list(rows[0][0]) if rows else []


def _rows(database: Database, name: str, facts: dict[str, Any]) -> list[Any]:
    with database.connection() as connection:
        return connection.execute(query(name), facts).fetchall()


def _do(database: Database, name: str, facts: dict[str, Any]) -> None:
    with database.connection() as connection:
        connection.execute(query(name), facts)


def _one(database: Database, name: str, facts: dict[str, Any]) -> Any:
    def work(connection: Connection) -> Any:
        return connection.execute(query(name), facts).fetchone()

    return database.transaction(work)
