"""Publish a stream's micro-batches through the outbox, each row once, in key order."""

# A batch is divided into parts: fixed ranges of LPs, so a key's rows are in one part. A part is one transaction of a
# task, which commits its rows and its position, the stream's last batch of that part. States of a part in batch N:
#
# - position below N: nothing of the part is published; the repeated batch publishes it
# - position N, its rows in the outbox: the repeated batch passes it over
# - two tasks at once (a retry, speculation, executors that outlived their driver): the second waits for the first
#   one's row, then passes over
# - all parts done, but not the mark of the whole batch, or not Spark's commit: the repeated batch passes over all
#   parts, or the whole
#
# Spark begins batch N + 1 only after the function returned for N, so a key's rows of N are committed before.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from psycopg import errors as pg_errors
from psycopg.conninfo import make_conninfo
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import BinaryType, StringType

from mqlayer.domain.names import check_name
from mqlayer.domain.routing import LP_COUNT
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.failpoints import failpoint
from mqlayer.outbox.batch_insert import send
from mqlayer.outbox.outbox_message import OutboxMessage, message_of, placed
from mqlayer.postgres.caller_connections import Statement, Statements, run
from mqlayer.postgres.database import connect
from mqlayer.settings import Dsn, Settings, options_of
from mqlayer.spark.session import parallelism
from mqlayer.spark.transforms.lp import lp_of_key

PARTS: Final = 32
CHUNK_ROWS: Final = 1_000
CHUNK_BYTES: Final = 4_000_000
"""Most rows and bytes of a statement."""
WHOLE: Final = -1
"""In place of a part's number."""
POSITIONS: Final = "public.mqlayer_stream_position"
APPLICATION: Final = "mqlayer spark"
# With its schema: sessions of mqlayer have none in their search path.
_TABLE: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}\.[a-z_][a-z0-9_]{0,62}")
# The resolved address is this process's; older client libraries lack the other.
_LEFT_OUT: Final = ("hostaddr", "sslcertmode", "application_name")

Order = Sequence[str | Column]


def publish_batches(
    topic: str,
    *,
    order_by: Order,
    name: str | None = None,
    dsn: str | None = None,
    positions: str = POSITIONS,
    tasks: int | None = None,
) -> BatchPublisher:
    """Return a function for `foreachBatch` that publishes rows to a topic, each once, in key order.

    Columns: `key`, `body` (text or binary), optionally `headers`, `tags`. `order_by`: orders a key's rows in a
    micro-batch. `name`: for several publishers of a query. `positions`: a table, made at first use. `tasks`: at most.

    Raises InvalidInput; the function also Conflict for an older batch, NotFound, the store's errors.
    """
    check_name("topic", topic)
    if not order_by or isinstance(order_by, str):
        raise InvalidInput("order_by names no columns: give a list of those that order a key's rows")
    if not _TABLE.fullmatch(positions):
        raise InvalidInput(f"{positions!r} is no name of a table: say schema.name, in a-z 0-9 _")
    if tasks is not None and tasks < 1:
        raise InvalidInput(f"{tasks} tasks can't publish: say 1 or more")
    return BatchPublisher(
        topic, tuple(order_by), name, _complete(dsn or Settings().application_dsn()), positions, tasks
    )


