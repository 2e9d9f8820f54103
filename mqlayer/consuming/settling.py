"""Send what is handled back to the node: settled offsets as ranges, failed attempts, released locks.

One thread and one connection per node. What was not answered for certain is kept and sent again: all of it is
idempotent.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

from mqlayer.consuming.clock import clock
from mqlayer.consuming.dispatch import Dispatcher
from mqlayer.consuming.holdings import EVERY_OFFSET, Held, Start, State
from mqlayer.consuming.node_thread import NodeThread
from mqlayer.domain.message import Record
from mqlayer.domain.offsets import Range, as_ranges, covers, joined
from mqlayer.domain.routing import NodeId
from mqlayer.failpoints import failpoint
from mqlayer.redis.nodes import Command, NodeConnection, is_missing_script, raise_for_reply
from mqlayer.redis.outcomes import RangeWord, told_of
from mqlayer.redis.partitions import (
    Fenced,
    Kept,
    Refused,
    attempt_command,
    attempt_reply,
    count_command,
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
"""How long a settler lets more come together: acks are not urgent, round trips are dear."""
IDLE_WAIT_S: Final = 0.25
AGAIN_S: Final = 0.5


class SettlingOwner(Protocol):
    """What a settler asks of its member."""

    dispatcher: Dispatcher
    archived: bool

    def holdings_on(self, node_id: NodeId) -> list[Held]:
        """Return the holdings on a node that are not gone."""

    def acknowledged(self, held: Held, records: list[Record], committed: int) -> None:
        """Note that the server has settled these."""

    def fenced(self, held: Held, reason: str) -> None:
        """Drop a holding that a later owner has."""

    def drained(self, held: Held) -> None:
        """Note that everything before a holding's command record is settled; called again until it is dropped."""

    def released(self, held: Held) -> None:
        """Note that a drained holding is given up in Redis."""

    def node_lost(self, node_id: NodeId) -> None:
        """Drop all holdings on a node that is not the armed run."""


