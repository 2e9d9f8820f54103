"""Problems over time: noted by a job under its own right, ended by a look that could read their part, bounded."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mqlayer.doctor import health, problem_history
from mqlayer.doctor.effects import COMMANDS
from mqlayer.doctor.problem_history import Problem, ended_problems, open_problems, put_problems
from mqlayer.errors import StoreUnavailable
from mqlayer.inspect.node_status import node_statuses
from mqlayer.maintenance.sampling import take_samples
from mqlayer.metrics.alerts import ALERTS
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from mqlayer.relay import relay_once
from mqlayer.stack import RedisServer
from mqlayer.workers.connections import runtime
from mqlayer.workers.tasks import TASKS
from tests.fixtures.command_tree import commands
from tests.fixtures.commands import Commands
from tests.fixtures.wait import wait_for_room_in_minute, wait_until
from tests.proof.world import QUICK, World

NODE = Problem(ALERTS["MqlayerNodeAway"], "it is away", node="node-1", part="nodes", effect="12 partitions wait")


def now_s(world: World) -> float:
    ((seconds,),) = world.rows("SELECT extract(epoch FROM clock_timestamp())::float8")
    return float(seconds)


def names(database: Database) -> set[str]:
    return {place.alert for place in open_problems(database)}


def look(world: World) -> None:
    """Run the job, which is due."""
    world.rows("UPDATE mqlayer.job SET next_at = now()")
    TASKS["note_problems"]()


@pytest.mark.world(right=Right.WORK, tasks=True, own_node=True, by_commands=True)
def test_a_job_notes_a_dead_node_and_its_end_under_its_own_right(
    world: World, node: RedisServer, run: Commands
) -> None:
    take_samples(world.runtime())
    look(world)
    assert "MqlayerNodeAway" not in names(world.database)
    assert [one.state for one in node_statuses(world.runtime(), within_s=0.0)] == ["serving"], "a second look"
    assert "MqlayerNoRelay" in names(world.database)
    assert health.system_health(runtime()).unread == (), "the worker's right is enough"
    node.kill()
    look(world)
    assert "MqlayerNodeAway" in names(world.database)
    (away,) = [one for one in health.system_health(world.runtime()).problems if one.node]
    assert away.after is not None, "its last sample"
    assert away.since is not None, "the look that found it"
    assert away.after < away.since
    assert (away.command, away.effect) == (
        "", "Messages of 2 partitions are neither stored nor delivered; the outbox holds 0 for it.",
    )  # fmt: skip
    (line,) = [one for one in run.lines("problems") if one["node"]]
    assert (line["alert"], line["severity"]) == ("MqlayerNodeAway", "critical")
    assert "some time after" in run.text("problems")
    node.start()

    def back() -> bool:
        TASKS["rearm_nodes"]()
        look(world)
        return "MqlayerNodeAway" not in names(world.database)

    wait_until(back, what="the end of the problem")
    (ended,) = [one for one in ended_problems(world.database) if one.name == "MqlayerNodeAway"]
    assert ended.ended_at is not None
    assert ended.began_at < ended.ended_at
    assert 0 < ended.lasted_s < 60
    (line,) = [one for one in run.lines("problems", "--ended") if one["node"]]
    assert line["number"] == ended.number
    assert "A node is away" in run.text("problems", "--ended", "--hours", "1")


@pytest.mark.world(partitions=0)
def test_a_problem_lasts_while_its_part_is_unread_and_an_old_look_changes_nothing(world: World) -> None:
    began = now_s(world)
    assert put_problems(world.database, began, [NODE], ()) == 0
    assert put_problems(world.database, began + 60, [], ("nodes",)) == 0
    assert names(world.database) == {"MqlayerNodeAway"}
    assert put_problems(world.database, began + 120, [], ()) == 1
    put_problems(world.database, began + 61, [NODE], ())
    assert names(world.database) == set()
    (ended,) = ended_problems(world.database)
    assert (ended.ended_at or ended.began_at) - ended.began_at == timedelta(seconds=120)
    assert (ended.text, ended.effect, ended.node) == ("it is away", "12 partitions wait", "node-1")


@pytest.mark.world(partitions=0)
def test_rows_are_bounded_and_texts_are_cut(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_history, "ROWS_LIMIT", 20)
    began = now_s(world)
    long = "\0" + "ä" * 9_000
    for minute in range(8):
        those = [Problem(NODE.alert, long, node="n" * 400, item=f"{minute}-{n}", part="nodes") for n in range(5)]
        put_problems(world.database, began + minute, [*those, NODE], ())
    ((rows, longest),) = world.rows("SELECT count(*)::int, max(octet_length(text)) FROM mqlayer.problem")
    assert 20 <= rows <= 26
    assert longest <= 4096
    world.rows("UPDATE mqlayer.problem SET last_seen_at = now() - interval '8 days', ended_at = now()")
    put_problems(world.database, began + 100, [], ())
    assert world.rows("SELECT count(*)::int FROM mqlayer.problem") == [(0,)]


@pytest.mark.world(partitions=0)
def test_a_look_that_fails_in_part_keeps_what_it_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(look: Any) -> Any:
        yield Problem(ALERTS["MqlayerPaused"], "half", topic="orders", group="g")
        raise StoreUnavailable("here", "it went away")

    monkeypatch.setattr(health, "FINDERS", {**health.FINDERS, "groups": broken})
    found = health.note_problems(world.runtime())
    assert found.unread_parts == ("groups",)
    assert "it went away" in found.unread[0]
    assert "MqlayerPaused" in names(world.database)
    monkeypatch.undo()
    health.note_problems(world.runtime())
    assert "MqlayerPaused" not in names(world.database)


def test_each_command_that_helps_is_one() -> None:
    known = {" ".join(words) for words, _ in commands()}
    for command in COMMANDS.values():
        words = command.split()
        assert words[0] == "mqlayer"
        assert {" ".join(words[1 : 1 + n]) for n in (1, 2, 3)} & known, command


def test_a_standstill_is_told_with_the_last_commit(world: World) -> None:
    wait_for_room_in_minute()
    world.rows(
        "INSERT INTO mqlayer.sample (kind, object_id, at, committed, relayed, stored) "
        "SELECT 'topic', 1, date_trunc('minute', now(), 'UTC') - make_interval(mins => n), "
        "CASE WHEN n > 5 THEN 60 * (100 - n) ELSE 60 * 95 END, 0, 0 FROM generate_series(0, 9) AS n"
    )
    totals = health.system_health(world.runtime()).totals
    assert (totals.committed_per_s, totals.relayed_at) == (0.0, None)
    assert totals.committed_at is not None
    assert timedelta(minutes=5) <= datetime.now(UTC) - totals.committed_at < timedelta(minutes=6, seconds=5)
    assert totals.looked_back_to is not None


def test_a_hot_partition_is_told_by_the_second_sample_though_nothing_lags(world: World) -> None:
    """Of messages that were relayed into one of two partitions; more rates, and lags, by the table."""
    here = world.runtime()
    take_samples(here)
    world.rows("SELECT mqlayer_app.publish_v1('orders', 'one key', 'x') FROM generate_series(1, 2000)")
    wait_until(lambda: relay_once(world.settings(), limits=QUICK) == 0, what="all to be relayed")
    # However long that took.
    world.rows("UPDATE mqlayer.partition_rate SET measured_at = now() - interval '40 s'")
    take_samples(here)
    (found,) = [one for one in health.system_health(here).problems if one.alert.name == "MqlayerPartitionHot"]
    assert (found.alert.severity, found.topic, found.group) == ("warning", "orders", "")
    assert re.match(
        rf"Partition {found.partition} of orders takes 100% of the load \((2\d) of \1 messages/s\)", found.text
    )
    assert "No group lags there yet" in found.effect
    look = health.HealthLook(here)
    look.totals.is_sampled = True
    row = health.GroupRow("orders", "g", "exclusive", 2, 1, None, None, True, 500, 120.0)
    (found,) = health._hot(look, [row])
    assert found.effect == "500 messages wait for group g, the oldest for 2 min."
    world.rows("UPDATE mqlayer.partition_rate SET per_s = CASE WHEN per_s > 1 THEN 19 ELSE 1 END")
    (found,) = health._hot(look, [row])
    assert "takes 95% of the load (19 of 20 messages/s), where 50% would be fair" in found.text
    assert list(health._hot(look, [row._replace(oldest_s=10.0)])) == [], "few messages, and no lag"


def test_failed_attempts_are_told_by_their_share(world: World) -> None:
    wait_for_room_in_minute()
    world.rows(
        "INSERT INTO mqlayer.consumer_group (topic_id, name, state, start, backoff_s) "
        "VALUES (1, 'g', 'live', 'earliest', '{1}')"
    )
    for ago, stored in ((9, 100), (0, 200)):
        world.rows(
            "INSERT INTO mqlayer.sample (kind, object_id, at, lag, stored) SELECT kind, 1, date_trunc('minute', now(), "
            "'UTC') - make_interval(mins => %s), 0, %s FROM unnest(ARRAY['topic', 'group']) AS kind",
            ago, stored,
        )  # fmt: skip
    world.rows(
        "INSERT INTO mqlayer.failed_attempt (group_id, lp, source, seq, attempt, member_id, error) "
        "SELECT 1, 1, 1, n, 1, 'm', 'KeyError' FROM generate_series(1, 25) AS n"
    )
    (found,) = [one for one in health.system_health(world.runtime()).problems if one.alert.name == "MqlayerFailureRate"]
    assert found.text == "25 attempts failed within ten minutes, 20% of all"
