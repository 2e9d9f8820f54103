"""Keeps a producer's routes, nodes and senders current."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from mqlayer.domain.durability import Durability
from mqlayer.domain.routing import NodeId, Route
from mqlayer.errors import MqlayerError, NotFound
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.producing.backoff import route_backoff_s
from mqlayer.producing.guarded_in_flight import GuardedInFlight
from mqlayer.producing.in_flight import InFlight
from mqlayer.producing.loss_detector import LossDetector
from mqlayer.producing.node_sender import NodeSender, stop_senders
from mqlayer.producing.options import ProducerOptions
from mqlayer.producing.scheduler import Scheduler
from mqlayer.producing.send_queues import PartitionQueue, SenderKey, TopicQueues
from mqlayer.redis.node_connection import Node
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime

log = event_logger(__name__)

DELETED: Final = "it was deleted; publish again if it was created anew"
ROUTE_AGE_S: Final = 5.0
NODE_POLL_S: Final = 2.0
"""Interval of reading nodes while publishing."""
IDLE_POLL_S: Final = 5.0
"""The same when idle."""
IDLE_ROUTE_AGE_S: Final = 30.0
"""Maximum age of an idle topic's route."""
LIMITS_AGE_S: Final = 1.0
"""A full partition does not reload younger limits."""
ROUTE_CHECK_AFTER_S: Final = 1.0
"""Messages that wait for the route go first."""


