"""Find messages by key, time, header, trace id or dedup id: in the outbox, the streams and the archive.

Every search is bounded: in the streams by a number of records, in the archive by an index or a time, and by seconds.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final

import msgspec
from psycopg import errors as pg_errors

from mqlayer.domain.dedup import FirstPosition, encode_dedup_id, lp_of_unkeyed, token_of
from mqlayer.domain.message import NO_KEY, Identity, Record
from mqlayer.domain.names import check_any_topic, encode_key
from mqlayer.domain.routing import NodeId, lp_of
from mqlayer.errors import InvalidInput, MqlayerError, NotFound
from mqlayer.groups.start_positions import UndeletedPartition, undeleted_partitions
from mqlayer.inspect.message_life import MissingStep
from mqlayer.inspect.message_status import ARCHIVE_MS, hidden_from
from mqlayer.inspect.stream_search import RECORDS_LIMIT, BudgetSpent, OffsetBounds, StreamSearch
from mqlayer.postgres.queries import query
from mqlayer.redis.keys import partition_keys
from mqlayer.redis.node_connection import raise_for_reply
from mqlayer.redis.read_scripts import FoundRecord, RecordFilter
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.node_pool import NodePool
from mqlayer.runtime.runtime import Runtime

TRACE_HEADER: Final = "traceparent"
MATCHES_LIMIT: Final = 1_000
ROWS_AT_FIRST: Final = 50
"""Few, so that the latest ones of a busy key come from the end of the archive alone."""
BATCHES_AT_FIRST: Final = 2
BATCHES_AT_ONCE: Final = 64
"""Of the archive, where it has no index: the first ones may be enough."""
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}")
_CURSOR: Final = re.compile(r"(archive|outbox|\d{1,10})/(\d{1,16})(?:/(\d{1,16}))?")
_LAST: Final = 2**53
_EVER: Final = (datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC))


class MessageFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Wanted messages of a topic: at least a key, a header, a trace id, or `since`. Times: the publishers'."""

    key: str | None = None
    header: tuple[str, str] | None = None
    trace_id: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def check(self) -> None:
        """Raise InvalidInput for a filter that would match everything, or a wrong one."""
        if self.key is None and self.header is None and self.trace_id is None and self.since is None:
            raise InvalidInput("name a key, a time, a header or a trace id: mqlayer peek shows the newest messages")
        if self.trace_id is not None and _TRACE_ID.fullmatch(self.trace_id) is None:
            raise InvalidInput(f"{self.trace_id!r} is no trace id: it has 32 hex digits, such as a traceparent has")
        if any(at is not None and at.tzinfo is None for at in (self.since, self.until)):
            raise InvalidInput("say the time with its zone, such as 2026-11-21T09:30:00+00:00")

    @property
    def by_header(self) -> bool:
        """Whether headers are compared."""
        return self.header is not None or self.trace_id is not None

    @property
    def contains(self) -> str:
        """The text that the headers of a match contain, as JSON."""
        if self.trace_id is not None:
            return self.trace_id
        # Without quotes: escapes may differ, so a value with one is looked for by its longest plain part.
        value = "" if self.header is None else self.header[1]
        return max(re.split(r'["\\\x00-\x1f\x7f]', value), key=len)

    def takes(self, headers: Mapping[str, str]) -> bool:
        """Compare the headers."""
        if self.header is not None and headers.get(self.header[0]) != self.header[1]:
            return False
        return self.trace_id is None or f"-{self.trace_id}-" in headers.get(TRACE_HEADER, "")


class FoundMessage(msgspec.Struct, frozen=True):
    """A found message. `message`: its name for `find_message`; `source`: outbox, stream or archive."""

    message: str
    source: str
    key: str | None
    published_at: datetime
    partition: int | None
    offset: int | None
    tags: tuple[str, ...]
    identity: Identity | None


class MessagePage(msgspec.Struct, frozen=True):
    """A page of messages. `after`: where the next page begins, None at the end; `looked`: records of streams."""

    messages: list[FoundMessage]
    after: str | None
    looked: int
    missing: list[MissingStep]


