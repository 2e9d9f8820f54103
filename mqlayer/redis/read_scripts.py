"""Typed calls of read-only scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from mqlayer.domain.message import Record
from mqlayer.domain.offsets import OffsetRange
from mqlayer.domain.tags import TagFilter
from mqlayer.redis.keys import group_keys, partition_keys
from mqlayer.redis.node_connection import Command, NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import FailureHistory, failures_of, marks_command, marks_reply

FIND_LIMIT: Final = 1_000
"""Offsets per call."""
SELECT_LIMIT: Final = 1_000
"""Records per call."""
SEARCH_LIMIT: Final = 500
"""Records per call: about 1 ms of the node."""

MARKS_PER_CALL: Final = 2_000
"""About 1 ms of the node."""
CALLS_PER_WRITE: Final = 64


class UnsettledHead(NamedTuple):
    """An unsettled message without its body."""

    offset: int
    m: bytes
    key: bytes
    failures: FailureHistory | None


class GroupPosition(NamedTuple):
    """A group's state in a partition, at one moment.

    `position`: first unsettled offset, of message `head`; `settled`: how many above it; `owner`: '' for none.
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
        """Messages left to settle."""
        return max(0, self.next_offset - self.position - self.settled)


def position_command(
    connection: NodeConnection, prefix: str, partition: int, group_id: int, *, start: int, seek: int
) -> Command:
    """Read a group's position; `start` counts since `seek`."""
    keys, group = partition_keys(prefix, partition), group_keys(prefix, partition, group_id)
    return connection.script("group_position", (keys.meta, keys.log, *group), start, seek)


def position_reply(reply: Any, address: str) -> GroupPosition | None:
    """Return the position; None: absent partition."""
    status, *facts = raise_for_reply(reply, address)
    if status == b"absent":
        return None
    now_ms, next_offset, position, settled, owner, epoch, *head = facts
    return GroupPosition(now_ms, next_offset, position, settled, owner.decode(), epoch, _head(*head) if head else None)


class KeySearchResult(NamedTuple):
    """A key's unsettled messages."""

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
    """Search up to FIND_LIMIT offsets for a key."""
    log, group = partition_keys(prefix, partition).log, group_keys(prefix, partition, group_id)
    return connection.script("key_find", (log, *group), key, first, count, seek)


def find_reply(reply: Any, key: bytes, address: str) -> KeySearchResult:
    """Parse key_find's reply."""
    _, count, *head = raise_for_reply(reply, address)
    return KeySearchResult(count, _head(head[0], head[1], key, head[2]) if head else None)


class SelectedRecords(NamedTuple):
    """Filtered records up to offset `last`; `more`: call again.

    `unmatched`: other messages' ranges; `entries`: matched by hash, so compare names; with the command record.
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
    """Scan up to `max_scanned` records (SELECT_LIMIT at most) after an offset.

    Stops at `limit` matches or `size` bytes of bodies.
    """
    log, max_scanned = partition_keys(prefix, partition).log, min(max_scanned, SELECT_LIMIT)
    return connection.script(
        "log_select", (log,), after, max_scanned, limit, max(1, size), wanted.match, *wanted.hashes
    )


def select_reply(reply: Any, address: str) -> SelectedRecords:
    """Parse log_select's reply."""
    _, last, more, flat, entries = raise_for_reply(reply, address)
    return SelectedRecords(last, more == 1, list(zip(flat[::2], flat[1::2], strict=True)), entries)


class FoundRecord(NamedTuple):
    """A record without its body."""

    offset: int
    m: bytes
    key: bytes

    @property
    def record(self) -> Record:
        """The record, with an empty body."""
        return Record(self.offset, self.m, self.key, b"")


class RecordFilter(NamedTuple):
    """Wanted records. `begins`, `contains`: of `m`, as text; empty: any."""

    begins: bytes = b""
    contains: bytes = b""
    key: bytes | None = None


def search_command(
    connection: NodeConnection, prefix: str, partition: int, wanted: RecordFilter, *, first: int, past: int, limit: int
) -> Command:
    """Search up to SEARCH_LIMIT records of [first, past)."""
    log = partition_keys(prefix, partition).log
    key = () if wanted.key is None else (wanted.key,)
    return connection.script(
        "log_search", (log,), first, past, SEARCH_LIMIT, limit, wanted.begins, wanted.contains, len(key), *key or (b"",)
    )


def search_reply(reply: Any, address: str) -> tuple[int, list[FoundRecord]]:
    """Return the first unsearched offset, and the matches."""
    _, following, flat = raise_for_reply(reply, address)
    return following, [FoundRecord(*flat[at : at + 3]) for at in range(0, len(flat), 3)]


def marks_of(
    connection: NodeConnection, prefix: str, wanted: Sequence[tuple[int, Sequence[tuple[int, int]]]]
) -> list[tuple[str, list[int]]]:
    """Return state ('' if absent) and up to MARKS_PER_CALL marks, for each (partition, (source, LP)s).

    Raises StoreUnavailable.
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
