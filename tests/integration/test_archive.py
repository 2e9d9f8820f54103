"""The archive: every record of archived topics once, in order, whatever happens between the streams and it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import SecretStr

from mqlayer import failpoints
from mqlayer.archive import (
    accept_gaps,
    archive_pass,
    archive_status,
    batch_writer,
    list_gaps,
    retain,
    retain_by_topics,
    set_retention,
)
from mqlayer.archive.retention import TIMEOUTS, RetentionResult
from mqlayer.doctor import CheckStatus, diagnose
from mqlayer.domain.routing import lp_of
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.maintenance import trim_pass
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query
from mqlayer.routes import give_up_node, retire_partitions
from mqlayer.runtime.route_cache import load_route
from mqlayer.settings import Settings
from mqlayer.topics import create_topic, rearm_node, set_archived
from tests.fixtures.archive_scenes import HIGH, LOW, TOPIC, ArchiveScene
from tests.fixtures.commands import Commands
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.servers import StartRedis
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.fall_back import FallBack
from tests.proof.route_ranges import range_of
from tests.proof.route_steps import merge, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World


def test_every_record_is_archived_once_with_its_place_and_content(archive_scene: ArchiveScene) -> None:
    """Case 79."""
    archive_scene.send(1, "a", b"one", b"two")
    archive_scene.send(2, "a", b"other", facts=b'1700000000123:{"mq-tags":"0011223344556677:eu,vip","x":"\xc3\xa4"}')
    archive_scene.send(1, "b", b"\x00\xff", facts=b'1700000000000:{"h":"1"}')
    report = archive_scene.archive()
    assert report.archived == {TOPIC: 4}
    assert archive_scene.archived() == archive_scene.expected()
    lp = lp_of(b"a")
    rows = archive_scene.rows(
        "SELECT batch, version, partition_id, log_offset, seq, extract(epoch FROM published_at)::float8, key, tags, "
        "headers, body FROM mqlayer_archive.record WHERE lp = %s ORDER BY batch, log_offset", lp,
    )  # fmt: skip
    partition = range_of(archive_scene.route, lp).partition
    assert [row[1:] for row in rows] == [
        (1, partition, 1, 1, 1_700_000_000, b"a", None, None, b"one"),
        (1, partition, 2, 2, 1_700_000_000, b"a", None, None, b"two"),
        (1, partition, 3, 1, pytest.approx(1_700_000_000.123), b"a", ["eu", "vip"], '{"x":"ä"}', b"other"),
    ]
    assert archive_scene.rows(
        "SELECT count(*) FROM mqlayer_archive.record WHERE archived_at > now() - interval '1 min'"
    ) == [(4,)]
    assert archive_scene.archive().archived == {}


def test_a_pass_goes_on_where_the_last_one_ended(archive_scene: ArchiveScene) -> None:
    for turn in range(3):
        for key in (LOW, HIGH, "c"):
            archive_scene.send(1, key, b"x", b"y")
        assert archive_scene.archive().total == 6, turn
    archive_scene.assert_whole()
    assert archive_scene.archive().total == 0
    assert archive_scene.rows("SELECT batch, last_pass_at > now() - interval '1 min' FROM mqlayer_archive.topic") == [
        (6, True)
    ]
    assert archive_scene.rows("SELECT first_batch, last_batch, records FROM mqlayer_archive.day") == [(1, 6, 18)]


def test_a_batch_is_bounded_and_a_piece_may_end_anywhere(
    archive_scene: ArchiveScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_writer, "RECORDS", 10)
    monkeypatch.setattr("mqlayer.archive.archiver.page_size", lambda _: 3)
    for number in range(20):
        archive_scene.send(1 + number % 2, f"key-{number % 5}", b"a", b"b", b"c")
    assert archive_scene.archive().total == 60
    archive_scene.assert_whole()
    ((largest, batches),) = archive_scene.rows(
        "SELECT max(n), count(*) FROM (SELECT count(*) AS n FROM mqlayer_archive.record GROUP BY batch) AS b"
    )
    assert largest <= 12
    assert batches >= 5


def test_what_is_not_to_be_archived_is_not(database_dsn: str, redis_url: str, key_prefix: str) -> None:
    scene = ArchiveScene(database_dsn, key_prefix, redis_url, archived=False)
    scene.send(1, LOW, b"x")
    assert scene.archive().total == 0
    assert archive_status(runtime_of(scene.database, scene.prefix)) == []
    scene.close()


def test_archiving_that_begins_late_begins_with_the_first_record_kept(
    database_dsn: str, redis_url: str, key_prefix: str
) -> None:
    scene = ArchiveScene(database_dsn, key_prefix, redis_url, partitions=1, archived=False)
    scene.send(1, LOW, *[b"x"] * 10)
    scene.client(1).xtrim(scene.log(1), minid="7-0", approximate=False)
    assert set_archived(runtime_of(scene.database), TOPIC, archived=True)
    assert not set_archived(runtime_of(scene.database), TOPIC, archived=True)
    assert scene.archive().total == 4
    assert list(scene.marks().values()) == [(7, 10)]
    assert list_gaps(scene.database) == []
    scene.close()


def test_off_and_on_again_begins_a_stretch_anew_and_shows_what_is_missing(archive_scene: ArchiveScene) -> None:
    """A mark never says of seqs that they are there which were trimmed while nobody archived."""
    lp = lp_of(LOW.encode())
    partition = range_of(archive_scene.route, lp).partition
    archive_scene.send(1, LOW, *[b"x"] * 5)
    archive_scene.send(1, HIGH, b"y")
    archive_scene.archive()
    set_archived(runtime_of(archive_scene.database), TOPIC, archived=False)
    archive_scene.send(1, LOW, *[b"x"] * 5)
    archive_scene.client(partition).xtrim(archive_scene.log(partition), minid="9-0", approximate=False)
    set_archived(runtime_of(archive_scene.database), TOPIC, archived=True)
    archive_scene.send(1, HIGH, b"y")
    report = archive_scene.archive()
    assert (report.total, report.stopped) == (3, [])
    assert archive_scene.marks() == {(1, lp): (9, 10), (1, lp_of(HIGH.encode())): (1, 2)}
    (gap,) = list_gaps(archive_scene.database)
    assert (gap.after, gap.next_seq, gap.missing, gap.actor) == (5, 9, 3, None)
    assert gap.accepted_at is not None
    assert list_gaps(archive_scene.database, waiting=True) == []
    acts = [
        row[0]
        for row in archive_scene.rows("SELECT facts FROM mqlayer.audit WHERE act = 'topic set' ORDER BY audit_id")
    ]
    assert acts == [
        {"archived": False, "before": {"archived": True}},
        {"archived": True, "before": {"archived": False}},
    ]


def test_a_gap_stops_its_partition_until_somebody_accepts_it(archive_scene: ArchiveScene) -> None:
    """The others go on; nothing behind it is trimmed."""
    lp = lp_of(LOW.encode())
    low = range_of(archive_scene.route, lp).partition
    group = archive_scene.group()
    archive_scene.send(1, LOW, *[b"x"] * 300)
    archive_scene.archive()
    archive_scene.send(1, LOW, *[b"x"] * 300)
    archive_scene.send(1, HIGH, b"y")
    for offset in (401, 402):
        archive_scene.client(low).xdel(archive_scene.log(low), f"{offset}-0")
    report = archive_scene.archive()
    assert (report.total, report.stopped) == (101, [low])
    assert archive_scene.archive().stopped == [low]
    (gap,) = list_gaps(archive_scene.database, waiting=True)
    assert (gap.source, gap.lp, gap.after, gap.next_seq, gap.partition, gap.offset) == (1, lp, 400, 403, low, 403)
    archive_scene.settle(group, low, 600)
    trim_pass(runtime_of(archive_scene.database, archive_scene.prefix))
    assert archive_scene.first(low) <= 403
    with pytest.raises(InvalidInput, match="reason"):
        accept_gaps(runtime_of(archive_scene.database), TOPIC, reason=" ")
    assert accept_gaps(runtime_of(archive_scene.database), TOPIC, reason="deleted by hand") == 1
    assert archive_scene.archive().total == 198
    assert archive_scene.marks()[1, lp] == (403, 600)
    with pytest.raises(NotFound):
        accept_gaps(runtime_of(archive_scene.database), TOPIC, reason="again")
    facts = archive_scene.rows("SELECT facts FROM mqlayer.audit WHERE act = 'archive accept-gap'")[0][0]
    assert facts == {"gaps": 1, "missing": 2, "partition": None, "reason": "deleted by hand"}


def test_whoever_accepts_a_gap_is_told_of_those_behind_it(archive_scene: ArchiveScene) -> None:
    other = next(
        f"o-{n}"
        for n in range(999)
        if lp_of(f"o-{n}".encode()) < 512 and lp_of(f"o-{n}".encode()) != lp_of(LOW.encode())
    )
    low = range_of(archive_scene.route, lp_of(LOW.encode())).partition
    for key in (LOW, other):
        archive_scene.send(1, key, b"1")
    archive_scene.archive()
    for key in (LOW, other, LOW, other):
        archive_scene.send(1, key, b"2")
    archive_scene.client(low).xdel(archive_scene.log(low), "3-0", "4-0")
    assert archive_scene.archive().stopped == [low]
    assert accept_gaps(runtime_of(archive_scene.database), TOPIC, reason="lost", partition=low) == 2
    assert archive_scene.archive().total == 2
    assert set(archive_scene.marks().values()) == {(3, 3)}


def test_a_hole_at_the_end_of_a_chain_is_found_where_the_partition_was_sealed(archive_scene: ArchiveScene) -> None:
    """Nothing may ever follow it: without the marks of the seal nobody would hear of it. Case 80."""
    archive_scene.send(1, LOW, *[b"x"] * 5)
    archive_scene.send(2, LOW, *[b"x"] * 5)
    archive_scene.archive()
    lp = lp_of(LOW.encode())
    low = range_of(archive_scene.route, lp).partition
    archive_scene.send(1, LOW, b"6", b"7")
    archive_scene.send(2, LOW, b"6")
    archive_scene.client(low).xdel(archive_scene.log(low), "12-0", "13-0")
    split(
        runtime_of(archive_scene.database, archive_scene.prefix, application=archive_scene.database),
        TOPIC,
        low,
        at=[256],
    )
    for _ in range(2):
        report = archive_scene.archive()
        assert (report.completed, report.stopped) == ([], [low])
    found = [(gap.source, gap.lp, gap.after, gap.next_seq, gap.offset) for gap in list_gaps(archive_scene.database)]
    assert sorted(found) == [(1, lp, 6, 8, 14), (2, lp, 5, 7, 14)]
    assert accept_gaps(runtime_of(archive_scene.database), TOPIC, reason="deleted by hand") == 2
    assert archive_scene.archive().completed == [low]
    assert archive_scene.marks() == {(1, lp): (8, 7), (2, lp): (7, 6)}
    archive_scene.send(1, LOW, b"8")
    assert archive_scene.archive().total == 1
    assert archive_scene.marks()[1, lp] == (8, 8)
    assert list_gaps(archive_scene.database, waiting=True) == []


def test_a_topic_switched_off_and_on_explains_a_hole_at_the_end_of_a_chain(archive_scene: ArchiveScene) -> None:
    low = range_of(archive_scene.route, lp_of(LOW.encode())).partition
    archive_scene.send(1, LOW, b"1")
    archive_scene.archive()
    set_archived(runtime_of(archive_scene.database), TOPIC, archived=False)
    archive_scene.send(1, LOW, b"2")
    archive_scene.client(low).xdel(archive_scene.log(low), "2-0")
    set_archived(runtime_of(archive_scene.database), TOPIC, archived=True)
    split(
        runtime_of(archive_scene.database, archive_scene.prefix, application=archive_scene.database),
        TOPIC,
        low,
        at=[256],
    )
    assert archive_scene.archive().completed == [low]
    (gap,) = list_gaps(archive_scene.database)
    assert (gap.after, gap.next_seq, gap.actor, gap.accepted_at is None) == (1, 3, None, False)


def test_what_is_looked_at_behind_a_gap_is_bounded_in_bytes(
    archive_scene: ArchiveScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read again by each pass, as long as the gap waits."""
    monkeypatch.setattr("mqlayer.archive.archiver.page_size", lambda _: 10)
    monkeypatch.setattr(batch_writer, "BYTES", 100_000)
    low = range_of(archive_scene.route, lp_of(LOW.encode())).partition
    archive_scene.send(1, LOW, *[b"x"] * 20)
    archive_scene.archive()
    for _ in range(30):
        archive_scene.send(1, LOW, *[b"x" * 10_000] * 10)
    archive_scene.client(low).xdel(archive_scene.log(low), "21-0")
    archive_scene.archive()
    client = archive_scene.client(low)
    client.config_resetstat()
    archive_scene.archive()
    assert int(client.info("stats")["total_net_output_bytes"]) < 500_000


