"""Store large bodies before direct sends, each in a transaction of its own."""

from __future__ import annotations

from collections.abc import Sequence

from mqlayer.domain.codecs import encode_body
from mqlayer.domain.large_bodies import SMALLEST_THRESHOLD, BodyReference
from mqlayer.domain.names import check_body
from mqlayer.failpoints import failpoint
from mqlayer.large_bodies import BodySource, LargeBodyOptions, source_of, stored_body, storing, storing_source
from mqlayer.postgres.caller_connections import run
from mqlayer.postgres.database import Connection, Database
from mqlayer.producing.message import Body, Message, ReferenceMessage
from mqlayer.settings import Settings


class LargeBodyWriter:
    """A producer's way to the outbox's database; it connects at the first large body."""

    def __init__(self, settings: Settings) -> None:
        self._options = LargeBodyOptions.of(settings)
        self.on = self._options.on
        """Whether large bodies are stored."""
        self._settings = settings
        self._database: Database | None = None

    def close(self) -> None:
        """Disconnect."""
        if self._database is not None:
            self._database.close()

    def is_large(self, body: Body) -> bool:
        """Whether to store a body; others than bytes are encoded first."""
        return self.on and not (isinstance(body, bytes) and len(body) <= SMALLEST_THRESHOLD)

    def stored(self, topic: str, message: Message) -> Message:
        """Store a large body; return the message to send. Raises BodyTooLarge and the stores' errors."""
        if not self.is_large(message.body):
            return message
        options = self._options
        source = source_of(topic, message.body)
        if source is not None:
            return self._stored_source(topic, message, source)
        body = encode_body(message.body)
        if len(body) <= options.threshold:
            return message
        check_body(topic, body, options.limit)
        stored = stored_body(topic, body, options)

        def work(connection: Connection) -> None:
            run(connection, storing(stored, direct=True))

        self._opened().transaction(work)
        failpoint("large_body.before_send")
        return _naming(message, stored.reference)

    def _stored_source(self, topic: str, message: Message, source: BodySource) -> Message:
        beginning = source.read(self._options.threshold + 1)
        if len(beginning) <= self._options.threshold:
            return Message(message.key, beginning, message.headers, message.tags, message.dedup_id)
        source.put_back(beginning)

        def work(connection: Connection) -> BodyReference:
            return run(connection, storing_source(topic, source, self._options, direct=True))

        # Once: a source can't be read again.
        reference = self._opened().transaction(work, timeout_s=0)
        failpoint("large_body.before_send")
        return _naming(message, reference)

    def all_stored(self, topic: str, messages: Sequence[Message]) -> Sequence[Message]:
        """Store the large bodies of a call."""
        if not self.on or not any(self.is_large(getattr(message, "body", b"")) for message in messages):
            return messages
        return [self.stored(topic, message) for message in messages]

    def _opened(self) -> Database:
        if self._database is None:
            self._database = Database(self._settings.application_dsn(), application="mqlayer producer", max_size=2)
        return self._database


def _naming(message: Message, reference: BodyReference) -> ReferenceMessage:
    of = (message.key, b"", message.headers, message.tags, message.dedup_id)
    return ReferenceMessage(*of, reference=str(reference))