def find_by_dedup_id(runtime: Runtime, topic: str, dedup_id: str, *, key: str | None = None) -> Identity:
    """Return the message of a dedup id; with a key, the id is the key's. Raises NotFound after its window."""
    check_any_topic(topic)
    wanted = encode_dedup_id(dedup_id)
    name = None if key is None else encode_key(key)
    lp = lp_of_unkeyed(wanted) if name is None else lp_of(name)
    token = token_of(name, wanted)
    search = _TopicSearch(runtime, topic)
    found = search.dedup_in_outbox(lp, token) or search.dedup_in_streams(lp, token)
    if found is None:
        window_s = f"{runtime.settings.dedup_window_s:g} s"
        raise NotFound("dedup id", dedup_id, f"ids are remembered for {window_s}, each of its key: name it, if any")
    return found


def search_messages(
    runtime: Runtime,
    topic: str,
    wanted: MessageFilter,
    *,
    limit: int = 20,
    after: str | None = None,
    records: int = RECORDS_LIMIT,
    within_s: float = math.inf,
) -> MessagePage:
    """Return a page of the messages that match; the latest first, by time alone the earliest.

    `after`: a page's `after`, of a search by key; `records`, `within_s`: of streams, at most. Raises NotFound,
    InvalidInput, also for headers that this role may not see.
    """
    check_any_topic(topic)
    wanted.check()
    if not 1 <= limit <= MATCHES_LIMIT:
        raise InvalidInput(f"{limit} messages are no page: 1 to {MATCHES_LIMIT:,}")
    if wanted.by_header and (role := hidden_from(runtime.control)) is not None:
        raise InvalidInput(f"role {role} may see no headers, so it may not search them: mqlayer grant operate {role}")
    search = _TopicSearch(runtime, topic, records, within_s)
    if wanted.key is not None and not wanted.by_header:
        return search.of_key(wanted, limit, _Cursor.of(after))
    if after is not None:
        raise InvalidInput("only a search by key alone goes on after a page: narrow the time instead")
    return search.of_time(wanted, limit)


class _Cursor(msgspec.Struct, frozen=True):
    """A place that a search by key has reached: in a partition, or in the archive."""

    partition: int | None = None
    offset: int = _LAST
    batch: int = _LAST
    outbox_seq: int | None = None

    @classmethod
    def of(cls, text: str | None) -> _Cursor | None:
        if text is None:
            return None
        parts = _CURSOR.fullmatch(text)
        if parts is None or (parts[1] == "archive") != (parts[3] is not None):
            raise InvalidInput(f"{text!r} is no place to go on: take it from the last line of a page")
        if parts[1] == "outbox":
            return cls(outbox_seq=int(parts[2]))
        if parts[1] == "archive":
            return cls(None, int(parts[3]), int(parts[2]))
        return cls(int(parts[1]), int(parts[2]))


