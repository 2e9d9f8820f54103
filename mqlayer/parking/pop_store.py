"""Parked keys of groups with ordered pop: receivers park them, and get them one message at a time.

A parked key's first message is given out for a visibility timeout under a number of its own, the claim, which voids
earlier ones. States and crashes: docs/design/ordered-pop.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from mqlayer.domain.message import Identity, ParkedRecord
from mqlayer.domain.retry_rules import Policy
from mqlayer.domain.routing import PartitionId
from mqlayer.domain.time_to_live import EXPIRED_REASON, Expiry
from mqlayer.failpoints import failpoint
from mqlayer.parking.store import BATCH_BYTES, DeadLetterEntry, KeyRef, ParkingStore
from mqlayer.postgres.database import Connection
from mqlayer.postgres.event_counts import add_counts
from mqlayer.postgres.queries import columns, query

EARLY_S: Final = 1.0
"""Delay of a key whose group must first advance in another partition."""
ENDED_AT_ONCE: Final = 16
"""Messages that end unhandled in one transaction: it holds their keys and the group's counts."""
MOST_ENDED: Final = 160
"""The same in one call."""


class Claim(NamedTuple):
    """One giving-out of a parked key's first message."""

    lp: int
    name: bytes
    number: int


class ParkedSpan(NamedTuple):
    """A partition and its LPs."""

    partition: PartitionId
    lp_from: int
    lp_to: int


class FailureRule(NamedTuple):
    """A group's limit of failed attempts, and the policy after it."""

    attempt_limit: int
    policy: Policy

    def ends(self, failures: int) -> bool:
        """Whether a message with so many failed attempts is given out no more."""
        return self.policy != "block" and failures >= self.attempt_limit


class ClaimRequest(NamedTuple):
    """What a receiver asks for. `expiry`: judges messages' ages."""

    span: ParkedSpan
    rule: FailureRule
    limit: int
    visible_s: float
    expiry: Expiry | None


class ClaimedHead(NamedTuple):
    """A parked key's first message, with its failed attempts."""

    claim: Claim
    record: ParkedRecord


class ClaimedHeads(NamedTuple):
    """`more`: others may be due."""

    heads: list[ClaimedHead]
    more: bool


