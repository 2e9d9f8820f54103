"""What only reads: one typed call for each script, as in `partition_scripts`, and one for marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from mqlayer.domain.offsets import OffsetRange
from mqlayer.domain.tags import TagFilter
from mqlayer.redis.keys import group_keys, partition_keys
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import FailureHistory, failures_of, marks_command, marks_reply

FIND_LIMIT: Final = 1_000
"""How many offsets one call of key_find looks at, at most."""
SELECT_LIMIT: Final = 1_000
"""How many records one call of log_select looks at, at most."""


MARKS_PER_CALL: Final = 2_000
"""How many marks one call of marks_read tells, at most: about a millisecond of the node, and Lua unpacks some 8,000."""
CALLS_PER_WRITE: Final = 64
"""How many of these calls are sent at once."""


class UnsettledHead(NamedTuple):
    """A message that is not settled, without its body; `failures` is None where no attempt of it failed."""

    offset: int
    m: bytes
    key: bytes
    failures: FailureHistory | None


class GroupPosition(NamedTuple):
    """Where a group is in a partition, all of it at one time of the node's clock.

    `position`: the first offset that is not settled; `settled`: how many above it are; `owner` and `epoch`: who has the
    pull lock, '' for nobody; `head`: the message at the position, None where nothing waits.
    """

    now_ms: int
    next_offset: int
    position: int
    settled: int
    owner: str
    epoch: int
    head: UnsettledHead | None

    @property
    def unsettled(self) -> int:
        """How many messages the group has yet to settle."""
        return max(0, self.next_offset - self.position - self.settled)


def position_command(
    connection: NodeConnection, prefix: str, partition: int, group_id: int, *, start: int, seek: int
) -> Command:
    """Return the command that tells where a group is; it starts here since its last seek."""
    keys, group = partition_keys(prefix, partition), group_keys(prefix, partition, group_id)
    return connection.script("group_position", (keys.meta, keys.log, *group), start, seek)


def position_reply(reply: Any, address: str) -> GroupPosition | None:
    """Return what group_position says; None where the node does not have the partition."""
    status, *facts = raise_for_reply(reply, address)
    if status == b"absent":
        return None
    now_ms, next_offset, position, settled, owner, epoch, *head = facts
    return GroupPosition(now_ms, next_offset, position, settled, owner.decode(), epoch, _head(*head) if head else None)


class KeySearchResult(NamedTuple):
    """How many messages of a key are not settled in some offsets, and the first of them."""

    messages: int
    head: UnsettledHead | None


def find_command(
    connection: NodeConnection,
    prefix: str,
    partition: int,
    group_id: int,
    *,
    key: bytes,
    first: int,
    count: int,
    seek: int,
) -> Command:
    """Return the command that looks for a key's messages at `count` offsets (FIND_LIMIT at most) from the first on."""
    log, group = partition_keys(prefix, partition).log, group_keys(prefix, partition, group_id)
    return connection.script("key_find", (log, *group), key, first, count, seek)


def find_reply(reply: Any, key: bytes, address: str) -> KeySearchResult:
    """Return what key_find says."""
    _, count, *head = raise_for_reply(reply, address)
    return KeySearchResult(count, _head(head[0], head[1], key, head[2]) if head else None)


class SelectedRecords(NamedTuple):
    """What a filter takes of a partition, up to an offset; `more` may be behind that.

    `unmatched`: ranges of offsets with messages that it does not take; `entries`: as streams give them, of those whose
    tags have the wanted hashes, and the command record.
    """

    last: int
    more: bool
    unmatched: list[OffsetRange]
    entries: list[Any]


def select_command(
    connection: NodeConnection,
    prefix: str,
    partition: int,
    wanted: TagFilter,
    *,
    after: int,
    max_scanned: int,
    limit: int,
    size: int,
) -> Command:
    """Return the command that reads what a filter takes behind an offset.

    It looks at so many records (SELECT_LIMIT at most), and returns `limit` of them at most, and no more once their
    bodies have `size` bytes.
    """
    log, max_scanned = partition_keys(prefix, partition).log, min(max_scanned, SELECT_LIMIT)
    return connection.script(
        "log_select", (log,), after, max_scanned, limit, max(1, size), wanted.match, *wanted.hashes
    )


def select_reply(reply: Any, address: str) -> SelectedRecords:
    """Return what log_select says."""
    _, last, more, flat, entries = raise_for_reply(reply, address)
    return SelectedRecords(last, more == 1, list(zip(flat[::2], flat[1::2], strict=True)), entries)


def marks_of(
    connection: NodeConnection, prefix: str, wanted: Sequence[tuple[int, Sequence[tuple[int, int]]]]
) -> list[tuple[str, list[int]]]:
    """Return, for each of (partition, (source, LP)s), its state, '' for none, and these marks, both of one moment.

    At most MARKS_PER_CALL marks for each. One round trip for 64 of them. Raises StoreUnavailable.
    """
    found: list[tuple[str, list[int]]] = []
    for at in range(0, len(wanted), CALLS_PER_WRITE):
        commands = [
            marks_command(connection, prefix, partition, [b"%d:%d" % name for name in names])
            for partition, names in wanted[at : at + CALLS_PER_WRITE]
        ]
        found += [marks_reply(reply, connection.node.address) for reply in connection.call(commands)]
    return found


def _head(offset: int, m: bytes, key: bytes, noted: bytes) -> UnsettledHead:
    failures = failures_of(noted) if noted else None
    return UnsettledHead(offset, m, key, failures if failures and failures.attempts else None)
