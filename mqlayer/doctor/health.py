"""The system's problems in one look: the conditions of `mqlayer.metrics.alerts`, evaluated on Postgres and the nodes.

A condition is told at once, and not after the time for which an alert waits.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from mqlayer.doctor.effects import with_help
from mqlayer.doctor.findings import format_seconds
from mqlayer.doctor.postgres import OpenTransaction, describe_commit_wait
from mqlayer.doctor.problem_history import OpenProblem, Problem, ProblemPlace, open_problems, put_problems
from mqlayer.errors import MqlayerError, SchemaMismatch
from mqlayer.groups.breaker import BreakerFacts
from mqlayer.inspect import GroupStatus, describe_breaker, group_statuses
from mqlayer.inspect.group_status import Stall
from mqlayer.inspect.node_status import NodeStatus, node_statuses
from mqlayer.inspect.outbox_status import outbox_waiting
from mqlayer.inspect.processes import relay_processes
from mqlayer.maintenance.job_status import job_statuses
from mqlayer.maintenance.late_jobs import late_jobs
from mqlayer.metrics.alerts import ALERTS, STALLS
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
FAILED_LIMIT: Final = 20_000
FAILED_LEAST: Final = 10
"""Fewer failed attempts of ten minutes make no rate."""
HOT_PER_S: Final = 1.0
BUSY_PER_S: Final = 20.0
"""A hot partition is told from here on where nothing lags yet."""
STANDSTILL_S: Final = 3_600.0
"""How far back a look searches for the last messages that were committed or relayed."""
STANDBYS: Final = "SELECT application_name, state, sync_state FROM pg_stat_replication"
SCHEMAS: Final = "schemas"
RANK: Final = {"critical": 0, "warning": 1, "note": 2}
ORDER: Final = {name: place for place, name in enumerate(ALERTS)}


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
    committed_at: datetime | None = None
    """Of the last sample with messages committed since the one before; None: none within `looked_back_to`."""
    relayed_at: datetime | None = None
    looked_back_to: datetime | None = None


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
    unread_parts: tuple[str, ...] = ()
    gone: tuple[tuple[ProblemPlace, OpenProblem], ...] = ()
    """Noted problems that this look no longer found; the job notes their ends."""


@dataclass(slots=True)
class HealthLook:
    """One look at the system."""

    runtime: Runtime
    totals: SystemTotals = field(default_factory=SystemTotals)
    statuses: list[GroupStatus] = field(default_factory=list)
    """Live groups, unless their partitions are too many."""
    unseen: set[str] = field(default_factory=set)
    """Alerts whose conditions this role can't see."""

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
    differing = [with_help(replace(one, part=SCHEMAS)) for one in _schema(runtime.control, "control")]
    if differing:
        return SystemHealth(at, time.monotonic() - began, tuple(differing), look.totals, (), tuple(FINDERS))
    problems, unread = list[Problem](), dict[str, str]()
    for title, finder in FINDERS.items():
        try:
            for one in finder(look):
                problems.append(replace(one, part=title))
        except MqlayerError as error:
            unread[title] = str(error)
    told = [f"{title}: {why}" for title, why in unread.items()]
    known: Mapping[ProblemPlace, OpenProblem] = {}
    try:
        known = open_problems(runtime.control)
        problems = _with_history(problems, known)
    except MqlayerError as error:
        told.append(f"history of problems: {error}")
    never = datetime.max.replace(tzinfo=UTC)
    problems.sort(key=lambda one: (RANK[one.alert.severity], ORDER[one.alert.name], one.since or never))
    found = tuple(map(with_help, problems))
    gone = tuple(_gone(at, problems, known, {*unread, *look.unseen}))
    return SystemHealth(at, time.monotonic() - began, found, look.totals, tuple(told), tuple(unread), gone)


def note_problems(runtime: Runtime) -> SystemHealth:
    """Look at everything, and note in the history which problems began and ended. Raises as `system_health`."""
    with runtime.control.connection() as connection:
        ((began_s,),) = connection.execute(query("check_clock")).fetchall()
    found = system_health(runtime)
    if SCHEMAS not in {one.part for one in found.problems}:
        put_problems(runtime.control, began_s, found.problems, found.unread_parts)
    return found


