"""The commands of operators, as they are typed: migrate, node, topic, relay, trim, outbox."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
import redis
from psycopg.conninfo import make_conninfo

from mqlayer.redis.keys import partition_keys
from tests.fixtures.commands import Commands
from tests.fixtures.forked_programs import start_python
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.world import World

pytestmark = pytest.mark.world(by_commands=True)
empty = pytest.mark.world(by_commands=True, empty=True)


@empty
def test_migrating_tells_its_steps_and_then_that_there_is_nothing_to_do(run: Commands) -> None:
    assert run.text("migrate", "--schema", "control").splitlines()[0].startswith("control 0001 ")
    assert run.text("migrate").splitlines()[0].startswith("application 0001 ")
    assert run.text("migrate") == "nothing to do\n"


def test_printed_sql_needs_no_server(run: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQLAYER_DSN", "postgresql://nobody@127.0.0.1:1/nowhere")
    assert "CREATE TABLE mqlayer.node" in run.text("migrate", "--sql", "--schema", "control")
    assert "CREATE TABLE mqlayer_app.outbox" in run.text("migrate", "--sql")


def test_a_role_that_was_granted_publishes(world: World, run: Commands) -> None:
    world.rows("DROP ROLE IF EXISTS cli_publisher")
    world.rows("CREATE ROLE cli_publisher LOGIN")
    try:
        assert "cli_publisher may publish" in run.text("grant", "publish", "cli_publisher")
        with psycopg.connect(make_conninfo(world.dsn, user="cli_publisher")) as connection:
            connection.execute("SELECT mqlayer_app.publish_v1('orders', 'a', 'b')")
    finally:
        world.rows("DROP OWNED BY cli_publisher")
        world.rows("DROP ROLE cli_publisher")


def test_nodes_are_registered_listed_and_armed(world: World, run: Commands, redis_url: str) -> None:
    assert "node-1 is " in run.text("node", "register", "node-1", redis_url)
    (node,) = run.lines("node", "list")
    assert (node["name"], node["address"]) == ("node-1", redis_url)
    assert "node-1" in run.text("node", "list")
    assert "is armed" in run.text("node", "rearm", "node-1")
    assert "node 'nobody'" in run.failure("node", "rearm", "nobody")


def test_a_node_gets_another_address_which_is_refused_where_it_holds_nothing(
    world: World, run: Commands, start_redis: StartRedis
) -> None:
    """Case 83: never silently empty. Only an operator's word has a node begin anew."""
    other = start_redis()
    assert "holds none of the partitions" in run.failure("node", "set", "node-1", "--url", other.url)
    (node,) = run.lines("node", "list")
    assert node["address"] != other.url
    said = run.text("node", "set", "node-1", "--url", other.url, "--empty", "--accept-loss")
    assert said.startswith(f"node-1 is {other.url}; ")
    (node,) = run.lines("node", "list")
    assert node["address"] == other.url
    with redis.Redis.from_url(other.url) as client:
        assert client.hget(partition_keys(world.key_prefix, 1).meta.decode(), "state") == b"open"
    world.publish(20)
    assert run.text("relay", "--once") == "20 messages relayed\n"
    assert "node 'nobody'" in run.failure("node", "set", "nobody", "--url", other.url)


def test_a_run_of_before_is_armed_by_an_operators_word_only(world: World, run: Commands) -> None:
    world.rows("UPDATE mqlayer.node SET former_runs = ARRAY[armed_run_id], armed_run_id = repeat('0', 40)")
    assert "--former" in run.failure("node", "rearm", "node-1")
    assert "is armed" in run.text("node", "rearm", "node-1", "--former")


def test_an_emptied_redis_that_another_system_shares_is_armed_by_an_operators_word(
    world: World, run: Commands, start_redis: StartRedis
) -> None:
    """Partitions of the same numbers under another prefix look like a wrong prefix of ours."""
    own = start_redis()
    run.text("node", "set", "node-1", "--url", own.url, "--empty", "--accept-loss")
    with redis.Redis.from_url(own.url) as client:
        for partition in (1, 2):
            ours = partition_keys(world.key_prefix, partition).meta.decode()
            client.rename(ours, partition_keys("another", partition).meta.decode())
    assert "--empty" in run.failure("node", "rearm", "node-1")
    assert "is armed" in run.text("node", "rearm", "node-1", "--empty")


def test_a_node_is_given_up_only_when_that_is_said(world: World, run: Commands, start_redis: StartRedis) -> None:
    lost = start_redis()
    run.text("node", "set", "node-1", "--url", lost.url, "--empty", "--accept-loss")
    # That of node 1 before holds its partitions.
    assert "one Redis is one node" in run.failure("node", "register", "node-2", world.urls[0])
    run.text("node", "register", "node-2", start_redis().url)
    world.publish(20)
    lost.kill()
    assert "nothing was changed: --yes" in run.text("node", "lost", "node-1")
    said = run.text("node", "lost", "node-1", "--yes").splitlines()
    assert said[0] == "2 partitions moved, 0 sealed ones made anew"
    assert run.text("relay", "--once") == "20 messages relayed\n"


