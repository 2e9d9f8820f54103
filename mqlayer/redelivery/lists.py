"""Pages of parked keys, parked messages and dead messages, without bodies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, Literal, TypeVar, get_args

from mqlayer.domain.message import NO_KEY, Identity, Record
from mqlayer.errors import InvalidInput
from mqlayer.groups.group import find_group
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import columns, query
from mqlayer.redelivery.filters import DeadFilter, ParkedFilter

PAGE_LIMIT: Final = 1_000
SCAN_LIMIT: Final = 10_000
"""Rows that a page, a count or a sample looks at."""
ERROR_SCAN_LIMIT: Final = 2_000
"""The same where each row's failed attempts are searched."""
FIRST: Final = (0, -1, "")
OFFSET_DIGITS: Final = 6
ParkedOrder = Literal["key", "oldest", "largest", "due"]
ALL_GROUPS: Final = 2**63 - 1
NO_GROUP: Final = -1

Row = TypeVar("Row")
Cursor = TypeVar("Cursor", str, int)


class ListPage(list[Row], Generic[Row, Cursor]):
    """Rows, maybe few, of the bounded number looked at. `next`: the `after` of the next page, None at the end."""

    def __init__(self, rows: Iterable[Row] = (), next_: Cursor | None = None) -> None:
        super().__init__(rows)
        self.next: Cursor | None = next_


