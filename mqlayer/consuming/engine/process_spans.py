"""Spans around a member's handlers, and of its settling calls.

A message is traced where its bytes say that its trace is sampled; for others, no object is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from mqlayer.consuming.engine.timeouts import AsyncioTimeouts, ThreadTimeouts
from mqlayer.domain.message import NO_KEY, ParkedRecord, Record
from mqlayer.domain.retry_rules import RetryRules
from mqlayer.errors import AlreadyApplied, PauseKey, Skip
from mqlayer.runtime.error_text import ErrorTexts
from mqlayer.settings import Settings
from mqlayer.traces import TRACE_MARK, OpenSpan, Tracing, sampled_parent, tracing_of
from mqlayer.traces.tracing import ATTEMPT, COUNT, GROUP, KEY_HASH, MESSAGE_ID, OFFSET, PARTITION, key_hash

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

UNSETTLED_LIMIT: Final = 1_000
"""Spans per partition that are kept for the links of settling calls."""

Call = Callable[..., Any]


class ProcessSpans:
    """One member's spans. Thread-safe.

    `as_parent`: a span is a child of its message's, not a root with a link. `every`: messages without a trace have one.
    """

    def __init__(
        self,
        tracing: Tracing,
        topic: str,
        group: str,
        texts: ErrorTexts,
        *,
        as_parent: bool = False,
        every: bool = False,
    ) -> None:
        self._tracing, self._topic, self._texts = tracing, topic, texts
        self._group = {GROUP: group}
        self._as_parent, self._every = as_parent, every
        self._lock: Final = threading.Lock()
        # By partition and offset.
        self._unsettled: dict[int, dict[int, SpanContext]] = {}

    # -- handlers of single messages -----------------------------------------------------------------------------------

    def around(self, handle: Call) -> Call:
        """Return `handle(place, record)` with a span around traced messages."""
        every = self._every

        def traced(place: Any, record: Record) -> Any:
            facts = record[1]
            if TRACE_MARK not in facts:
                if not every:
                    return handle(place, record)
                parent = None
            else:
                parent = sampled_parent(facts)
                if parent is None:
                    return handle(place, record)
            opened = self._message_span(place, record, parent)
            token = opened.enter()
            try:
                return handle(place, record)
            except BaseException as error:
                self._failed(opened, error)
                raise
            finally:
                opened.leave(token)

        return traced

    def around_async(self, handle: Call) -> Call:
        """`around` for a coroutine function."""
        every = self._every

        async def traced(place: Any, record: Record, parent: SpanContext | None) -> None:
            with self._current(self._message_span(place, record, parent)):
                await handle(place, record)

        def called(place: Any, record: Record) -> Any:
            facts = record[1]
            if TRACE_MARK not in facts:
                return traced(place, record, None) if every else handle(place, record)
            parent = sampled_parent(facts)
            return handle(place, record) if parent is None else traced(place, record, parent)

        return called

    def _message_span(self, place: Any, record: Record, parent: SpanContext | None) -> OpenSpan:
        facts = {PARTITION: str(place.partition), OFFSET: record.offset, **self._group}
        links = self._tracing.links([] if parent is None else [parent])
        above = parent if self._as_parent else None
        opened = self._tracing.start("process", self._topic, facts, links, parent=above)
        if opened.recording:
            opened.note(_details(place, record))
            # A parked message is settled already.
            if not isinstance(record, ParkedRecord):
                self._keep(place.partition, record.offset, opened)
        return opened

    # -- handlers of batches -------------------------------------------------------------------------------------------

    def around_batch(self, handle: Call) -> Call:
        """Return `handle(batch)` with a span around batches that have a traced message."""

        def traced(batch: Any) -> Any:
            parents = self._parents(batch)
            if parents is None:
                return handle(batch)
            with self._current(self._batch_span(batch, parents)):
                return handle(batch)

        return traced

    def around_async_batch(self, handle: Call) -> Call:
        """`around_batch` for a coroutine function."""

        async def traced(batch: Any) -> None:
            parents = self._parents(batch)
            if parents is None:
                await handle(batch)
                return
            with self._current(self._batch_span(batch, parents)):
                await handle(batch)

        return traced

    def _parents(self, batch: Any) -> list[SpanContext] | None:
        facts = [message.record[1] for message in batch.everything if TRACE_MARK in message.record[1]]
        parents = [parent for one in facts if (parent := sampled_parent(one)) is not None]
        return parents if parents or (self._every and not facts) else None

    def _batch_span(self, batch: Any, parents: list[SpanContext]) -> OpenSpan:
        messages = batch.everything
        facts: dict[str, Any] = {COUNT: len(messages), **self._group}
        partitions = {message.owned.partition for message in messages}
        if len(partitions) == 1:
            facts[PARTITION] = str(*partitions)
        opened = self._tracing.start("process", self._topic, facts, self._tracing.links(parents))
        if opened.recording:
            if batch.kind == "key":
                opened.note(_key_of(messages[0].record))
            for message in messages:
                self._keep(message.owned.partition, message.record.offset, opened)
        return opened

    # -- both ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _current(self, opened: OpenSpan) -> Iterator[None]:
        token = opened.enter()
        try:
            yield
        except BaseException as error:
            self._failed(opened, error)
            raise
        finally:
            opened.leave(token)

    def _failed(self, opened: OpenSpan, error: BaseException) -> None:
        if isinstance(error, AlreadyApplied):
            return
        if opened.recording and not isinstance(error, PauseKey | Skip):
            opened.fail(error, self._texts.text(error))
        opened.note_failed(error)

    # -- settling ------------------------------------------------------------------------------------------------------

    def _keep(self, partition: int, offset: int, opened: OpenSpan) -> None:
        with self._lock:
            kept = self._unsettled.setdefault(partition, {})
            kept[offset] = opened.span.get_span_context()
            if len(kept) > UNSETTLED_LIMIT:
                del kept[next(iter(kept))]

    def settled(self, settled: Mapping[int, Iterable[int]], seconds: float) -> None:
        """Make the span of an answered settling call. `settled`: offsets by partition."""
        parents: list[SpanContext] = []
        count = 0
        for partition, offsets in settled.items():
            if self._unsettled.get(partition):
                every = set(offsets)
                count += len(every)
                parents += self._take(partition, every)
        if parents:
            facts = {COUNT: count, **self._group}
            if len(settled) == 1:
                facts[PARTITION] = str(*settled)
            self._tracing.record("settle", self._topic, facts, self._tracing.links(parents), seconds=seconds)

    def _take(self, partition: int, offsets: set[int]) -> list[SpanContext]:
        with self._lock:
            kept = self._unsettled.get(partition, {})
            return [kept.pop(offset) for offset in list(kept) if offset in offsets]

    def forget(self, partition: int) -> None:
        """Drop a lost partition's spans."""
        self._unsettled.pop(partition, None)


