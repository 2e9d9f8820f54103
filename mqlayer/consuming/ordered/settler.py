"""Send settled ranges, failed attempts and released locks to a node. Unanswered calls are repeated; all are
idempotent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.node_service import NodeService
from mqlayer.consuming.ordered.attempts import FailedCount, GuardedStart
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.owned_partitions import EVERY_OFFSET, OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.ownership import Ownership
from mqlayer.consuming.ordered.partition_reports import PartitionReports
from mqlayer.consuming.ordered.results import Unsettled
from mqlayer.domain.message import Record
from mqlayer.domain.offsets import OffsetRange, as_ranges, joined
from mqlayer.domain.routing import NodeId
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
        # Once each: otherwise a busy partition would starve the others.
        for owned in partitions:
            if owned.results or owned.attempts.unsent or owned.attempts.has_starts:
                self._send(owned)
        for owned in partitions:
            if owned.state is OwnershipState.DRAINING and self._idle(owned):
                self._release(owned)
            elif owned.state is OwnershipState.OPEN and owned.is_settled and self._dispatcher.stop_starting(owned):
                self._reports.drained(owned)

    def _send(self, owned: OwnedPartition) -> None:
        unsettled = owned.results.take()
        failed, starts = owned.attempts.take()
        began = time.perf_counter()
        records = unsettled.records
        counted = owned.attempts.counted(records, unsettled.unmatched)
        try:
            answers = self._ask(owned, self._settles(owned, unsettled, records, counted), failed, starts)
        except BaseException:
            owned.results.put_back(unsettled)
            owned.attempts.put_back(failed, starts)
            raise
        for answer in answers:
            if isinstance(answer, Fenced | Refused):
                self._lost(owned, answer)
                return
        for start in starts:
            start.recorded.set()
        owned.attempts.forget(records, counted)
        committed = max((answer.committed for answer in answers if isinstance(answer, LockKept)), default=0)
        owned.deliveries.forget(committed)
        self._dispatcher.settled(owned, records, committed, unsettled.unmatched)
        self._settled(self._connection.node.node_id, len(records))
        if unsettled.expired:
            self._expired(owned, len(unsettled.expired))
        if self._spans is not None and self._spans.traced(owned.partition):
            offsets = [record[0] for record in records]
            self._spans.settled({int(owned.partition): offsets}, time.perf_counter() - began)

    def _settles(
        self, owned: OwnedPartition, unsettled: Unsettled, records: list[Record], counted: list[int]
    ) -> list[Command]:
        if self._settings.archived or unsettled.expired:
            return self._outcome_commands(owned, _with_outcomes(unsettled), counted)
        ranges, unmatched = as_ranges(record.offset for record in records), unsettled.unmatched
        return self._settle_commands(owned, joined([*ranges, *unmatched]) if unmatched else ranges, counted)

    def _ask(
        self,
        owned: OwnedPartition,
        settles: list[Command],
        failed: list[FailedCount],
        starts: list[GuardedStart],
    ) -> list[int | LockKept | Fenced | Refused | None]:
        counts = [
            attempt_command(self._connection, owned.lock_holder, offset, attempts, given_back=given_back)
            for offset, attempts, given_back in failed
        ]
        begun = [
            start_command(self._connection, owned.lock_holder, start.offset, alone=start.alone) for start in starts
        ]
        commands = [*counts, *begun, *settles]
        failpoint("ack.before_send")
        replies = self._settle_call(commands)
        failpoint("ack.after_send")
        address = self._connection.node.address
        return [
            *(attempt_reply(reply, address) for reply in replies[: len(counts)]),
            *(start_reply(reply, address) for reply in replies[len(counts) : len(counts) + len(begun)]),
            *(settle_reply(reply, address) for reply in replies[len(counts) + len(begun) :]),
        ]

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
        if isinstance(answer, Refused):
            # Offsets that the node never assigned, or no such partition: it fell back. Nothing was changed.
            facts = {"partition": owned.partition, "word": answer.status, "fact": answer.fact}
            log.error("settling_refused", extra=facts)
            if answer.status == "unknown":
                # Or an append was cut off: recounting includes its records, which are then delivered again.
                self._connection.call([recount_command(self._connection, owned.lock_holder.prefix, owned.partition)])
        self._ownership.fenced(owned, "settle")

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
