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
from mqlayer.producing.backoff import backoff_s, route_backoff_s
from mqlayer.producing.in_flight import InFlight, notify_all
from mqlayer.producing.loss_detector import LossDetector
from mqlayer.producing.node_sender import NodeSender, SenderOptions, stop_senders
from mqlayer.producing.pending_send import Appended, PendingSend, Recovered
from mqlayer.producing.record_lookup import find_on_nodes
from mqlayer.producing.scheduler import Scheduler
from mqlayer.producing.send_queues import PartitionQueue, TopicQueues
from mqlayer.redis.node_connection import Node, NodeConnection, connection_of
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.route_cache import RouteCache

log = logging.getLogger(__name__)

ROUTE_AGE_S: Final = 5.0
NODE_POLL_S: Final = 2.0
"""How often a producer that publishes asks which runs and addresses of nodes count."""
IDLE_POLL_S: Final = 5.0
"""How often one that does not publish asks that."""
IDLE_ROUTE_AGE_S: Final = 30.0
"""How old the route of a topic gets to which nothing is published."""
LIMITS_AGE_S: Final = 1.0
"""How old a topic's limits are at the least that are read again because a partition is full."""
FIND_TRIES: Final = 5
ROUTE_CHECK_AFTER_S: Final = 1.0
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
class StoredLookup:
    """A pending send whose first `early` messages an earlier try had stored; the others are at `appended` from `offset`
    on."""

    pending: PendingSend
    early: int
    appended: Appended
    offset: int
    partition_queues: tuple[PartitionQueue, ...]
    """Where the early ones may be."""

    def outcome(self, found: dict[Identity, tuple[int, int]]) -> Recovered:
        """Return where all messages of the pending send are, as far as that was found."""
        positions: list[tuple[int, int | None]] = [
            found.get(identity, (self.appended.partition, None)) for identity in self.wanted()
        ]
        positions += [(self.appended.partition, self.offset + i) for i in range(self.pending.count - self.early)]
        return Recovered(self.appended.source, self.appended.replicas, tuple(positions))

    def wanted(self) -> list[Identity]:
        """Return what is looked for."""
        first, lp = self.pending.first, self.pending.queue.lp
        return [Identity(self.appended.source, lp, first + i) for i in range(self.early)]


