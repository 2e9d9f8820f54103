"""Send settled ranges, failed attempts and released locks to a node. Unanswered calls are repeated; all are
idempotent."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.node_thread import NodeThread
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.owned_partitions import EVERY_OFFSET, GuardedStart, OwnedPartition, OwnershipState
from mqlayer.domain.message import Record
from mqlayer.domain.offsets import OffsetRange, as_ranges, covers, joined
from mqlayer.domain.routing import NodeId
from mqlayer.failpoints import failpoint
from mqlayer.redis.node_connection import Command, NodeConnection, is_missing_script, raise_for_reply
from mqlayer.redis.outcomes import RangeOutcome, encode_outcome
from mqlayer.redis.partition_scripts import (
    Fenced,
    LockKept,
    Refused,
    attempt_command,
    attempt_reply,
    recount_command,
    release_command,
    settle_command,
    settle_reply,
    start_command,
    start_reply,
)

log = logging.getLogger(__name__)

Item = TypeVar("Item")

RANGES_PER_CALL: Final = 500
LINGER_S: Final = 0.003
"""How long results gather: round trips are expensive."""
IDLE_WAIT_S: Final = 0.25
RETRY_S: Final = 0.5


class SettlerOwner(Protocol):
    """The member, as its settlers use it."""

    dispatcher: Dispatcher
    archived: bool

    def partitions_on(self, node_id: NodeId) -> list[OwnedPartition]:
        """Return a node's owned partitions."""

    def settled(self, owned: OwnedPartition, records: list[Record], committed: int) -> None:
        """Note that the node settled these records."""

    def fenced(self, owned: OwnedPartition, reason: str) -> None:
        """Drop a partition that a later owner has."""

    def drained(self, owned: OwnedPartition) -> None:
        """Note a settled, sealed partition; repeated until dropped."""

    def released(self, owned: OwnedPartition) -> None:
        """Note that a drained partition's lock is released."""

    def node_lost(self, node_id: NodeId) -> None:
        """Drop all partitions of an unarmed node."""


