"""Replays and backfills: jobs that give a group archived messages (docs/design/parked-keys.md).

By batch, then offset: each key's publish order (archivers add parents first).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal

from psycopg.types.json import Jsonb

from mqlayer.domain.archive_places import BEHIND, ArchivePlace
from mqlayer.domain.message import Identity
from mqlayer.domain.parked_names import parked_name
from mqlayer.domain.protocol import REPLAY_EXPORTS
from mqlayer.domain.tags import TagFilter
from mqlayer.errors import ArchiveBroken, Conflict, InvalidInput, MqlayerError, NotFound, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, find_group, refuse_broadcast
from mqlayer.groups.positions import GroupPartition, read_positions
from mqlayer.groups.rebalance import change_group
from mqlayer.groups.seek import fence_old_owners, refuse_beside_replay
from mqlayer.groups.start_positions import undeleted_partitions
from mqlayer.logs import event_logger
from mqlayer.parking import ParkingCapacity
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.protocol import read_protocols
from mqlayer.postgres.queries import columns, query
from mqlayer.redelivery.act_notes import ANY_KEY, raise_parking_version
from mqlayer.redelivery.filters import ReplayFilter
from mqlayer.redelivery.lists import page
from mqlayer.redelivery.redelivery_job import LEASE_S, POLL_S, JobState, cancel, extend_lease, run_job, take_over
from mqlayer.redelivery.replay_reading import ArchivedRecord, ReplayReader
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

BATCH: Final = 200
"""Messages per transaction; at most one second's worth of the rate."""
WAITING: Final = 2_000
"""Messages of a job that may wait in its group, plus one batch."""
WAITING_BYTES: Final = 64_000_000
FULL_WAIT_S: Final = 0.05
WHY_LIMIT: Final = 500

