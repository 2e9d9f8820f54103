"""What a producer needs from Postgres: incarnations, routes and nodes; and reading back what was stored before."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from mqlayer.domain.message import Identity
from mqlayer.domain.routing import NodeId, Route
from mqlayer.errors import MqlayerError, NotFound, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import check_schema
from mqlayer.postgres.queries import query
from mqlayer.postgres.rights import Right, require
from mqlayer.producing.clerk import Clerk
from mqlayer.producing.lanes import Slot, TopicLanes
from mqlayer.producing.ledger import Ledger, tell_all
from mqlayer.producing.links import Link, LinkOptions, stop_links
from mqlayer.producing.looks import Looks
from mqlayer.producing.lookup import find_on_nodes
from mqlayer.producing.parcels import Found, Parcel, Place
from mqlayer.producing.pauses import pause_s, route_pause_s
from mqlayer.redis.nodes import Node, NodeConnection, connection_of
from mqlayer.redis.roles import RedisRole
from mqlayer.routes.cache import RouteCache

log = logging.getLogger(__name__)

ROUTE_AGE_S: Final = 5.0
LOOK_S: Final = 2.0
"""How often a producer that publishes asks which runs and addresses of nodes count."""
IDLE_LOOK_S: Final = 5.0
"""How often one that does not publish asks that."""
IDLE_ROUTE_AGE_S: Final = 30.0
"""How old the route of a topic gets to which nothing is published."""
LIMITS_AGE_S: Final = 1.0
"""How old a topic's limits are at the least that are read again because a partition is full."""
FIND_TRIES: Final = 5
ROUTE_LOOK_AFTER_S: Final = 1.0
"""Lets what waits for a new route go first."""


def open_source(database: Database, name: str) -> int:
    """Register a new incarnation of a direct producer. Raises StoreUnavailable or SchemaMismatch."""
    with database.connection() as connection:
        require(connection, "control", Right.PUBLISH)
        check_schema(connection, "control", database.address)
        row = connection.execute(query("source_open_direct"), {"name": name}).fetchone()
    if row is None:
        raise StoreUnavailable(database.address, "no source id came back")
    return int(row[0])


@dataclass(frozen=True, slots=True)
class Search:
    """A parcel whose first `early` messages an earlier try had stored; the others are at `place` from `offset` on."""

    parcel: Parcel
    early: int
    place: Place
    offset: int
    slots: tuple[Slot, ...]
    """Where the early ones may be."""

    def outcome(self, found: dict[Identity, tuple[int, int]]) -> Found:
        """Return where all messages of the parcel are, as far as that was found."""
        positions: list[tuple[int, int | None]] = [
            found.get(identity, (self.place.partition, None)) for identity in self.wanted()
        ]
        positions += [(self.place.partition, self.offset + i) for i in range(self.parcel.count - self.early)]
        return Found(self.place.source, self.place.replicas, tuple(positions))

    def wanted(self) -> list[Identity]:
        """Return what is looked for."""
        first, lp = self.parcel.first, self.parcel.lane.lp
        return [Identity(self.place.source, lp, first + i) for i in range(self.early)]


