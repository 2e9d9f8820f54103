"""Fill an archive with millions of records, as archivers would have: by SQL alone, without streams.

`MQLAYER_DSN=… python -m bench.archive_rows 10000000 --topic big` fills the archive of a topic that is archived and has
no records yet, and takes a snapshot. It is for trying Spark on a size; the records are in no stream.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from bench.registry import note
from mqlayer.archive import create_snapshot
from mqlayer.domain.routing import LP_COUNT, Route, lp_of
from mqlayer.postgres.database import Connection, Database
from mqlayer.runtime.route_cache import load_route
from mqlayer.runtime.runtime import Runtime
from mqlayer.settings import Settings

BODY_BYTES: Final = 256
KEYS_PER_LP: Final = 64
BATCH: Final = 4_096
STEP: Final = 250 * BATCH
SOURCE: Final = 1
NOISE_BYTES: Final = 1 << 20
"""Bodies are pieces of so much noise: Parquet finds little to compress in them."""
FIRST_DAY: Final = 100
"""Days ago; each call takes the next days."""

KEYS: Final = """
CREATE TEMP TABLE bench_key (number int PRIMARY KEY, key bytea NOT NULL);
CREATE TEMP TABLE bench_range (lp int PRIMARY KEY, partition_id int NOT NULL, width int NOT NULL, place int NOT NULL);
"""
# The record n is number n / 1024 of LP n % 1024, and an LP's keys take turns: seqs and offsets are counted, not sorted.
RECORDS: Final = """
INSERT INTO mqlayer_archive.record
SELECT %(topic_id)s, %(first_batch)s + (n - %(day_from)s) / %(batch)s, 1, r.partition_id,
       (n / 1024) * r.width + r.place + 1, %(source)s, r.lp, n / 1024 + 1, d.at, d.at, k.key, NULL, NULL,
       substr(%(noise)s::bytea, (1 + n * 7919 %% %(noise_bytes)s)::int, %(body_bytes)s)
FROM generate_series(%(from)s::bigint, %(until)s::bigint - 1) n
JOIN bench_range r ON r.lp = n %% 1024
JOIN bench_key k ON k.number = n %% %(keys)s
CROSS JOIN LATERAL (SELECT %(day)s::date::timestamp AT TIME ZONE 'UTC'
                           + make_interval(secs => (n - %(day_from)s) * 86000.0 / %(day_rows)s) AS at) d