def _with_history(problems: Iterable[Problem], known: Mapping[ProblemPlace, OpenProblem]) -> list[Problem]:
    return [_with_noted(one, known.get(one.place)) for one in problems]


def _gone(
    at: datetime, problems: Iterable[Problem], known: Mapping[ProblemPlace, OpenProblem], unseen: Set[str]
) -> Iterator[tuple[ProblemPlace, OpenProblem]]:
    found = {one.place for one in problems}
    for place, noted in known.items():
        if place not in found and noted.last_seen_at < at and not unseen & {noted.part, place.alert}:
            yield place, noted


def _with_noted(one: Problem, noted: OpenProblem | None) -> Problem:
    if noted is None:
        return one
    return replace(one, since=one.since or noted.since or noted.first_seen_at, number=noted.number)


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
    away = [one for one in statuses if one.state not in ("serving", "lost")]
    waiting = _waiting_by_node(look) if away else {}
    for one in away:
        is_silent = one.state == "unreachable"
        effect = f"Messages of {_many(one.open + one.sealed, 'partition')} are neither stored nor delivered"
        if waiting is not None:
            effect += f"; the outbox holds {waiting.get(one.node.name, 0):,} for it"
        yield Problem(
            ALERTS["MqlayerNodeAway"], _away(one), one.since, node=one.node.name, rearms=not is_silent,
            effect=f"{effect}.", after=one.sampled_at if is_silent else None,
        )  # fmt: skip
    for one in statuses:
        used, most = one.number("used_memory") or 0, one.number("maxmemory") or 0
        if 0 < most <= used:
            text = f"Node {one.node.name} has no memory left: {used:,} of {most:,} bytes are used"
            yield Problem(ALERTS["MqlayerAppendsRefused"], text, node=one.node.name)


def _waiting_by_node(look: HealthLook) -> dict[str, int] | None:
    try:
        parts = outbox_waiting(look.runtime)
    except MqlayerError:
        # Its own part says why.
        return None
    found: Counter[str] = Counter()
    for one in parts:
        found[one.node or ""] += one.waiting
    return dict(found)


def _away(one: NodeStatus) -> str:
    held = f"it holds {_many(one.open + one.sealed, 'partition')}"
    return {
        "unreachable": f"Node {one.node.name} does not answer; {held}: {one.reason}",
        "restarted": f"Node {one.node.name} runs anew, and this run is not armed; {held}",
        "unarmed": f"Node {one.node.name} has no armed run, so it serves nothing; {held}",
    }[one.state]


def _commits(look: HealthLook) -> Iterator[Problem]:
    yield from _waiting_commits(look, look.runtime.control, "control")


def _waiting_commits(look: HealthLook, database: Database, schema: SchemaName) -> Iterator[Problem]:
    alert = ALERTS["MqlayerCommitsWait"]
    ((_, _, _, _, _, names, *_rest),) = look.rows("check_server", database=database)
    sees_all = look.rows("check_statistics_allowed", database=database)[0][0]
    if not sees_all:
        look.unseen.add(alert.name)
    if not names:
        return
    ((standbys, waiting, waited_s),) = look.rows("check_synchronous", database=database)
    text = describe_commit_wait(standbys, waiting, waited_s, sees_all=sees_all, limit_s=alert.above)
    if text:
        since = _before(waited_s) if waiting else None
        yield Problem(alert, f"{database.address}: {text}", since, item=schema, command=STANDBYS)


