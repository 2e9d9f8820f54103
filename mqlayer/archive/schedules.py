"""Snapshots at fixed times and jobs on them, run by a worker: the page 'Schedule snapshots and analytics'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from mqlayer.domain.names import check_name
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

EXPORT: Final = "export"
"""The job that needs no snapshot."""
SCHEDULED_JOBS: Final = (
    "audit", "latency", "skew", "failures", "fairness", "journeys", "effects", "certify", EXPORT,
)  # fmt: skip
"""Jobs that a schedule may name, in the order in which they run."""
SCHEDULES_LIMIT: Final = 50
"""Each has series among the metrics."""
NAME_LIMIT: Final = 40
"""Characters: a snapshot's name adds a date and a number."""
SHORTEST_S: Final = 600
LONGEST_S: Final = 366 * 86_400
PLACE_BYTES: Final = 1_024
KEEP_LIMIT: Final = 100
CREATE_HINT: Final = "mqlayer analytics schedule list shows what there is"

RunState = Literal["running", "good", "faults", "failed"]
"""`faults`: each job ended, and one found a fault. `failed`: a job or the run itself did not end."""


@dataclass(frozen=True, slots=True)
class ScheduledRun:
    """A run. `job`: at which it is; `results`: state, seconds and facts by job."""

    run_id: int
    state: RunState
    snapshot: str | None
    job: str | None
    results: Mapping[str, Any]
    error: str | None
    worker: str
    started_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule; `topics` None: all archived ones. `last`: the last ended run."""

    name: str
    topics: tuple[str, ...] | None
    jobs: tuple[str, ...]
    every_s: int
    keep: int
    actor: str
    created_at: datetime
    next_at: datetime
    paused_at: datetime | None
    export_to: str | None
    last: ScheduledRun | None
    running: ScheduledRun | None

    @property
    def needs_snapshot(self) -> bool:
        """Whether a run makes one."""
        return self.jobs != (EXPORT,)


def create_schedule(
    runtime: Runtime,
    name: str,
    *,
    every_s: int,
    jobs: Sequence[str] = (),
    topics: Sequence[str] | None = None,
    keep: int = 3,
    first_at: datetime | None = None,
    export_to: str | None = None,
) -> Schedule:
    """Have a worker make a snapshot every `every_s` seconds, from `first_at` or now on, and run jobs on it; its `keep`
    newest snapshots stay. `export_to`: where its job `export` appends; a schedule of that job alone makes no snapshot.
    Audited. Raises InvalidInput, Conflict for a taken name."""
    check_name("schedule", name)
    wanted = [one for one in SCHEDULED_JOBS if one in jobs]
    _check(name, every_s=every_s, jobs=jobs, keep=keep, first_at=first_at)
    place = _export_place(wanted, export_to)
    facts = {
        "name": name, "topics": sorted(set(topics)) if topics else None, "jobs": wanted, "every_s": every_s,
        "keep": keep, "actor": runtime.actor, "first_at": first_at, "export_to": place,
    }  # fmt: skip

    def work(connection: Connection) -> None:
        ((count,),) = connection.execute(query("schedule_count")).fetchall()
        if count >= SCHEDULES_LIMIT:
            raise InvalidInput(f"there are {count} schedules, the most that there may be: drop one, or let it do more")
        if connection.execute(query("schedule_insert"), facts).fetchone() is None:
            raise Conflict(f"schedule {name!r} exists", f"drop it first: mqlayer analytics schedule drop {name}")
        said = {"every_s": every_s, "jobs": wanted, "topics": facts["topics"], "keep": keep, "export_to": place}
        write_audit(connection, runtime.actor, "schedule create", name, said)

    runtime.control.transaction(work)
    return find_schedule(runtime.control, name)


def drop_schedule(runtime: Runtime, name: str) -> None:
    """Drop a schedule with the record of its runs; its snapshots stay. Raises NotFound."""

    def work(connection: Connection) -> None:
        if not connection.execute(query("schedule_delete"), {"name": name}).rowcount:
            raise _unknown(name)
        write_audit(connection, runtime.actor, "schedule drop", name, {})

    runtime.control.transaction(work)


def pause_schedule(runtime: Runtime, name: str) -> None:
    """Begin no more runs; one that goes on ends. Raises NotFound."""
    _pause(runtime, name, pause=True)


def resume_schedule(runtime: Runtime, name: str) -> None:
    """Begin runs again; one that was due meanwhile is due now. Raises NotFound."""
    _pause(runtime, name, pause=False)


def schedules(database: Database) -> list[Schedule]:
    """Return all schedules by name."""
    return _read(database, None)


def find_schedule(database: Database, name: str) -> Schedule:
    """Return a schedule. Raises NotFound."""
    for found in _read(database, name):
        return found
    raise _unknown(name)


def schedule_runs(database: Database, name: str, *, limit: int = 50, after: int | None = None) -> list[ScheduledRun]:
    """Return runs, newest first; `after`: only older ones than this. Raises NotFound."""
    find_schedule(database, name)
    with database.connection() as connection:
        facts = {"name": name, "limit": limit, "after": after}
        rows = connection.execute(query("schedule_runs"), facts).fetchall()
    return [ScheduledRun(*row) for row in rows]


def _check(name: str, *, every_s: int, jobs: Sequence[str], keep: int, first_at: datetime | None) -> None:
    if len(name) > NAME_LIMIT:
        raise InvalidInput(f"a schedule's name has at most {NAME_LIMIT} characters, not {len(name)}")
    if not SHORTEST_S <= every_s <= LONGEST_S:
        raise InvalidInput(f"a schedule runs every 10 minutes to every 366 days, not every {every_s} s")
    if not 1 <= keep <= KEEP_LIMIT:
        raise InvalidInput(f"a schedule keeps 1 to {KEEP_LIMIT} snapshots, not {keep}")
    if unknown := sorted(set(jobs) - set(SCHEDULED_JOBS)):
        raise InvalidInput(f"no scheduled job {', '.join(unknown)}: choose from {', '.join(SCHEDULED_JOBS)}")
    if first_at is not None and first_at.utcoffset() is None:
        raise InvalidInput(
            f"{first_at.isoformat()} has no time zone: say it with one, such as 2026-11-21T02:00:00+00:00"
        )


def _export_place(jobs: Sequence[str], export_to: str | None) -> str | None:
    if (export_to is not None) != (EXPORT in jobs):
        raise InvalidInput("the job export needs a place, and no other job has one: --job export --export-to PATH")
    if export_to is None:
        return None
    from mqlayer.archive.lake.state import lake_location  # not at start: it takes time

    place = lake_location(export_to)
    if not 1 <= len(place.encode()) <= PLACE_BYTES:
        raise InvalidInput(f"a place has at most {PLACE_BYTES} bytes")
    return place


def _pause(runtime: Runtime, name: str, *, pause: bool) -> None:
    def work(connection: Connection) -> None:
        if connection.execute(query("schedule_pause"), {"name": name, "pause": pause}).fetchone() is None:
            raise _unknown(name)
        write_audit(connection, runtime.actor, f"schedule {'pause' if pause else 'resume'}", name, {})

    runtime.control.transaction(work)


def _read(database: Database, name: str | None) -> list[Schedule]:
    with database.connection() as connection:
        rows = connection.execute(query("schedule_list"), {"name": name}).fetchall()
    return [_schedule(row) for row in rows]


def _schedule(row: Sequence[Any]) -> Schedule:
    name, topics, jobs, *facts = row[:10]
    chosen = None if topics is None else tuple(topics)
    values: tuple[Any, ...] = (name, chosen, tuple(jobs), *facts, _run(row[10:19]), _run(row[19:]))
    return Schedule(*values)


def _run(columns: Sequence[Any]) -> ScheduledRun | None:
    return None if columns[0] is None else ScheduledRun(*columns)


def _unknown(name: str) -> NotFound:
    return NotFound("schedule", name, CREATE_HINT)
