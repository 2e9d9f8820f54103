"""The system's problems in one look: the conditions of `mqlayer.metrics.alerts`, evaluated on Postgres and the nodes.

A condition is told at once, and not after the time for which an alert waits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from mqlayer.doctor.findings import format_seconds
from mqlayer.doctor.postgres import OpenTransaction
from mqlayer.errors import MqlayerError, SchemaMismatch
from mqlayer.groups.breaker import BreakerFacts
from mqlayer.inspect import GroupStatus, describe_breaker, group_statuses
from mqlayer.inspect.node_status import NodeStatus, node_statuses
from mqlayer.inspect.processes import relay_processes
from mqlayer.maintenance.job_status import job_statuses
from mqlayer.metrics.alerts import ALERTS, STALLS, Alert
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import SchemaName, check_schema
from mqlayer.postgres.queries import query
from mqlayer.postgres.server_identity import NOT_REPORTED, SUSPECT
from mqlayer.redelivery import FailureCounts, failure_counts
from mqlayer.runtime.runtime import Runtime

NODE_TIMES: Final = {"connect_timeout_s": 1.0, "socket_timeout_s": 5.0}
EXPECTED_STALLS: Final = frozenset({"paused", "replayed", "hidden", "no_owner"})
"""No rule counts partitions that are stuck for these reasons; others tell of their causes."""
POSITIONS_LIMIT: Final = 2_000
"""Positions of groups that a look reads; of more, the lag is of samples, and no reason is known."""
DEAD_LIMIT: Final = 10_000
SOURCES_LIMIT: Final = 20
RANK: Final = {"critical": 0, "warning": 1, "note": 2}
ORDER: Final = {name: place for place, name in enumerate(ALERTS)}


@dataclass(frozen=True, slots=True)
class Problem:
    """A condition that holds now. `since`: None if unknown; the other fields name its place.

    `rearms`: arming the node may end it.
    """

    alert: Alert
    text: str
    since: datetime | None = None
    topic: str = ""
    group: str = ""
    node: str = ""
    change: int | None = None
    advice: str = ""
    rearms: bool = False


@dataclass(slots=True)
class SystemTotals:
    """Sums over the system. Rates are per second, by the last two samples; None: not known."""

    topics: int = 0
    groups: int = 0
    members: int = 0
    nodes: int = 0
    serving: int = 0
    relays: int | None = None
    lag: int = 0
    oldest_s: float | None = None
    outbox: int | None = None
    outbox_s: float = 0.0
    parked_keys: int = 0
    parked_messages: int = 0
    dead: int = 0
    is_sampled: bool = False
    """Lag is of samples: the partitions are too many to ask for."""
    sampled_at: datetime | None = None
    committed_per_s: float | None = None
    relayed_per_s: float | None = None
    stored_per_s: float | None = None


class GroupRow(NamedTuple):
    """A live group in Postgres, with its last sample."""

    topic: str
    group: str
    mode: str
    partitions: int
    alive: int
    paused_at: datetime | None
    paused_by: str | None
    sampled: bool
    lag: int | None
    oldest_s: float | None


@dataclass(frozen=True, slots=True)
class SystemHealth:
    """Problems, the most urgent first. `unread`: parts that could not be looked at, with the reason."""

    at: datetime
    took_s: float
    problems: tuple[Problem, ...]
    totals: SystemTotals
    unread: tuple[str, ...]


@dataclass(slots=True)
class HealthLook:
    """One look at the system."""

    runtime: Runtime
    totals: SystemTotals = field(default_factory=SystemTotals)

    def rows(self, name: str, *, database: Database | None = None, **facts: Any) -> list[tuple[Any, ...]]:
        """Run a named query, by default on the control database."""
        with (database or self.runtime.control).connection() as connection:
            return connection.execute(query(name), facts).fetchall()


Finder = Callable[[HealthLook], Iterable[Problem]]


def system_health(runtime: Runtime) -> SystemHealth:
    """Look at everything. Raises StoreUnavailable if the control database does not answer, PermissionDenied.

    Takes as long as the slowest node: seconds where one is silent. The number of statements and node calls does not
    depend on partitions, and the positions that are read have a limit.
    """
    began, at = time.monotonic(), datetime.now(UTC)
    look = HealthLook(replace(runtime, settings=runtime.settings.model_copy(update=NODE_TIMES)))
    problems, unread = list(_schema(runtime.control, "control")), list[str]()
    if not problems:
        for title, finder in FINDERS.items():
            try:
                problems += finder(look)
            except MqlayerError as error:
                unread.append(f"{title}: {error}")
    never = datetime.max.replace(tzinfo=UTC)
    problems.sort(key=lambda one: (RANK[one.alert.severity], ORDER[one.alert.name], one.since or never))
    return SystemHealth(at, time.monotonic() - began, tuple(problems), look.totals, tuple(unread))


def _schema(database: Database, schema: SchemaName) -> Iterator[Problem]:
    with database.connection() as connection:
        try:
            check_schema(connection, schema, database.address)
        except SchemaMismatch as error:
            yield Problem(ALERTS["MqlayerSchemaMismatch"], str(error))


def _nodes(look: HealthLook) -> Iterator[Problem]:
    statuses = node_statuses(look.runtime)
    look.totals.nodes = sum(one.state != "lost" for one in statuses)
    look.totals.serving = sum(one.state == "serving" for one in statuses)
    for one in statuses:
        if one.state not in ("serving", "lost"):
            rearms = one.state != "unreachable"
            yield Problem(ALERTS["MqlayerNodeAway"], _away(one), one.since, node=one.node.name, rearms=rearms)


def _away(one: NodeStatus) -> str:
    held = f"it holds {_many(one.open + one.sealed, 'partition')}"
    return {
        "unreachable": f"Node {one.node.name} does not answer; {held}: {one.reason}",
        "restarted": f"Node {one.node.name} runs anew, and this run is not armed; {held}",
        "unarmed": f"Node {one.node.name} has no armed run, so it serves nothing; {held}",
    }[one.state]


def _outbox(look: HealthLook) -> Iterator[Problem]:
    database, totals = look.runtime.outbox, look.totals
    mismatch = list(_schema(database, "application"))
    if mismatch:
        yield from mismatch
        return
    yield from _recovery(look, database)
    yield from _transactions(look, database)
    ((totals.outbox, totals.outbox_s),) = look.rows("check_outbox", database=database)
    late = ALERTS["MqlayerOutboxLate"]
    if totals.outbox_s > late.above:
        text = f"{totals.outbox:,} committed messages are not relayed, the oldest for {format_seconds(totals.outbox_s)}"
        yield Problem(late, text, _before(totals.outbox_s))
    ((totals.relays, _),) = look.rows("check_relays", database=database)
    if not totals.relays:
        last = next(iter(relay_processes(database, limit=1)), None)
        text = f"No relay has a valid lease; {totals.outbox:,} messages wait. The worker relays every 10 s meanwhile"
        yield Problem(ALERTS["MqlayerNoRelay"], text, None if last is None else last.lease_until)
    for name, what in (("check_quarantine", "LPs behind a row"), ("check_voided", "Rows passed over")):
        ((count, reason),) = look.rows(name, database=database)
        if count:
            yield Problem(ALERTS["MqlayerOutboxQuarantined"], f"{what}: {count}, the first: {reason}")
    ((count, held, oldest_s, name),) = look.rows("check_versions", database=database)
    if count:
        text = f"Entities that miss a version: {count}, the first of {name}; later events that are held: {held}"
        yield Problem(ALERTS["MqlayerVersionsOverdue"], text, _before(oldest_s))


def _transactions(look: HealthLook, database: Database) -> Iterator[Problem]:
    alert = ALERTS["MqlayerTransactionOpen"]
    for row in look.rows("check_open_transactions", database=database, age_s=alert.above):
        found = OpenTransaction(*row)
        if found.ours and not found.waits_for:
            yield Problem(alert, found.text(), _before(found.age_s))


def _recovery(look: HealthLook, database: Database) -> Iterator[Problem]:
    rows = look.rows("outbox_server", database=database)
    known, now = rows[0][1:3] if rows else (None, NOT_REPORTED)
    if known != SUSPECT and (known in (None, NOT_REPORTED) or now in (NOT_REPORTED, known)):
        return
    yield Problem(ALERTS["MqlayerOutboxSuspect"], "Nothing is relayed: commits of the outbox may be missing")


def _groups(look: HealthLook) -> Iterator[Problem]:
    rows = [GroupRow(*row) for row in look.rows("health_groups")]
    look.totals.is_sampled = sum(one.partitions for one in rows) > POSITIONS_LIMIT
    yield from _sampled_groups(look, rows) if look.totals.is_sampled else _read_groups(look)
    for topic, group, *of_breaker in look.rows("health_breakers"):
        breaker = BreakerFacts(*of_breaker)
        text = f"Only probes run: {describe_breaker(breaker)}"
        yield Problem(ALERTS["MqlayerBreakerOpen"], text, breaker.opened_at, topic, group)
    above_s = ALERTS["MqlayerLagGrows"].above
    for topic, group, oldest_s, lag in look.rows("health_lag", above_s=above_s):
        text = f"The oldest of {_count(lag)} messages is {format_seconds(oldest_s)} old, and gets older"
        yield Problem(ALERTS["MqlayerLagGrows"], text, _before(oldest_s), topic, group)


def _sampled_groups(look: HealthLook, rows: Iterable[GroupRow]) -> Iterator[Problem]:
    for one in rows:
        look.totals.lag += one.lag or 0
        look.totals.oldest_s = max(look.totals.oldest_s or 0.0, one.oldest_s or 0.0)
        if one.paused_at is not None:
            text = f"{one.paused_by or 'An operator'} paused it or its topic; lag {_count(one.lag)}"
            yield Problem(ALERTS["MqlayerPaused"], text, one.paused_at, one.topic, one.group)
        elif one.lag and not one.alive and one.mode != "pop":
            text = f"{_many(one.lag, 'message')} to handle, and no member has a valid lease"
            yield Problem(ALERTS["MqlayerNoMembers"], text, _before(one.oldest_s), one.topic, one.group)
        if one.sampled and one.lag is None:
            text = "The last sample got no lag of some partition"
            yield Problem(ALERTS["MqlayerLagUnknown"], text, None, one.topic, one.group)


def _read_groups(look: HealthLook) -> Iterator[Problem]:
    live = [one for one in group_statuses(look.runtime) if one.facts.state == "live" and one.facts.mode != "broadcast"]
    look.totals.lag = sum(one.lag for one in live)
    look.totals.oldest_s = max((one.age_s for one in live if one.age_s is not None), default=None)
    for one in live:
        yield from _group(one)


def _group(one: GroupStatus) -> Iterator[Problem]:
    topic, group = one.facts.topic, one.facts.name
    paused = one.facts.paused_at or one.facts.topic_paused_at
    if paused is not None:
        what = "The group" if one.facts.paused_at else "The topic"
        by = (one.facts.paused_by if one.facts.paused_at else one.facts.topic_paused_by) or "an operator"
        yield Problem(ALERTS["MqlayerPaused"], f"{what} is paused by {by}; lag {one.lag:,}", paused, topic, group)
    elif not one.facts.alive and one.lag and one.facts.mode != "pop":
        text = f"{_many(one.lag, 'message')} to handle, and no member has a valid lease"
        yield Problem(ALERTS["MqlayerNoMembers"], text, _before(one.age_s), topic, group)
    # A silent node is a problem of its own.
    unknown = [
        part.facts.partition
        for part in one.undrained
        if part.lag is None and (part.stall is None or part.stall.reason != "node_away")
    ]
    if unknown:
        text = f"{_many(len(unknown), 'partition')} of unknown lag, such as {unknown[0]}"
        yield Problem(ALERTS["MqlayerLagUnknown"], text, None, topic, group)
    yield from _stalls(one, topic, group)


def _stalls(one: GroupStatus, topic: str, group: str) -> Iterator[Problem]:
    stuck = [(part.facts.partition, part.stall) for part in one.undrained if part.stall is not None]
    # What a silent node holds up is told with the node, and what nobody takes over with the missing members.
    told = EXPECTED_STALLS | {"node_away", "breaker"} | (set() if one.facts.alive else {"lease_over"})
    counts = Counter(stall.reason for _, stall in stuck if stall.reason not in told)
    for reason, count in counts.items():
        partition, first = next((number, stall) for number, stall in stuck if stall.reason == reason)
        begins = [stall.since for _, stall in stuck if stall.reason == reason and stall.since is not None]
        text = f"{_many(count, 'partition')} stuck ({reason}), such as {partition}: {first.detail}"
        since, advice = min(begins, default=None), STALLS.get(reason, "")
        yield Problem(ALERTS["MqlayerPartitionsStuck"], text, since, topic, group, advice=advice)


def _failures(look: HealthLook) -> Iterator[Problem]:
    for one in failure_counts(look.runtime.control):
        look.totals.parked_keys += one.keys
        look.totals.parked_messages += one.messages
        look.totals.dead += one.dead
        yield from _parked(one)
    for topic, group, dead, last_at in look.rows("health_dead", limit=DEAD_LIMIT):
        at_least = "At least " if dead == DEAD_LIMIT else ""
        text = f"{at_least}{_many(dead, 'message')} died within the last hour, the last at {last_at:%H:%M:%S} UTC"
        yield Problem(ALERTS["MqlayerDeadMessages"], text, last_at, topic, group)


def _parked(one: FailureCounts) -> Iterator[Problem]:
    oldest = _before(one.oldest_s)
    if one.full or one.messages >= one.messages_limit or one.bytes >= one.bytes_limit:
        text = f"The group or {one.full} of its keys reached a limit: {one.messages:,} messages are parked"
        yield Problem(ALERTS["MqlayerParkingFull"], text, oldest, one.topic, one.group)
    if one.overdue_s is not None and one.overdue_s > ALERTS["MqlayerParkedKeysOverdue"].above:
        text = f"A parked key has been due for {format_seconds(one.overdue_s)}"
        yield Problem(ALERTS["MqlayerParkedKeysOverdue"], text, _before(one.overdue_s), one.topic, one.group)
    if one.waiting:
        text = f"The attempts of {one.waiting:,} of {one.keys:,} parked keys are used up"
        yield Problem(ALERTS["MqlayerKeysWaitForOperator"], text, oldest, one.topic, one.group)
    elif one.keys:
        text = f"{_many(one.keys, 'key')} with {_many(one.messages, 'message')} for the next attempt"
        yield Problem(ALERTS["MqlayerKeysParked"], text, oldest, one.topic, one.group)


def _changes(look: HealthLook) -> Iterator[Problem]:
    alert = ALERTS["MqlayerRouteChangeStuck"]
    for topic, change_id, kind, state, age_s in look.rows("check_changes", age_s=alert.above):
        waits = ": publishers of its LPs may wait" if state != "planned" else ""
        text = f"{kind.capitalize()} {change_id} is {state} for {format_seconds(age_s)}{waits}"
        yield Problem(alert, text, _before(age_s), topic, change=change_id)


def _archive(look: HealthLook) -> Iterator[Problem]:
    late = ALERTS["MqlayerArchiveLate"]
    for topic, gaps, passed_s, _ in look.rows("check_archive"):
        if gaps:
            yield Problem(
                ALERTS["MqlayerArchiveGap"], f"{gaps} gaps wait for a decision; trimming waits too", None, topic
            )
        elif passed_s is not None and passed_s > late.above:
            text = f"No archiver came to the end of the topic for {format_seconds(passed_s)}; trimming waits too"
            yield Problem(late, text, _before(passed_s), topic)


def _jobs(look: HealthLook) -> Iterator[Problem]:
    jobs = job_statuses(look.runtime.control)
    late = [one for one in jobs if one.is_late]
    if late:
        known = [one.last_at for one in late if one.last_at is not None]
        text = f"Late: {len(late)} of {len(jobs)} jobs: {', '.join(one.name for one in late)}"
        yield Problem(ALERTS["MqlayerJobsLate"], text, min(known, default=None))
    for one in jobs:
        if one.outcome == "failed":
            yield Problem(ALERTS["MqlayerJobFailed"], f"{one.name}: {one.error}", one.ended_at)


def _samples(look: HealthLook) -> Iterator[Problem]:
    (row,) = look.rows("health_totals")
    totals = look.totals
    totals.topics, totals.groups, totals.members, totals.sampled_at, made_at = row[:5]
    totals.committed_per_s, totals.relayed_per_s, totals.stored_per_s = row[5:]
    alert, last = ALERTS["MqlayerSamplesMissing"], totals.sampled_at or made_at
    if datetime.now(UTC) - last > timedelta(seconds=alert.above):
        text = (
            "No sample was ever taken"
            if totals.sampled_at is None
            else f"The last sample is of {last:%Y-%m-%d %H:%M} UTC"
        )
        yield Problem(alert, text, last)


def _processes(look: HealthLook) -> Iterator[Problem]:
    for topic, group, count, member, since in look.rows("health_members"):
        text = f"{_many(count, 'member')} silent without having left, such as {member}: killed, stopped or cut off"
        yield Problem(ALERTS["MqlayerLeasesLost"], text, since, topic, group)
    for name, count, first, _ in look.rows("health_sources", limit=SOURCES_LIMIT):
        text = f"Direct producer {name} has {count} open sources: processes ended without closing it, or share the name"
        yield Problem(ALERTS["MqlayerProducerReplaced"], text, first)


FINDERS: Final[Mapping[str, Finder]] = {
    "nodes": _nodes,
    "outbox": _outbox,
    "groups": _groups,
    "parked and dead messages": _failures,
    "route changes": _changes,
    "archive": _archive,
    "jobs": _jobs,
    "samples": _samples,
    "processes": _processes,
}
"""By the part that each looks at."""


def _before(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.now(UTC) - timedelta(seconds=seconds)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
