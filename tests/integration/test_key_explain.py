"""`mqlayer key explain`: where a key is for a group, what it waits for, and what to run next."""

from __future__ import annotations

import shlex
from contextlib import closing
from typing import Any

import pytest

from mqlayer import Context
from mqlayer.domain.routing import lp_of
from mqlayer.errors import KeyTooLarge
from mqlayer.groups import GroupSettings, apply_seek, ensure_group, leave, planned_seek
from mqlayer.inspect import SCAN_LIMIT, explain_key
from mqlayer.postgres.database import Database
from mqlayer.relay import relay_once
from mqlayer.runtime.route_cache import RouteCache
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.manual_member import ManualMember
from tests.proof.route_ranges import range_of
from tests.proof.route_steps import merge, split
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

KEYS = 6

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


def explained(typed: Commands, key: str, group: str = "ledger") -> dict[str, Any]:
    """Return what `key explain` says."""
    (found,) = typed.lines("key", "explain", "orders", key, "--group", group)
    return found


def test_a_key_that_fails_is_explained_by_its_head_and_the_others_have_nothing_waiting(
    stage: Stage, typed: Commands
) -> None:
    def act(body: bytes, ctx: Context) -> None:
        if ctx.key == "key-0":
            raise RuntimeError

    stage.send_numbers(keys=4, each=10)
    recorder = Recorder(act)
    stage.consume(recorder, backoff_s=(300.0,), policy="block", settings=stage.settings(lease_s=20.0))
    wait_until(lambda: recorder.count() == 30, what="the other keys")
    wait_until(lambda: (explained(typed, "key-0", "g")["head"] or {}).get("attempts"), what="the attempt to be counted")
    wait_until(lambda: explained(typed, "key-1", "g")["head"] is None, what="what is settled to be known")

    lp = lp_of(b"key-0")
    partition = int(range_of(stage.route, lp).partition)
    found = explained(typed, "key-0", "g")
    assert (found["lp"], found["publishes_to"]) == (lp, partition)
    head = found["head"]
    assert (head["partition"], head["offset"], head["identity"], head["attempts"]) == (partition, 1, f"1:{lp}:1", 1)
    assert 290 < head["retry_in_s"] <= 300
    assert (found["behind_it"], found["cut"], found["hidden_behind"]) == (9, False, [])
    assert found["current"]["owner"] is not None
    assert found["run_next"].startswith("nothing: it is tried again at ")
    assert f"the log of member {found['current']['owner']} " in found["run_next"]

    said = typed.text("key", "explain", "orders", "key-0", "--group", "g").splitlines()
    assert said[0] == f"key key-0 of topic orders: LP {lp}, published to partition {partition} on node-1"
    assert said[2].split()[:2] == ["1", "…"]
    assert said[3].startswith(f"group g is in partition {partition}: owner {found['current']['owner']}, epoch ")
    assert said[4].startswith(f"head: partition {partition}, offset 1, message 1:{lp}:1, ")
    assert "1 failed attempt since" in said[4]
    assert said[5] == "behind it: 9 messages of the key"
    owner = found["current"]["owner"]
    assert said[6].startswith(f"partition {partition}: owner {owner}, is stuck: offset 1 failed once, its head is ")
    assert said[7] == f"run next: {found['run_next']}"

    other = explained(typed, "key-1", "g")
    assert (other["behind_it"], other["run_next"]) == (0, "nothing: no message of it waits")


@pytest.mark.full
def test_a_parked_key_is_not_said_to_go_on_where_nobody_can_try_it(stage: Stage, typed: Commands) -> None:
    """Of a paused group, of a paused topic, and of a group whose members are gone."""

    def act(body: bytes, ctx: Context) -> None:
        raise RuntimeError

    stage.send_numbers(keys=1, each=3)
    app = stage.consume(Recorder(act), backoff_s=(300.0,))
    wait_until(lambda: explained(typed, "key-0", "g")["parked"], what="the key to be parked")
    assert explained(typed, "key-0", "g")["run_next"].startswith("nothing: it is tried again at ")
    for resume in ("group resume orders g", "topic resume orders"):
        typed.text(*resume.replace("resume", "pause").split())
        assert explained(typed, "key-0", "g")["run_next"] == f"mqlayer {resume}  # it is paused"
        typed.text(*resume.split())
    assert app.stop()
    found = explained(typed, "key-0", "g")
    assert found["run_next"] == "mqlayer consume MODULE:APP  # no member of the group lives"
    assert "nobody owns it" in typed.text("key", "explain", "orders", "key-0", "--group", "g")


