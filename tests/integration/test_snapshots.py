"""Snapshots: a cut through the archive never changes, whoever writes, cuts or drops beside it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest

from mqlayer import failpoints
from mqlayer.archive import (
    Snapshot,
    create_snapshot,
    drop_snapshot,
    find_snapshot,
    list_snapshots,
    retain,
    verify_snapshot,
)
from mqlayer.archive.parquet_export import export_snapshot
from mqlayer.archive.read_ranges import batch_shares, batches_condition, lp_ranges
from mqlayer.archive.retention import TIMEOUTS
from mqlayer.archive.snapshots import is_whole, snapshot_cut
from mqlayer.domain.routing import lp_of
from mqlayer.errors import ArchiveBroken, Conflict, InvalidInput, NotFound
from mqlayer.maintenance import trim_pass
from mqlayer.postgres.arrow_reader import arrow_batches, bound, read_address
from mqlayer.postgres.queries import query
from tests.fixtures.archive_scenes import LOW, ArchiveScene
from tests.fixtures.archived import BEGAN, ArchivedTopics
from tests.fixtures.commands import Commands
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import run_python
from tests.fixtures.missing_tools import import_or_leave_out
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

pq = import_or_leave_out("pyarrow.parquet")

HOUR = timedelta(hours=1)


def read(archived: ArchivedTopics, name: str) -> list[tuple[Any, ...]]:
    """All rows of a snapshot's records, sorted; read as Spark's workers do."""
    found = find_snapshot(archived.database, name)
    facts = {"snapshot_id": found.snapshot_id, "lp_from": 0, "lp_to": 1024}
    statements = [bound("snapshot_there", {"snapshot_id": found.snapshot_id}), bound("snapshot_records", facts)]
    with arrow_batches(read_address(archived.dsn), statements, application="test") as batches:
        return sorted(tuple(map(str, row.values())) for batch in batches for row in batch.to_pylist())


def test_a_snapshot_has_what_the_archive_held_and_never_changes(archived: ArchivedTopics) -> None:
    """Case 79."""
    archived.put("a", "b", "a")
    batch = archived.put("a", source=2)
    made = create_snapshot(runtime_of(archived.database), "monday")
    (topic,) = made.topics
    assert (topic.topic, topic.batch, topic.version, topic.records, made.records) == ("orders", batch, 1, 4, 4)
    before = read(archived, "monday")
    assert len(before) == 4
    archived.put("a", "c")
    assert read(archived, "monday") == before
    assert find_snapshot(archived.database, "monday") == made
    assert create_snapshot(runtime_of(archived.database), "tuesday").records == 6
    assert [one.name for one in list_snapshots(archived.database)] == ["monday", "tuesday"]
    assert verify_snapshot(archived.database, "monday") == []


def test_a_snapshot_until_a_time_ends_before_the_first_later_record_of_each_chain(archived: ArchivedTopics) -> None:
    """A record that is later in its chain, but was published earlier, is left out with what it follows."""
    archived.put("a", "b")
    archived.put("a", at=BEGAN + 2 * HOUR)
    archived.put("a", at=BEGAN)
    archived.put("b", at=BEGAN + HOUR)
    archived.put("c", at=BEGAN + 3 * HOUR)
    made = create_snapshot(runtime_of(archived.database), "noon", at=BEGAN + HOUR)
    cut = snapshot_cut(archived.database, made.snapshot_id)
    assert sorted((one.first_seq, one.last_seq) for one in cut) == [(1, 1), (1, 2)]
    assert len(read(archived, "noon")) == made.records == 3
    assert verify_snapshot(archived.database, "noon") == []


def test_what_a_snapshot_waited_for_is_in_it(archived: ArchivedTopics) -> None:
    """Values that were read before the wait for the lock would cut off a batch that its marks count."""
    archived.put("a")
    writer = psycopg.connect(archived.dsn)
    writer.execute("SELECT FROM mqlayer_archive.topic FOR UPDATE")
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(create_snapshot, runtime_of(archived.database), "s")
        wait_until(lambda: archived.rows("SELECT 1 FROM pg_locks WHERE NOT granted"), what="the snapshot waits")
        writer.execute(
            "INSERT INTO mqlayer_archive.record SELECT topic_id, 2, version, partition_id, 2, source, lp, 2, "
            "published_at, archived_at, key, tags, headers, body FROM mqlayer_archive.record"
        )
        writer.execute("UPDATE mqlayer_archive.mark SET last_seq = 2")
        writer.execute("UPDATE mqlayer_archive.topic SET batch = 2")
        writer.commit()
        made = making.result(timeout=10)
    writer.close()
    assert (made.records, made.topics[0].batch, len(read(archived, "s"))) == (2, 2, 2)


@pytest.mark.full
def test_reading_is_equal_while_writers_and_retention_run(archived: ArchivedTopics) -> None:
    """Invariant 18: two reads of a snapshot are equal."""
    archived.put("a", "b", age_days=40)
    archived.put("a", "b", age_days=20)
    archived.put("a", "b")
    create_snapshot(runtime_of(archived.database), "kept")
    expected, ended = read(archived, "kept"), Event()

    def write() -> int:
        count = 0
        while not ended.is_set():
            archived.put("a", "b", "c")
            count += 1
        return count

    def drop() -> set[str]:
        words = set()
        while not ended.is_set():
            words |= {str(day.result) for day in retain(runtime_of(archived.database), older_than=timedelta(days=10))}
        return words

    with ThreadPoolExecutor(3) as pool:
        writing, dropping = pool.submit(write), pool.submit(drop)
        try:
            for number in range(10):
                assert read(archived, "kept") == expected
                create_snapshot(runtime_of(archived.database), f"s{number}")
                assert verify_snapshot(archived.database, f"s{number}") == []
        finally:
            ended.set()
        assert writing.result() > 0
        assert dropping.result() <= {"spared", "busy"}
    for one in list_snapshots(archived.database):
        drop_snapshot(runtime_of(archived.database), one.name)
    words = [day.result for day in retain(runtime_of(archived.database), older_than=timedelta(days=10))]
    assert words == ["dropped", "dropped"], "without snapshots, days go"
    made = create_snapshot(runtime_of(archived.database), "later")
    assert min(one.first_seq for one in snapshot_cut(archived.database, made.snapshot_id)) == 1, "of key c"
    assert verify_snapshot(archived.database, "later") == []


def test_reading_is_equal_beside_writers_an_archiver_trimming_and_days_that_go(
    database_dsn: str, redis_url: str, key_prefix: str
) -> None:
    """Invariant 18, cases 79, 80: what is read twice and in parallel is one thing, whatever streams and archive do."""
    scene = ArchiveScene(database_dsn, key_prefix, redis_url, partitions=1)
    group = scene.group()
    scene.send(1, LOW, *[b"old"] * 50)
    scene.archive()
    scene.age(40)
    scene.send(1, LOW, *[b"new"] * 50)
    scene.archive()
    made = create_snapshot(runtime_of(scene.database), "kept")
    # Another topic, of which days come and go meanwhile.
    other = ArchivedTopics(database_dsn, scene.connection, scene.database)
    topic_id = other.topic("other", archived=False)
    scene.connection.execute("UPDATE mqlayer.partition SET state = 'deleted' WHERE topic_id = %s", (topic_id,))
    scene.connection.execute("INSERT INTO mqlayer_archive.topic (topic_id) VALUES (%s)", (topic_id,))
    expected, ended = read(other, "kept"), Event()
    seen: dict[str, int] = {"archived": 0, "trimmed": 0, "dropped": 0, "spared": 0}

    def write() -> None:
        scene.send(1, LOW, *[b"later"] * 20)
        scene.settle(group, 1, scene.seqs[1, lp_of(LOW.encode())])

    def archive_and_trim() -> None:
        seen["archived"] += scene.archive().total
        trim_pass(runtime_of(scene.database, scene.prefix))
        seen["trimmed"] = max(0, scene.first(1) - 1 - made.records)

    def keep_few_days() -> None:
        other.put("x", topic="other", age_days=60)
        for day in retain(runtime_of(scene.database), older_than=timedelta(days=10)):
            seen[str(day.result)] = seen.get(str(day.result), 0) + 1

    def on_and_on(work: Callable[[], None]) -> None:
        while not ended.is_set():
            work()

    def look() -> None:
        assert [read(other, "kept") for _ in range(8)] == [expected] * 8

    with ThreadPoolExecutor(5) as pool:
        beside = [pool.submit(on_and_on, work) for work in (write, archive_and_trim, keep_few_days)]
        try:
            wait_until(lambda: all(seen.values()) or any(one.done() for one in beside), timeout_s=60, what="all of it")
            for looking in [pool.submit(look), pool.submit(look)]:
                looking.result(timeout=60)
        finally:
            ended.set()
        for one in beside:
            one.result(timeout=30)
    assert len(expected) == made.records == 100
    assert all(seen.values()), seen
    assert verify_snapshot(scene.database, "kept") == []
    assert read(other, "kept") == expected
    scene.close()


def test_retention_that_meets_a_snapshot_in_the_making_spares_it(
    archived: ArchivedTopics, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(TIMEOUTS, "lock_wait", "20s")
    archived.put("a", age_days=40)
    failpoints.arm("snapshot.after_lock", f"mark:{tmp_path / 'reached'}")
    failpoints.arm("snapshot.after_lock", f"wait:{tmp_path / 'go'}")
    with ThreadPoolExecutor(2) as pool:
        making = pool.submit(create_snapshot, runtime_of(archived.database), "s")
        wait_until((tmp_path / "reached").exists, what="the snapshot holds its topics")
        dropping = pool.submit(retain, runtime_of(archived.database), older_than=timedelta(days=10))
        wait_until(lambda: archived.rows("SELECT 1 FROM pg_locks WHERE NOT granted"), what="retention waits")
        (tmp_path / "go").touch()
        assert making.result(timeout=10).records == 1
        assert [day.result for day in dropping.result(timeout=10)] == ["spared"]
    assert len(read(archived, "s")) == 1


def there(made: Snapshot) -> str:
    return bound("snapshot_there", {"snapshot_id": made.snapshot_id})


def test_nobody_drops_a_day_under_a_reader(archived: ArchivedTopics, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the snapshot and the reading somebody drops it and wants to drop its days."""
    monkeypatch.setitem(TIMEOUTS, "lock_wait", "50ms")
    archived.put("a", age_days=40)
    archived.put("a")
    made = create_snapshot(runtime_of(archived.database), "s")
    facts = {"snapshot_id": made.snapshot_id, "lp_from": 0, "lp_to": 1024}
    with psycopg.connect(read_address(archived.dsn).conninfo(application="test")) as reader:
        reader.execute(there(made).encode())
        drop_snapshot(runtime_of(archived.database), "s")
        assert [day.result for day in retain(runtime_of(archived.database), older_than=timedelta(days=10))] == ["busy"]
        assert len(reader.execute(bound("snapshot_records", facts).encode()).fetchall()) == 2
    assert [day.result for day in retain(runtime_of(archived.database), older_than=timedelta(days=10))] == ["dropped"]