class PopParkingStore(ParkingStore):
    """One receiver's writes."""

    def _holds(self, connection: Connection, facts: dict[str, object]) -> bool:
        return connection.execute(query("pop_parking_hold"), facts).fetchone() is not None

    def any_parked(self, span: ParkedSpan) -> bool:
        """Whether a partition has parked keys."""
        with self._database.connection() as connection:
            row = connection.execute(query("pop_parked_any"), self._who | span._asdict()).fetchone()
        return row is not None and bool(row[0])

    def parked_among(self, refs: Sequence[KeyRef]) -> set[KeyRef]:
        """Return the parked ones of some keys."""
        facts = self._who | columns(("lps", "names"), list(set(refs)))
        with self._database.connection() as connection:
            rows = connection.execute(query("parked_keys_named"), facts).fetchall()
        return {KeyRef(lp, bytes(name)) for lp, name, *_ in rows}

    def dead_among(self, identities: Sequence[Identity]) -> set[Identity]:
        """Return those that left the group."""
        with self._database.connection() as connection:
            return self._dead_among(connection, identities)

    def claim(self, wanted: ClaimRequest, now: float) -> ClaimedHeads:
        """Give out the first messages of some due keys; what expired dies, what failed too often goes by the policy.

        `now`: by the clock of `wanted.expiry`.
        """
        found = ClaimedHeads([], more=True)
        for _ in range(MOST_ENDED // ENDED_AT_ONCE):
            found = self._database.transaction(lambda connection: self._claim_once(connection, wanted, now))
            # A claimed message waits for no further transaction: that may fail.
            if found.heads or not found.more:
                break
        return found

    def _claim_once(self, connection: Connection, wanted: ClaimRequest, now: float) -> ClaimedHeads:
        heads: list[ClaimedHead] = []
        ended = 0
        while True:
            limit = min(wanted.limit - len(heads), ENDED_AT_ONCE - ended)
            claimed, ended_now = self._claim_some(connection, wanted, limit, now)
            heads += claimed
            ended += ended_now
            # A key whose first message ended is due again at once.
            if not ended_now or ended == ENDED_AT_ONCE or len(heads) == wanted.limit:
                break
        failpoint("pop.before_claim")
        return ClaimedHeads(heads, more=ended_now > 0 or len(claimed) == limit)

    def _claim_some(
        self, connection: Connection, wanted: ClaimRequest, limit: int, now: float
    ) -> tuple[list[ClaimedHead], int]:
        """Claim up to `limit` keys; return their first messages, and how many ended instead."""
        facts = self._who | wanted.span._asdict() | {"partition_id": wanted.span.partition}
        asked = facts | {"count": limit, "visible_s": wanted.visible_s}
        heads: list[ClaimedHead] = []
        ended = 0
        for lp, name, number, attempts in connection.execute(query("pop_parked_claim"), asked).fetchall():
            claim = Claim(lp, bytes(name), number)
            record = self._first(connection, facts, claim, attempts)
            if record is None:
                continue
            if wanted.expiry is not None and wanted.expiry.has_ended(record, now):
                self._end_dead(connection, facts, claim, expired_letter_of(record, wanted.expiry))
            elif wanted.rule.ends(record.attempts):
                self._end_failing(connection, facts, claim, record, wanted.rule)
            else:
                heads.append(ClaimedHead(claim, record))
                continue
            ended += 1
        return heads, ended

    def handled(self, partition: PartitionId, claim: Claim, identity: Identity, delivered_s: float) -> bool:
        """End a handled message; its key's next one is due. False: the claim is void."""

        def work(connection: Connection, facts: dict[str, object], _: int) -> None:
            rows = [(identity.lp, claim.name, identity.source, identity.seq, True)]
            arrays = columns(("lps", "names", "sources", "seqs", "handled"), rows)
            connection.execute(query("parked_messages_end"), facts | arrays | {"given_s": delivered_s})
            self._go_on(connection, facts, claim)

        return self._under(partition, claim, identity, work)

    def failed(
        self, partition: PartitionId, claim: Claim, identity: Identity, rule: FailureRule, delay_s: float
    ) -> bool:
        """Let a failed message wait, or go as the policy says. False: the claim is void."""

        def work(connection: Connection, facts: dict[str, object], attempts: int) -> None:
            place = {"lp": identity.lp, "source": identity.source, "seq": identity.seq}
            connection.execute(query("pop_parked_tried"), facts | place)
            record = self._first(connection, facts, claim, attempts + 1)
            if record is not None and rule.ends(record.attempts):
                self._end_failing(connection, facts, claim, record, rule)
            elif record is not None:
                waits = {"attempts": record.attempts, "cause": "retry", "wait_s": delay_s}
                connection.execute(query("pop_parked_put"), facts | waits)

        return self._under(partition, claim, identity, work)

    def extend(self, claim: Claim, seconds: float) -> bool:
        """Keep a message given out. False: the claim is void."""
        facts = self._who | claim._asdict() | {"wait_s": seconds}
        with self._database.connection() as connection:
            return connection.execute(query("pop_parked_extend"), facts).fetchone() is not None

    def _under(
        self,
        partition: PartitionId,
        claim: Claim,
        identity: Identity,
        act: Callable[[Connection, dict[str, object], int], None],
    ) -> bool:
        facts = self._who | claim._asdict() | {"partition_id": partition}

        def work(connection: Connection) -> bool:
            held = connection.execute(query("pop_parked_held"), facts).fetchone()
            if held is None:
                place = {"source": identity.source, "seq": identity.seq}
                # Settled before: that is no error.
                return connection.execute(query("pop_parked_waits"), facts | place).fetchone() is None
            act(connection, facts, int(held[0]))
            failpoint("pop.before_parked_commit")
            return True

        done = self._database.transaction(work)
        failpoint("pop.after_parked_commit")
        return done

    def _first(
        self, connection: Connection, facts: dict[str, object], claim: Claim, attempts: int
    ) -> ParkedRecord | None:
        """Return a claimed key's first message; without one the key ends, or waits."""
        key = facts | {"lp": claim.lp, "name": claim.name}
        rows = connection.execute(query("parked_next"), key | {"count": 1, "bytes": BATCH_BYTES}).fetchall()
        if rows:
            offset, m, name, body, redriven, replay, own = rows[0]
            # A new head has its own attempts.
            return ParkedRecord.of((offset, m, name, body), attempts=attempts or own, redriven=redriven, replay=replay)
        if connection.execute(query("parked_key_end"), key).fetchone() is None:
            connection.execute(query("pop_parked_put"), key | {"attempts": attempts, "cause": None, "wait_s": EARLY_S})
        return None

    def _go_on(self, connection: Connection, facts: dict[str, object], claim: Claim) -> None:
        key = facts | {"lp": claim.lp, "name": claim.name}
        if connection.execute(query("parked_key_end"), key).fetchone() is None:
            connection.execute(query("pop_parked_put"), key | {"attempts": 0, "cause": None, "wait_s": 0.0})
        else:
            add_counts(connection, facts, {_partition_of(facts): {"unparked": 1}})

    def _end_failing(
        self, connection: Connection, facts: dict[str, object], claim: Claim, record: ParkedRecord, rule: FailureRule
    ) -> None:
        if rule.policy == "park":
            waits = {"attempts": record.attempts, "cause": "exhausted", "wait_s": None}
            connection.execute(query("pop_parked_put"), facts | {"lp": claim.lp, "name": claim.name} | waits)
            return
        self._end_dead(connection, facts, claim, dead_letter_of(record, record.attempts, rule))

    def _end_dead(self, connection: Connection, facts: dict[str, object], claim: Claim, dead: DeadLetterEntry) -> None:
        counts = self._dead_letter(connection, facts, [dead])
        source, lp, seq = dead.record.identity
        arrays = columns(("lps", "names", "sources", "seqs", "handled"), [(lp, claim.name, source, seq, False)])
        connection.execute(query("parked_messages_end"), facts | arrays | {"given_s": 0.0})
        self._go_on(connection, facts, claim)
        add_counts(connection, facts, {_partition_of(facts): counts})


def dead_letter_of(record: Any, attempts: int, rule: FailureRule) -> DeadLetterEntry:
    """Return a failed message as a dead one."""
    if rule.policy == "skip":
        return DeadLetterEntry(record, "skipped", f"failed {attempts} times", attempts, keep_body=False)
    return DeadLetterEntry(record, "exhausted", f"failed {attempts} times", attempts, keep_body=True)


def expired_letter_of(record: ParkedRecord, expiry: Expiry) -> DeadLetterEntry:
    """Return an expired message as a dead one."""
    return DeadLetterEntry(record, "expired", EXPIRED_REASON, record.attempts, keep_body=expiry.rule == "dead")


def _partition_of(facts: dict[str, object]) -> int:
    return int(str(facts["partition_id"]))
