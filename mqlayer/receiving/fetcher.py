"""Asks partitions in turn, and waits for news (docs/design/ordered-pop.md)."""

from __future__ import annotations

import time
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple

from mqlayer.domain.message import Record
from mqlayer.domain.routing import NodeId
from mqlayer.errors import MqlayerError, NodeNotArmed, StoreUnavailable
from mqlayer.failpoints import failpoint
from mqlayer.groups.group import Group
from mqlayer.groups.lineage import drained_popped, seal_marks
from mqlayer.groups.pop_partitions import renew_pop_epoch
from mqlayer.logs import event_logger
from mqlayer.metrics import MemberMeters
from mqlayer.receiving.parking import Delivery, PopParking
from mqlayer.receiving.partition_cache import PartitionCache
from mqlayer.receiving.partition_view import PartitionView
from mqlayer.receiving.pop_message import PopMessage, Token, message_of
from mqlayer.receiving.settler import PopSettler, SettlePlan
from mqlayer.redis.node_connection import NodeConnection, raise_for_reply
from mqlayer.redis.partition_scripts import Fenced, Refused
from mqlayer.redis.pop_scripts import Drained, NoBatch, PopBatch, ReceiveRequest, receive_command, receive_reply
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime
from mqlayer.topics.nodes import arm_if_allowed

log = event_logger(__name__)

PopAnswer = PopBatch | NoBatch | Drained | Fenced | Refused


class FetchAnswer(NamedTuple):
    """Messages, and by partition their requests: earlier ones after a lost answer."""

    messages: list[PopMessage]
    requests: dict[int, ReceiveRequest]


BLOCK_S: Final = 0.1
"""Longest read, so the latest reaction to a notification."""
MORE_LIMIT: Final = 64


