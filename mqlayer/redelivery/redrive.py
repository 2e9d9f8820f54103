"""Redrives: jobs that return dead messages to their group (docs/design/parked-keys.md).

Order within a key: by seq within a source, by lineage and offset between sources.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from psycopg.types.json import Jsonb

from mqlayer.domain.message import Identity
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.events import Event, EventKind, emit
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import find_group
from mqlayer.groups.rebalance import change_group
from mqlayer.logs import event_logger
from mqlayer.parking import ParkingLimit
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redelivery.act_notes import count_action, raise_parking_version
from mqlayer.redelivery.capacity import FULL_WAIT_S, REASONS, find_capacity
from mqlayer.redelivery.filters import MAX_DEAD_IDS, DeadFilter
from mqlayer.redelivery.lists import key_text, page
from mqlayer.redelivery.redelivery_job import LEASE_S, JobState, cancel, run_job, take_over
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

BATCH: Final = 100
"""Messages per transaction; at most one second's worth of the rate."""
SCAN_AHEAD: Final = 500
"""How far behind a batch to search for lower seqs of its last key."""

RedriveWord = Literal["sent", "already", "no_body", "gone"]
"""sent: returned; already: lives in the group; no_body: has no body; gone: has no row."""


@dataclass(frozen=True, slots=True)
class Redrive:
    """A redrive. `per_s`: messages per second, 0: no limit; `worked_on`: a worker has the lease.

    `blocked_by`: why it sends nothing, other than its rate.
    """

    redrive_id: int
    topic: str
    group: str
    filter: DeadFilter
    per_s: float
    actor: str
    state: JobState
    sent: int
    not_sent: int
    started_at: datetime
    ended_at: datetime | None
    worker: str | None
    worked_on: bool
    blocked_by: str | None


@dataclass(frozen=True, slots=True)
class RedriveResult:
    """A redrive's result for one message; `identity`: None if the row is gone."""

    dead_id: int
    identity: Identity | None
    key: str | None
    result: RedriveWord
    at: datetime


def count_dead(database: Database, topic: str, group: str, wanted: DeadFilter) -> tuple[int, int]:
    """Return the number of matching dead messages, and of those without body. Raises NotFound, InvalidInput."""
    facts = {"group_id": find_group(database, topic, group).group_id} | wanted.facts()
    with database.connection() as connection:
        ((found, bodiless),) = connection.execute(query("dead_count"), facts).fetchall()
    return found, bodiless


def start_redrive(
    runtime: Runtime, topic: str, group: str, wanted: DeadFilter, *, per_s: float = 0.0, worker: str | None = None
) -> int:
    """Create a redrive of the dead messages that match now; return its id.

    `work_on` sends them; without `worker`, the retry scan. Raises NotFound, InvalidInput, Conflict for a retired group.
    """
    found = find_group(runtime.control, topic, group)
    if found.state == "retired":
        raise Conflict(f"group {group!r} of topic {topic!r} is retired", "nobody would handle what is given back")
    if not 0 <= per_s < float("inf"):
        raise InvalidInput(f"{per_s} messages a second is no rate: 0 for no limit, or more")
    if wanted.dead_ids is not None and not 0 < len(wanted.dead_ids) <= MAX_DEAD_IDS:
        raise InvalidInput(f"name 1 to {MAX_DEAD_IDS} messages, or say what they have in common")
    wanted.facts()
    facts = {"group_id": found.group_id, "filter": Jsonb(wanted.as_json()), "per_s": per_s, "actor": runtime.actor,
             "worker": worker, "lease_s": LEASE_S}  # fmt: skip

    def work(connection: Connection) -> int:
        ((redrive_id,),) = connection.execute(query("redrive_insert"), facts).fetchall()
        said = {"redrive": redrive_id, "filter": wanted.as_json(), "per_s": per_s}
        write_audit(connection, runtime.actor, "dead redrive", f"{topic}/{group}", said)
        return int(redrive_id)

    redrive_id = runtime.control.transaction(work)
    failpoint("redrive.after_start")
    log.info("redrive_started", extra={"redrive": redrive_id, "topic": topic, "group": group})
    return redrive_id


def resume_redrive(runtime: Runtime, redrive_id: int, *, worker: str) -> None:
    """Take over a running redrive. Raises NotFound, Conflict if it is over."""
    _running(runtime.control, redrive_id)
    take_over(runtime, redrive_id, act="dead redrive resume", over=_over(redrive_id), worker=worker)


def cancel_redrive(runtime: Runtime, redrive_id: int) -> Redrive:
    """End a redrive; returned messages stay. Raises NotFound, Conflict if it is over."""
    _running(runtime.control, redrive_id)
    said: dict[str, Any] = {"act": "dead redrive cancel", "over": _over(redrive_id), "actor": runtime.actor}
    runtime.control.transaction(lambda connection: cancel(connection, redrive_id, **said))
    found = redrive_of(runtime.control, redrive_id)
    emit(Event("redrive_ended", found.topic, found.group, cause="cancelled", actor=runtime.actor))
    return found


