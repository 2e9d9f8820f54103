"""Checks of a Postgres server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mqlayer.doctor.clocks import clock_finding
from mqlayer.doctor.findings import Check, CheckLimits, CheckStatus, Finding, format_seconds
from mqlayer.doctor.versions import postgres_finding
from mqlayer.errors import StoreUnavailable
from mqlayer.postgres.database import Connection, driver_errors
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class CheckedDatabase:
    """A connection to a database, and its name in findings."""

    connection: Connection
    subject: str
    address: str
    dsn: str = field(default="", repr=False)

    def rows(self, name: str, **facts: Any) -> list[tuple[Any, ...]]:
        """Run a named query. Raises StoreUnavailable, SchemaMismatch."""
        with driver_errors(self.address):
            return self.connection.execute(query(name), facts).fetchall()

    def row(self, name: str, **facts: Any) -> tuple[Any, ...]:
        """Return the first row. Raises StoreUnavailable without one."""
        found = self.rows(name, **facts)
        if not found:
            raise StoreUnavailable(self.address, f"{name} has no answer")
        return found[0]


def check_version(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Check the version."""
    return [postgres_finding(checked.subject, checked.row("check_server")[0])]


def check_durability(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report settings that lose commits, and commits that wait for a standby."""
    _number, standby, fsync, pages, commit, names, replicas, *_rest = checked.row("check_server")
    subject = checked.subject
    if standby:
        fix = "let the DSN name the primary: several hosts with target_session_attrs=read-write"
        return [Finding("durability", subject, CheckStatus.BROKEN, "it is a standby and takes no writes", fix)]
    found = [
        Finding(
            "durability", subject, CheckStatus.BROKEN, f"{name} off", f"{name} = on in postgresql.conf, then reload"
        )
        for name, value in (("fsync", fsync), ("full_page_writes", pages))
        if value == "off"
    ]
    if commit == "off":
        fix = "ALTER SYSTEM SET synchronous_commit = on: a crash loses commits whose messages are out already"
        found.append(Finding("durability", subject, CheckStatus.BROKEN, "synchronous_commit off", fix))
    elif replicas and not names:
        seen = (
            f"{replicas} standbys, none of them synchronous: a fail-over loses commits whose messages are out already"
        )
        found.append(Finding("durability", subject, CheckStatus.WARNING, seen, "set synchronous_standby_names"))
    if names:
        found += _synchronous(checked, limits)
    seen = f"fsync on, synchronous_commit {commit}, {replicas} standbys"
    return found or [Finding("durability", subject, CheckStatus.OK, seen)]


def describe_commit_wait(standbys: int, waiting: int, waited_s: float, *, sees_all: bool, limit_s: float) -> str:
    """Return how commits wait for a standby, or ''."""
    if waited_s >= limit_s:
        return f"{waiting} commits wait for a synchronous standby, the first for {format_seconds(waited_s)}"
    return "no synchronous standby is there: each commit waits for one" if sees_all and not standbys else ""


def _synchronous(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    sees_all = checked.row("check_statistics_allowed")[0]
    waits = checked.row("check_synchronous")
    seen = describe_commit_wait(*waits, sees_all=sees_all, limit_s=limits.synchronous_s)
    if not seen:
        return []
    fix = (
        "start the standby again; to go on without one: ALTER SYSTEM SET synchronous_standby_names = '', "
        "then SELECT pg_reload_conf()"
    )
    return [Finding("durability", checked.subject, CheckStatus.BROKEN, seen, fix)]


def check_slots(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report replicas that hold vacuum or the log up."""
    found = []
    for name, kind, active, rows, catalog_rows, size, lost in checked.rows("check_slots"):
        is_broken = max(rows, catalog_rows) >= limits.slot_transactions or size >= limits.slot_bytes
        if lost or (active and not is_broken):
            continue
        held = [f"dead rows of {what} for {count:,} transactions" for what, count in
                (("all tables", rows), ("catalogs", catalog_rows)) if count]  # fmt: skip
        seen = f"{kind} {name!r}{'' if active else ', which has no client,'} holds " + " and ".join(
            [*held, f"{size / 1e6:,.0f} MB of the log"]
        )
        fix = "let its client go on" if active else f"start its client, or SELECT pg_drop_replication_slot('{name}')"
        verdict = CheckStatus.BROKEN if is_broken else CheckStatus.WARNING
        found.append(Finding("slots", checked.subject, verdict, seen, fix))
    return found or [Finding("slots", checked.subject, CheckStatus.OK, "no replica holds up vacuum or the log")]


def check_connections(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report a nearly full server."""
    *_rest, most, used = checked.row("check_server")
    seen = f"{used} of {most} connections in use"
    if used < most * limits.part:
        return [Finding("connections", checked.subject, CheckStatus.OK, seen)]
    fix = "raise max_connections (a restart), put a pooler in front of applications, or run fewer processes"
    return [Finding("connections", checked.subject, CheckStatus.WARNING, seen, fix)]


def check_transactions(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report long transactions: they hold LPs and outbox slots."""
    found = [
        _transaction(checked.subject, limits, OpenTransaction(*row))
        for row in checked.rows("check_open_transactions", age_s=limits.transaction_s)
    ]
    if not checked.row("check_statistics_allowed")[0]:
        fix = f"GRANT pg_read_all_stats TO {checked.row('check_statistics_allowed')[1]}"
        seen = "Postgres shows this role its own transactions only: those of other roles may be open, unseen"
        found.append(Finding("transactions", checked.subject, CheckStatus.UNKNOWN, seen, fix))
    seen = f"none is open for more than {format_seconds(limits.transaction_s)}"
    return found or [Finding("transactions", checked.subject, CheckStatus.OK, seen)]


def check_prepared(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Report old prepared transactions: they keep locks."""
    found = []
    for gid, age_s, ours in checked.rows("check_prepared_transactions", age_s=limits.transaction_s):
        seen = f"{gid!r} is prepared for {format_seconds(age_s)}" + (", and holds tables of ours" if ours else "")
        fix = f"COMMIT PREPARED or ROLLBACK PREPARED '{gid}', as its transaction manager knows"
        found.append(
            Finding("prepared", checked.subject, CheckStatus.BROKEN if ours else CheckStatus.WARNING, seen, fix)
        )
    return found or [Finding("prepared", checked.subject, CheckStatus.OK, "no old prepared transaction")]


def check_functions(checked: CheckedDatabase, _: CheckLimits) -> list[Finding]:
    """Report functions that are unsafe or owned by a superuser."""
    open_count, one, of_superusers = checked.row("check_functions")
    fix = "mqlayer migrate"
    found = []
    if open_count:
        seen = f"{open_count} functions, such as {one}, may run a caller's code with their owner's rights"
        found.append(Finding("functions", checked.subject, CheckStatus.BROKEN, seen, fix))
    if of_superusers:
        seen = f"a superuser owns {of_superusers}, and their functions run with its rights"
        found.append(Finding("functions", checked.subject, CheckStatus.WARNING, seen, fix))
    return found or [
        Finding("functions", checked.subject, CheckStatus.OK, "no caller can mislead them; no superuser's")
    ]


def check_clock(checked: CheckedDatabase, limits: CheckLimits) -> list[Finding]:
    """Check the clock."""
    sent, sent_at = time.monotonic(), time.time()
    (seconds,) = checked.row("check_clock")
    round_trip_s = time.monotonic() - sent
    return [clock_finding(checked.subject, seconds - sent_at - round_trip_s / 2, round_trip_s, limits)]


CHECKS: Final[dict[str, Check[CheckedDatabase]]] = {
    "version": check_version,
    "durability": check_durability,
    "connections": check_connections,
    "transactions": check_transactions,
    "prepared": check_prepared,
    "slots": check_slots,
    "functions": check_functions,
    "clock": check_clock,
}


class OpenTransaction(NamedTuple):
    """A transaction that is open for long. `ours`: it locks mqlayer's tables; `waits_for`: sessions; `waiting`: how
    many wait for it; `client`: empty for a socket of the machine."""

    pid: int
    application: str
    state: str | None
    age_s: float
    ours: bool
    waits_for: Sequence[int]
    waiting: int
    role: str = ""
    client: str = ""

    @property
    def holds(self) -> bool:
        """Whether it holds the outbox up."""
        return self.ours and not self.waits_for

    def text(self) -> str:
        """Return a sentence without the statement, which may hold secrets."""
        seen = f"pid {self.pid} ({self.application or 'without a name'}) "
        if self.waits_for:
            return f"{seen}has waited in a transaction of {format_seconds(self.age_s)}, now for pid {self.waits_for[0]}"
        has = "been idle in" if (self.state or "").startswith("idle") else "worked in"
        seen += f"has {has} a transaction for {format_seconds(self.age_s)}"
        seen += ": its LPs get stuck, its outbox slots are kept" if self.ours else ": it holds vacuum up"
        return seen + (f"; sessions that wait for it: {self.waiting}" if self.waiting else "")

    def fix(self) -> str:
        """Return the advice."""
        if self.waits_for:
            return f"end the transaction of pid {self.waits_for[0]}, and this one goes on"
        return f"end it: {self.end()}; and set idle_in_transaction_session_timeout for the application's role"

    def end(self) -> str:
        """Return the statement that ends its session."""
        return f"SELECT pg_terminate_backend({self.pid})"


def _transaction(subject: str, limits: CheckLimits, found: OpenTransaction) -> Finding:
    is_broken = found.ours and not found.waits_for and found.age_s >= limits.transaction_broken_s
    verdict = CheckStatus.BROKEN if is_broken else CheckStatus.WARNING
    return Finding("transactions", subject, verdict, found.text(), found.fix())
