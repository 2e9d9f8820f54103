"""Publishing many messages in one call."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final, cast

from mqlayer.domain.names import BATCH_BYTES_LIMIT, BATCH_COUNT_LIMIT, KEY_LIMIT
from mqlayer.domain.routing import Lp, random_lp
from mqlayer.errors import InvalidInput, MqlayerError, PartlyPublished, PublishError
from mqlayer.producing.in_flight import InFlight, notify_all
from mqlayer.producing.message import (
    NO_KEY_BULK,
    Message,
    Receipts,
    chunks_of,
    facts_bulk,
    indices_within,
    lp_and_key,
    lp_and_token,
    whole_body,
)
from mqlayer.producing.node_sender import NodeSender
from mqlayer.producing.pending_send import BatchListener, Listener, PendingSend, Receipt
from mqlayer.producing.send_queues import PartitionQueue, TopicQueues
from mqlayer.producing.send_wait import await_all, unknown_outcome
from mqlayer.redis.wire import LINE_END, bulk_head

OVERHEAD_BYTES: Final = 64

Positions = Sequence[int]


class MessageBulk:
    """One call's messages, checked and encoded. Raises for invalid input."""

    def __init__(
        self, topic: TopicQueues, messages: Sequence[Message], rng: random.Random, *, eager: bool = False
    ) -> None:
        try:
            keys = [message.key for message in messages]
            bodies = [message.body for message in messages]
            extras = [message.headers or message.tags or message.dedup_id is not None for message in messages]
        except AttributeError:
            raise InvalidInput("a batch is a sequence of Message(key, body, headers, tags, dedup_id)") from None
        limit = topic.route.body_limit
        if set(map(type, bodies)) != {bytes} or max(map(len, bodies)) > limit:
            bodies = [whole_body(topic.name, body, limit) for body in bodies]
        self.topic, self.eager = topic, eager
        self.bodies = cast("list[bytes]", bodies)
        self.placed: list[tuple[Lp, bytes]] = (
            [(random_lp(rng), NO_KEY_BULK) if key is None else lp_and_key(key) for key in keys]
            if None in keys
            else list(map(lp_and_key, cast("list[str]", keys)))
        )
        at_ms = time.time_ns() // 1_000_000
        self.facts: list[bytes] | None = None
        self.tokens: list[bytes] = []
        if any(extras):
            self._note_ids(messages)
            self.facts = [facts_bulk(at_ms, message.headers, message.tags) for message in messages]
        self.common_facts = facts_bulk(at_ms, None)
        longest = max(map(len, self.facts)) if self.facts else len(self.common_facts)
        self._largest = OVERHEAD_BYTES + longest + KEY_LIMIT + max(map(len, self.bodies))

    def __len__(self) -> int:
        return len(self.placed)

    def singly(self, listener: BatchListener, deadline: float) -> Iterator[tuple[Lp, PendingSend]]:
        """Yield a pending send per message."""
        for position, (lp, key) in enumerate(self.placed):
            facts = self.common_facts if self.facts is None else self.facts[position]
            body = self.bodies[position]
            size = len(facts) + len(key) + len(body)
            yield (
                lp,
                PendingSend(
                    chunks_of(facts, key, body),
                    1,
                    size,
                    deadline,
                    listener,
                    token=self.tokens[position],
                    eager=self.eager,
                ),
            )

    def _note_ids(self, messages: Sequence[Message]) -> None:
        # Without a key, the dedup id determines the LP.
        if all(message.dedup_id is None for message in messages):
            return
        for position, message in enumerate(messages):
            lp, key = self.placed[position]
            lp, token = lp_and_token(message.key, message.dedup_id, lp)
            self.placed[position] = (lp, key)
            self.tokens.append(token)

    def chunks(self) -> Iterator[tuple[PartitionQueue, Positions]]:
        """Yield chunks of up to 500 messages and 1 MB, partitions in turn."""
        cut = [self._cut(partition_queue, positions) for partition_queue, positions in self._by_partition().items()]
        for round_ in zip_longest(*cut):
            yield from (chunk for chunk in round_ if chunk is not None)

    def pending_sends(
        self, positions: Positions, listener: BatchListener, deadline: float, owners: list[PendingSend | None]
    ) -> dict[Lp, PendingSend]:
        """Return a pending send per LP; set their positions' `owners`."""
        placed, bodies, facts, common = self.placed, self.bodies, self.facts, self.common_facts
        by_lp: dict[Lp, PendingSend] = {}
        for position in positions:
            lp, key = placed[position]
            body = bodies[position]
            if facts is not None:
                common = facts[position]
            size = len(body)
            pending = by_lp.get(lp)
            if pending is None:
                chunks = (common, key, bulk_head(size), body, LINE_END)
                by_lp[lp] = pending = PendingSend(chunks, 1, len(common) + len(key) + size, deadline, listener)
                pending.eager = self.eager
            else:
                pending.chunks += (common, key, bulk_head(size), body, LINE_END)
                pending.count += 1
                pending.size += len(common) + len(key) + size
            owners[position] = pending
        return by_lp

    def _by_partition(self) -> dict[PartitionQueue, Positions]:
        table = self.topic.table
        if table[0] is table[-1]:
            # LP ranges are contiguous, so one partition serves all.
            return {table[0]: range(len(self.placed))}
        by_partition: dict[PartitionQueue, list[int]] = {}
        for position, (lp, _) in enumerate(self.placed):
            by_partition.setdefault(table[lp], []).append(position)
        return dict(by_partition)

    def _cut(self, partition_queue: PartitionQueue, positions: Positions) -> Iterator[tuple[PartitionQueue, Positions]]:
        start = 0
        while start < len(positions):
            chunk = positions[start : start + BATCH_COUNT_LIMIT]
            if len(chunk) * self._largest > BATCH_BYTES_LIMIT:
                chunk = chunk[: self._fitting(chunk)]
            yield partition_queue, chunk
            start += len(chunk)

    def _fitting(self, chunk: Positions) -> int:
        size = 0
        for count, position in enumerate(chunk):
            facts = self.common_facts if self.facts is None else self.facts[position]
            size += OVERHEAD_BYTES + len(facts) + len(self.placed[position][1]) + len(self.bodies[position])
            if size > BATCH_BYTES_LIMIT:
                return max(1, count)
        return len(chunk)


