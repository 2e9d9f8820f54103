"""Send settled messages and retries of a shared group to one node. Results under a replaced epoch are void; messages
come again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.node_service import NodeService
from mqlayer.consuming.shared.fetched_batch import FetchedBatch
from mqlayer.consuming.shared.partitions import SharedPartitions
from mqlayer.consuming.shared.prefetch import Prefetch
from mqlayer.domain.offsets import OffsetRange, as_ranges
from mqlayer.failpoints import failpoint
from mqlayer.redis.node_connection import Command, NodeConnection
from mqlayer.redis.outcomes import MAX_OUTCOMES, RangeOutcome, encode_outcome
from mqlayer.redis.partition_scripts import Fenced, Refused, recount_command
from mqlayer.redis.shared_scripts import (
    AT_ONCE,
    SETTLE_LIMIT,
    SharedGroupPartition,
    SharedSettled,
    shared_attempt_command,
    shared_attempt_reply,
    shared_count_reply,
    shared_nack_command,
    shared_settle_command,
    shared_settle_reply,
)

IDLE_WAIT_S: Final = 0.25
LINGER_S: Final = 0.001
"""How long results gather for one call."""
RETRY_S: Final = 0.1
RANGES: Final = 500


class Settlement(NamedTuple):
    """Messages to settle with an outcome."""

    batch: FetchedBatch
    offsets: Sequence[int]
    outcome: RangeOutcome


class Nack(NamedTuple):
    """A message to retry after `ms`; `failed`: its count, None: unchanged."""

    batch: FetchedBatch
    offset: int
    ms: int
    failed: int | None


@dataclass(slots=True)
class AttemptStart:
    """A wait for a counted attempt; `attempts` None: refused or unanswered."""

    batch: FetchedBatch
    offset: int
    attempts: int | None = None
    counted: threading.Event = field(default_factory=threading.Event)


class _ScriptCall(NamedTuple):
    command: Command
    group_partition: SharedGroupPartition
    ends: Sequence[tuple[FetchedBatch, Sequence[int]]]
    attempt: AttemptStart | None
    item: Any


class SharedSettler(NodeService):
    """One node's settling thread. Its stop sends remaining results. `settled` counts, and wakes readers."""

    def __init__(
        self,
        connection: NodeConnection,
        core: MemberCore,
        partitions: SharedPartitions,
        prefetch: Prefetch,
        *,
        settled: Callable[[int], None],
        name: str,
    ) -> None:
        super().__init__(connection, partitions.node_lost, name=name, work="settling", retry_s=RETRY_S)
        self._settings, self._member_id = core.settings, core.member_id
        self._partitions, self._prefetch, self._settled = partitions, prefetch, settled
        self._spans = core.spans
        self._call = connection.call if core.meters is None else partial(core.meters.settling, connection.call)
        # Any thread appends; this thread removes.
        self._settlements: deque[Settlement] = deque()
        self._nacks: deque[Nack] = deque()
        self._attempt_starts: deque[AttemptStart] = deque()
        self._commands: deque[tuple[SharedGroupPartition, bytes]] = deque()

    def settle(self, settlement: Settlement) -> None:
        """Settle messages soon."""
        self._settlements.append(settlement)
        if not self.wake.is_set():
            self.wake.set()

    def nack(self, nack: Nack) -> None:
        """Give a message back soon."""
        self._nacks.append(nack)
        self.wake.set()

    def count_attempt(self, start: AttemptStart) -> None:
        """Count an attempt at once."""
        self._attempt_starts.append(start)
        self.wake.set()

    def settle_command(self, group_partition: SharedGroupPartition, entry_id: bytes) -> None:
        """Settle a command record soon."""
        self._commands.append((group_partition, entry_id))
        self.wake.set()

    def unsent(self, batch: FetchedBatch) -> set[int]:
        """Return a batch's unsent offsets."""
        ended = {offset for one in list(self._settlements) if one.batch is batch for offset in one.offsets}
        return ended | {one.offset for one in list(self._nacks) if one.batch is batch}

    def _await_work(self) -> None:
        self.wake.wait(IDLE_WAIT_S)
        if not self._attempt_starts:
            self._stopping.wait(LINGER_S)
        self.wake.clear()

    def _close(self) -> None:
        self._try_pass()
        super()._close()

    def _serve(self) -> None:
        ended, nacks = _all_of(self._settlements), _all_of(self._nacks)
        begins, commands = _all_of(self._attempt_starts), _all_of(self._commands)
        if not (ended or nacks or begins or commands):
            return
        try:
            calls = [*self._attempt_calls(begins), *self._settle_calls(ended, commands), *self._nack_calls(nacks)]
            failpoint("shared.before_settle")
            began = time.perf_counter()
            replies = self._call([call.command for call in calls])
            failpoint("shared.after_settle")
            if self._spans is not None:
                self._spans.settled(_offsets_of(ended), time.perf_counter() - began)
            for call, reply in zip(calls, replies, strict=True):
                self._follow(call, reply)
        except BaseException:
            self._settlements.extendleft(reversed(ended))
            self._nacks.extendleft(reversed(nacks))
            self._commands.extendleft(reversed(commands))
            for begin in begins:
                begin.counted.set()
            raise

    def _follow(self, call: _ScriptCall, reply: Any) -> None:
        address = self._connection.node.address
        if call.attempt is not None:
            call.attempt.attempts = shared_attempt_reply(reply, address)
            call.attempt.counted.set()
            return
        settling = call.item == "settle"
        answer = shared_settle_reply(reply, address) if settling else shared_count_reply(reply, address)
        if isinstance(answer, Fenced | Refused):
            if isinstance(answer, Refused) and answer.status == "unknown":
                # An append was cut off: recounting includes its records, which are then delivered again.
                self._connection.call(
                    [recount_command(self._connection, call.group_partition.prefix, call.group_partition.partition)]
                )
            self._partitions.void(call.group_partition)
            return
        for batch, offsets in call.ends:
            self._prefetch.end(batch, offsets)
        self._settled(answer.newly_settled if isinstance(answer, SharedSettled) else 0)

    def _attempt_calls(self, begins: Iterable[AttemptStart]) -> list[_ScriptCall]:
        connection, member = self._connection, self._member_id
        return [
            _ScriptCall(
                shared_attempt_command(connection, group_partition, member, begin.offset),
                group_partition,
                (),
                begin,
                "begin",
            )
            for begin in begins
            for group_partition in [begin.batch.group_partition]
            if group_partition is not None
        ]

    def _settle_calls(
        self, ended: Sequence[Settlement], commands: Iterable[tuple[SharedGroupPartition, bytes]]
    ) -> list[_ScriptCall]:
        connection = self._connection
        calls = [
            _ScriptCall(
                shared_settle_command(connection, group_partition, self._member_id, (), command=entry),
                group_partition,
                (),
                None,
                "settle",
            )
            for group_partition, entry in commands
        ]
        archived = self._settings.archived
        by_place: dict[SharedGroupPartition, list[Settlement]] = {}
        for one in ended:
            if archived or one.outcome == "e":
                # The count of expired ones is kept for every topic.
                calls += self._outcome_calls(one, MAX_OUTCOMES if archived else 0)
            elif one.batch.group_partition is not None:
                by_place.setdefault(one.batch.group_partition, []).append(one)
        for group_partition, of_place in by_place.items():
            ends = [(one.batch, one.offsets) for one in of_place]
            ranges = as_ranges(offset for _, offsets in ends for offset in offsets)
            chunks = chunks_of(ranges)
            for number, chunk in enumerate(chunks):
                command = shared_settle_command(connection, group_partition, self._member_id, chunk)
                # The last reply stands for all chunks: a refusal refuses each.
                calls.append(
                    _ScriptCall(command, group_partition, ends if number == len(chunks) - 1 else (), None, "settle")
                )
        return calls

    def _outcome_calls(self, one: Settlement, max_entries: int) -> list[_ScriptCall]:
        group_partition = one.batch.group_partition
        if group_partition is None:
            return []
        age_ms = max(0, round((clock() - one.batch.read_at) * 1000))
        calls: list[_ScriptCall] = []
        chunks = chunks_of(as_ranges(one.offsets))
        for number, chunk in enumerate(chunks):
            outcomes = encode_outcome(one.outcome * len(chunk), [(chunk[-1][1], age_ms)], max_entries=max_entries)
            command = shared_settle_command(
                self._connection, group_partition, self._member_id, chunk, encoded_outcome=outcomes
            )
            ends = ((one.batch, one.offsets),) if number == len(chunks) - 1 else ()
            calls.append(_ScriptCall(command, group_partition, ends, None, "settle"))
        return calls

    def _nack_calls(self, nacks: Iterable[Nack]) -> list[_ScriptCall]:
        by_place: dict[SharedGroupPartition, list[Nack]] = {}
        for one in nacks:
            if one.batch.group_partition is not None:
                by_place.setdefault(one.batch.group_partition, []).append(one)
        calls = []
        for group_partition, of_place in by_place.items():
            for at in range(0, len(of_place), AT_ONCE):
                chunk = of_place[at : at + AT_ONCE]
                facts = [(one.offset, one.ms, one.failed) for one in chunk]
                command = shared_nack_command(self._connection, group_partition, self._member_id, facts)
                calls.append(
                    _ScriptCall(command, group_partition, [(one.batch, (one.offset,)) for one in chunk], None, "back")
                )
        return calls


def chunks_of(ranges: Iterable[OffsetRange]) -> list[list[OffsetRange]]:
    """Split ranges for single calls."""
    chunks: list[list[OffsetRange]] = []
    room = 0
    for begin, last in ranges:
        first = begin
        while first <= last:
            if room <= 0 or len(chunks[-1]) >= RANGES:
                chunks.append([])
                room = SETTLE_LIMIT
            upto = min(last, first + room - 1)
            chunks[-1].append((first, upto))
            room -= upto - first + 1
            first = upto + 1
    return chunks


def _offsets_of(ended: Iterable[Settlement]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for one in ended:
        if one.batch.group_partition is not None:
            found.setdefault(one.batch.partition, []).extend(one.offsets)
    return found


def _all_of(waiting: deque[Any]) -> list[Any]:
    return [waiting.popleft() for _ in range(len(waiting))]
