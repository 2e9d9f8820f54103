"""The outbox of a database of tests, read as a relay would, for code that opens its own transactions."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Self

import psycopg
from pydantic import SecretStr

from mqlayer.domain.names import DEFAULT_BODY_LIMIT, check_name
from mqlayer.errors import SchemaMismatch, StoreUnavailable
from mqlayer.outbox.outbox_message import OutboxMessage
from mqlayer.postgres.caller_connections import effects_only_in, place_of
from mqlayer.postgres.database import Database
from mqlayer.postgres.migrations import check_schema, migrate_for_tests
from mqlayer.postgres.queries import query
from mqlayer.settings import Settings
from mqlayer.testing.broker import MemoryBroker
from mqlayer.testing.databases import make_database
from mqlayer.testing.messages import TopicOrName, topic_name


class OutboxTable:
    """Gives committed rows to the broker; they stay in their table."""

    def __init__(self, dsn: str, broker: MemoryBroker, topics: Iterable[str]) -> None:
        self._dsn, self._broker, self._topics = dsn, broker, list(dict.fromkeys(topics))
        self._known: list[int] = []
        self._known_delayed: set[int] = set()

    def __enter__(self) -> Self:
        self._database = Database(self._dsn, application="mqlayer test", max_size=1)
        self._cleanup = ExitStack()
        self._cleanup.callback(self._database.close)
        try:
            self._cleanup.enter_context(effects_in(self._database))
            prepare_topics(self._database, self._topics)
            with self._database.connection() as connection:
                row = connection.execute(query("outbox_ends")).fetchone()
        except SchemaMismatch as error:
            self._cleanup.close()
            hint = "call mqlayer.testing.prepare_database(dsn, topics…) once, for example in conftest.py"
            raise SchemaMismatch(error.address, error.found, error.wanted, hint) from None
        except BaseException:
            self._cleanup.close()
            raise
        self._after, self._after_delayed = row or (0, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def read(self) -> None:
        """Take over the rows committed since, and forget the cancelled."""
        with self._database.connection() as connection:
            facts = {"after": self._after, "known": self._known}
            rows = connection.execute(query("outbox_after"), facts).fetchall()
            delayed = connection.execute(query("delayed_after"), {"after": self._after_delayed}).fetchall()
        for number, topic, lp, seq, key, body, headers in rows:
            self._known.append(number)
            self._broker.append_numbered(OutboxMessage(topic, key, bytes(body), headers), lp, seq)
        for number, topic, key, body, headers, due_in_s in delayed:
            if number not in self._known_delayed:
                self._known_delayed.add(number)
                message, now = OutboxMessage(topic, key, bytes(body), headers), self._broker.clock.seconds()
                # Numbers above 0 are those of transactions without a database.
                self._broker.delay(message, now + due_in_s, -number)
        there = {-number for number, *_ in delayed}
        for number in self._broker.waiting:
            if number < 0 and number not in there:
                self._broker.cancel(number)


def effects_in(database: Database) -> AbstractContextManager[None]:
    """Return a block that refuses effects in another database."""
    with database.connection() as connection:
        return effects_only_in(place_of(connection))


def settings_on(settings: Settings, dsn: str) -> Settings:
    """Return settings with one database, of tests."""
    none = dict.fromkeys(("app_dsn", "direct_dsn", "app_direct_dsn"))
    return settings.model_copy(update={**none, "dsn": SecretStr(dsn)})


def prepare_database(dsn: str, *topics: TopicOrName) -> None:
    """Make a database of tests where it is missing, and its application schema; let it take messages of these topics.

    Idempotent. Raises StoreUnavailable, PermissionDenied.
    """
    try:
        migrate_for_tests(dsn, schema="application")
    except StoreUnavailable:
        if not make_database(dsn):
            raise
        migrate_for_tests(dsn, schema="application")
    with Database(dsn, application="mqlayer test", max_size=1) as database:
        prepare_topics(database, map(topic_name, topics))


def prepare_topics(database: Database, topics: Iterable[str]) -> None:
    """Let a database of tests take messages of topics. Raises SchemaMismatch without the application schema."""
    with database.connection() as connection:
        check_schema(connection, "application", database.address)
        for topic in topics:
            check_name("topic", topic)
            with connection.transaction():
                known = {name for _, name, _ in connection.execute(query("outbox_topics")).fetchall()}
                if topic not in known:
                    _put(connection, topic)


def _put(connection: psycopg.Connection[tuple[object, ...]], topic: str) -> None:
    row = connection.execute(query("topic_number_for_tests")).fetchone()
    number = row[0] if row else None
    facts = {"topic_id": number, "name": topic, "body_limit": DEFAULT_BODY_LIMIT}
    connection.execute(query("outbox_topic_put"), facts)
    connection.execute(query("outbox_counters_put"), {"topic_id": number})
