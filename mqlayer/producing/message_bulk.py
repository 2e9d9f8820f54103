"""A bulk call's messages, checked, encoded, cut into appends."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Final, cast

from mqlayer.domain.names import BATCH_BYTES_LIMIT, BATCH_COUNT_LIMIT, KEY_LIMIT, with_headers
from mqlayer.domain.routing import Lp, random_lp
from mqlayer.errors import InvalidInput
from mqlayer.producing.listeners import BatchListener
from mqlayer.producing.message import (
    Message,
    ReferenceMessage,
    chunks_of,
    facts_bulk,
    lp_and_key,
    lp_and_token,
    reference_of,
    whole_body,
)
from mqlayer.producing.send_queues import NO_KEY_BULK, PartitionQueue, PendingSend, TopicQueues
from mqlayer.redis.wire import LINE_END, bulk_head
from mqlayer.traces import TRACEPARENT

OVERHEAD_BYTES: Final = 64

Positions = Sequence[int]


class MessageBulk:
    """One call's messages, checked and encoded. `trace`: headers of those without. Raises for invalid input."""

    def __init__(
        self,
        topic: TopicQueues,
        messages: Sequence[Message],
        rng: random.Random,
        *,
        eager: bool = False,
        trace: Mapping[str, str] | None = None,
    ) -> None:
        try:
            keys = [message.key for message in messages]
            bodies = [message.body for message in messages]
            extras = [
                message.headers or message.tags or message.dedup_id is not None or type(message) is ReferenceMessage
                for message in messages
            ]
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
            headers = [message.headers if not trace else _traced(message.headers, trace) for message in messages]
            self.facts = [
                facts_bulk(at_ms, one, message.tags, reference_of(message))
                for one, message in zip(headers, messages, strict=True)
            ]
        self.common_facts = facts_bulk(at_ms, trace)
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

    def parts(
        self, listener: BatchListener, deadline: float, owners: list[PendingSend | None]
    ) -> Iterator[list[tuple[Lp, PendingSend]]]:
        """Yield parts to queue at once: an append's messages, or with dedup ids, one; set `owners`."""
        if self.tokens:
            for position, placed in enumerate(self.singly(listener, deadline)):
                owners[position] = placed[1]
                yield [placed]
        else:
            for _, positions in self.chunks():
                yield list(self.pending_sends(positions, listener, deadline, owners).items())

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


def _traced(headers: Mapping[str, str] | None, trace: Mapping[str, str]) -> Mapping[str, str]:
    if not headers:
        return trace
    return headers if TRACEPARENT in headers else with_headers(headers, trace)
