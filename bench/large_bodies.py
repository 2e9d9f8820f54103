"""Writing and reading large bodies, against COPY of the same bytes in chunks of the same size."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Final

import psycopg

from bench.registry import Line, bench, compared, in_turn
from bench.stage import Stage
from mqlayer import outbox
from mqlayer.domain.large_bodies import BodyReference, chunks_of, reference_in
from mqlayer.large_bodies import BodyReader
from mqlayer.large_bodies.options import forget_options
from mqlayer.postgres.database import Database
from mqlayer.runtime.runtime import Runtime

SIZE: Final = 8_000_000
ROUNDS: Final = 7
PLAIN_TABLE: Final = """
CREATE TABLE public.plain_body (body int, number int, data bytea, PRIMARY KEY (body, number));
ALTER TABLE public.plain_body ALTER data SET STORAGE EXTERNAL;
"""
NAMED: Final = "SELECT headers::jsonb ->> 'mq-body' FROM mqlayer_app.outbox ORDER BY id DESC LIMIT 1"


@bench("large_bodies")
def large_bodies(stage: Stage) -> Iterator[Line]:
    """MB per second of a body of 8 MB in Postgres: given whole and as a file, fetched whole and as a stream."""
    os.environ["MQLAYER_LARGE_BODIES"] = "postgres"
    forget_options()
    system, body = stage.system(), os.urandom(SIZE)
    try:
        with psycopg.connect(system.dsn) as connection, Database(system.dsn) as database:
            connection.execute(PLAIN_TABLE)
            connection.commit()
            copy_in = partial(copied_in, connection, body, count())
            writing = {
                "copy": copy_in,
                "whole": partial(published, connection, lambda: body),
                "file": partial(published, connection, lambda: io.BytesIO(body)),
            }
            written = in_turn(ROUNDS, writing)
            reference = named(connection)
            reader = BodyReader(Runtime(database, system.settings, database))
            read = in_turn(
                ROUNDS,
                {
                    "copy": partial(copied_out, connection),
                    "whole": partial(fetched, reader, reference),
                    "stream": partial(streamed, reader, reference),
                },
            )
    finally:
        del os.environ["MQLAYER_LARGE_BODIES"]
        forget_options()
    for name, figures in (("write", written), ("read", read)):
        for way in figures.keys() - {"copy"}:
            yield compared(f"large_bodies ({name} {way})", figures[way], figures["copy"], unit="MB/s", target=0.5)


def published(connection: psycopg.Connection, body: Callable[[], object]) -> float:
    """Publish a body; return MB per second, the commit included."""
    began = time.perf_counter()
    outbox.publish(connection, "bench", key="k", body=body())
    connection.commit()
    return per_second(began)


def copied_in(connection: psycopg.Connection, body: bytes, numbers: Iterator[int]) -> float:
    """Copy the chunks of a body into a table."""
    began, number = time.perf_counter(), next(numbers)
    with connection.cursor() as cursor, cursor.copy("COPY public.plain_body FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(["int4", "int4", "bytea"])
        for chunk, data in chunks_of(body):
            copy.write_row((number, chunk, bytes(data)))
    connection.commit()
    return per_second(began)


def copied_out(connection: psycopg.Connection) -> float:
    """Copy the chunks of one body out of the table."""
    began = time.perf_counter()
    chosen = "COPY (SELECT data FROM public.plain_body WHERE body = 0 ORDER BY number) TO STDOUT (FORMAT BINARY)"
    with connection.cursor() as cursor, cursor.copy(chosen) as copy:
        copy.set_types(["bytea"])
        size = sum(len(data) for (data,) in copy.rows())
    connection.commit()
    assert size == SIZE
    return per_second(began)


def fetched(reader: BodyReader, reference: BodyReference) -> float:
    """Fetch a body whole."""
    began = time.perf_counter()
    assert len(reader.fetch(reference)) == SIZE
    return per_second(began)


def streamed(reader: BodyReader, reference: BodyReference) -> float:
    """Read a body as a stream."""
    began = time.perf_counter()
    with reader.opened(reference) as stream:
        assert sum(iter(lambda: len(stream.read(262_144)), 0)) == SIZE
    return per_second(began)


def named(connection: psycopg.Connection) -> BodyReference:
    """Return the reference of the last published message."""
    (text,) = connection.execute(NAMED).fetchone() or ("",)
    connection.commit()
    reference = reference_in(text)
    assert reference is not None
    return reference


def per_second(began: float) -> float:
    """Return MB per second of one body since then."""
    return SIZE / 1e6 / (time.perf_counter() - began)
