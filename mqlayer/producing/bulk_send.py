"""Publish many messages from a thread."""

from __future__ import annotations

import time
from typing import cast

from mqlayer.domain.routing import Lp
from mqlayer.errors import PublishError
from mqlayer.producing.engine import ProducerEngine
from mqlayer.producing.guarded_in_flight import GuardedInFlight
from mqlayer.producing.listeners import ThreadListener
from mqlayer.producing.message_bulk import MessageBulk, Positions
from mqlayer.producing.node_sender import NodeSender
from mqlayer.producing.receipts import Receipts
from mqlayer.producing.send_queues import PartitionQueue, PendingSend
from mqlayer.producing.send_wait import await_all


class BulkSend:
    """One call's batches, sent by the caller if it leads the sender."""

    def __init__(self, bulk: MessageBulk, engine: ProducerEngine, deadline: float) -> None:
        self._bulk, self._engine, self._guarded, self._deadline = bulk, engine, engine.guarded, deadline
        self._max_in_flight = engine.options.max_in_flight
        self._listener = ThreadListener(len(bulk))
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
        owners = cast("list[PendingSend]", self._owners)
        return await_all(self._guarded, self._listener, self._bulk.topic.name, owners, self._deadline)

    def _send_all(self) -> None:
        for partition_queue, positions in self._bulk.chunks():
            pending_sends = self._bulk.pending_sends(positions, self._listener, self._deadline, self._owners)
            try:
                self._send(partition_queue, pending_sends)
            except PublishError as error:
                self._drop(positions, error)

    def _send(self, partition_queue: PartitionQueue, pending_sends: dict[Lp, PendingSend]) -> None:
        guarded, topic = self._guarded, self._bulk.topic
        count = sum(pending.count for pending in pending_sends.values())
        size = sum(pending.size for pending in pending_sends.values())
        sender = self._engine.senders[partition_queue.node.key]
        if self._holds(sender) and guarded.has_room(count, size) and not guarded.closed:
            sender.send_now(topic, pending_sends, partition_queue)
            return
        if not guarded.has_room(count, size):
            self._hand_over()
        with guarded as in_flight:
            guarded.wait_for_room(count, size, self._deadline)
            now = time.monotonic()
            for lp, pending in pending_sends.items():
                in_flight.accept(topic, lp, pending, now)
                in_flight.wake_for(pending)

    def _holds(self, sender: NodeSender) -> bool:
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
        owners = cast("list[PendingSend]", self._owners)
        with self._guarded:
            for pending in dict.fromkeys(owners[position] for position in positions):
                self._listener.drop(pending, error)


def send_singly(bulk: MessageBulk, guarded: GuardedInFlight, deadline: float) -> Receipts:
    """Publish messages singly, for dedup ids. Raises PartlyPublished."""
    listener = ThreadListener(len(bulk))
    owners: list[PendingSend] = []
    error: PublishError | None = None
    for lp, pending in bulk.singly(listener, deadline):
        owners.append(pending)
        with guarded as in_flight:
            if error is None:
                try:
                    guarded.wait_for_room(1, pending.size, deadline)
                except PublishError as refusal:
                    error = refusal
            if error is None:
                in_flight.accept(bulk.topic, lp, pending, time.monotonic())
                in_flight.wake_for(pending)
            else:
                # Never queued: a later message must not overtake a failed one.
                listener.drop(pending, error)
    return await_all(guarded, listener, bulk.topic.name, owners, deadline)
