"""Epochs and counts that no process ever gives out: Postgres refuses them, and arming takes them off a node."""

from __future__ import annotations

from contextlib import closing
from typing import Final

import psycopg
import pytest

from mqlayer.topics import list_nodes, rearm_node
from tests.fixtures.consumers import Recorder, Stage, member_of
from tests.fixtures.variants import some_of

HIGHEST: Final = 2**63 - 1
IMPOSSIBLE: Final = [2**53 - 1, HIGHEST]


@pytest.mark.parametrize("number", some_of(IMPOSSIBLE, 2))
def test_arming_lowers_an_epoch_that_nothing_could_raise_and_the_group_consumes_again(
    stage: Stage, number: int
) -> None:
    recorder = Recorder()
    app = stage.consume(recorder)
    stage.send_numbers(keys=4, each=3)
    stage.wait_settled()
    assert app.stop()
    for partition in stage.partitions:
        stage.redis.hset(stage.group_keys(partition).lock.decode(), "epoch", str(min(number, 2**62)))
    with closing(psycopg.connect(stage.dsn, autocommit=True)) as owner:
        # As after its restart: arming one that is armed changes no epoch.
        owner.execute("UPDATE mqlayer.node SET armed_run_id = NULL")
    rearm_node(stage.runtime, list_nodes(stage.database)[0].name)
    app = stage.consume(recorder)
    stage.send_numbers(keys=4, each=3, first=4)
    stage.wait_settled()
    recorder.assert_in_order()
    assert all(epoch < 2**52 for epoch, _ in member_of(app).owned().values())


GROUP: Final = """
    INSERT INTO mqlayer.topic (name, strategy, body_limit, backlog_limit) VALUES ('orders', 'strict', 1000, 1);
    INSERT INTO mqlayer.consumer_group (topic_id, name, start, backoff_s) VALUES (1, 'g', 'latest', '{1}');
"""


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE mqlayer.consumer_group SET allocation = %s",
        "UPDATE mqlayer.consumer_group SET parking = %s",
        "INSERT INTO mqlayer.failure_count (group_id, partition_id, event, count) VALUES (1, 1, 'failed', %s)",
    ],
)
def test_postgres_refuses_counts_that_nothing_could_raise(database_dsn: str, statement: str) -> None:
    with closing(psycopg.connect(database_dsn, autocommit=True)) as owner:
        owner.execute(GROUP.encode())
        owner.execute(statement.encode(), [1])
        with pytest.raises(psycopg.errors.CheckViolation):
            owner.execute(statement.replace("VALUES (1, 1", "VALUES (1, 2").encode(), [HIGHEST])