def test_a_node_that_is_away_or_not_armed_keeps_nothing_else_waiting(
    database_dsn: str, redis_url: str, start_redis: StartRedis, key_prefix: str
) -> None:
    node = start_redis()
    scene = ArchiveScene(database_dsn, key_prefix, redis_url, node.url)
    scene.send(1, LOW, b"x")
    scene.send(1, HIGH, b"y")
    node.kill()
    report = scene.archive()
    assert (report.total, list(report.skipped_nodes)) == (1, ["node-2"])
    node.start()
    assert "armed" in scene.archive().skipped_nodes["node-2"]
    rearm_node(runtime_of(scene.database, scene.prefix), "node-2")
    assert scene.archive().total == 1
    scene.assert_whole()
    scene.close()


@pytest.mark.full
def test_a_node_that_falls_back_gives_offsets_again_and_every_record_is_there_once(
    database_dsn: str, start_redis: StartRedis, key_prefix: str, tmp_path: Path
) -> None:
    """Offsets are positions, identity decides: the same comes again, and others at offsets that the archive knows."""
    node = start_redis()
    scene = ArchiveScene(database_dsn, key_prefix, node.url, partitions=1)
    scene.send(1, LOW, b"1", b"2")
    before = FallBack(node, tmp_path / "copy")
    scene.archive()
    scene.send(1, LOW, b"3", b"4")
    scene.send(2, LOW, *[b"direct"] * 5)
    assert scene.archive().total == 7
    before.happen()
    rearm_node(runtime_of(scene.database, scene.prefix), "node-1")
    # Source 2 ended with what it published; source 1 sends again, and more.
    scene.seqs[1, lp_of(LOW.encode())] = 2
    scene.send(1, LOW, b"3", b"4", b"5")
    scene.send(3, LOW, b"new")
    assert scene.archive().total == 2
    scene.assert_whole()
    scene.close()


