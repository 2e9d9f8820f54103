"""Bulk actions: an act on a fixed set of dead messages or parked keys (docs/design/bulk-actions.md).

A plan fixes set and order in one statement; a start lets workers do it; each batch is a transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from psycopg.types.json import Jsonb

from mqlayer.domain.message import Identity
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.events import Event, emit
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, find_group
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.bounded_delete import forget_rows
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redelivery.filters import MAX_DEAD_IDS, DeadFilter, ParkedFilter
from mqlayer.redelivery.lists import key_text, page
from mqlayer.redelivery.operator_actions import audit_target, check_reason
from mqlayer.redelivery.redelivery_job import LEASE_S, take_over
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

BULK_LIMIT: Final = 100_000
"""Items of a bulk action, without another limit."""
BULK_MOST: Final = 1_000_000
"""Items of a bulk action, at most."""
PLAN_EXPIRES_S: Final = 3_600.0
"""Age at which a plan can't be started any more, and is deleted."""
KEPT_S: Final = 30 * 86_400.0
"""How long an ended bulk action is kept, with its items."""

BulkAct = Literal["redrive", "keep", "release", "discard"]
"""redrive: give dead messages back; keep: rule that they stay dead; release: retry parked keys; discard: let their
messages die."""
BulkState = Literal["planned", "running", "done", "cancelled"]
BulkWord = Literal["done", "already", "no_body", "gone", "changed", "paused", "due", "failed"]
"""already: lives in the group; no_body: has no body; gone: has no row; changed: not as planned; paused: by an operator;
due: tried now anyway; failed: see its error."""

DEAD_ACTS: Final = ("redrive", "keep")
PARKED_ACTS: Final = ("release", "discard")
BulkFilter = DeadFilter | ParkedFilter


@dataclass(frozen=True, slots=True)
class BulkAction:
    """A bulk action of `size` items. `matched`: more, if only the first ones were taken.

    `per_s`: items per second, 0: no limit; `actor`: starter, else planner. `worked_on`: a worker has the lease;
    `blocked_by`: why it does nothing, other than its rate.
    """

    bulk_id: int
    topic: str
    group: str
    act: BulkAct
    filter: BulkFilter
    state: BulkState
    size: int
    matched: int
    done: int
    skipped: int
    failed: int
    per_s: float
    actor: str
    reason: str | None
    planned_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    worker: str | None
    worked_on: bool
    blocked_by: str | None


@dataclass(frozen=True, slots=True)
class BulkItem:
    """A dead message, or a parked key with its head. `number`: its turn, from 1.

    `identity`: None without a row or head. `key`: None for none. `messages`: of a key, at the plan. `result`: None
    before its turn.
    """

    number: int
    dead_id: int | None
    identity: Identity | None
    key: str | None
    messages: int | None
    result: BulkWord | None
    error: str | None
    at: datetime | None


def plan_bulk(
    runtime: Runtime,
    act: BulkAct,
    topic: str,
    group: str,
    wanted: BulkFilter,
    *,
    limit: int = BULK_LIMIT,
    first: bool = False,
) -> BulkAction:
    """Fix the set of a bulk action: the present matches, in order; nothing is done yet.

    More than `limit` items are refused, or the `first` taken. Raises NotFound, InvalidInput, Conflict for a retired
    group.
    """
    found = find_group(runtime.control, topic, group)
    _check_plan(found, act, wanted, limit)
    named = isinstance(wanted, DeadFilter) and wanted.dead_ids is not None
    name = "bulk_plan_named" if named else "bulk_plan_dead" if act in DEAD_ACTS else "bulk_plan_parked"
    facts: dict[str, Any] = wanted.facts() | {"group_id": found.group_id, "act": act, "limit": limit, "first": first}

    def work(connection: Connection) -> int:
        said = {"filter": Jsonb(wanted.as_json()), "actor": runtime.actor}
        ((bulk_id,),) = connection.execute(query("bulk_insert"), facts | said).fetchall()
        # Unprepared: the filter's values decide which index is best.
        put = facts | {"redrive_id": bulk_id}
        ((matched, size),) = connection.execute(query(name), put, prepare=False).fetchall()
        if size < matched and not first:
            raise InvalidInput(_too_many(matched, limit))
        connection.execute(query("bulk_planned"), {"redrive_id": bulk_id, "size": size, "matched": matched})
        told = {"bulk": bulk_id, "act": act, "filter": wanted.as_json(), "size": size, "matched": matched}
        write_audit(connection, runtime.actor, "bulk plan", audit_target(found), told)
        failpoint("bulk.before_plan")
        return int(bulk_id)

    bulk_id = runtime.control.transaction(work)
    failpoint("bulk.after_plan")
    return bulk_action(runtime.control, bulk_id)