class BulkSend:
    """One call's batches, sent by the calling thread if it can lead the sender."""

    def __init__(self, bulk: MessageBulk, in_flight: InFlight, deadline: float, max_in_flight: int) -> None:
        self._bulk, self._in_flight, self._deadline, self._max_in_flight = bulk, in_flight, deadline, max_in_flight
        self._listener = BatchListener(len(bulk))
        self._owners: list[PendingSend | None] = [None] * len(bulk)
        self._leading: dict[NodeSender, None] = {}

    def run(self) -> Receipts:
        """Publish all. Raises PartlyPublished."""
        try:
            self._send_all()
            for sender in self._leading:
                self._finish(sender)
        finally:
            for sender in self._leading:
                sender.resign()
        return self._receipts()

    def _send_all(self) -> None:
        for partition_queue, positions in self._bulk.chunks():
            pending_sends = self._bulk.pending_sends(positions, self._listener, self._deadline, self._owners)
            try:
                self._send(partition_queue, pending_sends)
            except PublishError as error:
                self._drop(positions, error)

    def _send(self, partition_queue: PartitionQueue, pending_sends: dict[Lp, PendingSend]) -> None:
        in_flight, topic, sender = self._in_flight, self._bulk.topic, partition_queue.sender
        count = sum(pending.count for pending in pending_sends.values())
        size = sum(pending.size for pending in pending_sends.values())
        if self._holds(sender) and in_flight.has_capacity(count, size) and not in_flight.closed_because:
            sender.send_now(topic, pending_sends, partition_queue)
            return
        if not in_flight.has_capacity(count, size):
            self._hand_over()
        with in_flight.lock:
            in_flight.wait_for_capacity(count, size, self._deadline)
            for lp, pending in pending_sends.items():
                in_flight.add(topic, lp, pending)
            now = time.monotonic()
            listeners = [
                listener for pending in pending_sends.values() for listener in in_flight.refuse_eager(pending, now)
            ]
            sender.wake_locked()
        notify_all(listeners)

    def _holds(self, sender: NodeSender) -> bool:
        """Whether we lead a sender that can take an append."""
        if sender not in self._leading:
            if not sender.try_lead():
                return False
            self._leading[sender] = None
        sender.push()
        while sender.unanswered_count >= self._max_in_flight and sender.pull(sender.wait_until(self._deadline)):
            sender.push()
        if sender.good and sender.unanswered_count < self._max_in_flight:
            return True
        del self._leading[sender]
        sender.resign()
        return False

    def _finish(self, sender: NodeSender) -> None:
        while self._listener.remaining and sender.unanswered_count and sender.pull(sender.wait_until(self._deadline)):
            sender.push()

    def _hand_over(self) -> None:
        # The senders' threads free capacity while we wait.
        led, self._leading = self._leading, {}
        for sender in led:
            sender.resign()

    def _drop(self, positions: Positions, error: PublishError) -> None:
        # These messages were never queued.
        with self._in_flight.lock:
            self._listener.any_failed = True
            self._listener.remaining -= len(positions)
            for position in positions:
                pending = self._owners[position]
                if pending is not None:
                    pending.outcome = error

    def _receipts(self) -> Receipts:
        owners = cast("list[PendingSend]", self._owners)
        if self._listener.remaining:
            await_all(self._in_flight, self._listener, owners, self._deadline)
        if self._listener.remaining or self._listener.any_failed:
            raise _partly(self._bulk.topic.name, owners)
        return Receipts(owners)