class Settler(NodeThread):
    """The settling thread of one node. Its stop sends remaining results."""

    def __init__(self, owner: SettlerOwner, connection: NodeConnection, *, name: str) -> None:
        super().__init__(connection, owner.node_lost, name=name, work="settling")
        self._owner = owner

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self.wake.wait(IDLE_WAIT_S)
            if not self._awaited():
                self._stopping.wait(LINGER_S)
            self.wake.clear()
            if not self._try_pass():
                self._stopping.wait(RETRY_S)
        self._try_pass()

    def _awaited(self) -> bool:
        return any(owned.guarded_starts for owned in self._owner.partitions_on(self._connection.node.node_id))

    def _pass(self) -> None:
        partitions = self._owner.partitions_on(self._connection.node.node_id)
        # Once each: otherwise a busy partition would starve the others.
        for owned in partitions:
            if owned.settled or owned.to_settle or owned.unmatched or owned.failed or owned.guarded_starts:
                self._send(owned)
        for owned in partitions:
            if owned.state is OwnershipState.DRAINING and self._idle(owned):
                self._release(owned)
            elif (
                owned.state is OwnershipState.OPEN and owned.is_settled and self._owner.dispatcher.stop_starting(owned)
            ):
                self._owner.drained(owned)

    def _send(self, owned: OwnedPartition) -> None:
        handled, settle_only = _drain(owned.settled), _drain(owned.to_settle)
        failed, starts = _drain(owned.failed), _drain(owned.guarded_starts)
        unmatched, records = joined(_drain(owned.unmatched)), [*handled, *settle_only]
        forget = self._failed_of(owned, records, unmatched)
        try:
            if self._owner.archived:
                settles = self._outcome_commands(owned, _with_outcomes(handled, settle_only, unmatched), forget)
            else:
                ranges = as_ranges(record.offset for record in records)
                settles = self._settle_commands(owned, joined([*ranges, *unmatched]) if unmatched else ranges, forget)
            answers = self._ask(owned, settles, failed, starts)
        except BaseException:
            owned.unmatched.extendleft(reversed(unmatched))
            owned.settled.extendleft(reversed(handled))
            owned.to_settle.extendleft(reversed(settle_only))
            owned.failed.extendleft(reversed(failed))
            owned.guarded_starts.extendleft(reversed(starts))
            raise
        for answer in answers:
            if isinstance(answer, Fenced | Refused):
                self._lost(owned, answer)
                return
        for start in starts:
            start.recorded.set()
        if owned.attempts or owned.failing_since:
            for record in records:
                owned.attempts.pop(record.offset, None)
                owned.failing_since.pop(record.offset, None)
                owned.starts_recorded.discard(record.offset)
            for offset in forget:
                owned.attempts.pop(offset, None)
        committed = max((answer.committed for answer in answers if isinstance(answer, LockKept)), default=0)
        owned.deliveries.forget(committed)
        self._owner.settled(owned, records, committed)
        if unmatched:
            self._owner.dispatcher.unmatched_settled(owned, unmatched)

    def _ask(
        self,
        owned: OwnedPartition,
        settles: list[Command],
        failed: list[tuple[int, int]],
        starts: list[GuardedStart],
    ) -> list[int | LockKept | Fenced | Refused | None]:
        counts = [attempt_command(self._connection, owned.lock_holder, offset, attempts) for offset, attempts in failed]
        begun = [
            start_command(self._connection, owned.lock_holder, start.offset, alone=start.alone) for start in starts
        ]
        commands = [*counts, *begun, *settles]
        failpoint("ack.before_send")
        replies = self._call(commands)
        failpoint("ack.after_send")
        address = self._connection.node.address
        return [
            *(attempt_reply(reply, address) for reply in replies[: len(counts)]),
            *(start_reply(reply, address) for reply in replies[len(counts) : len(counts) + len(begun)]),
            *(settle_reply(reply, address) for reply in replies[len(counts) + len(begun) :]),
        ]

    def _failed_of(self, owned: OwnedPartition, records: list[Record], unmatched: list[OffsetRange]) -> list[int]:
        if not owned.attempts:
            return []
        failed = [record.offset for record in records if record.offset in owned.attempts]
        if unmatched:
            failed += [offset for offset in list(owned.attempts) if covers(unmatched, offset)]
        return failed

    def _settle_commands(self, owned: OwnedPartition, ranges: list[OffsetRange], forget: list[int]) -> list[Command]:
        commands: list[Command] = []
        for at in range(0, len(ranges), RANGES_PER_CALL):
            commands.append(
                settle_command(self._connection, owned.lock_holder, ranges[at : at + RANGES_PER_CALL], forget)
            )
            forget = []
        return commands

    def _outcome_commands(
        self, owned: OwnedPartition, with_outcomes: list[tuple[OffsetRange, RangeOutcome]], forget: list[int]
    ) -> list[Command]:
        commands: list[Command] = []
        now = clock()
        for at in range(0, len(with_outcomes), RANGES_PER_CALL):
            some = with_outcomes[at : at + RANGES_PER_CALL]
            ranges = [one for one, _ in some]
            # The call that settles an offset also reports its attempts.
            upto = ranges[-1][1] if at + RANGES_PER_CALL < len(with_outcomes) else EVERY_OFFSET
            of_these = [offset for offset in forget if offset <= upto]
            forget = [offset for offset in forget if offset > upto]
            reads = owned.deliveries.ages((one for one, outcome in some if outcome == "h"), now)
            outcomes = encode_outcome("".join(outcome for _, outcome in some), reads)
            commands.append(settle_command(self._connection, owned.lock_holder, ranges, of_these, outcomes))
        return commands

    def _call(self, commands: Sequence[Command]) -> list[Any]:
        # All again, in order: an attempt counted behind its offset's settling would be left there.
        replies = self._connection.call_once(commands)
        if any(map(is_missing_script, replies)):
            self._connection.reload_scripts()
            replies = self._connection.call_once(commands)
        return replies

    def _lost(self, owned: OwnedPartition, answer: Fenced | Refused) -> None:
        if isinstance(answer, Refused):
            # Offsets that the node never assigned, or no such partition: it fell back. Nothing was changed.
            facts = {"partition": owned.partition, "word": answer.status, "fact": answer.fact}
            log.error("settling_refused", extra=facts)
            if answer.status == "unknown":
                # Or an append was cut off: recounting includes its records, which are then delivered again.
                self._connection.call([recount_command(self._connection, owned.lock_holder.prefix, owned.partition)])
        self._owner.fenced(owned, "settle")

    def _idle(self, owned: OwnedPartition) -> bool:
        if self._owner.dispatcher.is_idle(owned) and not (
            owned.settled or owned.to_settle or owned.unmatched or owned.failed
        ):
            return True
        late = clock() > owned.drain_until
        if late:
            log.warning("drain_limit_passed", extra={"partition": owned.partition, "running": owned.running})
        return late

    def _release(self, owned: OwnedPartition) -> None:
        failpoint("release.before_redis")
        # A refusal means that the lock is not owned: nothing to release.
        for reply in self._call([release_command(self._connection, owned.lock_holder)]):
            raise_for_reply(reply, self._connection.node.address)
        failpoint("release.after_redis")
        self._owner.released(owned)


def _drain(queue: deque[Item]) -> list[Item]:
    return [queue.popleft() for _ in range(len(queue))]


def _with_outcomes(
    handled: list[Record], settle_only: list[Record], unmatched: list[OffsetRange]
) -> list[tuple[OffsetRange, RangeOutcome]]:
    outcomes: list[tuple[OffsetRange, RangeOutcome]] = [(one, "u") for one in unmatched]
    outcomes += [(one, "h") for one in as_ranges(record.offset for record in handled)]
    outcomes += [(one, "-") for one in as_ranges(record.offset for record in settle_only)]
    return sorted(outcomes)
