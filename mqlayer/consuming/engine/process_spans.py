"""Spans around a member's handlers, and of its settling calls.

A message is traced where its bytes say that its trace is sampled; for others, no object is made.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from mqlayer.domain.message import NO_KEY, ParkedRecord, Record
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
        self.mark = b"" if every else TRACE_MARK
        """In the facts of each message that may have a span."""
        self._lock: Final = threading.Lock()
        # By partition and offset.
        self._unsettled: dict[int, dict[int, SpanContext]] = {}

    # -- handlers of single messages -----------------------------------------------------------------------------------

    def run(self, handle: Call, place: Any, record: Record) -> Any:
        """Call `handle(place, record)`, in a span if the message is traced."""
        parent = sampled_parent(record.m)
        if self._is_plain(parent, record.m):
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

    async def arun(self, handle: Call, place: Any, record: Record) -> None:
        """`run` for a coroutine function."""
        parent = sampled_parent(record.m)
        if self._is_plain(parent, record.m):
            await handle(place, record)
            return
        with self._current(self._message_span(place, record, parent)):
            await handle(place, record)

    def _is_plain(self, parent: SpanContext | None, facts: bytes) -> bool:
        return parent is None and (not self._every or TRACE_MARK in facts)

    def _message_span(self, place: Any, record: Record, parent: SpanContext | None) -> OpenSpan:
        facts = {PARTITION: str(place.partition), OFFSET: record.offset, **self._group}
        links = self._tracing.links([] if parent is None else [parent])
        above = parent if self._as_parent else None
        if parent is not None:
            # It will be recorded, most likely: attributes cost less all at once.
            facts.update(_details(place, record))
        opened = self._tracing.start("process", self._topic, facts, links, parent=above)
        if opened.recording:
            if parent is None:
                opened.note(_details(place, record))
            # A parked message is settled already.
            if not isinstance(record, ParkedRecord):
                self._keep(place.partition, record.offset, opened)
        return opened

    # -- handlers of batches -------------------------------------------------------------------------------------------

    def run_batch(self, handle: Call, batch: Any) -> Any:
        """Call `handle(batch)`, in a span if one of its messages is traced."""
        parents = self._parents(batch)
        if parents is None:
            return handle(batch)
        with self._current(self._batch_span(batch, parents)):
            return handle(batch)

    async def arun_batch(self, handle: Call, batch: Any) -> None:
        """`run_batch` for a coroutine function."""
        parents = self._parents(batch)
        if parents is None:
            await handle(batch)
            return
        with self._current(self._batch_span(batch, parents)):
            await handle(batch)

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

    def traced(self, partition: int) -> bool:
        """Whether a settling call may settle messages with spans."""
        return bool(self._unsettled.get(partition))

    def settled(self, settled: Mapping[int, Collection[int]], seconds: float) -> None:
        """Make the span of an answered settling call. `settled`: offsets by partition."""
        parents: list[SpanContext] = []
        count = 0
        for partition, offsets in settled.items():
            if self.traced(partition):
                count += len(offsets)
                parents += self._take(partition, offsets)
        if parents:
            facts = {COUNT: count, **self._group}
            if len(settled) == 1:
                facts[PARTITION] = str(*settled)
            self._tracing.record("settle", self._topic, facts, self._tracing.links(parents), seconds=seconds)

    def _take(self, partition: int, offsets: Iterable[int]) -> list[SpanContext]:
        with self._lock:
            kept = self._unsettled.get(partition, {})
            return [kept.pop(offset) for offset in sorted(kept.keys() & offsets)]

    def forget(self, partition: int) -> None:
        """Drop a lost partition's spans."""
        self._unsettled.pop(partition, None)


def process_spans(settings: Settings, topic: str, group: str, texts: ErrorTexts | None) -> ProcessSpans | None:
    """Return a member's spans; None with traces off."""
    tracing, options = tracing_of(settings), {"as_parent": settings.trace_parent, "every": settings.trace_all}
    return None if tracing is None else ProcessSpans(tracing, topic, group, texts or ErrorTexts(), **options)


def called(spans: ProcessSpans | None, handle: Call, place: Any, record: Record) -> Any:
    """Call `handle(place, record)`, in a span where it is traced."""
    if spans is None or spans.mark not in record[1]:
        return handle(place, record)
    return spans.run(handle, place, record)


def acalled(spans: ProcessSpans | None, handle: Call, place: Any, record: Record) -> Awaitable[Any]:
    """`called` for a coroutine function."""
    if spans is None or spans.mark not in record[1]:
        awaitable: Awaitable[Any] = handle(place, record)
        return awaitable
    return spans.arun(handle, place, record)


def _details(place: Any, record: Record) -> dict[str, Any]:
    before = record.attempts if isinstance(record, ParkedRecord) else place.attempts.get(record.offset, 0)
    return {MESSAGE_ID: str(record.identity), ATTEMPT: before + 1, **_key_of(record)}


def _key_of(record: Record) -> dict[str, str]:
    return {} if record.key == NO_KEY else {KEY_HASH: key_hash(record.key)}