def _outbox(look: HealthLook) -> Iterator[Problem]:
    database, totals = look.runtime.outbox, look.totals
    mismatch = list(_schema(database, "application"))
    if mismatch:
        yield from mismatch
        return
    yield from _recovery(look, database)
    yield from _transactions(look, database)
    if database.dsn != look.runtime.control.dsn:
        yield from _waiting_commits(look, database, "application")
    ((totals.outbox, totals.outbox_s),) = look.rows("check_outbox", database=database)
    late = ALERTS["MqlayerOutboxLate"]
    if totals.outbox_s > late.above:
        text = f"{totals.outbox:,} committed messages are not relayed, the oldest for {format_seconds(totals.outbox_s)}"
        effect = f"{_many(totals.outbox, 'message')} of the outbox reach no consumer until relays send them."
        yield Problem(late, text, _before(totals.outbox_s), effect=effect)
    ((totals.relays, _),) = look.rows("check_relays", database=database)
    if not totals.relays:
        last = next(iter(relay_processes(database, limit=1)), None)
        beat_at = None if last is None else last.beat_at(look.runtime.settings.lease_s)
        text = "No relay lives; the worker's job relays every 10 s meanwhile, so messages are up to 10 s late"
        effect = f"{_waiting(totals.outbox, 'message')} in the outbox for the next run of that job."
        if any(one.name == "relay" for one in late_jobs(look.runtime.control)):
            text = "No relay lives, and the worker's job that relays meanwhile is late"
            effect = f"{_waiting(totals.outbox, 'message')} in the outbox, and nothing is relayed."
        yield Problem(ALERTS["MqlayerNoRelay"], text, beat_at, effect=effect)
    yield from _unsendable(look, database)
    ((count, held, oldest_s, name),) = look.rows("check_versions", database=database)
    if count:
        text = f"Entities that miss a version: {count}, the first of {name}; later events that are held: {held}"
        effect = f"{_many(held, 'later event')} of {_many(count, 'entity', 'entities')} are not applied."
        yield Problem(ALERTS["MqlayerVersionsOverdue"], text, _before(oldest_s), effect=effect)


def _unsendable(look: HealthLook, database: Database) -> Iterator[Problem]:
    alert = ALERTS["MqlayerOutboxQuarantined"]
    ((count, reason),) = look.rows("check_quarantine", database=database)
    if count:
        text = f"LPs behind a row that can't be sent: {count}, the first: {reason}"
        yield Problem(alert, text, effect=f"All later messages of {_many(count, 'LP')} wait in the outbox.")
    ((count, reason),) = look.rows("check_voided", database=database)
    if count:
        text = f"Rows passed over: {count}, the first: {reason}"
        effect = f"{_many(count, 'message')} reached no consumer; later ones of their keys did."
        yield Problem(alert, text, effect=effect, item="voided")


def _transactions(look: HealthLook, database: Database) -> Iterator[Problem]:
    alert = ALERTS["MqlayerTransactionOpen"]
    if not look.rows("check_statistics_allowed", database=database)[0][0]:
        look.unseen.add(alert.name)
    for row in look.rows("check_open_transactions", database=database, age_s=alert.above):
        found = OpenTransaction(*row)
        if found.holds:
            effect = (
                "Publishers of the same LPs wait for it, its messages are not relayed, and the outbox can't be emptied"
            )
            yield Problem(
                alert, found.text(), _before(found.age_s), item=f"pid {found.pid}", effect=f"{effect}.",
                command=found.end(),
            )  # fmt: skip


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
    yield from _hot(look, rows)
    above_s = ALERTS["MqlayerLagGrows"].above
    for topic, group, oldest_s, lag in look.rows("health_lag", above_s=above_s):
        text = f"The oldest of {_count(lag)} messages is {format_seconds(oldest_s)} old, and gets older"
        effect = f"Less is handled than arrives: each new message waits {format_seconds(oldest_s)} or longer."
        yield Problem(ALERTS["MqlayerLagGrows"], text, _before(oldest_s), topic, group, effect=effect)


def _hot(look: HealthLook, rows: Iterable[GroupRow]) -> Iterator[Problem]:
    """Yield one of a topic: where a group lags in the partition, and also where it takes in much."""
    alert, late = ALERTS["MqlayerPartitionHot"], dict[str, tuple[float, int, str]]()
    hot = {row[0]: row[1:] for row in look.rows("health_hot", least_per_s=HOT_PER_S)}
    for topic, group, lag, oldest_s in _lags_of(look, rows, {topic: found[0] for topic, found in hot.items()}):
        if lag and (oldest_s or 0.0) > alert.above:
            late[topic] = max(late.get(topic, (0.0, 0, "")), (oldest_s or 0.0, lag, group))
    for topic, (partition, per_s, all_per_s, fair) in hot.items():
        if topic in late or per_s >= BUSY_PER_S:
            text = f"Partition {partition} of {topic} takes {per_s / all_per_s:.0%} of the load"
            text += f" ({per_s:,.0f} of {all_per_s:,.0f} messages/s), where {fair:.0%} would be fair"
            yield Problem(alert, text, None, topic, partition=partition, effect=_heat(late.get(topic)))


