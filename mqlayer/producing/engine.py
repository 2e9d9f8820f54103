"""What both producers share: checks, routing, closing. Never waits for messages."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from typing import Final

from mqlayer.arguments import explain_methods
from mqlayer.domain.names import check_name
from mqlayer.domain.routing import Lp
from mqlayer.errors import ProducerClosed
from mqlayer.failpoints import failpoint
from mqlayer.logs import event_logger
from mqlayer.metrics import meters_of
from mqlayer.postgres.database import Database
from mqlayer.producing.follow_ups import ProducerJob, RefreshLimits, RenewSource, Reroute, StoredLookup
from mqlayer.producing.guarded_in_flight import GuardedInFlight
from mqlayer.producing.in_flight import InFlight, ProducerStats
from mqlayer.producing.large_bodies import LargeBodyWriter
from mqlayer.producing.message import Message, pending_send_of
from mqlayer.producing.metadata_refresher import NODE_POLL_S, ROUTE_AGE_S, MetadataRefresher
from mqlayer.producing.options import OnBacklog, ProducerOptions
from mqlayer.producing.record_lookup import RecordLookup
from mqlayer.producing.scheduler import Scheduler
from mqlayer.producing.send_queues import PendingSend, TopicQueues
from mqlayer.producing.send_spans import send_spans
from mqlayer.producing.sources import ProducerSources, open_source
from mqlayer.redis.access import use_access
from mqlayer.runtime.presence import Presence, PresenceService
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings
from mqlayer.traces import tracing_of

log = event_logger(__name__)

STOP_S: Final = 15.0


class Forks:
    """Counts this process's forks from its first ancestor: read for each message, a process id costs a system call."""

    def __init__(self) -> None:
        self.count = 0
        os.register_at_fork(after_in_child=self.forked)

    def forked(self) -> None:
        """Note that this process is a child."""
        self.count += 1


forks: Final = Forks()


