"""Read one node for a shared member: new and due messages; extend those in hand. Epoch checks travel with the reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mqlayer.consuming.engine.class_rates import ClassRatePoller
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.node_service import NodeService
from mqlayer.consuming.engine.rate_limiter import RatePoller
from mqlayer.consuming.shared.deferrals import Deferrals
from mqlayer.consuming.shared.failure_queues import FailureQueues
from mqlayer.consuming.shared.fetched_batch import FetchedBatch
from mqlayer.consuming.shared.intake import SharedIntake
from mqlayer.consuming.shared.partitions import SharedPartition, SharedPartitions
from mqlayer.consuming.shared.prefetch import Prefetch
from mqlayer.consuming.shared.results import SharedResults
from mqlayer.domain.message import pop_command, records_of
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.randomness import RNG
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import Fenced, Refused
from mqlayer.redis.shared_scripts import (
    AT_ONCE,
    DueMessages,
    EpochInForce,
    SharedDrained,
    is_missing_group,
    native_group,
    shared_acquire_command,
    shared_acquire_reply,
    shared_count_reply,
    shared_due_command,
    shared_due_reply,
    shared_extend_command,
    shared_extend_reply,
    shared_nack_command,
    shared_read_command,
    shared_reclaim_command,
)

log = event_logger(__name__)

READ_COUNT: Final = 500
DUE_COUNT: Final = 100
BLOCK_MS: Final = 100
"""Longest blocking read; delays the notice of new partitions."""
DEFERRED_WAIT_S: Final = 0.01
"""Pause while deferred messages find no room, and nothing new comes."""
TIME_SLICE_MS: Final = 10
"""Shortest blocking read while partitions take turns."""
RETRY_S: Final = (0.05, 1.0)
AFTER_ERROR_S: Final = 0.2
RECLAIM_PART: Final = 3.0
"""Searches for silent members' messages per visibility timeout; one a second at least."""


