"""Pages of parked keys, parked messages and dead messages, without bodies."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from mqlayer.domain.message import NO_KEY, Identity, Record
from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.redelivery.filters import DeadFilter, ParkedFilter

PAGE_LIMIT: Final = 1_000
FIRST: Final = (0, -1, "")


@dataclass(frozen=True, slots=True)
class ParkedKey:
    """A parked key of a group, by the database's clock.

    `key`: None for a message without key; `alone`: a message parked by itself. `due_in_s`: negative if overdue, None if
    it waits for an operator. `started`: an owner took up its head, or died with it. `head`: None if nothing waits.
    """

    group_id: int
    topic: str
    group: str
    lp: int
    name: bytes
    key: str | None
    alone: bool
    cause: str
    due_at: datetime | None
    due_in_s: float | None
    attempts: int
    started: bool
    parked_at: datetime
    messages: int
    bytes: int
    head: Identity | None

    @property
    def cursor(self) -> str:
        """The `after` of the next page."""
        return f"{self.group_id}:{self.lp}:{self.name.hex()}"


@dataclass(frozen=True, slots=True)
class ParkedMessage:
    """A message of a parked key; `at_ms`: by the publisher's clock."""

    identity: Identity
    position: int
    partition: int
    offset: int
    key: str | None
    at_ms: int
    bytes: int
    redriven: bool
    attempts: int


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A message that left a group without effect. `bytes`: None without a body."""

    dead_id: int
    topic: str
    group: str
    identity: Identity
    partition: int
    offset: int
    key: str | None
    bytes: int | None
    cause: str
    reason: str
    attempts: int
    actor: str
    died_at: datetime
    redriven_at: datetime | None


def parked_keys(
    database: Database, wanted: ParkedFilter | None = None, *, after: str | None = None, limit: int = 50
) -> list[ParkedKey]:
    """Return a page of parked keys by group, LP and name, `after` a `cursor`. Raises InvalidInput."""
    group, lp, name = FIRST if after is None else _cursor(after)
    cursor = {"after_group": group, "after_lp": lp, "after_name": bytes.fromhex(name), "limit": page(limit)}
    facts = (wanted or ParkedFilter()).facts()
    with database.connection() as connection:
        rows = connection.execute(query("parked_list"), facts | cursor).fetchall()
    return [
        ParkedKey(
            group_id=group_id,
            topic=topic,
            group=group_name,
            lp=lp,
            name=bytes(name),
            key=key_text(name if key is None or name[:1] != NO_KEY else key),
            alone=name[:1] == NO_KEY,
            cause=cause,
            due_at=due_at,
            due_in_s=due_in_s,
            attempts=attempts,
            started=started,
            parked_at=parked_at,
            messages=messages,
            bytes=size,
            head=None if source is None else Identity(source, lp, seq),
        )
        for group_id, topic, group_name, lp, name, cause, due_at, due_in_s, attempts, started, parked_at,
            messages, size, source, seq, key in rows
    ]  # fmt: skip


def parked_messages(
    database: Database, key: ParkedKey, *, after: ParkedMessage | None = None, limit: int = 50
) -> list[ParkedMessage]:
    """Return a page of a parked key's messages, in order. Raises InvalidInput."""
    facts = {
        "group_id": key.group_id,
        "lp": key.lp,
        "name": key.name,
        "after_place": 0 if after is None else after.position,
        "after_seq": 0 if after is None else after.identity.seq,
        "limit": page(limit),
    }
    with database.connection() as connection:
        rows = connection.execute(query("parked_messages_list"), facts).fetchall()
    return [
        ParkedMessage(
            identity=Identity(source, key.lp, seq),
            position=place,
            partition=partition,
            offset=offset,
            key=key_text(name),
            at_ms=Record(offset, m, name, b"").at_ms,
            bytes=size,
            redriven=redriven,
            attempts=attempts,
        )
        for place, source, seq, partition, offset, name, m, size, redriven, attempts in rows
    ]


def dead_messages(
    database: Database,
    wanted: DeadFilter | None = None,
    *,
    topic: str | None = None,
    group: str | None = None,
    redriven: bool = False,
    after: int | None = None,
    limit: int = 50,
) -> list[DeadMessage]:
    """Return a page of dead messages, latest first; `redriven`: also returned ones. Raises InvalidInput."""
    facts = (wanted or DeadFilter()).facts()
    facts |= {"topic": topic, "group": group, "redriven": redriven, "after": after, "limit": page(limit)}
    with database.connection() as connection:
        rows = connection.execute(query("dead_list"), facts).fetchall()
    return [
        DeadMessage(dead_id, topic, group, Identity(source, lp, seq), partition, offset, key_text(key), *rest)
        for dead_id, topic, group, lp, source, seq, partition, offset, key, *rest in rows
    ]


def key_text(key: bytes) -> str | None:
    """Return a key as text; None if there is none."""
    return None if bytes(key[:1]) == NO_KEY else bytes(key).decode(errors="replace")


def page(limit: int) -> int:
    """Return `limit`. Raises InvalidInput unless it is 1 to PAGE_LIMIT."""
    if not 1 <= limit <= PAGE_LIMIT:
        raise InvalidInput(f"a page has 1 to {PAGE_LIMIT} rows, not {limit}: ask for the next one instead")
    return limit


def _cursor(text: str) -> tuple[int, int, str]:
    try:
        group, lp, name = text.split(":")
        bytes.fromhex(name)
        return int(group), int(lp), name
    except ValueError:
        raise InvalidInput(f"{text!r} is no place in the list: say what the page before named") from None
