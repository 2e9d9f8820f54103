"""Select records that continue their chains; encode them for binary COPY."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from mqlayer.archive.stream_reader import ArchiveInput, Entry, is_command, offset_of
from mqlayer.domain.message import NO_KEY
from mqlayer.domain.tags import TAGS_HEADER, tags_of
from mqlayer.errors import Conflict

COPY: Final = (
    "COPY mqlayer_archive.record (topic_id, batch, version, partition_id, log_offset, source, lp, seq, published_at, "
    "archived_at, key, tags, headers, body) FROM STDIN (FORMAT binary)"
)
"""Not a named query: COPY can't be prepared."""

OPENING: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
ENDING: Final = b"\xff\xff"

_START: Final = struct.Struct(">hiiiqiiii")
_MIDDLE: Final = struct.Struct(">iqiqihiqiqiqi")
_SIZE: Final = struct.Struct(">i")
_NO_HEADERS: Final = struct.Struct(">iii")
_ARRAY: Final = struct.Struct(">iIIII")
_NULL: Final = b"\xff\xff\xff\xff"
_TEXT_OID: Final = 25
_EPOCH_MS: Final = 946_684_800_000
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_LAST_MS: Final = 253_402_300_799_999
"""Year 9999, the last that Python reads."""

_TAGGED: Final = f'"{TAGS_HEADER}":'.encode()
_decode: Final = msgspec.json.Decoder(dict[str, str]).decode
_encode: Final = msgspec.json.Encoder().encode

Pair = tuple[int, int]
NOTHING: Final = -2
"""The last seq of an unarchived chain."""
NO_END: Final = 2**62


class LpChain:
    """A source's position in an LP: `last` read, `stored` in the archive.

    `first`: first seq of a new stretch, else 0. Seqs above `end` are not archived here.
    """

    __slots__ = ("end", "first", "last", "lp", "segment", "source", "stored")

    def __init__(self, source: int, lp: int, last: int, segment: int, end: int) -> None:
        self.source, self.lp, self.last, self.stored, self.segment, self.end = source, lp, last, last, segment, end
        self.first = 0


class SeqGap(NamedTuple):
    """Missing seqs between `after` and `next_seq`, the record at `offset`."""

    source: int
    lp: int
    after: int
    next_seq: int
    offset: int
    accepted: bool