class _TopicSearch:
    """Searches one topic."""

    def __init__(self, runtime: Runtime, topic: str, records: int = RECORDS_LIMIT, within_s: float = math.inf) -> None:
        self._runtime, self._records, self._within_s = runtime, records, within_s
        self._silent: set[NodeId] = set()
        self._missing: list[MissingStep] = []
        self._after: str | None = None
        with runtime.control.connection() as connection:
            row = connection.execute(query("searched_topic"), {"topic": topic}).fetchone()
            if row is None:
                raise NotFound("topic", topic, "mqlayer topic list")
            self._topic_id, self._archived, self._retention_days, _ = row
            self._partitions = undeleted_partitions(connection, self._topic_id)
            rows = connection.execute(query("searched_archive"), {"topic_id": self._topic_id}).fetchall()
        self._in_archive: dict[int, int] = dict(rows)

    # -- by key --------------------------------------------------------------------------------------------------------

    def of_key(self, wanted: MessageFilter, limit: int, after: _Cursor | None) -> MessagePage:
        """Return a page of a key, the latest first."""
        key = encode_key(wanted.key or "")
        with closing(StreamSearch(self._runtime, records=self._records, within_s=self._within_s)) as search:
            found = list(islice(_distinct(self._of_key(search, wanted, key, after)), limit + 1))
            if len(found) > limit:
                self._after = found[limit][0]
            return MessagePage([one for _, one in found[:limit]], self._after, search.looked, self._missing)

    def _of_key(
        self, search: StreamSearch, wanted: MessageFilter, key: bytes, after: _Cursor | None
    ) -> Iterator[tuple[str, FoundMessage]]:
        """Yield messages with the cursor that gives each one again."""
        since, until = wanted.since or _EVER[0], wanted.until or _EVER[1]
        if after is None or after.outbox_seq is not None:
            for seq, one in self._waiting(key, _LAST if after is None else after.outbox_seq or 0):
                if since <= one.published_at <= until:
                    yield f"outbox/{seq}", one
            after = None
        try:
            if after is None or after.partition is not None:
                yield from self._of_key_in_streams(search, wanted, key, after)
        except BudgetSpent as error:
            self._missing.append(MissingStep("earlier messages", "not_searched", str(error)))
            if search.reached is not None:
                self._after = f"{search.reached[0]}/{search.reached[1] - 1}"
            return
        if self._in_archive:
            archive = after if after is not None and after.partition is None else _Cursor()
            yield from self._of_key_in_archive(key, archive, since, until)

    def _of_key_in_streams(
        self, search: StreamSearch, wanted: MessageFilter, key: bytes, after: _Cursor | None
    ) -> Iterator[tuple[str, FoundMessage]]:
        lp = lp_of(key)
        lineage = [one for one in reversed(self._partitions) if one.lp_from <= lp < one.lp_to]
        if after is not None:
            lineage = [one for one in lineage if one.partition <= (after.partition or 0)]
        for one in lineage:
            within = self._range(search, one, wanted)
            if after is not None and one.partition == after.partition:
                within = OffsetBounds(within.first, min(within.past, after.offset + 1))
            for found in search.backward(one, RecordFilter(key=key), within):
                if _within(found, wanted):
                    yield f"{one.partition}/{found.offset}", found_of_record(one.partition, found.record)

    def _range(self, search: StreamSearch, one: UndeletedPartition, wanted: MessageFilter) -> OffsetBounds:
        """Return a partition's offsets of a time; of a search by key, without the archived ones."""
        if one.node in self._silent:
            return OffsetBounds(1, 1)
        try:
            first, past = search.bounds(one)
            if wanted.since is not None:
                first = search.offset_at(one, _ms(wanted.since))
            if wanted.until is not None:
                past = search.offset_at(one, _ms(wanted.until) + 1)
        except BudgetSpent:
            raise
        except MqlayerError as error:
            # Each of a node's partitions would wait for it again.
            self._silent.add(one.node)
            reason = f"partition {one.partition} and others of its node: {error}"
            self._missing.append(MissingStep("messages of a node", "not_searched", reason))
            return OffsetBounds(1, 1)
        if wanted.key is not None and not wanted.by_header:
            first = max(first, self._in_archive.get(one.partition, 1))
        return OffsetBounds(first, past)

    def _of_key_in_archive(
        self, key: bytes, after: _Cursor, since: datetime, until: datetime
    ) -> Iterator[tuple[str, FoundMessage]]:
        facts = {"lp": lp_of(key), "key": key, "since": since, "until": until}
        with self._runtime.control.connection() as connection:
            row = connection.execute(query("searched_archive_days"), {"topic_id": self._topic_id}).fetchone()
        last, unindexed = row or (0, None)
        high = min(after.batch, last)
        ends_at, count = time.monotonic() + ARCHIVE_MS / 1_000, min(BATCHES_AT_FIRST, BATCHES_AT_ONCE)
        # Days without an index are read backwards, some batches at a time, and may be gone on with.
        while unindexed is not None and high >= unindexed:
            low = max(unindexed, high - count + 1)
            yield from self._of_batches(facts, low, _Cursor(None, after.offset if high == after.batch else _LAST, high))
            high, count = low - 1, min(2 * count, BATCHES_AT_ONCE)
            if time.monotonic() > ends_at and high >= unindexed:
                self._after = f"archive/{high}/{_LAST}"
                reason = f"the archive's days without an index took {ARCHIVE_MS // 1_000} s: go on, or name a time"
                self._missing.append(MissingStep("earlier messages", "not_searched", reason))
                return
        yield from self._of_batches(facts, 0, _Cursor(None, after.offset if high == after.batch else _LAST, high))

    def _of_batches(self, facts: Mapping[str, Any], low: int, upto: _Cursor) -> Iterator[tuple[str, FoundMessage]]:
        """Yield the messages of batches in steps, the last first."""
        batch, offset, limit = upto.batch, upto.offset + 1, ROWS_AT_FIRST
        while True:
            place = {"from_batch": low, "batch": batch, "offset": offset, "limit": limit}
            rows = self._archive("searched_archive_of_key", {**facts, **place})
            for row in rows:
                batch, offset = row[0], row[2]
                yield f"archive/{batch}/{offset}", _of_archive(row)
            if len(rows) < limit:
                return
            limit = MATCHES_LIMIT

    def _waiting(self, key: bytes, upto: int) -> Iterator[tuple[int, FoundMessage]]:
        if self._runtime.application is None:
            return
        facts = {"topic_id": self._topic_id, "lp": lp_of(key), "key": key.decode(), "upto": upto}
        with self._runtime.outbox.connection() as connection:
            rows = connection.execute(query("searched_outbox_of_key"), facts | {"limit": MATCHES_LIMIT + 1}).fetchall()
        for number, _, seq, at in rows:
            yield seq, FoundMessage(f"outbox/{number}", "outbox", key.decode(), at, None, None, (), None)

    # -- by time -------------------------------------------------------------------------------------------------------

    def of_time(self, wanted: MessageFilter, limit: int) -> MessagePage:
        """Return the messages of a time that match."""
        latest_first = wanted.by_header
        if wanted.since is None:
            since = datetime.now(UTC) - timedelta(hours=1)
            wanted = msgspec.structs.replace(wanted, since=since)
        with closing(StreamSearch(self._runtime, records=self._records, within_s=self._within_s)) as search:
            found = [*self._of_time_in_streams(search, wanted, limit), *self._of_time_in_archive(wanted, limit)]
            found.sort(key=lambda one: one.published_at, reverse=latest_first)
            pairs = _distinct(("", one) for one in found)
            return MessagePage([one for _, one in islice(pairs, limit)], None, search.looked, self._missing)

    def _of_time_in_streams(self, search: StreamSearch, wanted: MessageFilter, limit: int) -> Iterator[FoundMessage]:
        key = None if wanted.key is None else encode_key(wanted.key)
        sought = RecordFilter(contains=_as_bytes(wanted.contains), key=key)
        for one in reversed(self._partitions):
            try:
                yield from islice(self._of_time_in(search, one, wanted, sought, limit), limit)
            except BudgetSpent as error:
                reason = f"{error}: name a shorter time, or a later one"
                self._missing.append(MissingStep("other messages of the time", "not_searched", reason))
                return

    def _of_time_in(
        self, search: StreamSearch, one: UndeletedPartition, wanted: MessageFilter, sought: RecordFilter, limit: int
    ) -> Iterator[FoundMessage]:
        within = self._range(search, one, wanted)
        if wanted.by_header:
            matches = search.backward(one, sought, within)
        else:
            matches = search.forward(one, sought, within, limit)
        for found in matches:
            record = found.record
            if _within(found, wanted) and wanted.takes(record.headers):
                yield found_of_record(one.partition, record)

    def _of_time_in_archive(self, wanted: MessageFilter, limit: int) -> Iterator[FoundMessage]:
        if not self._in_archive:
            return
        facts: dict[str, Any] = {"since": wanted.since, "until": wanted.until or _EVER[1], "limit": limit}
        if not wanted.by_header:
            yield from map(_of_archive, self._archive("searched_archive_of_time", facts))
            return
        key = None if wanted.key is None else encode_key(wanted.key)
        facts |= {"key": key, "contains": wanted.contains, "limit": MATCHES_LIMIT}
        place: dict[str, Any] = {"at": _EVER[1], "batch": _LAST, "offset": _LAST}
        ends_at, left = time.monotonic() + ARCHIVE_MS / 1_000, limit
        # The text may stand in other headers, of any number of later messages.
        while left:
            rows = self._archive("searched_archive_of_header", facts | place)
            for row in rows:
                if left and wanted.takes(json.loads(row[9] or "{}")):
                    left -= 1
                    yield _of_archive(row)
            if len(rows) < MATCHES_LIMIT:
                return
            if left and time.monotonic() > ends_at:
                reason = f"the archive took longer than {ARCHIVE_MS // 1_000} s: name a shorter time"
                self._missing.append(MissingStep("archived messages", "not_searched", reason))
                return
            place = {"at": rows[-1][6], "batch": rows[-1][0], "offset": rows[-1][2]}

    # -- by dedup id ---------------------------------------------------------------------------------------------------

    def dedup_in_outbox(self, lp: int, token: bytes) -> Identity | None:
        """Return the message of a token in the outbox's table."""
        if self._runtime.application is None:
            return None
        with self._runtime.outbox.connection() as connection:
            facts = {"topic_id": self._topic_id, "lp": lp, "token": token}
            row = connection.execute(query("searched_dedup"), facts).fetchone()
            of_outbox = connection.execute(query("outbox_uuid")).fetchone()
        if row is None or of_outbox is None:
            return None
        with self._runtime.control.connection() as connection:
            source = connection.execute(query("message_source"), {"outbox_uuid": of_outbox[0]}).fetchone()
        return None if source is None else Identity(source[0], lp, row[0])

    def dedup_in_streams(self, lp: int, token: bytes) -> Identity | None:
        """Return the message of a token that a direct producer sent."""
        with NodePool.of_registered(self._runtime, RedisRole.VIEWER) as pool:
            for one in reversed(self._partitions):
                if one.lp_from <= lp < one.lp_to:
                    connection = pool.to(one.node)
                    ids_key = partition_keys(self._runtime.prefix, one.partition).ids
                    (reply,) = connection.call([("HMGET", ids_key, token)])
                    (text,) = raise_for_reply(reply, connection.node.address)
                    if text and (first := FirstPosition.of(text)) is not None:
                        return first.identity
        return None

    def _archive(self, name: str, facts: Mapping[str, Any]) -> list[Any]:
        with self._runtime.control.connection() as connection:
            try:
                with connection.transaction():
                    connection.execute(query("statement_time"), {"wait": f"{ARCHIVE_MS}ms"})
                    return connection.execute(query(name), {"topic_id": self._topic_id, **facts}).fetchall()
            except pg_errors.QueryCanceled:
                reason = f"the archive took longer than {ARCHIVE_MS // 1_000} s: name a shorter time"
                self._missing.append(MissingStep("archived messages", "not_searched", reason))
                return []


