"""A shared member's results: messages settled, or given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from mqlayer.consuming.engine.events import MemberEvents
from mqlayer.consuming.shared.failure_queues import FailureQueues
from mqlayer.consuming.shared.fetched_batch import FetchedBatch
from mqlayer.consuming.shared.partitions import SharedPartition
from mqlayer.consuming.shared.prefetch import Prefetch
from mqlayer.consuming.shared.settler import AttemptStart, Nack, Settlement, SharedSettler
from mqlayer.domain.routing import NodeId
from mqlayer.redis.outcomes import RangeOutcome

BEGIN_WAIT_S: Final = 15.0


class SharedResults:
    """Hands results to settlers, claims' to the failure writer. Thread-safe."""

    def __init__(
        self,
        settler_of: Callable[[NodeId], SharedSettler | None],
        queues: FailureQueues,
        prefetch: Prefetch,
        events: MemberEvents,
    ) -> None:
        self._settler_of, self._queues, self._prefetch, self._events = settler_of, queues, prefetch, events

    def handled(self, batch: FetchedBatch, offsets: Sequence[int]) -> None:
        """Count and settle handled messages."""
        self._events.handled(len(offsets))
        self.end(batch, offsets, "h")

    def unmatched(self, batch: FetchedBatch, offsets: Sequence[int]) -> None:
        """Count and settle filtered and void messages."""
        self._events.unmatched(len(offsets))
        self.end(batch, offsets, "u")

    def expired(self, batch: FetchedBatch, offsets: Sequence[int]) -> None:
        """Report and settle messages whose time to live ended."""
        self._events.expired(batch, len(offsets))
        self.end(batch, offsets, "e")

    def end(self, batch: FetchedBatch, offsets: Sequence[int], outcome: RangeOutcome) -> None:
        """Settle messages."""
        if batch.claim is None:
            settler = self._settler_of(batch.assignment.node)
            if settler is not None:
                settler.settle(Settlement(batch, offsets, outcome))
        elif outcome == "h":
            self._queues.handled_claim(batch)
        else:
            self._prefetch.end(batch, offsets)

    def nack(self, batch: FetchedBatch, offset: int, ms: int, failed: int | None) -> None:
        """Give a message back for later; `failed`: its count, None: unchanged."""
        if batch.claim is None:
            settler = self._settler_of(batch.assignment.node)
            if settler is not None:
                settler.nack(Nack(batch, offset, ms, failed))
            return
        before = batch.claim.record.attempts
        self._queues.nack_claim(batch.claim.ref, before if failed is None else failed, ms / 1000)
        self._prefetch.end(batch, (offset,))

    def release(self, batch: FetchedBatch, offsets: Sequence[int]) -> None:
        """Give back unstarted messages at once."""
        for offset in offsets:
            self.nack(batch, offset, 0, None)

    def release_unfinished(self) -> None:
        """Give back what neither runs nor is being settled."""
        running = self._prefetch.running()
        for batch in self._prefetch.batches():
            settler = self._settler_of(batch.assignment.node)
            unsent = settler.unsent(batch) if settler is not None else set()
            self.release(batch, [o for o in batch.open if (id(batch), o) not in running and o not in unsent])

    def command_read(self, partition: SharedPartition, entry_id: bytes) -> None:
        """Settle a command record."""
        settler = self._settler_of(partition.info.node)
        if settler is not None:
            settler.settle_command(partition.group_partition, entry_id)

    def begin(self, batch: FetchedBatch) -> bool:
        """Count a suspect's attempt; False where it must not start."""
        settler = self._settler_of(batch.assignment.node)
        offset = batch.records[0].offset
        if settler is None or batch.dropped:
            return False
        begin = AttemptStart(batch, offset)
        settler.count_attempt(begin)
        begin.counted.wait(BEGIN_WAIT_S)
        if begin.attempts is None:
            # Another member has it, or the node did not answer; then it comes again.
            self._prefetch.lose(batch, (offset,))
            return False
        batch.count_failed({offset: begin.attempts - 1}, suspect=True)
        return True
