"""One message: where it is, what each group did with it, its failed attempts.

It is looked for in the outbox, in the streams by halving, in Postgres, and in the archive by an index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from psycopg import errors as pg_errors

from mqlayer.domain.large_bodies import BODY_HEADER, BodyReference, reference_in
from mqlayer.domain.message import NO_KEY, Identity, Record
from mqlayer.domain.names import parse_identity
from mqlayer.domain.routing import NodeId
from mqlayer.errors import InvalidInput, MqlayerError, NotFound
from mqlayer.groups.start_positions import UndeletedPartition, undeleted_partitions
from mqlayer.inspect.group_facts import PartitionFacts, group_facts, partition_facts
from mqlayer.inspect.stream_search import BudgetSpent, StreamSearch, read_record
from mqlayer.postgres.database import Connection, Database
from mqlayer.postgres.queries import query
from mqlayer.redis.read_scripts import find_command, find_reply
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.route_cache import load_nodes
from mqlayer.runtime.runtime import Runtime

ARCHIVE_MS: Final = 5_000
"""Time to look for a record of the archive."""
ATTEMPTS_LIMIT: Final = 1_000
_PLACE: Final = re.compile(r"(?:([a-z][a-z0-9_.-]*)/)?(\d{1,10})/(\d{1,16})")
_OUTBOX: Final = re.compile(r"outbox/(\d{1,18})")
_decode_headers: Final = msgspec.json.Decoder(dict[str, str]).decode
FORMS: Final = "SOURCE:LP:SEQ, PARTITION/OFFSET, TOPIC/PARTITION/OFFSET or outbox/ID"


@dataclass(frozen=True, slots=True)
class MessageContent:
    """What only some roles may see."""

    headers: Mapping[str, str]
    body: bytes

    @property
    def large_body(self) -> BodyReference | None:
        """The reference of a body stored outside of the message."""
        return reference_in(self.headers.get(BODY_HEADER, ""))


@dataclass(frozen=True, slots=True)
class MessageInGroup:
    """What became of a message in a group. `state`: waiting, settled, parked, dead, unknown, or an outcome.

    `by`: the member that handled it, or who decided; archived topics alone keep members.
    """

    group: str
    state: str
    attempts: int | None = None
    by: str | None = None
    at: datetime | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class GroupAttempt:
    """A failed attempt of a group."""

    group: str
    attempt: int
    failed_at: datetime
    member: str
    error: str


@dataclass(frozen=True, slots=True)
class MessageStatus:
    """A message. `partition`, `offset`: its place, kept or not; `stored`: it is there still.

    `outbox`: waiting, relayed or quarantined, None without a row. `content`: None where it is hidden or gone.
    """

    topic: str
    identity: Identity | None
    key: str | None
    published_at: datetime | None
    tags: tuple[str, ...]
    partition: int | None
    offset: int | None
    node: str | None
    stored: bool
    outbox: str | None
    archived: bool
    groups: Sequence[MessageInGroup]
    attempts: Sequence[GroupAttempt]
    content: MessageContent | None
    unsearched: Sequence[str]
    """Where it may be, too, and why that was not looked at."""
    places: Sequence[tuple[int, int]] = ()
    """Every known partition and offset: a lost node's messages are stored again elsewhere."""
    committed_at: datetime | None = None
    """Of the outbox row, while it exists."""
    archived_at: datetime | None = None
    version: int | None = None
    """The archived record's route version."""


def hidden_from(database: Database) -> str | None:
    """Return this role if it may see no bodies and headers: it may neither operate nor analyze. The server says so."""
    with database.connection() as connection:
        role, allowed = connection.execute(query("bodies_allowed")).fetchone() or ("", False)
    return None if allowed else str(role)


def find_message(runtime: Runtime, named: str, *, topic: str | None = None) -> MessageStatus:
    """Return a message by an id as the system prints it. Bodies are for those who may see them.

    Raises NotFound, InvalidInput for another form, or where several topics may have it.
    """
    search = _Search(runtime, topic)
    if (place := _PLACE.fullmatch(named)) is not None:
        search.by_place(place[1] or topic, int(place[2]), int(place[3]))
    elif (row := _OUTBOX.fullmatch(named)) is not None:
        search.by_outbox_id(int(row[1]))
    else:
        try:
            search.by_identity(parse_identity(named))
        except InvalidInput as error:
            if "names no message" not in str(error):
                raise
            raise InvalidInput(f"{named!r} names no message: say {FORMS}") from None
    if not search.found:
        raise NotFound("message", named, "; ".join(["trimmed, or never published", *search.unsearched]))
    return search.status()


@dataclass(frozen=True, slots=True)
class _Archived:
    topic_id: int
    batch: int
    partition: int
    offset: int
    identity: Identity
    published_at: datetime
    key: bytes | None
    tags: tuple[str, ...]
    archived_at: datetime
    version: int