def _heat(late: tuple[float, int, str] | None) -> str:
    if late is None:
        return "No group lags there yet; a partition has one owner, so more members would not help."
    oldest_s, lag, group = late
    return f"{_waiting(lag, 'message')} for group {group}, the oldest for {format_seconds(oldest_s)}."


def _lags_of(
    look: HealthLook, rows: Iterable[GroupRow], partitions: Mapping[str, int]
) -> Iterator[tuple[str, str, int | None, float | None]]:
    """Yield topic, group, lag and age in one partition of each topic, or in the whole topic where lag is of samples."""
    if look.totals.is_sampled:
        yield from ((one.topic, one.group, one.lag, one.oldest_s) for one in rows if one.topic in partitions)
        return
    for one in look.statuses:
        wanted = partitions.get(one.facts.topic)
        for part in one.undrained:
            if part.facts.partition == wanted and part.stall is None:
                yield one.facts.topic, one.facts.name, part.lag, part.age_s


def _sampled_groups(look: HealthLook, rows: Iterable[GroupRow]) -> Iterator[Problem]:
    for one in rows:
        look.totals.lag += one.lag or 0
        look.totals.oldest_s = max(look.totals.oldest_s or 0.0, one.oldest_s or 0.0)
        if one.paused_at is not None:
            text = f"{one.paused_by or 'An operator'} paused it or its topic; lag {_count(one.lag)}"
            yield _paused(text, one.paused_at, one.topic, one.group, one.lag, "group")
        elif one.lag and not one.alive and one.mode != "pop":
            yield _no_members(one.topic, one.group, one.lag, one.oldest_s)
        if one.sampled and one.lag is None:
            text = "The last sample got no lag of some partition"
            yield Problem(ALERTS["MqlayerLagUnknown"], text, None, one.topic, one.group)


def _read_groups(look: HealthLook) -> Iterator[Problem]:
    live = [one for one in group_statuses(look.runtime) if one.facts.state == "live" and one.facts.mode != "broadcast"]
    look.statuses = live
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
        item = "group" if one.facts.paused_at else "topic"
        yield _paused(f"{what} is paused by {by}; lag {one.lag:,}", paused, topic, group, one.lag, item)
    elif not one.facts.alive and one.lag and one.facts.mode != "pop":
        yield _no_members(topic, group, one.lag, one.age_s)
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


def _paused(text: str, since: datetime, topic: str, group: str, lag: int | None, item: str) -> Problem:
    effect = f"{_count(lag)} messages wait until it is resumed, and nothing of the topic is trimmed behind them."
    command = f"mqlayer topic resume {shlex.quote(topic)}" if item == "topic" else ""
    return Problem(ALERTS["MqlayerPaused"], text, since, topic, group, item=item, effect=effect, command=command)


def _no_members(topic: str, group: str, lag: int, oldest_s: float | None) -> Problem:
    text = f"{_many(lag, 'message')} to handle, and no member has a valid lease"
    waits = "" if oldest_s is None else f", the oldest for {format_seconds(oldest_s)}"
    effect = f"{_waiting(lag, 'message')} for the group{waits}."
    return Problem(ALERTS["MqlayerNoMembers"], text, _before(oldest_s), topic, group, effect=effect)


def _retries(stall: Stall) -> bool:
    # A message within its usual attempts holds nothing up for long.
    longest = timedelta(seconds=ALERTS["MqlayerPartitionsStuck"].for_s)
    return stall.reason == "failing" and stall.since is not None and datetime.now(UTC) - stall.since < longest


