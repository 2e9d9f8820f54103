"""Publish from a test, in memory and on real servers alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mqlayer.arguments import explain_methods
from mqlayer.errors import InvalidInput
from mqlayer.outbox.delayed import publish_delayed
from mqlayer.outbox.publisher import publish
from mqlayer.testing.assertions import Assertions
from mqlayer.testing.messages import PublishedMessage, TopicOrName, new_message, topic_name


@explain_methods
class Publishing(Assertions):
    """Publishes in transactions that a subclass lends."""

    @abstractmethod
    def session(self) -> AbstractContextManager[Any]:
        """Lend a transaction."""

    def publish(
        self,
        topic: TopicOrName,
        body: Any = b"",
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
        dedup_id: str | None = None,
        delay_s: float | None = None,
    ) -> None:
        """Publish a message in a transaction, and commit. Raises InvalidInput."""
        self._ready(topic_name(topic))
        facts = new_message(topic, body, key) | {"headers": headers, "tags": tags}
        with self.session() as session:
            if delay_s is None:
                publish(session, dedup_id=dedup_id, **facts)
            elif dedup_id is not None:
                raise InvalidInput("a delayed message has no dedup id: leave one of the two out")
            else:
                publish_delayed(session, delay_s=delay_s, **facts)

    def deliver(self, messages: Iterable[PublishedMessage]) -> None:
        """Publish messages again, such as `published(on=connection)` of a transaction that never commits."""
        for message in messages:
            facts: dict[str, Any] = {"key": message.key, "headers": message.headers, "tags": message.tags}
            self.publish(message.topic, message.body, **facts)

    def _ready(self, name: str) -> None:
        """Make what a topic needs before its first message; nothing by default."""
