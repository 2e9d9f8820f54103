"""Read a partition's stream in bounded pages from the armed run.

The next page is requested before the last is processed. Missing offsets make a page shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from mqlayer.domain.routing import NodeId
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply

PAGE_BYTES: Final = 64_000_000
PAGE_RECORDS: Final = 500
"""Bounds of one reply, even with the largest bodies."""

Entry = list[Any]
"""As sent: [id, [m, .., k, .., b, ..]]."""


@dataclass(frozen=True, slots=True)
class ArchiveInput:
    """A partition to archive.

    `version`: of its first route. `page_size`: records per reply. `marks`: its seal's. `cut`: successors hold later
    records. `armed_at`: its node's arming before the read.
    """

    topic_id: int
    partition: int
    node: NodeId
    version: int
    lp_from: int
    lp_to: int
    page_size: int
    seal_id: str | None
    marks: Mapping[str, int] | None
    cut: bool
    armed_at: datetime | None


def page_size(body_limit: int) -> int:
    """Return the records per reply."""
    return max(1, min(PAGE_RECORDS, PAGE_BYTES // body_limit))


class StreamPages:
    """The stream from an offset on, the command record included."""

    def __init__(self, connection: NodeConnection, prefix: str, source: ArchiveInput, since: int) -> None:
        self._connection, self._log, self._count = (
            connection,
            partition_keys(prefix, source.partition).log,
            source.page_size,
        )
        self._requested = 0
        self.run_id = connection.connect().run_id
        # The command record's id is the last offset's, with -1 to -9.
        (reply,) = connection.call([(b"XRANGE", self._log, b"%d-1" % (since - 1), b"+", b"COUNT", self._count)])
        self.first: list[Entry] = raise_for_reply(reply, connection.node.address)
        self.more = len(self.first) == self._count

    def __iter__(self) -> Iterator[list[Entry]]:
        page, follows = self.first, self.more
        following = offset_of(page[-1]) + 1 if follows else 0
        while page:
            if follows:
                self._ask(following)
                following += self._count
            yield page
            if not follows:
                return
            page = self._receive()
            follows = len(page) >= self._count

    def close(self) -> None:
        """Read pending replies: frees the connection."""
        while self._requested:
            self._receive()

    def _ask(self, first: int) -> None:
        bounds = (b"%d-1" % (first - 1), b"%d-0" % (first + self._count - 1))
        self._connection.send([(b"XRANGE", self._log, *bounds)])
        self._requested += 1

    def _receive(self) -> list[Entry]:
        asked, self._requested = self._requested, 0
        (reply,) = self._connection.receive(1)
        # A failed connection has no pending reply.
        self._requested = asked - 1
        page: list[Entry] = raise_for_reply(reply, self._connection.node.address)
        return page


def offset_of(entry: Entry) -> int:
    """Return an entry's offset; the command record has the last message's."""
    return int(entry[0][:-2])


def is_command(entry: Entry) -> bool:
    """Whether an entry is the command record: no -0 in its id."""
    return bool(entry[0][-1:] != b"0")
