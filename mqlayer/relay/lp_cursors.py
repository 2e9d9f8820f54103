"""Cursors and batches of rows. No I/O.

A cursor is a hint: the mark in Redis is the truth, and appends report differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

from mqlayer.domain.durability import NODE, Durability
from mqlayer.domain.message import NO_KEY, void_facts
from mqlayer.domain.names import BATCH_BYTES_LIMIT, BATCH_COUNT_LIMIT, KEY_LIMIT, oversize
from mqlayer.domain.routing import LP_COUNT
from mqlayer.redis.wire import message_packet

Row = tuple[Any, ...]
"""(id, chain, seq, facts, key, body), the last three bytes. Chain is None for another relay's LP, body if oversized."""

CursorState = Literal["open", "behind", "blocked"]

NEVER: Final = 0


def chain_of(topic_id: int, lp: int) -> int:
    """Return an LP's number in rows."""
    return topic_id * LP_COUNT + lp


class Target:
    """A cursor's destination. `refusal`: why nothing can be sent. `passes_over`: void records replace unsendable
    rows."""

    __slots__ = (
        "backlog_limit", "batch", "durability", "node_id", "partition", "passes_over", "pause_count", "paused_until",
        "ready", "refusal",
    )  # fmt: skip

    def __init__(self, partition: int, node_id: int, backlog_limit: int, refusal: str = "") -> None:
        self.partition, self.node_id, self.backlog_limit = partition, node_id, backlog_limit
        self.refusal = refusal
        self.durability: Durability = NODE
        self.ready = self.passes_over = False
        self.paused_until, self.pause_count = 0.0, 0
        self.batch: RelayBatch | None = None


class LpCursor:
    """One LP: seqs `sent`, `acked` by Redis, `recorded` in Postgres; `counted`: its last known counter.

    open     rows come from the scan; the next must be `expected`
    behind   rows are read by seq, because the scan can't show them all
    blocked  a row is quarantined
    """

    __slots__ = (
        "acked", "batch", "chain", "counted", "expected", "messages", "recorded", "rewound_at", "sent", "state",
        "target",
    )  # fmt: skip

    def __init__(self, chain: int, target: Target, *, seq: int = 0) -> None:
        self.chain, self.target = chain, target
        self.sent = self.acked = self.recorded = seq
        self.rewound_at = self.counted = 0
        self.state: CursorState = "open"
        self.expected = seq + 1
        self.batch: RelayBatch | None = None
        self.messages: list[bytes] = []

    @property
    def topic_id(self) -> int:
        """The topic's id."""
        return self.chain // LP_COUNT

    @property
    def lp(self) -> int:
        """The LP."""
        return self.chain % LP_COUNT

    def advance(self, mark: int) -> None:
        """Note Redis's mark."""
        self.acked = max(self.acked, mark)
        if self.sent < self.acked:
            self.sent = self.acked
            if self.state == "open":
                self.expected = self.sent + 1


class CursorRun(NamedTuple):
    """Consecutive messages of a cursor."""

    cursor: LpCursor
    first: int
    messages: list[bytes]


class RelayBatch:
    """One append: up to 500 messages and 1 MB, or one message."""

    __slots__ = ("count", "runs", "size", "target")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.count = self.size = 0
        self.runs: list[CursorRun] = []


class Unsendable(NamedTuple):
    """A row that can never be sent."""

    cursor: LpCursor
    seq: int
    reason: str


