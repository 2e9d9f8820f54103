"""An open receiver's session, for both kinds of receivers."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from mqlayer.domain.names import check_name
from mqlayer.errors import InvalidInput, StaleToken
from mqlayer.groups.group import Group, GroupSettings, ensure_group
from mqlayer.groups.wakeups import wakes
from mqlayer.idempotency import InboxEntry
from mqlayer.large_bodies import BodyReader, Stream
from mqlayer.metrics import RECEIVED, meters_of
from mqlayer.parking.pop_store import PopParkingStore
from mqlayer.postgres.caller_connections import Statements
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import check_schema
from mqlayer.postgres.notifications import GROUP, NotificationListener
from mqlayer.postgres.rights import Right, require
from mqlayer.receiving.fetcher import FetchAnswer, Fetcher
from mqlayer.receiving.key_order import KeyOrder
from mqlayer.receiving.parked_settler import ParkedSettler
from mqlayer.receiving.parking import PopParking
from mqlayer.receiving.partition_cache import PartitionCache
from mqlayer.receiving.pop_fence import PopFence
from mqlayer.receiving.pop_message import PopMessage, Token
from mqlayer.receiving.pop_spans import PopSpans
from mqlayer.receiving.renewal import RenewalThread
from mqlayer.receiving.settler import PopSettler, SettlePlan
from mqlayer.redis.access import use_access
from mqlayer.redis.pop_scripts import BATCH_LIMIT, ReceiveRequest, SettleAction
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.error_text import ErrorTexts
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.presence import Presence, PresenceService
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings
from mqlayer.traces import tracing_of

BATCH_BYTES: Final = 4_000_000
"""A batch ends when keys and bodies reach it."""
LONGEST_S: Final = 12 * 3600.0
APPLICATION: Final = "mqlayer receiver"
CLOSE_S: Final = 1.0
"""Longest wait for a thread at closing."""


@dataclass(slots=True)
class ReceiveCall:
    """A call of `receive`. `until`: `time.monotonic()`; `own_attempt`: its caller named the attempt."""

    request: ReceiveRequest
    until: float
    own_attempt: bool
    acks: Sequence[PopMessage] = ()
    renew_for_s: float = 0.0
    begun: bool = False


class PopSession:
    """An open receiver. One thread at a time, with `receiving`, polls and waits; any settles."""

    def __init__(
        self,
        group: Group,
        fetcher: Fetcher,
        settler: PopSettler,
        parked: ParkedSettler,
        presence: PresenceService,
        cleanup: ExitStack,
        bodies: BodyReader,
        spans: PopSpans | None = None,
    ) -> None:
        self._bodies = bodies
        self.group, self.fetcher, self.settler, self._cleanup, self._spans = group, fetcher, settler, cleanup, spans
        self._parked = parked
        self._renewal = RenewalThread(self.extend_all)
        self._presence = presence
        self.receiving = threading.Lock()
        self.key_order = KeyOrder()
        self._fence = PopFence(group, self.key_order)

    def close(self) -> None:
        """Disconnect."""
        if self._renewal.started:
            self._renewal.stop(CLOSE_S)
        self._cleanup.close()

    def poll(self, call: ReceiveCall) -> FetchAnswer | None:
        """Acknowledge, ask for a call's messages; none if its time is over, None to wait and ask again.

        Raises StoreUnavailable at that time if no partition could be asked, VersionRefused for code that is too old; as
        `ack`: then messages wait for another call.
        """
        if self._presence.refused is not None:
            raise self._presence.refused
        acks = None
        if not call.begun:
            call.begun = True
            if call.acks:
                acks = self._plan_acks(call.acks)
            again = self.fetcher.repeat(call.request) if call.own_attempt else None
            if again and again.messages:
                if acks is not None:
                    self._finish_acks(call, acks, again)
                return again
            self.fetcher.wait_for_wakeup(0.0)
        began = time.perf_counter()
        fetched = self.fetcher.fetch(call.request, repeat=not call.own_attempt, acks=acks)
        if acks is not None:
            self._finish_acks(call, acks, fetched)
        if self._spans is not None and fetched.messages:
            self._spans.received(fetched.messages, time.perf_counter() - began)
        if not fetched.messages and time.monotonic() < call.until:
            return None
        if not fetched.messages and self.fetcher.last_error is not None:
            raise self.fetcher.last_error
        return fetched

    def _plan_acks(self, messages: Sequence[PopMessage]) -> SettlePlan:
        stale = self._parked.ack([message for message in messages if message.claimed])
        acks = self.settler.plan_acks([message.token for message in messages if not message.claimed])
        acks.add_stale(stale)
        return acks

    def _finish_acks(self, call: ReceiveCall, acks: SettlePlan, fetched: FetchAnswer) -> None:
        try:
            self.settler.send(acks)
        except BaseException:
            self.fetcher.take_back(fetched)
            raise
        self.key_order.settled(call.acks)
        self._renewal.settled(call.acks)

    def delivered(self, call: ReceiveCall, messages: Sequence[PopMessage]) -> None:
        """Note messages that a call returns."""
        self.key_order.delivered(messages)
        if call.renew_for_s and messages:
            visible_s = call.request.visibility_timeout_ms / 1000
            self._renewal.keep(messages, visible_s=visible_s, for_s=call.renew_for_s)
        self.fetcher.received_count += len(messages)

    def wait(self, calls: Iterable[ReceiveCall]) -> None:
        """Wait until there may be messages, or a call's time is over."""
        self.fetcher.wait_for_wakeup(max(0.0, min(call.until for call in calls) - time.monotonic()))

    def ack(self, messages: Iterable[PopMessage]) -> None:
        """See `Receiver.ack`."""
        wanted = list(messages)
        self._renewal.settled(wanted)
        stale = self._parked.ack([message for message in wanted if message.claimed])
        self._settle("ack", [message for message in wanted if not message.claimed])
        self.key_order.settled(wanted)
        self._refuse(stale)

    def nack(self, message: PopMessage, delay_s: float, error: BaseException | None = None) -> None:
        """See `Receiver.nack`."""
        check_duration("the delay", delay_s, least=0.0)
        self._renewal.settled([message])
        self.key_order.returned(message)
        if message.claimed:
            self._refuse(self._parked.nack(message, delay_s))
        else:
            self._settle("nack", [message], ms=round(delay_s * 1000))
        if error is not None:
            self._parked.note_error(message, error)

    def extend(self, message: PopMessage, seconds: float) -> None:
        """See `Receiver.extend`."""
        self.extend_all([message], seconds)

    def extend_all(self, messages: Sequence[PopMessage], seconds: float) -> None:
        """Withhold messages; one write per node."""
        check_duration("the visibility timeout", seconds, least=0.0)
        stale = self._parked.extend([message for message in messages if message.claimed], seconds)
        tokens = [message.token for message in messages if not message.claimed]
        self.settler.settle("extend", tokens, ms=round(seconds * 1000))
        self._refuse(stale)

    def _refuse(self, stale: Sequence[Token]) -> None:
        if stale:
            named = [(token.partition, token.offset) for token in stale]
            raise StaleToken(self.group.name, self.group.topic, named)

    def _settle(self, action: SettleAction, messages: list[PopMessage], ms: int = 0) -> None:
        settle = partial(self.settler.settle, action, [message.token for message in messages], ms=ms)
        if self._spans is None:
            settle()
        else:
            self._spans.settling(messages, settle)

    def body_of(self, message: PopMessage) -> bytes:
        """See `Receiver.fetch_body`."""
        return message.body if message.large_body is None else self._bodies.fetch(message.large_body)

    def stream_of(self, message: PopMessage, kind: type[Stream]) -> Stream:
        """See `Receiver.open_body`."""
        reference = message.large_body
        return kind.of(message.body) if reference is None else kind(self._bodies.chunks(reference), reference.size)

    def fence(self, message: PopMessage) -> Statements[None]:
        """See `Receiver.fence`."""
        return self._fence.check(message)

    def inbox_entry(self, message: PopMessage, name: str | None) -> InboxEntry:
        """See `Receiver.inbox`."""
        group = self.group
        return InboxEntry(group.group_id, group.name, group.topic, message.identity, name, message.replay)


