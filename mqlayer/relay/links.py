"""The relay's side of each node: one line, what is under way on it, and when to try it again.

Nothing here waits for one node longer than the stall time: connecting and arming run in the background, and replies
are read when they are there. A node that is away or slow has its own LPs wait, and no others.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NodeNotArmed, NotFound, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Database
from mqlayer.redis.nodes import Node, NodeConnection, connection_of
from mqlayer.redis.partitions import end_sources
from mqlayer.redis.roles import RedisRole
from mqlayer.relay.comparing import Compared, Comparer
from mqlayer.relay.lanes import Lane, Target
from mqlayer.relay.pauses import pause_s
from mqlayer.routes.cache import RouteCache
from mqlayer.settings import Settings
from mqlayer.topics.nodes import rearm_node

log = logging.getLogger(__name__)

LOOK_LIMIT_S: Final = 5.0
"""A lease may be so short that no question is answered within it."""

SentRun = tuple[Lane, int, int]
"""A lane, the first seq and the count of what was sent."""


@dataclass(frozen=True, slots=True)
class Append:
    """One append call that waits for its reply."""

    target: Target
    runs: list[SentRun]


@dataclass(frozen=True, slots=True)
class MarksQuestion:
    """One question for the marks of a partition that waits for its reply."""

    target: Target
    lanes: list[Lane]


@dataclass(frozen=True, slots=True)
class Flight:
    """One write to a node and what it asked."""

    number: int
    sent_at: float
    asked: Sequence[Append | MarksQuestion]


class Connected(NamedTuple):
    """A line to a node that was told our term, and what is compared there."""

    line: NodeConnection
    compared: Compared


@dataclass(slots=True, eq=False)
class Link:
    """One node. `synced` says that its marks were asked for since it was connected.

    `token`: what appends carry, by which it knows that they were read in our term. `compared`: the partitions that may
    be sent to; `missing`: those that routes name besides, and `comparing` the ones that are seen to.
    """

    node_id: NodeId
    address: str = ""
    line: NodeConnection | None = None
    flights: deque[Flight] = field(default_factory=deque)
    synced: bool = False
    stalled: bool = False
    # It answered that it does not have a partition that Postgres says it has.
    suspect: bool = False
    failures: int = 0
    trouble: str = ""
    try_at: float = float("-inf")
    connecting: Future[Connected] | None = None
    token: str = ""
    compared: frozenset[int] = frozenset()
    missing: set[int] = field(default_factory=set)
    comparing: tuple[frozenset[int], Future[frozenset[int]]] | None = None
    compare_failures: int = 0
    compare_at: float = float("-inf")

    def takes(self, partition: int) -> bool:
        """Whether messages may be sent to a partition of it now; one that is not compared will be."""
        if not self.usable:
            return False
        if partition not in self.compared:
            self.missing.add(partition)
            return False
        return True

    @property
    def usable(self) -> bool:
        """Whether messages may be sent to it now."""
        return self.line is not None and self.synced and not self.stalled


class Links:
    """All links of a relay."""

    comparer: Comparer
    """Tells whether Postgres has what is in Redis; asked of each node before it is sent anything, see there. Set by the
    owner before the first `tend`, as `former` is."""

    def __init__(
        self,
        settings: Settings,
        control: Database,
        application: Database,
        routes: RouteCache,
        background: ThreadPoolExecutor,
    ) -> None:
        self._settings, self._control, self._application = settings, control, application
        self._routes, self._background = routes, background
        self._links: dict[int, Link] = {}
        self.former: tuple[int, ...] = ()
        """The outbox's former sources: before nodes are sent anything under its present one, they are told of these."""
        self._chance = random.Random()
        self._flight_number = 0
        self._looking: Future[dict[NodeId, Node]] | None = None
        self._looked_at = self._look_began = time.monotonic()

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    @property
    def flight_number(self) -> int:
        """The number of the last write."""
        return self._flight_number

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why nodes can't be sent to. For any thread."""
        return tuple(link.trouble for link in self if link.failures and not link.synced)

    def link(self, node_id: int) -> Link:
        """Return the link of a node; a new one begins to connect with the next `tend`."""
        if node_id not in self._links:
            self._links[node_id] = Link(NodeId(node_id))
        return self._links[node_id]

    def tend(self, now: float) -> list[Link]:
        """Begin to connect what is due; return the links that are newly connected."""
        fresh = []
        for link in self:
            if link.line is not None:
                continue
            if link.connecting is None and now >= link.try_at:
                link.connecting = self._background.submit(self._connect, link.node_id, link.suspect)
            elif link.connecting is not None and link.connecting.done() and self._take(link, link.connecting):
                fresh.append(link)
        return fresh

    def compare(self, now: float) -> None:
        """Have partitions compared that came to nodes since these were connected, in the background."""
        for link in self:
            if link.comparing is not None and link.comparing[1].done():
                self._take_compared(link, *link.comparing, now)
            if link.line is not None and link.missing and link.comparing is None and now >= link.compare_at:
                asked = frozenset(link.missing)
                link.comparing = asked, self._background.submit(self._compare_more, link.node_id, asked)
                link.missing.clear()

    def _take_compared(self, link: Link, asked: frozenset[int], comparing: Future[frozenset[int]], now: float) -> None:
        link.comparing, reason = None, "the records are on a node that is away"
        try:
            link.compared |= comparing.result()
        except MqlayerError as error:
            reason = str(error)
        if asked <= link.compared:
            link.compare_failures = 0
            return
        link.compare_failures += 1
        link.compare_at = now + pause_s(link.compare_failures, self._chance)
        shown = log.warning if link.compare_failures in (1, 5) or link.compare_failures % 30 == 0 else log.debug
        waiting = sorted(asked - link.compared)
        shown("relay_not_compared", extra={"node": link.address, "partitions": waiting, "reason": reason})

    def _compare_more(self, node_id: NodeId, partitions: frozenset[int]) -> frozenset[int]:
        with ExitStack() as cleanup:
            lines = self._others(cleanup)
            return self.comparer.compare_more(lines(node_id), partitions, lines)

    def look(self, now: float) -> list[tuple[Link, MqlayerError]]:
        """Ask in the background which runs and addresses of nodes count; return the lines that must not be used.

        An old primary that lives on tells nobody that it was replaced. Where nobody can be asked for longer than a
        lease, no line counts: what such a primary took would be recorded as relayed, and some day not be in the outbox.
        """
        looking, void = self._looking, list[tuple[Link, MqlayerError]]()
        if looking is not None and looking.done():
            self._looking = None
            if looking.exception() is None:
                self._looked_at = self._look_began
                nodes = looking.result()
                void = [
                    (link, NodeNotArmed(link.address, "another run or address of it counts since"))
                    for link in self
                    if link.line is not None and nodes.get(link.node_id) not in (None, link.line.node)
                ]
            else:
                log.debug("relay_nodes_unknown", extra={"reason": str(looking.exception())})
        if self._looking is None:
            self._look_began = now
            self._looking = self._background.submit(self._routes.refresh_nodes)
        if now - self._looked_at <= max(self._settings.lease_s, LOOK_LIMIT_S):
            return void
        error = StoreUnavailable(self._control.address, "nobody can say whether the nodes' runs are still armed")
        return [(link, error) for link in self if link.line is not None]

    def send(self, link: Link, packets: Sequence[bytes], asked: Sequence[Append | MarksQuestion]) -> bool:
        """Send requests in one write; return False when the line broke, which leaves everything on it unknown."""
        self._flight_number += 1
        link.flights.append(Flight(self._flight_number, time.monotonic(), asked))
        try:
            if link.line is None:
                raise StoreUnavailable(link.address, "not connected")
            link.line.send_packet(b"".join(packets))
        except StoreUnavailable as error:
            self.drop(link, error)
            return False
        failpoint("relay.after_send")
        return True

    def answered(self, link: Link, *, wait_s: float) -> tuple[Flight, list[Any]] | None:
        """Return the oldest flight with its replies, or None when they did not come within the time.

        Raises StoreUnavailable when the line broke or the node is silent for longer than the socket timeout.
        """
        if not link.flights or link.line is None:
            return None
        oldest = link.flights[0]
        if not link.line.ready(wait_s):
            if time.monotonic() - oldest.sent_at > self._settings.socket_timeout_s:
                raise StoreUnavailable(link.address, f"no answer within {self._settings.socket_timeout_s:g} s")
            return None
        replies = link.line.receive(len(oldest.asked))
        link.flights.popleft()
        link.stalled = False
        return oldest, replies

    def drop(self, link: Link, error: MqlayerError) -> None:
        """Give up a line and try again after a pause; its flights stay for the caller to rewind."""
        if link.line is not None:
            link.line.close()
        link.line, link.connecting = None, None
        # What is under way is of the former line: its answer counts for nothing.
        link.comparing, link.compared = None, frozenset()
        link.missing.clear()
        link.synced = link.stalled = False
        link.failures += 1
        link.trouble = str(error)
        wait_s = pause_s(link.failures, self._chance)
        link.try_at = time.monotonic() + wait_s
        shown = log.warning if link.failures in (1, 5) or link.failures % 30 == 0 else log.debug
        shown("relay_node_away", extra={"reason": str(error), "failures": link.failures, "retry_s": round(wait_s, 3)})

    def close(self) -> None:
        """Close all lines."""
        for link in self:
            if link.line is not None:
                link.line.close()
                link.line = None
            if link.connecting is not None:
                link.connecting.add_done_callback(_close_unused)

    def _take(self, link: Link, connecting: Future[Connected]) -> bool:
        try:
            link.line, (link.token, link.compared) = connecting.result()
        except MqlayerError as error:
            self.drop(link, error)
            return False
        except Exception as error:  # noqa: BLE001 - a fault about one node must not end the relay for all others
            kind = type(error).__name__
            log.error("relay_connect_failed", extra={"node_id": link.node_id, "error": kind})
            self.drop(link, StoreUnavailable(f"node {link.node_id}", kind))
            return False
        link.connecting = None
        link.address = link.line.node.address
        link.suspect = False
        if link.failures:
            log.warning("relay_node_back", extra={"node": link.line.node.name, "failures": link.failures})
        return True

    def _connect(self, node_id: NodeId, suspect: bool) -> Connected:  # noqa: FBT001
        """Connect to a node, armed again where it has to be. Runs in the background."""
        node = self._routes.refresh_nodes().get(node_id)
        if node is None:
            raise NotFound("node", node_id, "it was removed while partitions of a route are on it")
        if not suspect:
            try:
                return self._connected(node)
            except NodeNotArmed as error:
                # Arming may wait for somebody else, and has its own reasons only when it is given up.
                self._links[node_id].trouble = str(error)
                log.info("relay_node_not_armed", extra={"node": node.name})
        settings = self._settings
        node, _ = rearm_node(
            self._control,
            node.name,
            prefix=settings.key_prefix,
            application=self._application,
            actor="relay",
            unsafe=settings.allow_unsafe_redis,
        )
        return self._connected(node)

    def _connected(self, node: Node) -> Connected:
        line = self._open(node)
        try:
            end_sources(line, self._settings.key_prefix, self.former, closed=True)
            with ExitStack() as cleanup:
                return Connected(line, self.comparer.compare_node(line, self._others(cleanup)))
        except BaseException:
            line.close()
            raise

    def _open(self, node: Node) -> NodeConnection:
        settings = self._settings
        line = connection_of(node, settings, RedisRole.RELAY)
        try:
            line.connect()
        except BaseException:
            line.close()
            raise
        return line

    def _others(self, cleanup: ExitStack) -> Callable[[NodeId], NodeConnection]:
        """Return how to get a connection to a node, to be closed with the others."""
        opened: dict[NodeId, NodeConnection] = {}

        def line_to(node_id: NodeId) -> NodeConnection:
            if node_id not in opened:
                node = self._routes.refresh_nodes().get(node_id)
                if node is None:
                    raise NotFound("node", node_id, "it was removed")
                opened[node_id] = cleanup.enter_context(closing(self._open(node)))
            return opened[node_id]

        return line_to


def _close_unused(connecting: Future[Connected]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().line.close()