def _stalls(one: GroupStatus, topic: str, group: str) -> Iterator[Problem]:
    stuck = [(part, part.stall) for part in one.undrained if part.stall is not None and not _retries(part.stall)]
    # What a silent node holds up is told with the node, and what nobody takes over with the missing members.
    told = EXPECTED_STALLS | {"node_away", "breaker"} | (set() if one.facts.alive else {"lease_over"})
    for reason in dict.fromkeys(stall.reason for _, stall in stuck if stall.reason not in told):
        parts = [(part, stall) for part, stall in stuck if stall.reason == reason]
        first, stall = parts[0]
        begins = [stall.since for _, stall in parts if stall.since is not None]
        text = f"{_many(len(parts), 'partition')} stuck ({reason}), such as {first.facts.partition}: {stall.detail}"
        lag = sum(part.lag or 0 for part, _ in parts)
        yield Problem(
            ALERTS["MqlayerPartitionsStuck"], text, min(begins, default=None), topic, group,
            advice=STALLS.get(reason, ""), item=reason, partition=first.facts.partition,
            effect=f"{_waiting(lag, 'message')} in {_many(len(parts), 'partition')}, each behind the first one there.",
        )  # fmt: skip


def _failures(look: HealthLook) -> Iterator[Problem]:
    for one in failure_counts(look.runtime.control):
        look.totals.parked_keys += one.keys
        look.totals.parked_messages += one.messages
        look.totals.dead += one.dead
        yield from _parked(one)
    for topic, group, dead, last_at, first_at in look.rows("health_dead", limit=DEAD_LIMIT):
        at_least = "At least " if dead == DEAD_LIMIT else ""
        text = f"{at_least}{_many(dead, 'message')} died within the last hour, the last at {last_at:%H:%M:%S} UTC"
        effect = f"Not handled: {_many(dead, 'message')}. Later ones of their keys go on."
        yield Problem(ALERTS["MqlayerDeadMessages"], text, first_at, topic, group, effect=effect)
    for topic, group, dropped, last_at in look.rows("health_dropped"):
        text = f"Limits dropped {_many(dropped, 'unsettled message')}, the last at {last_at:%H:%M:%S} UTC"
        effect = "The group gets none of them. Later ones of their keys go on."
        yield Problem(ALERTS["MqlayerMessagesDropped"], text, None, topic, group, effect=effect)
    yield from _failing(look)


def _failing(look: HealthLook) -> Iterator[Problem]:
    alert = ALERTS["MqlayerFailureRate"]
    for topic, group, failed, first_at, handled in look.rows("health_failing", limit=FAILED_LIMIT):
        if handled is None or failed < FAILED_LEAST:
            continue
        share = failed / (failed + max(0, handled))
        if share > alert.above:
            text = f"{failed:,} attempts failed within ten minutes, {share:.0%} of all"
            effect = "The keys of these messages wait for the next attempts; other keys go on."
            yield Problem(alert, text, first_at, topic, group, effect=effect)


def _parked(one: FailureCounts) -> Iterator[Problem]:
    oldest, place = _before(one.oldest_s), (one.topic, one.group)
    if one.full or one.messages >= one.messages_limit or one.bytes >= one.bytes_limit:
        text = f"The group or {one.full} of its keys reached a limit: {one.messages:,} messages are parked"
        effect = "The next failing message holds up its whole partition instead of its key."
        yield Problem(ALERTS["MqlayerParkingFull"], text, oldest, *place, effect=effect)
    waits = f"{_waiting(one.messages, 'message')} in {_many(one.keys, 'parked key')}"
    if one.overdue_s is not None and one.overdue_s > ALERTS["MqlayerParkedKeysOverdue"].above:
        text = f"A parked key has been due for {format_seconds(one.overdue_s)}"
        effect = f"{waits}, longer than needed."
        yield Problem(ALERTS["MqlayerParkedKeysOverdue"], text, _before(one.overdue_s), *place, effect=effect)
    if one.waiting:
        text = f"The attempts of {one.waiting:,} of {one.keys:,} parked keys are used up"
        yield Problem(
            ALERTS["MqlayerKeysWaitForOperator"], text, oldest, *place,
            effect=f"{waits}; for {_many(one.waiting, 'key')} until an operator decides. Other keys go on.",
        )  # fmt: skip
    elif one.keys:
        text = f"{_many(one.keys, 'key')} with {_many(one.messages, 'message')} for the next attempt"
        yield Problem(ALERTS["MqlayerKeysParked"], text, oldest, *place, effect=f"{waits}; other keys go on.")


