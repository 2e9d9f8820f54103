"""One member of an ordered group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mqlayer.consuming.api.batch_handlers import BatchHandler
from mqlayer.consuming.engine.breaker_session import BreakerSession
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.events import Reporting
from mqlayer.consuming.engine.executors import Timeouts, Worker, executor_of
from mqlayer.consuming.engine.live_settings import LiveSettings
from mqlayer.consuming.engine.member import Member
from mqlayer.consuming.engine.nodes import MemberNodes
from mqlayer.consuming.engine.options import MemberOptions
from mqlayer.consuming.ordered.assignments import Assignments
from mqlayer.consuming.ordered.batch_dispatch import BatchDispatcher
from mqlayer.consuming.ordered.batch_workers import BatchWorker
from mqlayer.consuming.ordered.dispatcher import Dispatcher
from mqlayer.consuming.ordered.events import OrderedEvents
from mqlayer.consuming.ordered.failure_decider import FailureDecider
from mqlayer.consuming.ordered.ownership import Ownership
from mqlayer.consuming.ordered.parking_worker import ParkingWorker
from mqlayer.consuming.ordered.partition_opener import PartitionOpener
from mqlayer.consuming.ordered.partition_reports import PartitionReports
from mqlayer.consuming.ordered.poison_guard import PoisonMessageGuard
from mqlayer.consuming.ordered.reader import Reader
from mqlayer.consuming.ordered.ready_queues import ReadyQueues
from mqlayer.consuming.ordered.record_intake import RecordIntake
from mqlayer.consuming.ordered.settler import Settler
from mqlayer.consuming.ordered.turn_results import TurnResults
from mqlayer.consuming.ordered.workers import Handle, KeyQueueWorker
from mqlayer.domain.routing import NodeId
from mqlayer.groups.group import Group
from mqlayer.parking import ParkingStore
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime


class OrderedMember(Member[Reader, Settler]):
    """One member of an ordered group, with its threads.

    Workers call `handle(owned, record)` per message, or a BatchHandler per batch; in a thread or, with `is_async`, as a
    coroutine. `rejoin` revives a retired broadcast instance.
    """

    def __init__(
        self,
        runtime: Runtime,
        routes: RouteCache,
        group: Group,
        handle: Handle | BatchHandler,
        *,
        is_async: bool = False,
        options: MemberOptions | None = None,
        reporting: Reporting | None = None,
        rejoin: Callable[[], object] | None = None,
    ) -> None:
        core = MemberCore.of(runtime, routes, group, options, None if reporting is None else reporting.texts)
        events = OrderedEvents(group, reporting, core.meters)
        self.settings = core.settings
        store = ParkingStore(core.runtime.control, group.group_id, core.member_id)
        dispatcher, new_worker = strategy_of(handle, core)
        self.dispatcher = dispatcher

        def settled(node_id: NodeId, count: int) -> None:
            events.settled(count)
            nodes.wake_reader(node_id)

        def handled(count: int) -> None:
            events.handled(count)
            nodes.wake_settlers()

        def reader(connection: NodeConnection, name: str) -> Reader:
            return Reader(connection, core, self.ownership, dispatcher, opener, intake, name=name)

        def settler(connection: NodeConnection, name: str) -> Settler:
            return Settler(
                connection,
                core,
                self.ownership,
                dispatcher,
                reports,
                settled=settled,
                expired=events.expired,
                name=name,
            )

        nodes: MemberNodes[Reader, Settler] = MemberNodes(core, reader=reader, settler=settler)
        self.ownership = Ownership(core, dispatcher, events, nodes.repair)
        reports = PartitionReports(core)
        opener = PartitionOpener(core, store, dispatcher, events)
        intake = RecordIntake(core.settings, dispatcher, events, nodes.wake_settlers)
        writer = ParkingWorker(core, store, dispatcher.parking, self.ownership, events, nodes.wake_settlers)
        dispatcher.on_parking(writer.wake.set)
        guard = PoisonMessageGuard(nodes.wake_settler)
        decider = FailureDecider(core, events, writer.add_attempt)
        core.settings.breaker.connect(core.beat.set, dispatcher.admission.wake_workers)
        results = TurnResults(dispatcher, decider, handled=handled, fenced=self.ownership.fenced)
        executor = executor_of(
            partial(new_worker, core.settings, guard, results),
            is_async=is_async,
            count=core.options.concurrency,
            name=core.name,
            on_ready=dispatcher.on_ready,
            meters=core.meters,
        )
        breaker = BreakerSession(core, events, dispatcher.admission.has_ready)
        self.assignments = Assignments(core, self.ownership, dispatcher, nodes, reports, writer, breaker)
        super().__init__(
            core, events, partitions=self.assignments, executor=executor, nodes=nodes, writer=writer, rejoin=rejoin
        )

    def _stop_starting(self, until: float) -> None:
        self.assignments.close()
        self.assignments.drain_all(until)

    def _wait_drained(self, until: float) -> None:
        self.ownership.wait_empty(until + 1.0 - clock())
        self.ownership.drop_all()
        self._stop_workers()

    def _end_threads(self, until: float) -> None:
        del until
        self._nodes.stop(5.0)
        self._writer.stop(5.0)

    def _stop_workers(self) -> None:
        self.dispatcher.stop()


NewWorker = Callable[[LiveSettings, PoisonMessageGuard, TurnResults, Timeouts], Worker]


def strategy_of(handle: Handle | BatchHandler, core: MemberCore) -> tuple[Dispatcher, NewWorker]:
    """Return how messages are given out, and to which workers."""
    if isinstance(handle, BatchHandler):
        batches = BatchDispatcher(core.lease, handle.batch_of, core.settings.breaker)
        return batches, partial(BatchWorker, handle, batches, core.spans)
    dispatcher = Dispatcher(core.lease, ReadyQueues(core.lease, core.settings.breaker))
    return dispatcher, partial(KeyQueueWorker, handle, dispatcher, core.spans)
