"""A group's circuit breaker in Postgres: docs/design/circuit-breaker.md."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from mqlayer.errors import InvalidInput
from mqlayer.events import Event, emit
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group, find_group
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

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
    failpoint("breaker.after_open")
    return None if row is None else int(row[0])


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


def trip_breaker(runtime: Runtime, topic: str, name: str) -> bool:
    """Open a group's breaker by hand; probes close it again. False: it was open.

    Raises NotFound, InvalidInput for a group without a breaker.
    """
    return _operate(runtime, topic, name, "breaker_trip", "breaker open")


def reset_breaker(runtime: Runtime, topic: str, name: str) -> bool:
    """Close a group's breaker by hand, at full speed. False: it was closed. Raises as `trip_breaker`."""
    return _operate(runtime, topic, name, "breaker_reset", "breaker close")


def _operate(runtime: Runtime, topic: str, name: str, statement: str, act: str) -> bool:
    group = find_group(runtime.control, topic, name)
    _check_has_breaker(group)
    facts = {"group_id": group.group_id, "actor": runtime.actor, "first_s": FIRST_PROBE_S}

    def work(connection: Connection) -> bool:
        if not connection.execute(query(statement), facts).fetchall():
            return False
        write_audit(connection, runtime.actor, act, f"{topic}/{name}", {})
        return True

    done = bool(runtime.control.transaction(work))
    if done:
        opened = statement == "breaker_trip"
        kind: Literal["breaker_opened", "breaker_closed"] = "breaker_opened" if opened else "breaker_closed"
        emit(Event(kind, topic, name, cause="operator", count=0, actor=runtime.actor))
    return done


def _check_has_breaker(group: Group) -> None:
    if group.rules.breaker_share is None:
        raise InvalidInput(
            f"group {group.name!r} of topic {group.topic!r} has no circuit breaker: mqlayer group set {group.topic} "
            f"{group.name.partition('@')[0]} --breaker 0.5, or pause it: mqlayer group pause {group.topic} {group.name}"
        )


_WAITS: Final[dict[str, object]] = {"first_s": FIRST_PROBE_S, "longest_s": LONGEST_PROBE_S}
