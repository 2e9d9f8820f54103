"""`mqlayer group list|show|members|lag`: what they say of groups that go on, fall behind, or get stuck."""

from __future__ import annotations

import threading
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest
import redis

from mqlayer import Context, Producer
from mqlayer.errors import InvalidName
from mqlayer.groups import GroupSettings, apply_seek, ensure_group, join, planned_seek, send_heartbeat
from mqlayer.inspect import group_statuses
from mqlayer.postgres.database import Database
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.relay import relay_once
from mqlayer.runtime.route_cache import RouteCache, load_nodes
from tests.fixtures.commands import Commands, facts_of
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.manual_member import ManualMember
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

KEYS = 6
FAILED_TWICE = "offset 1 failed 2 times"

pytestmark = pytest.mark.world(partitions=1)


@pytest.fixture
def typed(database_dsn: str, key_prefix: str, monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> Commands:
    """Commands on the migrated database."""
    monkeypatch.setenv("MQLAYER_DSN", database_dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", key_prefix)
    return Commands()


def publish(world: World, tag: str, count: int = 2 * KEYS) -> None:
    """Publish messages of a few keys, and see them in the partitions."""
    world.publish(count, keys=KEYS, tag=tag)
    assert relay_once(world.settings(), limits=QUICK) == count


def lag_of(typed: Commands, *words: str) -> dict[str, Any]:
    """Return what `group lag` says of one group."""
    (found,) = typed.lines("group", "lag", *words)
    return found


def by_partition(told: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {one["partition"]: one for one in told["partitions"]}


def test_a_group_that_nobody_consumes_shows_all_that_waits_for_it(
    world: World, database: Database, typed: Commands
) -> None:
    with closing(RouteCache(database)) as routes:
        ensure_group(
            runtime_of(database, world.key_prefix), routes, topic="orders", name="ledger", settings=GroupSettings()
        )
    publish(world, "a")
    (line,) = typed.lines("group", "list")
    assert line == {
        "topic": "orders", "group": "ledger", "state": "live", "mode": "exclusive", "version": 1, "topic_version": 1,
        "members": 0, "partitions": 1, "lag": 2 * KEYS, "unreachable": "",
    }  # fmt: skip
    told = lag_of(typed, "orders", "ledger")
    (one,) = told["partitions"]
    assert one["stuck"]["reason"] == "no_owner"
    assert "no member lives" in one["stuck"]["detail"]
    assert (one["owner"], one["lag"], one["committed"], one["end"]) == (None, 2 * KEYS, 1, 2 * KEYS + 1)
    assert (one["head"]["offset"], one["head"]["key"], one["head"]["attempts"]) == (1, "key-0", 0)
    assert 0 <= told["age_s"] == one["age_s"] < 60
    assert typed.lines("group", "members", "orders", "ledger") == []
    assert "has no members" in typed.text("group", "members", "orders", "ledger")


def test_a_failing_key_is_shown_with_its_attempts_and_its_next_one_and_not_with_its_body(
    stage: Stage, typed: Commands
) -> None:
    def act(body: bytes, ctx: Context) -> None:
        if ctx.key == "key-0":
            raise RuntimeError

    with Producer(stage.settings(), name="test") as producer:
        producer.send("orders", key="key-0", body=b"body-secret", headers={"h": "header-secret"})
    before = datetime.now(UTC)
    stage.send(((f"key-{n % 4}", b"%d" % n) for n in range(40)), source=77)
    recorder = Recorder(act)
    stage.consume(recorder, backoff_s=(0.01, 300.0), policy="block", settings=stage.settings(lease_s=20.0))
    wait_until(lambda: recorder.count() == 30, what="the other keys")
    wait_until(lambda: lag_of(typed, "orders", "g")["lag"] == 11, what="what is settled to be known")
    wait_until(lambda: stage_attempts(typed) == 2, what="both attempts to be counted")

    told = lag_of(typed, "orders", "g")
    (one,) = [one for one in told["partitions"] if one["lag"]]
    assert one["lag"] == told["lag"] == 11
    assert one["end"] - one["committed"] > 11, "others settled behind the head"
    head = one["head"]
    assert (head["key"], head["offset"], head["attempts"]) == ("key-0", 1, 2)
    assert 290 < head["retry_in_s"] <= 300
    since, retry_at = (datetime.fromisoformat(head[name]) for name in ("failing_since", "retry_at"))
    assert abs((since - before).total_seconds()) < 30
    assert 299 < (retry_at - since).total_seconds() < 330
    assert one["stuck"] == {"reason": "failing", "since": head["failing_since"], "detail": FAILED_TWICE}
    ((owner, epoch),) = {(owner, epoch) for p, owner, epoch, _ in stage.assignments() if p == one["partition"]}
    assert (one["owner"], one["epoch"]) == (owner, epoch)
    quiet = [other for other in told["partitions"] if other is not one]
    assert [(other["lag"], other["stuck"], other["head"]) for other in quiet] == [(0, None, None)]

    said = typed.text("group", "lag", "orders")
    assert "group g: 11 messages not settled, the oldest " in said
    assert "nothing waits in 1 partition\n" in said
    row = next(line for line in said.splitlines() if line.endswith(FAILED_TWICE))
    assert row.split()[:5] == [str(one["partition"]), owner, str(epoch), "1", "key-0"]
    assert "in 5 min" in row
    everything = said + typed.text("group", "show", "orders", "g") + str(told)
    everything += typed.text("key", "explain", "orders", "key-0", "--group", "g")
    assert "secret" not in everything


def stage_attempts(typed: Commands) -> int:
    """Return how many attempts of the head failed."""
    heads = [one["head"] for one in lag_of(typed, "orders", "g")["partitions"]]
    return max((head["attempts"] for head in heads if head), default=0)


def test_a_message_that_is_being_handled_stands_still_for_no_reason(stage: Stage, typed: Commands) -> None:
    go_on, waited = threading.Event(), list[bool]()
    stage.send([("k", b"1"), ("k", b"2")])
    recorder = Recorder(lambda body, ctx: waited.append(go_on.wait(30)))
    stage.consume(recorder)
    wait_until(lambda: recorder.begun, what="the first message")
    try:
        told = lag_of(typed, "orders", "g")
        assert told["lag"] == 2
        assert [one["stuck"] for one in told["partitions"]] == [None, None]
    finally:
        go_on.set()


def test_what_an_undrained_parent_hides_counts_under_the_version_that_made_it(
    world: World, database: Database, typed: Commands
) -> None:
    publish(world, "a")
    member = ManualMember(database, world.key_prefix, "orders")
    member.consume(1, 5)
    split(runtime_of(database, world.key_prefix), "orders", 1, at=[500])
    publish(world, "b")

    told = lag_of(typed, "orders", "ledger")
    left = 2 * KEYS - 5
    sums = [(one["made_in"], one["partitions"], one["lag"], one["unknown"]) for one in told["versions"]]
    assert sums == [(1, 1, left, 0), (2, 2, 2 * KEYS, 0)]
    assert told["lag"] == left + 2 * KEYS
    found = by_partition(told)
    assert {number: (one["state"], one["behind"]) for number, one in found.items()} == {
        1: ("readable", []), 2: ("hidden", [1]), 3: ("hidden", [1]),
    }  # fmt: skip
    assert found[1]["stuck"] is None
    assert [found[number]["stuck"]["reason"] for number in (2, 3)] == ["hidden", "hidden"]
    assert (found[1]["lag"], found[2]["lag"] + found[3]["lag"]) == (left, 2 * KEYS)
    said = typed.text("group", "show", "orders", "ledger")
    assert facts_of(said)["version"] == "1 of 2"
    assert said.count("hidden behind 1") == 2

    member.consume_all()
    shown = typed.lines("group", "show", "orders", "ledger")[0]
    assert (shown["version"], shown["topic_version"], shown["lag"]) == (2, 2, 0)
    assert {one["partition"]: one["state"] for one in shown["partitions"]} == {
        1: "drained",
        2: "readable",
        3: "readable",
    }
    assert [one["made_in"] for one in lag_of(typed, "orders", "ledger")["versions"]] == [2]


def test_an_owner_that_is_silent_is_told_and_then_marked_as_gone(
    world: World, database: Database, typed: Commands
) -> None:
    member = ManualMember(database, world.key_prefix, "orders")
    join(database, group_id=member.group_id, member_id="brief", lease_s=0.3)
    world.rows("UPDATE mqlayer.member SET leaving = true WHERE member_id = 'hand'")
    world.rows("DELETE FROM mqlayer.assignment")
    join(database, group_id=member.group_id, member_id="brief", lease_s=0.3)
    publish(world, "a")
    wait_until(lambda: states(typed)["brief"] == ("gone", 1), what="the lease to be over")
    (one,) = lag_of(typed, "orders", "ledger")["partitions"]
    assert (one["owner"], one["stuck"]["reason"]) == ("brief", "lease_over")
    assert one["stuck"]["since"] is not None
    assert "a member's next heartbeat" in one["stuck"]["detail"]

    world.rows("UPDATE mqlayer.member SET leaving = false WHERE member_id = 'hand'")
    send_heartbeat(database, member.session, lease_s=600)
    assert states(typed) == {"brief": ("gone", 0), "hand": ("running", 1)}
    assert [line["members"] for line in typed.lines("group", "list")] == [1]
    member.consume(1, 3)
    (one,) = lag_of(typed, "orders", "ledger")["partitions"]
    assert (one["owner"], one["lag"], one["stuck"]) == ("hand", 2 * KEYS - 3, None)
    said = typed.text("group", "members", "orders", "ledger").splitlines()
    assert said[1].split()[:2] == ["brief", "gone"]


def states(typed: Commands) -> dict[str, tuple[str, int]]:
    rows = typed.lines("group", "members", "orders", "ledger")
    return {row["member"]: (row["state"], row["partitions"]) for row in rows}


def test_members_and_owners_are_shown_as_postgres_and_the_node_know_them(
    world: World, database: Database, typed: Commands
) -> None:
    member = ManualMember(database, world.key_prefix, "orders")
    (row,) = typed.lines("group", "members", "orders", "ledger")
    assert 590 < row["lease_left_s"] <= 600
    ((host, pid, joined_at),) = world.rows("SELECT host, pid, joined_at FROM mqlayer.member")
    assert (row["member"], row["host"], row["pid"], row["leaving"]) == ("hand", host, pid, False)
    assert datetime.fromisoformat(row["joined_at"]) == joined_at

    publish(world, "a")
    (one,) = lag_of(typed, "orders", "ledger")["partitions"]
    assert (one["owner"], one["stuck"]["reason"]) == ("hand", "not_taken")
    member.consume(1, 1)
    (one,) = lag_of(typed, "orders", "ledger")["partitions"]
    assert (one["stuck"], one["target"]) == (None, None)

    world.rows("UPDATE mqlayer.member SET leaving = true")
    world.rows("UPDATE mqlayer.assignment SET target = 'other'")
    (row,) = typed.lines("group", "members", "orders", "ledger")
    assert (row["state"], row["leaving"]) == ("leaving", True)
    (one,) = typed.lines("group", "show", "orders", "ledger")[0]["partitions"]
    assert (one["owner"], one["target"]) == ("hand", "other")


def test_a_node_that_is_away_is_told_and_the_others_are_counted(
    database_dsn: str, redis_url: str, start_redis: StartRedis, key_prefix: str, database: Database, typed: Commands
) -> None:
    server = start_redis()
    world = World(database_dsn, key_prefix, [redis_url, server.url])
    world.add_topic("orders", partitions=2)
    publish(world, "a", 40)
    member = ManualMember(database, key_prefix, "orders")
    for partition in (1, 2):
        member.position(partition)
    whole = lag_of(typed, "orders", "ledger")
    assert whole["lag"] == 40
    server.kill()

    told = lag_of(typed, "orders", "ledger")
    found = by_partition(told)
    assert found[1]["lag"] == told["lag"] == by_partition(whole)[1]["lag"] > 0
    assert (found[2]["lag"], found[2]["committed"], found[2]["head"]) == (None, None, None)
    assert found[2]["stuck"]["reason"] == "node_away"
    assert (found[2]["owner"], found[1]["stuck"]) == ("hand", None)
    assert list(told["unreachable"]) == ["node-2"]
    assert told["versions"][0]["unknown"] == 1
    (line,) = typed.lines("group", "list", "orders")
    assert (line["lag"], line["unreachable"]) == (told["lag"], "node-2")
    result = typed("group", "show", "orders", "ledger")
    assert result.exit_code == 0
    assert "node node-2 does not answer" in result.stderr
    said = typed.text("group", "lag", "orders", "ledger").splitlines()
    assert said[0].startswith(f"group ledger: at least {told['lag']} messages not settled")
    assert said[0].endswith("; not asked: partition 2")
    assert result.stdout.splitlines()[-1].split()[-1] == "?"


def test_a_seek_makes_what_was_settled_lag_again_before_anybody_takes_it(
    world: World, database: Database, typed: Commands
) -> None:
    publish(world, "a")
    member = ManualMember(database, world.key_prefix, "orders")
    member.consume_all()
    assert lag_of(typed, "orders", "ledger")["lag"] == 0
    with closing(RouteCache(database)) as routes:
        plan = planned_seek(
            runtime_of(database, world.key_prefix), routes, topic="orders", name="ledger", to="earliest"
        )
    apply_seek(runtime_of(database, world.key_prefix, actor="a test"), plan)
    shown = typed.lines("group", "show", "orders", "ledger")[0]
    (one,) = shown["partitions"]
    assert (shown["seek"], shown["lag"], one["committed"], one["head"]["offset"]) == (1, 2 * KEYS, 1, 1)
    member.consume(1, 4)
    assert lag_of(typed, "orders", "ledger")["lag"] == 2 * KEYS - 4


def test_where_a_group_started_and_its_settings_are_shown(world: World, database: Database, typed: Commands) -> None:
    at = datetime(2026, 11, 1, tzinfo=UTC)
    ManualMember(database, world.key_prefix, "orders", "late", start="latest")
    ManualMember(database, world.key_prefix, "orders", "timed", start=at)
    assert [line["group"] for line in typed.lines("group", "list", "orders")] == ["late", "timed"]
    late, timed = (typed.lines("group", "show", "orders", name)[0] for name in ("late", "timed"))
    assert late["start"] == "latest"
    assert datetime.fromisoformat(timed["start"]) == at
    assert late["backoff_s"][:3] == [1, 5, 10]
    said = typed.text("group", "show", "orders", "late")
    assert facts_of(said)["start"] == "latest"
    assert facts_of(said)["backoff"].startswith("1 s, 5 s, 10 s, 30 s,")
    table = typed.text("group", "list").splitlines()
    assert table[0].split()[:3] == ["topic", "group", "state"]
    assert [line.split()[1] for line in table[1:]] == ["late", "timed"]


def test_looking_changes_nothing(world: World, database: Database, typed: Commands) -> None:
    publish(world, "a")
    member = ManualMember(database, world.key_prefix, "orders")
    member.consume(1, 3)
    before = everything(world)
    for words in (("list",), ("show", "orders", "ledger"), ("members", "orders", "ledger"), ("lag", "orders")):
        typed.text("group", *words)
    typed.text("key", "explain", "orders", "key-1", "--group", "ledger")
    assert everything(world) == before


def everything(world: World) -> list[Any]:
    """Return all keys of the nodes, and all rows that say how groups stand."""
    found: list[Any] = []
    with redis.Redis.from_url(world.urls[0]) as client:
        found += [(key, client.dump(key)) for key in sorted(client.scan_iter(f"{world.key_prefix}:*"))]
    for table in ("consumer_group", "member", "assignment", "drained", "audit"):
        found += world.rows(f"SELECT '{table}', t::text FROM mqlayer.{table} t ORDER BY 2")
    return found


def test_many_partitions_are_asked_in_one_write_to_each_node(
    database_dsn: str, start_redis: StartRedis, key_prefix: str, database: Database
) -> None:
    server = start_redis()
    world = World(database_dsn, key_prefix, [server.url])
    world.add_topic("orders", partitions=100)
    ManualMember(database, key_prefix, "orders")
    (node,) = load_nodes(database)
    with NodeConnection(node) as connection:
        connection.call([("CONFIG", "RESETSTAT")])
        (status,) = group_statuses(runtime_of(database, key_prefix), "orders", "ledger")
        stats, commands = (reply.decode() for reply in connection.call([("INFO", "stats"), ("INFO", "commandstats")]))
    assert len(status.partitions) == 100
    assert status.lag == 0
    assert "total_connections_received:1\r" in stats
    assert "cmdstat_evalsha:calls=100," in commands


def test_what_is_not_there_is_refused_with_what_to_do(world: World, database: Database, typed: Commands) -> None:
    for command in ("show", "members", "lag"):
        assert "mqlayer topic create nowhere" in typed.failure("group", command, "nowhere", "ledger")
        assert "those there are: mqlayer group list orders" in typed.failure("group", command, "orders", "ledger")
        assert "bad group name" in typed.failure("group", command, "orders", "No Group")
    assert "mqlayer topic create nowhere" in typed.failure("group", "list", "nowhere")
    assert "created by its first member" in typed.text("group", "list", "orders")
    assert "created by its first member" in typed.text("group", "lag", "orders")
    with pytest.raises(InvalidName):
        group_statuses(runtime_of(database, world.key_prefix), "")