"""
MARKS: Final = """
INSERT INTO mqlayer_archive.mark AS m (topic_id, source, lp, first_seq, last_seq)
SELECT %(topic_id)s, %(source)s, lp, 1, (%(until)s::bigint - 1 - lp) / 1024 + 1
FROM generate_series(0, least(1024, %(until)s::bigint) - 1) lp
ON CONFLICT (topic_id, source, lp) DO UPDATE SET last_seq = excluded.last_seq
"""
DAY: Final = """
INSERT INTO mqlayer_archive.day VALUES (%(day)s::date, %(topic_id)s, %(first_batch)s, %(last)s, %(rows)s, 0)
"""


@dataclass(slots=True)
class ArchiveRows:
    """A topic's archive, which grows by days that are over."""

    runtime: Runtime
    topic: str = "bench"
    body_bytes: int = BODY_BYTES
    rows: int = 0
    batches: int = 0
    days: int = 0

    def grow(self, until: int, *, days: int = 10) -> None:
        """Add records up to so many in all, a batch of the archive for each 4,096; a commit for each day."""
        began, before = time.monotonic(), self.rows
        route = load_route(self.runtime.control, self.topic)
        with self.runtime.control.connection() as connection:
            _prepare(connection, route)
            per_day = max(1, -(-(until - before) // (days * BATCH))) * BATCH
            for first in range(before, until, per_day):
                self._add_day(connection, route, first, min(first + per_day, until))
            connection.execute("ANALYZE mqlayer_archive.record")
        seconds = time.monotonic() - began
        note(f"  {until - before:,} records archived in {seconds:.0f} s: {(until - before) / seconds:,.0f} a second")

    def _add_day(self, connection: Connection, route: Route, first: int, until: int) -> None:
        keys = KEYS_PER_LP * LP_COUNT
        ((day,),) = connection.execute(
            "SELECT (now() AT TIME ZONE 'UTC')::date - %s::int", (FIRST_DAY - self.days,)
        ).fetchall()
        facts = {
            "topic_id": route.topic_id, "source": SOURCE, "batch": BATCH, "first_batch": self.batches + 1,
            "day": day, "day_from": first,
            "day_rows": until - first, "rows": until - first, "keys": keys, "body_bytes": self.body_bytes,
            "noise": random.Random(1).randbytes(NOISE_BYTES), "noise_bytes": NOISE_BYTES - self.body_bytes,
        }  # fmt: skip
        with connection.transaction():
            connection.execute("SELECT mqlayer_archive.day_make_v1(%s)", (day,))
            for start in range(first, until, STEP):
                connection.execute(RECORDS, facts | {"from": start, "until": min(start + STEP, until)})
            # No batch is of two days.
            last = self.batches - (first - until) // BATCH
            connection.execute(DAY, facts | {"last": last})
            connection.execute(MARKS, facts | {"until": until})
            connection.execute(
                "UPDATE mqlayer_archive.topic SET batch = %s WHERE topic_id = %s", (last, route.topic_id)
            )
        self.rows, self.batches, self.days = until, last, self.days + 1


def even_keys(per_lp: int = KEYS_PER_LP) -> Sequence[bytes]:
    """Return keys, so many of each LP: the key at n is of LP n % 1024."""
    found: list[list[bytes]] = [[] for _ in range(LP_COUNT)]
    missing, number = per_lp * LP_COUNT, 0
    while missing:
        key = f"key-{number}".encode()
        number += 1
        of_lp = found[lp_of(key)]
        if len(of_lp) < per_lp:
            of_lp.append(key)
            missing -= 1
    return [found[lp][turn] for turn in range(per_lp) for lp in range(LP_COUNT)]


def _prepare(connection: Connection, route: Route) -> None:
    connection.execute("DROP TABLE IF EXISTS bench_key, bench_range")
    connection.execute(KEYS)
    with connection.cursor() as cursor, cursor.copy("COPY bench_key FROM STDIN") as copy:
        for number, key in enumerate(even_keys()):
            copy.write_row((number, key))
    with connection.cursor() as cursor, cursor.copy("COPY bench_range FROM STDIN") as copy:
        for one in route.ranges:
            for lp in range(one.lp_from, one.lp_to):
                copy.write_row((lp, one.partition, one.lp_to - one.lp_from, lp - one.lp_from))
    connection.execute("ANALYZE bench_key; ANALYZE bench_range")


def archive_topic(runtime: Runtime, topic: str = "bench") -> ArchiveRows:
    """Return an archived topic's rows. The topic is archived from now on; its archive has to be empty."""
    with runtime.control.connection() as connection, connection.transaction():
        connection.execute("UPDATE mqlayer.topic SET archived = true WHERE name = %s", (topic,))
        connection.execute(
            "INSERT INTO mqlayer_archive.topic (topic_id) SELECT topic_id FROM mqlayer.topic WHERE name = %s "
            "ON CONFLICT DO NOTHING", (topic,),
        )  # fmt: skip
        found = connection.execute(
            "SELECT t.batch FROM mqlayer_archive.topic t JOIN mqlayer.topic USING (topic_id) WHERE name = %s", (topic,)
        ).fetchall()
    if found != [(0,)]:
        raise typer.BadParameter(f"topic {topic!r} is unknown, or has records in the archive: take a new one")
    return ArchiveRows(runtime, topic)


def main(
    rows: Annotated[int, typer.Argument(min=1, help="So many records.")],
    topic: Annotated[str, typer.Option(help="A topic without records in the archive.")] = "bench",
    body_bytes: Annotated[int, typer.Option(min=1, max=65_536, help="The size of each body.")] = BODY_BYTES,
    days: Annotated[int, typer.Option(min=1, max=90, help="The days that they are spread over.")] = 10,
    snapshot: Annotated[str, typer.Option(help="The snapshot to take.")] = "big",
) -> None:
    """Fill the archive of a topic with records, and take a snapshot."""
    settings = Settings()
    with Database(settings.control_dsn(), application="mqlayer bench") as database:
        runtime = Runtime(database, settings, database, "bench")
        made = archive_topic(runtime, topic)
        made.body_bytes = body_bytes
        made.grow(rows, days=days)
        create_snapshot(runtime, snapshot, topics=[topic])


if __name__ == "__main__":
    typer.run(main)
