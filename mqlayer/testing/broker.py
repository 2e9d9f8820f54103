"""The topics of a TestApp: one partition each, in memory."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from itertools import count
from typing import Final, NamedTuple

from mqlayer.domain.dedup import encode_dedup_id, lp_of_unkeyed, token_of
from mqlayer.domain.message import Identity, Record
from mqlayer.domain.names import DEFAULT_BODY_LIMIT, check_body
from mqlayer.domain.routing import Lp, lp_of, random_lp
from mqlayer.domain.time_to_live import NO_END
from mqlayer.large_bodies.options import limit_of
from mqlayer.outbox.outbox_message import OutboxMessage
from mqlayer.testing.clock import TestClock
from mqlayer.testing.messages import PublishedMessage, published_of, record_of

OUTBOX: Final = 1
"""The source of messages from transactions."""
DIRECT: Final = 2
"""The source of messages from producers."""
TABLE: Final = 3
"""The source of messages from a database."""


class StoredAt(NamedTuple):
    """Where a message is; that of the first one with its dedup id, for a `duplicate`."""

    partition: int
    offset: int
    identity: Identity
    duplicate: bool = False


class TopicLog:
    """One topic's records."""

    def __init__(self, name: str, partition: int) -> None:
        self.name, self.partition = name, partition
        self.records: list[Record] = []
        self.seqs: Counter[tuple[int, int]] = Counter()
        self.ids: dict[bytes, StoredAt] = {}
        self.time_to_live = NO_END


class MemoryBroker:
    """All topics, and messages that are not due."""

    def __init__(self, clock: TestClock) -> None:
        self.clock = clock
        self.published: list[PublishedMessage] = []
        self._logs: dict[str, TopicLog] = {}
        self._rng = random.Random(0)
        self._numbers = count(1)
        self._delayed: list[tuple[float, int, OutboxMessage]] = []

    def log(self, topic: str) -> TopicLog:
        """Return a topic, made at its first use."""
        if topic not in self._logs:
            self._logs[topic] = TopicLog(topic, len(self._logs) + 1)
        return self._logs[topic]

    def lp(self, message: OutboxMessage) -> Lp:
        """Return a message's LP."""
        if message.key is not None:
            return lp_of(message.key.encode())
        return random_lp(self._rng) if message.dedup_id is None else lp_of_unkeyed(message.dedup_id.encode())

    def first_of(self, message: OutboxMessage) -> StoredAt | None:
        """Return where the first message with its dedup id is."""
        return None if message.dedup_id is None else self.log(message.topic).ids.get(token(message))

    def append(self, message: OutboxMessage, source: int, *, known: bool = False) -> StoredAt:
        """Store a message, unless it is a duplicate; a `known` one was listed as published before."""
        check_message(message)
        first = self.first_of(message)
        if first is not None:
            return first._replace(duplicate=True)
        log, lp = self.log(message.topic), self.lp(message)
        log.seqs[source, lp] += 1
        identity = Identity(source, lp, log.seqs[source, lp])
        at_ms = round(self.clock.now().timestamp() * 1000)
        log.records.append(record_of(message, len(log.records) + 1, identity, at_ms))
        stored = StoredAt(log.partition, len(log.records), identity)
        if message.dedup_id is not None:
            log.ids[token(message)] = stored
        if not known:
            self.published.append(published_of(message))
        return stored

    def append_numbered(self, message: OutboxMessage, lp: int, seq: int) -> None:
        """Store a message that a database has numbered."""
        log, at_ms = self.log(message.topic), round(self.clock.now().timestamp() * 1000)
        log.records.append(record_of(message, len(log.records) + 1, Identity(TABLE, lp, seq), at_ms))
        self.published.append(published_of(message))

    def next_number(self) -> int:
        """Return the number of a delayed message."""
        return next(self._numbers)

    def delay(self, message: OutboxMessage, due_s: float, number: int) -> None:
        """Keep a message until its time, by the clock's seconds."""
        heapq.heappush(self._delayed, (due_s, number, message))
        self.published.append(published_of(message, delayed=True))

    def waits(self, number: int) -> bool:
        """Whether a delayed message waits."""
        return number in self.waiting

    @property
    def waiting(self) -> list[int]:
        """The numbers of the delayed messages."""
        return [number for _, number, _ in self._delayed]

    def cancel(self, number: int) -> None:
        """Forget a delayed message."""
        self._delayed = [entry for entry in self._delayed if entry[1] != number]
        heapq.heapify(self._delayed)

    def release_due(self) -> bool:
        """Store all that is due; say whether anything was."""
        before = len(self._delayed)
        while self._delayed and self._delayed[0][0] <= self.clock.seconds():
            self.append(heapq.heappop(self._delayed)[2], OUTBOX, known=True)
        return len(self._delayed) < before

    def next_due_s(self) -> float:
        """Return seconds until a message is due, or infinity."""
        return max(0.0, self._delayed[0][0] - self.clock.seconds()) if self._delayed else float("inf")


def check_message(message: OutboxMessage) -> None:
    """Raise BodyTooLarge as a topic of the default limit does."""
    check_body(message.topic, message.body, limit_of(len(message.body), DEFAULT_BODY_LIMIT))


def token(message: OutboxMessage) -> bytes:
    """Return what its dedup id is remembered by."""
    return token_of(None if message.key is None else message.key.encode(), encode_dedup_id(message.dedup_id))
