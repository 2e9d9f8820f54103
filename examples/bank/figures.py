"""What the databases say: how far the run is, and the verdict on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.rows import class_row

from examples.bank.effects import GROUP, TOPIC, session_name

MEMBERS: Final = """
SELECT m.member_id, m.pid, count(a.partition_id) AS partitions
FROM mqlayer.member m
JOIN mqlayer.consumer_group g USING (group_id)
LEFT JOIN mqlayer.assignment a ON a.group_id = m.group_id AND a.member_id = m.member_id AND a.target = m.member_id
WHERE g.name = %s AND m.lease_until > now()
GROUP BY m.member_id, m.pid ORDER BY m.pid"""

SESSIONS: Final = "SELECT state FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()"

PROGRESS: Final = """
SELECT (SELECT coalesce(sum(c.seq), 0) FROM mqlayer_app.counter c JOIN mqlayer_app.topic t USING (topic_id)
        WHERE t.name = %(topic)s)::bigint AS messages,
       (SELECT coalesce(sum(entries), 0) FROM bank.balance)::bigint AS applied,
       (SELECT count(*) FROM bank.violation) AS violations,
       (SELECT coalesce(percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (ORDER BY ms), ARRAY[0, 0])
        FROM bank.latency WHERE applied_at > clock_timestamp() - interval '5 s') AS recent_ms"""

# pgbench's own history says what should have come; nothing here believes the outbox.
COUNTS: Final = """
WITH expected AS (
    SELECT 'a:' || aid AS key, count(*) AS entries FROM pgbench_history GROUP BY aid
    UNION ALL SELECT 'b:' || bid, count(*) FROM pgbench_history GROUP BY bid)
SELECT (SELECT count(*) FROM pgbench_history),
       coalesce(sum(e.entries), 0)::bigint,
       coalesce(sum(greatest(e.entries - coalesce(b.entries, 0), 0)), 0)::bigint
FROM expected e LEFT JOIN bank.balance b USING (key)"""

# Every account and branch that pgbench touched, and every balance of the model: each must have its equal.
DIFFERENCES: Final = """
WITH truth AS (
    SELECT 'a:' || aid AS key, abalance AS balance FROM pgbench_accounts
    WHERE aid IN (SELECT aid FROM pgbench_history)
    UNION ALL SELECT 'b:' || bid, bbalance FROM pgbench_branches WHERE bid IN (SELECT bid FROM pgbench_history)),
entries AS (
    SELECT 'a:' || aid AS key, count(*) AS entries FROM pgbench_history GROUP BY aid
    UNION ALL SELECT 'b:' || bid, count(*) FROM pgbench_history GROUP BY bid)
SELECT count(*) FROM (truth JOIN entries USING (key)) t FULL JOIN bank.balance m USING (key)
WHERE m.balance IS DISTINCT FROM t.balance OR m.entries IS DISTINCT FROM t.entries"""

LATENCY: Final = """
SELECT coalesce(percentile_cont(ARRAY[0.5, 0.99, 1.0]) WITHIN GROUP (ORDER BY ms), ARRAY[0, 0, 0])
FROM bank.latency WHERE applied_at < coalesce(%s, 'infinity'::timestamptz)"""

RATE: Final = """
SELECT coalesce(count(*) / nullif(extract(epoch FROM max(applied_at) - min(applied_at - ms * interval '1 ms')), 0), 0)
FROM bank.latency"""


@dataclass(frozen=True, slots=True)
class Member:
    """A consumer as the group knows it."""

    member_id: str
    pid: int
    partitions: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the run is. `recent_ms`: p50 and p99 from publish to effect over the last seconds."""

    messages: int
    applied: int
    violations: int
    recent_ms: list[float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a run. `duplicates` are deliveries whose effect was there already: the fence refused them."""

    transactions: int
    messages: int
    violations: int
    lost: int
    duplicates: int
    rate_per_s: float
    p50_ms: float
    p99_ms: float
    model_equal: bool
    archived: int | None = None
    """Messages that the archive holds in the end; None where that was not looked at."""
    audit: str | None = None
    """What the order audit says of the archive: clean, not clean; None where it was left out."""

    certificate: str | None = None
    """What a check says of the order certificate: accepted, not accepted; None where it was left out."""

    @property
    def good(self) -> bool:
        """Whether the promise was kept."""
        whole = self.archived in (None, self.messages) and self.audit in (None, "clean")
        whole = whole and self.certificate in (None, "accepted")
        return whole and self.model_equal and not self.violations and not self.lost and self.transactions > 0


@dataclass(frozen=True, slots=True)
class Details:
    """What the table shows besides the verdict: times before the faults, the worst, and what was refused as stale."""

    calm_p50_ms: float
    calm_p99_ms: float
    worst_ms: float
    stale: int


Watch = Callable[[int], list[str]]


class Figures:
    """Reads both databases. Not for several threads at once, but each call has connections of its own."""

    def __init__(self, control_dsn: str, bank_dsn: str) -> None:
        self._control_dsn, self._bank_dsn = control_dsn, bank_dsn

    def members(self) -> list[Member]:
        """Return the living members and how many partitions each holds for good."""
        with psycopg.connect(self._control_dsn) as connection, connection.cursor(row_factory=class_row(Member)) as rows:
            return rows.execute(MEMBERS, (GROUP,)).fetchall()

    def progress(self) -> Progress:
        """Return how far the run is."""
        with psycopg.connect(self._bank_dsn) as connection, connection.cursor(row_factory=class_row(Progress)) as rows:
            found = rows.execute(PROGRESS, {"topic": TOPIC}).fetchone()
        if found is None:
            raise RuntimeError("the database did not say how far it is")
        return found

    @contextmanager
    def watch(self) -> Iterator[Watch]:
        """Lend what tells of a process's sessions at the read model: active, idle, idle in transaction."""
        with psycopg.connect(self._bank_dsn, autocommit=True) as connection:
            yield lambda pid: [state for (state,) in connection.execute(SESSIONS, (session_name(pid),))]

    def now(self) -> Any:
        """Return the database's time."""
        return self._row("SELECT clock_timestamp()")[0]

    def verdict(self) -> Verdict:
        """Judge what is in the database; call it when nothing writes any more."""
        transactions, messages, lost = self._row(COUNTS)
        p50, p99, _ = self._row(LATENCY, None)[0]
        return Verdict(
            transactions=transactions,
            messages=messages,
            violations=self._row("SELECT count(*) FROM bank.violation")[0],
            lost=lost,
            duplicates=self._refusals("AlreadyApplied"),
            rate_per_s=round(float(self._row(RATE)[0]), 1),
            p50_ms=round(p50, 1),
            p99_ms=round(p99, 1),
            model_equal=self._row(DIFFERENCES)[0] == 0,
        )

    def details(self, faults_at: Any) -> Details:
        """Return what the table shows besides; `faults_at` is when the faults began."""
        calm_p50, calm_p99, _ = self._row(LATENCY, faults_at)[0]
        worst = self._row(LATENCY, None)[0][2]
        return Details(
            round(calm_p50, 1), round(calm_p99, 1), round(worst, 1), self._refusals("StaleOwner", "StaleToken")
        )

    def _refusals(self, *kinds: str) -> int:
        return int(self._row("SELECT count(*) FROM bank.refusal WHERE kind = ANY(%s)", list(kinds))[0])

    def _row(self, statement: Any, *parameters: Any) -> tuple[Any, ...]:
        with psycopg.connect(self._bank_dsn) as connection:
            row = connection.execute(statement, parameters or None).fetchone()
        return row or ()
