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

from mqlayer.domain.offsets import OffsetRange
from mqlayer.redis.keys import outcomes_key
from mqlayer.redis.node_connection import Command

MAX_OUTCOMES: Final = 100_000
"""How many entries of a partition and group wait for an archiver, at most: then the oldest are dropped, and counted."""

RangeOutcome = Literal["h", "u", "-"]
"""Of a range that is settled: handled, unmatched, or told by somebody else."""


class OutcomeId(NamedTuple):
    """Where an entry stands among those of a partition and group."""

    epoch: int
    number: int


BEGINNING: Final = OutcomeId(0, 0)


class OutcomeRange(NamedTuple):
    """Offsets that have in common what became of them. `delivered_ms_ago`: how long before it was settled; None:
    unknown."""

    first: int
    last: int
    outcome: Literal["handled", "unmatched"]
    attempts: int
    delivered_ms_ago: int | None


class OutcomeEntry(NamedTuple):
    """What one call settled, when by the node's clock, and how many offsets were dropped unseen before it."""

    entry_id: OutcomeId
    member: str
    at_ms: int
    ranges: Sequence[OutcomeRange]
    dropped: int


def encode_outcome(outcomes: str, reads: Iterable[tuple[int, int | None]], *, max_entries: int = MAX_OUTCOMES) -> bytes:
    """Return what offsets_settle notes: a word for each range; until which offset how many ms ago they were given."""
    ages = ",".join(f"{last}:{'' if ago is None else ago}" for last, ago in reads)
    return f"{max_entries}:{outcomes}:{ages}".encode()


def encode_pop_outcome(receiver: str, *, max_entries: int = MAX_OUTCOMES) -> bytes:
    """Return what pop_settle notes: who settles."""
    return f"{max_entries}:{receiver}".encode()


def fetch_command(prefix: str, partition: int, group_id: int, after: OutcomeId, *, count: int) -> Command:
    """Return the command that reads the next entries behind a place."""
    key = outcomes_key(prefix, partition, group_id)
    return ("XRANGE", key, f"({after.epoch}-{after.number}", "+", "COUNT", count)


def forget_command(prefix: str, partition: int, group_id: int, upto: OutcomeId) -> Command:
    """Return the command that drops entries up to a place, that one included."""
    key = outcomes_key(prefix, partition, group_id)
    return ("XTRIM", key, "MINID", "=", f"{upto.epoch}-{upto.number + 1}")


def entries_of(reply: Iterable[Any]) -> list[OutcomeEntry]:
    """Return the entries of a reply of the server."""
    return [_entry(entry_id, fields) for entry_id, fields in reply]


def _entry(entry_id: bytes, fields: Sequence[bytes]) -> OutcomeEntry:
    said = {name: value.decode() for name, value in zip(fields[::2], fields[1::2], strict=True)}
    epoch, number = entry_id.split(b"-")
    reads = [(last, ago) for last, ago in _pairs(said.get(b"r", ""), ":")]
    failed = {int(offset): int(count or 0) for offset, count in _pairs(said.get(b"a", ""), ":")}
    handled = [_range(pair) for pair in _pairs(said.get(b"h", ""), "-")]
    ranges = [outcome_range for one in handled for outcome_range in _outcome_ranges(one, reads, failed)]
    unmatched = [_range(pair) for pair in _pairs(said.get(b"u", ""), "-")]
    ranges += [OutcomeRange(first, last, "unmatched", 0, None) for first, last in unmatched]
    group_partition = OutcomeId(int(epoch), int(number))
    return OutcomeEntry(group_partition, said[b"m"], int(said[b"t"]), ranges, int(said.get(b"x", "0")))


def _pairs(text: str, divider: str) -> Iterator[tuple[int, int | None]]:
    for pair in text.split(",") if text else ():
        first, _, second = pair.partition(divider)
        yield int(first), int(second) if second else None


def _range(pair: tuple[int, int | None]) -> OffsetRange:
    first, last = pair
    return first, first if last is None else last


def _outcome_ranges(
    handled: OffsetRange, reads: Sequence[tuple[int, int | None]], failed: dict[int, int]
) -> Iterator[OutcomeRange]:
    """Divide a range where it was given at another time, and around what failed before."""
    first, last = handled
    for upto, given in [*((upto, ago) for upto, ago in reads if upto >= first), (last, None)]:
        end = min(upto, last)
        for offset in sorted(offset for offset in failed if first <= offset <= end):
            if first < offset:
                yield OutcomeRange(first, offset - 1, "handled", 1, given)
            yield OutcomeRange(offset, offset, "handled", failed[offset] + 1, given)
            first = offset + 1
        if first <= end:
            yield OutcomeRange(first, end, "handled", 1, given)
            first = end + 1
        if first > last:
            return