@dataclass
class BatchPublisher:
    """Publishes micro-batches."""

    topic: str
    order_by: Order
    name: str | None
    dsn: Dsn = field(repr=False)
    positions: str
    tasks: int | None
    _called: tuple[str, int] | None = field(default=None, repr=False)

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Publish a micro-batch, unless it is published."""
        stream = self._stream(frame, batch)
        rows = self._rows(frame)
        with closing(connect(self.dsn, application=APPLICATION)) as connection:
            _make_table(connection, self.positions)
            last, whole = run(connection, _one(_positions_of(self.positions, stream)))
        if last is not None and last > batch:
            raise _went_back(stream, last, batch)
        if whole == batch:
            return
        rows.foreachPartition(PartPublisher(self.topic, stream, batch, self.dsn, self.positions))
        failpoint("spark_sink.before_mark")
        with closing(connect(self.dsn, application=APPLICATION)) as connection:
            _claim(connection, self.positions, {"stream": stream, "part": WHOLE, "batch": batch})
        failpoint("spark_sink.after_mark")

    def _stream(self, frame: DataFrame, batch: int) -> str:
        query, run_id = _property(frame, "sql.streaming.queryId"), _property(frame, "spark.jobGroup.id")
        if not query and not self.name:
            raise InvalidInput("Spark tells no id of the query here: give the stream a name=")
        # A run never repeats a batch: a second call has other rows, which would count as published.
        if query and run_id and self._called == (run_id, batch):
            raise InvalidInput(f"called twice for micro-batch {batch}: make a second function, with another name=")
        self._called = (run_id, batch)
        return "/".join(part for part in (query, self.name, self.topic) if part)

    def _rows(self, frame: DataFrame) -> DataFrame:
        missing = [name for name in ("key", "body") if name not in frame.columns]
        missing += [name for name in self.order_by if isinstance(name, str) and name not in frame.columns]
        if missing:
            raise InvalidInput(
                f"the stream has no column {', '.join(missing)}: it needs key, body and those of order_by"
            )
        kind = frame.schema["body"].dataType
        if not isinstance(kind, StringType | BinaryType):
            raise InvalidInput(f"the column body is {kind.simpleString()}: make it text, such as by to_json, or binary")
        key, lp = F.col("key").cast("string"), F.col("mq:lp")
        placed_rows = frame.withColumn("key", key).withColumn("mq:lp", F.coalesce(lp_of_key(F.col("key")), F.lit(0)))
        placed_rows = placed_rows.withColumn("mq:part", (lp / (LP_COUNT // PARTS)).cast("int"))
        # LPs in one order: each statement locks its LPs until COMMIT, as every publisher does.
        order = ["mq:part", "mq:lp", "key", *self.order_by]
        count = min(PARTS, self.tasks or parallelism(frame.sparkSession))
        ordered = placed_rows.repartition(count, "mq:part").sortWithinPartitions(*order)
        optional = {"headers": "map<string,string>", "tags": "array<string>"}
        more = [
            (F.col(name) if name in frame.columns else F.lit(None).cast(kind)).alias(name)
            for name, kind in optional.items()
        ]
        return ordered.select("mq:part", "key", "body", *more)


@dataclass(frozen=True)
class PartPublisher:
    """A task's work."""

    topic: str
    stream: str
    batch: int
    dsn: Dsn = field(repr=False)
    positions: str

    def __call__(self, rows: Iterator[Any]) -> None:
        """Publish rows, part after part."""
        parts = groupby(rows, key=itemgetter(0))
        first = next(parts, None)
        if first is None:
            return
        with closing(connect(self.dsn, autocommit=False, application=APPLICATION)) as connection:
            self._publish(connection, *first)
            for part, own in parts:
                self._publish(connection, part, own)

    def _publish(self, connection: Any, part: int, rows: Iterator[Any]) -> None:
        facts = {"stream": self.stream, "part": part, "batch": self.batch}
        if not _claim(connection, self.positions, facts):
            connection.rollback()
            return
        held: list[OutboxMessage] = []
        size = 0
        for row in rows:
            held.append(run(connection, placed(connection, self._message(row))))
            size += len(held[-1].body)
            if len(held) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                send(connection, held)
                held, size = [], 0
        if held:
            send(connection, held)
        failpoint("spark_sink.before_commit")
        connection.commit()
        failpoint("spark_sink.after_commit")

    def _message(self, row: Any) -> OutboxMessage:
        _, key, body, headers, tags = row
        if key is None:
            raise InvalidInput("a row without a key: it has no order, and no part; give a key, such as a row's hash")
        if body is None:
            raise InvalidInput("a row without a body: give at least an empty one")
        return message_of(self.topic, key=key, body=body, headers=headers, tags=tags or ())


def _claim(connection: Any, table: str, facts: Mapping[str, Any]) -> bool:
    """Advance a position; False: it is there. Raises Conflict."""
    text = f"""
        WITH claimed AS (
            INSERT INTO {table} AS p (stream, part, batch) VALUES (%(stream)s, %(part)s, %(batch)s)
            ON CONFLICT (stream, part) DO UPDATE SET batch = excluded.batch, committed_at = now()
            WHERE p.batch < excluded.batch RETURNING p.batch)
        SELECT (SELECT count(*) FROM claimed), (SELECT batch FROM {table} WHERE stream = %(stream)s AND part = %(part)s)
    """  # noqa: S608 - the table's name was checked
    claimed, last = run(connection, _one(Statement(text, facts)))
    if not claimed and last is not None and last > facts["batch"]:
        raise _went_back(facts["stream"], last, facts["batch"])
    return bool(claimed)


def _positions_of(table: str, stream: str) -> Statement:
    text = f"SELECT max(batch), max(batch) FILTER (WHERE part = {WHOLE}) FROM {table} WHERE stream = %(stream)s"  # noqa: S608 - the table's name was checked
    return Statement(text, {"stream": stream})


def _one(statement: Statement) -> Statements[tuple[Any, ...]]:
    return (yield statement)


def _make_table(connection: Any, table: str) -> None:
    (there,) = run(connection, _one(Statement("SELECT to_regclass(%(name)s) IS NOT NULL", {"name": table})))
    if there:
        return
    made = (
        f"CREATE TABLE IF NOT EXISTS {table} (stream text NOT NULL, part int NOT NULL, batch bigint NOT NULL, "
        "committed_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (stream, part))"
    )
    try:
        connection.execute(made.encode())
    except pg_errors.InsufficientPrivilege:
        raise InvalidInput(f"this role may not make the table of positions: have an owner run {made}") from None
    except pg_errors.UniqueViolation:
        # Another stream made it at the same time.
        return


def _went_back(stream: str, last: int, batch: int) -> Conflict:
    return Conflict(
        f"stream {stream} published micro-batch {last}, and this is {batch}",
        "its checkpoint is another one, or older: begin with a new checkpoint and, where it has one, a new name=",
    )


def _property(frame: DataFrame, name: str) -> str:
    try:
        return frame.sparkSession.sparkContext.getLocalProperty(name) or ""
    except (AttributeError, NotImplementedError):
        # Spark Connect has none.
        return ""


def _complete(dsn: Dsn | str) -> Dsn:
    """Return a DSN with its password."""
    with closing(connect(dsn, application=APPLICATION)) as connection:
        info = connection.info
        known = {name: value for name, value in info.get_parameters().items() if name not in _LEFT_OUT}
        named = {"host": info.host, "port": str(info.port), "user": info.user, "dbname": info.dbname}
        secret = {"password": info.password} if info.password else {}
        return Dsn(make_conninfo("", **{**known, **named, **secret}), options_of(dsn))
