"""Queues of a shared member's failure writer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from mqlayer.consuming.shared.fetched_batch import FetchedBatch
from mqlayer.consuming.shared.store import ClaimRef
from mqlayer.domain.routing import PartitionId
from mqlayer.parking import DeadLetterEntry, FailedAttempt

AT_ONCE: Final = 100


class DeadLetterWrite(NamedTuple):
    """A message to write as dead."""

    batch: FetchedBatch
    dead_letter: DeadLetterEntry


class FailureQueues:
    """Any thread adds; the failure writer takes."""

    def __init__(self) -> None:
        self.wake = threading.Event()
        """Set for a pass of the failure writer."""
        self.suspects: deque[FetchedBatch] = deque()
        self.dead_letters: deque[DeadLetterWrite] = deque()
        self.attempts: deque[FailedAttempt] = deque()
        # Claims: handled ones, and retries.
        self.handled: deque[FetchedBatch] = deque()
        self.nacks: deque[tuple[ClaimRef, int, float]] = deque()
        self._poll = False
        self._drained: dict[PartitionId, tuple[int, str]] = {}

    def poll_soon(self) -> None:
        """Check for redriven messages."""
        self._poll = True
        self.wake.set()

    def take_poll(self) -> bool:
        """Say, once, whether to check now."""
        wanted, self._poll = self._poll, False
        return wanted

    def suspect(self, batch: FetchedBatch) -> None:
        """Check a suspect, then handle it."""
        self.suspects.append(batch)
        self.wake.set()

    def dead_letter(self, batch: FetchedBatch, dead_letter: DeadLetterEntry) -> None:
        """Write a message as dead."""
        self.dead_letters.append(DeadLetterWrite(batch, dead_letter))
        self.wake.set()

    def attempt(self, attempt: FailedAttempt) -> None:
        """Record a failed attempt."""
        self.attempts.append(attempt)

    def handled_claim(self, batch: FetchedBatch) -> None:
        """End a handled claim."""
        self.handled.append(batch)
        self.wake.set()

    def nack_claim(self, ref: ClaimRef, failed: int, wait_s: float) -> None:
        """Retry a claimed message."""
        self.nacks.append((ref, failed, wait_s))
        self.wake.set()

    def drained(self, partition: int, epoch: int, seal_id: str) -> None:
        """Report a drained partition until Postgres records it."""
        self._drained[PartitionId(partition)] = (epoch, seal_id)
        self.wake.set()

    def report_drained(self, report: Callable[[PartitionId, int, str], None]) -> None:
        """Report drained partitions."""
        for partition, (epoch, seal_id) in list(self._drained.items()):
            report(partition, epoch, seal_id)
            self._drained.pop(partition, None)


def write_each(waiting: deque[Any], write: Callable[[list[Any]], None]) -> None:
    """Write what waits; put back the unwritten."""
    while waiting:
        some = [waiting.popleft() for _ in range(min(AT_ONCE, len(waiting)))]
        try:
            write(some)
        except BaseException:
            waiting.extendleft(reversed(some))
            raise