def test_a_reader_whose_days_went_before_it_held_them_is_refused(archived: ArchivedTopics) -> None:
    """Its transaction still sees the snapshot and its cut; the tables are gone all the same."""
    archived.put("a", age_days=40)
    archived.put("a")
    made = create_snapshot(runtime_of(archived.database), "s")
    for ask in (there(made), bound("stream_there", {"topic_id": 1, "after": 0})):
        with psycopg.connect(read_address(archived.dsn).conninfo(application="test")) as reader:
            reader.execute("SELECT count(*) FROM mqlayer_archive.cut")
            if archived.rows("SELECT 1 FROM mqlayer_archive.snapshot"):
                drop_snapshot(runtime_of(archived.database), "s")
                retain(runtime_of(archived.database), older_than=timedelta(days=10))
            with pytest.raises(psycopg.DatabaseError, match="dropped"):
                reader.execute(ask.encode())


def test_a_stream_does_not_pass_days_that_were_dropped_behind_spared_ones(archived: ArchivedTopics) -> None:
    """A snapshot spares the oldest day only: whoever stands in it has lost what followed."""
    first = archived.put("a", age_days=50)
    create_snapshot(runtime_of(archived.database), "s")
    second = archived.put("a", age_days=40)
    third = archived.put("a")
    words = [day.result for day in retain(runtime_of(archived.database), older_than=timedelta(days=10))]
    assert words == ["spared", "dropped"]
    with archived.database.connection() as connection:
        ((_, _, last, kept_from),) = connection.execute(query("stream_topics"), {"topics": None}).fetchall()
    assert (last, kept_from) == (third, third)
    for after in (0, first):
        with pytest.raises(psycopg.DatabaseError, match="dropped from the archive"):
            archived.rows("SELECT mqlayer_archive.batches_v1(1, %s)", after)
    assert archived.rows("SELECT mqlayer_archive.batches_v1(1, %s)", second) == [(third,)]


