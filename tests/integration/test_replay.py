"""What the archive holds is given to a group again: in order, once each, at a rate, over kills. Cases 68, 79, 80."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mqlayer import Context
from mqlayer.domain.routing import lp_of
from mqlayer.errors import Conflict, InvalidInput, NotFound
from mqlayer.groups.seek import apply_seek, planned_seek
from mqlayer.postgres.queries import query
from mqlayer.redelivery import (
    DeadFilter,
    ReplayFilter,
    cancel_replay,
    count_archived,
    new_worker,
    replay_of,
    replay_results,
    replays,
    resume_replay,
    retry_scan,
    start_redrive,
    work_on,
    work_on_replay,
)
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.replay_scenes import ALL, ReplayScene, numbers
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of


@pytest.fixture
def scene(stage: Stage) -> ReplayScene:
    """A topic of two partitions, two keys of ten messages each, settled and archived."""
    scene = ReplayScene(stage)
    stage.send_numbers(2, 10)
    scene.settle()
    return scene


@pytest.mark.parametrize("batch", some_of([1, 3, 100], 3))
def test_all_is_parked_in_order_with_all_that_makes_its_messages(stage: Stage, batch: int) -> None:
    """Whatever the batch: identity, time, headers, tags, key and body are those of the records."""
    scene = ReplayScene(stage)
    stage.send_numbers(3, 10)
    stage.send([(None, b"alone")])
    scene.settle()
    done = scene.replay(batch=batch)
    assert (done.state, done.results, done.waiting) == ("done", {"sent": 31}, 31)
    for key in ("key-0", "key-1", "key-2"):
        assert scene.failing.parked(key) == numbers(1, 10)
        assert scene.failing.key_row(key) == ("replayed", True, 0)
    rows = scene.failing.sql("SELECT m, key, body, log_offset FROM mqlayer.parked_message")
    assert sorted((bytes(m), bytes(key), bytes(body), offset) for m, key, body, offset in rows) == sorted(
        (record.m, record.key, record.body, record.offset) for _, record in scene.failing.records()
    )


def test_a_filter_narrows_by_key_tag_time_and_snapshot(scene: ReplayScene) -> None:
    """And the plan counts what it takes."""
    scene.archive.snapshot("early")
    scene.stage.send_numbers(2, 2, first=11)
    scene.settle()
    scene.archive.sql("UPDATE mqlayer_archive.record SET tags = '{eu}' WHERE body = '3'")
    scene.archive.sql("UPDATE mqlayer_archive.record SET published_at = '2026-01-01' WHERE body = '7'")
    early, late = datetime(2025, 12, 31, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    for wanted, found in (
        (ReplayFilter(key="key-1"), 12),
        (ReplayFilter(tag="eu"), 2),
        (ReplayFilter(since=early, until=late), 2),
        (ReplayFilter(key="key-0", tag="eu", since=late), 1),
        (ReplayFilter(snapshot="early"), 20),
        (ReplayFilter(key="nobody"), 0),
        (ALL, 24),
    ):
        assert count_archived(scene.stage.database, "orders", "g", wanted) == found, wanted
        done = scene.replay(wanted)
        assert (done.state, done.sent) == ("done", found), wanted
        scene.failing.sql("DELETE FROM mqlayer.parked_message")
        scene.failing.sql("DELETE FROM mqlayer.parked_key")


def test_what_waits_is_dead_or_is_ahead_is_not_given(scene: ReplayScene) -> None:
    """Nothing that the group comes to by itself is handed out; each of them is told."""
    a = [one for one in scene.failing.records() if one[1].key == b"key-0"]
    scene.failing.park(*a[3:5])
    scene.failing.dead_letter(a[7])
    scene.stage.send_numbers(2, 3, first=11)
    scene.archive.take()
    done = scene.replay()
    assert done.results == {"sent": 17, "already": 2, "dead": 1, "ahead": 6}
    assert scene.failing.parked("key-0") == [b"%d" % n for n in (1, 2, 3, 4, 5, 6, 7, 9, 10)]
    assert sorted(scene.words(done.replay_id)) == ["ahead"] * 6 + ["already"] * 2 + ["dead"]
    page = replay_results(scene.stage.database, done.replay_id, limit=4)
    rest = replay_results(scene.stage.database, done.replay_id, after=page[-1].identity)
    assert len(page) + len(rest) == 9


def test_messages_of_several_sources_come_in_the_order_of_the_log_before_what_is_parked(stage: Stage) -> None:
    """Also where a later one of another source waits: its place is behind them."""
    scene = ReplayScene(stage)
    lp = int(lp_of(b"key-0"))
    given: Counter[int] = Counter()
    for number, source in enumerate((1, 2, 1, 3, 2), start=1):
        stage._seqs[lp] = given[source]
        stage.send([("key-0", b"%d" % number)], source=source)
        given[source] += 1
    scene.settle()
    last = max(scene.failing.records(), key=lambda one: one[1].offset)
    scene.failing.park(last, cause="retry", due_in_s=60.0)
    done = scene.replay(batch=2)
    assert done.results == {"sent": 4, "already": 1}
    assert scene.failing.parked("key-0") == numbers(1, 5)


def test_a_rate_is_kept_and_at_most_so_many_wait(scene: ReplayScene) -> None:
    """Without members it goes no further than what may wait; it is told."""
    replay_id, worker = scene.begin()
    stop = threading.Event()
    thread = threading.Thread(
        target=work_on_replay,
        args=(scene.stage.database, replay_id),
        kwargs={"worker": worker, "batch": 4, "waiting": 8, "stop": stop},
    )
    thread.start()
    wait_until(lambda: replay_of(scene.stage.database, replay_id).waiting == 8, what="as many as may wait")
    scene.failing.sql("DELETE FROM mqlayer.parked_message WHERE (lp, source, seq) IN "
                      "(SELECT lp, source, seq FROM mqlayer.parked_message ORDER BY position LIMIT 1)")  # fmt: skip
    wait_until(lambda: replay_of(scene.stage.database, replay_id).sent == 12, what="the next ones")
    assert replay_of(scene.stage.database, replay_id).state == "running"
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert cancel_replay(runtime_of(scene.stage.database, actor="a test"), replay_id).state == "cancelled"
    # Of ten a second, the second batch waits for a second.
    started = datetime.now(UTC)
    assert scene.replay(ReplayFilter(key="key-1"), per_s=9.0).state == "done"
    assert datetime.now(UTC) - started > timedelta(seconds=0.9)


def test_every_act_has_its_audit_row_and_replays_are_listed(scene: ReplayScene) -> None:
    """Invariant 19."""
    replay_id, worker = scene.begin(ReplayFilter(key="key-0"), per_s=1.5)
    resume_replay(runtime_of(scene.stage.database, actor="another"), replay_id, worker=new_worker())
    assert work_on_replay(scene.stage.database, replay_id, worker=worker).sent == 0, "another one has it"
    cancel_replay(runtime_of(scene.stage.database, actor="a third"), replay_id)
    acts = scene.failing.sql("SELECT act, actor, object FROM mqlayer.audit WHERE act LIKE 'replay%%' ORDER BY audit_id")
    assert acts == [
        ("replay start", "a test", "orders/g"),
        ("replay resume", "another", str(replay_id)),
        ("replay cancel", "a third", str(replay_id)),
    ]
    (one,) = replays(scene.stage.database, topic="orders", group="g")
    assert (one.kind, one.state, one.per_s, one.newer, one.filter) == (
        "replay", "cancelled", 1.5, "wait", ReplayFilter(key="key-0")
    )  # fmt: skip
    for act in (resume_replay, cancel_replay):
        here = runtime_of(scene.stage.database, actor="x")
        with pytest.raises(Conflict, match="cancelled"):
            act(here, replay_id, **({"worker": "w"} if act is resume_replay else {}))


def test_what_no_replay_can_be_is_refused(scene: ReplayScene) -> None:
    """With what to do instead."""
    for bad in (ReplayFilter(tag="No Tag"), ReplayFilter(since=datetime(2026, 1, 1))):  # noqa: DTZ001
        with pytest.raises(InvalidInput):
            scene.begin(bad)
    with pytest.raises(InvalidInput, match="rate"):
        scene.begin(per_s=-1.0)
    with pytest.raises(InvalidInput, match="neither"):
        scene.begin(newer="never")
    with pytest.raises(NotFound, match="snapshot"):
        scene.begin(ReplayFilter(snapshot="none"))
    replay_id, _ = scene.begin()
    with pytest.raises(Conflict, match=f"replay {replay_id}"):
        scene.begin()
    with closing(RouteCache(scene.stage.database)) as routes:
        plan = planned_seek(scene.stage.runtime, routes, topic="orders", name="g", to="earliest")
        with pytest.raises(Conflict, match="replay cancel"):
            apply_seek(runtime_of(scene.stage.database, scene.stage.prefix, actor="a test"), plan)
    cancel_replay(runtime_of(scene.stage.database, actor="a test"), replay_id)
    scene.failing.sql("DELETE FROM mqlayer_archive.topic")
    with pytest.raises(Conflict, match="never archived"):
        scene.begin()
    scene.failing.sql("UPDATE mqlayer.consumer_group SET mode = 'pop', scope = 'key'")
    with pytest.raises(Conflict, match="ordered pop"):
        scene.begin()
    scene.failing.sql("UPDATE mqlayer.consumer_group SET state = 'retired'")
    with pytest.raises(Conflict, match="retired"):
        scene.begin()


def test_a_replay_of_a_snapshot_that_is_dropped_ends(scene: ReplayScene) -> None:
    """It does not go on with what the snapshot left out."""
    scene.archive.snapshot("early")
    replay_id, worker = scene.begin(ReplayFilter(snapshot="early"))
    scene.archive.sql("DELETE FROM mqlayer_archive.snapshot")
    done = work_on_replay(scene.stage.database, replay_id, worker=worker)
    assert (done.state, done.sent) == ("cancelled", 0)


@pytest.mark.parametrize("found", [{}, {"key": b"key-7", "lp": 7, "partitions": [3, 5]}])
def test_reads_go_along_the_batches_however_much_the_archive_holds(database_dsn: str, found: dict[str, Any]) -> None:
    """Their plans, on real rows: by the index, never through all of it."""
    nothing = dict.fromkeys(("key", "lp", "tag", "since", "until", "snapshot_id", "partitions"))
    facts = nothing | {"topic_id": 1, "batch": 50, "upto": 100, "rows": 500, "first": 50, "last": 52, "at_batch": 50,
                       "at_record": 10_100, "limit": 200, "bytes": 1_000_000} | found  # fmt: skip
    with kept_session(database_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE mqlayer_archive.record_all PARTITION OF mqlayer_archive.record DEFAULT")
        connection.execute(
            "INSERT INTO mqlayer_archive.record (topic_id, batch, version, partition_id, log_offset, source, lp, seq, "
            "published_at, archived_at, key, body) SELECT 1, n / 200, 1, n / 200 % 8, n, 1, n % 1024, n / 1024 + 1, "
            "now(), now(), convert_to('key-' || n % 100, 'UTF8'), repeat('x', 100)::bytea "
            "FROM generate_series(1, 20000) AS n"
        )
        connection.execute("ANALYZE mqlayer_archive.record")
        for name in ("replay_window", "replay_read"):
            plan = "\n".join(row[0] for row in connection.execute(b"EXPLAIN " + query(name).encode(), facts))
            assert "Seq Scan on record" not in plan, plan
            assert "record_all_topic_id_batch_partition_id_idx" in plan, plan


# -- members ---------------------------------------------------------------------------------------------------------


def fenced(stage: Stage, applied: list[tuple[str | None, bytes]]) -> Recorder:
    def act(body: bytes, ctx: Context) -> None:
        with kept_session(stage.dsn) as connection:
            ctx.fence(connection)
        applied.append((ctx.key, body))

    return Recorder(act)


def test_fenced_effects_are_applied_again_once_for_each_replay(scene: ReplayScene) -> None:
    """In order; and newer messages of the group have theirs as ever."""
    applied: list[tuple[str | None, bytes]] = []
    scene.stage.consume(fenced(scene.stage, applied), backoff_s=None)
    for _ in range(2):
        applied.clear()
        assert scene.replay().sent == 20
        wait_until(lambda: len(applied) >= 20 and not scene.failing.parked(), what="all to be handled")
        for key in ("key-0", "key-1"):
            assert [body for name, body in applied if name == key] == numbers(1, 10)
    scene.stage.send_numbers(1, 1, first=11)
    wait_until(lambda: applied[-1] == ("key-0", b"11"), what="what is newer")
    assert len(applied) == 21


@pytest.mark.parametrize("wanted", some_of([ReplayFilter(key="key-0"), ALL], 2))
def test_newer_messages_wait_until_all_is_given(scene: ReplayScene, wanted: ReplayFilter) -> None:
    """Of the key that is replayed alone, or of all; nothing comes between."""
    recorder = Recorder()
    scene.stage.consume(recorder, backoff_s=None)
    # It stands behind the first one until the rate is another.
    replay_id, worker = scene.begin(wanted, per_s=0.01)
    thread = threading.Thread(
        target=work_on_replay, args=(scene.stage.database, replay_id), kwargs={"worker": worker, "batch": 3}
    )
    thread.start()
    wait_until(lambda: recorder.bodies() == [b"1"], what="the first one")
    scene.stage.send_numbers(2, 3, first=11)
    if wanted.key is not None:
        wait_until(lambda: recorder.bodies("key-1") == numbers(11, 13), what="other keys to go on")
    scene.stage.send_numbers(2, 2, first=14)
    assert replay_of(scene.stage.database, replay_id).state == "running"
    scene.failing.sql("UPDATE mqlayer.redrive SET per_s = 10, next_at = now()")
    thread.join(20)
    wait_until(lambda: len(recorder.bodies("key-0")) == 15, what="all of it")
    assert recorder.bodies("key-0") == numbers(1, 15)
    if wanted.key is None:
        wait_until(lambda: len(recorder.bodies("key-1")) == 15, what="all of it")
        assert recorder.bodies("key-1") == numbers(1, 15)
    scene.stage.wait_settled()
    wait_until(lambda: scene.failing.key_row("key-0") is None, what="the key to be in line")


@pytest.mark.parametrize("wanted", some_of([ReplayFilter(key="key-0"), ALL], 2))
def test_what_was_parked_before_waits_in_its_place(scene: ReplayScene, wanted: ReplayFilter) -> None:
    """Though it is due: what is replayed later comes before it, what is replayed already behind an earlier one."""
    a = [one for one in scene.failing.records() if one[1].key == b"key-0"]
    scene.failing.park(a[1], cause="retry", due_in_s=0.0)
    scene.failing.park(a[8], cause="retry", due_in_s=0.0)
    replay_id, worker = scene.begin(wanted, per_s=10.0)
    thread = threading.Thread(
        target=work_on_replay, args=(scene.stage.database, replay_id), kwargs={"worker": worker, "batch": 3}
    )
    thread.start()
    wait_until(lambda: replay_of(scene.stage.database, replay_id).sent >= 2, what="the first ones")
    recorder = Recorder()
    scene.stage.consume(recorder, backoff_s=None)
    thread.join(20)
    wait_until(lambda: len(recorder.bodies("key-0")) == 10, what="all of it")
    assert recorder.bodies("key-0") == numbers(1, 10)


def test_what_was_redriven_and_waits_keeps_its_place_among_what_is_replayed(scene: ReplayScene) -> None:
    """Cases 64, 68: it has the place of the next one of its source, and what comes between the two has to, too."""
    a = [one for one in scene.failing.records() if one[1].key == b"key-0"]
    scene.failing.park(a[8])
    scene.failing.dead_letter(a[4])
    worker = new_worker()
    redrive = start_redrive(
        runtime_of(scene.stage.database, actor="a test"), "orders", "g", DeadFilter(), worker=worker
    )
    work_on(scene.stage.database, redrive, worker=worker)
    scene.replay()
    line = "SELECT seq FROM mqlayer.parked_message WHERE key = 'key-0' ORDER BY position, seq"
    with scene.stage.database.connection() as connection:
        assert connection.execute(line).fetchall() == [(record.identity.seq,) for _, record in a]


def test_what_is_newer_never_keeps_a_replayed_key_from_its_end(scene: ReplayScene) -> None:
    """It waits for that end, and may be as much as the group may have parked."""
    recorder = Recorder()
    scene.stage.consume(recorder, backoff_s=None)
    # It stands behind the first one until the rate is another.
    replay_id, worker = scene.begin(ReplayFilter(key="key-0"), per_s=0.01)
    thread = threading.Thread(
        target=work_on_replay, args=(scene.stage.database, replay_id), kwargs={"worker": worker, "batch": 2}
    )
    thread.start()
    wait_until(lambda: b"1" in recorder.bodies("key-0"), what="the first one")
    scene.failing.sql("UPDATE mqlayer.consumer_group SET parked_messages_limit = 3")
    scene.stage.send_numbers(1, 5, first=11)
    wait_until(lambda: len(scene.failing.parked("key-0")) >= 3, what="the group to be full of what is newer")
    assert replay_of(scene.stage.database, replay_id).state == "running"
    scene.failing.sql("UPDATE mqlayer.redrive SET per_s = 2, next_at = now()")
    thread.join(30)
    try:
        assert replay_of(scene.stage.database, replay_id).state == "done"
    finally:
        if thread.is_alive():
            cancel_replay(runtime_of(scene.stage.database, actor="a test"), replay_id)
    wait_until(lambda: len(recorder.bodies("key-0")) == 15, what="all of it")
    assert recorder.bodies("key-0") == numbers(1, 15)


def test_each_message_that_is_given_again_is_told_and_what_a_backfill_leaves_out(scene: ReplayScene) -> None:
    """A replay tells nothing of what the filter leaves out: the group has come past it before."""
    scene.archive.sql("UPDATE mqlayer_archive.record SET tags = '{eu,vip}' WHERE body = '3'")
    scene.failing.sql("UPDATE mqlayer.consumer_group SET tag_filter = 'any:vip'")
    replay_id, _ = scene.begin()
    work_on_replay(scene.stage.database, replay_id, worker=taken(scene, replay_id))
    asked = ("SELECT partition_id, log_offset, outcome, attempts, actor, reason FROM mqlayer_archive.outcome_queue "
             "WHERE outcome <> 'handled' ORDER BY 1, 2, 3")  # fmt: skip
    places = scene.archive.sql("SELECT partition_id, log_offset, body FROM mqlayer_archive.record ORDER BY 1, 2")
    word = ("replayed", 0, "a test", f"replay {replay_id}")
    assert scene.archive.sql(asked) == [(*place, *word) for *place, body in places if body == b"3"]
    scene.archive.sql("DELETE FROM mqlayer_archive.outcome_queue RETURNING 1")
    scene.archive.sql("DELETE FROM mqlayer.parked_message RETURNING 1")
    replay_id, _ = scene.begin()
    scene.archive.sql("UPDATE mqlayer.redrive SET kind = 'backfill' WHERE redrive_id = %s RETURNING 1", replay_id)
    work_on_replay(scene.stage.database, replay_id, worker=taken(scene, replay_id))
    words = [(row[2], row[5]) for row in scene.archive.sql(asked)]
    assert words.count(("unmatched", f"backfill {replay_id}")) == 18
    assert words.count(("replayed", f"backfill {replay_id}")) == 2


def taken(scene: ReplayScene, replay_id: int) -> str:
    """Take a replay over; return the worker."""
    worker = new_worker()
    resume_replay(runtime_of(scene.stage.database, actor="a test"), replay_id, worker=worker)
    return worker


def test_newer_messages_may_come_between(scene: ReplayScene) -> None:
    """Where that is wanted: the group's streams go on."""
    recorder = Recorder()
    scene.stage.consume(recorder, backoff_s=None)
    replay_id, worker = scene.begin(newer="between", per_s=5.0)
    scene.stage.send_numbers(2, 1, first=11)
    wait_until(lambda: recorder.bodies() == [b"11", b"11"], what="what is newer")
    cancel_replay(runtime_of(scene.stage.database, actor="a test"), replay_id)
    assert work_on_replay(scene.stage.database, replay_id, worker=worker).state == "cancelled"


