"""Gaps: seqs that the archive does not have and can't get any more from the streams. Each stops its partition until an
operator accepts it, but for those of a time in which archiving was switched off."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mqlayer.errors import InvalidInput, NotFound
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class ArchiveGap:
    """Seqs of a source in an LP that are not archived: those after `after` and before `next_seq`.

    `partition` and `offset`: where the record behind it is; `accepted_at` None: the partition waits. `actor` None with
    a time: archiving was switched off meanwhile.
    """

    topic: str
    source: int
    lp: int
    after: int
    next_seq: int
    partition: int
    offset: int
    found_at: datetime
    accepted_at: datetime | None
    actor: str | None

    @property
    def missing(self) -> int:
        """How many seqs it is."""
        return self.next_seq - self.after - 1


def list_gaps(database: Database, topic: str | None = None, *, waiting: bool = False) -> list[ArchiveGap]:
    """Return the gaps of a topic's archive, or of all; `waiting`: only those that stop a partition."""
    with database.connection() as connection:
        rows = connection.execute(query("archive_gaps"), {"topic": topic, "waiting": waiting}).fetchall()
    return [ArchiveGap(*row) for row in rows]


def accept_gaps(
    database: Database, topic: str, *, reason: str, partition: int | None = None, actor: str = "api"
) -> int:
    """Let the archiver go on behind all gaps that a topic's archive waits at, or one partition; return how many.

    What was archived before a gap stays, but snapshots made from then on begin behind it in its source and LP. Written
    into the audit log with the reason. Raises NotFound where nothing waits, InvalidInput without a reason.
    """
    if not reason.strip():
        raise InvalidInput("say why what is missing may be missing: --reason TEXT")

    def work(connection: Connection) -> int:
        facts: dict[str, Any] = {"topic": topic, "partition": partition, "actor": actor}
        rows = connection.execute(query("archive_gaps_accept"), facts).fetchall()
        if not rows:
            raise NotFound("gap in the archive of topic", topic, "none waits: mqlayer archive gaps")
        missing = sum(row[0] for row in rows)
        facts = {"gaps": len(rows), "missing": missing, "partition": partition, "reason": reason}
        write_audit(connection, actor, "archive accept-gap", topic, facts)
        return len(rows)

    return database.transaction(work)
