"""Write failures to Postgres: park keys, dead-letter messages, deliver due keys.

One transaction per partition and pass, under the epoch; failed writes are repeated. See `docs/design/parked-keys.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.failure_actions import DeadLetter, ParkKey, RetryInPlace, wait_in_place_s
from mqlayer.consuming.ordered.events import OrderedEvents
from mqlayer.consuming.ordered.owned_partitions import KeyQueue, OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.ownership import Ownership
from mqlayer.consuming.ordered.parked_keys import NEVER, OwnedParkedKey, parked_key_of
from mqlayer.consuming.ordered.parking_dispatch import ParkingDispatch, ParkingTasks
from mqlayer.consuming.ordered.partition_opener import span_of
from mqlayer.errors import MqlayerError
from mqlayer.failpoints import failpoint
from mqlayer.parking import (
    DeadLetterEntry,
    FailedAttempt,
    KeyEntry,
    KeyRef,
    KeyUpdate,
    NotOwner,
    ParkingBatch,
    ParkingResult,
    ParkingStore,
    tried,
)
from mqlayer.runtime.service import Service

IDLE_WAIT_S: Final = 0.25
RETRY_S: Final = 0.5
FULL_RETRY_S: Final = 2.0
"""Delay of messages without room."""
FULL_EACH_S: Final = 0.01
"""Extra delay per waiting key of the partition."""
EARLY_S: Final = 1.0
"""Delay of a key whose group must first advance in another partition."""
RATE_RETRY_S: Final = 0.05
"""Shortest delay by the rate limit."""
ATTEMPTS_EVERY_S: Final = 0.2
MAX_ATTEMPTS_BUFFERED: Final = 1_000
"""Bounds memory while Postgres is unavailable."""
PAGE_COUNT: Final = 500
PAGE_BYTES: Final = 1_000_000
UNKNOWN: Final = -1


class ParkingWorker(Service):
    """The thread that writes a member's failures.

    `wake_settlers` has them settle messages that are parked or left the group.
    """

    def __init__(
        self,
        core: MemberCore,
        store: ParkingStore,
        dispatch: ParkingDispatch,
        ownership: Ownership,
        events: OrderedEvents,
        wake_settlers: Callable[[], None],
    ) -> None:
        super().__init__(
            f"{core.name}-parking-worker",
            title="the parking worker",
            event="parking",
            waiting="blocked",
            retry_s=RETRY_S,
        )
        self._settings, self._rate_limiter = core.settings, core.settings.rate_limiter
        self._started_limit = 2 * core.options.concurrency
        self._store, self._dispatch, self._ownership, self._events = store, dispatch, ownership, events
        self._wake_settlers = wake_settlers
        self._attempts: deque[FailedAttempt] = deque(maxlen=MAX_ATTEMPTS_BUFFERED)
        self._write_attempts_at = 0.0

    def add_attempt(self, attempt: FailedAttempt) -> None:
        """Record a failed attempt."""
        self._attempts.append(attempt)

    def _wait_s(self) -> float:
        return max(0.0, min(IDLE_WAIT_S, self._next_due_s()))

    def _close(self) -> None:
        self._try_pass()

    @property
    def _is_braked(self) -> bool:
        return self._settings.breaker.state in ("open", "probing")

    def _next_due_s(self) -> float:
        if self._is_braked:
            return NEVER
        partitions = self._ownership.all()
        due_s = self._dispatch.next_due_s(partitions)
        if self._rate_limiter.limit is not None and any(owned.parked.has_due for owned in partitions):
            return min(due_s, RATE_RETRY_S)
        return due_s

    def _pass(self) -> None:
        parking_version = self._settings.parking_version
        partitions = self._ownership.all()
        started = sum(p.queue is not None for owned in partitions for p in list(owned.parked.by_name.values()))
        failed: MqlayerError | None = None
        for owned in partitions:
            starts = 0 if self._is_braked else self._rate_limiter.available(self._started_limit - started)
            tasks = self._dispatch.take_tasks(owned, (PAGE_COUNT, PAGE_BYTES, starts))
            started += len(tasks.due)
            if not starts and not self._is_braked and owned.parked.has_due and started < self._started_limit:
                self._rate_limiter.reserve_for_parked()
            try:
                self._serve(owned, tasks, parking_version)
            except MqlayerError as error:
                # A lock may block one partition; others continue.
                failed = error
        if failed is not None:
            raise failed
        if self._attempts and (clock() >= self._write_attempts_at or self._stopping.is_set()):
            self._write_attempts()

    def _serve(self, owned: OwnedPartition, tasks: ParkingTasks, parking_version: int) -> None:
        if tasks:
            self._write(owned, tasks)
        # Checked before loading parked keys: a replay that has ended by then has parked everything.
        over = owned.waits_for_replay and not owned.assignment.waits_for_replay
        if over:
            owned.to_park.synced(UNKNOWN)
        if owned.to_park.version < parking_version and owned.state is OwnershipState.OPEN:
            self._sync(owned, parking_version)
            if over:
                owned.replay_loaded()

    def _write(self, owned: OwnedPartition, tasks: ParkingTasks) -> None:
        batch, updates = _batch_of(owned, tasks)
        taken = self._limit_rate(batch.updates)
        try:
            result = self._store.write(owned.partition, owned.epoch, batch)
            if result.unparked:
                self._load_dead(owned)
        except BaseException as error:
            self._rate_limiter.return_unused(taken, 0)
            self._dispatch.not_written(owned, tasks)
            if not isinstance(error, NotOwner):
                raise
            self._ownership.fenced(owned, "parking")
            return
        owned.to_park.written()
        self._rate_limiter.return_unused(taken, sum(map(len, result.next.values())))
        self._apply(owned, tasks, updates, result)
        if result.changed:
            owned.to_park.synced(UNKNOWN)
            self.wake.set()
        dead_letters = [
            *batch.dead_letters,
            *(update.dead_letter for update in batch.updates if update.dead_letter is not None),
        ]
        for dead_letter in dead_letters:
            self._events.dead_lettered(owned, dead_letter)
        if batch.messages:
            keys = [entry for entry in batch.entries if entry.ref not in result.refused_keys]
            self._events.parked(owned, keys, len(batch.messages) - len(result.refused_messages))

    def _limit_rate(self, updates: Sequence[KeyUpdate]) -> int:
        rate_limiter, taken = self._rate_limiter, 0
        going = [update for update in updates if update.go_on]
        if rate_limiter.limit is None:
            return 0
        for number, update in enumerate(going):
            if rate_limiter.available(1) == 0:
                rate_limiter.reserve_for_parked()
                update.go_on, update.retry_s = False, max(RATE_RETRY_S, rate_limiter.fetch_wait_s())
                continue
            update.count = rate_limiter.acquire_share(1 if update.alone else update.count, len(going) - number)
            taken += update.count
        return taken

    def _apply(
        self,
        owned: OwnedPartition,
        tasks: ParkingTasks,
        updates: list[tuple[OwnedParkedKey, KeyUpdate]],
        result: ParkingResult,
    ) -> None:
        dispatch = self._dispatch
        for key_queue in tasks.queues:
            parked_key = key_queue.parked_key
            if parked_key is not None and parked_key.ref in result.full:
                self._apply_full(owned, key_queue, parked_key, result)
                continue
            if parked_key is not None:
                parked_key.has_capacity(more_waits=bool(key_queue.records or key_queue.spilled))
            dispatch.batch_parked(
                owned, key_queue, parked=parked_key is not None and parked_key.ref not in result.unparked
            )
        for key_queue, _ in tasks.dead_letters:
            dispatch.dead_lettered(key_queue)
        for parked_key, update in updates:
            self._apply_update(owned, parked_key, update, result)
        if tasks.dead_letters or tasks.queues:
            # Settles them for the group.
            self._wake_settlers()

    def _apply_update(
        self, owned: OwnedPartition, parked_key: OwnedParkedKey, update: KeyUpdate, result: ParkingResult
    ) -> None:
        dispatch = self._dispatch
        # Attempts count for the key's head.
        attempts = 0 if update.handled or update.dead_letter else parked_key.attempts
        if update.ref in result.too_early:
            dispatch.reschedule(owned, parked_key, 0, clock() + EARLY_S)
        elif update.ref in result.paused:
            # The heartbeat reports when it is resumed.
            dispatch.reschedule(owned, parked_key, attempts, NEVER)
        elif update.go_on:
            records = result.next[update.ref]
            failpoint("parking.before_resume")
            dispatch.resume(owned, parked_key, records)
            if not records:
                self._events.unparked(owned, update.ref)
        elif update.entry is None and update.retry_s is not None:
            dispatch.reschedule(owned, parked_key, attempts, clock() + update.retry_s)
        else:
            wait_s = update.entry.wait_s if update.entry is not None else None
            attempts = update.entry.attempts if update.entry is not None else 0
            dispatch.reschedule(owned, parked_key, attempts, NEVER if wait_s is None else clock() + wait_s)

    def _apply_full(
        self, owned: OwnedPartition, key_queue: KeyQueue, parked_key: OwnedParkedKey, result: ParkingResult
    ) -> None:
        limit = result.full[parked_key.ref]
        refused = parked_key.ref in result.refused_keys
        wait_s = 0.0
        if refused or parked_key.full != limit:
            self._events.parking_full(owned, parked_key.ref.lp, limit)
        if refused and parked_key.entry is not None:
            wait_s = wait_in_place_s(self._settings.rules, parked_key.entry.attempts, parked_key.entry.wait_s)
        parked_key.has_no_capacity(limit)
        retry_s = wait_s if refused else max(FULL_RETRY_S, FULL_EACH_S * owned.room.backing_off)
        self._dispatch.batch_refused(owned, key_queue, result.refused_messages, parked=not refused, retry_s=retry_s)

    def _sync(self, owned: OwnedPartition, parking_version: int) -> None:
        assignment = owned.assignment
        changed = (
            None if owned.to_park.version == UNKNOWN else self._store.changes(owned.to_park.version, parking_version)
        )
        named = None if changed is None else [r for r in changed if assignment.lp_from <= r.lp < assignment.lp_to]
        if named is None or named:
            self._sync_keys(owned, named)
        owned.to_park.synced(parking_version)

    def _sync_keys(self, owned: OwnedPartition, named: list[KeyRef] | None) -> None:
        now = clock()
        states = self._store.keys(span_of(owned, owned.committed), named)
        parked_keys = [parked_key_of(state, now, own_epoch=owned.epoch) for state in states]
        if owned.parked.by_offset or owned.to_park.uncertain:
            # A former owner's parked, unsettled messages come once more; possibly parked ones of this owner are in its
            # queues.
            self._load_dead(owned)
        self._dispatch.sync(owned, parked_keys, None if named is None else {ref.name for ref in named})
        self._wake_settlers()

    def _load_dead(self, owned: OwnedPartition) -> None:
        self._dispatch.add_dead(owned, self._store.dead(span_of(owned, owned.committed)))

    def _write_attempts(self) -> None:
        attempts = [self._attempts.popleft() for _ in range(len(self._attempts))]
        self._write_attempts_at = clock() + ATTEMPTS_EVERY_S
        try:
            self._store.add_attempts(attempts)
        except BaseException:
            self._attempts.extendleft(reversed(attempts))
            raise


def _batch_of(
    owned: OwnedPartition, tasks: ParkingTasks
) -> tuple[ParkingBatch, list[tuple[OwnedParkedKey, KeyUpdate]]]:
    batch = ParkingBatch()
    for key_queue in tasks.queues:
        parked_key = key_queue.parked_key
        if parked_key is None:
            continue
        if parked_key.entry is not None:
            batch.entries.append(parked_key.entry)
        batch.messages += [(parked_key.ref, record) for record in key_queue.batch]
        if parked_key.entry is None and owned.attempts:
            counted = owned.attempts
            batch.attempts |= {r.identity: counted.get(r.offset) for r in key_queue.batch if r.offset in counted}
    batch.dead_letters = [one for _, dead_letters in tasks.dead_letters for one in dead_letters]
    updates = [
        (key_queue.parked_key, _update_of(owned, key_queue, key_queue.parked_key))
        for key_queue in tasks.returned
        if key_queue.parked_key is not None
    ]
    updates += [(p, KeyUpdate(p.ref, go_on=True, alone=p.alone, guarded=p.guarded_count > 0)) for p in tasks.due]
    batch.updates = [update for _, update in updates]
    return batch, updates


def _update_of(owned: OwnedPartition, key_queue: KeyQueue, parked_key: OwnedParkedKey) -> KeyUpdate:
    go_on = owned.state is OwnershipState.OPEN and not owned.finished
    guarded = parked_key.guarded_count > 0
    update = KeyUpdate(parked_key.ref, handled=list(key_queue.handled), alone=guarded, guarded=guarded)
    update.delivered_s = max(0.0, clock() - parked_key.resumed_at)
    match key_queue.action:
        case DeadLetter(attempts, cause, reason, keep):
            update.dead_letter, update.go_on = (
                DeadLetterEntry(key_queue.records[0], cause, reason, attempts, keep),
                go_on,
            )
        case ParkKey(attempts, cause, seconds):
            update.entry = KeyEntry(parked_key.ref, cause, seconds, attempts)
            update.failed, update.tried = key_queue.records[0].identity, tried(key_queue.records[0], attempts)
        case RetryInPlace(attempts, seconds):
            update.entry = KeyEntry(parked_key.ref, "retry", seconds, attempts)
            update.failed, update.tried = key_queue.records[0].identity, tried(key_queue.records[0], attempts)
        case None:
            update.go_on, update.alone = go_on, guarded or (not update.handled and parked_key.attempts > 0)
    return update