def test_cancelling_lets_newer_messages_go_on_at_once(scene: ReplayScene) -> None:
    """What was given before is handled first."""
    recorder = Recorder()
    scene.stage.consume(recorder, backoff_s=None)
    replay_id, worker = scene.begin()
    work_on_replay(scene.stage.database, replay_id, worker=worker, batch=4, waiting=1, stop=ready(scene, replay_id))
    scene.stage.send_numbers(2, 1, first=11)
    cancel_replay(runtime_of(scene.stage.database, actor="a test"), replay_id)
    wait_until(lambda: recorder.bodies().count(b"11") == 2, what="what is newer")
    scene.stage.wait_settled()
    wait_until(lambda: not scene.failing.parked(), what="nothing parked")
    for key in ("key-0", "key-1"):
        assert recorder.bodies(key) == sorted(recorder.bodies(key), key=int)


def ready(scene: ReplayScene, replay_id: int) -> threading.Event:
    """Return what is set once some of a replay is given."""
    stop = threading.Event()

    def wait() -> None:
        wait_until(lambda: replay_of(scene.stage.database, replay_id).sent > 0, what="some to be given")
        stop.set()

    threading.Thread(target=wait, daemon=True).start()
    return stop


def test_the_scan_goes_on_with_a_replay_that_nobody_works_on(scene: ReplayScene) -> None:
    """As with redrives."""
    replay_id, _ = scene.begin(worker=None)
    retry_scan(scene.stage.database)
    assert (replay_of(scene.stage.database, replay_id).state, len(scene.failing.parked())) == ("done", 20)


