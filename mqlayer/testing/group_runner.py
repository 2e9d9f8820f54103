"""One group of a TestApp: the engine's own dispatcher, workers and failure rules, driven step by step in one thread."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, cast

from mqlayer.consuming.api.app import Consumer, call_of
from mqlayer.consuming.engine.circuit_breaker import CircuitBreaker
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.events import Reporting
from mqlayer.consuming.engine.failure_actions import FailureAction
from mqlayer.consuming.engine.live_settings import LiveSettings
from mqlayer.consuming.engine.timeouts import (
    AsyncioTimeouts,
    HandlerDeadline,
    ThreadTimeouts,
    current_deadline,
    limited,
)
from mqlayer.consuming.ordered.batch_dispatch import BatchDispatcher
from mqlayer.consuming.ordered.events import OrderedEvents
from mqlayer.consuming.ordered.failure_decider import FailureDecider
from mqlayer.consuming.ordered.member import strategy_of
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.ownership import Ownership
from mqlayer.consuming.ordered.parked_keys import parked_key_of
from mqlayer.consuming.ordered.parking_worker import ParkingWorker
from mqlayer.consuming.ordered.poison_guard import PoisonMessageGuard
from mqlayer.consuming.ordered.record_intake import RecordIntake
from mqlayer.consuming.ordered.turn_results import TurnResults
from mqlayer.domain.message import Record
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.domain.routing import LP_COUNT, NodeId, PartitionId
from mqlayer.domain.tags import NO_FILTER
from mqlayer.errors import NotFound
from mqlayer.groups.group import Group, refuse_ineffective
from mqlayer.groups.members import Assignment
from mqlayer.parking import KeyRef, ParkedState
from mqlayer.redis.partition_scripts import LockHolder, LockTaken
from mqlayer.redis.read_scripts import SelectedRecords
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime
from mqlayer.testing.broker import TopicLog
from mqlayer.testing.clock import TestClock
from mqlayer.testing.failures import Failure
from mqlayer.testing.messages import PublishedMessage, message_in
from mqlayer.testing.parking import MemoryParking

NODE = NodeId(1)


class ObservedDecider(FailureDecider):
    """Keeps the failures."""

    def __init__(self, core: MemberCore, events: OrderedEvents) -> None:
        super().__init__(core, events, lambda _: None)
        # No server keeps a circuit breaker.
        self.breaker = CircuitBreaker()
        self._group = core.group
        self.failures: list[Failure] = []

    def decide(self, key_queue: KeyQueue, record: Record, error: BaseException) -> FailureAction:
        """Decide as the engine does."""
        action = super().decide(key_queue, record, error)
        topic, group = self._group.topic, self._group.name
        self.failures.append(
            Failure(topic, group, message_in(topic, record), error, action.attempts, action),
        )
        return action


class InlineParkingWorker(ParkingWorker):
    """Makes its passes in the test's thread."""

    acted = False

    def work(self) -> bool:
        """Make a pass; say whether it did anything."""
        self.acted = False
        self._pass()
        return self.acted

    def _write(self, *facts: Any) -> None:
        self.acted = True
        super()._write(*facts)

    def _sync(self, *facts: Any) -> None:
        # A released key is due once it is known.
        self.acted = True
        super()._sync(*facts)


class InlineTimeouts(ThreadTimeouts):
    """Deadlines by the test's clock, which end no handler."""

    def wrap(self, handle: Callable[..., Any], rules: RetryRules) -> Callable[..., Any]:
        """Return `handle` with its deadline."""
        return partial(_with_deadline, handle, rules) if limited(rules) else handle


class InlineAsyncTimeouts(AsyncioTimeouts):
    """The same for async handlers."""

    def wrap(self, handle: Callable[..., Any], rules: RetryRules) -> Callable[..., Any]:
        """Return `handle` with its deadline."""
        return partial(_awith_deadline, handle, rules) if limited(rules) else handle


