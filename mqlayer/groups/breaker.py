"""A group's circuit breaker in Postgres: docs/design/circuit-breaker.md."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

State = Literal["closed", "open", "probing", "ramping"]
FIRST_PROBE_S: Final = 1.0
"""Wait for the first probe; each failed one doubles it."""
LONGEST_PROBE_S: Final = 15.0
PROBE_LIMIT_S: Final = 60.0
"""After this time without a result, another member probes."""
RAMP_S: Final = 5.0
"""Time from the probe's success to the closed state."""


@dataclass(frozen=True, slots=True)
class BreakerReply:
    """A group's breaker, as a heartbeat hears it; ages in seconds.

    `mine`: this session probes; `orphaned`: the prober is gone; `suspected`: another member sees keys fail.
    """

    state: State = "closed"
    age_s: float = 0.0
    probe_in_s: float = 0.0
    mine: bool = False
    orphaned: bool = False
    cause: str = ""
    suspected: bool = False


CLOSED: Final = BreakerReply()


@dataclass(frozen=True, slots=True)
class BreakerFacts:
    """A breaker that is not closed. `cause`: class of error, or `operator`; `probes`: how many failed."""

    state: State
    changed_at: datetime
    opened_at: datetime
    cause: str
    actor: str
    failing_keys: int
    probes: int
    probe_at: datetime


def report_keys(database: Database, session: dict[str, object], *, failing: int, tried: int) -> None:
    """Report a member's distinct keys."""
    with database.connection() as connection:
        connection.execute(query("breaker_report"), session | {"failing": failing, "tried": tried})
    failpoint("breaker.after_report")


def open_breaker(database: Database, session: dict[str, object], *, cause: str, waited: bool) -> int | None:
    """Open the breaker, if the group's members agree; return the failing keys, or None.

    `waited`: members that did not report don't count.
    """
    facts = session | {"cause": cause[:256], "actor": session["member_id"], "waited": waited} | _WAITS
    with database.connection() as connection:
        row = connection.execute(query("breaker_open"), facts).fetchone()
    if row is None:
        return None
    failpoint("breaker.after_open")
    return int(row[0])


def take_probe(database: Database, session: dict[str, object]) -> bool:
    """Become the prober, where a probe is due or its prober is gone."""
    with database.connection() as connection:
        row = connection.execute(query("breaker_probe"), session | {"limit_s": PROBE_LIMIT_S}).fetchone()
    failpoint("breaker.after_probe")
    return row is not None


def end_probe(database: Database, session: dict[str, object], *, succeeded: bool, cause: str = "") -> None:
    """Record the probe's result; nothing where another member has the probe."""
    name = "breaker_probe_succeeded" if succeeded else "breaker_probe_failed"
    failpoint("breaker.before_result")
    with database.connection() as connection:
        connection.execute(query(name), session | {"cause": cause[:256]} | _WAITS)


def close_breaker(database: Database, session: dict[str, object]) -> float | None:
    """Close a breaker that has ramped; return for how many seconds it was not closed, or None."""
    with database.connection() as connection:
        row = connection.execute(query("breaker_close"), session | {"ramp_s": RAMP_S}).fetchone()
    return None if row is None else float(row[0])


_WAITS: Final[dict[str, object]] = {"first_s": FIRST_PROBE_S, "longest_s": LONGEST_PROBE_S}