def redrives(
    database: Database, *, topic: str | None = None, group: str | None = None, after: int | None = None, limit: int = 50
) -> list[Redrive]:
    """Return a page of redrives, newest first, `after` an id."""
    return _listed(database, topic=topic, group=group, after=after, limit=page(limit))


def redrive_of(database: Database, redrive_id: int) -> Redrive:
    """Return a redrive. Raises NotFound."""
    found = _listed(database, redrive_id=redrive_id)
    if not found:
        raise NotFound("redrive", str(redrive_id), "see those that are: mqlayer dead redrives")
    return found[0]


def redrive_results(database: Database, redrive_id: int, *, after: int = 0, limit: int = 50) -> list[RedriveResult]:
    """Return a page of results, `after` a dead_id. Raises NotFound."""
    redrive_of(database, redrive_id)
    facts = {"redrive_id": redrive_id, "after": after, "limit": page(limit)}
    with database.connection() as connection:
        rows = connection.execute(query("redrive_results"), facts).fetchall()
    return [
        RedriveResult(
            dead_id,
            None if lp is None else Identity(source, lp, seq),
            None if key is None else key_text(key),
            result,
            at,
        )
        for dead_id, lp, source, seq, key, result, at in rows
    ]


def work_on(
    database: Database,
    redrive_id: int,
    *,
    worker: str,
    stop: threading.Event | None = None,
    batch: int = BATCH,
    longest_wait_s: float = float("inf"),
) -> Redrive:
    """Work on a redrive as `run_job` does; return its progress."""
    work = _RedriveWorker(database, redrive_id, worker, batch)
    run_job(database, redrive_id, work, worker=worker, stop=stop, longest_wait_s=longest_wait_s)
    return redrive_of(database, redrive_id)


@dataclass(frozen=True, slots=True)
class _PickedMessage:
    dead_id: int
    lp: int
    key: bytes
    partition: int
    offset: int
    source: int
    seq: int
    bodiless: bool

    @property
    def place(self) -> dict[str, Any]:
        return {
            "at_lp": self.lp,
            "at_key": self.key,
            "at_partition": self.partition,
            "at_offset": self.offset,
            "at_dead_id": self.dead_id,
        }


class _RedriveWorker:
    def __init__(self, database: Database, redrive_id: int, worker: str, batch: int) -> None:
        self._database, self._redrive_id, self._worker, self._batch = database, redrive_id, worker, batch
        found = redrive_of(database, redrive_id)
        self._group = find_group(database, found.topic, found.group)
        self._actor = found.actor
        self._alone = not self._group.ordered or self._group.strategy != "strict"

    def pause_s(self) -> float:
        return 0.0

    def deliver(self) -> None:
        event = change_group(self._database, self._group.group_id, self._send)
        failpoint("redrive.after_commit")
        if event is not None:
            emit(event)

    def _send(self, connection: Connection) -> Event | None:
        facts = {"redrive_id": self._redrive_id, "worker": self._worker}
        row = connection.execute(query("redrive_hold"), facts).fetchone()
        if row is None:
            return None
        wanted, per_s = DeadFilter.of(row[0]), row[2]
        cursor = dict(zip(("at_lp", "at_key", "at_partition", "at_offset", "at_dead_id"), row[3:], strict=True))
        limit = self._batch if per_s == 0 else max(1, min(self._batch, int(per_s)))
        found = self._find(connection, wanted, {"upto": row[1], "limit": limit + SCAN_AHEAD} | cursor)
        if not found:
            return self._end(connection, wanted)
        named = [one.dead_id for one in found[:limit]]
        limit, full = find_capacity(connection, self._group, named, alone=self._alone)
        if full is not None and not limit:
            return self._wait(connection, facts, full)
        picked = self._without_known(connection, _batch(found, limit))
        results = self._redrive(connection, picked)
        sent = sum(result == "sent" for result in results.values())
        self._put_results(connection, results)
        advance = {"sent": sent, "not_sent": len(picked) - sent, "pause_s": sent / per_s if per_s else 0.0,
                   "lease_s": LEASE_S}  # fmt: skip
        connection.execute(query("redrive_advance"), facts | found[:limit][-1].place | advance)
        count_action(connection, self._group.group_id, "redriven", sent)
        failpoint("redrive.before_commit")
        return self._event("redriven", count=sent) if sent else None

    def _wait(self, connection: Connection, facts: dict[str, Any], full: ParkingLimit) -> Event | None:
        waits = {"blocked_by": REASONS[full], "pause_s": FULL_WAIT_S, "lease_s": LEASE_S}
        row = connection.execute(query("redrive_wait"), facts | waits).fetchone()
        if row is None or not row[0]:
            return None
        log.warning("redrive_blocked", extra={"redrive": self._redrive_id, "limit": full})
        count_action(connection, self._group.group_id, "redrive_blocked")
        return self._event("redrive_blocked", cause=full)

    def _event(self, kind: EventKind, **facts: Any) -> Event:
        return Event(kind, self._group.topic, self._group.name, actor=self._worker, **facts)

    def _find(self, connection: Connection, wanted: DeadFilter, facts: dict[str, Any]) -> list[_PickedMessage]:
        facts |= {"redrive_id": self._redrive_id, "group_id": self._group.group_id} | wanted.facts()
        name = "redrive_pick" if wanted.dead_ids is None else "redrive_pick_named"
        rows = _run(connection, name, facts).fetchall()
        return [_PickedMessage(dead_id, lp, bytes(key), *rest) for dead_id, lp, key, *rest in rows]

    def _without_known(self, connection: Connection, picked: list[_PickedMessage]) -> list[_PickedMessage]:
        """Drop messages that an earlier batch took; they may have died again."""
        facts = {"redrive_id": self._redrive_id, "dead_ids": [one.dead_id for one in picked]}
        known = {row[0] for row in _run(connection, "redrive_known", facts).fetchall()}
        return [one for one in picked if one.dead_id not in known]

    def _redrive(self, connection: Connection, picked: Sequence[_PickedMessage]) -> dict[int, RedriveWord]:
        results: dict[int, RedriveWord] = {one.dead_id: "no_body" if one.bodiless else "already" for one in picked}
        marked = _run(connection, "redrive_mark", {"dead_ids": list(results), "actor": self._actor}).fetchall()
        dead = {row[0] for row in marked}
        facts = {"dead_ids": [dead_id for dead_id in results if dead_id in dead], "alone": self._alone}
        if not dead:
            return results
        _run(connection, "redrive_keys_put", facts)
        joined = _run(connection, "redrive_messages_put", facts).fetchall()
        identities = {str(Identity(source, lp, seq)) for lp, _, source, seq in joined}
        heads = {
            "group_id": self._group.group_id,
            "lps": [row[0] for row in joined],
            "names": [row[1] for row in joined],
            "identities": list(identities),
        }
        _run(connection, "parked_heads_put", heads)
        for dead_id, lp, source, seq in marked:
            if str(Identity(source, lp, seq)) in identities:
                results[dead_id] = "sent"
        raise_parking_version(connection, self._group.group_id, {(lp, bytes(name)) for lp, name, _, _ in joined})
        return results

    def _end(self, connection: Connection, wanted: DeadFilter) -> Event:
        missing: list[tuple[int]] = []
        if wanted.dead_ids is not None:
            facts = {"redrive_id": self._redrive_id, "dead_ids": list(wanted.dead_ids)}
            missing = connection.execute(query("redrive_missing"), facts).fetchall()
            self._put_results(connection, {row[0]: "gone" for row in missing})
        facts = {"redrive_id": self._redrive_id, "state": "done", "gone": len(missing)}
        connection.execute(query("redrive_end"), facts)
        log.info("redrive_done", extra={"redrive": self._redrive_id})
        return self._event("redrive_ended", cause="done")

    def _put_results(self, connection: Connection, results: dict[int, RedriveWord]) -> None:
        facts = {"redrive_id": self._redrive_id, "dead_ids": list(results), "results": list(results.values())}
        connection.execute(query("redrive_results_put"), facts)


