"""Run a new handler beside the old one over a snapshot; each key begins with empty tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec
from psycopg import sql

from mqlayer.archive import find_snapshot
from mqlayer.consuming.api.app import Consumer
from mqlayer.domain.message import NO_KEY, Record, encode_facts
from mqlayer.domain.tags import tags_text
from mqlayer.errors import InvalidInput
from mqlayer.postgres.arrow_reader import bound
from mqlayer.postgres.database import Connection, Database
from mqlayer.testing.scratch_schema import ScratchSchema, ShadowTable, TableDifference, scratch_schemas
from mqlayer.testing.shadow_context import ShadowContext, ShadowTarget

# Handlers run between two fetches, within the session's limit of ten idle minutes.
ROWS_AT_ONCE: Final = 200
DIFFERENCES: Final = 20
"""Most keys shown."""
_FIELDS: Final = 'key, partition, "offset", source, lp, seq, published_at, tags, headers::text, body'


class ShadowMessage(NamedTuple):
    """A snapshot's message."""

    partition: int
    record: Record

    @property
    def name(self) -> str:
        """Its identity."""
        return ":".join(map(str, self.record.identity))


@dataclass(frozen=True, slots=True)
class KeyDifference:
    """A differing key, and its first differing message."""

    key: str | None
    messages: int
    tables: Sequence[TableDifference]
    single: ShadowMessage | None = None
    first: str = ""
    old: str = ""
    new: str = ""


@dataclass(slots=True)
class ShadowResult:
    """`left_out`: messages with large bodies."""

    keys: int = 0
    messages: int = 0
    failed_old: int = 0
    failed_new: int = 0
    left_out: int = 0
    differing: int = 0
    differences: list[KeyDifference] = field(default_factory=list)


class ShadowOptions(NamedTuple):
    """`trust_names`: handlers may have rights on real tables; `unfenced`: they may give no connection."""

    trust_names: bool = False
    unfenced: bool = False
    key: str | None = None


def check_handler(path: str, consumer: Consumer) -> Consumer:
    """Raises InvalidInput unless its effects can be redirected."""
    if consumer.batch is not None or consumer.is_async:
        kind = "takes batches" if consumer.batch is not None else "is async"
        raise InvalidInput(f"{path!r} {kind}: a shadow runs plain handlers of one message")
    if not consumer.with_context:
        raise InvalidInput(
            f"{path!r} takes no Context, so its transaction can't be led into a scratch schema: let it take one, and "
            "give its connection to ctx.fence or ctx.inbox"
        )
    return consumer


class ShadowSide:
    """A handler and its scratch schema."""

    def __init__(self, consumer: Consumer, schema: ScratchSchema, guarded: Sequence[str], *, unfenced: bool) -> None:
        self._consumer, self.schema, self._unfenced = consumer, schema, unfenced
        self._target = ShadowTarget(schema.name, guarded)
        self._handler = consumer.bound().handler

    def handle(self, message: ShadowMessage) -> str:
        """Return '' or the error's class. Raises InvalidInput for effects elsewhere."""
        context = ShadowContext(
            self._consumer.topic, self._consumer.group, message.partition, message.record, self._target
        )
        try:
            self._handler(self._consumer.decode(message.record.body), context)
        except InvalidInput:
            raise
        except Exception as error:  # noqa: BLE001 - handlers raise anything
            return type(error).__name__
        if not context.rolled_back and not self._unfenced:
            raise InvalidInput(
                f"the handler {self._consumer.handler.__name__} gave no connection to ctx.fence or ctx.inbox for "
                f"message {message.name}: it may have had effects elsewhere; --allow-unfenced goes on"
            )
        return ""


