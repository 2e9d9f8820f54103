"""Read a partition's lost messages from an outbox again."""

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
BYTES_PER_READ: Final = 900_000

Missing = Callable[[int, int, int], bool]
"""Called with (lp, after, to) of rows that the outbox lacks; returns whether to skip them."""


@dataclass(frozen=True, slots=True)
class BorrowedOutbox:
    """A source and its outbox, whose seqs are valid while it keeps this UUID."""

    source: int
    outbox_uuid: uuid.UUID
    outbox: Connection


def lost_runs(
    borrowed: BorrowedOutbox, topic_id: int, lps: Mapping[int, tuple[int, int]], missing: Missing, *, address: str
) -> Iterator[list[MessageRun]]:
    """Yield pages of runs, possibly empty; append each before asking for the next.

    `lps`: per LP, the last seq present and the last wanted. Raises StoreUnavailable if the outbox is renumbered
    meanwhile.
    """
    after = {lp: mark for lp, (mark, to) in lps.items() if mark < to}
    while after:
        some = list(after)[: max(1, ROWS_PER_READ // ROWS_PER_LP)]
        found = _rows(borrowed, topic_id, some, after)
        _refuse_if_renumbered(borrowed, address)
        # If the byte limit ended the read, LPs behind the last one with rows are unknown.
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
    rows = [row for row in found if row[2] <= to]
    first = rows[0][2] if rows else to + 1
    if first > after + 1 and not missing(lp, after, first - 1):
        return None
    # Rows behind a hole come in the next round.
    fields: list[bytes] = []
    count = 0
    for _, _, seq, facts, key, body in rows:
        if seq != first + count:
            break
        fields += _fields(facts.encode(), None if key is None else key.encode(), None if body is None else bytes(body))
        count += 1
    return MessageRun(lp, first, count, fields) if count else None


def _fields(facts: bytes, key: bytes | None, body: bytes | None) -> tuple[bytes, bytes, bytes]:
    if reason := oversize(key, body):
        return void_facts(facts, reason), NO_KEY, b""
    return facts, NO_KEY if key is None else key, body or b""


def _refuse_if_renumbered(borrowed: BorrowedOutbox, address: str) -> None:
    # The timeline is not compared: a recovery records it at its end, after it has nodes armed, so both would wait for
    # each other.
    identity = borrowed.outbox.execute(query("outbox_identity")).fetchone()
    if identity is None or identity[0] != borrowed.outbox_uuid:
        raise StoreUnavailable(address, f"outbox {borrowed.outbox_uuid} is numbered anew: resend it later")
