"""The limit of attempts and the parked keys of ordered pop (docs/design/ordered-pop.md).

A failing message is written to Postgres first, then settled; a settled one whose key may be parked raises a number on
the node, so no receiver gives the key's later messages out without asking Postgres.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from mqlayer.domain.message import Identity, Record
from mqlayer.domain.parked_names import parked_name
from mqlayer.domain.time_to_live import EXPIRED_REASON, Expiry
from mqlayer.errors import MqlayerError
from mqlayer.events import Event, emit
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group
from mqlayer.groups.pop_partitions import PopPartition
from mqlayer.logs import event_logger
from mqlayer.parking import DeadLetterEntry, FailedAttempt, KeyEntry, KeyRef, ParkingBatch, ParkingResult, Span
from mqlayer.parking.pop_store import (
    ClaimedHead,
    ClaimRequest,
    FailureRule,
    ParkedSpan,
    PopParkingStore,
    dead_letter_of,
)
from mqlayer.receiving.partition_view import PartitionView
from mqlayer.receiving.pop_message import Claimed, PopMessage, Token, message_of
from mqlayer.receiving.settler import PopSettler
from mqlayer.redis.pop_scripts import PopBatch, ReceiveRequest
from mqlayer.runtime.error_text import ErrorTexts

log = event_logger(__name__)

CLAIM_LIMIT: Final = 16
"""Parked keys per call; each costs statements of its own."""
FULL_RETRY_MS: Final = 2_000
"""Delay of messages without room."""
UNDECIDED_MS: Final = 1_000
"""Delay of messages while Postgres is away."""


class Delivery(NamedTuple):
    """A record that a node gave out."""

    record: Record
    times: int
    failures: int
    token: Token


class PopParking:
    """One receiver's part of parking. `counts`: of messages, by event."""

    def __init__(self, group: Group, store: PopParkingStore, settler: PopSettler, texts: ErrorTexts) -> None:
        self._group, self._store, self._settler, self._texts = group, store, settler, texts
        self._alone = group.strategy != "strict"
        self.counts: Counter[str] = Counter()

    def living(self, view: PartitionView, given: list[Delivery], expiry: Expiry) -> list[Delivery]:
        """Return the messages that have not expired; settle the others, or let them die."""
        now = time.monotonic()
        expired = [one for one in given if expiry.has_ended(one.record, now)]
        if not expired:
            return given
        tokens = [one.token for one in expired]
        if expiry.rule == "settle":
            self._settler.expire(tokens)
            self._emit("expired", view, len(tokens))
        else:
            self._let_die(view, expired)
        gone = set(tokens)
        return [one for one in given if one.token not in gone]

    def _let_die(self, view: PartitionView, expired: Sequence[Delivery]) -> None:
        tokens = [one.token for one in expired]
        try:
            known = self._store.dead_among([one.record.identity for one in expired])
            dead_letters = [
                DeadLetterEntry(one.record, "expired", EXPIRED_REASON, one.failures, keep_body=True)
                for one in expired
                if one.record.identity not in known
            ]
            self._write(view, ParkingBatch(dead_letters=dead_letters))
        except MqlayerError:
            self._settler.settle("return", tokens, ms=UNDECIDED_MS)
            raise
        failpoint("pop.after_park")
        self._settler.settle("ack", tokens, handled=False)
        if dead_letters:
            self._tell("dead_lettered", "dead", view, len(dead_letters))

    def screen(self, view: PartitionView, given: Sequence[Delivery], batch: PopBatch) -> Sequence[Delivery]:
        """Return the messages for the caller; park or end the others."""
        rule = rule_of(view.info)
        failing = [one for one in given if rule.ends(one.failures)]
        if not failing and not batch.parking and not view.info.parked:
            return given
        try:
            return self._decide(view, given, batch, rule, failing)
        except MqlayerError:
            # None may pass unasked; a later call decides.
            self._settler.settle("return", [one.token for one in given], ms=UNDECIDED_MS)
            raise

    def _decide(
        self,
        view: PartitionView,
        given: Sequence[Delivery],
        answer: PopBatch,
        rule: FailureRule,
        failing: Sequence[Delivery],
    ) -> Sequence[Delivery]:
        refs = [self._ref(one.record) for one in given]
        parked, dead = self._known(view, refs, answer)
        if failing:
            dead |= self._store.dead_among([one.record.identity for one in failing])
        batch, to_end = ParkingBatch(), list[Delivery]()
        to_park: dict[Token, tuple[Delivery, KeyRef]] = {}
        for one, ref in zip(given, refs, strict=True):
            fails = rule.ends(one.failures)
            if one.record.identity in dead or (fails and rule.policy != "park" and ref not in parked):
                to_end.append(one)
            elif fails or ref in parked:
                if ref not in parked:
                    batch.entries.append(KeyEntry(ref, "exhausted", None, one.failures))
                    parked.add(ref)
                to_park[one.token] = one, ref
                batch.messages.append((ref, one.record))
                batch.attempts[one.record.identity] = one.failures
        batch.dead_letters = [
            dead_letter_of(one.record, one.failures, rule) for one in to_end if one.record.identity not in dead
        ]
        if not to_park and not to_end:
            return given
        result = self._write(view, batch)
        first_returned = self._settle(view, result, to_park, to_end, len(batch.dead_letters))
        if self._group.scope == "partition":
            # All of them are one queue: what is behind a returned one is given back with it.
            given = [one for one in given if one.token.offset < first_returned]
        ended = {one.token for one in to_end}
        parked_now = {token for token, (_, ref) in to_park.items() if ref not in result.unparked}
        return [one for one in given if one.token not in ended | parked_now]

    def _known(
        self, view: PartitionView, refs: Sequence[KeyRef], answer: PopBatch
    ) -> tuple[set[KeyRef], set[Identity]]:
        """Return the parked ones of some keys, and dead messages that may come again."""
        if not answer.parking and not view.info.parked:
            return set(), set()
        span = span_of(view.info)
        dead = self._store.dead(Span(*span, answer.committed))
        if self._store.any_parked(span):
            return self._store.parked_among(refs), dead
        if not dead:
            view.none_parked = answer.parking
        return set(), dead

    def _write(self, view: PartitionView, batch: ParkingBatch) -> ParkingResult:
        place = view.group_partition
        if not batch:
            return ParkingResult()
        return self._store.write(view.info.partition, place.epoch, batch)

    def _settle(
        self,
        view: PartitionView,
        result: ParkingResult,
        to_park: Mapping[Token, tuple[Delivery, KeyRef]],
        to_end: Sequence[Delivery],
        dead_letters: int,
    ) -> float:
        failpoint("pop.after_park")
        refused = [t for t, (one, _) in to_park.items() if one.record.identity in result.refused_messages]
        parked = [t for t, (_, ref) in to_park.items() if t not in refused and ref not in result.unparked]
        if parked:
            self._settler.settle("park", parked, handled=False)
            self._tell("key_parked", "parked", view, len(parked))
        if to_end:
            self._settler.settle("ack", [one.token for one in to_end], handled=False)
            if dead_letters:
                kind = "skipped" if rule_of(view.info).policy == "skip" else "dead"
                self._tell("dead_lettered", kind, view, dead_letters)
        if refused:
            self._settler.settle("return", refused, ms=FULL_RETRY_MS)
            log.error("parking_full", extra=self._facts(view) | {"count": len(refused)})
        return min((token.offset for token in refused), default=math.inf)

    def _tell(self, event: str, kind: str, view: PartitionView, count: int) -> None:
        self.counts[kind] += count
        log.warning(event, extra=self._facts(view) | {"count": count})
        self._emit(kind, view, count)

    def _emit(self, kind: str, view: PartitionView, count: int) -> None:
        group = self._group
        emit(Event(kind, group.topic, group.name, int(view.info.partition), count=count))  # type: ignore[arg-type]

    def _facts(self, view: PartitionView) -> dict[str, object]:
        return {"partition": str(view.info.partition), "group": self._group.name}

    def _ref(self, record: Record) -> KeyRef:
        identity = record.identity
        return KeyRef(identity.lp, parked_name(record.key, identity, alone=self._alone))

    # -- parked messages --------------------------------------------------------------------------------------------

    def fetch(self, view: PartitionView, request: ReceiveRequest) -> list[PopMessage]:
        """Return the first messages of a partition's due keys."""
        if time.monotonic() < view.parked_due_at:
            return []
        view.parked_due_at = math.inf
        count, visible_s = min(request.limit, CLAIM_LIMIT), request.visibility_timeout_ms / 1000
        asked = ClaimRequest(span_of(view.info), rule_of(view.info), count, visible_s, view.expiry)
        claimed = self._store.claim(asked, time.monotonic())
        failpoint("pop.after_claim")
        if claimed.more:
            view.parked_due_at = 0.0
        return [_message(view, one) for one in claimed.heads]

    def handled(self, message: PopMessage, claimed: Claimed) -> bool:
        """End a parked message. False: its token is void."""
        delivered_s = max(0.0, time.time() - claimed.at_s)
        done = self._store.handled(claimed.partition, claimed.claim, message.identity, delivered_s)
        self.counts["handled"] += done
        return done

    def failed(self, message: PopMessage, claimed: Claimed, info: PopPartition | None, delay_s: float) -> bool:
        """Give a parked message back. False: its token is void."""
        rule = FailureRule(1, "block") if info is None else rule_of(info)
        done = self._store.failed(claimed.partition, claimed.claim, message.identity, rule, delay_s)
        self.counts["failed"] += done
        return done

    def extend(self, claimed: Claimed, seconds: float) -> bool:
        """Keep a parked message. False: its token is void."""
        return self._store.extend(claimed.claim, seconds)

    def note_error(self, message: PopMessage, error: BaseException) -> None:
        """Record a failed attempt in Postgres."""
        text = self._texts.text(error)
        partition = message.token.partition
        self._store.add_attempts([FailedAttempt(message.identity, message.attempt, text, partition)])  # type: ignore[arg-type]


def rule_of(info: PopPartition) -> FailureRule:
    """Return the group's rule, as last read."""
    return FailureRule(info.attempt_limit, info.policy)


def span_of(info: PopPartition) -> ParkedSpan:
    """Return a partition's LPs."""
    return ParkedSpan(info.partition, info.lp_from, info.lp_to)


def _message(view: PartitionView, one: ClaimedHead) -> PopMessage:
    record = one.record
    token = Token(view.group_partition.partition, view.group_partition.epoch, 0, record.offset)
    claimed = Claimed(view.info.partition, one.claim, time.time(), record.redriven)
    return message_of(record, attempt=record.attempts + 1, token=token, replay=view.info.replay, claimed=claimed)
