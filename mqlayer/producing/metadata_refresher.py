"""A producer's incarnations, routes and nodes; and lookups of stored messages."""

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
"""Interval of reading nodes while publishing."""
IDLE_POLL_S: Final = 5.0
"""The same when idle."""
IDLE_ROUTE_AGE_S: Final = 30.0
"""Maximum age of an idle topic's route."""
LIMITS_AGE_S: Final = 1.0
"""A full partition does not reload younger limits."""
FIND_TRIES: Final = 5
ROUTE_CHECK_AFTER_S: Final = 1.0
"""Messages that wait for the route go first."""


def open_source(database: Database, name: str) -> int:
    """Register an incarnation. Raises StoreUnavailable or SchemaMismatch."""
    with database.connection() as connection:
        require(connection, "control", Right.PUBLISH)
        check_schema(connection, "control", database.address)
        row = connection.execute(query("source_open_direct"), {"name": name}).fetchone()
    if row is None:
        raise StoreUnavailable(database.address, "no source id came back")
    return int(row[0])


@dataclass(frozen=True, slots=True)
class StoredLookup:
    """Lookup of a send's first `early` messages; the others begin at `offset`."""

    pending: PendingSend
    early: int
    appended: Appended
    offset: int
    partition_queues: tuple[PartitionQueue, ...]

    def outcome(self, found: dict[Identity, tuple[int, int]]) -> Recovered:
        """Return all places, as far as found."""
        positions: list[tuple[int, int | None]] = [
            found.get(identity, (self.appended.partition, None)) for identity in self.wanted()
        ]
        positions += [(self.appended.partition, self.offset + i) for i in range(self.pending.count - self.early)]
        return Recovered(self.appended.source, self.appended.replicas, tuple(positions))

    def wanted(self) -> list[Identity]:
        """Return the early identities."""
        first, lp = self.pending.first, self.pending.queue.lp
        return [Identity(self.appended.source, lp, first + i) for i in range(self.early)]


class MetadataRefresher:
    """Keeps routes, senders and incarnation current in a thread. Thread-safe.

    While Postgres is unavailable, known values serve, and jobs are repeated.
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
        """Return a topic. Raises NotFound, InvalidName or StoreUnavailable."""
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
        """Reload an old route and nodes, in the background."""
        if now - self._nodes_read_at > NODE_POLL_S:
            self._nodes_read_at = now
            self._scheduler.schedule(self._refresh_nodes)
        if now - topic.read_at > ROUTE_AGE_S:
            topic.read_at = now
            self._scheduler.schedule(lambda: self._renew_route(topic))

    def wake(self) -> None:
        """Wake senders with work; call with the lock held."""
        for sender in list(self.senders.values()):
            if sender.partition_queues:
                sender.wake_locked()

    def stop(self, timeout_s: float) -> None:
        """End all threads and connections."""
        self._scheduler.stop(timeout_s)
        stop_senders(list(self.senders.values()), timeout_s)

    def close_sources(self) -> None:
        """Close our incarnations; after a failure they only cost memory."""
        for source in self.sources:
            try:
                failpoint("producer.before_source_close")
                with self._database.connection() as connection:
                    connection.execute(query("source_close"), {"source_id": source})
            except MqlayerError as error:
                log.warning("source_not_closed", extra={"source": source, "reason": str(error)})

    # BackgroundRequests

    def reroute(self, topic: TopicQueues) -> None:
        """See `BackgroundRequests`."""
        self._scheduler.schedule(lambda: self._reroute(topic))

    def refresh_limits(self, topic: TopicQueues) -> None:
        """See `BackgroundRequests`."""
        now = time.monotonic()
        if now - topic.read_at > LIMITS_AGE_S:
            topic.read_at = now
            self._scheduler.schedule(lambda: self._renew_route(topic))

    def renew(self) -> None:
        """See `BackgroundRequests`."""
        self._scheduler.schedule(lambda: self._renew(1))

    def search(self, pending: PendingSend, early: int, appended: Appended, offset: int) -> None:
        """See `BackgroundRequests`."""
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
        # First drop connections to former runs, then check the nodes armed since.
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
        """Reload a route; return whether stranded queues get another partition."""
        route = self._routes.refresh(topic.name)
        senders = self._senders_of(route)
        with self._in_flight.lock:
            if route.age > topic.route.age:
                # Messages of a node that was given up may be missing in the successors.
                self._scheduler.schedule(lambda: self._check_losses(list(senders)), after_s=ROUTE_CHECK_AFTER_S)
            if route.age >= topic.route.age:
                topic.adopt(route, self._table(route, senders), time.monotonic())
            return any(topic.table[queue.lp] is not queue.partition_queue for queue in topic.waiting_for_route)

    def _refresh_nodes(self) -> None:
        # A replaced primary may live on and reports nothing, so ask Postgres.
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
            # The messages are stored; only their places may stay unknown.
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