def receive_call(
    max_messages: int,
    visibility_timeout_s: float,
    wait_s: float,
    attempt_id: str | None,
    acks: Iterable[PopMessage] = (),
    renew_for_s: float = 0.0,
) -> ReceiveCall:
    """Return a call that begins now. Raises InvalidInput for bad bounds."""
    if not 1 <= max_messages <= BATCH_LIMIT:
        raise InvalidInput(f"max_messages is {max_messages}: a batch has 1 to {BATCH_LIMIT} messages")
    check_duration("the visibility timeout", visibility_timeout_s, least=0.001)
    check_duration("renew_for_s", renew_for_s, least=0.0)
    if not 0 <= wait_s < math.inf:
        raise InvalidInput(f"wait_s is {wait_s}: wait for 0 seconds or more")
    attempt = f"r{uuid.uuid4().hex}" if attempt_id is None else check_name("attempt", attempt_id)
    request = ReceiveRequest(attempt, max_messages, BATCH_BYTES, max(1, round(visibility_timeout_s * 1000)))
    return ReceiveCall(request, time.monotonic() + wait_s, attempt_id is not None, list(acks), renew_for_s)


def check_duration(what: str, seconds: float, *, least: float) -> None:
    """Raise InvalidInput unless `least` to 12 hours."""
    if not least <= seconds <= LONGEST_S:
        raise InvalidInput(f"{what} is {seconds:g} s: say {least:g} to {LONGEST_S:,.0f} seconds")


