"""Messages, and their form as records of a partition: `docs/design/chain-and-marks.md`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from mqlayer.domain.large_bodies import BODY_HEADER, BODY_MARK, BodyReference, reference_in
from mqlayer.domain.tags import TAGS_HEADER, tags_of

NO_KEY: Final = b"\xff"
"""The key of a record without one: invalid UTF-8, so equal to no key."""

REORDERED_HEADER: Final = "mq-reordered"
"""Marks a best-effort message outside of its key's partition."""

VOID_HEADER: Final = "mq-void"
"""Gives the reason for a void record, which replaces an outbox row that can never be sent. Handlers never see it."""

TTL_HEADER: Final = "mq-ttl"
"""A message's own time to live, in ms."""
TTL_MARK: Final = f'"{TTL_HEADER}":'.encode()
TTL_FORM: Final = re.compile(r"[1-9][0-9]{0,12}", re.ASCII)

HEADERS_MARK: Final = b"{"
"""In each record's ``m`` that has headers."""
_NO_HEADERS: Final[Mapping[str, str]] = {}
_TAGGED: Final = f'"{TAGS_HEADER}":'.encode()
_REORDERED: Final = f'"{REORDERED_HEADER}":'.encode()
_VOID: Final = f'"{VOID_HEADER}":'.encode()
_OURS: Final = frozenset((BODY_HEADER, TAGS_HEADER, TTL_HEADER, REORDERED_HEADER, VOID_HEADER))
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_encode_headers = msgspec.json.Encoder().encode


class Identity(NamedTuple):
    """A message's identity in its topic."""

    source: int
    lp: int
    seq: int

    def __str__(self) -> str:
        return f"{self.source}:{self.lp}:{self.seq}"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message without identity, ready to append."""

    key: bytes | None
    body: bytes
    at_ms: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def fields(self) -> tuple[bytes, bytes, bytes]:
        """Return facts, key and body for the append script."""
        return encode_facts(self.at_ms, self.headers), NO_KEY if self.key is None else self.key, self.body


def encode_facts(at_ms: int, headers: Mapping[str, str] | None, tags: str = "", body: str = "") -> bytes:
    """Return ``m`` without the identity. `tags`: from `tags_text`; `body`: a reference."""
    if body:
        headers = {BODY_HEADER: body, **(headers or {})}
    if tags:
        headers = {TAGS_HEADER: tags, **(headers or {})}
    if headers:
        return b"%d:%b" % (at_ms, _encode_headers(headers))
    return b"%d" % at_ms


def mark_reordered(facts: bytes) -> bytes:
    """Return facts with REORDERED_HEADER."""
    if _REORDERED in facts:
        return facts
    head, sep, headers = facts.partition(b":")
    return b'%b:%b,%b"1"}' % (head, headers[:-1], _REORDERED) if sep else b'%b:{%b"1"}' % (head, _REORDERED)


def void_facts(facts: bytes, reason: str) -> bytes:
    """Return a void record's facts for a message's."""
    return b"%b:%b" % (facts.partition(b":")[0], _encode_headers({VOID_HEADER: reason}))


class Record(NamedTuple):
    """A record of a partition; ``m`` is parsed on demand."""

    offset: int
    m: bytes
    key: bytes
    body: bytes

    @property
    def identity(self) -> Identity:
        """The message's identity."""
        source, lp, seq, _ = self.m.split(b":", 3)
        return Identity(int(source), int(lp), int(seq))

    @property
    def at_ms(self) -> int:
        """Publishing time in Unix ms by the publisher's clock; never for order."""
        return int(self.m.split(b":", 4)[3])

    @property
    def headers(self) -> Mapping[str, str]:
        """The publisher's headers."""
        headers = self._all_headers()
        if _OURS.isdisjoint(headers):
            return headers
        return {name: headers[name] for name in headers if name not in _OURS}

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags, sorted."""
        if _TAGGED not in self.m:
            return ()
        text = self._all_headers().get(TAGS_HEADER)
        return () if text is None else tags_of(text)

    @property
    def ttl_ms(self) -> int | None:
        """Its own time to live."""
        if TTL_MARK not in self.m:
            return None
        text = self._all_headers().get(TTL_HEADER)
        return int(text) if text is not None and TTL_FORM.fullmatch(text) else None

    @property
    def reordered(self) -> bool:
        """Whether its key's order may not hold."""
        return _REORDERED in self.m and REORDERED_HEADER in self._all_headers()

    @property
    def large_body(self) -> BodyReference | None:
        """Its body's reference, where that is elsewhere."""
        if BODY_MARK not in self.m:
            return None
        text = self._all_headers().get(BODY_HEADER)
        return None if text is None else reference_in(text)

    def with_body(self, body: bytes) -> Record:
        """Return it with another body."""
        return Record(self.offset, self.m, self.key, body)

    @property
    def void(self) -> bool:
        """Whether it is a void record."""
        return _VOID in self.m and VOID_HEADER in self._all_headers()

    def _all_headers(self) -> Mapping[str, str]:
        parts = self.m.split(b":", 4)
        return _decode_headers(parts[4]) if len(parts) > 4 else _NO_HEADERS


class ParkedRecord(Record):
    """A message of a parked key. `attempts`: failed so far.

    `redriven`: an operator resent it; later messages of its key may have been handled. `replay`: its replay or
    backfill.
    """

    attempts: int = 0
    redriven: bool = False
    replay: int | None = None

    @classmethod
    def of(
        cls, record: tuple[int, bytes, bytes, bytes], *, attempts: int, redriven: bool, replay: int | None = None
    ) -> ParkedRecord:
        """Return a record with these facts."""
        parked = cls(*record)
        parked.attempts, parked.redriven, parked.replay = attempts, redriven, replay
        return parked

    def with_body(self, body: bytes) -> Record:
        """Return it with another body."""
        plain = (self.offset, self.m, self.key, body)
        return ParkedRecord.of(plain, attempts=self.attempts, redriven=self.redriven, replay=self.replay)


class CommandRecord(NamedTuple):
    """A sealed partition's last record: its seal, and the offset after the last message."""

    seal_id: str
    end: int
    entry_id: bytes


def extra_size(record: Record) -> int:
    """Return the bytes of its body elsewhere."""
    reference = record.large_body
    return 0 if reference is None else reference.size


def pop_command(entries: list[Any]) -> CommandRecord | None:
    """Remove and return a command record at the end of entries: the only id without -0."""
    if not entries or entries[-1][0][-1:] == b"0":
        return None
    entry_id, fields = entries.pop()
    return CommandRecord(fields[5].decode(), int(entry_id[:-2]) + 1, entry_id)


def records_of(entries: Iterable[Any]) -> list[Record]:
    """Return records of entries [id, [m, .., k, .., b, ..]]."""
    # Three times as fast as the constructor, and done for every message.
    new = tuple.__new__
    return [new(Record, (int(entry_id[:-2]), fields[1], fields[3], fields[5])) for entry_id, fields in entries]


def records_read(entries: Sequence[Any]) -> list[Record]:
    """Return records of entries whose ids rise, as in a read."""
    if not entries:
        return []
    first, last = int(entries[0][0][:-2]), int(entries[-1][0][:-2])
    if last - first + 1 != len(entries):
        return records_of(entries)
    # None lies between: no other id is parsed.
    new = tuple.__new__
    return [
        new(Record, (offset, fields[1], fields[3], fields[5]))
        for offset, (_, fields) in zip(range(first, last + 1), entries, strict=True)
    ]
