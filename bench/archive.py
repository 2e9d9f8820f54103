"""The archiver on a backlog in a stream, against plain COPY of the same rows into a table with the same columns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg

from bench.fill import fill
from bench.registry import Line, bench, compared, in_turn
from bench.stage import KEYS, Stage, System
from mqlayer.archive import archive_pass
from mqlayer.redis.keys import partition_keys
from mqlayer.topics import set_archived

COUNT = 200_000
BODY = b"x" * 128
ROUNDS = 3
COLUMNS = (
    "topic_id, batch, version, partition_id, log_offset, source, lp, seq, published_at, archived_at, "
    "key, tags, headers, body"
)
PLAIN = "CREATE TABLE public.plain (LIKE mqlayer_archive.record)"
Row = tuple[Any, ...]


@bench("archive")
def archive(stage: Stage) -> Iterator[Line]:
    """Records per second from a stream into the archive, with chain check, marks, commits; COPY has its rows ready."""
    system = stage.system()
    set_archived(system.runtime, "bench", archived=True)
    fill(system, COUNT, keys=KEYS, body=BODY)
    with psycopg.connect(system.dsn, autocommit=True) as connection:
        connection.execute(PLAIN)
        rows = same_rows(system)
        figures = in_turn(
            ROUNDS,
            {"plain": lambda: run_plain(connection, rows), "archive": lambda: run_archive(system, connection)},
        )
    yield compared("archive", figures["archive"], figures["plain"], unit="rows/s", target=0.7)


def same_rows(system: System) -> list[Row]:
    """Return what the archiver has to write, as a program has it that copies rows."""
    with system.client() as client:
        log = partition_keys(system.settings.key_prefix, system.route.ranges[0].partition).log
        entries: Any = client.xrange(log)
    at, rows = datetime.now(UTC), []
    for entry_id, fields in entries:
        source, lp, seq, ms = fields[b"m"].split(b":")
        published = datetime.fromtimestamp(int(ms) / 1000, UTC)
        rows.append(
            (
                system.route.topic_id, 1, 1, 1, int(entry_id[:-2]), int(source), int(lp), int(seq), published, at,
                fields[b"k"], None, None, fields[b"b"],
            )
        )  # fmt: skip
    return rows


def run_plain(connection: psycopg.Connection[Row], rows: list[Row]) -> float:
    """Copy all rows in one go, in the order of the stream."""
    connection.execute("TRUNCATE public.plain")
    began = time.perf_counter()
    with connection.cursor() as cursor, cursor.copy(f"COPY public.plain ({COLUMNS}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)
    return len(rows) / (time.perf_counter() - began)


def run_archive(system: System, connection: psycopg.Connection[Row]) -> float:
    """Archive the stream from its beginning."""
    for table in ("record", "mark", "progress", "day"):
        connection.execute(f"TRUNCATE mqlayer_archive.{table}".encode())
    began = time.perf_counter()
    report = archive_pass(system.runtime)
    seconds = time.perf_counter() - began
    if report.total != COUNT:
        raise RuntimeError(f"{report.total} records of {COUNT} were archived: {report}")
    return COUNT / seconds
