"""Missing versions: the alarm, and what operators see and say."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from mqlayer.domain.names import check_id, check_name
from mqlayer.events import Event, emit
from mqlayer.failpoints import failpoint
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query

log = logging.getLogger(__name__)

ALARMS_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True)
class VersionGap:
    """A version that has not come, while later ones are held; how long it has been missing, by the database's clock."""

    name: str
    entity: str
    missing: int
    held: int
    missing_s: float


@dataclass(frozen=True, slots=True)
class WaitingEntity:
    """An entity of which something is held. `released`: an operator said that it goes on; the next event takes it."""

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
    """An event that is held, without its body. `origin`: its message; `size`: bytes of its body and headers."""

    version: int
    origin: str
    size: int
    held_at: datetime


def watch_versions(application: Database) -> int:
    """Raise the alarm for versions that have been missing for too long; return how many.

    Safe to run twice at once: each alarm has its row. It is told after its commit, so a crash in between loses it;
    it is due again after an hour, as every alarm while its gap lasts.
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
    """Tell everybody who wants to hear of it; the entity itself goes to this hook only."""
    facts = {"versions": gap.name, "missing": gap.missing, "held": gap.held, "missing_s": round(gap.missing_s, 1)}
    log.warning("version_gap", extra=facts)
    emit(Event("version_gap", topic="", group="", cause=gap.name, count=gap.held))
    if hook is not None:
        _call(gap, hook)


def _call(gap: VersionGap, hook: Callable[[VersionGap], None]) -> None:
    """Call a hook of the application; what it raises is logged, and changes nothing."""
    try:
        hook(gap)
    except Exception as error:  # noqa: BLE001 - the application's: the gap is there whatever becomes of its telling
        log.error("hook_failed", extra={"event": "version_gap", "error": type(error).__name__})


def version_gaps(application: Database, name: str | None = None, *, limit: int = 100) -> list[WaitingEntity]:
    """Return entities of which something is held, the one that waits longest first."""
    if name is not None:
        check_name("versions", name)
    with application.connection() as connection:
        rows = connection.execute(query("version_gaps"), {"name": name, "limit": limit}).fetchall()
    return [WaitingEntity(*row) for row in rows]


def held_versions(application: Database, name: str, entity: str) -> list[HeldVersion]:
    """Return what is held of an entity, by rising version."""
    with application.connection() as connection:
        facts = {"name": check_name("versions", name), "entity": check_id("entity", entity)}
        rows = connection.execute(query("held_versions"), facts).fetchall()
    return [HeldVersion(*row) for row in rows]


def set_version(
    control: Database,
    application: Database,
    *,
    name: str,
    entity: str,
    version: int | None,
    drop_held: bool = False,
    actor: str,
    reason: str,
) -> int:
    """Say at which version an entity is, None to forget it; return how many held events that drops.

    The two databases have no common transaction: the audit row comes first, so that no act is without one. Said again
    after a crash, it does what is left.
    """
    facts = {"version": version, "drop_held": drop_held, "reason": reason}
    target = f"{check_name('versions', name)}/{entity}"
    control.transaction(lambda connection: write_audit(connection, actor, "versions set", target, facts))
    failpoint("version.after_audit")
    given = {"name": name, "entity": check_id("entity", entity), "version": version, "drop": drop_held}
    with application.connection() as connection:
        row = connection.execute(query("version_set"), given).fetchone()
    return int(row[0]) if row else 0
