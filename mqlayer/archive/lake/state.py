"""Lakes as Postgres knows them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime

LIST_HINT = "mqlayer archive exports shows those that are known"


class Lake(NamedTuple):
    """A registered destination. `uuid`: its tables have it too."""

    lake_id: int
    uuid: str
    location: str


@dataclass(frozen=True, slots=True)
class LakeStatus:
    """A topic in a lake. `behind_s`: time since its last export, 0 if it has all batches."""

    location: str
    topic: str
    batch: int
    verified_batch: int
    exported_at: datetime
    verified_at: datetime | None
    batches_behind: int
    behind_s: float


def lake_location(text: str) -> str:
    """Return an absolute path or an address. Raises InvalidInput, without the text where it has credentials."""
    if "://" not in text:
        return str(Path(text).absolute())
    parts = urlsplit(text)
    # It is stored, shown and logged.
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidInput("an address has no credentials and no options: give them by the environment")
    if parts.scheme == "file":
        return str(Path(parts.path).absolute())
    return text.rstrip("/")


def find_lake(database: Database, location: str) -> Lake:
    """Return a lake. Raises NotFound, InvalidInput."""
    known = lake_location(location)
    with database.connection() as connection:
        row = connection.execute(query("lake_find"), {"location": known}).fetchone()
    if row is None:
        raise NotFound("export", known, LIST_HINT)
    return Lake(row[0], row[1], known)


def ensure_lake(runtime: Runtime, location: str) -> Lake:
    """Return a lake; register it first where it is new. Audited. Raises InvalidInput."""
    known = {"location": lake_location(location)}

    def work(connection: Connection) -> Lake:
        row = connection.execute(query("lake_insert"), known).fetchone()
        if row is None:
            row = connection.execute(query("lake_find"), known).fetchone()
        else:
            write_audit(connection, runtime.actor, "archive export", known["location"], {})
        if row is None:
            raise NotFound("export", known["location"], "it was forgotten meanwhile: try again")
        return Lake(row[0], row[1], known["location"])

    return runtime.control.transaction(work)


def forget_lake(runtime: Runtime, location: str) -> None:
    """Forget a lake; its files stay. Audited. Raises NotFound, Conflict if snapshots have days that only it has."""
    known = {"location": lake_location(location)}

    def work(connection: Connection) -> None:
        names = [name for (name,) in connection.execute(query("lake_needed"), known).fetchall()]
        if names:
            raise Conflict(
                f"only this export has days of snapshots: {', '.join(names)}",
                "export to another place first, or drop the snapshots: mqlayer snapshot drop NAME",
            )
        if connection.execute(query("lake_delete"), known).fetchone() is None:
            raise NotFound("export", known["location"], LIST_HINT)
        write_audit(connection, runtime.actor, "archive forget-export", known["location"], {})

    runtime.control.transaction(work)


def lake_statuses(database: Database) -> list[LakeStatus]:
    """Return the state of each lake and topic."""
    with database.connection() as connection:
        return [LakeStatus(*row) for row in connection.execute(query("lake_statuses")).fetchall()]