def process_spans(settings: Settings, topic: str, group: str, texts: ErrorTexts | None) -> ProcessSpans | None:
    """Return a member's spans; None with traces off."""
    tracing, options = tracing_of(settings), {"as_parent": settings.trace_parent, "every": settings.trace_all}
    return None if tracing is None else ProcessSpans(tracing, topic, group, texts or ErrorTexts(), **options)


class TracedTimeouts:
    """Time limits of handlers, with spans around them: an interrupted handler's span ends too."""

    def __init__(
        self, limits: ThreadTimeouts | AsyncioTimeouts | TracedTimeouts, around: Callable[[Call], Call]
    ) -> None:
        self._limits, self._around = limits, around
        self._known: tuple[Call, Call] | None = None

    def wrap(self, handle: Call, rules: RetryRules) -> Call:
        """Return `handle`, limited if the rules say so, in a span."""
        limited: Call = self._limits.wrap(handle, rules)
        if self._known is None or self._known[0] != limited:
            self._known = limited, self._around(limited)
        return self._known[1]


def _details(place: Any, record: Record) -> dict[str, Any]:
    before = record.attempts if isinstance(record, ParkedRecord) else place.attempts.get(record.offset, 0)
    return {MESSAGE_ID: str(record.identity), ATTEMPT: before + 1, **_key_of(record)}


def _key_of(record: Record) -> dict[str, str]:
    return {} if record.key == NO_KEY else {KEY_HASH: key_hash(record.key)}