@dataclass(frozen=True, slots=True)
class BoundedCount:
    """A count of a bounded number of rows; not `exact`: there may be more."""

    count: int
    exact: bool


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """A group's error among the latest ones: the text before its first colon.

    `example`: first line of the latest one. `looked`: rows in all.
    """

    error: str
    topic: str
    group: str
    count: int
    first_at: datetime
    last_at: datetime
    example: str
    looked: int


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
    """A message of a parked key; `at_ms`: by the publisher's clock; `large`: its body is stored outside of it."""

    identity: Identity
    position: int
    partition: int
    offset: int
    key: str | None
    at_ms: int
    bytes: int
    redriven: bool
    attempts: int
    large: bool = False


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A message that left a group without effect. `bytes`: None without a body; `large`: see ParkedMessage."""

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
    large: bool = False


def parked_keys(
    database: Database,
    wanted: ParkedFilter | None = None,
    *,
    after: str | None = None,
    limit: int = 50,
    order: ParkedOrder = "key",
) -> ListPage[ParkedKey, str]:
    """Return a page of parked keys, `after` the `next` of another. Raises InvalidInput.

    `order`: by group, LP and name; or of the first SCAN_LIMIT, the longest parked, the largest, the next due.
    """
    if order != "key":
        return _ordered(database, wanted or ParkedFilter(), order, after or "0", page(limit))
    start = FIRST if after is None else _cursor(after)
    facts = _parked_facts(wanted or ParkedFilter()) | {"limit": page(limit)}
    found: list[ParkedKey] = []
    with database.connection() as connection:
        for place in _parked_places(connection, facts, start):
            rows = _run(connection, "parked_list", facts | place).fetchall()
            found += map(_parked_key, rows[: limit - len(found)])
            if len(found) == limit:
                return ListPage(found, found[-1].cursor)
            end = _run(connection, "parked_list_end", facts | place).fetchone()
            if end is not None:
                return ListPage(found, f"{end[0]}:{end[1]}:{end[2].hex()}")
    return ListPage(found)


def _ordered(
    database: Database, wanted: ParkedFilter, order: ParkedOrder, after: str, limit: int
) -> ListPage[ParkedKey, str]:
    if order not in get_args(ParkedOrder):
        raise InvalidInput(f"{order!r} is no order of parked keys: say one of {', '.join(get_args(ParkedOrder))}")
    if not (after.isascii() and after.isdigit() and len(after) <= OFFSET_DIGITS):
        raise InvalidInput(f"{after!r} is no place in the list: begin at its first page")
    facts, offset = _parked_facts(wanted), int(after)
    with database.connection() as connection:
        ids = _group_ids(connection, wanted.topic, wanted.group)
        place = {"group_ids": ids, "order": order, "offset": offset, "limit": limit + 1}
        rows = _run(connection, "parked_list_ordered", facts | place).fetchall()
    return ListPage(map(_parked_key, rows[:limit]), str(offset + limit) if len(rows) > limit else None)


def estimate_parked(database: Database, wanted: ParkedFilter | None = None) -> BoundedCount:
    """Count parked keys among the first SCAN_LIMIT of each group. Raises InvalidInput."""
    facts = _parked_facts(wanted or ParkedFilter())
    fit, exact = 0, True
    with database.connection() as connection:
        for place in _parked_places(connection, facts, FIRST):
            count, looked = _run(connection, "parked_list_count", facts | place).fetchall()[0]
            fit += count
            if looked == facts["scan"]:
                exact = False
                break
    return BoundedCount(fit, exact)


def _parked_facts(wanted: ParkedFilter) -> dict[str, Any]:
    scan = SCAN_LIMIT if wanted.error is None else ERROR_SCAN_LIMIT
    return wanted.facts() | {"group_ids": None, "scan": scan}


def _parked_places(
    connection: Connection, facts: dict[str, Any], start: tuple[int, int, str]
) -> Iterator[dict[str, Any]]:
    """Yield ranges of the primary key: all groups, or one per named group."""
    group, lp, name = start
    first = {"after_group": group, "after_lp": lp, "after_name": bytes.fromhex(name)}
    if facts["topic"] is None and facts["group"] is None:
        ids = _group_ids(connection, None, None) if facts["name"] is not None else None
        yield first | {"last_group": ALL_GROUPS, "group_ids": ids}
        return
    for group_id in _group_ids(connection, facts["topic"], facts["group"]):
        if group_id >= group:
            begin = first if group_id == group else {"after_group": group_id, "after_lp": -1, "after_name": b""}
            yield begin | {"last_group": group_id, "group_ids": [group_id]}


def _group_ids(connection: Connection, topic: str | None, group: str | None) -> list[int]:
    return [row[0] for row in connection.execute(query("group_ids_named"), {"topic": topic, "group": group}).fetchall()]


def _parked_key(row: Sequence[Any]) -> ParkedKey:
    (group_id, topic, group, lp, name, cause, due_at, due_in_s, attempts, started, parked_at, messages, size, source,
     seq, key) = row  # fmt: skip
    return ParkedKey(
        group_id=group_id,
        topic=topic,
        group=group,
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
            large=large,
        )
        for place, source, seq, partition, offset, name, m, size, redriven, attempts, large in rows
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
) -> ListPage[DeadMessage, int]:
    """Return a page of dead messages, latest first, `after` a dead id; `redriven`: also returned ones.

    Raises InvalidInput.
    """
    with database.connection() as connection, connection.transaction():
        facts = _dead_facts(connection, wanted or DeadFilter(), topic, group)
        facts |= {"redriven": redriven, "limit": page(limit)} | _behind(connection, after)
        rows = _run(connection, "dead_list", facts).fetchall()
        end = None if len(rows) == limit else _run(connection, "dead_list_end", facts).fetchone()
    found = [
        DeadMessage(dead_id, topic, group, Identity(source, lp, seq), partition, offset, key_text(key), *rest)
        for dead_id, topic, group, lp, source, seq, partition, offset, key, *rest in rows
    ]
    if len(found) == limit:
        return ListPage(found, found[-1].dead_id)
    return ListPage(found, None if end is None else int(end[0]))


def estimate_dead(
    database: Database, wanted: DeadFilter | None = None, *, topic: str | None = None, group: str | None = None
) -> BoundedCount:
    """Count dead messages among the latest SCAN_LIMIT. Raises InvalidInput."""
    with database.connection() as connection, connection.transaction():
        facts = _dead_facts(connection, wanted or DeadFilter(), topic, group)
        facts |= {"redriven": False} | _behind(connection, None)
        count, looked = _run(connection, "dead_list_count", facts).fetchall()[0]
    return BoundedCount(count, looked < facts["scan"])


def top_errors(
    database: Database,
    topic: str | None = None,
    group: str | None = None,
    *,
    of: Literal["dead", "attempts"] = "dead",
    limit: int = 10,
) -> list[ErrorCount]:
    """Return frequent errors by group, of the latest SCAN_LIMIT deaths or failed attempts. Raises NotFound."""
    group_id = None if topic is None or group is None else find_group(database, topic, group).group_id
    facts = {"group_id": group_id, "topic": topic, "group": group, "scan": SCAN_LIMIT, "limit": page(limit)}
    with database.connection() as connection, connection.transaction():
        if of == "dead":
            connection.execute(query("dead_by_index"))
        rows = _run(connection, "dead_errors" if of == "dead" else "attempt_errors", facts).fetchall()
    return [ErrorCount(*row) for row in rows]


def last_errors(database: Database, heads: Sequence[tuple[int, Identity]]) -> Mapping[tuple[int, Identity], str]:
    """Return the last failed attempt's error by group id and message, where one is recorded."""
    if not heads:
        return {}
    facts = columns(("group_ids", "lps", "sources", "seqs"), [(g, i.lp, i.source, i.seq) for g, i in heads])
    with database.connection() as connection:
        rows = _run(connection, "last_errors", facts).fetchall()
    return {(group_id, Identity(source, lp, seq)): error for group_id, lp, source, seq, error in rows}


def _dead_facts(connection: Connection, wanted: DeadFilter, topic: str | None, group: str | None) -> dict[str, Any]:
    ids = None if topic is None and group is None else _group_ids(connection, topic, group)
    # Of several groups, the latest of all are looked at.
    one = None if ids is None or len(ids) > 1 else ids[0] if ids else NO_GROUP
    scan = SCAN_LIMIT if wanted.error is None else ERROR_SCAN_LIMIT
    if wanted.key is None:
        connection.execute(query("dead_by_index"))
    return wanted.facts() | {"group_ids": ids, "group_id": one, "scan": scan}


def _behind(connection: Connection, after: int | None) -> dict[str, Any]:
    if after is None:
        return {"after": None, "after_at": None}
    row = connection.execute(query("dead_died"), {"dead_id": after}).fetchone()
    if row is None:
        raise InvalidInput(f"there is no dead message {after}: begin again without --after")
    return {"after": after, "after_at": row[0]}


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


def _run(connection: Connection, name: str, facts: dict[str, Any]) -> Any:
    """Unprepared: the filter's values decide which index is best."""
    return connection.execute(query(name), facts, prepare=False)
