"""A handler's view of its message, and the fence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mqlayer.arguments import explain
from mqlayer.consuming.engine.timeouts import current_deadline
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.domain.large_bodies import BodyReference
from mqlayer.domain.message import NO_KEY, Identity, ParkedRecord, Record
from mqlayer.errors import AlreadyApplied, HandlerFault, StaleOwner
from mqlayer.failpoints import failpoint
from mqlayer.idempotency import InboxEntry, arecord_effect, record_effect
from mqlayer.postgres.caller_connections import Statement, Statements, run, run_async
from mqlayer.postgres.queries import query
from mqlayer.traces import trace_context

if TYPE_CHECKING:
    from opentelemetry.context import Context as TraceContext


class Delivered:
    """A delivered message: origin, content, attempt."""

    __slots__ = ("_group", "_group_id", "_owned", "_record", "_topic")

    def __init__(self, topic: str, group: str, group_id: int, owned: OwnedPartition, record: Record) -> None:
        self._topic, self._group, self._group_id = topic, group, group_id
        self._owned, self._record = owned, record

    @property
    def topic(self) -> str:
        """The topic."""
        return self._topic

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._group

    @property
    def key(self) -> str | None:
        """The message key, or None."""
        return None if self._record.key == NO_KEY else self._record.key.decode()

    @property
    def identity(self) -> Identity:
        """Source, LP and seq, equal at every delivery: an idempotency key."""
        return self._record.identity

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers."""
        return self._record.headers

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags, sorted."""
        return self._record.tags

    @property
    def reordered(self) -> bool:
        """Whether it may be out of order: diverted, on a best-effort topic."""
        return self._record.reordered

    @property
    def body(self) -> bytes:
        """The raw body."""
        return self._record.body

    @property
    def large_body(self) -> BodyReference | None:
        """The reference of a body stored outside of the message."""
        return self._record.large_body

    @property
    def at_ms(self) -> int:
        """Publishing time by the publisher's clock, Unix ms; not an order."""
        return self._record.at_ms

    @property
    def partition(self) -> int:
        """The partition it was read from."""
        return self._owned.partition

    @property
    def offset(self) -> int:
        """Position in the partition; not an identity, fall-backs reuse offsets."""
        return self._record.offset

    @property
    def epoch(self) -> int:
        """The assignment's fencing number."""
        return self._owned.epoch

    @property
    def attempt(self) -> int:
        """1 at the first delivery, plus 1 per failure."""
        record = self._record
        before = record.attempts if isinstance(record, ParkedRecord) else self._owned.attempts.get(record.offset, 0)
        return before + 1

    def trace_context(self) -> TraceContext:
        """Return OpenTelemetry's context of its trace, empty without one. Raises InvalidInput without the package."""
        return trace_context(self.headers)

    def fence_facts(self) -> Mapping[str, Any]:
        """Return the fence's parameters."""
        source, lp, seq = self._record.identity
        # Without order, a lower seq may follow a higher one of its key: fence each message alone.
        key = self.key if self._owned.ordered else None
        if isinstance(self._record, ParkedRecord) and self._record.redriven:
            # Later messages of its key may have been applied before this redelivery.
            key = None
            if self._record.replay is not None:
                # Apply once more per replay. Sources below 0 have no keys, so these rows can't collide.
                source, key = -source, f"{self._record.replay}:{seq}"
        return {
            "group_id": self._group_id,
            "lp": lp,
            "source": source,
            "key": key,
            "seq": seq,
            "epoch": self._owned.epoch,
            "replay": self._owned.assignment.replay,
        }


class Context(Delivered):
    """The message in handling, its time limit, `fence` and `inbox`."""

    __slots__ = ("_deadline", "_fenced", "_inbox_recorded")

    def __init__(self, topic: str, group: str, group_id: int, owned: OwnedPartition, record: Record) -> None:
        super().__init__(topic, group, group_id, owned, record)
        self._fenced = False
        self._inbox_recorded: frozenset[str | None] = frozenset()
        self._deadline = current_deadline.get()

    @property
    def remaining_s(self) -> float:
        """Seconds left of the time limit, or infinity."""
        return math.inf if self._deadline is None else self._deadline.remaining_s

    @explain
    def extend(self, seconds: float | None = None) -> float:
        """Extend the time limit to `seconds` from now (default: a whole limit); return the seconds left.

        The group's cap, counted from the attempt's start, bounds it; without a cap it changes nothing. Never shortens.
        Thread-safe. Raises InvalidInput below 0.
        """
        return math.inf if self._deadline is None else self._deadline.extend(seconds)

    @explain
    def fence(self, connection: Any) -> None:
        """Check in the effect's transaction that this process owns the partition and the effect is missing.

        Call it first, once, on the effect's connection (psycopg, SQLAlchemy, Django). The commit marks the message as
        applied. Raises AlreadyApplied or StaleOwner: don't catch them; the member then settles the message, or drops
        the partition. Raises InvalidInput without an open transaction.
        """
        run(connection, self._fencing())

    @explain
    async def afence(self, connection: Any) -> None:
        """`fence` for an async connection."""
        await run_async(connection, self._fencing())

    @explain
    def inbox(self, connection: Any, *, name: str | None = None) -> None:
        """Record in the effect's transaction that the message has its effect, independent of order and owner.

        For unordered groups, or effects on several keys. Call it first; concurrent deliveries wait. Raises
        AlreadyApplied where the effect exists: catch it only where other effects remain, since it settles the message.
        `name` replaces the identity, group-wide: an id that messages share, or f"{ctx.identity}/mail" for one of
        several transactions.
        """
        record_effect(connection, self._entry(name))

    @explain
    async def ainbox(self, connection: Any, *, name: str | None = None) -> None:
        """`inbox` for an async connection."""
        await arecord_effect(connection, self._entry(name))

    def _fencing(self) -> Statements[None]:
        failpoint("fence.before")
        self._only_once()
        answer, epoch = yield Statement(query("fence"), self.fence_facts(), in_transaction=True)
        self._judge(answer, epoch)
        failpoint("fence.after")

    def _entry(self, name: str | None) -> InboxEntry:
        if name in self._inbox_recorded:
            raise HandlerFault("one effect was noted twice for one message: call it once, in one transaction")
        self._inbox_recorded |= {name}
        record = self._record
        replay = record.replay if isinstance(record, ParkedRecord) else None
        seek = self._owned.assignment.replay
        return InboxEntry(self._group_id, self._group, self._topic, record.identity, name, seek, replay)

    def _only_once(self) -> None:
        """Refuse a second call: it would answer "applied" and lose the effect."""
        if self._fenced:
            raise HandlerFault("the fence was called twice for one message: call it once, in one transaction")
        self._fenced = True

    def _judge(self, answer: str, epoch: int) -> None:
        identity = self._record.identity
        if answer == "applied":
            raise AlreadyApplied(self._group, self._topic, identity.lp, identity.seq)
        if answer == "stale":
            raise StaleOwner(self._group, self._topic, identity.lp, self._owned.epoch, epoch)