class MetadataRefresher:
    """Keeps a in-flight store's routes, senders and incarnation up to date, in a thread of its own. Safe to use from
    any thread.

    While Postgres can't be reached, what is known goes on being used, and jobs are repeated until they succeed.
    """

    def __init__(
        self, *, name: str, database: Database, routes: RouteCache, in_flight: InFlight, options: SenderOptions
    ) -> None:
        self.sources = [] if in_flight.source is None else [in_flight.source]
        self.senders: dict[NodeId, NodeSender] = {}
        self._name, self._database, self._routes = name, database, routes
        self._in_flight, self._options = in_flight, options
        self._scheduler = Scheduler()
        self._senders_lock = threading.Lock()
        self._nodes_read_at = time.monotonic()
        self._loss_detector = LossDetector(
            in_flight, self._scheduler, self.senders, self._lookup_connection, prefix=options.settings.key_prefix
        )
        in_flight.background = self

    def topic(self, name: str) -> TopicQueues:
        """Return a topic, read at its first use. Raises NotFound, InvalidName, or StoreUnavailable."""
        route = self._routes.route(name)
        senders = self._senders_of(route)
        with self._in_flight.lock:
            topic = self._in_flight.topics.get(name)
            if topic is None:
                topic = TopicQueues(route, self._table(route, senders), time.monotonic())
                self._in_flight.topics[name] = topic
        for sender in senders.values():
            sender.warm_up()
        return topic

    def refresh_if_old(self, topic: TopicQueues, now: float) -> None:
        """Have an old route, and what is known of nodes, read again in the background."""
        if now - self._nodes_read_at > NODE_POLL_S:
            self._nodes_read_at = now
            self._scheduler.schedule(self._refresh_nodes)
        if now - topic.read_at > ROUTE_AGE_S:
            topic.read_at = now
            self._scheduler.schedule(lambda: self._renew_route(topic))

    def wake(self) -> None:
        """Have every sender look for work; call with the lock held."""
        for sender in list(self.senders.values()):
            if sender.partition_queues:
                sender.wake_locked()

    def stop(self, timeout_s: float) -> None:
        """End all threads and connections."""
        self._scheduler.stop(timeout_s)
        stop_senders(list(self.senders.values()), timeout_s)

    def close_sources(self) -> None:
        """Say in Postgres that our incarnations ended; if that fails they stay open, which costs some memory only."""
        for source in self.sources:
            try:
                failpoint("producer.before_source_close")
                with self._database.connection() as connection:
                    connection.execute(query("source_close"), {"source_id": source})
            except MqlayerError as error:
                log.warning("source_not_closed", extra={"source": source, "reason": str(error)})

    # Background requests of the in-flight store

    def reroute(self, topic: TopicQueues) -> None:
        """Get a newer route and release the topic's stranded queues."""
        self._scheduler.schedule(lambda: self._reroute(topic))

    def refresh_limits(self, topic: TopicQueues) -> None:
        """Read a topic's limits again, unless that was done just now."""
        now = time.monotonic()
        if now - topic.read_at > LIMITS_AGE_S:
            topic.read_at = now
            self._scheduler.schedule(lambda: self._renew_route(topic))

    def renew(self) -> None:
        """Register a new incarnation."""
        self._scheduler.schedule(lambda: self._renew(1))

    def search(self, pending: PendingSend, early: int, appended: Appended, offset: int) -> None:
        """Find the first `early` messages of a pending send, stored by an earlier try; the others are at the place."""
        queue = pending.queue
        partition_queues = tuple(dict.fromkeys((queue.partition_queue, *queue.uncertain_at)))
        found = StoredLookup(pending, early, appended, offset, partition_queues)
        self._scheduler.schedule(lambda: self._find(found, 1))

    # Losses

    def _poll_when_idle(self) -> None:
        try:
            now = time.monotonic()
            if now - self._nodes_read_at > NODE_POLL_S:
                self._nodes_read_at = now
                self._refresh_nodes()
            for topic in list(self._in_flight.topics.values()):
                if now - topic.read_at > IDLE_ROUTE_AGE_S:
                    topic.read_at = now
                    self._renew_route(topic)
        finally:
            self._scheduler.schedule(self._poll_when_idle, after_s=IDLE_POLL_S)

    def _follow_nodes(self) -> None:
        """Go by what was read of nodes: no connection to a former run first, then ask those that were armed since."""
        nodes = self._routes.nodes
        for node_id, sender in list(self.senders.items()):
            if node_id in nodes:
                sender.set_node(nodes[node_id])
        self._loss_detector.check_rearmed(self._routes.armed_at)

    def _check_losses(self, node_ids: list[NodeId]) -> None:
        self._loss_detector.schedule(node_ids)
        self._loss_detector.run()

    # Routes

    def _refresh(self, topic: TopicQueues) -> bool:
        """Read a topic's route again; return whether stranded queues have another partition by it."""
        route = self._routes.refresh(topic.name)
        senders = self._senders_of(route)
        with self._in_flight.lock:
            if route.age > topic.route.age:
                # A node that was given up may have taken with it what its successors can't have.
                self._scheduler.schedule(lambda: self._check_losses(list(senders)), after_s=ROUTE_CHECK_AFTER_S)
            if route.age >= topic.route.age:
                topic.adopt(route, self._table(route, senders), time.monotonic())
            return any(topic.table[queue.lp] is not queue.partition_queue for queue in topic.waiting_for_route)

    def _refresh_nodes(self) -> None:
        """Use no connection to a primary that was replaced: it may live on, and tells nobody."""
        self._routes.refresh_nodes()
        self._follow_nodes()

    def _renew_route(self, topic: TopicQueues) -> None:
        self._refresh(topic)

    def _reroute(self, topic: TopicQueues) -> None:
        failpoint("producer.before_reroute")
        try:
            changed = self._refresh(topic)
        except MqlayerError as error:
            log.warning("route_not_refreshed", extra={"topic": topic.name, "reason": str(error)})
            changed = False
        if changed:
            self._release(topic)
            return
        with self._in_flight.lock:
            refusals = max((queue.reroutes for queue in topic.waiting_for_route), default=1)
        self._scheduler.schedule(lambda: self._release(topic), after_s=route_backoff_s(refusals))

    def _release(self, topic: TopicQueues) -> None:
        with self._in_flight.lock:
            topic.rerouting = False
            self._in_flight.release(topic)
            self.wake()

    def _table(self, route: Route, senders: dict[NodeId, NodeSender]) -> list[PartitionQueue]:
        """Return the partition queue of each LP; call with the lock held."""
        table: list[PartitionQueue] = []
        for r in route.ranges:
            partition_queue = self._in_flight.partition_queues.get(r.partition)
            if partition_queue is None:
                partition_queue = self._in_flight.partition_queues[r.partition] = PartitionQueue(
                    r.partition, senders[r.node], route.backlog_limit
                )
            partition_queue.backlog_limit = route.backlog_limit
            table += [partition_queue] * (r.lp_to - r.lp_from)
        return table

    def _senders_of(self, route: Route) -> dict[NodeId, NodeSender]:
        return {node_id: self._sender(node_id) for node_id in {r.node for r in route.ranges}}

    def _sender(self, node_id: NodeId) -> NodeSender:
        with self._senders_lock:
            sender = self.senders.get(node_id)
            if sender is None:
                if not self.senders:
                    self._scheduler.schedule(self._poll_when_idle, after_s=IDLE_POLL_S)
                node = self._node(node_id)
                self._loss_detector.note_armed(node_id, self._routes.armed_at.get(node_id))
                sender = self.senders[node_id] = NodeSender(node, self._in_flight, self._options, self._fresh_node)
            return sender

    def _node(self, node_id: NodeId) -> Node:
        try:
            return self._routes.node(node_id)
        except KeyError:
            raise NotFound("node", node_id, "its row is gone from the control database") from None

    def _fresh_node(self, node_id: NodeId) -> Node:
        self._routes.refresh_nodes()
        self._scheduler.schedule(self._follow_nodes)
        return self._node(node_id)

    # Incarnations

    def _renew(self, tries: int) -> None:
        try:
            source = open_source(self._database, self._name)
        except MqlayerError as error:
            log.warning("source_not_renewed", extra={"reason": str(error)})
            self._scheduler.schedule(lambda: self._renew(tries + 1), after_s=backoff_s(tries))
            return
        failpoint("producer.after_renewal")
        with self._in_flight.lock:
            self.sources.append(source)
            self._in_flight.renew(source)
            self.wake()

    # Reading back

    def _find(self, search: StoredLookup, tries: int) -> None:
        try:
            found, complete = self._find_stored(search)
        except MqlayerError as error:
            # The messages are stored; only where stays unknown if this goes on.
            log.warning("position_not_found", extra={"reason": str(error)})
            found, complete = {}, False
        if len(found) < search.early and not complete and tries < FIND_TRIES:
            self._scheduler.schedule(lambda: self._find(search, tries + 1), after_s=backoff_s(tries))
            return
        with self._in_flight.lock:
            listeners = self._in_flight.located(search.pending, search.outcome(found))
        notify_all(listeners)

    def _find_stored(self, search: StoredLookup) -> tuple[dict[Identity, tuple[int, int]], bool]:
        places = [
            (partition_queue.partition, partition_queue.sender.node_id) for partition_queue in search.partition_queues
        ]
        with ExitStack() as connections:
            return find_on_nodes(
                lambda node_id: connections.enter_context(self._lookup_connection(NodeId(node_id))),
                self._options.settings.key_prefix,
                places,
                search.wanted(),
            )

    def _lookup_connection(self, node_id: NodeId) -> NodeConnection:
        settings = self._options.settings
        return connection_of(self._node(node_id), settings, RedisRole.PUBLISHER)
