"""Reading again from an outbox what a partition lost: many LPs at a time, each a run that continues its chain."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mqlayer.domain.message import NO_KEY, void_facts
from mqlayer.domain.names import oversize
from mqlayer.domain.routing import LP_COUNT
from mqlayer.errors import StoreUnavailable
from mqlayer.postgres.database import Connection
from mqlayer.postgres.queries import query
from mqlayer.redis.partition_scripts import MessageRun

ROWS_PER_READ: Final = 500
ROWS_PER_LP: Final = 5
"""How many rows of an LP are read at the least, where so many LPs lack some."""
BYTES_PER_READ: Final = 900_000

Missing = Callable[[int, int, int], bool]
"""Told of an LP that the outbox lacks its rows behind a seq and up to another; says whether to go on behind them."""


@dataclass(frozen=True, slots=True)
class BorrowedOutbox:
    """A source and a connection to its outbox, whose rows have the source's numbers while it goes by that id."""

    source: int
    outbox_uuid: uuid.UUID
    outbox: Connection


def lost_runs(
    borrowed: BorrowedOutbox, topic_id: int, lps: Mapping[int, tuple[int, int]], missing: Missing, *, address: str
) -> Iterator[list[MessageRun]]:
    """Return what LPs lack as runs to append, a few hundred rows at a time, each page to be appended before the next.

    `lps`: the seq up to which each has all, and the one up to which it is to have it. A page may be empty. Raises
    StoreUnavailable where the outbox is numbered anew meanwhile.
    """
    after = {lp: mark for lp, (mark, to) in lps.items() if mark < to}
    while after:
        some = list(after)[: max(1, ROWS_PER_READ // ROWS_PER_LP)]
        found = _rows(borrowed, topic_id, some, after)
        _refuse_if_renumbered(borrowed, address)
        # Where the bytes came to their end, nothing is known of the LPs behind the last one that has rows.
        known = some[: some.index([*found][-1]) + 1] if found else some
        runs: list[MessageRun] = []
        for lp in known:
            to = lps[lp][1]
            run = _run(lp, after[lp], to, found.get(lp, []), missing)
            if run is not None:
                runs.append(run)
            after[lp] = run.first + run.count - 1 if run is not None else to
            if after[lp] >= to:
                del after[lp]
        yield runs


def _rows(
    borrowed: BorrowedOutbox, topic_id: int, lps: Sequence[int], after: Mapping[int, int]
) -> dict[int, list[tuple[Any, ...]]]:
    facts = {
        "topic_ids": [topic_id] * len(lps), "lps": list(lps), "afters": [after[lp] for lp in lps],
        "each": ROWS_PER_READ // len(lps), "bytes": BYTES_PER_READ,
    }  # fmt: skip
    found: dict[int, list[tuple[Any, ...]]] = {}
    for row in borrowed.outbox.execute(query("outbox_of_lps"), facts).fetchall():
        found.setdefault(row[1] % LP_COUNT, []).append(row)
    return found


def _run(lp: int, after: int, to: int, found: Sequence[tuple[Any, ...]], missing: Missing) -> MessageRun | None:
    """Return the rows of an LP with which its chain goes on; None where there are none."""
    rows = [row for row in found if row[2] <= to]
    first = rows[0][2] if rows else to + 1
    if first > after + 1 and not missing(lp, after, first - 1):
        return None
    # A run is dense: what is behind a hole comes in the next round.
    fields: list[bytes] = []
    count = 0
    for _, _, seq, facts, key, body in rows:
        if seq != first + count:
            break
        fields += _fields(facts.encode(), None if key is None else key.encode(), None if body is None else bytes(body))
        count += 1
    return MessageRun(lp, first, count, fields) if count else None


def _fields(facts: bytes, key: bytes | None, body: bytes | None) -> tuple[bytes, bytes, bytes]:
    """Return a row as its record was: where it could never be sent, a void one took its place."""
    if reason := oversize(key, body):
        return void_facts(facts, reason), NO_KEY, b""
    return facts, NO_KEY if key is None else key, body or b""


def _refuse_if_renumbered(borrowed: BorrowedOutbox, address: str) -> None:
    """Behind each read: what was read has the numbers of the source only if the outbox goes by that yet."""
    # Not for its timeline, as `recovering.refuse_if_renumbered` does for relays: that is noted at the end of a
    # recovery, which has nodes armed on its way. It would wait for this one, and this one for it.
    identity = borrowed.outbox.execute(query("outbox_identity")).fetchone()
    if identity is None or identity[0] != borrowed.outbox_uuid:
        raise StoreUnavailable(address, f"outbox {borrowed.outbox_uuid} is numbered anew: resend it later")