class MetadataRefresher:
    """Keeps routes and senders current, in the scheduler's thread. Thread-safe.

    While Postgres is unavailable, known values serve, and jobs are repeated. `publish_to` says a topic's id.
    """

    def __init__(
        self,
        guarded: GuardedInFlight,
        scheduler: Scheduler,
        runtime: Runtime,
        options: ProducerOptions,
        publish_to: Callable[[int], None],
    ) -> None:
        self.senders: dict[SenderKey, NodeSender] = {}
        self._guarded, self._scheduler, self._runtime, self._options = guarded, scheduler, runtime, options
        self._publish_to = publish_to
        self._routes = RouteCache(runtime.control)
        self._senders_lock = threading.Lock()
        self.nodes_read_at = time.monotonic()
        self._loss_detector = LossDetector(guarded, scheduler, self.senders, runtime, self.node)

    def topic(self, name: str) -> TopicQueues:
        """Return a topic, which this process says first. Raises NotFound, InvalidName or StoreUnavailable."""
        route = self._routes.route(name)
        self._publish_to(route.topic_id)
        senders = self._senders_of(route)
        with self._guarded as in_flight:
            topic = in_flight.queues.topics.get(name)
            if topic is None:
                topic = TopicQueues(route, self._table(in_flight, route, senders), time.monotonic())
                in_flight.queues.topics[name] = topic
        for sender in senders.values():
            sender.warm_up()
        return topic

    def node(self, node_id: NodeId) -> Node:
        """Return a node as last read. Raises NotFound."""
        try:
            return self._routes.node(node_id)
        except KeyError:
            raise NotFound("node", node_id, "its row is gone from the control database") from None

    def refresh_if_old(self, topic: TopicQueues, now: float) -> None:
        """Reload an old route and nodes, in the background."""
        if now - self.nodes_read_at > NODE_POLL_S:
            self.nodes_read_at = now
            self._scheduler.schedule(self._refresh_nodes)
        if now - topic.read_at > ROUTE_AGE_S:
            topic.read_at = now
            self._scheduler.schedule(lambda: self._renew_route(topic))

    def refresh_limits(self, topic: TopicQueues) -> None:
        """Reload a topic's limits in the background, unless fresh."""
        now = time.monotonic()
        if now - topic.read_at > LIMITS_AGE_S:
            topic.read_at = now
            self._scheduler.schedule(lambda: self._renew_route(topic))

    def reroute(self, topic: TopicQueues) -> None:
        """Get a newer route, then release queues that wait for it."""
        failpoint("producer.before_reroute")
        try:
            changed = self._refresh(topic)
        except MqlayerError as error:
            log.warning("route_not_refreshed", extra={"topic": topic.name, "reason": str(error)})
            changed = False
        if changed:
            self._release(topic)
            return
        with self._guarded:
            refusals = max((queue.reroutes for queue in topic.waiting_for_route), default=1)
        self._scheduler.schedule(lambda: self._release(topic), after_s=route_backoff_s(refusals))

    def stop(self, timeout_s: float) -> None:
        """End all senders and their connections."""
        stop_senders(list(self.senders.values()), timeout_s)

    # Losses

    def _poll_when_idle(self) -> None:
        try:
            now = time.monotonic()
            if now - self.nodes_read_at > NODE_POLL_S:
                self.nodes_read_at = now
                self._refresh_nodes()
            with self._guarded as in_flight:
                topics = list(in_flight.queues.topics.values())
            for topic in topics:
                if now - topic.read_at > IDLE_ROUTE_AGE_S:
                    topic.read_at = now
                    self._renew_route(topic)
        finally:
            self._scheduler.schedule(self._poll_when_idle, after_s=IDLE_POLL_S)

    def _follow_nodes(self) -> None:
        # First drop connections to former runs, then check the nodes armed since.
        nodes = self._routes.nodes
        for (node_id, _), sender in list(self.senders.items()):
            if node_id in nodes:
                sender.set_node(nodes[node_id])
        self._loss_detector.check_rearmed(self._routes.armed_at)

    def _check_losses(self, node_ids: list[NodeId]) -> None:
        self._loss_detector.schedule(node_ids)
        self._loss_detector.run()

    # Routes

    def _refresh(self, topic: TopicQueues) -> bool:
        route = self._newest(topic)
        if route is None:
            self._end(topic)
            return False
        senders = self._senders_of(route)
        with self._guarded as in_flight:
            if route.age > topic.route.age:
                # Messages of a node that was given up may be missing in the successors.
                self._scheduler.schedule(lambda: self._check_losses(list(senders)), after_s=ROUTE_CHECK_AFTER_S)
            if route.age >= topic.route.age:
                topic.adopt(route, self._table(in_flight, route, senders), time.monotonic())
            return any(topic.table[queue.lp] is not queue.partition_queue for queue in topic.waiting_for_route)

    def _newest(self, topic: TopicQueues) -> Route | None:
        """Return the route; None if the topic was deleted, also if another has its name since."""
        try:
            route = self._routes.refresh(topic.name)
        except NotFound:
            return None
        return route if route.topic_id == topic.route.topic_id else None

    def _end(self, topic: TopicQueues) -> None:
        with self._guarded as in_flight:
            in_flight.settlement.fail_unrouted(topic, NotFound("topic", topic.name, DELETED))
            if not topic.is_busy and in_flight.queues.topics.get(topic.name) is topic:
                del in_flight.queues.topics[topic.name]

    def _refresh_nodes(self) -> None:
        # A replaced primary may live on and reports nothing, so ask Postgres.
        self._routes.refresh_nodes()
        self._follow_nodes()

    def _renew_route(self, topic: TopicQueues) -> None:
        self._refresh(topic)

    def _release(self, topic: TopicQueues) -> None:
        with self._guarded as in_flight:
            in_flight.queues.release(topic)

    def _table(self, in_flight: InFlight, route: Route, senders: dict[NodeId, NodeSender]) -> list[PartitionQueue]:
        table: list[PartitionQueue] = []
        known = in_flight.queues.partition_queues
        for r in route.ranges:
            partition_queue = known.get(r.partition)
            if partition_queue is None or partition_queue.node is not senders[r.node].queue:
                # Of another class than before: queues follow once nothing of theirs is in flight.
                partition_queue = PartitionQueue(r.partition, senders[r.node].queue, route.backlog_limit)
                known[r.partition] = partition_queue
            partition_queue.backlog_limit = route.backlog_limit
            table += [partition_queue] * (r.lp_to - r.lp_from)
        return table

    def _senders_of(self, route: Route) -> dict[NodeId, NodeSender]:
        return {node_id: self._sender(node_id, route.durability) for node_id in {r.node for r in route.ranges}}

    def _sender(self, node_id: NodeId, durability: Durability) -> NodeSender:
        with self._senders_lock:
            sender = self.senders.get((node_id, durability))
            if sender is None:
                if not self.senders:
                    self._scheduler.schedule(self._poll_when_idle, after_s=IDLE_POLL_S)
                node = self.node(node_id)
                self._loss_detector.note_armed(node_id, self._routes.armed_at.get(node_id))
                sender = NodeSender(node, durability, self._guarded, self._runtime, self._options, self._fresh_node)
                self.senders[node_id, durability] = sender
            return sender

    def _fresh_node(self, node_id: NodeId) -> Node:
        self._routes.refresh_nodes()
        self._scheduler.schedule(self._follow_nodes)
        return self.node(node_id)
