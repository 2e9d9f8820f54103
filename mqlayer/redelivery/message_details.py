"""A parked or dead message with body and failed attempts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from mqlayer.domain.large_bodies import BodyReference
from mqlayer.domain.message import Identity, Record
from mqlayer.domain.names import parse_identity
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.groups.group import find_group
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redelivery.lists import key_text

ATTEMPTS_LIMIT: Final = 1_000


@dataclass(frozen=True, slots=True)
class Attempt:
    """A failed attempt; `error` also reports a silent member."""

    attempt: int
    failed_at: datetime
    member: str
    error: str


@dataclass(frozen=True, slots=True)
class MessageDetails:
    """A parked or dead message. `body`: None if gone; `published_at`: by the publisher's clock.

    `due_at`: None if dead, or if it waits for an operator. `since`: when it died, or its key was parked. `redriven`: it
    was returned to its group. `large_body`: of a body stored outside of the message, while `body` is empty.
    """

    topic: str
    group: str
    identity: Identity
    partition: int
    offset: int
    key: str | None
    headers: Mapping[str, str]
    published_at: datetime
    body: bytes | None
    cause: str
    since: datetime
    redriven: bool
    attempts: Sequence[Attempt]
    dead_id: int | None = None
    reason: str | None = None
    actor: str | None = None
    due_at: datetime | None = None
    tags: tuple[str, ...] = ()
    large_body: BodyReference | None = None


def find_dead(database: Database, named: str, *, topic: str | None = None, group: str | None = None) -> int:
    """Return a message's dead_id, given that or its identity source:lp:seq.

    Raises NotFound, InvalidInput if it is dead in several groups.
    """
    if named.isdecimal():
        return int(named)
    identity = parse_identity(named)
    facts = {"topic": topic, "group": group} | identity._asdict()
    with database.connection() as connection:
        rows = connection.execute(query("dead_find"), facts).fetchall()
    if not rows:
        raise NotFound("dead message", named, "see those that are: mqlayer dead list")
    if len(rows) > 1:
        where = ", ".join(f"{topic}/{group}" for _, topic, group in rows)
        raise InvalidInput(f"message {named} is dead in {where}: say which with --topic and --group")
    return int(rows[0][0])


def show_dead(database: Database, dead_id: int) -> MessageDetails:
    """Return a dead message, also a returned one. Raises NotFound."""
    with database.connection() as connection:
        row = connection.execute(query("dead_show"), {"dead_id": dead_id}).fetchone()
        if row is None:
            raise NotFound("dead message", str(dead_id), "see those that are: mqlayer dead list")
        (group_id, topic, group, lp, source, seq, partition, offset, key, m, body, cause, reason, _, actor,
         died_at, redriven_at) = row  # fmt: skip
        shown_here = _details(connection, group_id, Identity(source, lp, seq), (partition, offset, key, m, body))
        return shown_here(
            topic=topic,
            group=group,
            cause=cause,
            since=died_at,
            redriven=redriven_at is not None,
            dead_id=dead_id,
            reason=reason,
            actor=actor,
        )


def show_parked(database: Database, topic: str, group: str, identity: Identity) -> MessageDetails:
    """Return a parked message. Raises NotFound."""
    group_id = find_group(database, topic, group).group_id
    with database.connection() as connection:
        facts = {"group_id": group_id} | identity._asdict()
        row = connection.execute(query("parked_show"), facts).fetchone()
        if row is None:
            raise NotFound("parked message", f"{topic}/{group}/{identity}", f"mqlayer parked list {topic} {group}")
        topic, group, *message, cause, parked_at, due_at, redriven = row
        shown_here = _details(connection, group_id, identity, message)
        return shown_here(topic=topic, group=group, cause=cause, since=parked_at, redriven=redriven, due_at=due_at)


def recorded_attempts(database: Database, group_id: int, identity: Identity) -> list[Attempt]:
    """Return a message's failed attempts, as far as they are recorded."""
    with database.connection() as connection:
        return _attempts(connection, group_id, identity)


def _details(
    connection: Connection, group_id: int, identity: Identity, message: Sequence[Any]
) -> Callable[..., MessageDetails]:
    partition, offset, key, m, body = message
    record = Record(offset, m, key, b"")
    return partial(
        MessageDetails,
        identity=identity,
        partition=partition,
        offset=offset,
        key=key_text(key),
        headers=record.headers,
        tags=record.tags,
        large_body=record.large_body,
        published_at=_published(record),
        body=body,
        attempts=_attempts(connection, group_id, identity),
    )


def _attempts(connection: Connection, group_id: int, identity: Identity) -> list[Attempt]:
    facts = {"group_id": group_id, "limit": ATTEMPTS_LIMIT} | identity._asdict()
    return [Attempt(*row) for row in connection.execute(query("attempts_of"), facts).fetchall()]


def _published(record: Record) -> datetime:
    return datetime.fromtimestamp(record.at_ms / 1000, UTC)