def _changes(look: HealthLook) -> Iterator[Problem]:
    alert = ALERTS["MqlayerRouteChangeStuck"]
    for topic, change_id, kind, state, age_s in look.rows("check_changes", age_s=alert.above):
        text = f"{kind.capitalize()} {change_id} is {state} for {format_seconds(age_s)}"
        effect = "No message waits: the route is as it was."
        if state != "planned":
            effect = "Publishers of its LPs wait, and so do their messages in the outbox."
        yield Problem(alert, text, _before(age_s), topic, change=change_id, effect=effect)


def _autopilot(look: HealthLook) -> Iterator[Problem]:
    for topic, reason, age_s in look.rows("check_autopilot"):
        text = f"The autopilot changes no route of {topic} any more: {reason}"
        yield Problem(ALERTS["MqlayerAutopilotStopped"], text, _before(age_s), topic)
    for topic, partition, lp, reason, _ in look.rows("check_hot_keys"):
        text = f"LP {lp} in partition {partition} of {topic}: {reason}"
        yield Problem(ALERTS["MqlayerKeyHot"], text, None, topic, partition=partition)


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


def _exports(look: HealthLook) -> Iterator[Problem]:
    late = ALERTS["MqlayerExportLate"]
    for location, topic, *_, batches, behind_s in look.rows("lake_statuses"):
        if behind_s > late.above:
            text = f"The export at {location} lacks {batches} batches, since {format_seconds(behind_s)}"
            yield Problem(late, text, _before(behind_s), topic, item=location)


def _schedules(look: HealthLook) -> Iterator[Problem]:
    late = ALERTS["MqlayerScheduleLate"]
    for name, state, error, age_s, jobs, overdue_s in look.rows("check_schedules"):
        if state == "faults":
            text = f"{', '.join(jobs)} of schedule {name} found faults"
            yield Problem(ALERTS["MqlayerScheduleFaults"], text, _before(age_s), item=name)
        if state == "failed":
            text = f"The last run of schedule {name} failed: {error or ', '.join(jobs)}"
            yield Problem(ALERTS["MqlayerScheduleFailed"], text, _before(age_s), item=name)
        if overdue_s > late.above:
            text = f"Schedule {name} is due for {format_seconds(overdue_s)} without a run"
            yield Problem(late, text, _before(overdue_s), item=name)


def _jobs(look: HealthLook) -> Iterator[Problem]:
    jobs = job_statuses(look.runtime.control)
    late = [one for one in jobs if one.is_late]
    if late:
        known = [one.last_at for one in late if one.last_at is not None]
        text = f"Late: {len(late)} of {len(jobs)} jobs: {', '.join(one.name for one in late)}"
        yield Problem(ALERTS["MqlayerJobsLate"], text, min(known, default=None))
    for one in jobs:
        if one.outcome == "failed":
            yield Problem(ALERTS["MqlayerJobFailed"], f"{one.name}: {one.error}", one.ended_at, item=one.name)


def _samples(look: HealthLook) -> Iterator[Problem]:
    (row,) = look.rows("health_totals")
    totals = look.totals
    totals.topics, totals.groups, totals.members, totals.sampled_at, made_at = row[:5]
    totals.committed_per_s, totals.relayed_per_s, totals.stored_per_s = row[5:]
    if 0 in (totals.committed_per_s, totals.relayed_per_s):
        ((totals.committed_at, totals.relayed_at, totals.looked_back_to),) = look.rows(
            "health_standstill", last_s=STANDSTILL_S
        )
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
        yield Problem(ALERTS["MqlayerProducerReplaced"], text, first, item=name)


FINDERS: Final[Mapping[str, Finder]] = {
    "nodes": _nodes,
    "commits": _commits,
    "outbox": _outbox,
    "groups": _groups,
    "parked and dead messages": _failures,
    "route changes": _changes,
    "automatic routes": _autopilot,
    "archive": _archive,
    "exports": _exports,
    "schedules": _schedules,
    "jobs": _jobs,
    "samples": _samples,
    "processes": _processes,
}
"""By the part that each looks at."""


def _before(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.now(UTC) - timedelta(seconds=seconds)


def _many(count: int, noun: str, nouns: str = "") -> str:
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def _waiting(count: int, noun: str) -> str:
    return f"{_many(count, noun)} {'waits' if count == 1 else 'wait'}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