Newer = Literal["wait", "between"]
"""Newer messages of a replayed key wait until the end, or come between."""
ReplayKind = Literal["replay", "backfill"]
ReplayOutcome = Literal["sent", "already", "dead", "ahead", "unmatched"]
"""sent: given; already: waits in the group; dead: dead there, redrive it; ahead: the group reads it anyway; unmatched:
excluded by the tag filter."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay or backfill. `per_s`: messages per second, 0: no limit; `waiting`: given, not handled yet.

    `at_batch` of `upto_batch`: progress in the archive. `worked_on`: a worker has the lease. `blocked_by`: why the last
    one stopped.
    """

    replay_id: int
    kind: ReplayKind
    topic: str
    group: str
    filter: ReplayFilter
    per_s: float
    newer: Newer
    actor: str
    state: JobState
    results: Mapping[ReplayOutcome, int]
    started_at: datetime
    ended_at: datetime | None
    worker: str | None
    worked_on: bool
    at_batch: int
    upto_batch: int
    waiting: int
    blocked_by: str | None

    @property
    def sent(self) -> int:
        """Messages given."""
        return self.results.get("sent", 0)


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A message not given, and why."""

    identity: Identity
    result: ReplayOutcome
    at: datetime


def count_archived(database: Database, topic: str, group: str, wanted: ReplayFilter) -> int:
    """Return how many archived records a replay would read. Raises as `start_replay`."""
    found, wanted = find_group(database, topic, group), _located(wanted)
    with database.connection() as connection:
        upto, snapshot_id = _extent(connection, found, wanted, locked=False)
    return ReplayReader(database, wanted, topic_id=found.topic_id, snapshot_id=snapshot_id, upto=upto).count()


def start_replay(
    runtime: Runtime,
    topic: str,
    group: str,
    wanted: ReplayFilter,
    *,
    newer: Newer | None = None,
    per_s: float = 0.0,
    worker: str | None = None,
) -> int:
    """Create a replay; return its id. `work_on_replay` sends the messages; without `worker`, the retry scan.

    `newer`: newer messages of the filter's key (or of all) wait or come between; default wait, without order between.
    Raises NotFound, InvalidInput, StoreUnavailable, Conflict for a group that is not live, is pop or shared, or runs a
    replay, and for a topic without archive, ArchiveBroken where days are missing.
    """
    found, wanted = find_group(runtime.control, topic, group), _located(wanted)
    ordered = found.ordered and found.strategy == "strict"
    newer = newer or ("wait" if ordered else "between")
    _check(found, wanted, per_s, newer)
    _check_export(runtime.control, found, wanted)
    bounds = _bounds(runtime, found)
    if newer == "wait" and not ordered:
        raise InvalidInput(
            f"{_group_label(found)} keeps no order, so nothing newer waits: leave newer out, or say between"
        )
    key = wanted.facts()["key"] if newer == "wait" else None
    newer_wait = newer == "wait" and key is None

    def work(connection: Connection) -> tuple[int, list[tuple[int, int]]]:
        refuse_beside_replay(connection, found)
        if connection.execute(query("group_seeks"), {"group_id": found.group_id}).fetchone() != (found.seek,):
            raise Conflict(
                f"{_group_label(found)} was sent elsewhere in the meantime", "look where it is now, and try again"
            )
        upto, snapshot_id = _extent(connection, found, wanted)
        facts = {"group_id": found.group_id, "filter": Jsonb(wanted.as_json()), "per_s": per_s, "actor": runtime.actor,
                 "worker": worker, "lease_s": LEASE_S, "kind": "replay", "upto_batch": upto,
                 "snapshot_id": snapshot_id, "bounds": Jsonb(bounds), "newer": newer, "name": key}  # fmt: skip
        ((replay_id,),) = connection.execute(query("replay_insert"), facts).fetchall()
        said = {"replay": replay_id, "filter": wanted.as_json(), "per_s": per_s, "newer": newer}
        write_audit(connection, runtime.actor, "replay start", f"{topic}/{group}", said)
        epochs = _hold_newer(connection, found, wanted, key=key, newer_wait=newer_wait)
        failpoint("replay.before_start")
        return int(replay_id), epochs

    replay_id, epochs = change_group(runtime.control, found.group_id, work)
    failpoint("replay.after_start")
    if epochs:
        _fence(runtime, found, dict(epochs))
    log.info("replay_started", extra={"replay": replay_id, "topic": topic, "group": group})
    return replay_id


def resume_replay(runtime: Runtime, replay_id: int, *, worker: str) -> None:
    """Take over a running replay or backfill. Raises NotFound, Conflict if it is over."""
    _running(runtime.control, replay_id)
    take_over(runtime, replay_id, act="replay resume", over=_over(replay_id), worker=worker)


def cancel_replay(runtime: Runtime, replay_id: int) -> Replay:
    """End a replay or backfill; given messages are handled before newer ones.

    Raises NotFound, Conflict if it is over.
    """
    found = _running(runtime.control, replay_id)
    group = find_group(runtime.control, found.topic, found.group)
    work = partial(_cancel, replay_id=replay_id, actor=runtime.actor, group_id=group.group_id)
    change_group(runtime.control, group.group_id, work)
    return replay_of(runtime.control, replay_id)


def replays(
    database: Database, *, topic: str | None = None, group: str | None = None, after: int | None = None, limit: int = 50
) -> list[Replay]:
    """Return a page of replays and backfills, newest first, `after` an id."""
    return _listed(database, topic=topic, group=group, after=after, limit=page(limit))


def replay_of(database: Database, replay_id: int) -> Replay:
    """Return a replay or backfill. Raises NotFound."""
    found = _listed(database, redrive_id=replay_id)
    if not found:
        raise NotFound("replay", str(replay_id), "see those that are: mqlayer replay list")
    return found[0]


def replay_results(
    database: Database, replay_id: int, *, after: Identity | None = None, limit: int = 50
) -> list[ReplayResult]:
    """Return a page of messages not given, `after` an identity. Raises NotFound."""
    replay_of(database, replay_id)
    source, lp, seq = after or Identity(-1, -1, -1)
    facts = {"redrive_id": replay_id, "after_lp": lp, "after_source": source, "after_seq": seq, "limit": page(limit)}
    with database.connection() as connection:
        rows = connection.execute(query("replay_results"), facts).fetchall()
    return [ReplayResult(Identity(source, lp, seq), result, at) for lp, source, seq, result, at in rows]


def work_on_replay(
    database: Database,
    replay_id: int,
    *,
    worker: str,
    stop: threading.Event | None = None,
    batch: int = BATCH,
    waiting: int = WAITING,
    longest_wait_s: float = float("inf"),
) -> Replay:
    """Work on a replay or backfill as `run_job` does; return its progress.

    At most `waiting` messages plus one `batch` wait in the group: without members it stalls.
    """
    work = _ReplayWorker(database, replay_id, worker, batch, waiting)
    run_job(database, replay_id, work, worker=worker, stop=stop, longest_wait_s=longest_wait_s)
    return replay_of(database, replay_id)


# -- the beginning ---------------------------------------------------------------------------------------------------


def _check(group: Group, wanted: ReplayFilter, per_s: float, newer: str) -> None:
    refuse_broadcast(group)
    if group.state != "live":
        raise Conflict(f"{_group_label(group)} is {group.state}, not live", "only a live group can be replayed")
    if group.mode == "pop":
        raise Conflict(f"{_group_label(group)} has ordered pop", "a replay waits for members, and ordered pop has none")
    if group.mode == "shared":
        raise Conflict(f"{_group_label(group)} is shared", "only an ordered group can be replayed")
    if not 0 <= per_s < float("inf"):
        raise InvalidInput(f"{per_s} messages a second is no rate: 0 for no limit, or more")
    if newer not in ("wait", "between"):
        raise InvalidInput(f"newer messages wait, or come between: {newer!r} is neither")
    wanted.facts()


def _located(wanted: ReplayFilter) -> ReplayFilter:
    """Name an export as it is registered."""
    if wanted.export is None:
        return wanted
    from mqlayer.archive.lake.state import lake_location

    return replace(wanted, export=lake_location(wanted.export))


def _check_export(database: Database, group: Group, wanted: ReplayFilter) -> None:
    """Refuse an export before a replay of it is there."""
    if wanted.export is None:
        return
    with database.connection() as connection:
        if read_protocols(connection, REPLAY_EXPORTS.schema).served.in_force < REPLAY_EXPORTS.since:
            raise Conflict(
                "workers of the former release may live, and their replays read no export",
                "run `mqlayer upgrade finalize` first",
            )
        upto, snapshot_id = _extent(connection, group, wanted, locked=False)
    ReplayReader(database, wanted, topic_id=group.topic_id, snapshot_id=snapshot_id, upto=upto)


def _bounds(runtime: Runtime, group: Group) -> dict[str, int]:
    with runtime.control.connection() as connection:
        rows = connection.execute(query("replay_positions"), {"group_id": group.group_id}).fetchall()
    group_partitions = [
        GroupPartition(node, partition, group.group_id, start, seek) for partition, node, start, seek in rows
    ]
    positions = read_positions(runtime, load_nodes(runtime.control), group_partitions)
    for reason in positions.unreachable.values():
        raise StoreUnavailable("a node of the group's partitions", reason)
    bounds: dict[str, int] = {}
    for group_partition in group_partitions:
        state = positions.at(group_partition.partition, group.group_id)
        if state is None:
            raise StoreUnavailable(f"the node of partition {group_partition.partition}", "it lost the partition")
        bounds[str(group_partition.partition)] = state.position
    return bounds


def _extent(
    connection: Connection, group: Group, wanted: ReplayFilter, *, locked: bool = True
) -> tuple[int, int | None]:
    facts = {"group_id": group.group_id, "snapshot": wanted.snapshot}
    if wanted.snapshot is not None:
        if locked:
            # Retention drops no day before it sees the replay.
            connection.execute(query("replay_topic"), facts)
        found = connection.execute(query("replay_snapshot"), facts).fetchone()
        if found is None or found[1] is None:
            raise NotFound("snapshot of the topic", wanted.snapshot, "see those that are: mqlayer snapshot list")
        if found[2] and wanted.export is None:
            raise ArchiveBroken(
                f"days of snapshot {wanted.snapshot!r} were dropped after their export",
                "replay it with the export: --from-export PATH; mqlayer archive exports shows all",
            )
        return int(found[1]), int(found[0])
    row = connection.execute(query("replay_topic" if locked else "replay_topic_seen"), facts).fetchone()
    if row is None:
        raise Conflict(f"topic {group.topic!r} was never archived", "there is nothing that could be replayed")
    return int(row[0]), None


def _hold_newer(
    connection: Connection, group: Group, wanted: ReplayFilter, *, key: bytes | None, newer_wait: bool
) -> list[tuple[int, int]]:
    facts: dict[str, Any] = {"group_id": group.group_id}
    if key is not None:
        lp = wanted.facts()["lp"]
        connection.execute(query("replay_key_put"), facts | {"lp": lp, "name": key})
        raise_parking_version(connection, group.group_id, [(lp, key)])
    if not newer_wait:
        return []
    # Owners must drop messages that they have read: these would come between replayed ones.
    epochs = connection.execute(query("assignments_of_group_raise"), facts).fetchall()
    connection.execute(query("allocation_raise"), facts)
    return [(partition, epoch) for partition, epoch in epochs]


def _fence(runtime: Runtime, group: Group, epochs: Mapping[int, int]) -> None:
    """Best effort: next owners fence too."""
    with runtime.control.connection() as connection:
        kept = {
            one: epochs[one.partition]
            for one in undeleted_partitions(connection, group.topic_id)
            if one.partition in epochs
        }
    nodes = {node.node_id: node for node in load_nodes(runtime.control)}
    fence_old_owners(runtime, nodes, group.group_id, kept)


# -- the work --------------------------------------------------------------------------------------------------------


class _ReplayState:
    def __init__(self, row: Sequence[Any]) -> None:
        self.at: ArchivePlace = (row[0], row[1])
        self.upto, self.snapshot_id = row[2], row[3]
        self.filter = ReplayFilter.of(row[4])
        self.bounds: Mapping[str, int] = row[5]
        self.per_s, self.place, self.kind, self.topic_id = row[6:10]
        self.wanted = TagFilter.of(row[10])
        self.waiting, self.waiting_bytes = row[11:13]
        # The key with newer messages waiting.
        self.name: bytes | None = row[13]


class _ReplayWorker:
    def __init__(self, database: Database, replay_id: int, worker: str, batch: int, waiting: int) -> None:
        self._database, self._replay_id, self._worker = database, replay_id, worker
        self._batch, self._waiting = batch, waiting
        found = replay_of(database, replay_id)
        self._group = find_group(database, found.topic, found.group)
        self._alone = not self._group.ordered or self._group.strategy != "strict"
        self._state = state = self._refresh()
        self._extended = time.monotonic()
        with self._blocked_by_errors():
            self._reader = ReplayReader(
                database,
                state.filter,
                topic_id=state.topic_id,
                snapshot_id=state.snapshot_id,
                upto=state.upto,
                alive=self._extend,
            )

    def pause_s(self) -> float:
        self._state = state = self._refresh()
        with self._database.connection() as connection:
            row = connection.execute(query("parked_room"), {"group_id": self._group.group_id}).fetchone()
        # Newer messages of a replayed key wait for its end, so they must not block it by filling the group.
        starved = state.name is not None and state.waiting == 0
        if row is not None and ParkingCapacity(*row).full is not None and not starved:
            return POLL_S
        return FULL_WAIT_S if state.waiting >= self._waiting or state.waiting_bytes >= WAITING_BYTES else 0.0

    def deliver(self) -> None:
        state = self._state
        limit = self._batch if state.per_s == 0 else max(1, min(self._batch, int(state.per_s)))
        with self._blocked_by_errors():
            found, at = self._reader.read(state.at, limit)
        change_group(self._database, self._group.group_id, partial(self._deliver, state=state, found=found, at=at))
        failpoint("replay.after_commit")

    def _extend(self) -> None:
        """Keep the lease while an export is read."""
        if time.monotonic() - self._extended > LEASE_S / 4:
            extend_lease(self._database, self._replay_id, self._worker)
            self._extended = time.monotonic()

    @contextmanager
    def _blocked_by_errors(self) -> Iterator[None]:
        """Note why a worker can't read the archive: the worker's log may be far from who asks."""
        try:
            yield
        except MqlayerError as error:
            facts = {"redrive_id": self._replay_id, "worker": self._worker, "why": str(error)[:WHY_LIMIT]}
            self._database.transaction(lambda connection: connection.execute(query("replay_blocked"), facts))
            raise

    def _refresh(self) -> _ReplayState:
        with self._database.connection() as connection:
            (row,) = connection.execute(query("replay_state"), {"redrive_id": self._replay_id}).fetchall()
        return _ReplayState(row)

    def _deliver(
        self, connection: Connection, state: _ReplayState, found: Sequence[ArchivedRecord], at: ArchivePlace | None
    ) -> None:
        facts: dict[str, Any] = {"redrive_id": self._replay_id, "worker": self._worker}
        locked = {"at_batch": state.at[0], "at_record": state.at[1]}
        if connection.execute(query("replay_hold"), facts | locked).fetchone() is None:
            return
        if self._snapshot_dropped(connection, state):
            _cancel(connection, self._replay_id, "worker", self._group.group_id, why="its snapshot was dropped")
            return
        words = self._put(connection, state, found)
        if state.kind == "backfill":
            self._archive_unmatched(connection, [one for one in found if words[one.identity] == "unmatched"])
        if found:
            self._put_results(connection, state, words)
        counts = Counter(words.values())
        sent = counts["sent"]
        batch, record = at or (state.upto, BEHIND)
        advance = {"at_batch": batch, "at_record": record, "sent": sent, "not_sent": len(found) - sent,
                   "results": Jsonb(counts), "pause_s": sent / state.per_s if state.per_s else 0.0,
                   "lease_s": LEASE_S}  # fmt: skip
        connection.execute(query("replay_advance"), facts | advance)
        if at is None:
            connection.execute(query("redrive_end"), facts | {"state": "done", "gone": 0})
            _let_newer_go_on(connection, self._group.group_id)
            log.info("replay_done", extra={"replay": self._replay_id})
        failpoint("replay.before_commit")

    def _snapshot_dropped(self, connection: Connection, state: _ReplayState) -> bool:
        if state.snapshot_id is None:
            return False
        ((there,),) = connection.execute(query("replay_snapshot_there"), {"snapshot_id": state.snapshot_id}).fetchall()
        return not there

    def _put(
        self, connection: Connection, state: _ReplayState, found: Sequence[ArchivedRecord]
    ) -> dict[Identity, ReplayOutcome]:
        words: dict[Identity, ReplayOutcome] = {one.identity: _result_of(one, state) for one in found}
        given = [one for one in found if words[one.identity] == "sent"]
        if not given:
            return words
        named = columns(("lps", "sources", "seqs"), [(i.lp, i.source, i.seq) for i in (one.identity for one in given)])
        facts = {"group_id": self._group.group_id, "redrive_id": self._replay_id, "position": state.place,
                 "again": state.kind == "replay"}  # fmt: skip
        for source, lp, seq in connection.execute(query("replay_dead"), facts | named).fetchall():
            words[Identity(source, lp, seq)] = "dead"
        rows = [self._row(one) for one in given if words[one.identity] == "sent"]
        arrays = columns(("lps", "names", "sources", "seqs", "partitions", "offsets", "keys", "ms", "bodies"), rows)
        connection.execute(query("replay_keys_put"), facts | arrays, prepare=False)
        joined = connection.execute(query("replay_messages_put"), facts | arrays, prepare=False).fetchall()
        put = {Identity(source, lp, seq) for lp, _, source, seq in joined}
        for one in given:
            if words[one.identity] == "sent" and one.identity not in put:
                words[one.identity] = "already"
        if joined:
            heads = columns(("lps", "names"), [row[:2] for row in joined])
            connection.execute(query("parked_heads_put"), facts | heads | {"identities": list(map(str, put))})
            raise_parking_version(connection, self._group.group_id, {(lp, bytes(name)) for lp, name, _, _ in joined})
        return words

    def _archive_unmatched(self, connection: Connection, left_out: Sequence[ArchivedRecord]) -> None:
        if left_out:
            arrays = columns(("partitions", "offsets"), [(one.partition, one.offset) for one in left_out])
            connection.execute(query("replay_unmatched_put"), {"redrive_id": self._replay_id} | arrays)

    def _row(self, one: ArchivedRecord) -> tuple[Any, ...]:
        source, lp, seq = one.identity
        name = parked_name(one.key, one.identity, alone=self._alone)
        return lp, name, source, seq, one.partition, one.offset, one.key, one.m, one.body

    def _put_results(
        self, connection: Connection, state: _ReplayState, words: Mapping[Identity, ReplayOutcome]
    ) -> None:
        facts = [
            (i.lp, i.source, i.seq, result) for i, result in words.items() if result in ("already", "dead", "ahead")
        ]
        if facts and state.kind == "replay":
            arrays = columns(("lps", "sources", "seqs", "results"), facts)
            connection.execute(query("replay_results_put"), {"redrive_id": self._replay_id} | arrays)


def _result_of(one: ArchivedRecord, state: _ReplayState) -> ReplayOutcome:
    if one.offset >= state.bounds.get(str(one.partition), BEHIND):
        return "ahead"
    matches = not one.void and (state.wanted is None or state.wanted.takes(one.tags))
    return "sent" if matches else "unmatched"


# -- the end ---------------------------------------------------------------------------------------------------------


def _cancel(connection: Connection, replay_id: int, actor: str, group_id: int, why: str | None = None) -> None:
    facts = {} if why is None else {"why": why}
    cancel(connection, replay_id, act="replay cancel", over=_over(replay_id), actor=actor, facts=facts)
    _let_newer_go_on(connection, group_id)


def _let_newer_go_on(connection: Connection, group_id: int) -> None:
    raise_parking_version(connection, group_id, ANY_KEY)
    connection.execute(query("allocation_raise"), {"group_id": group_id})


def _running(database: Database, replay_id: int) -> Replay:
    found = replay_of(database, replay_id)
    if found.state != "running":
        raise Conflict(
            f"{found.kind} {replay_id} is {found.state}", f"see what it did: mqlayer replay show {replay_id}"
        )
    return found


def _over(replay_id: int) -> Conflict:
    return Conflict(f"replay {replay_id} is over", f"see what it did: mqlayer replay show {replay_id}")


def _group_label(group: Group) -> str:
    return f"group {group.name!r} of topic {group.topic!r}"


def _listed(database: Database, **facts: Any) -> list[Replay]:
    wanted = {"redrive_id": None, "topic": None, "group": None, "after": None, "limit": 1} | facts
    with database.connection() as connection:
        rows = connection.execute(query("replay_list"), wanted).fetchall()
    return [
        Replay(replay_id, kind, topic, group, ReplayFilter.of(facts), *rest)
        for replay_id, kind, topic, group, facts, *rest in rows
    ]
