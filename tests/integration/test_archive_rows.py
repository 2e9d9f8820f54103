"""The records that benches of size write are an archive as archivers write it: whole, in order, and by days."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from bench.archive_rows import BATCH, ArchiveRows, archive_topic
from mqlayer.archive import create_snapshot, find_snapshot, verify_snapshot
from mqlayer.domain.routing import lp_of
from mqlayer.postgres.database import Database
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, register_node
from tests.fixtures.kept_connections import ask_postgres
from tests.proof.runtimes import runtime_of

ROWS = 2 * BATCH + 700


@pytest.fixture
def grown(database_dsn: str, redis_url: str, key_prefix: str) -> Iterator[ArchiveRows]:
    """Three days, written in two steps that end amid a batch."""
    settings = Settings(dsn=SecretStr(database_dsn), key_prefix=key_prefix)
    with Database(database_dsn) as database:
        runtime = runtime_of(database, settings=settings, application=database)
        register_node(runtime, name="n1", url=redis_url)
        create_topic(runtime, "bench", partitions=3)
        rows = archive_topic(runtime)
        rows.grow(BATCH + 100, days=1)
        rows.grow(ROWS, days=2)
        yield rows


def test_generated_records_are_a_valid_archive(grown: ArchiveRows, database_dsn: str) -> None:
    create_snapshot(grown.runtime, "s")
    assert find_snapshot(grown.runtime.control, "s").records == ROWS
    assert verify_snapshot(grown.runtime.control, "s") == []
    records = ask_postgres(
        database_dsn,
        "SELECT key, lp, seq, partition_id, log_offset, octet_length(body), batch FROM mqlayer_archive.record "
        "ORDER BY batch, log_offset",
    )
    assert {lp_of(bytes(key)) for key, *_ in records} == set(range(1024))
    assert all(lp_of(bytes(key)) == lp for key, lp, *_ in records)
    assert {row[5] for row in records} == {256}
    seqs: dict[int, int] = {}
    offsets: dict[int, set[int]] = {}
    for _, lp, seq, partition, offset, *_ in records:
        assert seq == seqs.get(lp, 0) + 1
        seqs[lp] = seq
        offsets.setdefault(partition, set()).add(offset)
    routes = {
        p: (a, b) for p, a, b in ask_postgres(database_dsn, "SELECT partition_id, lp_from, lp_to FROM mqlayer.route")
    }
    assert all(routes[row[3]][0] <= row[1] < routes[row[3]][1] for row in records)
    assert sum(map(len, offsets.values())) == ROWS, "each offset of a partition once"
    days = ask_postgres(database_dsn, "SELECT first_batch, last_batch, records FROM mqlayer_archive.day ORDER BY day")
    assert days == [(1, 2, BATCH + 100), (3, 3, BATCH), (4, 4, 600)]
    by_day = "SELECT min(batch), max(batch), count(*) FROM mqlayer_archive.record GROUP BY archived_at::date ORDER BY 1"
    assert ask_postgres(database_dsn, by_day) == days
