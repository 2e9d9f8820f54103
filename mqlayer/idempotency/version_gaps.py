"""Missing versions: alarm, reads, operators' acts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from mqlayer.domain.names import check_id, check_name
from mqlayer.events import Event, emit
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

ALARMS_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True)
class VersionGap:
    """A missing version; later ones are held."""

    name: str
    entity: str
    missing: int
    held: int
    missing_s: float


@dataclass(frozen=True, slots=True)
class WaitingEntity:
    """An entity with held events. `released`: skipped by an operator; the next event takes them."""

    name: str
    entity: str
    missing: int
    first_held: int
    held: int
    held_bytes: int
    missing_since: datetime
    missing_s: float
    overdue: bool
    released: bool


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A held event; `origin`: its message."""

    version: int
    origin: str
    size: int
    held_at: datetime


def watch_versions(application: Database) -> int:
    """Raise overdue alarms; return how many. Safe to run concurrently.

    A crash after the commit delays an alarm by an hour.
    """
    count = 0
    while True:
        with application.connection() as connection:
            rows = connection.execute(query("version_alarms"), {"limit": ALARMS_AT_ONCE}).fetchall()
        failpoint("version.before_alarm")
        for row in rows:
            report_gap(VersionGap(*row))
        count += len(rows)
        if len(rows) < ALARMS_AT_ONCE:
            return count


def report_gap(gap: VersionGap, hook: Callable[[VersionGap], None] | None = None) -> None:
    """Log a gap, emit `version_gap`, call the hook (alone with the entity)."""
    facts = {"versions": gap.name, "missing": gap.missing, "held": gap.held, "missing_s": round(gap.missing_s, 1)}
    log.warning("version_gap", extra=facts)
    emit(Event("version_gap", topic="", group="", cause=gap.name, count=gap.held))
    if hook is not None:
        _call(gap, hook)


def _call(gap: VersionGap, hook: Callable[[VersionGap], None]) -> None:
    try:
        hook(gap)
    except Exception as error:  # noqa: BLE001 - a hook of the application must not stop the alarm
        log.error("hook_failed", extra={"event": "version_gap", "error": type(error).__name__})


def version_gaps(application: Database, name: str | None = None, *, limit: int = 100) -> list[WaitingEntity]:
    """Return entities with held events, longest wait first."""
    if name is not None:
        check_name("versions", name)
    with application.connection() as connection:
        rows = connection.execute(query("version_gaps"), {"name": name, "limit": limit}).fetchall()
    return [WaitingEntity(*row) for row in rows]


def held_versions(application: Database, name: str, entity: str) -> list[HeldVersion]:
    """Return an entity's held events."""
    with application.connection() as connection:
        facts = {"name": check_name("versions", name), "entity": check_id("entity", entity)}
        rows = connection.execute(query("held_versions"), facts).fetchall()
    return [HeldVersion(*row) for row in rows]


def set_version(
    runtime: Runtime, *, name: str, entity: str, version: int | None, drop_held: bool = False, reason: str
) -> int:
    """Set an entity's version, None to forget it; return how many held events that drops.

    The audit row commits first; after a crash call it again.
    """
    facts = {"version": version, "drop_held": drop_held, "reason": reason}
    target = f"{check_name('versions', name)}/{entity}"
    runtime.control.transaction(
        lambda connection: write_audit(connection, runtime.actor, "versions set", target, facts)
    )
    failpoint("version.after_audit")
    given = {"name": name, "entity": check_id("entity", entity), "version": version, "drop": drop_held}
    with runtime.outbox.connection() as connection:
        row = connection.execute(query("version_set"), given).fetchone()
    return int(row[0]) if row else 0