def open_session(topic: str, wanted: GroupSettings, *, group: str, settings: Settings) -> PopSession:
    """Connect; create a missing group. Raises the stores' errors."""
    use_access(settings)
    with ExitStack() as cleanup:
        runtime = _open_databases(settings, f"{topic}/{group}", cleanup)
        presence = PresenceService(
            Presence(runtime.control, "receiver", f"{topic}/{group}", runtime.in_force), lambda _: None
        )
        presence.start()
        cleanup.callback(presence.stop, CLOSE_S)
        routes = RouteCache(runtime.control)
        cleanup.callback(routes.close)
        found = ensure_group(runtime, routes, topic=topic, name=group, settings=wanted)
        cache = PartitionCache(runtime, found, routes)
        cache.start()
        cleanup.callback(cache.stop, CLOSE_S)
        # Apart, so that neither fetching nor settling waits for the other.
        fetching, settling = (cleanup.enter_context(NodePool(runtime, routes.node, RedisRole.CONSUMER)) for _ in "12")
        meters, name = meters_of(settings), f"r-{uuid.uuid4().hex}"
        of_group = None if meters is None else meters.member(topic, group)
        settler = PopSettler(found, cache, settling, routes, prefix=runtime.prefix, name=name, meters=of_group)
        store, texts = PopParkingStore(runtime.control, found.group_id, name), ErrorTexts(shown=settings.error_messages)
        parking = PopParking(found, store, settler, texts)
        fetcher = Fetcher(
            found, cache, fetching, settler, runtime=runtime, routes=routes, parking=parking, meters=of_group
        )
        if of_group is not None:
            cleanup.callback(of_group.count(partial(_counts, fetcher, settler, parking), lambda: len(cache.views)))

        def hear(payload: str) -> None:
            if wakes(payload, found.group_id):
                fetcher.refresh_soon()

        notices = NotificationListener(runtime.control, GROUP, hear)
        notices.start()
        cleanup.callback(notices.close)
        tracing = tracing_of(settings)
        spans = None if tracing is None else PopSpans(tracing, topic, group)
        parked = ParkedSettler(parking, cache)
        return PopSession(found, fetcher, settler, parked, presence, cleanup.pop_all(), BodyReader(runtime), spans)


def _counts(fetcher: Fetcher, settler: PopSettler, parking: PopParking) -> Mapping[str, int]:
    # Copies: other threads add to both.
    counts = Counter(dict(settler.counts))
    counts.update(dict(parking.counts))
    counts[RECEIVED] = fetcher.received_count
    return counts


def _open_databases(settings: Settings, work: str, cleanup: ExitStack) -> Runtime:
    wait_s = settings.connect_timeout_s
    control = Database(settings.control_dsn(), application=APPLICATION, max_size=3, timeout_s=wait_s)
    cleanup.enter_context(control)
    effects = Database(settings.application_dsn(), application=APPLICATION, max_size=1, timeout_s=wait_s)
    application = cleanup.enter_context(effects)
    with control.connection() as connection:
        require(connection, "control", Right.CONSUME, work)
        check_schema(connection, "control", control.address)
    return Runtime(control, settings, application, actor="receiver")
