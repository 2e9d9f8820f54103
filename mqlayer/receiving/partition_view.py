"""When to ask a partition, and which streams to watch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from mqlayer.domain.key_classes import key_class_rule
from mqlayer.domain.tags import TagFilter
from mqlayer.domain.time_to_live import Expiry, TimeToLive
from mqlayer.errors import MqlayerError
from mqlayer.groups.pop_partitions import PopPartition
from mqlayer.redis.keys import partition_keys, pop_keys
from mqlayer.redis.pop_scripts import NoBatch, PopClasses, PopGroupPartition, ReceiveRequest, Scope

RECHECK_S: Final = 1.0
"""Longest time between two calls."""
FRUITLESS_S: Final = 0.05
"""Pause after news without messages."""
AFTER_ERROR_S: Final = 0.5
UNANSWERED_LIMIT: Final = 256
"""A partition remembers as many batches."""


@dataclass(slots=True)
class PartitionView:
    """A partition's last answer. Times: `time.monotonic()`."""

    info: PopPartition
    group_partition: PopGroupPartition
    quiet: NoBatch | None = None
    """The last answer, if empty; None: ask."""
    due_at: float = math.inf
    paused_until: float = 0.0
    woken: bool = False
    command_seen: bool = False
    unanswered: dict[str, ReceiveRequest] = field(default_factory=dict)
    """By attempt id: requests whose messages reached no caller. The same attempt gets the same batch."""
    refused: int = 0
    put_off_count: int = 0
    last_error: MqlayerError | None = None
    marks: Mapping[str, int] = field(default_factory=dict)
    none_parked: int = 0
    """A batch's `parking` under which Postgres had no parked key."""
    parked_due_at: float = math.inf
    """When Postgres may give a parked message."""
    expiry: Expiry | None = None
    """Judges messages' ages."""

    def listed(self, info: PopPartition, now: float) -> None:
        """Take over a newer list's facts."""
        self.info = info
        self.expiry = TimeToLive(info.message_ttl_s, info.expired).judged_by(info.now_ms, now)
        self.parked_due_at = math.inf if info.parked_due_in_s is None else now + info.parked_due_in_s

    @property
    def wanted(self) -> TagFilter | None:
        """The group's filter."""
        return TagFilter.of(self.info.tag_filter)

    def set_quiet(self, answer: NoBatch, now: float) -> None:
        """Note an empty answer."""
        if self.woken:
            self.paused_until = now + FRUITLESS_S
        if self.quiet is None or self.quiet.next_offset != answer.next_offset:
            self.command_seen = False
        free_at = now + answer.wait_ms / 1000 + 0.001 if answer.wait_ms >= 0 else math.inf
        self.quiet, self.due_at, self.woken = answer, min(free_at, now + RECHECK_S), False

    def note_unanswered(self, request: ReceiveRequest) -> None:
        """Note a request until its messages reach a caller."""
        self.unanswered[request.attempt_id] = request
        if len(self.unanswered) > UNANSWERED_LIMIT:
            del self.unanswered[next(iter(self.unanswered))]

    def repeated(self, request: ReceiveRequest) -> ReceiveRequest:
        """Return a request under the oldest unanswered attempt id that fits."""
        fitting: Iterable[str] = (name for name, one in self.unanswered.items() if one.limit <= request.limit)
        return request._replace(attempt_id=next(iter(fitting), request.attempt_id))

    def pause(self, now: float, last_error: MqlayerError | None = None) -> None:
        """Pause after an error, or until another process acts."""
        self.paused_until, self.quiet, self.last_error = now + AFTER_ERROR_S, None, last_error

    def put_off(self, now: float) -> None:
        """Back off until the seal is recorded."""
        self.pause(now)
        self.paused_until = now + min(AFTER_ERROR_S, FRUITLESS_S * 2**self.put_off_count)
        self.put_off_count += 1

    def is_due(self, now: float) -> bool:
        """Whether to ask."""
        return now >= self.paused_until and (self.quiet is None or self.woken or now >= self.due_at)

    def due_in(self, now: float) -> float:
        """Return seconds until due."""
        due_at = 0.0 if self.quiet is None or self.woken else self.due_at
        return max(0.0, max(due_at, self.paused_until) - now)

    def watched(self, now: float) -> dict[bytes, bytes]:
        """Return streams, each with its last entry seen."""
        if self.quiet is None or now < self.paused_until:
            return {}
        wake = pop_keys(self.group_partition.prefix, self.group_partition.partition, self.group_partition.group_id).wake
        streams = {wake: b"%d-0" % self.quiet.wakes}
        if self.quiet.status == "empty":
            # A command record's id is <last offset>-1 to -9.
            last = b"%d-%d" % (self.quiet.next_offset - 1, 9 if self.command_seen else 0)
            streams[self.log] = last
        return streams

    @property
    def log(self) -> bytes:
        """The stream's key."""
        return partition_keys(self.group_partition.prefix, self.group_partition.partition).log


def view_of(one: PopPartition, *, prefix: str, group_id: int, scope: Scope) -> PartitionView:
    """Return a new view."""
    share = one.rate.whole_share if one.rate is not None else None
    classes = _classes_of(one) if scope == "key" else None
    group_partition = PopGroupPartition(
        prefix, one.partition, group_id, scope, one.epoch or 0, one.start, one.seek, share, classes
    )
    return PartitionView(one, group_partition)


def _classes_of(one: PopPartition) -> PopClasses | None:
    rule, rate = key_class_rule(one.key_class), one.rate_of_class
    return None if rule is None else PopClasses(rule, one.class_concurrency, rate and rate.whole_share)
