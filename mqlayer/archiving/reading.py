"""Stretches of a partition's stream, in bounded memory, from the armed run of its node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mqlayer.domain.message import CommandRecord, pop_command
from mqlayer.domain.routing import NodeId
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.nodes import NodeConnection, raise_for_reply

RECORDS: Final = 20_000
BYTES: Final = 8_000_000
"""Bounds of a stretch, and so of a batch."""
PIECE_BYTES: Final = 64_000_000
PIECE_RECORDS: Final = 500
"""Bounds of one reply: by its records, and by its bytes even where every body is as large as the topic takes."""


@dataclass(frozen=True, slots=True)
class Source:
    """A partition to archive. `cut`: of the marks it was sealed with, where its successors hold what is beyond."""

    topic_id: int
    partition: int
    node: NodeId
    version: int
    seal_id: str | None
    cut: Mapping[str, int] | None
    piece: int


class Stretch(NamedTuple):
    """What stands in a stream from an offset on: entries as the server sends them, and the run they were read from.

    `command`: the command record, where the stream ends with it here; `more`: whether something may be behind them.
    """

    since: int
    entries: list[Any]
    command: CommandRecord | None
    more: bool
    run_id: str


def piece_of(body_limit: int) -> int:
    """Return how many records one reply may hold."""
    return max(1, min(PIECE_RECORDS, PIECE_BYTES // body_limit))


def read_stretch(line: NodeConnection, prefix: str, source: Source, since: int) -> Stretch:
    """Return what stands from an offset on, bounded. Raises StoreUnavailable, NodeNotArmed."""
    log, run_id = partition_keys(prefix, source.partition).log, line.connect().run_id
    entries: list[Any] = []
    # The command record's id is the last offset's with 1 behind the dash.
    after, size, more = b"%d-1" % (since - 1), 0, True
    while more and size < BYTES and len(entries) < RECORDS:
        (reply,) = line.call([(b"XRANGE", log, after, b"+", b"COUNT", source.piece)])
        piece = raise_for_reply(reply, line.node.address)
        more = len(piece) == source.piece
        entries += piece
        if piece:
            last = piece[-1][0]
            after = b"(" + last
            size += sum(len(fields[5]) + len(fields[1]) for _, fields in piece)
    command = pop_command(entries)
    return Stretch(since, entries, command, more and command is None, run_id)