def test_a_dead_owner_is_not_shown_as_one(world: World, database: Database, typed: Commands) -> None:
    publish(world, "a")
    ManualMember(database, world.key_prefix, "orders").consume(1, 3)
    with closing(database), database.connection() as connection:
        connection.execute("UPDATE mqlayer.member SET lease_until = clock_timestamp() - interval '1 second'")
    said = typed.text("key", "explain", "orders", "key-5", "--group", "ledger")
    assert "group ledger is in partition 1: the lease of its owner hand is over" in said
    assert "run next: mqlayer consume MODULE:APP  # no member of the group lives" in said


@pytest.mark.full
def test_a_key_hidden_behind_an_undrained_parent_is_led_to_what_the_parent_waits_for(
    world: World, database: Database, typed: Commands
) -> None:
    publish(world, "a")
    member = ManualMember(database, world.key_prefix, "orders")
    member.consume(1, 2 * KEYS - 1)
    split(runtime_of(database, world.key_prefix), "orders", 1, at=[500])
    publish(world, "b")
    # What is left of the parent is the last message of the last key.
    found = explained(typed, "key-0")
    successor = found["publishes_to"]
    names = ("first_version", "last_version", "partition", "state", "visibility")
    crossed = [tuple(one[name] for name in names) for one in found["crossed"]]
    assert crossed == [(1, 1, 1, "sealed", "readable"), (2, None, successor, "open", "hidden")]
    assert found["current"]["partition"] == 1
    assert (found["head"]["partition"], found["head"]["key"], found["behind_it"]) == (successor, "key-0", 1)
    (parent,) = found["hidden_behind"]
    assert (parent["partition"], parent["lag"], parent["head"]["key"]) == (1, 1, f"key-{KEYS - 1}")
    command, why = found["run_next"].split("  # ")
    assert command == f"mqlayer key explain orders key-{KEYS - 1} --group ledger"
    assert why == "partition 1 waits for it"
    said = typed.text("key", "explain", "orders", "key-0", "--group", "ledger")
    assert f"hidden behind partition 1: 1 message left; owner hand, its head is offset {2 * KEYS}, key key-5" in said

    next_one = typed.text(*shlex.split(command)[1:])
    assert "run next: nothing: it is being handled" in next_one
    assert explained(typed, f"key-{KEYS - 1}")["hidden_behind"] == []
    member.consume(1, report=False)
    assert "its owner says so next" in explained(typed, "key-0")["run_next"]
    member.consume_all()
    after = explained(typed, "key-0")
    assert [one["visibility"] for one in after["crossed"]] == ["drained", "readable"]
    assert (after["current"]["partition"], after["run_next"]) == (successor, "nothing: no message of it waits")


@pytest.mark.full
@pytest.mark.world
def test_a_merged_partition_waits_for_the_parent_that_the_key_was_never_in(
    world: World, key_prefix: str, database: Database, typed: Commands
) -> None:
    publish(world, "a")
    member = ManualMember(database, key_prefix, "orders")
    key = next(f"key-{n}" for n in range(KEYS) if lp_of(b"key-%d" % n) < 512)
    merge(runtime_of(database, key_prefix), "orders", [1, 2])
    member.consume(1)
    publish(world, "b")
    member.position(2)
    found = explained(typed, key)
    assert [one["partition"] for one in found["crossed"]] == [1, 3]
    assert (found["current"]["partition"], found["head"]["partition"]) == (3, 3)
    assert [one["partition"] for one in found["hidden_behind"]] == [2]
    leave(database, member.session)
    assert explained(typed, key)["run_next"] == "mqlayer consume MODULE:APP  # no member of the group lives"