class Upkeep:
    """Keeps a ledger's routes, links and incarnation up to date, in a thread of its own. Safe to use from any thread.

    While Postgres can't be reached, what is known goes on being used, and jobs are repeated until they succeed.
    """

    def __init__(
        self, *, name: str, database: Database, routes: RouteCache, ledger: Ledger, options: LinkOptions
    ) -> None:
        self.sources = [] if ledger.source is None else [ledger.source]
        self.links: dict[NodeId, Link] = {}
        self._name, self._database, self._routes = name, database, routes
        self._ledger, self._options = ledger, options
        self._clerk = Clerk()
        self._links_lock = threading.Lock()
        self._looked_at = time.monotonic()
        self._looks = Looks(ledger, self._clerk, self.links, self._lookup_line, prefix=options.settings.key_prefix)
        ledger.errands = self

    def topic(self, name: str) -> TopicLanes:
        """Return a topic, read at its first use. Raises NotFound, InvalidName, or StoreUnavailable."""
        route = self._routes.route(name)
        links = self._links_of(route)
        with self._ledger.lock:
            topic = self._ledger.topics.get(name)
            if topic is None:
                topic = TopicLanes(route, self._table(route, links), time.monotonic())
                self._ledger.topics[name] = topic
        for link in links.values():
            link.warm_up()
        return topic

    def refresh_if_old(self, topic: TopicLanes, now: float) -> None:
        """Have an old route, and what is known of nodes, read again in the background."""
        if now - self._looked_at > LOOK_S:
            self._looked_at = now
            self._clerk.do(self._look_at_nodes)
        if now - topic.asked_at > ROUTE_AGE_S:
            topic.asked_at = now
            self._clerk.do(lambda: self._renew_route(topic))

    def wake(self) -> None:
        """Have every link look for work; call with the lock held."""
        for link in list(self.links.values()):
            if link.slots:
                link.wake_locked()

    def stop(self, timeout_s: float) -> None:
        """End all threads and connections."""
        self._clerk.stop(timeout_s)
        stop_links(list(self.links.values()), timeout_s)

    def close_sources(self) -> None:
        """Say in Postgres that our incarnations ended; if that fails they stay open, which costs some memory only."""
        for source in self.sources:
            try:
                failpoint("producer.before_source_close")
                with self._database.connection() as connection:
                    connection.execute(query("source_close"), {"source_id": source})
            except MqlayerError as error:
                log.warning("source_not_closed", extra={"source": source, "reason": str(error)})

    # Errands of the ledger

    def reroute(self, topic: TopicLanes) -> None:
        """Get a newer route and release the topic's stranded lanes."""
        self._clerk.do(lambda: self._reroute(topic))

    def look_again(self, topic: TopicLanes) -> None:
        """Read a topic's limits again, unless that was done just now."""
        now = time.monotonic()
        if now - topic.asked_at > LIMITS_AGE_S:
            topic.asked_at = now
            self._clerk.do(lambda: self._renew_route(topic))

    def renew(self) -> None:
        """Register a new incarnation."""
        self._clerk.do(lambda: self._renew(1))

    def search(self, parcel: Parcel, early: int, place: Place, offset: int) -> None:
        """Find the first `early` messages of a parcel, stored by an earlier try; the others are at the place."""
        lane = parcel.lane
        slots = tuple(dict.fromkeys((lane.slot, *lane.unsure_at)))
        found = Search(parcel, early, place, offset, slots)
        self._clerk.do(lambda: self._find(found, 1))

    # Losses

    def _look_when_idle(self) -> None:
        try:
            now = time.monotonic()
            if now - self._looked_at > LOOK_S:
                self._looked_at = now
                self._look_at_nodes()
            for topic in list(self._ledger.topics.values()):
                if now - topic.asked_at > IDLE_ROUTE_AGE_S:
                    topic.asked_at = now
                    self._renew_route(topic)
        finally:
            self._clerk.do(self._look_when_idle, after_s=IDLE_LOOK_S)

    def _heed_nodes(self) -> None:
        """Go by what was read of nodes: no line to a former run first, then ask those that were armed since."""
        nodes = self._routes.nodes
        for node_id, link in list(self.links.items()):
            if node_id in nodes:
                link.expect(nodes[node_id])
        self._looks.heed(self._routes.armed_at)

    def _look_at(self, node_ids: list[NodeId]) -> None:
        self._looks.want(node_ids)
        self._looks.run()

    # Routes

    def _refresh(self, topic: TopicLanes) -> bool:
        """Read a topic's route again; return whether stranded lanes have another partition by it."""
        route = self._routes.refresh(topic.name)
        links = self._links_of(route)
        with self._ledger.lock:
            if route.age > topic.route.age:
                # A node that was given up may have taken with it what its successors can't have.
                self._clerk.do(lambda: self._look_at(list(links)), after_s=ROUTE_LOOK_AFTER_S)
            if route.age >= topic.route.age:
                topic.adopt(route, self._table(route, links), time.monotonic())
            return any(topic.table[lane.lp] is not lane.slot for lane in topic.stranded)

    def _look_at_nodes(self) -> None:
        """Use no line to a primary that was replaced: it may live on, and tells nobody."""
        self._routes.refresh_nodes()
        self._heed_nodes()

    def _renew_route(self, topic: TopicLanes) -> None:
        self._refresh(topic)

    def _reroute(self, topic: TopicLanes) -> None:
        failpoint("producer.before_reroute")
        try:
            changed = self._refresh(topic)
        except MqlayerError as error:
            log.warning("route_not_refreshed", extra={"topic": topic.name, "reason": str(error)})
            changed = False
        if changed:
            self._release(topic)
            return
        with self._ledger.lock:
            refusals = max((lane.reroutes for lane in topic.stranded), default=1)
        self._clerk.do(lambda: self._release(topic), after_s=route_pause_s(refusals))

    def _release(self, topic: TopicLanes) -> None:
        with self._ledger.lock:
            topic.rerouting = False
            self._ledger.release(topic)
            self.wake()

    def _table(self, route: Route, links: dict[NodeId, Link]) -> list[Slot]:
        """Return the slot of each LP; call with the lock held."""
        table: list[Slot] = []
        for r in route.ranges:
            slot = self._ledger.slots.get(r.partition)
            if slot is None:
                slot = self._ledger.slots[r.partition] = Slot(r.partition, links[r.node], route.backlog_limit)
            slot.backlog_limit = route.backlog_limit
            table += [slot] * (r.lp_to - r.lp_from)
        return table

    def _links_of(self, route: Route) -> dict[NodeId, Link]:
        return {node_id: self._link(node_id) for node_id in {r.node for r in route.ranges}}

    def _link(self, node_id: NodeId) -> Link:
        with self._links_lock:
            link = self.links.get(node_id)
            if link is None:
                if not self.links:
                    self._clerk.do(self._look_when_idle, after_s=IDLE_LOOK_S)
                node = self._node(node_id)
                self._looks.know(node_id, self._routes.armed_at.get(node_id))
                link = self.links[node_id] = Link(node, self._ledger, self._options, self._fresh_node)
            return link

    def _node(self, node_id: NodeId) -> Node:
        try:
            return self._routes.node(node_id)
        except KeyError:
            raise NotFound("node", node_id, "its row is gone from the control database") from None

    def _fresh_node(self, node_id: NodeId) -> Node:
        self._routes.refresh_nodes()
        self._clerk.do(self._heed_nodes)
        return self._node(node_id)

    # Incarnations

    def _renew(self, tries: int) -> None:
        try:
            source = open_source(self._database, self._name)
        except MqlayerError as error:
            log.warning("source_not_renewed", extra={"reason": str(error)})
            self._clerk.do(lambda: self._renew(tries + 1), after_s=pause_s(tries))
            return
        failpoint("producer.after_renewal")
        with self._ledger.lock:
            self.sources.append(source)
            self._ledger.renew(source)
            self.wake()

    # Reading back

    def _find(self, search: Search, tries: int) -> None:
        try:
            found, all_asked = self._look(search)
        except MqlayerError as error:
            # The messages are stored; only where stays unknown if this goes on.
            log.warning("position_not_found", extra={"reason": str(error)})
            found, all_asked = {}, False
        if len(found) < search.early and not all_asked and tries < FIND_TRIES:
            self._clerk.do(lambda: self._find(search, tries + 1), after_s=pause_s(tries))
            return
        with self._ledger.lock:
            told = self._ledger.found(search.parcel, search.outcome(found))
        tell_all(told)

    def _look(self, search: Search) -> tuple[dict[Identity, tuple[int, int]], bool]:
        places = [(slot.partition, slot.link.node_id) for slot in search.slots]
        with ExitStack() as lines:
            return find_on_nodes(
                lambda node_id: lines.enter_context(self._lookup_line(NodeId(node_id))),
                self._options.settings.key_prefix,
                places,
                search.wanted(),
            )

    def _lookup_line(self, node_id: NodeId) -> NodeConnection:
        settings = self._options.settings
        return connection_of(self._node(node_id), settings, RedisRole.PUBLISHER)
