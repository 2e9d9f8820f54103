"""Read records of one node within bounds, and take pull locks.

A blocking XREAD waits on all readable partitions. Records count only under a lock that was still owned behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from mqlayer.consuming.engine.class_rates import ClassRatePoller
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.node_service import NodeService
from mqlayer.consuming.engine.rate_limiter import RatePoller
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.lock_checks import LockChecks
from mqlayer.consuming.ordered.owned_partitions import OwnedPartition, OwnershipState
from mqlayer.consuming.ordered.ownership import Ownership
from mqlayer.consuming.ordered.partition_opener import PartitionOpener
from mqlayer.consuming.ordered.read_plan import ReadPlan
from mqlayer.consuming.ordered.read_turns import ReadPart
from mqlayer.consuming.ordered.record_intake import RecordIntake
from mqlayer.consuming.ordered.reloader import Reloader, log_of
from mqlayer.domain.tags import TagFilter
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.randomness import RNG
from mqlayer.redis.node_connection import Command, NodeConnection, is_missing_script, raise_for_reply
from mqlayer.redis.partition_scripts import LockKept, LockTaken, Refused, acquire_command, acquire_reply
from mqlayer.redis.read_scripts import select_command, select_reply

log = event_logger(__name__)

BLOCK_MS: Final = 100
"""Longest blocking read; delays the notice of new partitions."""
LIMITED_BLOCK_MS: Final = 50
"""The same under a rate limit, which reads fetch."""
SHORT_BLOCK_MS: Final = 10
"""The same while room is short or a spilled key queue continues."""
RETRY_S: Final = (0.05, 1.0)


class Reader(NodeService):
    """The reading thread of one node."""

    def __init__(
        self,
        connection: NodeConnection,
        core: MemberCore,
        ownership: Ownership,
        dispatcher: Dispatcher,
        opener: PartitionOpener,
        intake: RecordIntake,
        *,
        name: str,
    ) -> None:
        super().__init__(connection, ownership.node_lost, name=name, work="reading", retry_s=RETRY_S[1])
        self._settings, self._lease, self._rate_limiter = core.settings, core.lease, core.settings.rate_limiter
        self._ownership, self._dispatcher, self._opener, self._intake = ownership, dispatcher, opener, intake
        self._reloader = Reloader(connection, self._rate_limiter, dispatcher, check=self._check, ours=self._ours)
        # With a filter: whether records remain behind the last scan.
        self._more = False
        # Whether the last read found anything.
        self._found = False
        self._lock_checks = LockChecks()
        self._poller = RatePoller(self._rate_limiter)
        self._class_poller = ClassRatePoller(connection, dispatcher.classes)
        self._plan = ReadPlan(ownership, dispatcher, self._rate_limiter)

    def _await_work(self) -> None:
        """Wait in the read."""

    def _retry_wait_s(self) -> float:
        return RNG.uniform(*RETRY_S)

    def _serve(self) -> None:
        partitions = self._ownership.on(self._connection.node.node_id)
        self._acquire([owned for owned in partitions if owned.state is OwnershipState.NEW])
        opened = [owned for owned in partitions if owned.state is OwnershipState.OPEN]
        if not self._lease.holds():
            self._pause(BLOCK_MS)
            return
        if self._poller.due() and self._rate_limiter.wait_s() > 0:
            self._ask_rates(opened)
        self._class_poller.poll(owned.lock_holder for owned in opened)
        loaded = self._reloader.load_backlogs(opened)
        are_due = self._dispatcher.next_due_s() <= 0
        for owned in opened:
            if are_due or owned.spilled:
                self._reloader.reload(owned, self._plan.capacity(owned))
        growing = [owned for owned in opened if owned.command is None and not owned.waits_for_replay]
        wanted = self._settings.tag_filter
        parts = self._plan.parts(growing, filtered=wanted is not None)
        readable = [owned for part in parts for owned in part.partitions]
        if readable:
            held_back = len(readable) < len(growing)
            block_ms = self._block_ms(opened, held_back=held_back)
            room_comes = self._plan.turns.wait_for_room or (held_back and self._dispatcher.is_quick())
            if room_comes or any(owned.backlogs for owned in opened):
                if not loaded and not self._found:
                    # Messages that are settled make room, and wake this thread; a read would hold it, and an idle
                    # Redis looks at the ends of such waits every 100 ms only.
                    self._pause(block_ms)
                block_ms = 0
            rates = self._rate_commands(opened) if self._poller.due() else []
            if wanted is None:
                self._read(parts, block_ms, rates)
            else:
                self._select(readable, parts[0].size, block_ms, wanted, rates)
        else:
            # Acks that make room wake this thread.
            self._pause(self._block_ms(opened, held_back=False))

    def _pause(self, block_ms: int) -> None:
        self.wake.wait(block_ms / 1000)
        self.wake.clear()

    def _block_ms(self, partitions: list[OwnedPartition], *, held_back: bool) -> int:
        short = held_back or any(owned.backlogs or owned.room.spilled > owned.room.backing_off for owned in partitions)
        due_ms = self._dispatcher.next_due_s() * 1000
        rate_limiter = self._rate_limiter
        rate_ms = BLOCK_MS if rate_limiter.limit is None else rate_limiter.wait_s() * 1000 or LIMITED_BLOCK_MS
        return max(1, int(min(SHORT_BLOCK_MS if short else BLOCK_MS, due_ms + 1, rate_ms + 1)))

    def _ask_rates(self, partitions: list[OwnedPartition]) -> None:
        commands = self._rate_commands(partitions)
        if commands:
            self._add_rates(self._connection.call(commands))

    def _rate_commands(self, partitions: list[OwnedPartition]) -> list[Command]:
        return self._poller.commands(self._connection, (owned.lock_holder for owned in partitions))

    def _add_rates(self, replies: Sequence[Any]) -> None:
        if not self._scripts_missing(replies):
            self._poller.add(replies, self._connection.node.address)

    def _acquire(self, partitions: list[OwnedPartition]) -> None:
        if not partitions:
            return
        commands = [self._acquire_command(owned, afresh=True) for owned in partitions]
        failpoint("acquire.before_send")
        replies = self._connection.call(commands)
        failpoint("acquire.after_send")
        pairs: list[tuple[OwnedPartition, LockTaken]] = []
        for owned, reply in zip(partitions, replies, strict=True):
            answer = acquire_reply(reply, self._connection.node.address)
            if isinstance(answer, LockTaken):
                pairs.append((owned, answer))
            else:
                self._lost(owned, answer)
        self._opener.open(pairs)

    def _read(self, parts: Sequence[ReadPart], block_ms: int, rates: Sequence[Command] = ()) -> None:
        reads = [self._read_command(part, block_ms if len(parts) == 1 else 0) for part in parts]
        readable = [owned for part in parts for owned in part.partitions]
        checked = self._lock_checks.beside(readable, [owned for owned in readable if self._plan.turns.waits(owned)])
        answers = self._connection.call([*reads, *map(self._check, checked), *rates])
        by_key = {key: entries for reply in answers[: len(reads)] for key, entries in self._streams(reply).items()}
        replies = answers[len(reads) :]
        self._add_rates(replies[len(checked) :])
        locks = dict(zip(checked, replies, strict=False))
        late = [owned for owned in readable if log_of(owned) in by_key and owned not in locks]
        if late:
            locks |= zip(late, self._connection.call([*map(self._check, late)]), strict=True)
        self._found = bool(by_key)
        failpoint("read.after_reply")
        if self._settings.tag_filter is not None:
            # A filter was set meanwhile: the next pass applies it.
            return
        for part in parts:
            for owned in part.partitions:
                entries = by_key.get(log_of(owned), ())
                self._plan.turns.note(owned, len(entries), part.size)
                if owned in locks and self._ours(owned, locks[owned]) and entries:
                    self._lock_checks.found(owned)
                    self._intake.put(owned, entries[: self._rate_limiter.available_to_read(len(entries))])

    def _read_command(self, part: ReadPart, block_ms: int) -> Command:
        keys = [log_of(owned) for owned in part.partitions]
        after = [b"%d-0" % (owned.next_read - 1) for owned in part.partitions]
        block = ("BLOCK", block_ms) if block_ms else ()
        return ("XREAD", "COUNT", part.size, *block, "STREAMS", *keys, *after)

    def _streams(self, reply: Any) -> dict[bytes, Any]:
        raise_for_reply(reply, self._connection.node.address)
        return dict(reply) if reply else {}

    def _select(
        self,
        readable: list[OwnedPartition],
        count: int,
        block_ms: int,
        wanted: TagFilter,
        rates: Sequence[Command] = (),
    ) -> None:
        """Read with a tag filter; wait only if the last scan reached the end."""
        keys, after = [log_of(owned) for owned in readable], [owned.next_read - 1 for owned in readable]
        ids = [b"%d-0" % offset for offset in after]
        block = ("BLOCK", block_ms) if block_ms else ()
        wait = ("XREAD", "COUNT", 1, *block, "STREAMS", *keys, *ids)
        chosen = readable if self._more else self._lock_checks.beside(readable)
        waits = [] if self._more else [wait]
        reads = self._filtered_reads(chosen, count, wanted)
        # A scan repeated behind its check might read what another owner is given.
        replies = self._connection.call_once([*waits, *reads, *rates])
        self._add_rates(replies[len(waits) + len(reads) :])
        by_key = self._streams(replies[0]) if waits else {}
        replies = replies[len(waits) : len(waits) + len(reads)]
        late = [owned for owned, key in zip(readable, keys, strict=True) if key in by_key and owned not in chosen]
        if late:
            answers = self._connection.call_once(self._filtered_reads(late, count, wanted))
            chosen, replies = [*chosen, *late], [*replies, *answers]
        if self._scripts_missing(replies):
            return
        failpoint("select.after_reply")
        self._more = False
        if self._settings.tag_filter != wanted:
            # The filter changed meanwhile: the next pass applies the new one.
            return
        for owned, reply, lock in zip(chosen, replies[::2], replies[1::2], strict=True):
            selected = select_reply(reply, self._connection.node.address)
            if self._ours(owned, lock):
                if selected.entries and not self._rate_limiter.available_to_read(1):
                    # Other readers used up the rate: read again.
                    self._more = True
                    continue
                if selected.entries or log_of(owned) in by_key:
                    self._lock_checks.found(owned)
                self._intake.put_selected(owned, selected, wanted)
                self._more = self._more or selected.more

    def _filtered_reads(self, partitions: list[OwnedPartition], count: int, wanted: TagFilter) -> list[Command]:
        """Return a scan and a check of each partition."""
        pairs = [(self._select_command(owned, count, wanted), self._check(owned)) for owned in partitions]
        return [command for pair in pairs for command in pair]

    def _select_command(self, owned: OwnedPartition, count: int, wanted: TagFilter) -> Command:
        size = self._ownership.shares(owned)[1] - owned.room.bytes
        prefix, after = owned.lock_holder.prefix, owned.next_read - 1
        return select_command(
            self._connection,
            prefix,
            owned.partition,
            wanted,
            after=after,
            max_scanned=owned.reach,
            limit=count,
            size=size,
        )

    def _ours(self, owned: OwnedPartition, lock: Any) -> bool:
        answer = acquire_reply(lock, self._connection.node.address)
        if isinstance(answer, LockKept):
            return True
        if isinstance(answer, LockTaken):
            log.error("lock_lost", extra={"partition": owned.partition, "address": self._connection.node.address})
            self._ownership.lock_lost(owned)
        else:
            self._lost(owned, answer)
        return False

    def _lost(self, owned: OwnedPartition, answer: object) -> None:
        if owned.state not in (OwnershipState.NEW, OwnershipState.OPEN):
            return
        if isinstance(answer, Refused):
            # The node lost the partition although its run is armed, or it was deleted: arming repairs that.
            facts = {"partition": owned.partition, "word": answer.status, "address": self._connection.node.address}
            log.error("partition_refused", extra=facts)
            self._ownership.partition_refused(owned)
        else:
            self._ownership.fenced(owned, "pull")

    def _check(self, owned: OwnedPartition) -> Command:
        return self._acquire_command(owned, afresh=False)

    def _acquire_command(self, owned: OwnedPartition, *, afresh: bool) -> Command:
        assignment = owned.assignment
        return acquire_command(
            self._connection, owned.lock_holder, start=assignment.start, seek=assignment.seek, afresh=afresh
        )

    def _scripts_missing(self, replies: Sequence[Any]) -> bool:
        missing = any(map(is_missing_script, replies))
        if missing:
            self._connection.reload_scripts()
        return missing
