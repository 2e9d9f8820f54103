"""What a message is, and its form as a record of a partition.

A record has three fields: ``m`` is ``<source>:<lp>:<seq>:<at>[:<headers>]`` (the first three written by the append
script from the numbers it checked, so that identity and chain can't differ; ``at`` in ms of Unix time, for people and
latency figures only; headers as a JSON object, the message's tags being one of them), ``k`` the key's UTF-8 (or
NO_KEY), ``b`` the body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from mqlayer.domain.tags import TAGS_HEADER, tags_of

NO_KEY: Final = b"\xff"
"""Stands for "no key" in a record: not valid UTF-8, so no key can be equal to it."""

REORDERED_HEADER: Final = "mq-reordered"
"""Of a message that was sent to another partition than its key's, in a topic of the strategy best_effort."""

VOID_HEADER: Final = "mq-void"
"""Of a void record, which stands for a row of a best_effort topic that can never be sent: why that is so.

It has neither key nor body and no handler sees it: it is there for its seq, so that its LP's chain goes on.
"""

_NO_HEADERS: Final[Mapping[str, str]] = {}
_TAGGED: Final = f'"{TAGS_HEADER}":'.encode()
_REORDERED: Final = f'"{REORDERED_HEADER}":'.encode()
_VOID: Final = f'"{VOID_HEADER}":'.encode()
_OURS: Final = frozenset((TAGS_HEADER, REORDERED_HEADER, VOID_HEADER))
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode
_encode_headers = msgspec.json.Encoder().encode


class Identity(NamedTuple):
    """What makes a message itself, wherever it is: the source's incarnation, the LP, the seq."""

    source: int
    lp: int
    seq: int

    def __str__(self) -> str:
        return f"{self.source}:{self.lp}:{self.seq}"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way to a partition: all that a record holds but its identity."""

    key: bytes | None
    body: bytes
    at_ms: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def fields(self) -> tuple[bytes, bytes, bytes]:
        """Return the arguments of the append script for this message: facts, key, body."""
        return encode_facts(self.at_ms, self.headers), NO_KEY if self.key is None else self.key, self.body


def encode_facts(at_ms: int, headers: Mapping[str, str] | None, tags: str = "") -> bytes:
    """Return what follows the identity in a record's ``m``. `tags`: from `tags_text`, '' for none."""
    if tags:
        headers = {TAGS_HEADER: tags, **(headers or {})}
    if headers:
        return b"%d:%b" % (at_ms, _encode_headers(headers))
    return b"%d" % at_ms


def mark_reordered(facts: bytes) -> bytes:
    """Return a message's facts, as of encode_facts, with the mark that its key's order may not hold for it."""
    if _REORDERED in facts:
        return facts
    head, sep, headers = facts.partition(b":")
    return b'%b:%b,%b"1"}' % (head, headers[:-1], _REORDERED) if sep else b'%b:{%b"1"}' % (head, _REORDERED)


def void_facts(facts: bytes, reason: str) -> bytes:
    """Return the facts of the void record that stands for a message with these."""
    return b"%b:%b" % (facts.partition(b":")[0], _encode_headers({VOID_HEADER: reason}))


class Record(NamedTuple):
    """A record read from a partition; ``m`` stays raw until somebody asks for what is in it."""

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
        """When it was published, in ms of Unix time by the publisher's clock: for figures, never for order."""
        return int(self.m.split(b":", 4)[3])

    @property
    def headers(self) -> Mapping[str, str]:
        """The message's headers, as its publisher gave them."""
        headers = self._all_headers()
        if _OURS.isdisjoint(headers):
            return headers
        return {name: headers[name] for name in headers if name not in _OURS}

    @property
    def tags(self) -> tuple[str, ...]:
        """The message's tags, sorted."""
        if _TAGGED not in self.m:
            return ()
        text = self._all_headers().get(TAGS_HEADER)
        return () if text is None else tags_of(text)

    @property
    def reordered(self) -> bool:
        """Whether it may come before earlier messages of its key, or behind later ones: see REORDERED_HEADER."""
        return _REORDERED in self.m and REORDERED_HEADER in self._all_headers()

    @property
    def void(self) -> bool:
        """Whether it is a void record, which nobody handles: see VOID_HEADER."""
        return _VOID in self.m and VOID_HEADER in self._all_headers()

    def _all_headers(self) -> Mapping[str, str]:
        parts = self.m.split(b":", 4)
        return _decode_headers(parts[4]) if len(parts) > 4 else _NO_HEADERS


class ParkedRecord(Record):
    """A message of a parked key. `attempts`: the failed ones before this.

    `redriven`: an operator sent it again, so later ones of its key may have had their effects. `replay`: which replay
    or backfill gave it, None where it was parked or dead.
    """

    attempts: int = 0
    redriven: bool = False
    replay: int | None = None

    @classmethod
    def of(
        cls, record: tuple[int, bytes, bytes, bytes], *, attempts: int, redriven: bool, replay: int | None = None
    ) -> ParkedRecord:
        """Return a record with what is known of it besides."""
        parked = cls(*record)
        parked.attempts, parked.redriven, parked.replay = attempts, redriven, replay
        return parked


class CommandRecord(NamedTuple):
    """The last record of a sealed partition: which seal it stands for, and the offset behind the last message."""

    seal_id: str
    end: int
    entry_id: bytes


def pop_command(entries: list[Any]) -> CommandRecord | None:
    """Take the command record off the end of what was read of a partition; None where none is.

    Its entry id is the only one that does not end in -0 (see partition_seal).
    """
    if not entries or entries[-1][0][-1:] == b"0":
        return None
    entry_id, fields = entries.pop()
    return CommandRecord(fields[5].decode(), int(entry_id[:-2]) + 1, entry_id)


def records_of(entries: Iterable[Any]) -> list[Record]:
    """Return the records of stream entries as the server sends them: [id, [m, .., k, .., b, ..]]."""
    # The constructor of a named tuple costs three times as much; this is done for every message.
    new = tuple.__new__
    return [new(Record, (int(entry_id[:-2]), fields[1], fields[3], fields[5])) for entry_id, fields in entries]
