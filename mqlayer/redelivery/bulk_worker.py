"""Work on bulk actions: batches of items in order, each one transaction under the group's lock.

Locks: the group, the job's row, then parked keys or dead messages. A killed batch is repeated.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from mqlayer.domain.message import Identity
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.events import Event, EventKind, emit
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import find_group
from mqlayer.groups.rebalance import change_group
from mqlayer.logs import event_logger
from mqlayer.parking import ParkingLimit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redelivery.act_notes import count_action, raise_parking_version
from mqlayer.redelivery.bulk import (
    BULK_LIMIT,
    BULK_MOST,
    BulkAction,
    BulkWord,
    bulk_action,
    end_bulk,
    plan_bulk,
    start_planned,
)
from mqlayer.redelivery.capacity import FULL_WAIT_S, REASONS, find_capacity
from mqlayer.redelivery.filters import DeadFilter, ParkedFilter
from mqlayer.redelivery.operator_actions import AT_ONCE, discard_first, keep_dead, release_keys
from mqlayer.redelivery.redelivery_job import LEASE_S, new_worker, run_job
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

BATCH: Final = 100
"""Items per transaction; at most one second's worth of the rate."""
ERROR_LIMIT: Final = 1_000


def work_on(
    database: Database,
    bulk_id: int,
    *,
    worker: str,
    stop: threading.Event | None = None,
    batch: int = BATCH,
    longest_wait_s: float = float("inf"),
) -> BulkAction:
    """Work on a started bulk action as `run_job` does; return its progress. Raises NotFound."""
    work = _BulkWorker(database, bulk_id, worker, batch)
    run_job(database, bulk_id, work, worker=worker, stop=stop, longest_wait_s=longest_wait_s)
    return bulk_action(database, bulk_id)


def start_redrive(
    runtime: Runtime,
    topic: str,
    group: str,
    wanted: DeadFilter,
    *,
    per_s: float = 0.0,
    worker: str | None = None,
    reason: str | None = None,
) -> int:
    """Plan and start a redrive of the first BULK_MOST dead messages that match; return its id.

    `work_on` sends them; without `worker`, the retry scan. Raises NotFound, InvalidInput, Conflict for a retired group.
    """
    planned = plan_bulk(runtime, "redrive", topic, group, wanted, limit=BULK_MOST, first=True)
    return start_planned(runtime, planned.bulk_id, reason=reason, per_s=per_s, worker=worker).bulk_id


def release_all(runtime: Runtime, topic: str, group: str, *, cause: str | None = None) -> int:
    """Retry a group's parked keys now, or those with this `cause`; return how many. Raises InvalidInput."""
    count = 0
    while True:
        planned = plan_bulk(runtime, "release", topic, group, ParkedFilter(cause=cause), first=True)
        worker = new_worker()
        start_planned(runtime, planned.bulk_id, reason=None, per_s=0.0, worker=worker)
        count += work_on(runtime.control, planned.bulk_id, worker=worker, batch=AT_ONCE).done
        if planned.size < BULK_LIMIT:
            return count


@dataclass(slots=True)
class _BulkBatch:
    """The job's row for one batch."""

    at_number: int
    limit: int
    per_s: float
    reason: str
    actor: str
    facts: dict[str, Any]


@dataclass(slots=True)
class _BulkOutcome:
    """A word by item; `kind` and `count` for counts and events."""

    kind: EventKind
    words: dict[int, BulkWord] = field(default_factory=dict)
    count: int = 0
    full: ParkingLimit | None = None
    partly: bool = False