class GroupRunner:
    """A group, and its only member."""

    def __init__(
        self, consumer: Consumer, group_id: int, log: TopicLog, clock: TestClock, reporting: Reporting
    ) -> None:
        self.consumer, self.group = consumer, group_of(consumer, group_id, log)
        self._log, self._clock = log, clock
        core = MemberCore(
            cast("Runtime", None), cast("RouteCache", None), self.group, consumer.options, LiveSettings(self.group)
        )
        core.lease.until = math.inf
        self._settings, self._events = core.settings, OrderedEvents(self.group, reporting)
        self._dispatcher, new_worker = strategy_of(call_of(consumer, self.group), core)
        self._ownership = Ownership(core, self._dispatcher, self._events, lambda _: None)
        self._intake = RecordIntake(core.settings, self._dispatcher, self._events, lambda: None)
        self.store = MemoryParking(group_id, self.group.rules, clock)
        self._parking = InlineParkingWorker(
            core, self.store, self._dispatcher.parking, self._ownership, self._events, lambda: None
        )
        self._decider = ObservedDecider(core, self._events)
        results = TurnResults(
            self._dispatcher, self._decider, handled=self._events.handled, fenced=self._ownership.fenced
        )
        limits = InlineAsyncTimeouts() if consumer.is_async else InlineTimeouts("mqlayer-test")
        self._worker = new_worker(core.settings, PoisonMessageGuard(lambda _: False), results, limits)
        self._settled: set[int] = set()
        self._handled: list[Record] = []
        self._epoch, self._fed = 0, 0
        self._open()

    @property
    def failures(self) -> list[Failure]:
        """What handlers raised, in order."""
        return self._decider.failures

    @property
    def handled(self) -> list[PublishedMessage]:
        """The handled messages, in order."""
        return [message_in(self._log.name, record) for record in self._handled]

    @property
    def dead(self) -> list[PublishedMessage]:
        """What left the group without an effect, in order."""
        return [message_in(self._log.name, entry.record) for entry in self.store.dead_letters]

    @property
    def parked_keys(self) -> list[str | None]:
        """The keys that are parked."""
        return [message_in(self._log.name, key.records[0]).key for key in self.store.parked.values() if key.records]

    def step(self) -> Iterator[Awaitable[None]]:
        """Do one part of the work that is due, yielding awaitables; `progressed` says whether there was any."""
        now_ms = round(self._clock.now().timestamp() * 1000)
        self._settings.expiry = self._log.time_to_live.judged_by(now_ms, self._clock.seconds())
        self.progressed = self._feed()
        self._reload()
        if self._worker.take(0.0):
            self.progressed = True
            if self.consumer.is_async:
                yield self._worker.arun()
            else:
                self._worker.run()
        self.progressed |= self._parking.work()
        self._settle()
        if self._owned.state is OwnershipState.GONE:
            # The fence found a later owner: this member comes back under the next epoch.
            self.progressed = True
            self._open()

    def next_due_s(self) -> float:
        """Return seconds until something is due, or infinity."""
        linger_s = math.inf
        if isinstance(self._dispatcher, BatchDispatcher):
            linger_s = self._dispatcher.batch_due_s(math.inf)
        return min(self._dispatcher.next_due_s(), self._dispatcher.parking.next_due_s([self._owned]), linger_s)

    def release(self, key: str) -> None:
        """Have a parked key tried at once. Raises NotFound."""
        ref = next((ref for ref in self.store.parked if ref.name == key.encode()), None)
        if ref is None:
            raise NotFound("parked key", key, f"group {self.group.name} has parked {self.parked_keys}")
        self._release(ref)

    def release_all(self) -> None:
        """Have all parked keys tried at once."""
        for ref in list(self.store.parked):
            self._release(ref)

    def _release(self, ref: KeyRef) -> None:
        self.store.release(ref)
        self._settings.parking_version += 1

    # -- the member's parts -------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._epoch += 1
        self._fed = 0
        partition = PartitionId(self._log.partition)
        assignment = Assignment(partition, NODE, 0, LP_COUNT, self._epoch, 1, release=False)
        holder = LockHolder("", partition, self.group.group_id, "test", self._epoch)
        self._owned = owned = OwnedPartition(assignment, holder, ordered=self.group.ordered)
        committed = self._committed()
        taken = LockTaken(committed, len(self._log.records) + 1, committed, self._bits(committed), {})
        now, states = self._clock.seconds(), self.store.keys(cast("Any", None))
        loaded = ParkedState(states, [], set(), self._settings.parking_version)
        owned.to_park.synced(self._settings.parking_version)
        self._ownership.add(owned)
        self._dispatcher.parking.load(owned, loaded, [parked_key_of(state, now) for state in states], taken)
        self._dispatcher.open(owned, taken)
        self._fed = committed - 1

    def _committed(self) -> int:
        return next(offset for offset in range(1, len(self._log.records) + 2) if offset not in self._settled)

    def _bits(self, base: int) -> bytes:
        behind = [offset - base for offset in self._settled if offset > base]
        bits = bytearray(max(behind, default=-8) // 8 + 1)
        for index in behind:
            bits[index >> 3] |= 0x80 >> (index & 7)
        return bytes(bits)

    def _feed(self) -> bool:
        records = self._log.records[self._fed :]
        if not records:
            return False
        self._fed += len(records)
        entries = [[b"%d-0" % r.offset, [b"m", r.m, b"k", r.key, b"b", r.body]] for r in records]
        wanted = self._settings.tag_filter
        if wanted is None:
            self._intake.put(self._owned, entries)
        else:
            selected = SelectedRecords(records[-1].offset, more=False, unmatched=[], entries=entries)
            self._intake.put_selected(self._owned, selected, wanted)
        return True

    def _reload(self) -> None:
        for key_queue in self._dispatcher.queues_to_reload(self._owned):
            offsets = list(key_queue.spilled or ())
            self._dispatcher.reload(key_queue, [self._log.records[at - 1] for at in offsets], len(offsets))

    def _settle(self) -> None:
        owned = self._owned
        unsettled = owned.results.take()
        owned.attempts.take()
        self._handled += [*unsettled.handled, *self.store.handled]
        self.store.handled.clear()
        records = unsettled.records
        counted = owned.attempts.counted(records, unsettled.unmatched)
        self._settled.update(record.offset for record in records)
        for first, last in unsettled.unmatched:
            self._settled.update(range(first, last + 1))
        owned.attempts.forget(records, counted)
        self._dispatcher.settled(owned, records, self._committed(), unsettled.unmatched)
        self._events.settled(len(records))
        if unsettled.expired:
            self._events.expired(owned, len(unsettled.expired))


def group_of(consumer: Consumer, group_id: int, log: TopicLog) -> Group:
    """Return the group that the server would make of a consumer's settings."""
    said = consumer.group_settings
    group = Group(
        group_id,
        log.partition,
        consumer.topic,
        consumer.group,
        state="live",
        start="earliest",
        strategy="strict",
        version=1,
        seek=0,
        ordered=said.ordered is not False and said.mode != "shared",
        balance=said.balance or "count",
        settings_version=1,
        paused_at=None,
        rules=said.rules(),
        mode=said.mode or "exclusive",
        tag_filter=said.tag_filter or NO_FILTER,
        rate_limit=said.rate_limit,
        rate_burst=said.rate_burst,
    )
    refuse_ineffective(said, group)
    return group


def _with_deadline(handle: Callable[..., Any], rules: RetryRules, *facts: Any) -> Any:
    token = current_deadline.set(HandlerDeadline(rules))
    try:
        return handle(*facts)
    finally:
        current_deadline.reset(token)


async def _awith_deadline(handle: Callable[..., Awaitable[Any]], rules: RetryRules, *facts: Any) -> Any:
    token = current_deadline.set(HandlerDeadline(rules))
    try:
        return await handle(*facts)
    finally:
        current_deadline.reset(token)