@pytest.mark.full
def test_what_was_read_of_a_run_that_fell_back_since_is_not_taken_for_what_is_there(
    database_dsn: str, start_redis: StartRedis, key_prefix: str, tmp_path: Path
) -> None:
    """The node restarts with less, is armed and gives the offsets to others, while the stretch is on its way."""
    node = start_redis()
    scene = ArchiveScene(database_dsn, key_prefix, node.url, partitions=1)
    scene.send(1, LOW, b"1", b"2")
    before = FallBack(node, tmp_path / "copy")
    scene.send(1, LOW, b"3", b"4")
    gate = tmp_path / "go"
    failpoints.arm("archive.before_copy", f"mark:{tmp_path / 'reached'}")
    failpoints.arm("archive.before_copy", f"wait:{gate}")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(scene.archive)
        wait_until((tmp_path / "reached").exists, what="the archiver has the first piece")
        before.happen()
        rearm_node(runtime_of(scene.database, scene.prefix), "node-1")
        scene.send(7, LOW, b"other", b"another")
        gate.touch()
        report = running.result()
    assert (report.total, list(report.skipped_nodes)) == (0, ["node-1"])
    assert scene.archive().total == 4
    assert scene.archived() == [(1, lp_of(LOW.encode()), 1), (1, lp_of(LOW.encode()), 2)] + [
        (7, lp_of(LOW.encode()), seq) for seq in (1, 2)
    ]
    scene.close()