class ProducerEngine:
    """One incarnation: in-flight store, senders, background jobs."""

    def __init__(self, settings: Settings, name: str, options: ProducerOptions) -> None:
        self.options, self.rng, self._eager = options, random.Random(), options.is_eager(None)
        self._pid, self._forks, self._timeout_s = os.getpid(), forks.count, settings.delivery_timeout_s
        self.spans = send_spans(tracing_of(settings))
        self._runtime = Runtime(Database(settings.control_dsn(), application="mqlayer producer"), settings)
        presence = Presence(self._runtime.control, "producer", name, self._runtime.in_force)
        self._presence = PresenceService(presence, lambda error: self.guarded.close(str(error)))
        try:
            source = open_source(self._runtime.control, name)
            self._presence.start()
        except BaseException:
            self._runtime.control.close()
            raise
        failpoint("producer.after_source_open")
        in_flight = InFlight(
            source=source,
            max_count=options.max_pending_messages,
            max_bytes=options.max_pending_bytes,
            require_replicas=options.required_replicas,
        )
        self.ending = False
        self.guarded = guarded = GuardedInFlight(in_flight, self._schedule)
        self._topics, self._losses = in_flight.queues.topics, in_flight.losses
        self._scheduler = Scheduler()
        self._metadata = MetadataRefresher(guarded, self._scheduler, self._runtime, options, presence.publish_to)
        self.senders = self._metadata.senders
        self._sources = ProducerSources(name, source, self._runtime.control, guarded, self._scheduler)
        meters, capacity = meters_of(settings), in_flight.capacity
        self._end_counts = None
        if meters is not None:
            self._end_counts = meters.add_producer(lambda: dict(in_flight.counts.by_key), lambda: capacity.count)
        self.large_bodies = LargeBodyWriter(settings)
        self._lookup = RecordLookup(guarded, self._scheduler, self._runtime, self._metadata.node)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of its maker."""
        return self._forks != forks.count

    @property
    def stats(self) -> ProducerStats:
        """The counts so far."""
        with self.guarded as in_flight:
            return in_flight.stats()

    def begin(self, timeout_s: float | None, on_backlog: OnBacklog | None) -> tuple[float, bool]:
        """Return a call's deadline, and whether it is eager. Raises AcknowledgedLoss or InvalidInput."""
        if self._losses.unreported:
            self.guarded.raise_losses()
        eager = self._eager if on_backlog is None else self.options.is_eager(on_backlog)
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s), eager

    def deadline(self, timeout_s: float | None) -> float:
        """Return a call's deadline (monotonic)."""
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def known_topic(self, name: str) -> TopicQueues | None:
        """Return a topic, None if unread. Raises ProducerClosed."""
        if self._forks != forks.count:
            self.check_process()
        if self.guarded.closed:
            raise ProducerClosed(self.guarded.closed_because)
        topic = self._topics.get(name)
        if topic is not None:
            now, metadata = time.monotonic(), self._metadata
            if now - topic.read_at > ROUTE_AGE_S or now - metadata.nodes_read_at > NODE_POLL_S:
                metadata.refresh_if_old(topic, now)
        return topic

    def topic(self, name: str) -> TopicQueues:
        """Return a topic, first read from Postgres. Raises NotFound, ProducerClosed and others."""
        return self.known_topic(name) or self._metadata.topic(name)

    def prepare(
        self,
        topic: str,
        message: Message,
        timeout_s: float | None,
        on_backlog: OnBacklog | None,
    ) -> tuple[TopicQueues, Lp, PendingSend]:
        """Check a message and find its queue: return its topic, LP and pending send. Raises as `begin` and `topic`."""
        deadline, eager = self.begin(timeout_s, on_backlog)
        queues = self.known_topic(topic) or self._metadata.topic(topic)
        lp, pending = pending_send_of(message, queues, deadline, self.rng, eager=eager)
        return queues, lp, pending

    def begin_end(self) -> None:
        """Accept no more messages; a refusal of this code may have come before."""
        self.ending = True
        self.guarded.close()

    def end(self, left: int) -> None:
        """Stop; the messages left unsettled fail with ProducerClosed."""
        self._scheduler.stop(STOP_S)
        self._metadata.stop(STOP_S)
        if left:
            log.warning("producer_closed_unsettled", extra={"count": left})
            with self.guarded as in_flight:
                in_flight.settlement.fail_remaining()
        self._sources.close()
        self._presence.stop(STOP_S)
        self.large_bodies.close()
        self._runtime.control.close()
        if self._end_counts is not None:
            self._end_counts()

    def check_process(self) -> None:
        """Raise ProducerClosed in a forked child."""
        if self.is_forked:
            raise ProducerClosed(f"it was made in process {self._pid}, this is {os.getpid()}: make one after the fork")

    def _schedule(self, job: ProducerJob) -> None:
        schedule, metadata = self._scheduler.schedule, self._metadata
        match job:
            case Reroute(topic):
                schedule(lambda: metadata.reroute(topic))
            case RefreshLimits(topic):
                metadata.refresh_limits(topic)
            case RenewSource():
                schedule(self._sources.renew)
            case StoredLookup():
                schedule(lambda: self._lookup.run(job))


def open_engine(settings: Settings | None, name: str, options: ProducerOptions | None) -> ProducerEngine:
    """Check a producer's arguments and register it. Raises InvalidInput, StoreUnavailable or SchemaMismatch."""
    check_name("producer", name)
    settings, options = settings or Settings(), options or ProducerOptions()
    use_access(settings)
    options.check(settings)
    return ProducerEngine(settings, name, options)


@explain_methods
class ProducerBase:
    """The arguments of both producers. Making one calls `_made`, the subclass's part."""

    def __init__(
        self, settings: Settings | None = None, *, name: str = "producer", options: ProducerOptions | None = None
    ) -> None:
        self._open_engine = partial(open_engine, settings, name, options)
        self._made()

    def _made(self) -> None:
        raise NotImplementedError
