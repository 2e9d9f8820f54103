"""Postgres rows of a shared group: dead and redriven messages.

A member *claims* a redriven message for a visibility timeout; only the claim's token ends it. After an unfinished
claim comes a guarded one: alone, its attempt counted first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mqlayer.domain.deployments import MAIN
from mqlayer.domain.message import Identity, ParkedRecord
from mqlayer.domain.routing import LP_COUNT
from mqlayer.failpoints import failpoint
from mqlayer.parking import DeadLetterEntry, FailedAttempt, death_counts
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.event_counts import add_counts
from mqlayer.postgres.queries import columns, query


class ClaimRef(NamedTuple):
    """A claim, named by its token."""

    lp: int
    name: bytes
    token: int


@dataclass(frozen=True, slots=True)
class ClaimedMessage:
    """A claimed redriven message. `guarded`: an earlier claim did not end."""

    ref: ClaimRef
    partition: int
    record: ParkedRecord
    guarded: bool


class SharedStore:
    """Access to these rows. Each call is one transaction."""

    def __init__(self, database: Database, group_id: int, member_id: str, deployment: str = MAIN) -> None:
        self._database, self._deployment = database, deployment
        self._who = {"group_id": group_id, "member_id": member_id}

    def claim(self, limit: int, visibility_timeout_s: float, *, guarded: bool) -> list[ClaimedMessage]:
        """Claim due messages; with `guarded`, one of an unfinished claim too."""
        facts = self._who | {"limit": limit, "visibility_timeout_s": visibility_timeout_s, "careful": guarded}
        facts |= {"deployment": self._deployment}
        with self._database.connection() as connection:
            rows = connection.execute(query("redriven_claim"), facts).fetchall()
        return [
            ClaimedMessage(
                ClaimRef(lp, bytes(name), token),
                partition,
                ParkedRecord.of((offset, m, key, body), attempts=before, redriven=True),
                care,
            )
            for lp, name, token, before, care, partition, offset, m, key, body in rows
        ]

    def extend(self, refs: Sequence[ClaimRef], visibility_timeout_s: float) -> set[int]:
        """Extend claims; return valid tokens."""
        facts = self._who | _refs(refs) | {"visibility_timeout_s": visibility_timeout_s}
        with self._database.connection() as connection:
            return {token for (token,) in connection.execute(query("redriven_extend"), facts).fetchall()}

    def nack(self, refs: Sequence[tuple[ClaimRef, int, float]]) -> None:
        """Retry messages: (claim, failed attempts, seconds)."""
        rows = [(*ref, failed, wait_s) for ref, failed, wait_s in refs]
        arrays = columns(("lps", "names", "tokens", "failed", "waits_s"), rows)
        with self._database.connection() as connection:
            connection.execute(query("redriven_nack"), self._who | arrays)

    def end(self, claims: Sequence[ClaimedMessage], delivered_s: float) -> None:
        """End handled claims, delivered at most `delivered_s` ago."""

        def work(connection: Connection) -> None:
            self._end(connection, self._mine(connection, claims), handled=True, delivered_s=delivered_s)

        self._database.transaction(work)

    def dead(self, identities: Iterable[Identity]) -> set[Identity]:
        """Return the dead or redriven identities."""
        rows = [(one.lp, one.source, one.seq) for one in identities]
        facts = self._who | columns(("lps", "sources", "seqs"), rows)
        with self._database.connection() as connection:
            return {Identity(*row) for row in connection.execute(query("dead_named"), facts).fetchall()}

    def dead_from(self, partition: int, committed: int) -> set[Identity]:
        """Return a partition's dead or redriven identities from `committed`, and those at unknown offsets."""
        spans = columns(("partitions", "committed", "lps_from", "lps_to"), [(partition, committed, 0, LP_COUNT)])
        with self._database.connection() as connection:
            rows = connection.execute(query("dead_unsettled"), self._who | spans).fetchall()
        return {Identity(*row[1:]) for row in rows}

    def dead_letter(self, partition: int, epoch: int, dead_letters: Sequence[DeadLetterEntry]) -> bool:
        """Write dead messages; False where the epoch was replaced. Idempotent."""
        facts = self._who | {"partition_id": partition, "epoch": epoch}

        def work(connection: Connection) -> bool:
            if connection.execute(query("shared_hold"), facts).fetchone() is None:
                return False
            self._put_dead(connection, partition, dead_letters)
            failpoint("shared.before_dead_commit")
            return True

        dead_lettered = self._database.transaction(work)
        failpoint("shared.after_dead")
        return dead_lettered

    def dead_letter_claimed(self, claim: ClaimedMessage, dead_letter: DeadLetterEntry) -> bool:
        """Write a claimed message as dead; False for another's claim."""

        def work(connection: Connection) -> bool:
            mine = self._mine(connection, [claim])
            if mine:
                self._put_dead(connection, claim.partition, [dead_letter])
                self._end(connection, mine, handled=False, delivered_s=0.0)
            return bool(mine)

        return self._database.transaction(work)

    def add_attempts(self, attempts: Sequence[FailedAttempt]) -> None:
        """Record failed attempts."""
        rows = [(one.identity.lp, one.identity.source, one.identity.seq, one.attempt, one.error) for one in attempts]
        facts = self._who | columns(("lps", "sources", "seqs", "attempts", "errors"), rows)
        counts: dict[int, Counter[str]] = {}
        for one in attempts:
            counts.setdefault(one.partition, Counter())["timed_out" if one.timed_out else "failed"] += 1

        def work(connection: Connection) -> None:
            connection.execute(query("failed_attempts_put"), facts)
            add_counts(connection, self._who, counts)

        self._database.transaction(work)

    def _put_dead(self, connection: Connection, partition: int, dead_letters: Sequence[DeadLetterEntry]) -> None:
        rows = [
            (lp, source, seq, one.record.offset, one.record.key, one.record.m,
            one.record.body if one.keep_body else None,
             one.cause, one.reason, one.attempts, one.tried)
            for one in dead_letters
            for source, lp, seq in [one.record.identity]
        ]  # fmt: skip
        names = ("lps", "sources", "seqs", "offsets", "keys", "ms", "bodies", "causes", "reasons", "attempts", "tried")
        facts = self._who | {"partition_id": partition} | columns(names, rows)
        put = connection.execute(query("dead_put"), facts).fetchall()
        add_counts(connection, self._who, {partition: death_counts(put)})

    def _mine(self, connection: Connection, claims: Sequence[ClaimedMessage]) -> list[ClaimedMessage]:
        facts = self._who | _refs([claim.ref for claim in claims])
        owned = {(lp, bytes(name)) for lp, name in connection.execute(query("redriven_hold"), facts).fetchall()}
        return [claim for claim in claims if (claim.ref.lp, claim.ref.name) in owned]

    def _end(
        self, connection: Connection, claims: Sequence[ClaimedMessage], *, handled: bool, delivered_s: float
    ) -> None:
        if not claims:
            return
        rows = [(lp, one.ref.name, source, seq, handled) for one in claims for source, lp, seq in [one.record.identity]]
        facts = self._who | columns(("lps", "names", "sources", "seqs", "handled"), rows) | {"given_s": delivered_s}
        connection.execute(query("parked_messages_end"), facts)
        names = columns(("lps", "names"), [one.ref[:2] for one in claims])
        connection.execute(query("redriven_forget"), self._who | names)


def _refs(refs: Sequence[ClaimRef]) -> dict[str, Any]:
    return columns(("lps", "names", "tokens"), refs)