def test_what_is_dropped_is_not_read_as_empty(archived: ArchivedTopics) -> None:
    archived.put("a")
    made = create_snapshot(runtime_of(archived.database), "s")
    drop_snapshot(runtime_of(archived.database), "s")
    assert archived.rows("SELECT count(*) FROM mqlayer_archive.cut") == [(0,)]
    statements = [bound("snapshot_there", {"snapshot_id": made.snapshot_id}), "SELECT 1"]
    with (
        pytest.raises(NotFound, match="dropped"),
        arrow_batches(read_address(archived.dsn), statements, application="test") as batches,
    ):
        list(batches)


def test_what_is_refused_says_what_to_do(archived: ArchivedTopics) -> None:
    archived.topic("plain", archived=False)
    database = archived.database
    create_snapshot(runtime_of(database), "s")
    with pytest.raises(Conflict, match="snapshot drop s"):
        create_snapshot(runtime_of(database), "s")
    with pytest.raises(NotFound, match="topic list"):
        create_snapshot(runtime_of(database), "t", topics=["nobody"])
    with pytest.raises(InvalidInput, match="topic set plain --archived"):
        create_snapshot(runtime_of(database), "t", topics=["plain"])
    with pytest.raises(InvalidInput, match="bad snapshot name"):
        create_snapshot(runtime_of(database), "No")
    with pytest.raises(InvalidInput, match="no time zone"):
        create_snapshot(runtime_of(database), "t", at=BEGAN.replace(tzinfo=None))
    for ask in (find_snapshot, verify_snapshot):
        with pytest.raises(NotFound, match="snapshot list"):
            ask(database, "nobody")
    with pytest.raises(NotFound, match="snapshot list"):
        drop_snapshot(runtime_of(database), "nobody")
    assert [one.name for one in list_snapshots(database)] == ["s"]
    assert archived.rows("SELECT act, object FROM mqlayer.audit") == [("snapshot create", "s")]