class Settler(NodeThread):
    """The settling thread of one node. Stopping it sends what is there."""

    def __init__(self, owner: SettlingOwner, line: NodeConnection, *, name: str) -> None:
        super().__init__(line, owner.node_lost, name=name, work="settling")
        self._owner = owner

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self.wake.wait(IDLE_WAIT_S)
            if not self._awaited():
                self._stopping.wait(LINGER_S)
            self.wake.clear()
            if not self._try_pass():
                self._stopping.wait(AGAIN_S)
        self._try_pass()

    def _awaited(self) -> bool:
        """Say whether a worker waits for a start to be noted."""
        return any(held.starts for held in self._owner.holdings_on(self._line.node.node_id))

    def _pass(self) -> None:
        holdings = self._owner.holdings_on(self._line.node.node_id)
        # Once each: what comes in meanwhile waits for the next pass, or a busy partition would starve the others.
        for held in holdings:
            if held.settled or held.passed or held.unmatched or held.failed or held.starts:
                self._send(held)
        for held in holdings:
            if held.state is State.DRAINING and self._idle(held):
                self._release(held)
            elif held.state is State.OPEN and held.is_settled and self._owner.dispatcher.finish_holding(held):
                self._owner.drained(held)

    def _send(self, held: Held) -> None:
        """Send what one holding has."""
        handled, passed = _all_of(held.settled), _all_of(held.passed)
        failed, starts = _all_of(held.failed), _all_of(held.starts)
        unmatched, records = joined(_all_of(held.unmatched)), [*handled, *passed]
        forget = self._failed_of(held, records, unmatched)
        try:
            if self._owner.archived:
                settles = self._told_commands(held, _worded(handled, passed, unmatched), forget)
            else:
                ranges = as_ranges(record.offset for record in records)
                settles = self._settle_commands(held, joined([*ranges, *unmatched]) if unmatched else ranges, forget)
            answers = self._ask(held, settles, failed, starts)
        except BaseException:
            held.unmatched.extendleft(reversed(unmatched))
            held.settled.extendleft(reversed(handled))
            held.passed.extendleft(reversed(passed))
            held.failed.extendleft(reversed(failed))
            held.starts.extendleft(reversed(starts))
            raise
        for answer in answers:
            if isinstance(answer, Fenced | Refused):
                self._lost(held, answer)
                return
        for start in starts:
            start.noted.set()
        if held.attempts or held.failing_since:
            for record in records:
                held.attempts.pop(record.offset, None)
                held.failing_since.pop(record.offset, None)
                held.noted.discard(record.offset)
            for offset in forget:
                held.attempts.pop(offset, None)
        committed = max((answer.committed for answer in answers if isinstance(answer, Kept)), default=0)
        held.reads.forget(committed)
        self._owner.acknowledged(held, records, committed)
        if unmatched:
            self._owner.dispatcher.left_out(held, unmatched)

    def _ask(
        self,
        held: Held,
        settles: list[Command],
        failed: list[tuple[int, int]],
        starts: list[Start],
    ) -> list[int | Kept | Fenced | Refused | None]:
        """Send failed attempts, what is to be started, then settled offsets; return what the node says of each call."""
        counts = [attempt_command(self._line, held.holder, offset, attempts) for offset, attempts in failed]
        begun = [start_command(self._line, held.holder, start.offset, alone=start.alone) for start in starts]
        commands = [*counts, *begun, *settles]
        failpoint("ack.before_send")
        replies = self._call(commands)
        failpoint("ack.after_send")
        address = self._line.node.address
        return [
            *(attempt_reply(reply, address) for reply in replies[: len(counts)]),
            *(start_reply(reply, address) for reply in replies[len(counts) : len(counts) + len(begun)]),
            *(settle_reply(reply, address) for reply in replies[len(counts) + len(begun) :]),
        ]

    def _failed_of(self, held: Held, records: list[Record], unmatched: list[Range]) -> list[int]:
        """Return the offsets that are settled now and had failed attempts, perhaps under another filter."""
        if not held.attempts:
            return []
        failed = [record.offset for record in records if record.offset in held.attempts]
        if unmatched:
            failed += [offset for offset in list(held.attempts) if covers(unmatched, offset)]
        return failed

    def _settle_commands(self, held: Held, ranges: list[Range], forget: list[int]) -> list[Command]:
        commands: list[Command] = []
        for at in range(0, len(ranges), RANGES_PER_CALL):
            commands.append(settle_command(self._line, held.holder, ranges[at : at + RANGES_PER_CALL], forget))
            forget = []
        return commands

    def _told_commands(self, held: Held, worded: list[tuple[Range, RangeWord]], forget: list[int]) -> list[Command]:
        """Return the same for an archived topic: with what became of each range, and when it was given."""
        commands: list[Command] = []
        now = clock()
        for at in range(0, len(worded), RANGES_PER_CALL):
            some = worded[at : at + RANGES_PER_CALL]
            ranges = [one for one, _ in some]
            # Counts go with the call that settles their offsets, which tells them.
            upto = ranges[-1][1] if at + RANGES_PER_CALL < len(worded) else EVERY_OFFSET
            of_these = [offset for offset in forget if offset <= upto]
            forget = [offset for offset in forget if offset > upto]
            reads = held.reads.ages((one for one, word in some if word == "h"), now)
            told = told_of("".join(word for _, word in some), reads)
            commands.append(settle_command(self._line, held.holder, ranges, of_these, told))
        return commands

    def _call(self, commands: Sequence[Command]) -> list[Any]:
        replies = self._line.call(commands)
        if any(map(is_missing_script, replies)):
            self._line.reload_scripts()
            replies = self._line.call(commands)
        return replies

    def _lost(self, held: Held, answer: Fenced | Refused) -> None:
        if isinstance(answer, Refused):
            # Offsets that the node never gave out, or no such partition: it fell back under us. Nothing was changed.
            facts = {"partition": held.partition, "word": answer.word, "fact": answer.fact}
            log.error("settling_refused", extra=facts)
            if answer.word == "unknown":
                # Or an append ended in its middle: what we read of it is counted, and comes again.
                self._line.call([count_command(self._line, held.holder.prefix, held.partition)])
        self._owner.fenced(held, "settle")

    def _idle(self, held: Held) -> bool:
        """Say whether a draining holding can be released: nothing runs and all is sent, or it took too long."""
        if self._owner.dispatcher.drained(held) and not (held.settled or held.passed or held.unmatched or held.failed):
            return True
        late = clock() > held.drain_until
        if late:
            log.warning("drain_limit_passed", extra={"partition": held.partition, "running": held.busy})
        return late

    def _release(self, held: Held) -> None:
        failpoint("release.before_redis")
        # Refused where the lock was never ours, or is not any more: there is nothing to give up then.
        for reply in self._call([release_command(self._line, held.holder)]):
            raise_for_reply(reply, self._line.node.address)
        failpoint("release.after_redis")
        self._owner.released(held)


def _all_of(line: deque[Item]) -> list[Item]:
    """Take everything out that is in a line now; others may go on appending."""
    return [line.popleft() for _ in range(len(line))]


def _worded(handled: list[Record], passed: list[Record], unmatched: list[Range]) -> list[tuple[Range, RangeWord]]:
    """Return sorted ranges, each with what became of it. What was passed over, others tell: it is parked or dead."""
    words: list[tuple[Range, RangeWord]] = [(one, "u") for one in unmatched]
    words += [(one, "h") for one in as_ranges(record.offset for record in handled)]
    words += [(one, "-") for one in as_ranges(record.offset for record in passed)]
    return sorted(words)