def test_a_split_and_a_merge_are_archived_parents_first(archive_scene: ArchiveScene) -> None:
    """Case 79: the order of a key's records is that of (batch, offset), over route versions."""
    for number in range(4):
        for key in (LOW, HIGH, "c"):
            archive_scene.send(1 + number % 2, key, b"x")
        if number == 0:
            split(runtime_of(archive_scene.database, archive_scene.prefix), TOPIC, 1, at=[100, 200])
        if number == 1:
            archive_scene.archive()
            merge(runtime_of(archive_scene.database, archive_scene.prefix), TOPIC, [3, 4])
        if number == 2:
            merge(runtime_of(archive_scene.database, archive_scene.prefix), TOPIC, [5, 6])
    report = archive_scene.archive()
    assert sorted(report.completed) == [3, 4, 5, 6]
    archive_scene.assert_whole()
    versions = archive_scene.rows("SELECT DISTINCT partition_id, version FROM mqlayer_archive.record ORDER BY 1")
    assert dict(versions)[1] == 1
    assert {version for _, version in versions} >= {1, 2, 4}


def test_a_successor_waits_for_its_parents_and_is_no_gap_meanwhile(
    database_dsn: str, redis_url: str, start_redis: StartRedis, key_prefix: str
) -> None:
    node = start_redis()
    scene = ArchiveScene(database_dsn, key_prefix, node.url, redis_url)
    scene.send(1, LOW, b"1")
    split(runtime_of(scene.database, scene.prefix), TOPIC, 1, at=[100], to=["node-2"])
    scene.send(1, LOW, b"2")
    node.kill()
    report = scene.archive()
    assert (report.total, report.stopped) == (0, [])
    node.start()
    rearm_node(runtime_of(scene.database, scene.prefix), "node-1")
    assert scene.archive().total == 2
    scene.assert_whole()
    scene.close()


@pytest.mark.full
def test_a_partition_made_anew_elsewhere_is_archived_from_its_beginning(
    database_dsn: str, redis_url: str, start_redis: StartRedis, key_prefix: str
) -> None:
    """A node is given up: a sealed partition begins again at offset 1 on another one, from the outbox."""
    node = start_redis()
    world = World(database_dsn, key_prefix, [redis_url, node.url])
    world.add_topic("orders", partitions=2)
    with Database(database_dsn) as database, world.relay():
        set_archived(runtime_of(database), "orders", archived=True)
        world.publish(40, tag="first")
        world.wait_until_whole()
        archive_pass(runtime_of(database, key_prefix))
        world.publish(40, tag="second")
        world.wait_until_whole()
        split(runtime_of(database, key_prefix, application=database), "orders", 2, at=[700], to=["node-1"])
        node.kill()
        give_up_node(runtime_of(database, key_prefix, application=database), "node-2")
        world.publish(40, tag="third")
        world.wait_until_whole()
        report = archive_pass(runtime_of(database, key_prefix))
        assert report.stopped == []
        assert 2 in report.completed
    kept = world.rows("SELECT lp, seq FROM mqlayer_archive.record ORDER BY lp, seq")
    assert kept == world.rows("SELECT lp, seq FROM mqlayer_app.outbox ORDER BY lp, seq")
    assert len(kept) == 120


