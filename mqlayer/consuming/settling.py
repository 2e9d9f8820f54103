"""Send what is handled back to the node: settled offsets as ranges, failed attempts, released locks.

One thread and one connection per node. What could not be sent for a lost line is sent again: settling is idempotent.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final, Protocol

from mqlayer.consuming.clock import clock
from mqlayer.consuming.holdings import Held, State
from mqlayer.domain.message import Record
from mqlayer.domain.offsets import as_ranges
from mqlayer.domain.routing import NodeId
from mqlayer.errors import NodeNotArmed, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.redis.nodes import Command, NodeConnection, is_missing_script
from mqlayer.redis.partitions import (
    Fenced,
    Refused,
    attempt_command,
    attempt_reply,
    release_command,
    settle_command,
    settle_reply,
)

log = logging.getLogger(__name__)

RANGES_PER_CALL: Final = 500
LINGER_S: Final = 0.003
"""How long a settler lets more come together: acks are not urgent, round trips are dear."""
IDLE_WAIT_S: Final = 0.25
AGAIN_S: Final = 0.5


class SettlingOwner(Protocol):
    """What a settler asks of its member."""

    def holdings_on(self, node_id: NodeId) -> list[Held]:
        """Return the holdings on a node that are not gone."""

    def acknowledged(self, held: Held, records: list[Record], committed: int) -> None:
        """Note that the server has settled these."""

    def fenced(self, held: Held, reason: str) -> None:
        """Drop a holding that a later owner has."""

    def released(self, held: Held) -> None:
        """Note that a drained holding is given up in Redis."""

    def node_lost(self, node_id: NodeId) -> None:
        """Drop all holdings on a node that is not the armed run."""


class Batch:
    """What goes to one holding's partition in one script call."""

    __slots__ = ("command", "held", "records")

    def __init__(self, held: Held, records: list[Record], command: Command) -> None:
        self.held, self.records, self.command = held, records, command


class Settler:
    """The settling thread of one node."""

    def __init__(self, owner: SettlingOwner, line: NodeConnection, *, name: str) -> None:
        self._owner, self._line = owner, line
        self.wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-settler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Send what is there and end."""
        self._stopping.set()
        self.wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.wake.wait(IDLE_WAIT_S)
            self._stopping.wait(LINGER_S)
            self.wake.clear()
            self._try_pass()
        self._try_pass()
        self._line.close()

    def _try_pass(self) -> None:
        try:
            self._pass()
        except NodeNotArmed:
            self._owner.node_lost(self._line.node.node_id)
        except StoreUnavailable as error:
            log.warning("settling_waits", extra={"reason": str(error)})
            self._stopping.wait(AGAIN_S)

    def _pass(self) -> None:
        holdings = self._owner.holdings_on(self._line.node.node_id)
        for held in holdings:
            while held.settled or held.failed:
                if not self._send(held):
                    break
        for held in holdings:
            if held.state is State.DRAINING and self._drained(held):
                self._release(held)

    def _send(self, held: Held) -> bool:
        """Send what one holding has; say whether to go on with it."""
        batch = self._take(held)
        failed = [held.failed.popleft() for _ in range(len(held.failed))]
        commands = [attempt_command(self._line, held.holder, offset) for offset in failed]
        if batch is not None:
            commands.append(batch.command)
        try:
            failpoint("ack.before_send")
            replies = self._line.call(commands)
            failpoint("ack.after_send")
            if any(is_missing_script(reply) for reply in replies):
                self._line.reload_scripts()
                replies = self._line.call(commands)
        except StoreUnavailable:
            held.failed.extendleft(reversed(failed))
            if batch is not None:
                held.settled.extendleft(reversed(batch.records))
            raise
        address = self._line.node.address
        fenced = any(isinstance(attempt_reply(reply, address), Fenced) for reply in replies[: len(failed)])
        if batch is not None:
            fenced = not self._judge(batch, replies[-1]) or fenced
        if fenced:
            self._owner.fenced(held, "settle")
        return not fenced

    def _take(self, held: Held) -> Batch | None:
        """Take settled records, at most as many ranges as one call may have."""
        records: list[Record] = [held.settled.popleft() for _ in range(len(held.settled))]
        if not records:
            return None
        ranges = as_ranges(record.offset for record in records)
        if len(ranges) > RANGES_PER_CALL:
            ranges = ranges[:RANGES_PER_CALL]
            last = ranges[-1][1]
            held.settled.extendleft(reversed([record for record in records if record.offset > last]))
            records = [record for record in records if record.offset <= last]
        forget = [record.offset for record in records if record.offset in held.attempts] if held.attempts else []
        return Batch(held, records, settle_command(self._line, held.holder, ranges, forget))

    def _judge(self, batch: Batch, reply: Any) -> bool:
        """Take in what the server says of a settled batch; say whether it was taken."""
        answer = settle_reply(reply, self._line.node.address)
        if isinstance(answer, Fenced):
            return False
        if isinstance(answer, Refused):
            # Offsets that the node never gave out: it fell back under us. Nothing was changed there.
            facts = {"partition": batch.held.partition, "word": answer.word, "fact": answer.fact}
            log.error("settling_refused", extra=facts)
            return False
        for record in batch.records:
            batch.held.attempts.pop(record.offset, None)
        self._owner.acknowledged(batch.held, batch.records, answer.committed)
        return True

    def _drained(self, held: Held) -> bool:
        late = clock() > held.drain_until
        if late and held.busy:
            log.warning("drain_limit_passed", extra={"partition": held.partition, "running": held.busy})
        return late or (held.busy == 0 and not held.settled)

    def _release(self, held: Held) -> None:
        failpoint("release.before_redis")
        self._line.call([release_command(self._line, held.holder)])
        failpoint("release.after_redis")
        self._owner.released(held)
