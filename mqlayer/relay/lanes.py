"""What a relay knows of each LP, and how rows become batches. No I/O.

A lane is one LP of one topic. What it knows is a hint: the truth is the mark in Redis, and an append says it whenever
the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

from mqlayer.domain.message import NO_KEY, void_facts
from mqlayer.domain.names import BATCH_BYTES_LIMIT, BATCH_COUNT_LIMIT, KEY_LIMIT, oversize
from mqlayer.domain.routing import LP_COUNT
from mqlayer.redis.packets import message_packet

Row = tuple[Any, ...]
"""id, chain (None for another relay's LP), seq; as bytes: facts, key, body (None where it is over the hard limit)."""

LaneState = Literal["open", "behind", "held"]

NEVER: Final = 0
"""A seq that no row has."""


def chain_of(topic_id: int, lp: int) -> int:
    """Return the number by which rows name an LP of a topic."""
    return topic_id * LP_COUNT + lp


class Target:
    """Where a lane's messages go at present. `refusal` says why they can never be sent.

    `passes_over`: a row that can never be sent does not hold its LP, a void record takes its place.
    """

    __slots__ = (
        "backlog_limit", "batch", "node_id", "partition", "passes_over", "pause_count", "paused_until", "ready",
        "refusal",
    )  # fmt: skip

    def __init__(self, partition: int, node_id: int, backlog_limit: int, refusal: str = "") -> None:
        self.partition, self.node_id, self.backlog_limit = partition, node_id, backlog_limit
        self.refusal = refusal
        self.ready = self.passes_over = False
        self.paused_until, self.pause_count = 0.0, 0
        self.batch: Batch | None = None


class Lane:
    """One LP: `sent` may be ahead of `acked` while appends are under way; `recorded` is what Postgres was told.

    `counted` is the LP's counter when it was last looked at: as many messages are committed, at least.

    open     rows come in by the scan; the next one must have the seq `expected`
    behind   rows must be read by seq, because the scan can't show them all
    held     a row was set aside; nothing is sent until an operator lets it
    """

    __slots__ = (
        "acked", "batch", "chain", "counted", "expected", "messages", "recorded", "rewound_at", "sent", "state",
        "target",
    )  # fmt: skip

    def __init__(self, chain: int, target: Target, *, seq: int = 0) -> None:
        self.chain, self.target = chain, target
        self.sent = self.acked = self.recorded = seq
        self.rewound_at = self.counted = 0
        self.state: LaneState = "open"
        self.expected = seq + 1
        self.batch: Batch | None = None
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
        """Note that Redis holds everything up to a mark."""
        self.acked = max(self.acked, mark)
        if self.sent < self.acked:
            self.sent = self.acked
            if self.state == "open":
                self.expected = self.sent + 1


class Run(NamedTuple):
    """Consecutive messages of a lane in a batch, ready for the wire."""

    lane: Lane
    first: int
    messages: list[bytes]


class Batch:
    """What one append call will take: at most 500 messages and 1 MB, or one message."""

    __slots__ = ("count", "runs", "size", "target")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.count = self.size = 0
        self.runs: list[Run] = []


class Unsendable(NamedTuple):
    """A row that can never be sent, and why."""

    lane: Lane
    seq: int
    reason: str


class Lanes:
    """The lanes of a relay's LP sets, made when their first row shows up."""

    def __init__(self, find_target: Callable[[int], Target]) -> None:
        self._find_target = find_target
        self._lanes: dict[int, Lane] = {}
        self.behind: dict[int, Lane] = {}
        self.held: dict[int, Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def __len__(self) -> int:
        return len(self._lanes)

    def get(self, chain: int) -> Lane:
        """Return a lane; one that is new starts where nothing is relayed."""
        lane = self._lanes.get(chain)
        if lane is None:
            lane = self._lanes[chain] = Lane(chain, self._find_target(chain))
        return lane

    def start(self, chain: int, seq: int) -> None:
        """Make a lane that Postgres says is relayed up to a seq; one that is known stays as it is."""
        if chain not in self._lanes:
            self._lanes[chain] = Lane(chain, self._find_target(chain), seq=seq)

    def forget(self, lp_sets: Iterable[int]) -> None:
        """Drop the lanes of LP sets that others work on now."""
        gone = set(lp_sets)
        for chain in [chain for chain in self._lanes if chain % LP_COUNT >> 6 in gone]:
            del self._lanes[chain]
            self.behind.pop(chain, None)
            self.held.pop(chain, None)

    def fall_behind(self, lane: Lane) -> None:
        """Have the lane's rows read by seq. A lane that was forgotten since it was sent stays so."""
        if lane.state != "held" and self._lanes.get(lane.chain) is lane:
            lane.state, lane.expected = "behind", NEVER
            self.behind[lane.chain] = lane

    def rewind(self, lane: Lane, mark: int, flight: int) -> None:
        """Send again after a mark. What was sent up to this flight says nothing more about the lane."""
        lane.sent = lane.acked = mark
        lane.rewound_at = flight
        self.fall_behind(lane)

    def follow(self, lane: Lane) -> None:
        """Take the lane's rows from the scan again: it was read up to its end."""
        lane.state, lane.expected = "open", lane.sent + 1
        self.behind.pop(lane.chain, None)

    def hold(self, lane: Lane) -> None:
        """Send nothing of the lane until `release`."""
        if self._lanes.get(lane.chain) is lane:
            lane.state, lane.expected = "held", NEVER
            self.behind.pop(lane.chain, None)
            self.held[lane.chain] = lane

    def put_off(self, lane: Lane, *, held: bool) -> None:
        """Send nothing of the lane now: until its row is let go, or until its target is ready."""
        if held:
            self.hold(lane)
        else:
            self.fall_behind(lane)

    def release(self, lane: Lane) -> None:
        """Try a held lane again."""
        self.held.pop(lane.chain, None)
        lane.state = "open"
        self.fall_behind(lane)


class Plan(NamedTuple):
    """What is to be sent of some rows.

    `unsendable` rows hold their lanes; `voided` ones do not: void records take their places in the batches, so each is
    to be kept before these are sent.
    """

    batches: list[Batch]
    unsendable: list[Unsendable]
    voided: list[Unsendable]


def plan(rows: Sequence[Row], lanes: Lanes) -> Plan:
    """Make batches of the rows that continue their lanes; the others' lanes fall behind.

    Rows of a lane must come in the order of their seqs. Lanes advance as if the batches had been sent.
    """
    planned = Plan([], [], [])
    batches = planned.batches
    get = lanes.get
    for _, chain, seq, facts, key, body in rows:
        if chain is None:
            continue
        lane = get(chain)
        if seq != lane.expected:
            if seq > lane.expected != NEVER:
                lanes.fall_behind(lane)
            continue
        target = lane.target
        if not target.ready or body is None or (key is not None and len(key) > KEY_LIMIT):
            message = _odd_message(lane, seq, facts, key, body, planned, lanes)
            if message is None:
                continue
        else:
            message = message_packet(facts, NO_KEY if key is None else key, body)
        size = len(message)
        batch = target.batch
        if batch is None or batch.count == BATCH_COUNT_LIMIT or batch.size + size > BATCH_BYTES_LIMIT:
            batch = target.batch = Batch(target)
            batches.append(batch)
        if lane.batch is not batch:
            lane.batch, lane.messages = batch, []
            batch.runs.append(Run(lane, seq, lane.messages))
        lane.messages.append(message)
        lane.sent = seq
        lane.expected = seq + 1
        batch.count += 1
        batch.size += size
    _close(batches)
    return planned


def _odd_message(
    lane: Lane, seq: int, facts: bytes, key: bytes | None, body: bytes | None, planned: Plan, lanes: Lanes
) -> bytes | None:
    """Return what is sent for a row that can't be sent as it is; None where nothing of its lane is sent now."""
    target = lane.target
    reason = refusal_of(target, key, body)
    if reason and target.ready and target.passes_over:
        planned.voided.append(Unsendable(lane, seq, reason))
        return message_packet(void_facts(facts, reason), NO_KEY, b"")
    held = bool(reason) and not target.passes_over
    if held:
        planned.unsendable.append(Unsendable(lane, seq, reason))
    lanes.put_off(lane, held=held)
    return None


def refusal_of(target: Target, key: bytes | None, body: bytes | None) -> str:
    """Return why a row can never be sent, or an empty string."""
    return target.refusal or oversize(key, body)


def _close(batches: Iterable[Batch]) -> None:
    """Let go of the batches, so that a lane that falls silent does not keep its last one."""
    for batch in batches:
        batch.target.batch = None
        for run in batch.runs:
            run.lane.batch, run.lane.messages = None, []
