"""What became of messages, as scripts that settle note it on the node: one entry for each call that settled something.

An entry has fields of text: ``m`` who settled it, ``t`` when (ms of the node's clock), ``h`` and ``u`` the ranges
``<first>-<last>`` that were handled and that the group's filter leaves out, ``r`` until which offset how many ms before
they had been given to that member (``<last>:<ms>``, empty where nobody knows), ``a`` failed attempts
(``<offset>:<count>``), ``x`` how many told offsets were dropped before it. Its id is ``<epoch>-<place>``: epochs grow
with every owner and every arming of the node, places within an epoch, so a node that fell back never gives an id again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

from mqlayer.domain.offsets import Range
from mqlayer.redis.keys import outcomes_key
from mqlayer.redis.nodes import Command

OUTCOMES_KEPT: Final = 100_000
"""How many entries of a partition and group wait for an archiver, at most: then the oldest are dropped, and counted."""

RangeWord = Literal["h", "u", "-"]
"""Of a range that is settled: handled, unmatched, or told by somebody else."""


class Place(NamedTuple):
    """Where an entry stands among those of a partition and group."""

    epoch: int
    number: int


NOWHERE: Final = Place(0, 0)


class Stretch(NamedTuple):
    """Offsets that have in common what became of them. `given_ms`: how long before it was settled; None: unknown."""

    first: int
    last: int
    word: Literal["handled", "unmatched"]
    attempts: int
    given_ms: int | None


class Entry(NamedTuple):
    """What one call settled, when by the node's clock, and how many offsets were dropped unseen before it."""

    place: Place
    member: str
    at_ms: int
    stretches: Sequence[Stretch]
    dropped: int


def told_of(words: str, reads: Iterable[tuple[int, int | None]], *, kept: int = OUTCOMES_KEPT) -> bytes:
    """Return what offsets_settle notes: a word for each range; until which offset how many ms ago they were given."""
    ages = ",".join(f"{last}:{'' if ago is None else ago}" for last, ago in reads)
    return f"{kept}:{words}:{ages}".encode()


def told_by(receiver: str, *, kept: int = OUTCOMES_KEPT) -> bytes:
    """Return what pop_settle notes: who settles."""
    return f"{kept}:{receiver}".encode()


def fetch_command(prefix: str, partition: int, group_id: int, after: Place, *, count: int) -> Command:
    """Return the command that reads the next entries behind a place."""
    key = outcomes_key(prefix, partition, group_id)
    return ("XRANGE", key, f"({after.epoch}-{after.number}", "+", "COUNT", count)


def forget_command(prefix: str, partition: int, group_id: int, upto: Place) -> Command:
    """Return the command that drops entries up to a place, that one included."""
    key = outcomes_key(prefix, partition, group_id)
    return ("XTRIM", key, "MINID", "=", f"{upto.epoch}-{upto.number + 1}")


def entries_of(reply: Iterable[Any]) -> list[Entry]:
    """Return the entries of a reply of the server."""
    return [_entry(entry_id, fields) for entry_id, fields in reply]


def _entry(entry_id: bytes, fields: Sequence[bytes]) -> Entry:
    said = {name: value.decode() for name, value in zip(fields[::2], fields[1::2], strict=True)}
    epoch, number = entry_id.split(b"-")
    reads = [(last, ago) for last, ago in _pairs(said.get(b"r", ""), ":")]
    failed = {int(offset): int(count or 0) for offset, count in _pairs(said.get(b"a", ""), ":")}
    handled = [_range(pair) for pair in _pairs(said.get(b"h", ""), "-")]
    stretches = [stretch for one in handled for stretch in _stretches(one, reads, failed)]
    unmatched = [_range(pair) for pair in _pairs(said.get(b"u", ""), "-")]
    stretches += [Stretch(first, last, "unmatched", 0, None) for first, last in unmatched]
    place = Place(int(epoch), int(number))
    return Entry(place, said[b"m"], int(said[b"t"]), stretches, int(said.get(b"x", "0")))


def _pairs(text: str, divider: str) -> Iterator[tuple[int, int | None]]:
    for pair in text.split(",") if text else ():
        first, _, second = pair.partition(divider)
        yield int(first), int(second) if second else None


def _range(pair: tuple[int, int | None]) -> Range:
    first, last = pair
    return first, first if last is None else last


def _stretches(handled: Range, reads: Sequence[tuple[int, int | None]], failed: dict[int, int]) -> Iterator[Stretch]:
    """Divide a range where it was given at another time, and around what failed before."""
    first, last = handled
    for upto, given in [*((upto, ago) for upto, ago in reads if upto >= first), (last, None)]:
        end = min(upto, last)
        for offset in sorted(offset for offset in failed if first <= offset <= end):
            if first < offset:
                yield Stretch(first, offset - 1, "handled", 1, given)
            yield Stretch(offset, offset, "handled", failed[offset] + 1, given)
            first = offset + 1
        if first <= end:
            yield Stretch(first, end, "handled", 1, given)
            first = end + 1
        if first > last:
            return
