"""An append on its connection: the request, and what its reply means for the in-flight store."""

from __future__ import annotations

import logging
from typing import Any

from mqlayer.errors import BacklogFull, NodeOutOfMemory, StoreUnavailable
from mqlayer.producing.append_batch import AppendBatch
from mqlayer.producing.in_flight import InFlight
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import AppendReply, Refused, append_once_reply, append_reply
from mqlayer.redis.wire import append_once_packet, append_packet
from mqlayer.settings import Settings

log = logging.getLogger(__name__)


def append_request(connection: NodeConnection, batch: AppendBatch, settings: Settings) -> bytes:
    """Return a batch's request, and free what the batch encoded: a repeat encodes another one."""
    partition_queue = batch.partition_queue
    if batch.once:
        packet = append_once_packet(
            connection,
            settings.key_prefix,
            partition_queue.partition,
            batch.source,
            batch.chunks,
            count=batch.count,
            backlog=partition_queue.backlog_limit,
            window_ms=int(settings.dedup_window_s * 1000),
        )
    else:
        packet = append_packet(
            connection,
            settings.key_prefix,
            partition_queue.partition,
            batch.source,
            batch.heads,
            batch.chunks,
            count=batch.count,
            backlog=partition_queue.backlog_limit,
        )
    batch.heads, batch.chunks = [], []
    return packet


def apply_reply(
    in_flight: InFlight, batch: AppendBatch, reply: Any, *, address: str, replicas: int | None, now: float
) -> None:
    """Apply a reply. Raises StoreUnavailable if it is unclear."""
    try:
        answer = (append_once_reply if batch.once else append_reply)(reply, address)
    except NodeOutOfMemory as error:
        in_flight.answers.refused(batch, error, now)
        return
    if isinstance(answer, AppendReply):
        if answer.outcomes is None:
            in_flight.answers.stored(batch, answer.offset, replicas)
        else:
            in_flight.answers.mixed(batch, answer.offset, answer.outcomes, replicas)
    elif isinstance(answer, list):
        in_flight.answers.each(batch, answer, replicas)
    else:
        _refused(in_flight, batch, answer, address, now)


def _refused(in_flight: InFlight, batch: AppendBatch, answer: Refused, address: str, now: float) -> None:
    topic, partition_queue = batch.pending_sends[0].queue.topic.name, batch.partition_queue
    if answer.status == "full":
        full = BacklogFull(topic, partition_queue.partition, partition_queue.backlog_limit)
        in_flight.answers.refused(batch, full, now)
    elif answer.status in ("sealed", "importing", "deleted", "absent"):
        facts = {"topic": topic, "partition": partition_queue.partition, "word": answer.status}
        log.info("publish_rerouted", extra=facts)
        in_flight.answers.misrouted(batch)
    else:
        raise StoreUnavailable(address, f"unexpected answer to an append: {answer.status} {answer.fact}")
