"""Store large bodies before direct sends, each in a transaction of its own."""

from __future__ import annotations

from collections.abc import Sequence

from mqlayer.domain.codecs import encode_body
from mqlayer.domain.large_bodies import SMALLEST_THRESHOLD
from mqlayer.domain.names import check_body
from mqlayer.failpoints import failpoint
from mqlayer.large_bodies import LargeBodyOptions, stored_body, storing
from mqlayer.postgres.caller_connections import run
from mqlayer.postgres.database import Connection, Database
from mqlayer.producing.message import Body, Message, ReferenceMessage
from mqlayer.settings import Settings


class LargeBodyWriter:
    """A producer's way to the outbox's database; it connects at the first large body."""

    def __init__(self, settings: Settings) -> None:
        self._options = LargeBodyOptions.of(settings)
        self._settings = settings
        self._database: Database | None = None

    @property
    def on(self) -> bool:
        """Whether large bodies are stored."""
        return self._options.on

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
        body, options = encode_body(message.body), self._options
        if len(body) <= options.threshold:
            return message
        check_body(topic, body, options.limit)
        stored = stored_body(topic, body, options)

        def work(connection: Connection) -> None:
            run(connection, storing(stored, direct=True))

        self._opened().transaction(work)
        failpoint("large_body.before_send")
        of = (message.key, b"", message.headers, message.tags, message.dedup_id)
        return ReferenceMessage(*of, reference=str(stored.reference))

    def all_stored(self, topic: str, messages: Sequence[Message]) -> Sequence[Message]:
        """Store the large bodies of a call."""
        if not self.on or not any(self.is_large(getattr(message, "body", b"")) for message in messages):
            return messages
        return [self.stored(topic, message) for message in messages]

    def _opened(self) -> Database:
        if self._database is None:
            self._database = Database(self._settings.application_dsn(), application="mqlayer producer", max_size=2)
        return self._database