def _run(connection: Connection, name: str, facts: dict[str, Any]) -> Any:
    """Unprepared: a plan made for empty tables is slow."""
    return connection.execute(query(name), facts, prepare=False)


def _batch(found: Sequence[_PickedMessage], limit: int) -> list[_PickedMessage]:
    """Return the next messages: in log order, but by seq within a source.

    A node that fell back has resent messages at lower offsets. The last key's lower seqs may lie behind the limit.
    """
    ahead = list(found[:limit])
    last = ahead[-1]
    tops: dict[int, int] = {}
    for one in ahead:
        if (one.lp, one.key) == (last.lp, last.key):
            tops[one.source] = max(one.seq, tops.get(one.source, 0))
    ahead += [
        one for one in found[limit:] if (one.lp, one.key) == (last.lp, last.key) and one.seq < tops.get(one.source, 0)
    ]
    places = {one.dead_id: place for place, one in enumerate(ahead)}
    highest: dict[tuple[int, bytes, int], int] = {}
    for one in sorted(ahead, key=lambda one: one.seq):
        queue = (one.lp, one.key, one.source)
        highest[queue] = places[one.dead_id] = max(places[one.dead_id], highest.get(queue, 0))
    return sorted(ahead, key=lambda one: (one.lp, one.key, places[one.dead_id], one.seq))


def _running(database: Database, redrive_id: int) -> None:
    found = redrive_of(database, redrive_id)
    if found.state != "running":
        raise Conflict(f"redrive {redrive_id} is {found.state}", f"see what it did: mqlayer dead results {redrive_id}")


def _over(redrive_id: int) -> Conflict:
    return Conflict(f"redrive {redrive_id} is over", "see what it did: mqlayer dead results")


def _listed(database: Database, **facts: Any) -> list[Redrive]:
    wanted = {"redrive_id": None, "topic": None, "group": None, "after": None, "limit": 1} | facts
    with database.connection() as connection:
        rows = connection.execute(query("redrive_list"), wanted).fetchall()
    return [
        Redrive(redrive_id, topic, group, DeadFilter.of(facts), *rest)
        for redrive_id, topic, group, facts, *rest in rows
    ]