class ShadowRun:
    """Two handlers over one topic of a snapshot."""

    def __init__(self, control: Database, snapshot: str, topic: str, options: ShadowOptions) -> None:
        self._control, self._topic, self._options = control, topic, options
        self._snapshot_id = find_snapshot(control, snapshot).snapshot_id

    def compare(
        self, old: Consumer, new: Consumer, connection: Connection, tables: Sequence[ShadowTable]
    ) -> ShadowResult:
        """Run both. Raises as `ShadowSide.handle`."""
        found = ShadowResult()
        guarded = [] if self._options.trust_names else [one.full_name for one in tables]
        with scratch_schemas(connection, tables) as schemas:
            sides = [
                ShadowSide(consumer, schemas[side], guarded, unfenced=self._options.unfenced)
                for side, consumer in (("old", old), ("new", new))
            ]
            for key, messages in groupby(self._messages(found, self._options.key), key=_unit):
                found.keys += 1
                self._one(found, sides, key[0], messages)
            # Not before the scan ended: it holds a connection.
            found.differences = [self._located(sides, one) for one in found.differences]
        return found

    @staticmethod
    def _one(
        found: ShadowResult, sides: Sequence[ShadowSide], key: str | None, messages: Iterator[ShadowMessage]
    ) -> None:
        old, new = sides
        count, failures_differ, single = 0, False, None
        for message in messages:
            count, single = count + 1, message
            answers = old.handle(message), new.handle(message)
            found.failed_old += bool(answers[0])
            found.failed_new += bool(answers[1])
            failures_differ |= answers[0] != answers[1]
        found.messages += count
        tables = old.schema.differences(new.schema)
        if tables or failures_differ:
            found.differing += 1
            if len(found.differences) < DIFFERENCES:
                found.differences.append(KeyDifference(key, count, tables, single if key is None else None))
        old.schema.clear()
        new.schema.clear()

    def _located(self, sides: Sequence[ShadowSide], one: KeyDifference) -> KeyDifference:
        """Run a key again, up to the first difference."""
        old, new = sides
        for message in [one.single] if one.single is not None else self._messages(None, one.key):
            answers = old.handle(message), new.handle(message)
            tables = old.schema.differences(new.schema)
            if answers[0] != answers[1] or tables:
                one = replace(one, first=message.name, old=answers[0] or "handled", new=answers[1] or "handled")
                break
        old.schema.clear()
        new.schema.clear()
        return one

    def _messages(self, found: ShadowResult | None, key: str | None) -> Iterator[ShadowMessage]:
        """Yield messages by key, in order."""
        # A later partition of an LP has a greater number.
        statement = bound("snapshot_records", {"snapshot_id": self._snapshot_id, "lp_from": 0, "lp_to": 1024})
        ordered = sql.SQL(
            "SELECT {fields} FROM ({statement}) AS r WHERE topic = {topic} AND ({key}::text IS NULL OR key = {key}) "
            'ORDER BY key, partition, batch, "offset"'
        ).format(
            fields=sql.SQL(_FIELDS), statement=sql.SQL(statement), topic=sql.Literal(self._topic), key=sql.Literal(key)
        )
        with (
            self._control.connection() as connection,
            connection.transaction(),
            connection.cursor(name="mqlayer_shadow") as cursor,
        ):
            cursor.itersize = ROWS_AT_ONCE
            for row in cursor.execute(ordered):
                message = _message(row)
                if message.record.large_body is None:
                    yield message
                elif found is not None:
                    found.left_out += 1


def _unit(message: ShadowMessage) -> tuple[str | None, str]:
    # Messages without a key have no order: each is by itself.
    if message.record.key == NO_KEY:
        return None, message.name
    return message.record.key.decode(errors="replace"), ""


def _message(row: Sequence[Any]) -> ShadowMessage:
    key, partition, offset, source, lp, seq, at, tags, headers, body = row
    said = msgspec.json.decode(headers, type=dict[str, str]) if headers else None
    facts = encode_facts(round(at.timestamp() * 1000), said, tags_text(tags) if tags else "")
    data = NO_KEY if key is None else key.encode()
    return ShadowMessage(partition, Record(offset, b"%d:%d:%d:%b" % (source, lp, seq, facts), data, bytes(body)))