class PartitionChains:
    """A partition's chains, loaded per source, kept between batches."""

    def __init__(self, partition: ArchiveInput) -> None:
        self.partition = partition
        self._of: dict[tuple[bytes, bytes], LpChain] = {}
        self._sources: set[bytes] = set()

    def unknown(self, entries: Iterable[Entry]) -> list[int]:
        """Return sources without loaded marks."""
        found = {entry[1][1].split(b":", 1)[0] for entry in entries if not is_command(entry)}
        return sorted(int(text) for text in found - self._sources if text.isdigit())

    def met(self, entry: Entry) -> tuple[LpChain | None, int]:
        """Return a record's chain (None: not loaded) and seq."""
        try:
            source, lp, seq, _ = entry[1][1].split(b":", 3)
            return self.chain_of(source, lp), int(seq)
        except ValueError as error:
            raise self._unreadable(entry, "has no identity") from error

    def known(self, entry: Entry) -> tuple[LpChain, int]:
        """As `met`. Raises Conflict if not loaded."""
        chain, seq = self.met(entry)
        if chain is None:
            raise self._unreadable(entry, "has no identity")
        return chain, seq

    def _unreadable(self, entry: Entry, what: str) -> Conflict:
        return Conflict(
            f"the record at offset {offset_of(entry)} of partition {self.partition.partition} {what}",
            "somebody wrote it by hand; delete it (XDEL), then accept the gap",
        )

    def missing(self) -> list[int]:
        """Return the seal's sources without loaded marks."""
        return sorted({source for source, _, _ in self._sealed() if b"%d" % source not in self._sources})

    def short(self) -> list[tuple[LpChain, int]]:
        """Return chains that end below the seal's marks, with these.

        Omits unarchived chains, which may predate archiving.
        """
        ends = [(self.chain_of(b"%d" % source, b"%d" % lp), seq) for source, lp, seq in self._sealed()]
        return [(chain, seq) for chain, seq in ends if chain is not None and NOTHING != chain.last < seq]

    def _sealed(self) -> list[tuple[int, int, int]]:
        marks = self.partition.marks or {}
        return sorted((*map(int, name.split(":")), seq) for name, seq in marks.items())  # type: ignore[misc]

    def load(self, sources: Iterable[int], marks: Iterable[tuple[int, int, int, int]]) -> None:
        """Load marks: source, LP, last seq, segment."""
        self._sources |= {b"%d" % source for source in sources}
        for source, lp, last, segment in marks:
            self._of[b"%d" % source, b"%d" % lp] = self._chain(source, lp, last, segment)

    def chain_of(self, source: bytes, lp: bytes) -> LpChain | None:
        """Return a chain; None if not loaded."""
        chain = self._of.get((source, lp))
        if chain is None and source in self._sources:
            chain = self._of[source, lp] = self._chain(int(source), int(lp), NOTHING, 0)
        return chain

    def changed(self) -> list[LpChain]:
        """Return the chains ahead of the archive."""
        return [chain for chain in self._of.values() if chain.last != chain.stored]

    def settle(self, segment: int) -> None:
        """Mark everything read as archived."""
        for chain in self.changed():
            chain.stored, chain.first, chain.segment = chain.last, 0, segment

    def rows(self, entries: Sequence[Entry], at: int, start: bytes, archived_us: int, pages: list[bytes]) -> int:
        """Append COPY rows from index `at`; stop at an entry that needs a decision, and return its index.

        Decisions: unloaded chain, gap, command record. Raises Conflict for an unreadable record.
        """
        chains, cut, middle, no_headers = self._of, self.partition.cut, _MIDDLE.pack, _NO_HEADERS.pack
        index = at
        try:
            for index in range(at, len(entries)):
                entry_id, fields = entries[index]
                source, lp, seq_text, facts = fields[1].split(b":", 3)
                seq = int(seq_text)
                chain = chains.get((source, lp)) or self.chain_of(source, lp)
                if chain is None:
                    return index
                if cut and seq > chain.end:
                    continue
                if seq != chain.last + 1:
                    if seq <= chain.last:
                        continue
                    if chain.last != NOTHING:
                        return index
                    chain.first = seq
                chain.last = seq
                key, body = fields[3], fields[5]
                plain = facts.isdigit()
                ms, headers = (facts, no_headers(-1, -1, len(body))) if plain else _headers(facts, len(body))
                size = len(key)
                if key == NO_KEY:
                    size, key = -1, b""
                published_us = (min(int(ms), _LAST_MS) - _EPOCH_MS) * 1_000
                placed = middle(
                    8, int(entry_id[:-2]), 8, chain.source, 2, chain.lp, 8, seq, 8, published_us, 8, archived_us, size
                )
                pages += (start, placed, key, headers, body)
        except (IndexError, ValueError, struct.error, msgspec.MsgspecError) as error:
            if is_command(entries[index]):
                return index
            raise self._unreadable(entries[index], "is none that the archive can hold") from error
        return len(entries)

    def _chain(self, source: int, lp: int, last: int, segment: int) -> LpChain:
        marks = self.partition.marks or {}
        return LpChain(source, lp, last, segment, marks.get(f"{source}:{lp}", NO_END) if self.partition.cut else NO_END)


def row_start(partition: ArchiveInput, batch: int) -> bytes:
    """Return the start of a batch's rows."""
    return _START.pack(14, 4, partition.topic_id, 8, batch, 4, partition.version, 4, partition.partition)


def microseconds(at: datetime) -> int:
    """Return a time in COPY's form."""
    past = at - _EPOCH
    return (past.days * 86_400 + past.seconds) * 1_000_000 + past.microseconds


def _headers(facts: bytes, body_size: int) -> tuple[bytes, bytes]:
    ms, _, text = facts.partition(b":")
    tags = _NULL
    if _TAGGED in text:
        headers = _decode(text)
        value = headers.pop(TAGS_HEADER, None)
        if value is not None:
            tags = _array([tag.encode() for tag in tags_of(value)])
        text = _encode(headers) if headers else b""
    shown = _SIZE.pack(len(text)) + text if text else _NULL
    return ms, tags + shown + _SIZE.pack(body_size)


def _array(items: list[bytes]) -> bytes:
    body = b"".join(_SIZE.pack(len(item)) + item for item in items)
    head = _ARRAY.pack(1, 0, _TEXT_OID, len(items), 1)
    return _SIZE.pack(len(head) + len(body)) + head + body