def test_a_stream_is_trimmed_below_what_is_archived_and_settled(
    database_dsn: str, redis_url: str, key_prefix: str
) -> None:
    """Case 80."""
    scene = ArchiveScene(database_dsn, key_prefix, redis_url, partitions=1)
    group = scene.group()

    def first() -> int:
        trim_pass(runtime_of(scene.database, scene.prefix))
        return scene.first(1)

    scene.send(1, LOW, *[b"x" * 100] * 400)
    scene.settle(group, 1, 400)
    assert first() == 1, "nothing is archived"
    (status,) = archive_status(runtime_of(scene.database, scene.prefix))
    assert (status.lag, status.retained) == (400, 400)
    assert status.lag_s > 1e6
    assert 400 * 100 < status.retained_bytes <= (status.stream_bytes or 0)
    scene.archive()
    scene.send(1, LOW, *[b"x" * 100] * 400)
    scene.settle(group, 1, 800)
    assert 1 < first() <= 401, "the second half is settled only"
    set_archived(runtime_of(scene.database), TOPIC, archived=False)
    assert first() > 401
    scene.close()


def test_a_sealed_partition_is_retired_once_the_archive_has_it(archive_scene: ArchiveScene) -> None:
    group = archive_scene.group()
    archive_scene.send(1, LOW, b"1")
    split(runtime_of(archive_scene.database, archive_scene.prefix), TOPIC, 1, at=[100])
    archive_scene.connection.execute("INSERT INTO mqlayer.drained (group_id, partition_id) VALUES (%s, 1)", (group,))
    assert retire_partitions(runtime_of(archive_scene.database, archive_scene.prefix)) == []
    assert archive_scene.archive().completed == [1]
    assert retire_partitions(runtime_of(archive_scene.database, archive_scene.prefix)) == [1]


@pytest.mark.parametrize("emptied", some_of([False, True], 9), ids=["fell-back", "emptied"])
def test_a_pass_that_asked_before_a_node_fell_back_trims_nothing_of_what_comes_then(
    database_dsn: str, start_redis: StartRedis, key_prefix: str, tmp_path: Path, emptied: bool
) -> None:
    """Offsets that were archived are given out again, to what is not: by the old bound it would be dropped.

    A node that is emptied keeps its run.
    """
    node = start_redis()
    scene = ArchiveScene(database_dsn, key_prefix, node.url, partitions=1)
    group = scene.group()
    before = FallBack(node, tmp_path / "copy")
    for _ in range(2):
        scene.send(1, LOW, *[b"old"] * 500)
    scene.archive()
    failpoints.arm("trim.after_work", f"mark:{tmp_path / 'reached'}")
    failpoints.arm("trim.after_work", f"wait:{tmp_path / 'go'}")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(trim_pass, runtime_of(scene.database, scene.prefix))
        wait_until((tmp_path / "reached").exists, what="the pass knows its bounds")
        if emptied:
            scene.client(1).flushall()
        else:
            before.happen()
        rearm_node(runtime_of(scene.database, scene.prefix), "node-1")
        for _ in range(2):
            scene.send(7, LOW, *[b"new"] * 500)
        scene.settle(group, 1, 1_000)
        (tmp_path / "go").touch()
        report = running.result()
    assert (report.dropped, list(report.skipped_nodes)) == ({}, ["node-1"])
    assert scene.archive().total == 1_000
    scene.close()


def test_what_was_read_before_a_node_was_emptied_moves_nobody_on(
    database_dsn: str, start_redis: StartRedis, key_prefix: str, tmp_path: Path
) -> None:
    """A first batch: nothing is noted yet that the arming could lower, and the run is the same."""
    scene = ArchiveScene(database_dsn, key_prefix, start_redis().url, partitions=1)
    scene.send(1, LOW, *[b"old"] * 50)
    failpoints.arm("archive.before_copy", f"mark:{tmp_path / 'reached'}")
    failpoints.arm("archive.before_copy", f"wait:{tmp_path / 'go'}")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(archive_pass, runtime_of(scene.database, scene.prefix))
        wait_until((tmp_path / "reached").exists, what="the pass has read")
        scene.client(1).flushall()
        rearm_node(runtime_of(scene.database, scene.prefix), "node-1")
        scene.send(7, LOW, *[b"new"] * 20)
        (tmp_path / "go").touch()
        running.result()
    scene.archive()
    assert scene.rows("SELECT count(*) FROM mqlayer_archive.record WHERE source = 7") == [(20,)]
    assert scene.rows("SELECT upto_offset FROM mqlayer_archive.progress") == [(21,)]
    scene.close()


def test_trimming_that_is_on_its_way_and_archiving_switched_on_exclude_each_other(
    database_dsn: str, redis_url: str, key_prefix: str, tmp_path: Path
) -> None:
    """Else a pass that asked before would drop by what groups settled alone."""
    scene = ArchiveScene(database_dsn, key_prefix, redis_url, partitions=1, archived=False)
    scene.settle(scene.group(), 1, 0)
    failpoints.arm("trim.after_round", f"wait:{tmp_path / 'go'}")
    with ThreadPoolExecutor(2) as pool:
        trimming = pool.submit(trim_pass, runtime_of(scene.database, scene.prefix))
        wait_until(lambda: scene.locks("locktype = 'advisory' AND granted AND mode = 'ShareLock'"), what="it trims")
        switching = pool.submit(set_archived, runtime_of(scene.database), TOPIC, archived=True)
        wait_until(lambda: scene.locks("locktype = 'advisory' AND NOT granted"), what="the switch waits")
        assert not switching.done()
        (tmp_path / "go").touch()
        trimming.result()
        assert switching.result()
    scene.close()


