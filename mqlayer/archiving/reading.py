"""Pieces of a partition's stream, each of bounded size, from the armed run of its node.

The next piece is asked for before the last one is worked on, so that the node reads while this process works. Offsets
are dense, so pieces are ranges of them; where some are missing a piece is short, or empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from mqlayer.domain.routing import NodeId
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.nodes import NodeConnection, raise_for_reply

PIECE_BYTES: Final = 64_000_000
PIECE_RECORDS: Final = 500
"""Bounds of one reply: by its records, and by its bytes even where every body is as large as the topic takes."""

Entry = list[Any]
"""As the server sends it: [id, [m, .., k, .., b, ..]]."""


@dataclass(frozen=True, slots=True)
class Source:
    """A partition to archive. `version`: of the route that brought it into force; `piece`: records in one reply.

    `marks`: those that it was sealed with; `cut`: its successors hold what is beyond them; `armed_at`: when its node
    was armed, before anything is read of it.
    """

    topic_id: int
    partition: int
    node: NodeId
    version: int
    lp_from: int
    lp_to: int
    piece: int
    seal_id: str | None
    marks: Mapping[str, int] | None
    cut: bool
    armed_at: datetime | None


def piece_of(body_limit: int) -> int:
    """Return how many records one reply may hold."""
    return max(1, min(PIECE_RECORDS, PIECE_BYTES // body_limit))


class Pieces:
    """What stands in a stream from an offset on, piece by piece. The command record is an entry like others."""

    def __init__(self, line: NodeConnection, prefix: str, source: Source, since: int) -> None:
        self._line, self._log, self._count = line, partition_keys(prefix, source.partition).log, source.piece
        self._asked = 0
        self.run_id = line.connect().run_id
        # The command record's id is the last offset's with 1 behind the dash.
        (reply,) = line.call([(b"XRANGE", self._log, b"%d-1" % (since - 1), b"+", b"COUNT", self._count)])
        self.first: list[Entry] = raise_for_reply(reply, line.node.address)
        self.more = len(self.first) == self._count
        """Whether something may be behind the first piece."""

    def __iter__(self) -> Iterator[list[Entry]]:
        """Yield pieces up to the first that is not full; what is behind that begins another stretch."""
        piece, follows = self.first, self.more
        following = offset_of(piece[-1]) + 1 if follows else 0
        while piece:
            if follows:
                self._ask(following)
                following += self._count
            yield piece
            if not follows:
                return
            piece = self._receive()
            follows = len(piece) >= self._count

    def close(self) -> None:
        """Read what was asked for and nobody wants any more: the line is free for other commands again."""
        while self._asked:
            self._receive()

    def _ask(self, first: int) -> None:
        bounds = (b"%d-1" % (first - 1), b"%d-0" % (first + self._count - 1))
        self._line.send([(b"XRANGE", self._log, *bounds)])
        self._asked += 1

    def _receive(self) -> list[Entry]:
        asked, self._asked = self._asked, 0
        (reply,) = self._line.receive(1)
        # A line that failed owes nothing.
        self._asked = asked - 1
        piece: list[Entry] = raise_for_reply(reply, self._line.node.address)
        return piece


def offset_of(entry: Entry) -> int:
    """Return an entry's offset; the command record has that of the last record before it."""
    return int(entry[0][:-2])


def is_command(entry: Entry) -> bool:
    """Say whether an entry is the command record: its id is the only one that does not end in -0."""
    return bool(entry[0][-1:] != b"0")