def start_bulk(
    runtime: Runtime, bulk_id: int, *, reason: str, per_s: float = 0.0, worker: str | None = None
) -> BulkAction:
    """Start a planned bulk action for `work_on`; without `worker`, for the retry scan.

    Raises InvalidInput for an empty reason, NotFound, Conflict if
    it is not planned or too old.
    """
    check_reason(reason)
    return start_planned(runtime, bulk_id, reason=reason, per_s=per_s, worker=worker)


def start_planned(
    runtime: Runtime, bulk_id: int, *, reason: str | None, per_s: float, worker: str | None
) -> BulkAction:
    """Start as `start_bulk`, also without a reason."""
    check_rate(per_s)
    planned = bulk_action(runtime.control, bulk_id)
    facts = {"redrive_id": bulk_id, "reason": reason, "actor": runtime.actor, "per_s": per_s, "worker": worker,
             "lease_s": LEASE_S, "expires_s": PLAN_EXPIRES_S}  # fmt: skip

    def work(connection: Connection) -> None:
        if connection.execute(query("bulk_start"), facts).fetchone() is None:
            raise _not_planned(planned)
        said: dict[str, Any] = {"bulk": bulk_id, "act": planned.act, "size": planned.size, "per_s": per_s}
        said |= {} if reason is None else {"reason": reason}
        write_audit(connection, runtime.actor, "bulk start", _target(planned), said)

    if planned.state != "planned":
        raise _not_planned(planned)
    runtime.control.transaction(work)
    failpoint("bulk.after_start")
    log.info("bulk_started", extra={"bulk": bulk_id, "act": planned.act, "topic": planned.topic,
                                    "group": planned.group})  # fmt: skip
    return bulk_action(runtime.control, bulk_id)


def resume_bulk(runtime: Runtime, bulk_id: int, *, worker: str) -> None:
    """Take over a running bulk action. Raises NotFound, Conflict if it does not run."""
    found = bulk_action(runtime.control, bulk_id)
    if found.state != "running":
        raise _not_running(found)
    take_over(runtime, bulk_id, act="bulk resume", over=_not_running(found), worker=worker)


def cancel_bulk(runtime: Runtime, bulk_id: int) -> BulkAction:
    """End a bulk action after the batch in hand. Raises NotFound, Conflict if it is over."""
    before = bulk_action(runtime.control, bulk_id)

    def work(connection: Connection) -> None:
        if not end_bulk(connection, before, "cancelled", runtime.actor):
            raise _not_running(before)

    if before.state in ("done", "cancelled"):
        raise _not_running(before)
    runtime.control.transaction(work)
    if before.act == "redrive":
        emit(Event("redrive_ended", before.topic, before.group, cause="cancelled", actor=runtime.actor))
    return bulk_action(runtime.control, bulk_id)


def end_bulk(connection: Connection, action: BulkAction, state: BulkState, actor: str) -> bool:
    """End a bulk action in the caller's transaction; False if it was over."""
    row = connection.execute(query("bulk_end"), {"redrive_id": action.bulk_id, "state": state}).fetchone()
    if row is None:
        return False
    done, skipped, failed, reason = row
    said: dict[str, Any] = {
        "bulk": action.bulk_id,
        "act": action.act,
        "done": done,
        "skipped": skipped,
        "failed": failed,
    }
    said |= {} if reason is None else {"reason": reason}
    write_audit(connection, actor, "bulk cancel" if state == "cancelled" else "bulk end", _target(action), said)
    return True


def count_dead(database: Database, topic: str, group: str, wanted: DeadFilter) -> tuple[int, int]:
    """Return the number of matching dead messages, and of those without body. Raises NotFound, InvalidInput."""
    facts = {"group_id": find_group(database, topic, group).group_id} | wanted.facts()
    with database.connection() as connection:
        ((found, bodiless),) = connection.execute(query("dead_count"), facts, prepare=False).fetchall()
    return found, bodiless


def bulk_actions(
    database: Database,
    *,
    topic: str | None = None,
    group: str | None = None,
    state: BulkState | None = None,
    after: int | None = None,
    limit: int = 50,
) -> list[BulkAction]:
    """Return a page of bulk actions, newest first, `after` an id."""
    return _listed(database, topic=topic, group=group, state=state, after=after, limit=page(limit))


