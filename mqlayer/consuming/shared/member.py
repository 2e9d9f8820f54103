"""One member of a shared group."""

from __future__ import annotations

from mqlayer.consuming.engine.breaker_session import BreakerSession
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.engine.core import MemberCore
from mqlayer.consuming.engine.events import Reporting
from mqlayer.consuming.engine.executors import Timeouts, executor_of
from mqlayer.consuming.engine.member import Member
from mqlayer.consuming.engine.nodes import MemberNodes
from mqlayer.consuming.engine.options import MemberOptions
from mqlayer.consuming.shared.failure_queues import FailureQueues
from mqlayer.consuming.shared.failure_writer import FailureWriter
from mqlayer.consuming.shared.failures import SharedEvents, SharedFailures
from mqlayer.consuming.shared.partitions import SharedPartitions
from mqlayer.consuming.shared.prefetch import Prefetch
from mqlayer.consuming.shared.reader import SharedReader
from mqlayer.consuming.shared.results import SharedResults
from mqlayer.consuming.shared.settler import SharedSettler
from mqlayer.consuming.shared.store import SharedStore
from mqlayer.consuming.shared.workers import Handle, SliceWorker
from mqlayer.groups.group import VISIBILITY_TIMEOUT_S, Group
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime


class SharedMember(Member[SharedReader, SharedSettler]):
    """One member of a shared group, with its threads.

    Workers call `handle(batch, record)` in a thread or, with `is_async`, as a coroutine.
    """

    def __init__(
        self,
        runtime: Runtime,
        routes: RouteCache,
        group: Group,
        handle: Handle,
        *,
        is_async: bool = False,
        options: MemberOptions | None = None,
        reporting: Reporting | None = None,
    ) -> None:
        core = MemberCore.of(runtime, routes, group, options, None if reporting is None else reporting.texts)
        events = SharedEvents(group, reporting, core.meters)
        deployment = core.runtime.settings.deployment
        store = SharedStore(core.runtime.control, group.group_id, core.member_id, deployment)
        self.prefetch = Prefetch(
            concurrency=core.options.concurrency,
            prefetch_count=core.options.prefetch_count,
            prefetch_bytes=core.options.prefetch_bytes,
            visibility_timeout_s=group.visibility_timeout_s or VISIBILITY_TIMEOUT_S,
            breaker=core.settings.breaker,
        )
        core.settings.breaker.connect(core.beat.set, self.prefetch.wake_workers)

        def settled(count: int) -> None:
            events.settled(count)
            nodes.wake_readers()

        def reader(connection: NodeConnection, name: str) -> SharedReader:
            return SharedReader(connection, core, self.partitions, self.prefetch, self._results, queues, name=name)

        def settler(connection: NodeConnection, name: str) -> SharedSettler:
            return SharedSettler(connection, core, self.partitions, self.prefetch, settled=settled, name=name)

        def worker(limits: Timeouts) -> SliceWorker:
            return SliceWorker(handle, self.prefetch, core.spans, core.settings, self._results, failures, limits)

        queues = FailureQueues()
        nodes: MemberNodes[SharedReader, SharedSettler] = MemberNodes(core, reader=reader, settler=settler)
        breaker = BreakerSession(core, events, self.prefetch.has_ready)
        self.partitions = SharedPartitions(core, store, self.prefetch, events, nodes, queues, breaker)
        self._results = SharedResults(nodes.settler, queues, self.prefetch, events)
        failures = SharedFailures(core, events, self._results, queues)
        self._failure_writer = FailureWriter(core, store, self.prefetch, self.partitions, self._results, queues, events)
        executor = executor_of(
            worker,
            is_async=is_async,
            count=core.options.concurrency,
            name=core.name,
            on_ready=self.prefetch.on_ready,
            meters=core.meters,
        )
        super().__init__(
            core, events, partitions=self.partitions, executor=executor, nodes=nodes, writer=self._failure_writer
        )

    def _stop_starting(self, until: float) -> None:
        del until
        self.partitions.stop_listing()
        self._stop_workers()

    def _end_threads(self, until: float) -> None:
        self._writer.stop(5.0)
        self._nodes.stop_readers(5.0)
        self._results.release_unfinished()
        self._failure_writer.write_nacks()
        self._nodes.stop_settlers(max(1.0, min(5.0, until - clock())))

    def _stop_workers(self) -> None:
        self.prefetch.stop()
