"""Spans of direct publishes: one per call, whose context its messages carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Final

import msgspec

from mqlayer.domain.names import with_headers
from mqlayer.producing.message import Message
from mqlayer.producing.receipts import Receipt
from mqlayer.traces import LINK_LIMIT, TRACEPARENT, OpenSpan, Tracing, sampled_parent_of
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

    def link(self, messages: Sequence[Message]) -> None:
        """Link to the traces that messages bring."""
        # A wrong message is refused later.
        brought = [headers for message in messages if (headers := getattr(message, "headers", None))]
        for parent in islice(filter(None, map(sampled_parent_of, brought)), LINK_LIMIT):
            self.span.add_link(parent)

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
        opened = self._start(topic)
        if opened.recording:
            opened.link([message])
            if message.key is not None:
                opened.note({KEY_HASH: key_hash(message.key.encode())})
        return opened

    def many(self, topic: str, messages: Sequence[Message]) -> SendSpan:
        """Start the span of a batch."""
        opened = self._start(topic)
        if opened.recording:
            opened.link(messages)
            opened.note({COUNT: len(messages)})
        return opened

    def _start(self, topic: str) -> SendSpan:
        opened = self._tracing.start_send(topic)
        return SendSpan(opened, self._tracing.carried(opened.span))


def send_spans(tracing: Tracing | None) -> SendSpans | None:
    """Return a producer's spans; None with traces off."""
    return None if tracing is None else SendSpans(tracing)