class _BulkWorker:
    def __init__(self, database: Database, bulk_id: int, worker: str, batch: int) -> None:
        self._database, self._bulk_id, self._worker, self._batch = database, bulk_id, worker, batch
        self._action = found = bulk_action(database, bulk_id)
        self._group = find_group(database, found.topic, found.group)
        self._alone = not self._group.ordered or self._group.strategy != "strict"
        acts: dict[str, Callable[[Connection, _BulkBatch], _BulkOutcome]] = {
            "redrive": self._redrive, "keep": self._keep, "release": self._release, "discard": self._discard,
        }  # fmt: skip
        self._act = acts[found.act]
        self._at_once = batch

    def pause_s(self) -> float:
        return 0.0

    def deliver(self) -> None:
        try:
            event = change_group(self._database, self._group.group_id, self._work)
        except (Conflict, InvalidInput) as error:
            # A row that can't be written: find it one by one, and pass it by.
            if self._at_once > 1:
                self._at_once = 1
                return
            log.warning("bulk_item_failed", extra={"bulk": self._bulk_id, "reason": str(error)})
            event = change_group(self._database, self._group.group_id, partial(self._fail, error=error))
            self._at_once = self._batch
        failpoint("bulk.after_commit")
        if event is not None:
            emit(event)

    def _work(self, connection: Connection) -> Event | None:
        order = self._hold(connection)
        if order is None:
            return None
        done = self._act(connection, order)
        if not done.words and not done.partly:
            return self._end(connection, order) if done.full is None else self._wait(connection, order, done.full)
        self._put(connection, order, done.words)
        if done.count:
            count_action(connection, self._group.group_id, done.kind, done.count)
        failpoint("bulk.before_commit")
        return self._event(done.kind, order.actor, count=done.count) if done.count else None

    def _hold(self, connection: Connection) -> _BulkBatch | None:
        facts: dict[str, Any] = {"redrive_id": self._bulk_id, "worker": self._worker}
        row = connection.execute(query("bulk_hold"), facts).fetchone()
        if row is None:
            return None
        at_number, per_s, reason, actor = row
        limit = self._at_once if per_s == 0 else max(1, min(self._at_once, int(per_s)))
        facts |= {"group_id": self._group.group_id, "act": self._action.act, "at_number": at_number, "limit": limit}
        return _BulkBatch(at_number, limit, per_s, reason or "", actor, facts)

    # -- acts --------------------------------------------------------------------------------------------------------

    def _redrive(self, connection: Connection, order: _BulkBatch) -> _BulkOutcome:
        rows = _run(connection, "bulk_next_dead", order.facts).fetchall()
        sendable = [dead_id for _, dead_id, word in rows if word is None]
        done = _BulkOutcome("redriven")
        room, done.full = find_capacity(connection, self._group, sendable, alone=self._alone)
        given = self._give_back(connection, sendable[:room], order.actor)
        for number, dead_id, word in rows:
            if word is None and dead_id in sendable[room:]:
                break
            done.words[number] = word or ("done" if dead_id in given else "already")
        done.count = len(given)
        return done

    def _give_back(self, connection: Connection, dead_ids: list[int], actor: str) -> set[int]:
        """Join dead messages to their keys' lines in order; return the joined ones."""
        marked = _run(connection, "redrive_mark", {"dead_ids": dead_ids, "actor": actor}).fetchall()
        dead = {row[0] for row in marked}
        if not dead:
            return set()
        facts = {"dead_ids": [dead_id for dead_id in dead_ids if dead_id in dead], "alone": self._alone}
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
        raise_parking_version(connection, self._group.group_id, {(lp, bytes(name)) for lp, name, _, _ in joined})
        return {dead_id for dead_id, lp, source, seq in marked if str(Identity(source, lp, seq)) in identities}

    def _keep(self, connection: Connection, order: _BulkBatch) -> _BulkOutcome:
        rows = _run(connection, "bulk_next_dead", order.facts).fetchall()
        dead_ids = [dead_id for _, dead_id, word in rows if word is None]
        kept = {row[-1] for row in keep_dead(connection, dead_ids, reason=order.reason, actor=order.actor)}
        words: dict[int, BulkWord] = {
            number: word or ("done" if dead_id in kept else "already") for number, dead_id, word in rows
        }
        return _BulkOutcome("kept_dead", words, len(kept))

    def _release(self, connection: Connection, order: _BulkBatch) -> _BulkOutcome:
        _run(connection, "bulk_hold_keys", order.facts)
        rows = _run(connection, "bulk_next_parked", order.facts).fetchall()
        keys = [(lp, bytes(name)) for _, lp, name, _, _, word in rows if word is None]
        if keys:
            release_keys(connection, self._group.group_id, keys)
            raise_parking_version(connection, self._group.group_id, keys)
        return _BulkOutcome("released", {row[0]: row[-1] or "done" for row in rows}, len(keys))

    def _discard(self, connection: Connection, order: _BulkBatch) -> _BulkOutcome:
        _run(connection, "bulk_hold_keys", order.facts)
        done = _BulkOutcome("discarded")
        for number, lp, name, upto, gone, word in _run(connection, "bulk_next_parked", order.facts).fetchall():
            if word is not None or upto is None:
                # The part before may have ended the key.
                done.words[number] = "done" if gone else word or "gone"
                continue
            left = AT_ONCE - done.count
            key = {"group_id": self._group.group_id, "lp": lp, "name": bytes(name), "upto": upto, "limit": left,
                   "reason": order.reason, "actor": order.actor}  # fmt: skip
            count = discard_first(connection, self._group, key, act="parked discard")
            done.count += count
            if count == left:
                facts = {"redrive_id": self._bulk_id, "number": number, "gone": count}
                connection.execute(query("bulk_part"), facts)
                done.partly = True
                break
            done.words[number] = "done"
            # One more message alone would count as the head only.
            if AT_ONCE - done.count < 2:
                break
        return done

    # -- progress ----------------------------------------------------------------------------------------------------

    def _put(
        self, connection: Connection, order: _BulkBatch, words: dict[int, BulkWord], error: str | None = None
    ) -> None:
        facts = {"redrive_id": self._bulk_id, "numbers": list(words), "results": list(words.values()), "error": error}
        connection.execute(query("bulk_results"), facts)
        counts = Counter(words.values())
        done, failed = counts["done"], counts["failed"]
        advance = {"redrive_id": self._bulk_id, "number": max(words, default=order.at_number), "done": done,
                   "failed": failed, "skipped": len(words) - done - failed, "lease_s": LEASE_S,
                   "pause_s": done / order.per_s if order.per_s else 0.0}  # fmt: skip
        connection.execute(query("bulk_advance"), advance)

    def _fail(self, connection: Connection, *, error: Exception) -> Event | None:
        order = self._hold(connection)
        if order is not None and order.at_number < self._action.size:
            self._put(connection, order, {order.at_number + 1: "failed"}, str(error)[:ERROR_LIMIT])
        return None

    def _wait(self, connection: Connection, order: _BulkBatch, full: ParkingLimit) -> Event | None:
        waits = {"blocked_by": REASONS[full], "pause_s": FULL_WAIT_S, "lease_s": LEASE_S}
        row = connection.execute(query("redrive_wait"), order.facts | waits).fetchone()
        if row is None or not row[0]:
            return None
        log.warning("redrive_blocked", extra={"bulk": self._bulk_id, "limit": full})
        count_action(connection, self._group.group_id, "redrive_blocked")
        return self._event("redrive_blocked", order.actor, cause=full)

    def _end(self, connection: Connection, order: _BulkBatch) -> Event | None:
        end_bulk(connection, self._action, "done", order.actor)
        log.info("bulk_done", extra={"bulk": self._bulk_id})
        failpoint("bulk.before_end")
        return self._event("redrive_ended", order.actor, cause="done") if self._action.act == "redrive" else None

    def _event(self, kind: EventKind, actor: str, **facts: Any) -> Event:
        return Event(kind, self._group.topic, self._group.name, actor=actor, **facts)


def _run(connection: Connection, name: str, facts: dict[str, Any]) -> Any:
    """Unprepared: a plan made for empty tables is slow."""
    return connection.execute(query(name), facts, prepare=False)