def test_without_an_archived_topic_there_is_no_snapshot(database_dsn: str) -> None:
    from mqlayer.postgres.database import Database

    with Database(database_dsn) as database, pytest.raises(InvalidInput, match="no topic is archived"):
        create_snapshot(runtime_of(database), "s")


AGAIN = "INSERT INTO mqlayer_archive.record SELECT * FROM mqlayer_archive.record WHERE seq = 2"


@pytest.mark.parametrize("spoil", ["DELETE FROM mqlayer_archive.record WHERE seq = 2",
                                   "UPDATE mqlayer_archive.record SET seq = 1 WHERE seq = 2",
                                   AGAIN])  # fmt: skip
def test_a_spoiled_archive_is_found_out(archived: ArchivedTopics, spoil: str, tmp_path: Path) -> None:
    archived.put("a", "a", "a")
    create_snapshot(runtime_of(archived.database), "s")
    archived.connection.execute(spoil.encode())
    ((_topic, _source, _lp, wanted, rows, seqs),) = verify_snapshot(archived.database, "s")
    assert wanted == 3
    assert (rows, seqs) != (3, 3)
    with pytest.raises(ArchiveBroken, match="seqs 1 to 3"):
        export_snapshot(runtime_of(archived.database), "s", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_whole_and_says_what_it_is(archived: ArchivedTopics, tmp_path: Path) -> None:
    for _ in range(3):
        archived.put(*[f"key-{number}" for number in range(40)], headers='{"x":"ä"}', tags=["t"], outcomes=True)
    made = create_snapshot(runtime_of(archived.database), "s")
    done = export_snapshot(runtime_of(archived.database), "s", tmp_path / "out", file_rows=50)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["snapshot"], manifest["tables"]["records"]["rows"]) == ("s", 120)
    assert manifest["tables"]["outcomes"]["rows"] == 3
    assert manifest["tables"]["lineage"]["rows"] == 1
    assert [tuple(one) for one in manifest["cut"]] == snapshot_cut(archived.database, made.snapshot_id)
    assert len(done.files["records"]) == 3
    for facts in manifest["tables"]["records"]["files"]:
        path = tmp_path / "out" / facts["path"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == facts["sha256"]
        assert pq.read_metadata(path).num_rows == facts["rows"]
    (first, *_) = pq.read_table(tmp_path / "out" / "records").to_pylist()
    assert (first["topic"], first["tags"], first["headers"], first["body"]) == ("orders", ["t"], [("x", "ä")], b"body")
    with pytest.raises(Conflict, match="exists"):
        export_snapshot(runtime_of(archived.database), "s", tmp_path / "out")
    with pytest.raises(InvalidInput, match="make it first"):
        export_snapshot(runtime_of(archived.database), "s", tmp_path / "nowhere" / "out")
    assert ("snapshot export", "s") in archived.rows("SELECT act, object FROM mqlayer.audit")


def killed(dsn: str, failpoint: str, *words: str) -> None:
    environment = os.environ | {"MQLAYER_DSN": dsn, **armed(failpoint)}
    assert run_python("mqlayer", *words, env=environment, timeout=60) == -9


@pytest.mark.parametrize("name", some_of(["snapshot.after_lock", "snapshot.before_commit"], 2))
def test_a_snapshot_that_is_killed_in_the_making_was_never_there(archived: ArchivedTopics, name: str) -> None:
    archived.put("a")
    killed(archived.dsn, f"{name}=kill", "snapshot", "create", "s")
    assert list_snapshots(archived.database) == []
    assert create_snapshot(runtime_of(archived.database), "s").records == 1


@pytest.mark.full
def test_an_export_that_is_killed_leaves_no_directory_of_its_name(archived: ArchivedTopics, tmp_path: Path) -> None:
    archived.put("a")
    create_snapshot(runtime_of(archived.database), "s")
    killed(archived.dsn, "export.before_rename=kill", "snapshot", "export", "s", "--to", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert export_snapshot(runtime_of(archived.database), "s", tmp_path / "out").snapshot.records == 1


def test_commands(archived: ArchivedTopics, run: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MQLAYER_DSN", archived.dsn)
    archived.put("a", "b")
    assert "no snapshots" in run.text("snapshot", "list")
    assert run.text("snapshot", "create", "s", "--topic", "orders") == "s has 2 records of 1 topic\n"
    assert run.lines("snapshot", "list")[0] | {"created_at": ""} == {
        "snapshot": "s", "created_at": "", "upto_at": None, "topics": "orders", "records": 2,
    }  # fmt: skip
    assert run.lines("snapshot", "show", "s") == [
        {"topic": "orders", "batch": 1, "version": 1, "records": 2, "ranges": 2}
    ]
    assert "verified: 2 records" in run.text("snapshot", "show", "s", "--verify")
    assert "2 records in 3 files" in run.text("snapshot", "export", "s", "--to", str(tmp_path / "out"))
    assert "is no time" in run.failure("snapshot", "create", "t", "--at", "soon")
    assert "exists" in run.failure("snapshot", "create", "s")
    archived.connection.execute("DELETE FROM mqlayer_archive.record")
    spoiled = run("snapshot", "show", "s", "--verify")
    assert spoiled.exit_code == 1
    assert "0 records of 0 seqs where there must be 1" in spoiled.stderr
    assert "s is dropped" in run.text("snapshot", "drop", "s", "--yes")
    assert "unknown snapshot" in run.failure("snapshot", "show", "s")


def test_ranges_tile_all_lps_and_divide_the_records() -> None:
    assert lp_ranges({}, 3) == [(0, 1024)]
    assert lp_ranges(dict.fromkeys(range(1024), 1), 4) == [(0, 256), (256, 512), (512, 768), (768, 1024)]
    assert lp_ranges({0: 100, 1: 1, 1023: 1}, 3) == [(0, 1), (1, 2), (2, 1024)]
    assert lp_ranges({5: 10}, 4) == [(0, 6), (6, 1024)]


def test_shares_of_batches_are_all_batches_once_and_divide_the_records() -> None:
    even = [(1, batch, 10) for batch in range(1, 101)]
    assert batch_shares({1: 100}, even, 4) == [((1, 0, 25),), ((1, 25, 50),), ((1, 50, 75),), ((1, 75, 100),)]
    assert batch_shares({1: 9, 2: 4}, [(1, 9, 10), (2, 1, 10), (2, 3, 10)], 2) == [((1, 0, 9), (2, 0, 1)), ((2, 1, 4),)]
    assert batch_shares({1: 9}, [(1, 2, 100), (1, 9, 1)], 3) == [((1, 0, 2),), ((1, 2, 9),)]
    assert batch_shares({1: 9, 2: 0}, [], 4) == [((1, 0, 9),)]
    assert batch_shares({}, [], 4) == []
    assert batches_condition([]) == "false"


def test_a_snapshot_that_is_all_that_there_is_reads_as_by_its_cut(archived: ArchivedTopics) -> None:
    """Whether it is: not one until a time, nor one behind a gap that was accepted."""
    archived.put("a", "b", "a")
    archived.put("c", at=BEGAN + HOUR)
    made = {
        "all": create_snapshot(runtime_of(archived.database), "all"),
        "until": create_snapshot(runtime_of(archived.database), "until", at=BEGAN),
    }
    archived.connection.execute("UPDATE mqlayer_archive.mark SET first_seq = 2 WHERE last_seq = 2")
    made["behind"] = create_snapshot(runtime_of(archived.database), "behind")
    whole = {name: is_whole(archived.database, one.snapshot_id) for name, one in made.items()}
    assert whole == {"all": True, "until": False, "behind": False}
    archived.put("a")
    facts = {"snapshot_id": made["all"].snapshot_id, "lp_from": 0, "lp_to": 1024}
    found = [archived.rows(bound(name, facts)) for name in ("snapshot_records", "snapshot_records_whole")]
    assert sorted(map(str, found[0])) == sorted(map(str, found[1]))
    assert len(found[0]) == 4
