"""Records of streams as rows of the archive: what of a stretch is new, and its form for COPY.

Rows are made in COPY's binary form: against the text form it spares Postgres the parsing of eleven columns, and both
sides the escaping of the body (measured: `bench archive`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from mqlayer.archiving.reading import Source, Stretch
from mqlayer.domain.message import NO_KEY
from mqlayer.domain.tags import TAGS_HEADER, tags_of
from mqlayer.errors import StoreUnavailable
from mqlayer.postgres.database import Connection

COPY: Final = (
    "COPY mqlayer_archive.record (topic_id, batch, version, partition_id, log_offset, source, lp, seq, published_at, "
    "archived_at, key, tags, headers, body) FROM STDIN (FORMAT binary)"
)
"""Here, not among the named queries: COPY can't be prepared."""

OPENING: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
ENDING: Final = b"\xff\xff"
CHUNK_ROWS: Final = 1_000

_START: Final = struct.Struct(">hiiiqiiii")
_MIDDLE: Final = struct.Struct(">iqiiihiqiqiqi")
_SIZE: Final = struct.Struct(">i")
_NO_HEADERS: Final = struct.Struct(">iii")
_ARRAY: Final = struct.Struct(">iIIII")
_TEXT_OID: Final = 25
_EPOCH_MS: Final = 946_684_800_000
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_LAST_MS: Final = 253_402_300_799_999
"""The end of the year 9999: the last that Python can read again."""

_TAGGED: Final = f'"{TAGS_HEADER}":'.encode()
_decode: Final = msgspec.json.Decoder(dict[str, str]).decode
_encode: Final = msgspec.json.Encoder().encode

Pair = tuple[int, int]
"""A source and an LP."""


@dataclass(frozen=True, slots=True)
class Known:
    """What the archive has of a source and LP. `accepted`: a gap up to before this seq may be passed; 0: none."""

    last: int
    accepted: int


class Gap(NamedTuple):
    """Seqs that are not there: after `after`, before `next_seq`; behind it comes the record at an offset."""

    pair: Pair
    after: int
    next_seq: int
    offset: int
    accepted: bool


class New(NamedTuple):
    """A record that is not in the archive yet."""

    offset: int
    pair: Pair
    seq: int
    facts: bytes
    key: bytes
    body: bytes


@dataclass(slots=True)
class Sifted:
    """What of a stretch goes into the archive.

    `upto`: the first offset that is not looked at; `stopped`: it stands before a gap that nobody accepted.
    `firsts`: pairs of which the archive's stretch begins here, with the seq; `lasts`: where pairs are afterwards.
    """

    upto: int
    new: list[New] = field(default_factory=list)
    firsts: dict[Pair, int] = field(default_factory=dict)
    lasts: dict[Pair, int] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    stopped: bool = False


def parsed(stretch: Stretch, source: Source, address: str) -> list[New]:
    """Return a stretch's records. Raises StoreUnavailable for one that no script of ours wrote."""
    found: list[New] = []
    new = tuple.__new__
    pairs: dict[tuple[bytes, bytes], Pair] = {}
    cut = source.cut
    for entry_id, fields in stretch.entries:
        try:
            source_text, lp_text, seq, facts = fields[1].split(b":", 3)
            pair = pairs.get((source_text, lp_text))
            if pair is None:
                pair = pairs[source_text, lp_text] = (int(source_text), int(lp_text))
            record = new(New, (int(entry_id[:-2]), pair, int(seq), facts, fields[3], fields[5]))
        except (ValueError, IndexError) as error:
            raise StoreUnavailable(
                address, f"record {entry_id!r} of partition {source.partition} has no identity: it was written by hand"
            ) from error
        # What is beyond a cut seal's marks its successors hold too, and no group handles it here.
        if cut is not None and record.seq > cut.get(f"{pair[0]}:{pair[1]}", record.seq):
            continue
        found.append(record)
    return found


