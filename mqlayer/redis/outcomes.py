"""Outcomes: one stream entry per settling call, id `<epoch>-<number>`, never repeated.

```text
m  who settled
t  ms of the node's clock
h  handled ranges <first>-<last>
u  ranges that the filter leaves out
d  ranges beyond the topic's limits of retention
e  ranges whose time to live ended
r  <last>:<ms>: given that long before; empty: unknown
a  <offset>:<failed attempts>
x  offsets dropped before
```
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

from mqlayer.domain.offsets import OffsetRange
from mqlayer.redis.keys import outcomes_key
from mqlayer.redis.node_connection import Command

MAX_OUTCOMES: Final = 100_000
"""Unfetched entries per partition and group; then the oldest are dropped."""

RangeOutcome = Literal["h", "u", "e", "-"]
"""Handled, unmatched, expired, or recorded elsewhere."""
Unhandled = Literal["unmatched", "dropped", "expired"]


class OutcomeId(NamedTuple):
    """An entry's position."""

    epoch: int
    number: int


BEGINNING: Final = OutcomeId(0, 0)


class OutcomeRange(NamedTuple):
    """`delivered_ms_ago`: before settlement; None: unknown."""

    first: int
    last: int
    outcome: Literal["handled"] | Unhandled
    attempts: int
    delivered_ms_ago: int | None


UNHANDLED: Final[dict[bytes, Unhandled]] = {b"u": "unmatched", b"d": "dropped", b"e": "expired"}


class OutcomeEntry(NamedTuple):
    """One settling call. `dropped`: offsets lost before it."""

    entry_id: OutcomeId
    member: str
    at_ms: int
    ranges: Sequence[OutcomeRange]
    dropped: int


def encode_outcome(outcomes: str, reads: Iterable[tuple[int, int | None]], *, max_entries: int = MAX_OUTCOMES) -> bytes:
    """Return offsets_settle's argument. `outcomes`: a letter per range; `reads`: (last offset, ms since delivery).

    `max_entries`: 0 counts expired ones, and records nothing.
    """
    ages = ",".join(f"{last}:{'' if ago is None else ago}" for last, ago in reads)
    return f"{max_entries}:{outcomes}:{ages}".encode()


def encode_pop_outcome(
    receiver: str, outcome: Literal["h", "u", "e"] = "h", *, max_entries: int = MAX_OUTCOMES
) -> bytes:
    """Return pop_settle's argument."""
    return f"{max_entries}:{outcome}:{receiver}".encode()


def fetch_command(prefix: str, partition: int, group_id: int, after: OutcomeId, *, count: int) -> Command:
    """Read the next entries after an id."""
    key = outcomes_key(prefix, partition, group_id)
    return ("XRANGE", key, f"({after.epoch}-{after.number}", "+", "COUNT", count)


def forget_command(prefix: str, partition: int, group_id: int, upto: OutcomeId) -> Command:
    """Drop entries up to an id, inclusive."""
    key = outcomes_key(prefix, partition, group_id)
    return ("XTRIM", key, "MINID", "=", f"{upto.epoch}-{upto.number + 1}")


def entries_of(reply: Iterable[Any]) -> list[OutcomeEntry]:
    """Parse the server's entries."""
    return [_entry(entry_id, fields) for entry_id, fields in reply]


def _entry(entry_id: bytes, fields: Sequence[bytes]) -> OutcomeEntry:
    said = {name: value.decode() for name, value in zip(fields[::2], fields[1::2], strict=True)}
    epoch, number = entry_id.split(b"-")
    reads = [(last, ago) for last, ago in _pairs(said.get(b"r", ""), ":")]
    failed = {int(offset): int(count or 0) for offset, count in _pairs(said.get(b"a", ""), ":")}
    handled = [_range(pair) for pair in _pairs(said.get(b"h", ""), "-")]
    ranges = [outcome_range for one in handled for outcome_range in _outcome_ranges(one, reads, failed)]
    for letter, outcome in UNHANDLED.items():
        others = [_range(pair) for pair in _pairs(said.get(letter, ""), "-")]
        ranges += [OutcomeRange(first, last, outcome, 0, None) for first, last in others]
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
