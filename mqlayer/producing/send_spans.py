"""Spans of direct publishes: one per call, whose context its messages carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Final

import msgspec

from mqlayer.domain.names import with_headers
from mqlayer.producing.message import Message
from mqlayer.producing.receipts import Receipt
from mqlayer.traces import TRACEPARENT, OpenSpan, Tracing, sampled_parent_of
from mqlayer.traces.tracing import COUNT, KEY_HASH, MESSAGE_ID, OFFSET, PARTITION, key_hash

NO_TRACE: Final[Mapping[str, str]] = {}


class SendSpan(OpenSpan):
    """A call's span. `trace`: headers for its messages."""

    __slots__ = ("trace",)

    def __init__(self, opened: OpenSpan, trace: Mapping[str, str]) -> None:
        super().__init__(opened.span)
        self.trace = trace

    def carried_by(self, message: Message) -> Message:
        """Return a message with the context, unless it has one."""
        headers = message.headers or NO_TRACE
        if not self.trace or TRACEPARENT in headers:
            return message
        return msgspec.structs.replace(message, headers=with_headers(headers, self.trace))

    def stored(self, receipt: Receipt) -> Receipt:
        """Note a receipt."""
        if self.recording:
            facts = {PARTITION: str(receipt.partition), MESSAGE_ID: str(receipt.identity)}
            self.note(facts if receipt.offset is None else {**facts, OFFSET: receipt.offset})
        return receipt

    def ended(self, future: Future[Receipt]) -> None:
        """End with a future."""
        if future.cancelled():
            self.end()
            return
        error = future.exception()
        if error is None:
            self.stored(future.result())
        else:
            self.fail(error)
        self.end()


class SendSpans:
    """Starts a producer's spans."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def one(self, topic: str, message: Message) -> SendSpan:
        """Start the span of a single message."""
        opened = self._start(topic, [message])
        if opened.recording and message.key is not None:
            opened.note({KEY_HASH: key_hash(message.key.encode())})
        return opened

    def many(self, topic: str, messages: Sequence[Message]) -> SendSpan:
        """Start the span of a batch."""
        opened = self._start(topic, messages)
        if opened.recording:
            opened.note({COUNT: len(messages)})
        return opened

    def _start(self, topic: str, messages: Sequence[Message]) -> SendSpan:
        named = (message.headers for message in messages if isinstance(message, Message) and message.headers)
        links = [parent for headers in named if (parent := sampled_parent_of(headers)) is not None]
        opened = self._tracing.start_send(topic, links=links)
        return SendSpan(opened, self._tracing.carried(opened.span))


def send_spans(tracing: Tracing | None) -> SendSpans | None:
    """Return a producer's spans; None with traces off."""
    return None if tracing is None else SendSpans(tracing)