def sift(records: list[New], end: int, known: Mapping[Pair, Known]) -> Sifted:
    """Return which records are new, each the successor of its pair's last; stop before a gap that nobody accepted.

    What the archive has already is left out: after a node fell back the same identity comes again. `end`: the offset
    behind the last record.
    """
    sifted = Sifted(end)
    lasts = {pair: one.last for pair, one in known.items()}
    changed: set[Pair] = set()
    for number, record in enumerate(records):
        pair, seq = record.pair, record.seq
        last = lasts.get(pair)
        if last is None:
            sifted.firsts[pair] = seq
        elif seq <= last:
            continue
        elif seq != last + 1:
            may_be_passed = pair in known and last == known[pair].last and seq <= known[pair].accepted
            sifted.gaps.append(Gap(pair, last, seq, record.offset, may_be_passed))
            if not may_be_passed:
                sifted.stopped, sifted.upto = True, record.offset
                sifted.gaps += _gaps_behind(records[number + 1 :], lasts | {pair: seq})
                break
            sifted.firsts[pair] = seq
        lasts[pair] = seq
        changed.add(pair)
        sifted.new.append(record)
    sifted.lasts = {pair: lasts[pair] for pair in changed}
    return sifted


def _gaps_behind(records: list[New], lasts: dict[Pair, int]) -> Iterator[Gap]:
    """Yield the first gaps of other pairs: who accepts one wants to know of all."""
    seen: set[Pair] = set()
    for record in records:
        last = lasts.get(record.pair, record.seq - 1)
        if record.seq > last + 1 and record.pair not in seen:
            seen.add(record.pair)
            yield Gap(record.pair, last, record.seq, record.offset, accepted=False)
        lasts[record.pair] = max(last, record.seq)


def copy_in(connection: Connection, source: Source, batch: int, at: datetime, records: list[New]) -> None:
    """Write records into the archive under a batch."""
    start = _START.pack(14, 4, source.topic_id, 8, batch, 4, source.version, 4, source.partition)
    archived = (at - _EPOCH).total_seconds()
    with connection.cursor() as cursor, cursor.copy(COPY) as copy:
        copy.write(OPENING)
        for chunk in _encoded(start, round(archived * 1_000_000), records):
            copy.write(chunk)
        copy.write(ENDING)


def _encoded(start: bytes, archived_us: int, records: list[New]) -> Iterator[bytes]:
    middle, no_headers = _MIDDLE.pack, _NO_HEADERS.pack
    for at in range(0, len(records), CHUNK_ROWS):
        pieces: list[bytes] = []
        for offset, (source, lp), seq, facts, key, body in records[at : at + CHUNK_ROWS]:
            if facts.isdigit():
                ms, headers = facts, no_headers(-1, -1, len(body))
            else:
                ms, headers = _headers(facts, len(body))
            size = len(key)
            if key == NO_KEY:
                size, key = -1, b""  # noqa: PLW2901 - a null has no bytes
            published_us = (min(int(ms), _LAST_MS) - _EPOCH_MS) * 1_000
            facts_of = middle(8, offset, 4, source, 2, lp, 8, seq, 8, published_us, 8, archived_us, size)
            pieces += (start, facts_of, key, headers, body)
        yield b"".join(pieces)


def _headers(facts: bytes, body_size: int) -> tuple[bytes, bytes]:
    """Return the time, and tags, headers and the body's size as COPY has them."""
    ms, _, text = facts.partition(b":")
    tags = b"\xff\xff\xff\xff"
    if _TAGGED in text:
        headers = _decode(text)
        value = headers.pop(TAGS_HEADER, None)
        if value is not None:
            tags = _array([tag.encode() for tag in tags_of(value)])
        text = _encode(headers) if headers else b""
    shown = _SIZE.pack(len(text)) + text if text else b"\xff\xff\xff\xff"
    return ms, tags + shown + _SIZE.pack(body_size)


def _array(items: list[bytes]) -> bytes:
    body = b"".join(_SIZE.pack(len(item)) + item for item in items)
    head = _ARRAY.pack(1, 0, _TEXT_OID, len(items), 1)
    return _SIZE.pack(len(head) + len(body)) + head + body
