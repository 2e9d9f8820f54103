"""Producers whose messages stay in memory, also those that a program made by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from mqlayer.outbox.outbox_message import message_of, whole
from mqlayer.producing import AsyncProducer, Message, Producer, Receipt
from mqlayer.producing.in_flight import COUNTED, ProducerStats
from mqlayer.testing.broker import DIRECT, MemoryBroker


class MemorySender:
    """What both producers' methods do meanwhile."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker, self._stored, self._duplicates = broker, 0, 0

    def send(self, topic: str, *, body: Any, key: str | None = None, **facts: Any) -> Receipt:
        """Store a message at once."""
        for ignored in ("timeout_s", "on_backlog"):
            facts.pop(ignored, None)
        message = whole(message_of(topic, key=key, body=body, **{"headers": None, **facts}))
        stored = self._broker.append(message, DIRECT)
        self._duplicates += stored.duplicate
        self._stored += not stored.duplicate
        return Receipt(topic, stored.partition, stored.offset, stored.identity, duplicate=stored.duplicate)

    def send_many(self, topic: str, messages: Sequence[Message]) -> list[Receipt]:
        """Store messages at once."""
        return [
            self.send(topic, body=m.body, key=m.key, headers=m.headers, tags=m.tags, dedup_id=m.dedup_id)
            for m in messages
        ]

    def send_oneway(self, topic: str, **facts: Any) -> None:
        """Store a message at once."""
        self.send(topic, **facts)

    def stats(self) -> ProducerStats:
        """The counts of all producers."""
        counts = dict.fromkeys(COUNTED, 0) | {"stored": self._stored, "duplicates": self._duplicates}
        return ProducerStats(**counts, connections_lost=0, pending=0, pending_bytes=0)

    def future(self, topic: str, **facts: Any) -> Future[Receipt]:
        """Store a message; return a future that is done."""
        future: Future[Receipt] = Future()
        future.set_result(self.send(topic, **facts))
        return future


@contextmanager
def installed(broker: MemoryBroker) -> Iterator[None]:
    """Have all producers of this process send to the broker."""
    methods = {Producer: _methods(MemorySender(broker)), AsyncProducer: _async_methods(MemorySender(broker))}
    before = {kind: {name: kind.__dict__[name] for name in replaced} for kind, replaced in methods.items()}
    try:
        for kind, replaced in methods.items():
            for name, method in replaced.items():
                setattr(kind, name, method)
        yield
    finally:
        for kind, original in before.items():
            for name, method in original.items():
                setattr(kind, name, method)


def _methods(sender: MemorySender) -> dict[str, Any]:
    return {
        "_made": lambda _: None,
        "send": lambda _, topic, **facts: sender.send(topic, **facts),
        "send_async": lambda _, topic, **facts: sender.future(topic, **facts),
        "send_oneway": lambda _, topic, **facts: sender.send_oneway(topic, **facts),
        "send_many": lambda _, topic, messages, **__: sender.send_many(topic, messages),
        "flush": lambda *_, **__: 0,
        "stats": property(lambda _: sender.stats()),
        "close": lambda *_, **__: None,
        "__exit__": lambda *_: None,
    }


def _async_methods(sender: MemorySender) -> dict[str, Any]:
    async def send(_: AsyncProducer, topic: str, **facts: Any) -> Receipt:
        return sender.send(topic, **facts)

    async def send_many(_: AsyncProducer, topic: str, messages: Sequence[Message], **__: Any) -> list[Receipt]:
        return sender.send_many(topic, messages)

    async def nothing(*_: Any, **__: Any) -> int:
        return 0

    async def entered(producer: AsyncProducer) -> AsyncProducer:
        return producer

    async def left(*_: Any) -> None: ...

    return {
        "_made": lambda _: None,
        "start": left,
        "send": send,
        "send_many": send_many,
        "flush": nothing,
        "stats": property(lambda _: sender.stats()),
        "stop": nothing,
        "__aenter__": entered,
        "__aexit__": left,
    }