def send_singly(bulk: MessageBulk, in_flight: InFlight, deadline: float) -> Receipts:
    """Publish messages singly, for dedup ids. Raises PartlyPublished."""
    listener = BatchListener(len(bulk))
    owners: list[PendingSend] = []
    error: PublishError | None = None
    for lp, pending in bulk.singly(listener, deadline):
        owners.append(pending)
        listeners: list[Listener] = []
        with in_flight.lock:
            if error is None:
                try:
                    in_flight.wait_for_capacity(1, pending.size, deadline)
                except PublishError as refusal:
                    error = refusal
            if error is None:
                in_flight.add(bulk.topic, lp, pending)
                listeners = in_flight.refuse_eager(pending, time.monotonic())
                pending.queue.partition_queue.sender.wake_locked()
            else:
                # Never queued: a later message must not overtake a failed one.
                pending.outcome = error
                listener.remaining -= 1
                listener.any_failed = True
        notify_all(listeners)
    if listener.remaining:
        await_all(in_flight, listener, owners, deadline)
    if listener.remaining or listener.any_failed:
        raise _partly(bulk.topic.name, owners)
    return Receipts(owners)


def _partly(topic: str, owners: Sequence[PendingSend]) -> PartlyPublished:
    outcomes: list[Receipt | MqlayerError] = []
    for pending, index in zip(owners, indices_within(owners), strict=True):
        if pending.outcome is None:
            outcomes.append(unknown_outcome(pending, index))
        elif isinstance(pending.outcome, MqlayerError):
            outcomes.append(pending.outcome)
        else:
            outcomes.append(pending.receipt(index))
    errors = [outcome for outcome in outcomes if isinstance(outcome, MqlayerError)]
    partly = PartlyPublished(topic, len(outcomes) - len(errors), len(errors), str(errors[0]) if errors else "")
    partly.outcomes = outcomes
    partly.__cause__ = errors[0] if errors else None
    return partly