@empty
def test_topics_are_created_and_listed(world: World, run: Commands) -> None:
    assert run.text("topic", "create", "orders", "--partitions", "2") == "orders has 2 partitions, route version 1\n"
    (topic,) = run.lines("topic", "list")
    assert (topic["topic"], topic["partitions"], topic["version"]) == ("orders", 2, 1)
    assert "exists with" in run.failure("topic", "create", "orders", "--body-limit", "7")


def test_who_acted_is_in_the_audit(world: World, run: Commands) -> None:
    (act,) = world.rows("SELECT actor FROM mqlayer.audit WHERE act = 'topic create'")
    assert act[0].count("@") == 1


@empty
def test_lists_that_are_empty_say_what_to_do(run: Commands) -> None:
    run.text("migrate")
    assert "mqlayer node register" in run.text("node", "list")
    assert "mqlayer topic create" in run.text("topic", "list")
    assert run.lines("topic", "list") == []


def test_one_pass_of_the_relay_by_hand(world: World, run: Commands) -> None:
    world.publish(20)
    assert run.text("relay", "--once") == "20 messages relayed\n"
    assert world.whole()


def test_rows_quarantined_are_listed_and_tried_again(world: World, run: Commands) -> None:
    assert run.text("outbox", "quarantine", "list") == "nothing is quarantined\n"
    world.publish(1)
    world.rows("UPDATE mqlayer_app.outbox SET key = repeat('x', 600)")
    assert run.text("relay", "--once") == "0 messages relayed\n"
    (row,) = run.lines("outbox", "quarantine", "list")
    assert (row["topic"], row["seq"]) == ("orders", 1)
    assert "600 bytes" in row["reason"]
    world.rows("UPDATE mqlayer_app.outbox SET key = 'repaired'")
    assert "tried again from seq 1" in run.text("outbox", "quarantine", "retry", "orders", str(row["lp"]))
    assert run.text("relay", "--once") == "1 message relayed\n"
    assert run.text("outbox", "quarantine", "retry") == "nothing is quarantined\n"


def test_rows_that_were_passed_over_are_listed_published_anew_and_discarded(world: World, run: Commands) -> None:
    world.add_topic("loose", partitions=1, strategy="best_effort")
    world.publish(2, topic="loose")
    world.rows("UPDATE mqlayer_app.outbox SET key = repeat('x', 600)")
    assert run.text("relay", "--once") == "2 messages relayed\n"
    first, second = run.lines("outbox", "quarantine", "list")
    assert (first["topic"], first["seq"], "600 bytes" in first["reason"]) == ("loose", 1, True)
    assert "limit is 512" in run.failure("outbox", "quarantine", "retry")
    assert "is discarded" in run.text("outbox", "quarantine", "discard", str(first["number"]), "--yes")
    world.rows("UPDATE mqlayer_app.voided SET key = 'repaired' WHERE ended IS NULL")
    assert f"row {second['number']} is published anew" in run.text("outbox", "quarantine", "retry", "loose")
    assert run.text("relay", "--once") == "1 message relayed\n"
    assert run.text("outbox", "quarantine", "retry") == "nothing is quarantined\n"


def test_rotation_tells_of_every_slot(world: World, run: Commands) -> None:
    lines = run.text("outbox", "rotate").splitlines()
    assert [line.split(":")[0] for line in lines] == [f"slot {number}" for number in range(4)]


def test_an_outbox_is_renewed_only_when_that_is_confirmed(world: World, run: Commands) -> None:
    world.publish(3)
    assert "nothing was changed: --yes does this" in run.text("outbox", "renew")
    assert len(world.published()) > 0
    run.text("outbox", "renew", "--yes")
    assert len(world.published()) == 0
    assert "0 messages" in run.text("outbox", "adopt", "--yes")


def test_trimming_by_hand_tells_what_it_dropped(world: World, run: Commands) -> None:
    assert run.text("trim") == "0 records dropped from 0 partitions\n"
    assert run.text("trim", "orders") == "0 records dropped from 0 partitions\n"


@pytest.mark.parametrize(
    "words",
    [("migrate",), ("node", "list"), ("topic", "list"), ("trim",), ("outbox", "rotate"), ("route", "show", "x")],
)
def test_a_server_that_is_away_is_one_line_with_its_address_and_without_its_password(
    run: Commands, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MQLAYER_DSN", "postgresql://somebody:s3cret@127.0.0.1:1/nowhere")
    line = run.failure(*words)
    assert "127.0.0.1:1" in line
    assert "s3cret" not in line


@empty
def test_a_missing_schema_is_one_line_that_says_what_to_run(run: Commands) -> None:
    assert "mqlayer migrate" in run.failure("topic", "list")


def test_without_any_address_the_commands_say_which_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, run: Commands
) -> None:
    monkeypatch.delenv("MQLAYER_DSN")
    monkeypatch.chdir(tmp_path)
    assert "MQLAYER_DSN" in run.failure("topic", "list")


def test_a_relay_process_says_when_it_works(world: World, tmp_path: Any) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = start_python("mqlayer", "relay", env=world.environment(), stderr=output)
    try:
        wait_until(lambda: "relay_started" in log.read_text(), timeout_s=60, what="the relay to start")
    finally:
        process.terminate()
    assert process.wait(timeout=30) == 0
