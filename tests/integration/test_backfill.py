"""A group begins with the archive and goes on with the streams: no gap, no repeat, in order. Cases 27, 79, 80."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mqlayer import App, Context
from mqlayer.archive import archive_pass
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.groups import GroupSettings, ensure_group
from mqlayer.groups.group import settings_of
from mqlayer.inspect import explain_key, group_statuses
from mqlayer.maintenance import trim_pass
from mqlayer.postgres.queries import query
from mqlayer.redelivery import ReplayFilter, cancel_replay, new_worker, replay_of, replays, start_replay, work_on_replay
from mqlayer.redelivery.redelivery_job import claim_abandoned
from mqlayer.routes import retire_partitions
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.topics import set_archived
from tests.fixtures.consumers import Recorder
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.gate_scenes import KEYS, GateScene
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

# Nobody dies here: a lease that ran out on a busy machine would rightly have what is in hand handled again.
SETTINGS: dict[str, Any] = {"lease_s": 10.0, "connect_timeout_s": 1.0, "socket_timeout_s": 2.0}
pytestmark = pytest.mark.world(nodes=2)

LATE = "late"


class Library:
    """A topic that is archived and trimmed, a group that has settled it, and one that comes late."""

    def __init__(self, scene: GateScene) -> None:
        self.scene, self.database = scene, scene.database
        set_archived(runtime_of(scene.database), "orders", archived=True)
        self._apps: list[App] = []
        self._stop = threading.Event()
        self._feeder: threading.Thread | None = None

    def start(self, recorder: Recorder, group: str = LATE, **said: Any) -> App:
        """Start one more member."""
        app = App(self.scene.world.settings(**SETTINGS))
        app.consumer("orders", group=group, backoff_s=None, **said)(recorder)
        self._apps.append(app)
        app.start()
        return app

    def ensure(self, group: str = LATE, **said: Any) -> int:
        """Create a group; return the replay that it begins with."""
        with closing(RouteCache(self.database)) as routes:
            ensure_group(
                runtime_of(self.database, self.scene.world.key_prefix),
                routes,
                topic="orders",
                name=group,
                settings=GroupSettings(**{"from_archive": True, **said}),
            )
        found = replays(self.database, topic="orders", group=group)
        return found[0].replay_id if found else 0

    def settle_and_trim(self) -> None:
        """Have a group settle all that is there, archive it, and drop it from the streams."""
        ledger = Recorder()
        app = self.start(ledger, "ledger")
        wait_until(lambda: self.lag("ledger") == 0, timeout_s=20, what="all settled")
        app.stop(5.0)
        self.take()
        trim_pass(runtime_of(self.database, self.scene.world.key_prefix))
        retire_partitions(runtime_of(self.database, self.scene.world.key_prefix))

    def take(self) -> None:
        """Archive what is there."""
        archive_pass(runtime_of(self.database, self.scene.world.key_prefix))

    def sql(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement on the control database."""
        with self.database.connection() as connection:
            cursor = connection.execute(text.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def lag(self, group: str) -> int:
        """Return what a group has not settled, or is not through with in Postgres."""
        (status,) = group_statuses(runtime_of(self.database, self.scene.world.key_prefix), "orders", group)
        return status.lag + status.parked.messages + (status.replay is not None)

    def feed(self, replay_id: int, **facts: Any) -> None:
        """Work on a replay, beside the test."""
        worker = new_worker()
        assert claim_abandoned(self.database, replay_id, worker)
        self._feeder = threading.Thread(
            target=work_on_replay,
            args=(self.database, replay_id),
            kwargs={"worker": worker, "stop": self._stop, "batch": 20} | facts,
        )
        self._feeder.start()

    def close(self) -> None:
        """Stop all of it."""
        self._stop.set()
        if self._feeder is not None:
            self._feeder.join(10)
        for app in self._apps:
            app.stop(2.0)

    def expect(self, recorder: Recorder, first: int = 0) -> None:
        """All of each key, from one number on, in order and once."""
        expected = {key: bodies[first:] for key, bodies in self.scene.expected().items()}
        wait_until(lambda: recorder.count() >= sum(map(len, expected.values())), timeout_s=30, what="all handled")
        recorder.assert_in_order()
        assert {key: [body.decode() for body in recorder.bodies(key)] for key in expected} == expected


@pytest.fixture
def library(gate_scene: GateScene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """An archived topic of two partitions on two nodes, in small batches."""
    monkeypatch.setattr("mqlayer.archive.archiver.page_size", lambda _: 25)
    library = Library(gate_scene)
    yield library
    library.close()


def test_a_late_group_gets_the_archive_then_the_streams_in_order_and_once(library: Library) -> None:
    """Cases 27, 80: across a split and a retired parent, while more is published and members come and go."""
    scene = library.scene
    scene.publish(6)
    scene.split(scene.in_force()[0], 256)
    scene.publish(6)
    library.settle_and_trim()
    assert "deleted" in scene.states().values()
    scene.publish(3)
    library.take()
    scene.publish(1)
    recorder = Recorder()
    replay_id = library.ensure()
    scene.publish(3)
    first = library.start(recorder)
    library.feed(replay_id, waiting=50)
    wait_until(lambda: recorder.count() > 40, what="some of it")
    library.start(recorder)
    first.stop(5.0)
    scene.publish(2)
    library.expect(recorder)
    done = replay_of(library.database, replay_id)
    assert (done.kind, done.state, done.results) == ("backfill", "done", {"sent": 15 * KEYS})
    wait_until(lambda: library.lag(LATE) == 0, what="all settled")


def test_the_streams_rest_while_the_archive_is_given_and_lag_says_so(library: Library) -> None:
    """Nothing newer is handled before it."""
    scene = library.scene
    scene.publish(4)
    library.settle_and_trim()
    replay_id = library.ensure()
    scene.publish(2)
    recorder = Recorder()
    app = library.start(recorder)
    wait_until(lambda: [state for _, state in app.members[0].owned().values()] == ["open"] * 2, what="both")
    (status,) = group_statuses(runtime_of(library.database, scene.world.key_prefix), "orders", LATE)
    assert status.replay is not None
    assert (status.replay.kind, status.replay.sent, status.replay.newer_wait) == ("backfill", 0, True)
    assert {one.stall.reason for one in status.partitions if one.stall is not None} == {"replayed"}
    assert recorder.count() == 0
    explained = explain_key(runtime_of(library.database, scene.world.key_prefix), "orders", "key-1", LATE)
    assert f"mqlayer replay show {replay_id}" in explained.run_next
    library.feed(replay_id)
    library.expect(recorder)


def test_a_start_of_a_time_takes_what_was_published_since(library: Library) -> None:
    """Case 27: from the archive where that is older than the streams, else from these."""
    scene = library.scene
    scene.publish(4)
    library.settle_and_trim()
    library.sql("UPDATE mqlayer_archive.record SET published_at = '2026-01-01' WHERE body IN ('0', '1')")
    recorder, late = Recorder(), Recorder()
    replay_id = library.ensure(start=datetime(2026, 1, 2, tzinfo=UTC))
    scene.publish(2)
    library.start(recorder)
    library.feed(replay_id)
    library.expect(recorder, first=2)
    # Later than all that there is.
    replay_id = library.ensure("latest", start=datetime.now(UTC) + timedelta(hours=1))
    library.start(late, "latest")
    work_on(library, replay_id)
    scene.publish(1)
    wait_until(lambda: late.count() == KEYS, what="the new messages")
    assert set(late.bodies()) == {b"6"}


def work_on(library: Library, replay_id: int) -> None:
    worker = new_worker()
    assert claim_abandoned(library.database, replay_id, worker)
    work_on_replay(library.database, replay_id, worker=worker)


@pytest.mark.full
def test_a_route_that_changes_meanwhile_changes_no_order(library: Library) -> None:
    """Case 79: what was published during a split, the archive of it, and what came after."""
    scene = library.scene
    scene.publish(4)
    first, second = scene.in_force()
    library.take()
    scene.publish(1)
    scene.split(first, 256)
    scene.publish(4)
    library.take()
    replay_id = library.ensure()
    library.feed(replay_id, waiting=30)
    recorder = Recorder()
    library.start(recorder)
    wait_until(lambda: recorder.count() > 20, what="some of it")
    scene.move(second)
    scene.publish(4)
    library.expect(recorder)


@pytest.mark.full
def test_a_child_of_a_parent_that_is_not_archived_is_read_from_its_stream(library: Library) -> None:
    """The rest of the parent comes before it; whatever the archive has of the child."""
    scene = library.scene
    scene.publish(4)
    first = scene.in_force()[0]
    library.take()
    children = scene.split(first, 256)
    scene.publish(4)
    # An archiver that took the children first.
    library.sql("UPDATE mqlayer_archive.progress SET complete = true WHERE partition_id = %s", first)
    library.take()
    library.sql("UPDATE mqlayer_archive.progress SET complete = false WHERE partition_id = %s", first)
    replay_id = library.ensure()
    rows = library.sql(
        "SELECT partition_id FROM mqlayer.group_start s JOIN mqlayer.consumer_group g USING (group_id) "
        "WHERE g.name = 'late' AND s.start_offset = 1 ORDER BY 1"
    )
    assert [row[0] for row in rows] == children
    recorder = Recorder()
    library.start(recorder)
    library.feed(replay_id)
    library.expect(recorder)


def test_a_cancelled_backfill_lets_the_streams_go_on_behind_a_gap(library: Library) -> None:
    """An operator's word; what was given is handled first."""
    scene = library.scene
    scene.publish(4)
    library.settle_and_trim()
    replay_id = library.ensure()
    scene.publish(2)
    recorder = Recorder()
    library.start(recorder)
    cancel_replay(runtime_of(library.database, actor="a test"), replay_id)
    library.expect(recorder, first=4)


@pytest.mark.full
def test_a_replay_of_an_archive_taken_during_a_split_has_the_order_of_live_consumption(library: Library) -> None:
    """Case 79: handled live across the split, then replayed from the archive: the same order per key."""
    scene = library.scene
    scene.publish(3)
    live = Recorder()
    app = library.start(live, "ledger")
    library.take()
    scene.publish(1)
    scene.split(scene.in_force()[0], 256)
    scene.publish(3)
    library.take()
    scene.merge(*scene.in_force()[:2])
    scene.publish(3)
    wait_until(lambda: library.lag("ledger") == 0, timeout_s=20, what="all settled")
    app.stop(5.0)
    library.take()
    again = Recorder()
    worker = new_worker()
    replay_id = start_replay(
        runtime_of(library.database, scene.world.key_prefix, actor="a test"),
        "orders",
        "ledger",
        ReplayFilter(),
        worker=worker,
    )
    library.start(again, "ledger")
    done = work_on_replay(library.database, replay_id, worker=worker, batch=17, waiting=60)
    assert done.results == {"sent": 10 * KEYS}
    library.expect(again)
    for key in scene.expected():
        assert again.bodies(key) == live.bodies(key)


def test_retention_spares_what_a_backfill_has_yet_to_read(library: Library) -> None:
    """And drops it afterwards."""
    library.scene.publish(4)
    library.settle_and_trim()
    days = [row[0] for row in library.sql("SELECT DISTINCT day FROM mqlayer_archive.day")]
    assert days
    replay_id = library.ensure()

    def needed() -> bool:
        with library.database.connection() as connection:
            return any(connection.execute(query("archive_day_needed"), {"day": day}).fetchone() for day in days)

    assert needed()
    cancel_replay(runtime_of(library.database, actor="a test"), replay_id)
    assert not needed()


def test_what_can_not_begin_with_the_archive_is_refused(library: Library) -> None:
    """With what to do instead."""
    with pytest.raises(InvalidInput, match="another start"):
        library.ensure(start="latest")
    with pytest.raises(InvalidInput, match="another start"):
        library.ensure(mode="pop")
    assert settings_of(from_archive=True).from_archive
    library.sql("UPDATE mqlayer.topic SET archived = false")
    with pytest.raises(Conflict, match="not archived"):
        library.ensure()


@pytest.mark.full
def test_a_handler_that_fails_meanwhile_holds_its_key_alone(library: Library) -> None:
    """Its later messages wait behind it, those of the streams too."""
    scene = library.scene
    scene.publish(3)
    library.settle_and_trim()
    replay_id = library.ensure()
    scene.publish(2)
    broken = True

    def act(body: bytes, ctx: Context) -> None:
        if broken and ctx.key == "key-1" and body == b"1":
            raise RuntimeError

    recorder = Recorder(act)
    library.start(recorder)
    library.feed(replay_id)
    wait_until(lambda: recorder.count() == 5 * (KEYS - 1) + 1, what="all others")
    broken = False
    library.expect(recorder)


# -- kills -----------------------------------------------------------------------------------------------------------


def test_a_creation_that_is_killed_is_done_once_by_the_next(library: Library) -> None:
    """One backfill, and all of it in order."""
    scene = library.scene
    scene.publish(4)
    library.settle_and_trim()
    done = command(scene, failpoint="group.before_backfill_commit=kill@1")
    assert done.returncode == -9, done.stderr
    assert replays(library.database) == []
    again = command(scene)
    assert again.returncode == 0, again.stderr
    (one,) = replays(library.database)
    assert f"replay {one.replay_id}" in again.stdout
    scene.publish(1)
    recorder = Recorder()
    library.start(recorder)
    library.feed(one.replay_id)
    library.expect(recorder)


def command(scene: GateScene, *, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    facts = {"MQLAYER_DSN": scene.world.dsn, "MQLAYER_KEY_PREFIX": scene.world.key_prefix}
    words = ("group", "create", "orders", LATE, "--from-archive")
    return ask_python("mqlayer", *words, env=os.environ | facts | armed(failpoint))
