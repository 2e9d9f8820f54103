"""An append's request and reply."""

from __future__ import annotations

from typing import Any

from mqlayer.errors import BacklogFull, NodeOutOfMemory, StoreUnavailable
from mqlayer.producing.append_answers import AppendAnswer
from mqlayer.producing.append_batch import AppendBatch
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.partition_scripts import Refused, append_once_reply, append_reply
from mqlayer.redis.wire import append_once_packet, append_packet, append_start
from mqlayer.settings import Settings


def append_request(connection: NodeConnection, batch: AppendBatch, settings: Settings) -> bytes:
    """Return a batch's request, and free its encoding: a repeat encodes again."""
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
        digest, partition = connection.digest("log_append"), partition_queue.partition
        start = append_start(digest, settings.key_prefix, partition, batch.source, partition_queue.backlog_limit)
        packet = append_packet(start, batch.heads, batch.chunks, count=batch.count)
    batch.heads, batch.chunks = [], []
    return packet


def read_reply(batch: AppendBatch, reply: Any, address: str) -> AppendAnswer:
    """Parse the answer. Raises StoreUnavailable if it is unclear."""
    try:
        answer = (append_once_reply if batch.once else append_reply)(reply, address)
    except NodeOutOfMemory as error:
        return error
    if not isinstance(answer, Refused):
        return answer
    if answer.status == "full":
        topic, partition_queue = batch.pending_sends[0].queue.topic.name, batch.partition_queue
        return BacklogFull(topic, partition_queue.partition, partition_queue.backlog_limit)
    if answer.status in ("sealed", "importing", "deleted", "absent"):
        return answer
    raise StoreUnavailable(address, f"unexpected answer to an append: {answer.status} {answer.fact}")