def test_a_group_is_given_what_its_tag_filter_takes(scene: ReplayScene) -> None:
    """The rest is told as unmatched."""
    scene.archive.sql("UPDATE mqlayer_archive.record SET tags = '{eu,vip}' WHERE body = '3'")
    scene.failing.sql("UPDATE mqlayer.consumer_group SET tag_filter = 'any:vip'")
    assert scene.replay().results == {"sent": 2, "unmatched": 18}


# -- kills -----------------------------------------------------------------------------------------------------------


def command(stage: Stage, *typed: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    places = {"MQLAYER_DSN": stage.dsn, "MQLAYER_KEY_PREFIX": stage.prefix}
    return ask_python("mqlayer", *typed, env=os.environ | places | armed(failpoint))


@pytest.mark.parametrize(
    ("place", "state", "came"),
    some_of(
        [
            ("replay.before_start", None, 0),
            ("replay.after_start", "running", 0),
            ("replay.before_commit", "running", 0),
            ("replay.before_commit@2", "running", 200),
            ("replay.after_commit", "running", 200),
        ],
        9,
    ),
)
def test_a_replay_that_is_killed_goes_on_and_gives_nothing_twice(
    stage: Stage, place: str, state: str | None, came: int
) -> None:
    """At any line; what was given before it counts, and the rest comes in order."""
    scene = ReplayScene(stage)
    scene.archive.per_batch = 50
    stage.send_numbers(3, 100)
    scene.settle()
    name, _, nth = place.partition("@")
    done = command(stage, "replay", "start", "orders", "g", "--all", "--yes", failpoint=f"{name}=kill@{nth or 1}")
    assert done.returncode == -9, done.stderr
    left = replays(stage.database)
    assert [(one.state, one.sent) for one in left] == ([] if state is None else [(state, came)])
    again = ("resume", str(left[0].replay_id)) if left else ("start", "orders", "g", "--all", "--yes")
    over = command(stage, "replay", *again, "--json")
    assert over.returncode == 0, over.stderr
    for key in ("key-0", "key-1", "key-2"):
        assert scene.failing.parked(key) == numbers(1, 100)
    (one,) = replays(stage.database)
    assert (one.state, one.results) == ("done", {"sent": 300})
    assert command(stage, "replay", "resume", str(one.replay_id)).returncode == 1
