"""Read records from one node: take pull locks, read ahead within bounds, check the locks with every read.

One thread and one connection per node. Waiting is a blocking XREAD on all readable partitions of the node, so an append
wakes the reader at once; the lock checks travel in the same write and are answered after the read, so what was read
counts only if the lock was ours then.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import Any, Final, Protocol

from mqlayer.consuming.holdings import Held, State
from mqlayer.domain.message import Record, records_of
from mqlayer.domain.routing import NodeId
from mqlayer.errors import NodeNotArmed, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.nodes import NodeConnection, is_missing_script, raise_for_reply
from mqlayer.redis.partitions import Fenced, Refused, Taken, take_command, take_reply

log = logging.getLogger(__name__)

READ_COUNT: Final = 500
BLOCK_MS: Final = 100
"""Longest wait in one read: a new or released partition waits at most this long to be seen."""
SHORT_BLOCK_MS: Final = 10
"""The same while some partition is held back for lack of room."""
AGAIN_S: Final = (0.05, 1.0)


class ReadingOwner(Protocol):
    """What a reader asks of its member."""

    def holdings_on(self, node_id: NodeId) -> list[Held]:
        """Return the holdings on a node that are not gone."""

    def may_read(self) -> bool:
        """Say whether the lease still holds."""

    def shares(self) -> tuple[int, int]:
        """Return how many records and bytes one partition may have in hand."""

    def taken(self, held: Held, taken: Taken) -> None:
        """Start a holding whose pull lock is ours now."""

    def read(self, held: Held, records: list[Record]) -> None:
        """Take in records that were read under the lock."""

    def fenced(self, held: Held, reason: str) -> None:
        """Drop a holding that a later owner has."""

    def node_lost(self, node_id: NodeId) -> None:
        """Drop all holdings on a node that is not the armed run."""


class Reader:
    """The reading thread of one node."""

    def __init__(self, owner: ReadingOwner, line: NodeConnection, *, name: str) -> None:
        self._owner, self._line = owner, line
        self.wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{name}-reader", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop reading."""
        self._stopping.set()
        self.wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._pass()
            except NodeNotArmed:
                self._owner.node_lost(self._line.node.node_id)
                self._stopping.wait(random.uniform(*AGAIN_S))
            except StoreUnavailable as error:
                log.warning("reading_waits", extra={"reason": str(error)})
                self._stopping.wait(random.uniform(*AGAIN_S))
        self._line.close()

    def _pass(self) -> None:
        holdings = self._owner.holdings_on(self._line.node.node_id)
        self._take([held for held in holdings if held.state is State.NEW])
        readable, count, held_back = self._choose([held for held in holdings if held.state is State.OPEN])
        if not readable or not self._owner.may_read():
            self.wake.wait(BLOCK_MS / 1000)
            self.wake.clear()
            return
        self._read(readable, count, SHORT_BLOCK_MS if held_back else BLOCK_MS)

    def _choose(self, holdings: list[Held]) -> tuple[list[Held], int, bool]:
        """Return who may be read, how many records of each, and whether somebody must wait for room."""
        count_share, bytes_share = self._owner.shares()
        rooms = [(held, held.room(count_share, bytes_share)) for held in holdings]
        # A quarter of the share at the least, or an empty hand: no reads of one record at a time.
        enough = max(1, min(count_share // 4, READ_COUNT))
        readable = [(held, room) for held, room in rooms if room >= enough or (room > 0 and not held.count_in_hand)]
        count = min([READ_COUNT, *(room for _, room in readable)])
        return [held for held, _ in readable], count, len(readable) < len(rooms)

    def _take(self, holdings: list[Held]) -> None:
        if not holdings:
            return
        commands = [take_command(self._line, h.holder, start=h.assigned.start, afresh=True) for h in holdings]
        failpoint("take.before_send")
        replies = self._line.call(commands)
        failpoint("take.after_send")
        for held, reply in zip(holdings, replies, strict=True):
            if is_missing_script(reply):
                self._line.reload_scripts()
                return
            answer = take_reply(reply, self._line.node.address)
            if isinstance(answer, Taken):
                self._owner.taken(held, answer)
            else:
                self._lost(held, answer)

    def _read(self, readable: list[Held], count: int, block_ms: int) -> None:
        keys = [partition_keys(held.holder.prefix, held.partition).log for held in readable]
        after = [b"%d-0" % (held.next_read - 1) for held in readable]
        read = ("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", *keys, *after)
        checks = [take_command(self._line, held.holder, start=held.assigned.start) for held in readable]
        streams, *locks = self._line.call([read, *checks])
        if any(is_missing_script(reply) for reply in locks):
            self._line.reload_scripts()
            return
        raise_for_reply(streams, self._line.node.address)
        by_key: dict[bytes, Any] = dict(streams) if streams else {}
        failpoint("read.after_reply")
        for held, key, lock in zip(readable, keys, locks, strict=True):
            answer = take_reply(lock, self._line.node.address)
            if isinstance(answer, Fenced | Refused):
                self._lost(held, answer)
            elif key in by_key:
                self._owner.read(held, records_of(by_key[key]))

    def _lost(self, held: Held, answer: object) -> None:
        if isinstance(answer, Refused):
            facts = {"partition": held.partition, "word": answer.word, "address": self._line.node.address}
            log.error("partition_refused", extra=facts)
        self._owner.fenced(held, "pull")