class SharedReader(NodeService):
    """The reading thread of one node."""

    def __init__(
        self,
        connection: NodeConnection,
        core: MemberCore,
        partitions: SharedPartitions,
        prefetch: Prefetch,
        results: SharedResults,
        queues: FailureQueues,
        *,
        name: str,
    ) -> None:
        super().__init__(connection, partitions.node_lost, name=name, work="reading", retry_s=RETRY_S[1])
        self._settings, self._rate_limiter = core.settings, core.settings.rate_limiter
        self._member_id, self._group_id = core.member_id, core.group.group_id
        self._partitions, self._prefetch, self._results, self._queues = partitions, prefetch, results, queues
        self._visibility_timeout_s = prefetch.visibility_timeout_s
        self._extend_limit_s = core.options.extend_limit_s
        self._extend_at = self._reclaim_at = 0.0
        self._at = 0
        self._poller = RatePoller(self._rate_limiter)
        self._class_poller = ClassRatePoller(connection, prefetch.classes)
        self._deferrals = Deferrals(connection, core.member_id, prefetch.classes, self._rate_limiter, partitions.void)
        self._intake = SharedIntake(self._settings, partitions, prefetch, results, queues, self._deferrals)
        # Whether the last read found anything.
        self._found = False

    def _await_work(self) -> None:
        """Wait in the read."""

    def _retry_wait_s(self) -> float:
        return RNG.uniform(*RETRY_S)

    def _try_pass(self) -> bool:
        well, node_id = super()._try_pass(), self._connection.node.node_id
        self._prefetch.note_node(node_id, unreachable=not well)
        if not well:
            # The node may have assigned messages whose reply was lost.
            for partition in self._partitions.on(node_id):
                partition.note_unknown()
        return well

    def _serve(self) -> None:
        now = clock()
        for batch, offsets in self._prefetch.reclaim_slow():
            self._results.handled(batch, offsets)
        if self._prefetch.stopping:
            for batch, offsets in self._prefetch.take_unstarted(self._is_here):
                self._results.release(batch, offsets)
        partitions = [
            partition
            for partition in self._partitions.on(self._connection.node.node_id)
            if now >= partition.paused_until
        ]
        self._acquire([partition for partition in partitions if not partition.acquired])
        acquired = [partition for partition in partitions if partition.acquired]
        for partition in acquired:
            if partition.has_unknown:
                self._release_unknown(partition)
        if now >= self._extend_at:
            self._extend_at = now + self._extend()
        if now >= self._reclaim_at:
            self._reclaim_at = now + self._reclaim(acquired)
        self._read_some(acquired)

    def _read_some(self, acquired: list[SharedPartition]) -> None:
        capacity = self._prefetch.capacity()
        if capacity > 0 and self._poller.due():
            self._ask_rates(acquired)
        self._class_poller.poll(partition.group_partition for partition in acquired)
        capacity = self._rate_limiter.available(capacity)
        if self._prefetch.stopping:
            capacity, acquired = 0, []
        waits = any(partition.deferred for partition in acquired)
        if waits and not self._take_deferred(acquired) and not self._found:
            # Settled messages make room and wake this thread; a read would hold it.
            self.wake.wait(DEFERRED_WAIT_S)
            self.wake.clear()
        scanned, count = self._deferrals.scan(acquired, READ_COUNT)
        if scanned:
            self._read(scanned, 1 if waits else BLOCK_MS, count * len(scanned))
        elif acquired and capacity > 0:
            self._read(*self._next_read(acquired, capacity), capacity)
        else:
            # Ended messages wake this thread; rate comes with time.
            extend_s = max(0.0, self._extend_at - clock())
            self.wake.wait(min(BLOCK_MS / 1000, extend_s, self._rate_limiter.wait_s() or BLOCK_MS / 1000))
            self.wake.clear()

    def _take_deferred(self, partitions: list[SharedPartition]) -> bool:
        asked = clock()
        taken = self._deferrals.take(partitions)
        for partition, messages in taken:
            self._intake.put_due(partition, messages, asked)
        return any(messages.records for _, messages in taken)

    def _ask_rates(self, partitions: list[SharedPartition]) -> None:
        commands = self._poller.commands(self._connection, (one.group_partition for one in partitions))
        if commands:
            self._poller.add(self._connection.call(commands), self._connection.node.address)

    def _is_here(self, batch: FetchedBatch) -> bool:
        return batch.group_partition is not None and batch.assignment.node == self._connection.node.node_id

    def _acquire(self, partitions: list[SharedPartition]) -> None:
        if not partitions:
            return
        replies = self._connection.call(
            [
                shared_acquire_command(self._connection, partition.group_partition, afresh=True)
                for partition in partitions
            ]
        )
        for partition, reply in zip(partitions, replies, strict=True):
            self._follow(partition, reply)

    def _next_read(self, partitions: list[SharedPartition], capacity: int) -> tuple[list[SharedPartition], int]:
        if capacity >= len(partitions):
            return partitions, BLOCK_MS
        at = self._at % len(partitions)
        self._at = at + capacity
        return (partitions[at:] + partitions[:at])[:capacity], max(
            TIME_SLICE_MS, BLOCK_MS * capacity // len(partitions)
        )

    def _read(self, partitions: list[SharedPartition], longest_ms: int, capacity: int) -> None:
        count = max(1, min(READ_COUNT, capacity // len(partitions)))
        # Messages in hand must be extended meanwhile.
        extend_ms = int((self._extend_at - clock()) * 1000)
        block_ms = max(
            1,
            min(
                [
                    longest_ms,
                    extend_ms,
                    *(partition.due_in_ms + 1 for partition in partitions if partition.due_in_ms >= 0),
                ]
            ),
        )
        group_partitions = [partition.group_partition for partition in partitions]
        read = shared_read_command(
            group_partitions, self._member_id, group_id=self._group_id, count=count, block_ms=block_ms
        )
        asked = clock()
        streams, *checks = self._connection.call(
            [read, *(shared_acquire_command(self._connection, group_partition) for group_partition in group_partitions)]
        )
        if is_missing_group(streams):
            log.error("shared_group_missing", extra={"address": self._connection.node.address, "group": self._group_id})
            for partition in partitions:
                partition.acquire_again()
            return
        raise_for_reply(streams, self._connection.node.address)
        failpoint("shared.after_read")
        self._accept(partitions, streams, checks, asked)

    def _accept(self, partitions: list[SharedPartition], streams: Any, checks: Sequence[Any], asked: float) -> None:
        by_key: dict[bytes, Any] = dict(streams) if streams else {}
        self._found = bool(by_key)
        wanted = self._partitions.on(self._connection.node.node_id)
        for partition, reply in zip(partitions, checks, strict=True):
            entries = by_key.get(partition.group_partition.log)
            if partition not in wanted:
                # Paused, or under another epoch, since the read began.
                self._release(partition, entries or [])
            elif not self._follow(partition, reply):
                if entries:
                    partition.note_unknown()
            elif entries:
                self._intake.put(partition, entries, asked)
        for partition in partitions:
            if (
                partition.acquired
                and partition.due_in_ms == 0
                and self._rate_limiter.available(self._prefetch.capacity()) > 0
            ):
                self._read_due(partition)
        self._deferrals.send()

    def _follow(self, partition: SharedPartition, reply: Any) -> bool:
        answer = shared_acquire_reply(reply, self._connection.node.address)
        if isinstance(answer, EpochInForce):
            if answer.newly_acquired:
                self._partitions.load_dead(partition, answer.committed)
            partition.confirm(answer.due_in_ms, answer.deferred)
            return True
        if isinstance(answer, SharedDrained):
            partition.drain(clock() + AFTER_ERROR_S)
            self._queues.drained(partition.group_partition.partition, partition.group_partition.epoch, answer.seal_id)
            return True
        partition.lose(clock() + AFTER_ERROR_S)
        if isinstance(answer, Fenced):
            self._partitions.fenced(partition)
        else:
            facts = {
                "partition": partition.group_partition.partition,
                "word": answer.status,
                "address": self._connection.node.address,
            }
            log.error("partition_refused", extra=facts)
            self._partitions.refused(partition)
        return False

    def _release(self, partition: SharedPartition, entries: list[Any]) -> None:
        command = pop_command(entries)
        back = [(record.offset, 0, None) for record in records_of(entries)]
        if back:
            self._connection.call(
                [shared_nack_command(self._connection, partition.group_partition, self._member_id, back)]
            )
        if command is not None:
            self._results.command_read(partition, command.entry_id)

    def _read_due(self, partition: SharedPartition) -> None:
        capacity = self._rate_limiter.available(self._prefetch.capacity())
        limit, asked = max(1, min(DUE_COUNT, capacity)), clock()
        (reply,) = self._connection.call(
            [shared_due_command(self._connection, partition.group_partition, self._member_id, limit)]
        )
        answer = shared_due_reply(reply, self._connection.node.address)
        if not isinstance(answer, DueMessages):
            return
        failpoint("shared.after_due")
        self._intake.put_due(partition, answer, asked, finds_room=False)

    def _release_unknown(self, partition: SharedPartition) -> None:
        connection = self._connection
        known = {
            o
            for batch in self._prefetch.batches()
            if batch.group_partition == partition.group_partition
            for o in batch.open
        }
        after = b"-"
        while True:
            pending = (
                "XPENDING",
                partition.group_partition.log,
                native_group(self._group_id),
                after,
                "+",
                AT_ONCE,
                self._member_id,
            )
            found = raise_for_reply(connection.call([pending])[0], connection.node.address)
            unknown = [int(one[0][:-2]) for one in found if one[0].endswith(b"-0") and int(one[0][:-2]) not in known]
            if unknown:
                back = shared_nack_command(
                    connection, partition.group_partition, self._member_id, [(o, 0, None) for o in unknown]
                )
                if isinstance(shared_count_reply(connection.call([back])[0], connection.node.address), Fenced):
                    return
            if len(found) < AT_ONCE:
                break
            after = b"(" + found[-1][0]
        partition.unknown_released()

    def _extend(self) -> float:
        now = clock()
        every = self._visibility_timeout_s / 3
        hung = self._prefetch.hung(self._extend_limit_s)
        for batch in self._prefetch.batches():
            group_partition = batch.group_partition
            if (
                group_partition is None
                or batch.assignment.node != self._connection.node.node_id
                or now - batch.extended_at < every
            ):
                continue
            still = batch.open
            offsets = [offset for offset in still if (id(batch), offset) not in hung]
            asked = clock()
            for at in range(0, len(offsets), AT_ONCE):
                command = shared_extend_command(
                    self._connection, group_partition, self._member_id, offsets[at : at + AT_ONCE]
                )
                answer = shared_extend_reply(self._connection.call([command])[0], self._connection.node.address)
                if isinstance(answer, Fenced):
                    break
                self._prefetch.lose(batch, answer)
            else:
                batch.extended(asked, set(still) - set(offsets))
        return every / 4

    def _reclaim(self, partitions: list[SharedPartition]) -> float:
        visibility_timeout_ms = max(1, round(self._visibility_timeout_s * 1000))
        replies = self._connection.call(
            [
                shared_reclaim_command(self._connection, partition.group_partition, visibility_timeout_ms)
                for partition in partitions
            ]
        )
        for partition, reply in zip(partitions, replies, strict=True):
            answer = shared_count_reply(reply, self._connection.node.address)
            if isinstance(answer, Refused):
                partition.acquire_again()
            elif isinstance(answer, int) and answer:
                partition.messages_due()
                log.info(
                    "messages_reclaimed", extra={"partition": partition.group_partition.partition, "count": answer}
                )
        return RNG.uniform(0.5, 1.0) * min(1.0, self._visibility_timeout_s / RECLAIM_PART)
