"""Checks of a Postgres server and of what is open on it, whatever schema it holds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from mqlayer.checking.clocks import clock_finding
from mqlayer.checking.findings import Check, Finding, Limits, Verdict, shown_s
from mqlayer.checking.versions import postgres_finding
from mqlayer.errors import StoreUnavailable
from mqlayer.postgres.database import Connection, driver_errors
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class AskedDatabase:
    """A connection to a database, and how a finding names it."""

    connection: Connection
    subject: str
    address: str
    dsn: str = field(default="", repr=False)

    def rows(self, name: str, **facts: Any) -> list[tuple[Any, ...]]:
        """Run a named query and return its rows. Raises StoreUnavailable, SchemaMismatch."""
        with driver_errors(self.address):
            return self.connection.execute(query(name), facts).fetchall()

    def row(self, name: str, **facts: Any) -> tuple[Any, ...]:
        """Run a named query that answers one row."""
        found = self.rows(name, **facts)
        if not found:
            raise StoreUnavailable(self.address, f"{name} has no answer")
        return found[0]


def check_version(asked: AskedDatabase, _: Limits) -> list[Finding]:
    """The version."""
    return [postgres_finding(asked.subject, asked.row("check_server")[0])]


def check_durability(asked: AskedDatabase, _: Limits) -> list[Finding]:
    """What was committed has to stay: relays publish it at once."""
    _number, standby, fsync, pages, commit, names, replicas, *_rest = asked.row("check_server")
    subject = asked.subject
    if standby:
        fix = "let the DSN name the primary: several hosts with target_session_attrs=read-write"
        return [Finding("durability", subject, Verdict.BROKEN, "it is a standby and takes no writes", fix)]
    found = [
        Finding("durability", subject, Verdict.BROKEN, f"{name} off", f"{name} = on in postgresql.conf, then reload")
        for name, value in (("fsync", fsync), ("full_page_writes", pages))
        if value == "off"
    ]
    if commit == "off":
        fix = "ALTER SYSTEM SET synchronous_commit = on: a crash loses commits whose messages are out already"
        found.append(Finding("durability", subject, Verdict.BROKEN, "synchronous_commit off", fix))
    elif replicas and not names:
        seen = (
            f"{replicas} standbys, none of them synchronous: a fail-over loses commits whose messages are out already"
        )
        found.append(Finding("durability", subject, Verdict.WARNING, seen, "set synchronous_standby_names"))
    seen = f"fsync on, synchronous_commit {commit}, {replicas} standbys"
    return found or [Finding("durability", subject, Verdict.OK, seen)]


def check_connections(asked: AskedDatabase, limits: Limits) -> list[Finding]:
    """Every process of ours holds some connections, and needs one more to join."""
    *_rest, most, used = asked.row("check_server")
    seen = f"{used} of {most} connections in use"
    if used < most * limits.part:
        return [Finding("connections", asked.subject, Verdict.OK, seen)]
    fix = "raise max_connections (a restart), put a pooler in front of applications, or run fewer processes"
    return [Finding("connections", asked.subject, Verdict.WARNING, seen, fix)]


def check_transactions(asked: AskedDatabase, limits: Limits) -> list[Finding]:
    """An open transaction that published holds its LPs, and the slots of the outbox that it wrote to."""
    found = [
        _transaction(asked.subject, limits, *row)
        for row in asked.rows("check_open_transactions", age_s=limits.transaction_s)
    ]
    if not asked.row("check_statistics_allowed")[0]:
        fix = "GRANT pg_read_all_stats to the role of the DSN"
        seen = "this role does not see the transactions of others"
        found.append(Finding("transactions", asked.subject, Verdict.UNKNOWN, seen, fix))
    seen = f"none is open for more than {shown_s(limits.transaction_s)}"
    return found or [Finding("transactions", asked.subject, Verdict.OK, seen)]


def check_prepared(asked: AskedDatabase, limits: Limits) -> list[Finding]:
    """A prepared transaction outlives its client, with its locks."""
    found = []
    for gid, age_s, ours in asked.rows("check_prepared_transactions", age_s=limits.transaction_s):
        seen = f"{gid!r} is prepared since {shown_s(age_s)}" + (", and holds tables of ours" if ours else "")
        fix = f"COMMIT PREPARED or ROLLBACK PREPARED '{gid}', as its transaction manager knows"
        found.append(Finding("prepared", asked.subject, Verdict.BROKEN if ours else Verdict.WARNING, seen, fix))
    return found or [Finding("prepared", asked.subject, Verdict.OK, "no old prepared transaction")]


def check_functions(asked: AskedDatabase, _: Limits) -> list[Finding]:
    """Functions run with the rights of the schemas' owner: no caller may mislead them, and the owner has few."""
    open_count, one, of_superusers = asked.row("check_functions")
    fix = "mqlayer migrate"
    found = []
    if open_count:
        seen = f"{open_count} functions, such as {one}, may run a caller's code with their owner's rights"
        found.append(Finding("functions", asked.subject, Verdict.BROKEN, seen, fix))
    if of_superusers:
        seen = f"a superuser owns {of_superusers}, and their functions run with its rights"
        found.append(Finding("functions", asked.subject, Verdict.WARNING, seen, fix))
    return found or [Finding("functions", asked.subject, Verdict.OK, "no caller can mislead them; no superuser's")]


def check_clock(asked: AskedDatabase, limits: Limits) -> list[Finding]:
    """Its clock against ours."""
    sent, sent_at = time.monotonic(), time.time()
    (seconds,) = asked.row("check_clock")
    round_trip_s = time.monotonic() - sent
    return [clock_finding(asked.subject, seconds - sent_at - round_trip_s / 2, round_trip_s, limits)]


CHECKS: Final[dict[str, Check[AskedDatabase]]] = {
    "version": check_version,
    "durability": check_durability,
    "connections": check_connections,
    "transactions": check_transactions,
    "prepared": check_prepared,
    "functions": check_functions,
    "clock": check_clock,
}


def _transaction(
    subject: str,
    limits: Limits,
    pid: int,
    application: str,
    state: str | None,
    age_s: float,
    ours: bool,  # noqa: FBT001 - a column
) -> Finding:
    """Never with the text of its statement, which may hold anything."""
    seen = f"pid {pid} ({application or 'without a name'}) is {state or 'busy'} in one since {shown_s(age_s)}"
    seen += ": its LPs stand still, its outbox slots are kept" if ours else ": it holds vacuum up"
    fix = (
        f"end it: SELECT pg_terminate_backend({pid}); "
        "and set idle_in_transaction_session_timeout for the application's role"
    )
    verdict = Verdict.BROKEN if ours and age_s >= limits.transaction_broken_s else Verdict.WARNING
    return Finding("transactions", subject, verdict, seen, fix)