def test_a_node_that_is_away_hides_what_it_holds_and_is_named(
    database_dsn: str, start_redis: StartRedis, key_prefix: str, database: Database, typed: Commands
) -> None:
    server = start_redis()
    world = World(database_dsn, key_prefix, [server.url])
    world.add_topic("orders", partitions=1)
    member = ManualMember(database, key_prefix, "orders")
    member.position(1)
    assert explained(typed, "key-0")["run_next"] == "nothing: no message of it waits"
    server.kill()
    found = explained(typed, "key-0")
    assert (found["head"], found["not_searched"], found["current"]["stuck"]["reason"]) == (
        None,
        [1],
        "node_away",
    )
    assert found["run_next"].startswith("mqlayer node rearm node-1  # once it is back")
    said = typed.text("key", "explain", "orders", "key-0", "--group", "ledger")
    assert "partition 1 could not be searched: its node does not answer" in said


@pytest.mark.full
def test_the_search_ends_at_its_bound_and_says_so(stage: Stage, database: Database, typed: Commands) -> None:
    """Also over many calls, and with messages of the key on both sides of the bound."""
    keys = [key for key in (f"k{n}" for n in range(100)) if range_of(stage.route, lp_of(key.encode())).partition == 1]
    many, early, late = keys[:3]
    stage.send([(early, b"1"), *((many, b"2") for _ in range(SCAN_LIMIT - 2)), (early, b"3"), (late, b"4")])
    ManualMember(database, stage.prefix, "orders").position(1)
    found = explained(typed, early)
    assert (found["head"]["offset"], found["behind_it"], found["scanned"], found["cut"]) == (1, 1, SCAN_LIMIT, True)
    assert explained(typed, many)["behind_it"] == SCAN_LIMIT - 3
    beyond = explained(typed, late)
    assert (beyond["head"], beyond["cut"]) == (None, True)
    assert beyond["run_next"] == "mqlayer group lag orders ledger  # none of its messages is among the first 10,000"
    said = typed.text("key", "explain", "orders", late, "--group", "ledger")
    assert f"the search ended after {SCAN_LIMIT} offsets" in said


def test_a_seek_brings_back_what_was_settled(world: World, database: Database, typed: Commands) -> None:
    publish(world, "a")
    member = ManualMember(database, world.key_prefix, "orders")
    member.consume_all()
    assert explained(typed, "key-3")["head"] is None
    with closing(RouteCache(database)) as routes:
        plan = planned_seek(
            runtime_of(database, world.key_prefix), routes, topic="orders", name="ledger", to="earliest"
        )
    apply_seek(runtime_of(database, world.key_prefix, actor="a test"), plan)
    found = explained(typed, "key-3")
    assert (found["head"]["key"], found["head"]["age_s"] < 60, found["behind_it"]) == ("key-3", True, 1)
    assert found["run_next"] == "nothing: hand is about to take partition 1"
    typed.text("group", "pause", "orders", "ledger")
    found = explained(typed, "key-3")
    assert found["current"]["stuck"]["reason"] == "paused"
    assert found["run_next"] == "mqlayer group resume orders ledger  # it is paused"


def test_what_is_not_there_is_refused_with_what_to_do(world: World, database: Database, typed: Commands) -> None:
    words = ("key", "explain")
    assert "mqlayer topic create nowhere" in typed.failure(*words, "nowhere", "k", "--group", "g")
    assert "mqlayer group list orders" in typed.failure(*words, "orders", "k", "--group", "nobody")
    with pytest.raises(KeyTooLarge):
        explain_key(runtime_of(database, world.key_prefix), "orders", "k" * 513, "ledger")
    with closing(RouteCache(database)) as routes:
        ensure_group(
            runtime_of(database, world.key_prefix), routes, topic="orders", name="ledger", settings=GroupSettings()
        )
    found = explained(typed, "key's \u00fc")
    assert found["key"] == "key's \u00fc"
    said = typed.text("key", "explain", "orders", "\x1b[31m", "--group", "ledger")
    assert said.startswith('key "\\u001b[31m" of topic orders: LP ')
    assert (found["current"]["owner"], found["run_next"]) == (None, "nothing: no message of it waits")
    publish(world, "a")
    assert explained(typed, "key-0")["run_next"] == "mqlayer consume MODULE:APP  # no member of the group lives"