@pytest.mark.full
def test_two_archivers_at_once_archive_everything_once(
    archive_scene: ArchiveScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_writer, "RECORDS", 20)
    monkeypatch.setattr("mqlayer.archive.archiver.page_size", lambda _: 10)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            for number in range(20):
                archive_scene.send(1 + number % 2, f"key-{number % 7}", *[b"x"] * 10)
            done = [pool.submit(archive_scene.archive) for _ in range(2)]
            assert [one.result().stopped for one in done] == [[], []]
    archive_scene.archive()
    archive_scene.assert_whole()


def days(scene: ArchiveScene, age: int = 30) -> list[RetentionResult]:
    return [day.result for day in retain(runtime_of(scene.database), older_than=timedelta(days=age))]


def test_retention_drops_whole_days_and_marks_begin_behind_them(archive_scene: ArchiveScene) -> None:
    archive_scene.send(1, LOW, b"1", b"2")
    archive_scene.send(1, HIGH, b"1")
    archive_scene.archive()
    archive_scene.age(40)
    archive_scene.send(1, LOW, b"3")
    archive_scene.archive()
    with pytest.raises(InvalidInput, match="a day"):
        retain(runtime_of(archive_scene.database), older_than=timedelta(hours=1))
    assert days(archive_scene, 50) == []
    assert days(archive_scene) == ["dropped"]
    assert days(archive_scene) == []
    low, high = lp_of(LOW.encode()), lp_of(HIGH.encode())
    assert archive_scene.marks() == {(1, low): (3, 3), (1, high): (2, 1)}
    assert archive_scene.archived() == [(1, low, 3)]
    archive_scene.send(1, HIGH, b"2")
    assert archive_scene.archive().total == 1, "the chain goes on"
    assert archive_scene.marks()[1, high] == (2, 2)


def snapshot(connection: Any) -> None:
    """Make a snapshot as it is made: under a lock on the topic's archive."""
    ((topic_id, batch),) = connection.execute("SELECT topic_id, batch FROM mqlayer_archive.topic FOR SHARE").fetchall()
    connection.execute("INSERT INTO mqlayer_archive.snapshot (name) VALUES ('s')")
    connection.execute(
        "INSERT INTO mqlayer_archive.snapshot_topic SELECT snapshot_id, %s, %s, 1, 0 FROM mqlayer_archive.snapshot",
        (topic_id, batch),
    )


def test_retention_spares_a_day_that_a_snapshot_covers(archive_scene: ArchiveScene) -> None:
    archive_scene.send(1, LOW, b"1")
    archive_scene.archive()
    archive_scene.age(40)
    snapshot(archive_scene.connection)
    assert days(archive_scene) == ["spared"]
    archive_scene.connection.execute("DELETE FROM mqlayer_archive.snapshot")
    assert days(archive_scene) == ["dropped"]


def test_a_snapshot_that_is_being_made_is_waited_for(archive_scene: ArchiveScene) -> None:
    archive_scene.send(1, LOW, b"1")
    archive_scene.archive()
    archive_scene.age(40)
    with kept_session(archive_scene.dsn) as making, ThreadPoolExecutor(1) as pool:
        snapshot(making)
        running = pool.submit(days, archive_scene)
        wait_until(
            lambda: archive_scene.rows("SELECT 1 FROM pg_locks WHERE NOT granted"), what="retention waits for it"
        )
        making.commit()
        assert running.result() == ["spared"]


