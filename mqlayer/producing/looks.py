"""Look whether nodes still have what they acknowledged: when one was armed anew, or a topic has another route.

Whoever publishes to an LP is told of a loss there by the chain. This is for all the others: one connection and one
round trip per node that was armed, whatever was published.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError
from mqlayer.producing.clerk import Clerk
from mqlayer.producing.ledger import Ledger, tell_all
from mqlayer.producing.links import Link
from mqlayer.producing.losses import Claim
from mqlayer.redis.looking import MARKS_PER_CALL, marks_of
from mqlayer.redis.nodes import NodeConnection
from mqlayer.redis.partitions import HELD_STATES

log = logging.getLogger(__name__)

TRIES: Final = 10
FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 60.0
LATE_TRIES: Final = 6
"""After so many, some 16 s, nothing is under way any more that was sent before the first one."""


class Looks:
    """Which nodes a producer has to look at. For the clerk's thread, but for `know`.

    A look that fails is repeated, ten times in some four minutes; a node that is armed again is looked at anew.
    """

    def __init__(
        self, ledger: Ledger, clerk: Clerk, links: Mapping[NodeId, Link], line: Callable[[NodeId], NodeConnection], *,
        prefix: str,
    ) -> None:  # fmt: skip
        self._ledger, self._clerk, self._links, self._line, self._prefix = ledger, clerk, links, line, prefix
        self._armed_at: dict[NodeId, datetime | None] = {}
        self._due: dict[NodeId, tuple[int, float]] = {}

    def know(self, node_id: NodeId, armed_at: datetime | None) -> None:
        """Note when a node was armed that is used from now on."""
        self._armed_at.setdefault(node_id, armed_at)

    def heed(self, armed_at: Mapping[NodeId, datetime | None]) -> None:
        """Look at the nodes that were armed since."""
        changed = [node_id for node_id, before in self._armed_at.items() if armed_at.get(node_id, before) != before]
        self._armed_at.update({node_id: armed_at[node_id] for node_id in changed})
        self.want(changed)
        self.run()

    def want(self, node_ids: Iterable[NodeId]) -> None:
        """Have nodes looked at by the next run."""
        self._due.update(dict.fromkeys(node_ids, (0, 0.0)))

    def run(self) -> None:
        """Look at all nodes that are due."""
        for node_id, (tries, due_at) in list(self._due.items()):
            now = time.monotonic()
            if due_at > now:
                continue
            del self._due[node_id]
            if self._look(node_id, tries):
                continue
            if tries + 1 == TRIES:
                log.warning("producer_look_given_up", extra={"node": self._links[node_id].runs[0]})
                continue
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**tries)
            self._due[node_id] = (tries + 1, now + pause_s)
            self._clerk.do(self.run, after_s=pause_s)

    def _look(self, node_id: NodeId, tries: int) -> bool:
        """Compare a node's marks with what it acknowledged; say whether there is nothing left to compare."""
        link = self._links[node_id]
        with self._ledger.lock:
            claims = self._ledger.claims(link)
            # An answer that is on its way may be one of before.
            whole = not link.under_way or tries >= LATE_TRIES
        if not claims:
            return whole
        try:
            found = self._marks(node_id, claims)
        except MqlayerError as error:
            log.info("producer_look_failed", extra={"node": link.runs[0], "reason": str(error)})
            return False
        told = []
        with self._ledger.lock:
            for claim, mark in found:
                told += self._ledger.missed(claim, mark)
        tell_all(told)
        return whole and len(found) == len(claims)

    def _marks(self, node_id: NodeId, claims: Sequence[Claim]) -> list[tuple[Claim, int]]:
        """Return what was claimed of partitions that can tell, with their marks."""
        of: dict[int, list[Claim]] = defaultdict(list)
        for claim in claims:
            of[claim.partition].append(claim)
        asked = [some[at : at + MARKS_PER_CALL] for some in of.values() for at in range(0, len(some), MARKS_PER_CALL)]
        wanted = [(some[0].partition, [(claim.source, claim.lane.lp) for claim in some]) for some in asked]
        with self._line(node_id) as line:
            answers = marks_of(line, self._prefix, wanted)
        return [
            pair
            for some, (state, marks) in zip(asked, answers, strict=True)
            if state in HELD_STATES
            for pair in zip(some, marks, strict=True)
        ]