def _distinct(found: Iterable[tuple[str, FoundMessage]]) -> Iterator[tuple[str, FoundMessage]]:
    seen: set[Identity] = set()
    for cursor, one in found:
        if one.identity is None or one.identity not in seen:
            yield cursor, one
        if one.identity is not None:
            seen.add(one.identity)


def _within(found: FoundRecord, wanted: MessageFilter) -> bool:
    at_ms = found.record.at_ms
    after = wanted.since is None or at_ms >= _ms(wanted.since)
    return after and (wanted.until is None or at_ms <= _ms(wanted.until)) and not found.record.void


def found_of_record(partition: int, record: Record) -> FoundMessage:
    """Return a record of a partition as a found message."""
    at = datetime.fromtimestamp(record.at_ms / 1000, UTC)
    return FoundMessage(str(record.identity), "stream", _text(record.key), at, partition, record.offset, record.tags,
                        record.identity)  # fmt: skip


def _of_archive(row: Any) -> FoundMessage:
    _, partition, offset, source, lp, seq, at, key, tags, *_ = row
    identity = Identity(source, lp, seq)
    return FoundMessage(str(identity), "archive", _text(key), at, partition, offset, tuple(tags or ()), identity)


def _text(key: bytes | None) -> str | None:
    return None if key is None or key == NO_KEY else key.decode(errors="replace")


def _as_bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)
