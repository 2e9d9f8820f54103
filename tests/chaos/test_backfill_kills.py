"""Cases 79, 80: members, and whoever gives the archive, killed while a group is given it: effects in order, once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from mqlayer.archive import archive_pass
from mqlayer.groups import GroupSettings, ensure_group
from mqlayer.postgres.database import Database
from mqlayer.redelivery import new_worker, replay_of, replays, work_on_replay
from mqlayer.redelivery.redelivery_job import claim_abandoned
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.topics import set_archived
from tests.chaos.actors import GROUP, TOPIC
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.kill_scenes import COUNT, KillScene, judge
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of
from tests.proof.seller_shop import SellerShop


@pytest.fixture
def database(kill_scene: KillScene) -> Iterator[Database]:
    """The control database."""
    with Database(kill_scene.settings.control_dsn()) as database:
        yield database


def begin_with_archive(scene: KillScene, database: Database) -> int:
    """Create the group that consumers join; return the backfill that it begins with."""
    prefix = scene.settings.key_prefix
    set_archived(runtime_of(database), TOPIC, archived=True)
    assert archive_pass(runtime_of(database, prefix)).total == COUNT
    settings = GroupSettings(from_archive=True, backoff_s=(0.01,))
    with closing(RouteCache(database)) as routes:
        ensure_group(runtime_of(database, prefix), routes, topic=TOPIC, name=GROUP, settings=settings)
    (found,) = replays(database)
    return found.replay_id


@pytest.mark.slow
def test_kills_while_the_archive_is_given(kill_scene: KillScene, database: Database) -> None:
    """What it gives comes before the streams, each effect once, whoever is killed at whatever step."""
    shop = SellerShop(kill_scene)
    shop.fail()
    kill_scene.publish()
    replay_id = begin_with_archive(kill_scene, database)
    kill_scene.publish()
    given = ask_python(
        *("mqlayer", "replay", "resume", str(replay_id)),
        env=os.environ
        | {
            "MQLAYER_DSN": kill_scene.settings.control_dsn(),
            "MQLAYER_KEY_PREFIX": kill_scene.settings.key_prefix,
            **armed("replay.before_commit=kill@2"),
        },
    )
    assert given.returncode == -9, given.stderr
    shop.killed("parking.before_resume=kill@2")
    shop.killed("fence.after=kill@30")
    # What the killed one had its lease on: after that anybody goes on.
    worker = new_worker()
    wait_until(lambda: claim_abandoned(database, replay_id, worker), timeout_s=20, what="its lease to end")
    stop = threading.Event()
    giver = threading.Thread(
        target=work_on_replay, args=(database, replay_id), kwargs={"worker": worker, "stop": stop, "batch": 20}
    )
    giver.start()
    try:
        for failpoint in ("parking.before_commit=kill@2", "parking.after_commit=kill@3", "read.after_reply=kill"):
            shop.killed(failpoint)
        shop.start("last")
        kill_scene.wait_until_drained()
        # Members may handle the last message before the job notes the end.
        wait_until(lambda: replay_of(database, replay_id).state == "done", what="all is given")
    finally:
        stop.set()
        giver.join(20)
    done = replay_of(database, replay_id)
    assert (done.state, done.results) == ("done", {"sent": COUNT})
    # Its effect commits before its owner takes a message out of its line: till then, and no longer, it counts.
    wait_until(lambda: replay_of(database, replay_id).waiting == 0, what="nothing counts as waiting that was handled")
    judge(kill_scene)
