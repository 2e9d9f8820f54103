"""A partition's state on its node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mqlayer.doctor.verify.expected_state import ExpectedGroup
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.read_scripts import GroupPosition, position_command, position_reply

RECORDS_PER_CALL: Final = 500
MAX_BREAKS: Final = 20
TRIES: Final = 3


class ChainBreak(NamedTuple):
    """A record that does not follow its predecessor."""

    offset: int
    name: str
    before: int
    seq: int


@dataclass(slots=True)
class StreamChains:
    """Chains: `<source>:<lp>` -> first and last seq; `breaks`: the first 20."""

    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    breaks: list[ChainBreak] = field(default_factory=list)
    broken: int = 0

    def add(self, name: str, first: int, last: int, *, offset: int) -> None:
        """Add one call's part of a chain."""
        known = self.ranges.get(name)
        if known is not None and first != known[1] + 1:
            self.add_break(ChainBreak(offset, name, known[1], first))
        self.ranges[name] = (known[0] if known else first, last)

    def add_break(self, found: ChainBreak) -> None:
        """Count a break."""
        self.broken += 1
        if len(self.breaks) < MAX_BREAKS:
            self.breaks.append(found)


@dataclass(slots=True)
class NodePartition:
    """A partition on its node.

    `first_kept`: oldest record's offset; `first`: trim position; `records`: without the command; `behind`: offset after
    the last.
    """

    state: str
    topic: str
    lp_from: int
    lp_to: int
    next: int
    first: int
    seal: str
    lost: int
    marks: dict[str, int]
    records: int
    first_kept: int
    positions: dict[int, GroupPosition]
    sealed_for: int = 0
    behind: int = 0
    has_command: bool = False
    chains: StreamChains | None = None


def ask_partition(
    connection: NodeConnection, prefix: str, partition: int, groups: Sequence[ExpectedGroup], *, deep: bool
) -> NodePartition | None:
    """Return a partition's state; None if absent or deleted.

    `chains` is None without `deep`, or if trimming kept interfering.
    """
    actual = _read_state(connection, prefix, partition, groups)
    for _ in range(TRIES if deep else 0):
        if actual is None:
            break
        chains, kept = _chains(connection, partition_keys(prefix, partition).log, actual), actual.first_kept
        actual = _read_state(connection, prefix, partition, groups)
        if actual is not None and actual.first_kept == kept:
            actual.chains = chains
            break
    return actual


def _read_state(
    connection: NodeConnection, prefix: str, partition: int, groups: Sequence[ExpectedGroup]
) -> NodePartition | None:
    keys = partition_keys(prefix, partition)
    positions = [
        position_command(connection, prefix, partition, one.group_id, start=one.start, seek=one.seek) for one in groups
    ]
    # Positions must be as new as the partition: a later look at it would know of trimmed offsets that they do not.
    seen, *replies = connection.call_once(
        [connection.script("partition_read", (keys.log, keys.meta, keys.marks)), *positions]
    )
    found = [position_reply(reply, connection.node.address) for reply in replies]
    known = {group.group_id: position for group, position in zip(groups, found, strict=True) if position is not None}
    return _partition_of(raise_for_reply(seen, connection.node.address), known)


def _partition_of(seen: list[Any], positions: dict[int, GroupPosition]) -> NodePartition | None:
    if seen[0] == b"absent":
        return None
    _, flat, marks, length, first_id, last_id = seen
    meta = {name.decode(): text.decode() for name, text in zip(flat[::2], flat[1::2], strict=True)}
    if meta.get("state") == "deleted":
        return None
    command = last_id[-2:] not in (b"", b"-0")
    following, records = int(meta["next"]), length - command
    return NodePartition(
        state=meta["state"],
        topic=meta.get("topic", ""),
        lp_from=int(meta.get("lp_from", -1)),
        lp_to=int(meta.get("lp_to", -1)),
        next=following,
        first=int(meta.get("first", 1)),
        seal=meta.get("seal", ""),
        lost=int(meta.get("lost", 0)),
        marks={name.decode(): int(seq) for name, seq in zip(marks[::2], marks[1::2], strict=True)},
        records=records,
        first_kept=int(first_id.split(b"-")[0]) if records else following,
        positions=positions,
        sealed_for=int(meta.get("sealed_for", 0)),
        behind=int(last_id.split(b"-")[0]) + 1 if last_id else 0,
        has_command=command,
    )


def _chains(connection: NodeConnection, log: bytes, actual: NodePartition) -> StreamChains:
    """Memory grows with chains, not records."""
    chains, offset = StreamChains(), actual.first_kept
    while offset < actual.next:
        (reply,) = connection.call([connection.script("log_chain", (log,), offset, actual.next, RECORDS_PER_CALL)])
        last, ranges, breaks = raise_for_reply(reply, connection.node.address)
        for at in range(0, len(breaks), 4):
            chains.add_break(ChainBreak(breaks[at], breaks[at + 1].decode(), breaks[at + 2], breaks[at + 3]))
        for at in range(0, len(ranges), 3):
            chains.add(ranges[at].decode(), ranges[at + 1], ranges[at + 2], offset=offset)
        if not last:
            break
        offset = last + 1
    return chains
