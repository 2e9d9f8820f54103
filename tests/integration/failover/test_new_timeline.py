"""A control database on another timeline: numbers leap, and nobody is served before every node is armed again."""

from __future__ import annotations

import pytest

from mqlayer.groups.members import next_session
from mqlayer.postgres.database import Database, connect
from mqlayer.postgres.server_identity import meet_server
from mqlayer.redis.keys import partition_keys
from mqlayer.routes import rearm_lost_nodes
from mqlayer.topics import find_node
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until

LEAP = 1_000_000_000


def promote(database: Database) -> None:
    """Have the schema know another timeline than its server's, as after a promotion."""
    with database.connection() as connection:
        connection.execute("UPDATE mqlayer.server SET timeline = timeline + 1")


def test_members_go_on_under_epochs_above_all_that_may_have_been_lost(stage: Stage) -> None:
    recorder = Recorder()
    stage.send_numbers(keys=5, each=4)
    app = stage.consume(recorder)
    stage.wait_settled()
    # What a rebalance did to the group is among what is lost; its member has seen that.
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.consumer_group SET allocation = allocation - 1")
    promote(stage.database)
    # Its member is told at the same time, and may arm it first.
    assert rearm_lost_nodes(stage.runtime) in ({"node-1": "armed"}, {})
    held = member_of(app).owned
    # A handler under a former epoch might begin a message that it can't settle.
    wait_until(lambda: {epoch > LEAP for epoch, _ in held().values()} == {True}, what="epochs above the leap")
    stage.send_numbers(keys=5, each=4, first=5)
    wait_until(lambda: recorder.count() == 40, timeout_s=20, what="what came since handled")
    recorder.assert_in_order()
    assert len(recorder.ended) == 40


def test_one_of_all_that_see_it_sees_to_it(database_dsn: str) -> None:
    with Database(database_dsn) as database:
        before = next_session(database)
        promote(database)
        with connect(database_dsn) as one, connect(database_dsn) as other:
            assert [meet_server(one), meet_server(other), meet_server(one)] == [True, False, False]
            rows = one.execute("SELECT facts ->> 'another_system' FROM mqlayer.audit").fetchall()
        assert rows == [("false",)]
        assert next_session(database) > before + LEAP


def test_an_emptied_node_is_made_again_by_the_worker(start_stage: StartStage, start_redis: StartRedis) -> None:
    """FLUSHALL keeps the run: with nobody there but direct producers, only the worker's look shows it."""
    server = start_redis()
    stage = start_stage(server.url)
    assert rearm_lost_nodes(stage.runtime) == {}
    armed = find_node(stage.database, "node-1").armed_run_id
    stage.redis.flushall()
    assert rearm_lost_nodes(stage.runtime) == {"node-1": "armed"}
    assert find_node(stage.database, "node-1").armed_run_id == armed
    for partition in stage.partitions:
        assert stage.redis.hget(partition_keys(stage.prefix, partition).meta.decode(), "state") == b"open"


@pytest.fixture
def stage(start_stage: StartStage, redis_url: str) -> Stage:
    """A stage of two partitions on the shared node."""
    return start_stage(redis_url)