def test_a_day_that_somebody_reads_is_left_for_the_next_call(
    archive_scene: ArchiveScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive_scene.send(1, LOW, b"1")
    archive_scene.archive()
    archive_scene.age(40)
    with kept_session(archive_scene.dsn) as reading, monkeypatch.context() as patch:
        patch.setitem(TIMEOUTS, "lock_wait", "100ms")
        reading.execute("SELECT 1 FROM mqlayer_archive.record").fetchall()
        assert days(archive_scene) == ["busy"]
    assert days(archive_scene) == ["dropped"]


def test_days_that_hold_nothing_go_too(archive_scene: ArchiveScene) -> None:
    archive_scene.archive()
    archive_scene.connection.execute("SELECT mqlayer_archive.day_make_v1((now() AT TIME ZONE 'UTC')::date - 40)")
    assert days(archive_scene) == ["dropped"]
    assert days(archive_scene) == []
    made = archive_scene.rows("SELECT count(*) FROM pg_inherits WHERE inhparent = 'mqlayer_archive.record'::regclass")
    assert made == [(2,)]


def test_a_stream_of_the_archive_is_told_of_a_day_that_went_before_an_older_one(archive_scene: ArchiveScene) -> None:
    """A snapshot keeps the first day; the second one is gone, and whoever had yet to read it must hear of that."""
    archive_scene.send(1, LOW, b"1")
    archive_scene.archive()
    archive_scene.age(40)
    snapshot(archive_scene.connection)
    archive_scene.send(1, LOW, b"2")
    archive_scene.archive()
    archive_scene.connection.execute("SELECT mqlayer_archive.day_make_v1((now() AT TIME ZONE 'UTC')::date - 45)")
    archive_scene.age(5)
    archive_scene.send(1, LOW, b"3")
    archive_scene.archive()
    words = [
        one.result for one in retain(runtime_of(archive_scene.database), older_than=timedelta(days=1)) if one.records
    ]
    assert words == ["spared", "dropped"]
    with archive_scene.database.connection() as connection:
        facts = {"topic_id": 1, "after": 1}
        with pytest.raises(psycopg.Error, match="dropped from the archive"):
            connection.execute(query("stream_there"), facts)
        (row,) = connection.execute(query("stream_topics"), {"topics": None}).fetchall()
        assert row[2:] == (3, 3)
        assert connection.execute(query("stream_there"), facts | {"after": row[3] - 1}).fetchone() == (3,)


def test_topics_say_how_long_they_are_kept_and_the_longest_counts(archive_scene: ArchiveScene) -> None:
    for name in ("other", "third"):
        create_topic(runtime_of(archive_scene.database, archive_scene.prefix), name, partitions=1, archived=True)
    archive_scene.send(1, LOW, b"1")
    archive_scene.archive()
    archive_scene.connection.execute(
        "INSERT INTO mqlayer_archive.day SELECT day, t.topic_id, 1, 1, 0, 1 FROM mqlayer_archive.day, mqlayer.topic t "
        "WHERE t.name = 'other'"
    )
    archive_scene.age(40)

    def words() -> list[RetentionResult]:
        return [one.result for one in retain_by_topics(runtime_of(archive_scene.database, actor="worker"))]

    assert words() == [], "nobody said so"
    assert set_retention(runtime_of(archive_scene.database, actor="me"), TOPIC, days=7)
    assert not set_retention(runtime_of(archive_scene.database), TOPIC, days=7)
    assert words() == [], "of the other one nobody said so"
    set_retention(runtime_of(archive_scene.database), "other", days=50)
    assert words() == []
    set_retention(runtime_of(archive_scene.database), "other", days=39)
    assert words() == ["dropped"]
    with pytest.raises(InvalidInput, match="0 days"):
        set_retention(runtime_of(archive_scene.database), TOPIC, days=0)
    with pytest.raises(NotFound):
        set_retention(runtime_of(archive_scene.database), "none", days=1)
    ((facts,),) = archive_scene.rows("SELECT facts FROM mqlayer.audit WHERE actor = 'me'")
    assert facts == {"retention_days": 7, "before": {"retention_days": None}}
    ((actor, records),) = archive_scene.rows("SELECT actor, facts FROM mqlayer.audit WHERE act = 'archive retain'")
    assert (actor, records) == ("worker", {"records": 1})


def test_days_are_made_ahead_once_by_many(archive_scene: ArchiveScene) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: archive_scene.archive(), range(4)))
    made = archive_scene.rows("SELECT count(*) FROM pg_inherits WHERE inhparent = 'mqlayer_archive.record'::regclass")
    assert made == [(2,)]


def test_a_record_that_no_script_wrote_stops_its_partition_only(archive_scene: ArchiveScene) -> None:
    low = range_of(archive_scene.route, lp_of(LOW.encode())).partition
    archive_scene.client(low).xadd(archive_scene.log(low), {"m": "what?", "k": "k", "b": "secret"}, id="1-0")
    archive_scene.send(1, HIGH, b"y")
    report = archive_scene.archive()
    assert report.total == 1
    ((partition, reason),) = report.failed.items()
    assert partition == low
    assert "by hand" in reason
    assert "secret" not in reason


@pytest.mark.parametrize(
    "fields",
    [
        {"m": "-1:0:1:0", "k": "k", "b": "secret"},
        {"m": "1:0:1:0"},
        {"m": "1:0:1:later", "k": "k", "b": "secret"},
        {"m": '1:0:1:0:{"mq-tags":1}', "k": "k", "b": "secret"},
        {"m": '1:0:1:0:{"mq-tags":"secret', "k": "k", "b": "secret"},
    ],
)
def test_a_record_that_no_row_can_hold_stops_its_partition_only_and_the_doctor_sees_it(
    archive_scene: ArchiveScene, fields: dict[str, str]
) -> None:
    low = range_of(archive_scene.route, 0).partition
    archive_scene.archive()
    ((before,),) = archive_scene.rows("SELECT last_pass_at FROM mqlayer_archive.topic")
    archive_scene.client(low).xadd(archive_scene.log(low), fields, id="1-0")  # type: ignore[arg-type]
    archive_scene.send(1, HIGH, b"y")
    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(archive_scene.archive).result(20)
    assert report.total == 1
    assert list(report.failed) == [low]
    assert "offset 1 " in report.failed[low]
    assert "secret" not in report.failed[low]
    assert archive_scene.rows("SELECT last_pass_at FROM mqlayer_archive.topic") == [(before,)], (
        "it is behind, and says so"
    )


