"""A receiver's view of each partition: whether it pays to ask it now, and what tells when it does again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from mqlayer.errors import MqlayerError
from mqlayer.groups.pop_partitions import PopPartition
from mqlayer.redis.keys import partition_keys, pop_keys
from mqlayer.redis.pop_scripts import NoBatch, PopGroupPartition, ReceiveRequest, Scope

RECHECK_S: Final = 1.0
"""A partition is asked this often whatever its signs say."""
FRUITLESS_S: Final = 0.05
"""How long a partition rests that told of news and had none for us: many appends to a key that waits cost no more."""
AFTER_ERROR_S: Final = 0.5


@dataclass(slots=True)
class PartitionView:
    """A partition, and what it said last. Times are of this process's clock, in s."""

    info: PopPartition
    group_partition: PopGroupPartition
    quiet: NoBatch | None = None
    """Its last answer, if that was "nothing"; None: ask."""
    due_at: float = math.inf
    paused_until: float = 0.0
    woken: bool = False
    command_seen: bool = False
    unanswered: ReceiveRequest | None = None
    """What it was asked without an answer: asked again under the same attempt, it gives the same batch."""
    refused: int = 0
    """The epoch under which it refused, to see whether Postgres has given out another one since."""
    put_off_count: int = 0
    last_error: MqlayerError | None = None
    """Why it could not be asked the last time."""
    marks: Mapping[str, int] = field(default_factory=dict)

    def set_quiet(self, answer: NoBatch, now: float) -> None:
        """Note that there is nothing for us at this time."""
        if self.woken:
            self.paused_until = now + FRUITLESS_S
        if self.quiet is None or self.quiet.next_offset != answer.next_offset:
            self.command_seen = False
        free_at = now + answer.wait_ms / 1000 + 0.001 if answer.wait_ms >= 0 else math.inf
        self.quiet, self.due_at, self.woken = answer, min(free_at, now + RECHECK_S), False

    def pause(self, now: float, last_error: MqlayerError | None = None) -> None:
        """Leave it alone for a while, then ask it: it could not be asked, or somebody else has to act first."""
        self.paused_until, self.quiet, self.last_error = now + AFTER_ERROR_S, None, last_error

    def put_off(self, now: float) -> None:
        """Leave it alone for a moment, longer each time: its seal is about to be recorded."""
        self.pause(now)
        self.paused_until = now + min(AFTER_ERROR_S, FRUITLESS_S * 2**self.put_off_count)
        self.put_off_count += 1

    def is_due(self, now: float) -> bool:
        """Say whether to ask it now."""
        return now >= self.paused_until and (self.quiet is None or self.woken or now >= self.due_at)

    def due_in(self, now: float) -> float:
        """Return when to ask it at the latest."""
        due_at = 0.0 if self.quiet is None or self.woken else self.due_at
        return max(0.0, max(due_at, self.paused_until) - now)

    def watched(self, now: float) -> dict[bytes, bytes]:
        """Return what to wait for: keys of streams, and the entries behind which news begin."""
        if self.quiet is None or now < self.paused_until:
            return {}
        wake = pop_keys(self.group_partition.prefix, self.group_partition.partition, self.group_partition.group_id).wake
        streams = {wake: b"%d-0" % self.quiet.wakes}
        if self.quiet.status == "empty":
            # The command record of a sealed partition has the number of the last message, with 1 to 9 behind the dash.
            last = b"%d-%d" % (self.quiet.next_offset - 1, 9 if self.command_seen else 0)
            streams[self.log] = last
        return streams

    @property
    def log(self) -> bytes:
        """The stream of the partition."""
        return partition_keys(self.group_partition.prefix, self.group_partition.partition).log


def view_of(one: PopPartition, *, prefix: str, group_id: int, scope: Scope) -> PartitionView:
    """Return a partition that was not asked yet."""
    share = one.rate.whole_share if one.rate is not None else None
    group_partition = PopGroupPartition(
        prefix, one.partition, group_id, scope, one.epoch or 0, one.start, one.seek, share
    )
    return PartitionView(one, group_partition)
