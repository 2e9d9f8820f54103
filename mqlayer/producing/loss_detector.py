"""Finds acknowledged messages lost by nodes, after arming or a route change.

The chain reports losses to publishes; this covers idle LPs, with one connection per node.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.logs import event_logger
from mqlayer.producing.guarded_in_flight import GuardedInFlight
from mqlayer.producing.losses import AcknowledgedMark
from mqlayer.producing.node_sender import NodeSender
from mqlayer.producing.scheduler import Scheduler
from mqlayer.producing.send_queues import SenderKey
from mqlayer.redis.node_connection import Node
from mqlayer.redis.partition_scripts import LIVE_STATES
from mqlayer.redis.read_scripts import MARKS_PER_CALL, marks_of
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

TRIES: Final = 10
FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 60.0
LATE_TRIES: Final = 6
"""After some 16 s, no append from before the first try is outstanding."""


class LossDetector:
    """Checks nodes, in the scheduler's thread; `note_armed` may run in any.

    Failed checks repeat, ten in two minutes or more; arming starts anew.
    """

    def __init__(
        self,
        guarded: GuardedInFlight,
        scheduler: Scheduler,
        senders: Mapping[SenderKey, NodeSender],
        runtime: Runtime,
        find_node: Callable[[NodeId], Node],
    ) -> None:
        self._guarded, self._scheduler, self._senders = guarded, scheduler, senders
        self._runtime, self._find_node = runtime, find_node
        self._armed_at: dict[NodeId, datetime | None] = {}
        self._due: dict[NodeId, tuple[int, float]] = {}

    def note_armed(self, node_id: NodeId, armed_at: datetime | None) -> None:
        """Note a new node's arming time."""
        self._armed_at.setdefault(node_id, armed_at)

    def check_rearmed(self, armed_at: Mapping[NodeId, datetime | None]) -> None:
        """Check nodes armed since."""
        changed = [node_id for node_id, before in self._armed_at.items() if armed_at.get(node_id, before) != before]
        self._armed_at.update({node_id: armed_at[node_id] for node_id in changed})
        self.schedule(changed)
        self.run()

    def schedule(self, node_ids: Iterable[NodeId]) -> None:
        """Make nodes due."""
        self._due.update(dict.fromkeys(node_ids, (0, 0.0)))

    def run(self) -> None:
        """Check due nodes."""
        for node_id, (tries, due_at) in list(self._due.items()):
            now = time.monotonic()
            if due_at > now:
                continue
            del self._due[node_id]
            if self._check(node_id, tries):
                continue
            if tries + 1 == TRIES:
                log.warning("producer_loss_check_abandoned", extra={"node": self._senders_of(node_id)[0].queue.runs[0]})
                continue
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**tries)
            self._due[node_id] = (tries + 1, now + pause_s)
            self._scheduler.schedule(self.run, after_s=pause_s)

    def _check(self, node_id: NodeId, tries: int) -> bool:
        """Whether the check is complete."""
        senders = self._senders_of(node_id)
        with self._guarded as in_flight:
            expected_marks = in_flight.losses.expected_marks(node_id)
            # An outstanding answer may predate the arming.
            whole = not any(sender.unanswered_count for sender in senders) or tries >= LATE_TRIES
        if not expected_marks:
            return whole
        try:
            found = self._marks(node_id, expected_marks)
        except MqlayerError as error:
            log.info("producer_loss_check_failed", extra={"node": senders[0].queue.runs[0], "reason": str(error)})
            return False
        with self._guarded as in_flight:
            for expected, mark in found:
                in_flight.losses.check_mark(expected, mark)
        return whole and len(found) == len(expected_marks)

    def _senders_of(self, node_id: NodeId) -> list[NodeSender]:
        return [sender for (of_node, _), sender in list(self._senders.items()) if of_node == node_id]

    def _marks(self, node_id: NodeId, expected_marks: Sequence[AcknowledgedMark]) -> list[tuple[AcknowledgedMark, int]]:
        of: dict[int, list[AcknowledgedMark]] = defaultdict(list)
        for expected in expected_marks:
            of[expected.partition].append(expected)
        asked = [some[at : at + MARKS_PER_CALL] for some in of.values() for at in range(0, len(some), MARKS_PER_CALL)]
        wanted = [(some[0].partition, [(expected.source, expected.queue.lp) for expected in some]) for some in asked]
        with self._runtime.connection(self._find_node(node_id), RedisRole.PUBLISHER) as connection:
            answers = marks_of(connection, self._runtime.prefix, wanted)
        return [
            pair
            for some, (state, marks) in zip(asked, answers, strict=True)
            if state in LIVE_STATES
            for pair in zip(some, marks, strict=True)
        ]