def test_the_doctor_names_an_archive_that_waits_or_is_late(
    archive_scene: ArchiveScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> list[tuple[CheckStatus, str]]:
        settings = Settings(dsn=SecretStr(archive_scene.dsn), key_prefix=archive_scene.prefix)
        return [(one.verdict, one.seen) for one in diagnose(settings) if one.check == "archive"]

    assert "never" in found()[0][1]
    archive_scene.send(1, LOW, b"1", b"2", b"3")
    archive_scene.archive()
    assert found()[0][0] is CheckStatus.OK
    archive_scene.send(1, LOW, b"4", b"5")
    low = range_of(archive_scene.route, lp_of(LOW.encode())).partition
    archive_scene.client(low).xdel(archive_scene.log(low), "4-0")
    archive_scene.archive()
    assert found() == [(CheckStatus.BROKEN, f"the archive of topic {TOPIC} waits at 1 gaps, and holds trimming up")]


def test_the_commands(archive_scene: ArchiveScene, commands: Commands) -> None:
    archive_scene.send(1, LOW, b"1")
    assert commands.text("archive", "run", "--once") == "1 record archived, 0 partitions completed\n"
    (connection,) = commands.lines("archive", "status")
    assert (connection["topic"], connection["batch"], connection["records"], connection["lag"], connection["gaps"]) == (
        TOPIC,
        1,
        1,
        0,
        0,
    )
    assert "no gap" in commands.text("archive", "gaps")
    assert "no day" in commands.text("archive", "retain", "--older-than", "30d")
    assert "no length of time" in commands.failure("archive", "retain", "--older-than", "soon")
    assert "kept for 84 days" in commands.text("topic", "set", TOPIC, "--retention", "12w")
    assert "for ever" in commands.text("topic", "set", TOPIC, "--retention", "forever")
    assert "no age" in commands.failure("topic", "set", TOPIC, "--retention", "3h")
    assert "what to set" in commands.failure("topic", "set", TOPIC)
    assert "not archived" in commands.text("topic", "set", TOPIC, "--not-archived")
    assert "as before" in commands.text("topic", "set", TOPIC, "--not-archived")
    assert commands.lines("topic", "list")[0]["archived"] is False
    commands.text("topic", "create", "kept", "--partitions", "1", "--archived")
    assert {connection["topic"]: connection["archived"] for connection in commands.lines("archive", "status")} == {
        TOPIC: False, "kept": True,
    }  # fmt: skip
    assert "exists with archived=True" in commands.failure("topic", "create", "kept", "--partitions", "1")


@pytest.fixture
def commands(archive_scene: ArchiveScene, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Commands:
    """The command, at the scene's servers."""
    monkeypatch.setenv("MQLAYER_DSN", archive_scene.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", archive_scene.prefix)
    return Commands()


def test_writers_a_split_archivers_and_trimming_at_once(archive_scene: ArchiveScene) -> None:
    """Nothing is trimmed that is not archived, and the archive has everything once."""
    group = archive_scene.group()
    ending = threading.Event()
    done = [0]

    def archive() -> None:
        while not ending.is_set():
            done[0] += archive_scene.archive().total

    def trim() -> None:
        while not ending.is_set():
            trim_pass(runtime_of(archive_scene.database, archive_scene.prefix))
            retire_partitions(runtime_of(archive_scene.database, archive_scene.prefix))

    with ThreadPoolExecutor(3) as pool, ExitStack() as pool_ends:
        running = [pool.submit(archive), pool.submit(archive), pool.submit(trim)]
        pool_ends.callback(ending.set)
        for turn in range(12):
            for key in (LOW, HIGH, "c", "d"):
                archive_scene.send(1 + turn % 2, key, *[b"x" * 50] * 60)
            for (partition,) in archive_scene.rows("SELECT partition_id FROM mqlayer.partition WHERE state = 'open'"):
                archive_scene.settle(group, partition, int(archive_scene.meta(partition, "next")) - 1)
            if turn in (3, 6, 9):
                ranges = load_route(archive_scene.database, TOPIC).ranges
                widest = max(ranges, key=lambda one: one.lp_to - one.lp_from)
                at = (widest.lp_from + widest.lp_to) // 2
                split(runtime_of(archive_scene.database, archive_scene.prefix), TOPIC, widest.partition, at=[at])
                archive_scene.connection.execute(
                    "INSERT INTO mqlayer.drained SELECT %s, partition_id FROM mqlayer.partition WHERE state = 'sealed' "
                    "ON CONFLICT DO NOTHING", (group,),
                )  # fmt: skip
        ending.set()
        for one in running:
            one.result()
    archive_scene.archive()
    archive_scene.assert_whole()
    wait_until(
        lambda: retire_partitions(runtime_of(archive_scene.database, archive_scene.prefix)) or True, what="it retires"
    )
    assert archive_scene.rows("SELECT count(*) FROM mqlayer.partition WHERE state = 'deleted'")[0][0] >= 3