@dataclass(frozen=True, slots=True)
class _OutboxRow:
    id: int
    topic_id: int
    lp: int
    seq: int
    created_at: datetime
    key: str | None
    waits: bool
    quarantined: str | None

    @property
    def state(self) -> str:
        if self.quarantined is not None:
            return f"quarantined: {self.quarantined}"
        return "waits for a relay" if self.waits else "relayed"


class _Search:
    """Collects what the stores know of one message."""

    def __init__(self, runtime: Runtime, topic: str | None) -> None:
        self._runtime, self._topic = runtime, topic
        self._nodes = {node.node_id: node for node in load_nodes(runtime.control)}
        self.unsearched: list[str] = []
        self._topic_id: int | None = None
        self._identity: Identity | None = None
        self._place: tuple[int, int] | None = None
        self._places: list[tuple[int, int]] = []
        self._node: NodeId | None = None
        self._record: Record | None = None
        self._row: _OutboxRow | None = None
        self._archived: _Archived | None = None
        self._in_archive = False
        self._was_stored = False
        self._groups: list[Any] = []

    @property
    def found(self) -> bool:
        """Whether any store knows it."""
        known = any(row[3] is not None or row[9] is not None for row in self._groups)
        return known or self._in_archive or self._was_stored or not (self._record is None and self._row is None)

    def by_place(self, topic: str | None, partition: int, offset: int) -> None:
        """Look for the message of a place."""
        with self._runtime.control.connection() as connection:
            row = connection.execute(query("message_place"), {"partition": partition}).fetchone()
        if row is None or topic not in (None, row[1]):
            raise NotFound("partition", partition, "see those that there are: mqlayer topic list")
        self._topic_id, self._topic, self._node = row
        self._place = (partition, offset)
        self._record = self._read(partition, offset)
        archived = self._from_archive("message_archived_at")
        if self._record is not None:
            self._identity = self._record.identity
        elif archived is not None:
            self._identity = archived.identity
        if self._identity is not None:
            self._look_up(self._identity)

    def by_outbox_id(self, row_id: int) -> None:
        """Look for the message of an outbox row."""
        self._row = self._outbox_row({"id": row_id, "topic_id": None, "lp": None, "seq": None})
        if self._row is None:
            raise NotFound("row of the outbox", row_id, "relayed rows are emptied after a while")
        self._topic_id = self._row.topic_id
        with self._runtime.outbox.connection() as connection:
            names = {topic_id: name for topic_id, name, _ in connection.execute(query("outbox_topics")).fetchall()}
        self._topic = names.get(self._topic_id, str(self._topic_id))
        if (source := self._source()) is not None:
            self._identity = Identity(source, self._row.lp, self._row.seq)
            if not self._row.waits:
                self._look_up(self._identity)
                self._find_in_streams(self._identity)
                if self._in_archive:
                    self._from_archive("message_archived")

    def by_identity(self, identity: Identity) -> None:
        """Look for the message of an identity."""
        self._identity = identity
        self._topic_id, self._topic = self._topic_of(identity)
        self._look_up(identity)
        self._find_in_streams(identity)
        if self._in_archive:
            self._from_archive("message_archived")

    def status(self) -> MessageStatus:
        """Return the finding."""
        partition, offset = self._place or (None, None)
        archived, record, row = self._archived, self._record, self._row
        key = record.key if record is not None else archived.key if archived is not None else None
        at = _at(record) if record is not None else archived.published_at if archived is not None else None
        tags = record.tags if record is not None else archived.tags if archived is not None else ()
        return MessageStatus(
            topic=str(self._topic),
            identity=self._identity,
            key=row.key if key is None and row is not None else _text(key),
            published_at=row.created_at if at is None and row is not None else at,
            tags=tags,
            partition=partition,
            offset=offset,
            node=None if self._node is None else self._nodes[self._node].name,
            stored=record is not None,
            outbox=None if row is None else row.state,
            archived=self._in_archive or archived is not None,
            groups=list(self.in_groups()),
            attempts=list(self._attempts()),
            content=self._content(),
            unsearched=tuple(self.unsearched),
            places=self._all_places(),
            committed_at=None if row is None else row.created_at,
            archived_at=None if archived is None else archived.archived_at,
            version=None if archived is None else archived.version,
        )

    def _all_places(self) -> list[tuple[int, int]]:
        archived = None if self._archived is None else (self._archived.partition, self._archived.offset)
        return list(dict.fromkeys(place for place in (self._place, *self._places, archived) if place is not None))

    # -- Postgres ------------------------------------------------------------------------------------------------------

    def _topic_of(self, identity: Identity) -> tuple[int, str]:
        facts = {"topic": self._topic} | identity._asdict()
        with self._runtime.control.connection() as connection:
            rows = connection.execute(query("message_topics"), facts).fetchall()
        known = [row for row in rows if row[2]] or rows
        if not known:
            raise NotFound("topic", str(self._topic or "of any name"), "mqlayer topic list")
        if len(known) > 1:
            names = ", ".join(row[1] for row in known)
            raise InvalidInput(f"message {identity} may be of topic {names}: say which with --topic")
        topic_id, name, _, _ = known[0]
        return topic_id, name

    def _look_up(self, identity: Identity) -> None:
        facts = {"topic_id": self._topic_id, "topic": self._topic} | identity._asdict()
        with self._runtime.control.connection() as connection:
            self._groups = connection.execute(query("message_groups"), facts).fetchall()
            self._in_archive = any(row[3] for row in connection.execute(query("message_topics"), facts).fetchall())
        for _, _, _, parked, parked_at, _, _, dead, dead_at, *_ in self._groups:
            for partition, offset in ((parked, parked_at), (dead, dead_at)):
                if self._place is None and partition is not None:
                    self._place = (partition, offset)
        if self._row is None and self._source() == identity.source:
            self._row = self._outbox_row({"id": None} | facts)

    def _source(self) -> int | None:
        if self._runtime.application is None:
            return None
        with self._runtime.outbox.connection() as connection:
            row = connection.execute(query("outbox_uuid")).fetchone()
        if row is None:
            return None
        with self._runtime.control.connection() as connection:
            source = connection.execute(query("message_source"), {"outbox_uuid": row[0]}).fetchone()
        return None if source is None else int(source[0])

    def _outbox_row(self, facts: Mapping[str, Any]) -> _OutboxRow | None:
        with self._runtime.outbox.connection() as connection:
            row = connection.execute(query("message_in_outbox"), facts).fetchone()
        return None if row is None else _OutboxRow(*row)

    def _from_archive(self, name: str) -> _Archived | None:
        partition, offset = self._place or (None, None)
        facts: dict[str, Any] = {"topic_id": self._topic_id, "partition": partition, "offset": offset}
        # The time of the record, where there is one: then a day of the archive is not read as a whole.
        at = None if self._record is None else _at(self._record)
        facts |= {"since": at or datetime(1970, 1, 1, tzinfo=UTC), "until": at or datetime(9000, 1, 1, tzinfo=UTC)}
        if self._identity is not None:
            facts |= self._identity._asdict()
        with self._runtime.control.connection() as connection:
            try:
                row = _within(connection, name, facts)
            except pg_errors.QueryCanceled:
                self.unsearched.append(f"the archive: it took longer than {ARCHIVE_MS // 1000} s to look")
                return None
        if row is not None:
            topic_id, batch, stored_in, stored_at, source, lp, seq, at, key, tags, archived_at, version = row
            identity = Identity(source, lp, seq)
            self._archived = _Archived(
                topic_id, batch, stored_in, stored_at, identity, at, key, tuple(tags or ()), archived_at, version
            )
            self._place = self._place or (stored_in, stored_at)
            self._in_archive = True
        return self._archived

    def _attempts(self) -> Iterator[GroupAttempt]:
        if self._identity is None:
            return
        with self._runtime.control.connection() as connection:
            for group_id, name, *_ in self._groups:
                facts = {"group_id": group_id, "limit": ATTEMPTS_LIMIT} | self._identity._asdict()
                for row in connection.execute(query("attempts_of"), facts).fetchall():
                    yield GroupAttempt(name, *row)

    # -- the streams ---------------------------------------------------------------------------------------------------

    def _read(self, partition: int, offset: int) -> Record | None:
        if self._node is None:
            return None
        node = self._nodes[self._node]
        try:
            with self._runtime.connection(node, RedisRole.VIEWER) as connection:
                return read_record(connection, self._runtime.prefix, partition, offset)
        except MqlayerError as error:
            self.unsearched.append(f"node {node.name}: {error}")
            return None

    def _find_in_streams(self, identity: Identity) -> None:
        with self._runtime.control.connection() as connection:
            kept = undeleted_partitions(connection, self._topic_id or 0)
        with closing(StreamSearch(self._runtime)) as search:
            for one in kept:
                if one.lp_from <= identity.lp < one.lp_to:
                    self._find_in(search, one, identity)
        if self._record is None and self._place is not None:
            self._node = next((one.node for one in kept if one.partition == self._place[0]), None)

    def _find_in(self, search: StreamSearch, one: UndeletedPartition, identity: Identity) -> None:
        try:
            # First: a search that ends at its bound must not hide that the message was stored.
            self._was_stored = self._was_stored or search.mark(one, identity) >= identity.seq
            record = search.find(one, identity)
        except BudgetSpent as error:
            self.unsearched.append(f"the rest of partition {one.partition}: {error}")
        except MqlayerError as error:
            self.unsearched.append(f"partition {one.partition}, node {self._nodes[one.node].name}: {error}")
        else:
            if record is not None:
                self._places.append((one.partition, record.offset))
                if self._record is None:
                    self._record, self._place, self._node = record, self._places[-1], one.node

    # -- groups --------------------------------------------------------------------------------------------------------

    def in_groups(self) -> Iterator[MessageInGroup]:
        """Yield the state in each group."""
        outcomes = self._outcomes()
        positions = self._unsettled()
        for (
            group_id,
            name,
            state,
            parked,
            _,
            cause,
            parked_at,
            dead,
            _,
            dead_id,
            why,
            died_at,
            reason,
            actor,
            again,
        ) in self._groups:
            if parked is not None:
                yield MessageInGroup(name, "parked", None, None, parked_at, cause)
            elif dead is not None and again is None:
                detail = f"dead message {dead_id}, {why}" + (f": {reason.splitlines()[0]}" if reason else "")
                yield MessageInGroup(name, "dead", None, actor, died_at, detail)
            elif group_id in outcomes:
                outcome, attempts, _, settled_at, by, note = outcomes[group_id]
                yield MessageInGroup(name, outcome, attempts, by, settled_at, note)
            elif state == "live" and group_id in positions:
                yield replace(positions[group_id], group=name)
            else:
                yield MessageInGroup(name, state if state != "live" else "unknown")

    def _outcomes(self) -> dict[int, Any]:
        """The last of each group."""
        if self._place is None:
            return {}
        partition, offset = self._place
        ids = [row[0] for row in self._groups]
        facts = {"topic_id": self._topic_id, "group_ids": ids, "partition": partition, "offset": offset}
        with self._runtime.control.connection() as connection:
            rows = connection.execute(query("message_outcomes"), facts).fetchall()
        return {group_id: told for group_id, *told in rows}

    def _unsettled(self) -> dict[int, MessageInGroup]:
        """Whether each group has settled it, by its node."""
        if self._record is None or self._place is None or self._node is None:
            return {}
        facts = partition_facts(self._runtime.control, group_facts(self._runtime.control, self._topic))
        here = [one for one in facts if one.partition == self._place[0]]
        try:
            return {one.group_id: self._told(one, self._record) for one in here}
        except MqlayerError as error:
            self.unsearched.append(f"node {self._nodes[self._node].name}: {error}")
            return {}

    def _told(self, one: PartitionFacts, record: Record) -> MessageInGroup:
        with self._runtime.connection(self._nodes[one.node]) as connection:
            (reply,) = connection.call(
                [
                    find_command(
                        connection, self._runtime.prefix, one.partition, one.group_id,
                        key=record.key, first=record.offset, count=1, seek=one.seek,
                    )
                ]
            )  # fmt: skip
            found = find_reply(reply, record.key, connection.node.address)
        if record.offset < one.start:
            return MessageInGroup("", "before the group's start")
        if not found.messages:
            return MessageInGroup("", "settled")
        failures = found.head.failures if found.head is not None else None
        detail = None if one.owner is None else f"owner {one.owner}"
        return MessageInGroup("", "waiting", failures.attempts if failures else 0, None, None, detail)

    # -- the body ------------------------------------------------------------------------------------------------------

    def _content(self) -> MessageContent | None:
        if hidden_from(self._runtime.control) is not None:
            return None
        if self._record is not None:
            large = self._record.large_body
            named = {} if large is None else {BODY_HEADER: str(large)}
            return MessageContent({**self._record.headers, **named}, self._record.body)
        if self._archived is not None:
            one = self._archived
            facts = {"topic_id": one.topic_id, "batch": one.batch, "partition": one.partition, "offset": one.offset}
            return self._content_of(self._runtime.control, "message_archived_body", facts)
        if self._row is not None:
            facts = {"topic_id": self._row.topic_id, "lp": self._row.lp, "seq": self._row.seq}
            return self._content_of(self._runtime.outbox, "message_outbox_body", facts)
        return None

    def _content_of(self, database: Database, name: str, facts: Mapping[str, Any]) -> MessageContent | None:
        with database.connection() as connection:
            row = connection.execute(query(name), facts).fetchone()
        if row is None:
            return None
        headers, body = row
        return MessageContent(_decode_headers(headers) if headers else {}, body)


def _within(connection: Connection, name: str, facts: Mapping[str, Any]) -> Any:
    with connection.transaction():
        connection.execute(query("statement_time"), {"wait": f"{ARCHIVE_MS}ms"})
        return connection.execute(query(name), facts).fetchone()


def _at(record: Record) -> datetime:
    return datetime.fromtimestamp(record.at_ms / 1000, UTC)


def _text(key: bytes | None) -> str | None:
    return None if key is None or key == NO_KEY else key.decode(errors="replace")