class Fetcher:
    """Fetches for one group. One thread, except `refresh_soon`."""

    def __init__(
        self,
        group: Group,
        cache: PartitionCache,
        connections: NodePool,
        settler: PopSettler,
        *,
        runtime: Runtime,
        routes: RouteCache,
        parking: PopParking,
        meters: MemberMeters | None = None,
    ) -> None:
        self._group, self._cache, self._connections, self._settler = group, cache, connections, settler
        self._parking = parking
        self._meters = meters
        self._runtime, self._database, self._routes = runtime, runtime.control, routes
        self._round = 0
        # Acknowledgements that go with the next request to their node.
        self._acks: SettlePlan | None = None
        self._wakeups = cache.changed
        self.fetch_count = self.received_count = 0

    def refresh_soon(self) -> None:
        """List partitions again in the background. For any thread."""
        self._cache.expire()
        self._cache.refresh()

    def repeat(self, request: ReceiveRequest) -> FetchAnswer:
        """Return this attempt's former batches."""
        self._cache.refresh()
        found: list[PopMessage] = []
        requests: dict[int, ReceiveRequest] = {}
        for view in self._cache.views:
            requests[view.info.partition] = request
            try:
                answer = self._fetch_from(view, request._replace(only_repeat=True))
                if isinstance(answer, PopBatch):
                    found += self._messages(view, answer)
            except MqlayerError as error:
                self._failed(view, error)
        return FetchAnswer(found, requests)

    def fetch(self, request: ReceiveRequest, *, repeat: bool, acks: SettlePlan | None = None) -> FetchAnswer:
        """Ask due partitions until there are enough. `repeat`: unanswered attempts too; `acks`: sent with requests."""
        self._acks = acks
        self._cache.refresh()
        answer = FetchAnswer([], {})
        try:
            self._fill(answer, request, repeat=repeat)
        except BaseException:
            self.take_back(answer)
            raise
        return answer

    def _fill(self, answer: FetchAnswer, request: ReceiveRequest, *, repeat: bool) -> None:
        views, begin, size = self._cache.views, self._round, 0
        for number in range(len(views)):
            view = views[(begin + number) % len(views)]
            left = request._replace(limit=request.limit - len(answer.messages), bytes=request.bytes - size)
            if left.limit < 1 or left.bytes < 1:
                return
            found = self._ask(view, left, answer.requests, repeat=repeat)
            if found:
                # The next call begins with the next partition: a busy one must not starve the others.
                self._round = (begin + number + 1) % len(views)
                answer.messages.extend(found)
                size += sum(len(message.body) for message in found) if number + 1 < len(views) else 0

    def _ask(
        self, view: PartitionView, request: ReceiveRequest, requests: dict[int, ReceiveRequest], *, repeat: bool
    ) -> list[PopMessage]:
        asked = requests[view.info.partition] = view.repeated(request) if repeat else request
        try:
            found = self._parking.fetch(view, request)
            if not found and view.is_due(time.monotonic()):
                found = self._handle(view, asked)
                view.last_error = None
        except MqlayerError as error:
            self._failed(view, error)
            return []
        return found

    def take_back(self, fetched: FetchAnswer) -> None:
        """Give undelivered messages to a later request, as the same attempt."""
        partitions = {message.token.partition for message in fetched.messages}
        for view in self._cache.views:
            if view.info.partition in partitions:
                view.note_unanswered(fetched.requests[view.info.partition])
                view.quiet = None

    @property
    def last_error(self) -> MqlayerError | None:
        """An error, if no partition can be asked."""
        if self._cache.retired is not None:
            return self._cache.retired
        errors = [view.last_error for view in self._cache.views]
        return errors[-1] if errors and all(errors) else None

    def wait_for_wakeup(self, wait_s: float) -> None:
        """Wait for news of idle partitions; 0: only check."""
        now = time.monotonic()
        views = self._cache.views
        if wait_s and (self._wakeups.is_set() or any(view.is_due(now) for view in views)):
            self._wakeups.clear()
            return
        wait_s = min([wait_s, BLOCK_S, *(view.due_in(now) for view in views)])
        asked: list[tuple[NodeConnection, dict[bytes, PartitionView]]] = []
        for node_id, streams in self._watched(now).items():
            try:
                connection = self._connections.to(node_id)
                block = ("BLOCK", max(1, round(wait_s * 1000))) if wait_s else ()
                after = (entry for _, entry in streams.values())
                connection.send([("XREAD", "COUNT", 1, *block, "STREAMS", *streams, *after)])
                asked.append((connection, {key: view for key, (view, _) in streams.items()}))
            except MqlayerError as error:
                self._pause_node(node_id, error)
        for connection, of_key in asked:
            try:
                _wake(raise_for_reply(connection.receive(1)[0], connection.node.address), of_key)
            except MqlayerError as error:
                self._pause_node(connection.node.node_id, error)
        if not asked and wait_s:
            self._wakeups.wait(wait_s)
        self._wakeups.clear()

    def _watched(self, now: float) -> dict[NodeId, dict[bytes, tuple[PartitionView, bytes]]]:
        by_node: dict[NodeId, dict[bytes, tuple[PartitionView, bytes]]] = {}
        for view in self._cache.views:
            for key, after in view.watched(now).items():
                by_node.setdefault(view.info.node, {})[key] = (view, after)
        return by_node

    def _fetch_from(self, view: PartitionView, request: ReceiveRequest) -> PopAnswer:
        connection = self._connections.to(view.info.node)
        answer = self._call(connection, view, request)
        for _ in range(MORE_LIMIT):
            if not isinstance(answer, NoBatch) or answer.status != "more":
                break
            answer = self._call(connection, view, request)
        return answer

    def _call(self, connection: NodeConnection, view: PartitionView, request: ReceiveRequest) -> PopAnswer:
        self.fetch_count += 1
        view.note_unanswered(request)
        asked = request._replace(none_parked=view.none_parked) if view.none_parked else request
        command = receive_command(connection, view.group_partition, asked)
        call = connection.call if self._meters is None else partial(self._meters.receiving, connection.call)
        acks = [] if self._acks is None else self._settler.commands(connection, self._acks)
        *settled, reply = call([*acks, command])
        if self._acks is not None and settled:
            self._settler.answered(connection, self._acks, settled)
        answer = receive_reply(reply, connection.node.address)
        if isinstance(answer, PopBatch):
            failpoint("pop.after_receive")
        view.unanswered.pop(request.attempt_id, None)
        return answer

    def _handle(self, view: PartitionView, request: ReceiveRequest) -> list[PopMessage]:
        answer = self._fetch_from(view, request)
        if isinstance(answer, PopBatch):
            view.quiet, view.woken, view.refused = None, False, 0
            return self._messages(view, answer)
        if isinstance(answer, NoBatch):
            view.refused = 0
            view.set_quiet(answer, time.monotonic())
        elif isinstance(answer, Drained):
            self._report_drained(view, answer)
        elif isinstance(answer, Fenced):
            self._fenced(view)
        else:
            # The armed run lost the partition (FLUSHALL): arm the node again.
            view.pause(time.monotonic())
            self._repair(view.info.node)
        return []

    def _messages(self, view: PartitionView, given: PopBatch) -> list[PopMessage]:
        found: list[Delivery] = []
        beyond: list[Token] = []
        excluded: list[Token] = []
        place, wanted, new = view.group_partition, view.wanted, tuple.__new__
        partition, epoch, batch = place.partition, place.epoch, given.batch
        failures = given.failures or repeat(0)
        for record, times, failed in zip(given.records, given.delivery_counts, failures, strict=False):
            token = new(Token, (partition, epoch, batch, record.offset))
            if view.info.cut and self._is_cut_off(view, record):
                beyond.append(token)
            elif record.void or (wanted is not None and not wanted.takes(record.tags)):
                excluded.append(token)
            else:
                found.append(new(Delivery, (record, times, failed, token)))
        if beyond:
            log.warning("records_cut_off", extra={"partition": view.info.partition, "count": len(beyond)})
            self._settler.settle("ack", beyond, handled=False)
        if excluded:
            self._settler.exclude(excluded)
        if view.expiry is not None:
            found = self._parking.living(view, found, view.expiry)
        replay = view.info.replay
        return [
            message_of(record, attempt=times, token=token, replay=replay)
            for record, times, _, token in self._parking.screen(view, found, given)
        ]

    def _is_cut_off(self, view: PartitionView, record: Record) -> bool:
        view.marks = view.marks or seal_marks(self._database, view.info.partition)
        source, lp, seq = record.identity
        return seq > view.marks.get(f"{source}:{lp}", seq)

    def _report_drained(self, view: PartitionView, drained: Drained) -> None:
        """Postgres refuses while the seal is unrecorded: retry soon."""
        group_partition = view.group_partition
        if drained_popped(
            self._database, self._group.group_id, group_partition.partition, group_partition.epoch, drained.seal_id
        ):
            log.info(
                "partition_drained", extra={"partition": str(group_partition.partition), "group": self._group.name}
            )
            view.pause(time.monotonic())
        else:
            view.put_off(time.monotonic())
        # Its successors may be readable now: do not wait for a notification.
        self._cache.reload()

    def _fenced(self, view: PartitionView) -> None:
        if view.refused == view.group_partition.epoch:
            renew_pop_epoch(
                self._database, self._group.group_id, view.group_partition.partition, view.group_partition.epoch
            )
        view.refused = view.group_partition.epoch
        view.paused_until = time.monotonic() + BLOCK_S / 2
        self._cache.expire()

    def _failed(self, view: PartitionView, error: MqlayerError) -> None:
        log.warning("receive_blocked", extra={"partition": view.info.partition, "reason": str(error)})
        if isinstance(error, StoreUnavailable):
            self._pause_node(view.info.node, error)
        else:
            view.pause(time.monotonic(), error)
        if isinstance(error, NodeNotArmed):
            self._repair(view.info.node)

    def _pause_node(self, node_id: NodeId, error: MqlayerError) -> None:
        # Each of its partitions would wait for the same timeout.
        now = time.monotonic()
        for view in self._cache.views:
            if view.info.node == node_id:
                view.pause(now, error)

    def _repair(self, node_id: NodeId) -> None:
        try:
            arm_if_allowed(self._runtime, self._routes.node(node_id).name)
            self._routes.refresh_nodes()
        except MqlayerError as error:
            log.warning("node_not_armed", extra={"node_id": node_id, "reason": str(error)})
        self._cache.expire()


def _wake(found: Any, of_key: dict[bytes, PartitionView]) -> None:
    for key, entries in found or ():
        view = of_key[key]
        view.woken = True
        if key == view.log and not entries[0][0].endswith(b"-0"):
            view.command_seen = True
