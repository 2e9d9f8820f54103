"""Parked keys and dead messages of a group, in memory; the rules are those of `parking/store.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from mqlayer.domain.message import NO_KEY, Identity, ParkedRecord, Record
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.domain.routing import PartitionId
from mqlayer.parking import (
    DeadLetterEntry,
    FailedAttempt,
    KeyEntry,
    KeyRef,
    KeyState,
    KeyUpdate,
    ParkingBatch,
    ParkingCapacity,
    ParkingResult,
    ParkingStore,
    Span,
)
from mqlayer.postgres.database import Database
from mqlayer.testing.clock import TestClock


@dataclass(slots=True)
class MemoryKey:
    """A parked key. `due_s`: by the clock's seconds; None until somebody releases it."""

    cause: str
    attempts: int
    due_s: float | None
    records: list[ParkedRecord] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of its messages."""
        return sum(len(record.m) + len(record.key) + len(record.body) for record in self.records)


class MemoryParking(ParkingStore):
    """One group's store."""

    def __init__(self, group_id: int, rules: RetryRules, clock: TestClock) -> None:
        super().__init__(cast("Database", None), group_id, "test")
        self._rules, self._clock = rules, clock
        self.parked: dict[KeyRef, MemoryKey] = {}
        self.dead_letters: list[DeadLetterEntry] = []
        self.handled: list[Record] = []

    def release(self, ref: KeyRef) -> None:
        """Make a key due, with all of its attempts before it."""
        key = self.parked[ref]
        key.due_s, key.attempts = self._clock.seconds(), 0

    def keys(self, span: Span, named: Sequence[KeyRef] | None = None) -> list[KeyState]:
        """Return the parked keys."""
        del span
        now = self._clock.seconds()
        return [
            KeyState(ref, key.cause, key.attempts, None, False, None if key.due_s is None else key.due_s - now)
            for ref, key in self.parked.items()
            if named is None or ref in named
        ]

    def dead(self, span: Span) -> set[Identity]:
        """Return the dead messages."""
        del span
        return {entry.record.identity for entry in self.dead_letters}

    def changes(self, after: int, upto: int) -> None:
        """Return None: any key may have changed."""
        del after, upto

    def add_attempts(self, notes: Iterable[FailedAttempt]) -> None:
        """Forget failed attempts: those of the test are in its failures."""
        del notes

    def write(self, partition: PartitionId, epoch: int, batch: ParkingBatch) -> ParkingResult:
        """Write a batch."""
        del partition, epoch
        result = ParkingResult()
        capacity = self._room()
        for entry in [] if capacity.full else batch.entries:
            self.parked.setdefault(entry.ref, MemoryKey(entry.cause, entry.attempts, self._due_s(entry.wait_s)))
        self._put_all(batch, capacity, result)
        self.dead_letters += batch.dead_letters
        for update in batch.updates:
            self._update(update, result)
        return result

    def _room(self) -> ParkingCapacity:
        rules, keys = self._rules, self.parked.values()
        return ParkingCapacity(
            sum(len(key.records) for key in keys),
            sum(key.size for key in keys),
            rules.parked_messages_limit,
            rules.parked_bytes_limit,
            rules.key_messages_limit,
            rules.key_bytes_limit,
            rules.parked_keys_limit,
        )

    def _put_all(self, batch: ParkingBatch, capacity: ParkingCapacity, result: ParkingResult) -> None:
        if capacity.full:
            result.refused_keys = {entry.ref for entry in batch.entries} - set(self.parked)
            result.full = dict.fromkeys(result.refused_keys, capacity.full)
        heads = {entry.ref for entry in batch.entries}
        for ref, record in batch.messages:
            key = self.parked.get(ref)
            if ref in result.refused_keys:
                result.refused_messages.add(record.identity)
            elif key is None:
                result.unparked.add(ref)
            elif limit := result.full.get(ref) or capacity.limit_of(
                len(key.records), key.size, alone=ref.name[:1] == NO_KEY
            ):
                result.full[ref] = limit
                result.refused_messages.add(record.identity)
            else:
                # The head of a new key is counted in the key already.
                before = 0 if ref in heads else batch.attempts.get(record.identity, 0)
                heads.discard(ref)
                key.records.append(ParkedRecord.of(_plain(record), attempts=before, redriven=False))

    def _update(self, update: KeyUpdate, result: ParkingResult) -> None:
        key = self.parked[update.ref]
        ended = [record.identity for record in update.handled]
        self.handled += update.handled
        if update.dead_letter is not None:
            self.dead_letters.append(update.dead_letter)
            ended.append(update.dead_letter.record.identity)
        key.records = [record for record in key.records if record.identity not in ended]
        if ended:
            key.attempts = 0
        if update.go_on:
            result.next[update.ref] = self._hand_out(update, key)
        elif update.entry is not None:
            self._wait(key, update.entry)

    def _hand_out(self, update: KeyUpdate, key: MemoryKey) -> list[ParkedRecord]:
        records = key.records[: 1 if update.alone else update.count]
        if not records:
            del self.parked[update.ref]
            return []
        # A new head has its own attempts.
        key.attempts = key.attempts or records[0].attempts
        return [
            ParkedRecord.of(_plain(record), attempts=record.attempts if at else key.attempts, redriven=False)
            for at, record in enumerate(records)
        ]

    def _wait(self, key: MemoryKey, entry: KeyEntry) -> None:
        key.cause, key.attempts, key.due_s = entry.cause, entry.attempts, self._due_s(entry.wait_s)

    def _due_s(self, wait_s: float | None) -> float | None:
        return None if wait_s is None else self._clock.seconds() + wait_s


def _plain(record: Record) -> tuple[int, bytes, bytes, bytes]:
    return record.offset, record.m, record.key, record.body