class LpCursors:
    """Cursors of owned LP sets."""

    def __init__(self, find_target: Callable[[int], Target]) -> None:
        self._find_target = find_target
        self._cursors: dict[int, LpCursor] = {}
        self.behind: dict[int, LpCursor] = {}
        self.blocked: dict[int, LpCursor] = {}

    def __iter__(self) -> Iterator[LpCursor]:
        return iter(self._cursors.values())

    def __len__(self) -> int:
        return len(self._cursors)

    def get(self, chain: int) -> LpCursor:
        """Return a cursor; new ones start at 0."""
        cursor = self._cursors.get(chain)
        if cursor is None:
            cursor = self._cursors[chain] = LpCursor(chain, self._find_target(chain))
        return cursor

    def holds(self, cursor: LpCursor) -> bool:
        """Whether a cursor is still one of these."""
        return self._cursors.get(cursor.chain) is cursor

    def start(self, chain: int, seq: int) -> None:
        """Make a cursor at a seq, unless known."""
        if chain not in self._cursors:
            self._cursors[chain] = LpCursor(chain, self._find_target(chain), seq=seq)

    def forget(self, lp_sets: Iterable[int]) -> None:
        """Drop cursors of lost LP sets."""
        missing = set(lp_sets)
        self._drop([chain for chain in self._cursors if chain % LP_COUNT >> 6 in missing])

    def forget_topics(self, topic_ids: set[int]) -> None:
        """Drop cursors of deleted topics."""
        if topic_ids:
            self._drop([chain for chain in self._cursors if chain // LP_COUNT in topic_ids])

    def _drop(self, chains: Iterable[int]) -> None:
        for chain in chains:
            del self._cursors[chain]
            self.behind.pop(chain, None)
            self.blocked.pop(chain, None)

    def fall_behind(self, cursor: LpCursor) -> None:
        """Read rows by seq, unless blocked or forgotten."""
        if cursor.state != "blocked" and self._cursors.get(cursor.chain) is cursor:
            cursor.state, cursor.expected = "behind", NEVER
            self.behind[cursor.chain] = cursor

    def rewind(self, cursor: LpCursor, mark: int, write: int) -> None:
        """Send again after `mark`. Answers up to `write` are outdated."""
        cursor.sent = cursor.acked = mark
        cursor.rewound_at = write
        self.fall_behind(cursor)

    def follow(self, cursor: LpCursor) -> None:
        """Take rows from the scan again."""
        cursor.state, cursor.expected = "open", cursor.sent + 1
        self.behind.pop(cursor.chain, None)

    def block(self, cursor: LpCursor) -> None:
        """Send nothing until `release`."""
        if self._cursors.get(cursor.chain) is cursor:
            cursor.state, cursor.expected = "blocked", NEVER
            self.behind.pop(cursor.chain, None)
            self.blocked[cursor.chain] = cursor

    def put_off(self, cursor: LpCursor, *, blocked: bool) -> None:
        """Block, or wait for the target."""
        if blocked:
            self.block(cursor)
        else:
            self.fall_behind(cursor)

    def release(self, cursor: LpCursor) -> None:
        """Unblock a cursor."""
        self.blocked.pop(cursor.chain, None)
        cursor.state = "open"
        self.fall_behind(cursor)


class SendPlan(NamedTuple):
    """Batches of rows. `unsendable` rows block their cursors. Keep `voided` rows before sending their void records."""

    batches: list[RelayBatch]
    unsendable: list[Unsendable]
    voided: list[Unsendable]


def plan(rows: Sequence[Row], cursors: LpCursors) -> SendPlan:
    """Batch the rows that continue their cursors; other cursors fall behind.

    Each cursor's rows must be in seq order. Cursors advance as if sent.
    """
    planned = SendPlan([], [], [])
    batches = planned.batches
    get = cursors.get
    for _, chain, seq, facts, key, body in rows:
        if chain is None:
            continue
        cursor = get(chain)
        if seq != cursor.expected:
            if seq > cursor.expected != NEVER:
                cursors.fall_behind(cursor)
            continue
        target = cursor.target
        if not target.ready or body is None or (key is not None and len(key) > KEY_LIMIT):
            message = _odd_message(cursor, seq, facts, key, body, planned, cursors)
            if message is None:
                continue
        else:
            message = message_packet(facts, NO_KEY if key is None else key, body)
        size = len(message)
        batch = target.batch
        if batch is None or batch.count == BATCH_COUNT_LIMIT or batch.size + size > BATCH_BYTES_LIMIT:
            batch = target.batch = RelayBatch(target)
            batches.append(batch)
        if cursor.batch is not batch:
            cursor.batch, cursor.messages = batch, []
            batch.runs.append(CursorRun(cursor, seq, cursor.messages))
        cursor.messages.append(message)
        cursor.sent = seq
        cursor.expected = seq + 1
        batch.count += 1
        batch.size += size
    _close(batches)
    return planned


def _odd_message(
    cursor: LpCursor,
    seq: int,
    facts: bytes,
    key: bytes | None,
    body: bytes | None,
    planned: SendPlan,
    cursors: LpCursors,
) -> bytes | None:
    target = cursor.target
    reason = refusal_of(target, key, body)
    if reason and target.ready and target.passes_over:
        planned.voided.append(Unsendable(cursor, seq, reason))
        return message_packet(void_facts(facts, reason), NO_KEY, b"")
    blocked = bool(reason) and not target.passes_over
    if blocked:
        planned.unsendable.append(Unsendable(cursor, seq, reason))
    cursors.put_off(cursor, blocked=blocked)
    return None


def refusal_of(target: Target, key: bytes | None, body: bytes | None) -> str:
    """Return why a row can never be sent, or ""."""
    return target.refusal or oversize(key, body)


def _close(batches: Iterable[RelayBatch]) -> None:
    # Idle cursors must not keep their last batch.
    for batch in batches:
        batch.target.batch = None
        for run in batch.runs:
            run.cursor.batch, run.cursor.messages = None, []
