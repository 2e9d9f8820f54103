"""Gaps: seqs that neither archive nor streams have."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mqlayer.errors import InvalidInput, NotFound
from mqlayer.postgres.audit import write_audit
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class ArchiveGap:
    """Missing seqs of a source in an LP, between `after` and `next_seq`.

    `partition`, `offset`: of the next record. The partition waits until `accepted_at`. Accepted without `actor`:
    archiving was off.
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
        """How many seqs."""
        return self.next_seq - self.after - 1


def list_gaps(database: Database, topic: str | None = None, *, waiting: bool = False) -> list[ArchiveGap]:
    """Return gaps of one topic or all; `waiting`: that stop partitions."""
    with database.connection() as connection:
        rows = connection.execute(query("archive_gaps"), {"topic": topic, "waiting": waiting}).fetchall()
    return [ArchiveGap(*row) for row in rows]


def accept_gaps(runtime: Runtime, topic: str, *, reason: str, partition: int | None = None) -> int:
    """Let the archiver pass gaps that stop a topic or partition; return their number. Audited.

    Later snapshots begin after them. Raises NotFound without a waiting gap, InvalidInput without a reason.
    """
    if not reason.strip():
        raise InvalidInput("say why what is missing may be missing: --reason TEXT")

    def work(connection: Connection) -> int:
        facts: dict[str, Any] = {"topic": topic, "partition": partition, "actor": runtime.actor}
        rows = connection.execute(query("archive_gaps_accept"), facts).fetchall()
        if not rows:
            raise NotFound("gap in the archive of topic", topic, "none waits: mqlayer archive gaps")
        missing = sum(row[0] for row in rows)
        facts = {"gaps": len(rows), "missing": missing, "partition": partition, "reason": reason}
        write_audit(connection, runtime.actor, "archive accept-gap", topic, facts)
        return len(rows)

    return runtime.control.transaction(work)
