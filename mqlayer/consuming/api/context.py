"""What a handler knows of the message it handles, and the fence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mqlayer.consuming.engine.timeouts import current_deadline
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition
from mqlayer.domain.message import NO_KEY, Identity, ParkedRecord, Record
from mqlayer.errors import AlreadyApplied, HandlerFault, StaleOwner
from mqlayer.failpoints import failpoint
from mqlayer.idempotency import InboxEntry, arecord_effect, record_effect
from mqlayer.postgres.caller_connections import caller_errors, run_one, run_one_async
from mqlayer.postgres.queries import query


class Delivered:
    """A message that a handler is given: where it comes from, and which attempt this is."""

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
        """The group that this process consumes for."""
        return self._group

    @property
    def key(self) -> str | None:
        """The message key, None where it has none."""
        return None if self._record.key == NO_KEY else self._record.key.decode()

    @property
    def identity(self) -> Identity:
        """Source incarnation, LP and seq: the same at every delivery. Use it as idempotency key for other effects."""
        return self._record.identity

    @property
    def headers(self) -> Mapping[str, str]:
        """The message's headers."""
        return self._record.headers

    @property
    def tags(self) -> tuple[str, ...]:
        """The message's tags, sorted."""
        return self._record.tags

    @property
    def reordered(self) -> bool:
        """Whether order may not hold for it: its topic is `best_effort`, and its key's partition did not take it."""
        return self._record.reordered

    @property
    def body(self) -> bytes:
        """The body as it was sent."""
        return self._record.body

    @property
    def at_ms(self) -> int:
        """When it was published, ms of Unix time by the publisher's clock: for figures, never for order."""
        return self._record.at_ms

    @property
    def partition(self) -> int:
        """The partition it was read from."""
        return self._owned.partition

    @property
    def offset(self) -> int:
        """Its position in the partition: not an identity, a node that falls back gives it out again."""
        return self._record.offset

    @property
    def epoch(self) -> int:
        """The fencing number of this process's assignment."""
        return self._owned.epoch

    @property
    def attempt(self) -> int:
        """1 at the first delivery; one more after each failure."""
        record = self._record
        before = record.attempts if isinstance(record, ParkedRecord) else self._owned.attempts.get(record.offset, 0)
        return before + 1

    def fence_facts(self) -> Mapping[str, Any]:
        """Return what the fence is asked for it."""
        source, lp, seq = self._record.identity
        # Out of order a lower seq may come after a higher one of its key: each message stands alone then.
        key = self.key if self._owned.ordered else None
        if isinstance(self._record, ParkedRecord) and self._record.redriven:
            # Of a message that was sent again, later ones of its key may have been applied.
            key = None
            if self._record.replay is not None:
                # Once more for each replay. Sources below 0 have no keys, so nothing else is noted there.
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
    """The message under way: all of that, how long it has, `fence` and `inbox`."""

    __slots__ = ("_deadline", "_fenced", "_inbox_recorded")

    def __init__(self, topic: str, group: str, group_id: int, owned: OwnedPartition, record: Record) -> None:
        super().__init__(topic, group, group_id, owned, record)
        self._fenced = False
        self._inbox_recorded: frozenset[str | None] = frozenset()
        self._deadline = current_deadline.get()

    @property
    def remaining_s(self) -> float:
        """Seconds until the group's time limit ends this handler; without end where there is none."""
        return math.inf if self._deadline is None else self._deadline.remaining_s

    def extend(self, seconds: float | None = None) -> float:
        """Have so many seconds from now, a whole time limit by default; return how many seconds are left.

        It never goes beyond the group's cap, counted from the beginning of this attempt, nor makes the time shorter.
        Where the group has no cap nothing is extended; where it has no limit there is nothing to extend. Works from any
        thread. Raises InvalidInput for less than 0 seconds.
        """
        return math.inf if self._deadline is None else self._deadline.extend(seconds)

    def fence(self, connection: Any) -> None:
        """Check, in the effect's own transaction, that this process is still the owner and the message not applied.

        Call it first in the transaction, once, on the connection of the effect (psycopg, SQLAlchemy, Django). When the
        transaction commits the message counts as applied. Let AlreadyApplied and StaleOwner pass through: both roll the
        transaction back; the member settles the message after the first and drops the partition after the second.
        """
        failpoint("fence.before")
        self._only_once()
        with caller_errors(connection):
            answer, epoch = run_one(connection, query("fence"), self.fence_facts())
        self._judge(answer, epoch)
        failpoint("fence.after")

    async def afence(self, connection: Any) -> None:
        """Do what `fence` does on an async connection."""
        failpoint("fence.before")
        self._only_once()
        with caller_errors(connection):
            answer, epoch = await run_one_async(connection, query("fence"), self.fence_facts())
        self._judge(answer, epoch)
        failpoint("fence.after")

    def inbox(self, connection: Any, *, name: str | None = None) -> None:
        """Note, in the effect's own transaction, that this message has its effect; whatever order and owner are.

        For effects to which order says nothing: in unordered groups, or where they concern several keys. Call it first
        in the transaction, as `fence`; raises AlreadyApplied where the effect is there, which settles the message. A
        delivery that comes while another one is at work waits for it. `name`: note this in place of the message, for
        the whole group: an id that several messages may carry, or f"{ctx.identity}/mail" for one effect of several
        that are made in transactions of their own. Let AlreadyApplied pass only where no other effect is left to make.
        """
        record_effect(connection, self._entry(name))

    async def ainbox(self, connection: Any, *, name: str | None = None) -> None:
        """Do what `inbox` does on an async connection."""
        await arecord_effect(connection, self._entry(name))

    def _entry(self, name: str | None) -> InboxEntry:
        if name in self._inbox_recorded:
            raise HandlerFault("one effect was noted twice for one message: call it once, in one transaction")
        self._inbox_recorded |= {name}
        record = self._record
        replay = record.replay if isinstance(record, ParkedRecord) else None
        seek = self._owned.assignment.replay
        return InboxEntry(self._group_id, self._group, self._topic, record.identity, name, seek, replay)

    def _only_once(self) -> None:
        """Refuse a second call: it would answer "applied" for the first one's sake, and the effect would be dropped."""
        if self._fenced:
            raise HandlerFault("the fence was called twice for one message: call it once, in one transaction")
        self._fenced = True

    def _judge(self, answer: str, epoch: int) -> None:
        identity = self._record.identity
        if answer == "applied":
            raise AlreadyApplied(self._group, self._topic, identity.lp, identity.seq)
        if answer == "stale":
            raise StaleOwner(self._group, self._topic, identity.lp, self._owned.epoch, epoch)
