"""Epochs and counts that were never given out, of an earlier installation: migrating and arming repair them."""

from __future__ import annotations

from contextlib import closing
from typing import Any, Final

import psycopg
import pytest

from mqlayer.postgres.migrations import Migration, migrations
from mqlayer.postgres.queries import query
from mqlayer.topics import list_nodes, rearm_node
from tests.fixtures.consuming import Recorder, Stage, member_of

HIGHEST: Final = 2**63 - 1
IMPOSSIBLE: Final = [2**53 - 1, HIGHEST]


def step(schema: Any) -> Migration:
    """The migration that repairs."""
    (found,) = [one for one in migrations(schema) if one.name == "expand_impossible_numbers"]
    return found


def as_before(owner: psycopg.Connection[Any]) -> None:
    """Take back what the migration of the control schema adds."""
    owner.execute("ALTER TABLE mqlayer.failure_count DROP CONSTRAINT failure_count_count")
    owner.execute("ALTER TABLE mqlayer.consumer_group DROP CONSTRAINT consumer_group_counts")


@pytest.mark.parametrize("number", IMPOSSIBLE)
def test_migrating_lowers_what_nothing_could_raise_and_the_group_consumes_again(stage: Stage, number: int) -> None:
    recorder = Recorder()
    app = stage.consume(recorder)
    stage.send_numbers(keys=4, each=3)
    stage.wait_settled()
    assert app.stop()
    group = stage.group_id()
    with closing(psycopg.connect(stage.dsn, autocommit=True)) as owner:
        as_before(owner)
        owner.execute("UPDATE mqlayer.assignment SET epoch = %s", [number])
        owner.execute("UPDATE mqlayer.consumer_group SET allocation = %s, parking = %s", [number, number])
        owner.execute(
            "INSERT INTO mqlayer.failure_count (group_id, partition_id, event, count) SELECT %s, n, 'failed', %s "
            "FROM generate_series(1, 2) AS n ON CONFLICT (group_id, partition_id, event) DO UPDATE SET count = %s",
            [group, number, number],
        )
        owner.execute(step("control").text.encode())
        assert owner.execute("SELECT count(*) FROM mqlayer.node WHERE armed_run_id IS NOT NULL").fetchone() == (0,)
        last = owner.execute("SELECT last_value FROM mqlayer.epoch").fetchone()
        rows = owner.execute("SELECT max(epoch) FROM mqlayer.assignment").fetchone()
        assert rows == last
        owner.execute(query("failure_counts"), {"group_ids": [group]})
        with pytest.raises(psycopg.errors.CheckViolation):
            owner.execute("UPDATE mqlayer.failure_count SET count = %s", [HIGHEST])
    # Redis has them too, of a member that took its locks by them.
    for partition in stage.partitions:
        stage.redis.hset(stage.group_keys(partition).lock.decode(), "epoch", str(min(number, 2**62)))
    rearm_node(stage.database, list_nodes(stage.database)[0].name, prefix=stage.prefix)
    app = stage.consume(recorder)
    stage.send_numbers(keys=4, each=3, first=4)
    stage.wait_settled()
    recorder.assert_in_order()
    assert all(epoch < 2**52 for epoch, _ in member_of(app).holdings().values())


@pytest.mark.parametrize("number", IMPOSSIBLE)
def test_migrating_forgets_fences_that_no_effect_could_pass(database_dsn: str, number: int) -> None:
    fence = "SELECT answer FROM mqlayer_app.fence_v1(1, %s::smallint, 1, %s, %s, 8)"
    told: list[str] = []
    with closing(psycopg.connect(database_dsn, autocommit=True)) as owner:
        for lp, key in ((1, "a"), (2, "b"), (3, "c")):
            assert owner.execute(fence, [lp, key, 5]).fetchone() == ("current",)
        owner.execute("UPDATE mqlayer_app.fence_epoch SET epoch = %s WHERE lp = 1", [number])
        owner.execute("UPDATE mqlayer_app.fence_applied SET seq = %s WHERE lp = 2", [number])
        assert owner.execute(fence, [1, "a", 6]).fetchone() == ("stale",)
        assert owner.execute(fence, [2, "b", 6]).fetchone() == ("applied",)
        owner.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
        owner.execute(step("application").text.encode())
        for lp, key in ((1, "a"), (2, "b"), (3, "c")):
            assert owner.execute(fence, [lp, key, 6]).fetchone() == ("current",)
        # Of others nothing is forgotten, and an owner of before stays refused.
        assert owner.execute(fence, [3, "c", 5]).fetchone() == ("applied",)
        assert owner.execute(fence.replace(", 8)", ", 7)"), [1, "a", 7]).fetchone() == ("stale",)
    (text,) = told
    assert text.startswith("1 epochs and 1 applied seqs")
