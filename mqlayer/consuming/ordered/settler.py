"""Send settled ranges, failed attempts and released locks to a node. Unanswered calls are repeated; all are
idempotent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.node_service import NodeService
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.owned_partitions import EVERY_OFFSET, OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.ownership import Ownership
from mqlayer.consuming.ordered.partition_reports import PartitionReports
from mqlayer.consuming.ordered.results import Unsettled
from mqlayer.domain.offsets import OffsetRange, as_ranges, joined
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.redis.node_connection import Command, NodeConnection, is_missing_script, raise_for_reply
from mqlayer.redis.outcomes import MAX_OUTCOMES, RangeOutcome, encode_outcome
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

log = event_logger(__name__)

RANGES_PER_CALL: Final = 500
LINGER_S: Final = 0.003
"""How long results gather: round trips are expensive."""
IDLE_WAIT_S: Final = 0.25
RETRY_S: Final = 0.5


class Taken:
    """What a settler took of a partition to send."""

    __slots__ = ("counted", "failed", "owned", "records", "starts", "unsettled")

    def __init__(self, owned: OwnedPartition) -> None:
        self.owned, self.unsettled = owned, owned.results.take()
        self.failed, self.starts = owned.attempts.take()
        self.records = self.unsettled.records
        self.counted = owned.attempts.counted(self.records, self.unsettled.unmatched)

    def put_back(self) -> None:
        """Give it back: it is sent again."""
        self.owned.results.put_back(self.unsettled)
        self.owned.attempts.put_back(self.failed, self.starts)


class Settler(NodeService):
    """The settling thread of one node. Its stop sends remaining results.

    `settled` counts settled messages and wakes the node's reader; `expired` reports those that no handler got.
    """

    def __init__(
        self,
        connection: NodeConnection,
        core: MemberCore,
        ownership: Ownership,
        dispatcher: Dispatcher,
        reports: PartitionReports,
        *,
        settled: Callable[[NodeId, int], None],
        expired: Callable[[OwnedPartition, int], None],
        name: str,
    ) -> None:
        super().__init__(connection, ownership.node_lost, name=name, work="settling", retry_s=RETRY_S)
        self._settings, self._ownership, self._dispatcher = core.settings, ownership, dispatcher
        self._reports, self._settled, self._expired = reports, settled, expired
        meters, self._spans = core.meters, core.spans
        self._settle_call = self._call if meters is None else partial(meters.settling, self._call)

    def _await_work(self) -> None:
        self.wake.wait(IDLE_WAIT_S)
        if not any(owned.attempts.has_starts for owned in self._partitions()):
            self._stopping.wait(LINGER_S)
        self.wake.clear()

    def _close(self) -> None:
        self._try_pass()
        super()._close()

    def _partitions(self) -> list[OwnedPartition]:
        return self._ownership.on(self._connection.node.node_id)

    def _serve(self) -> None:
        partitions = self._partitions()
        # All in one write, once each: otherwise a busy partition would starve the others.
        waiting = [one for one in partitions if one.results or one.attempts.unsent or one.attempts.has_starts]
        if waiting:
            self._send(waiting)
        for owned in partitions:
            if owned.state is OwnershipState.DRAINING and self._idle(owned):
                self._release(owned)
            elif owned.state is OwnershipState.OPEN and owned.is_settled and self._dispatcher.stop_starting(owned):
                self._reports.drained(owned)

    def _send(self, partitions: Sequence[OwnedPartition]) -> None:
        unanswered = [Taken(owned) for owned in partitions]
        began, error = time.perf_counter(), None
        try:
            commands = [self._commands(taken) for taken in unanswered]
            replies = iter(self._ask([command for some in commands for command in some]))
            for taken, some in zip(list(unanswered), commands, strict=True):
                try:
                    answers = self._answers(taken, list(islice(replies, len(some))))
                except MqlayerError as failure:
                    # Of this partition: the others' answers count.
                    error = failure
                else:
                    unanswered.remove(taken)
                    self._answered(taken, answers, began)
        finally:
            for taken in unanswered:
                taken.put_back()
        if error is not None:
            raise error

    def _commands(self, taken: Taken) -> list[Command]:
        holder = taken.owned.lock_holder
        counts = [
            attempt_command(self._connection, holder, offset, attempts, given_back=given_back)
            for offset, attempts, given_back in taken.failed
        ]
        starts = [start_command(self._connection, holder, start.offset, alone=start.alone) for start in taken.starts]
        return [*counts, *starts, *self._settles(taken)]

    def _ask(self, commands: Sequence[Command]) -> list[Any]:
        failpoint("ack.before_send")
        replies = self._settle_call(commands)
        failpoint("ack.after_send")
        return replies

    def _answers(self, taken: Taken, replies: Sequence[Any]) -> list[int | LockKept | Fenced | Refused | None]:
        address, counts, begun = self._connection.node.address, len(taken.failed), len(taken.failed) + len(taken.starts)
        return [
            *(attempt_reply(reply, address) for reply in replies[:counts]),
            *(start_reply(reply, address) for reply in replies[counts:begun]),
            *(settle_reply(reply, address) for reply in replies[begun:]),
        ]

    def _answered(
        self, taken: Taken, answers: Sequence[int | LockKept | Fenced | Refused | None], began: float
    ) -> None:
        owned, records = taken.owned, taken.records
        for answer in answers:
            if isinstance(answer, Fenced | Refused):
                self._lost(owned, answer)
                return
        for start in taken.starts:
            start.recorded.set()
        owned.attempts.forget(records, taken.counted)
        committed = max((answer.committed for answer in answers if isinstance(answer, LockKept)), default=0)
        owned.deliveries.forget(committed)
        self._dispatcher.settled(owned, records, committed, taken.unsettled.unmatched)
        self._settled(self._connection.node.node_id, len(records))
        if taken.unsettled.expired:
            self._expired(owned, len(taken.unsettled.expired))
        if self._spans is not None and self._spans.traced(owned.partition):
            offsets = [record[0] for record in records]
            self._spans.settled({int(owned.partition): offsets}, time.perf_counter() - began)

    def _settles(self, taken: Taken) -> list[Command]:
        unsettled = taken.unsettled
        if self._settings.archived or unsettled.expired:
            return self._outcome_commands(taken.owned, _with_outcomes(unsettled), taken.counted)
        ranges, unmatched = as_ranges(record.offset for record in taken.records), unsettled.unmatched
        return self._settle_commands(taken.owned, joined([*ranges, *unmatched]) if unmatched else ranges, taken.counted)

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
            # The count of expired ones is kept for every topic.
            most = MAX_OUTCOMES if self._settings.archived else 0
            outcomes = encode_outcome("".join(outcome for _, outcome in some), reads, max_entries=most)
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
        try:
            if isinstance(answer, Refused):
                self._refused(owned, answer)
        finally:
            # Its results are gone: without another epoch, they would stay unsettled.
            self._ownership.fenced(owned, "settle")

    def _refused(self, owned: OwnedPartition, answer: Refused) -> None:
        # Offsets that the node never assigned, or no such partition: it fell back. Nothing was changed.
        log.error("settling_refused", extra={"partition": owned.partition, "word": answer.status, "fact": answer.fact})
        if answer.status == "unknown":
            # Or an append was cut off: recounting includes its records, which are then delivered again.
            self._connection.call([recount_command(self._connection, owned.lock_holder.prefix, owned.partition)])

    def _idle(self, owned: OwnedPartition) -> bool:
        if self._dispatcher.is_idle(owned) and not (owned.results or owned.attempts.unsent):
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
        self._ownership.drop(owned)
        self._reports.release(owned.assignment)


def _with_outcomes(unsettled: Unsettled) -> list[tuple[OffsetRange, RangeOutcome]]:
    outcomes: list[tuple[OffsetRange, RangeOutcome]] = [(one, "u") for one in unsettled.unmatched]
    outcomes += [(one, "h") for one in as_ranges(record.offset for record in unsettled.handled)]
    outcomes += [(one, "-") for one in as_ranges(record.offset for record in unsettled.settle_only)]
    outcomes += [(one, "e") for one in as_ranges(record.offset for record in unsettled.expired)]
    return sorted(outcomes)