def bulk_action(database: Database, bulk_id: int) -> BulkAction:
    """Return a bulk action. Raises NotFound."""
    found = _listed(database, redrive_id=bulk_id)
    if not found:
        raise NotFound("bulk action", str(bulk_id), "see those that are: mqlayer bulk list")
    return found[0]


def bulk_items(
    database: Database, bulk_id: int, *, after: int = 0, failed: bool = False, limit: int = 50
) -> list[BulkItem]:
    """Return a page of items in their order, `after` a number; `failed`: only those. Raises NotFound."""
    bulk_action(database, bulk_id)
    facts = {"redrive_id": bulk_id, "after": after, "failed": failed, "limit": page(limit)}
    with database.connection() as connection:
        rows = connection.execute(query("bulk_items"), facts).fetchall()
    return [
        BulkItem(
            number,
            dead_id,
            None if seq is None else Identity(source, lp, seq),
            None if name is None else key_text(name),
            *rest,
        )
        for number, dead_id, lp, name, source, seq, *rest in rows
    ]


def clean_bulk(database: Database) -> int:
    """Delete expired plans and old bulk actions, in bounded steps; return how many."""
    facts = {"expires_s": PLAN_EXPIRES_S, "kept_s": KEPT_S}
    forget_rows(database, query("bulk_old_items"), facts)
    gone = forget_rows(database, query("bulk_old"), facts)
    if gone:
        log.info("bulk_cleaned", extra={"actions": gone})
    return gone


def check_rate(per_s: float) -> None:
    """Raise InvalidInput for no rate."""
    if not 0 <= per_s < float("inf"):
        raise InvalidInput(f"{per_s} a second is no rate: 0 for no limit, or more")


def _check_plan(group: Group, act: BulkAct, wanted: BulkFilter, limit: int) -> None:
    if group.state == "retired":
        raise Conflict(
            f"group {group.name!r} of topic {group.topic!r} is retired", "no member would handle the messages"
        )
    if isinstance(wanted, DeadFilter) != (act in DEAD_ACTS):
        kind = "dead messages" if act in DEAD_ACTS else "parked keys"
        raise InvalidInput(f"{act} is an act on {kind}: give a filter of these")
    if isinstance(wanted, DeadFilter) and wanted.dead_ids is not None and not 0 < len(wanted.dead_ids) <= MAX_DEAD_IDS:
        raise InvalidInput(f"name 1 to {MAX_DEAD_IDS} messages, or say what they have in common")
    if isinstance(wanted, ParkedFilter) and (wanted.topic, wanted.group) not in (
        (None, None), (group.topic, group.name),
    ):  # fmt: skip
        raise InvalidInput("a bulk action is on one group: leave topic and group out of the filter")
    if not 1 <= limit <= BULK_MOST:
        raise InvalidInput(f"a bulk action has 1 to {BULK_MOST:,} items, not {limit:,}: narrow it, or plan several")


def _too_many(matched: int, limit: int) -> str:
    return (
        f"{matched:,} items match, more than the limit of {limit:,}: narrow the filter, raise the limit "
        f"(at most {BULK_MOST:,}), or take the first ones only (first=True, --first)"
    )


def _not_planned(found: BulkAction) -> Conflict:
    if found.state == "planned":
        why = "it was planned more than an hour ago, or another process has just started it"
        return Conflict(
            f"bulk action {found.bulk_id} can't be started: {why}", "plan it again, or see mqlayer bulk list"
        )
    return Conflict(
        f"bulk action {found.bulk_id} is {found.state}", f"see what it does: mqlayer bulk show {found.bulk_id}"
    )


def _not_running(found: BulkAction) -> Conflict:
    state = "over" if found.state == "running" else found.state
    return Conflict(f"bulk action {found.bulk_id} is {state}", f"see what it did: mqlayer bulk show {found.bulk_id}")


def _target(action: BulkAction) -> str:
    return f"{action.topic}/{action.group}"


def _listed(database: Database, **facts: Any) -> list[BulkAction]:
    wanted = {"redrive_id": None, "topic": None, "group": None, "state": None, "after": None, "limit": 1} | facts
    with database.connection() as connection:
        rows = connection.execute(query("bulk_list"), wanted).fetchall()
    return [
        BulkAction(bulk_id, topic, group, act, (DeadFilter if act in DEAD_ACTS else ParkedFilter).of(facts), *rest)
        for bulk_id, topic, group, act, facts, *rest in rows
    ]
