"""Messages from and to a terminal: `publish`, `peek` and `tail`."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mqlayer.inspect import StoredMessage, TopicReader
from mqlayer.postgres.database import Database
from mqlayer.postgres.rights import Right
from mqlayer.relay import relay_once
from tests.fixtures.commands import Commands
from tests.fixtures.forked_programs import start_python
from tests.fixtures.wait import wait_until
from tests.fixtures.worker_stores import UseStores
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

pytestmark = pytest.mark.world(by_commands=True)


def relayed(world: World) -> None:
    relay_once(world.settings(), limits=QUICK)


def bodies(lines: list[dict[str, Any]]) -> list[Any]:
    return [line["body"] for line in lines]


def test_what_is_published_is_seen_with_all_that_it_has(world: World, run: Commands) -> None:
    said = run.text("publish", "orders", "--key", "ann", "--body", "paid", "--header", "trace=a=b", "--tag", "vip")
    assert said == "a message of 4 bytes published to topic orders, key ann\n"
    relayed(world)
    (line,) = run.lines("peek", "orders")
    at = datetime.fromisoformat(line.pop("published_at"))
    assert datetime.now(UTC) - at < timedelta(minutes=1)
    assert line.pop("partition") in (1, 2)
    assert line.pop("message").endswith(":1")
    assert line == {
        "offset": 1,
        "key": "ann",
        "tags": ["vip"],
        "headers": {"trace": "a=b"},
        "reordered": False,
        "bytes": 4,
        "large_body": None,
        "body_is": "text",
        "body": "paid",
    }
    shown = run.text("peek", "orders").splitlines()
    assert shown[0].split() == ["published", "partition", "offset", "key", "body"]
    assert shown[1].split()[-4:] == [shown[1].split()[-4], "1", "ann", "paid"]


def test_a_body_comes_from_a_file_or_from_standard_input(world: World, run: Commands, tmp_path: Path) -> None:
    whole = tmp_path / "body"
    whole.write_bytes(b"\x00\xff\nsecond line")
    run.text("publish", "orders", "--key", "k", "--file", str(whole))
    run.text("publish", "orders", "--key", "k", typed="line one\nline two\n")
    relayed(world)
    assert [(one["body_is"], one["body"]) for one in run.lines("peek", "orders", "--key", "k")] == [
        ("hex", whole.read_bytes().hex(" ")),
        ("text", "line one\nline two\n"),
    ]


def test_lines_are_messages_with_the_keys_that_they_begin_with(world: World, run: Commands) -> None:
    text = "".join(f"key-{number % 3}\tbody {number}\n" for number in range(1_200)) + "no key"
    assert run.text("publish", "orders", "--lines", typed=text) == "1201 messages published to topic orders\n"
    relayed(world)
    of_one = run.lines("peek", "orders", "--key", "key-1", "--limit", "1000")
    assert bodies(of_one) == [f"body {number}" for number in range(1, 1_200, 3)]
    assert world.rows("SELECT count(*)::int FROM mqlayer_app.outbox WHERE key IS NULL") == [(1,)]


def test_a_message_may_have_an_end_of_its_own(world: World, run: Commands) -> None:
    run.text("publish", "orders", "--key", "k", "--body", "x", "--expires-after", "1.5", "--header", "a=b")
    assert world.rows("SELECT headers::jsonb ->> 'mq-ttl', headers::jsonb ->> 'a' FROM mqlayer_app.outbox") == [
        ("1500", "b")
    ]


def test_a_dedup_id_publishes_once(world: World, run: Commands) -> None:
    once = ("publish", "orders", "--key", "k", "--body", "x", "--dedup-id", "d-1")
    assert "published to topic" in run.text(*once)
    assert run.text(*once) == "key k had a message with dedup id d-1 already: nothing was published\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("publish", "orders", "--body", "x", "--header", "odd"), "'odd' is no header: say NAME=VALUE"),
        (("publish", "nowhere", "--body", "x"), "unknown topic 'nowhere'"),
        (("publish", "orders", "--body", "x", "--expires-after", "0"), "lives for 0.001 to"),
        (("publish", "orders", "--header", "mq-ttl=9", "--expires-after", "9"), "leave out --expires-after"),
        (("publish", "orders", "--lines", "--key", "k"), "choose one"),
        (("peek", "orders", "--offset", "3"), "--offset goes with --partition"),
        (("peek", "orders", "--partition", "77"), "unknown partition 77: see those that there are"),
        (("peek", "nowhere"), "unknown topic 'nowhere'"),
        (("peek", "orders", "--since", "yesterday"), "'yesterday' is no time"),
        (("tail", "orders", "--since", "2026-11-21T09:30:00"), "has no zone"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(
    world: World, run: Commands, words: tuple[str, ...], said: str
) -> None:
    assert said in run.failure(*words)


def test_without_a_start_the_newest_are_shown_oldest_first(world: World, run: Commands) -> None:
    world.publish(50, keys=5)
    relayed(world)
    for number in range(3):
        world.publish(1, tag=f"newest-{number}")
        relayed(world)
    assert len(run.lines("peek", "orders")) == 10
    assert bodies(run.lines("peek", "orders", "--limit", "3")) == ["newest-0-0", "newest-1-0", "newest-2-0"]
    assert run.text("peek", "orders", "--key", "never used") == "no message is there\n"


def test_an_offset_or_a_time_says_where_to_begin(world: World, run: Commands) -> None:
    world.publish(20, keys=1)
    relayed(world)
    (partition,) = {record.partition for record in world.records()}
    begin = ("peek", "orders", "--partition", str(partition))
    assert bodies(run.lines(*begin, "--offset", "18")) == ["m-17", "m-18", "m-19"]
    assert bodies(run.lines(*begin, "--offset", "1", "--limit", "2")) == ["m-0", "m-1"]
    assert run.lines("peek", "orders", "--since", (datetime.now(UTC) + timedelta(hours=1)).isoformat()) == []
    assert len(run.lines("peek", "orders", "--since", "2020-01-01T00:00:00+00:00", "--limit", "100")) == 20


def test_a_key_is_followed_over_a_split(world: World, run: Commands) -> None:
    """Messages before and behind a split come in order, whichever partition they are in."""
    world.publish(40, keys=4, tag="before")
    relayed(world)
    with Database(world.dsn) as database:
        for partition in (1, 2):
            split(runtime_of(database, world.key_prefix), "orders", partition)
    world.publish(40, keys=4, tag="behind")
    relayed(world)
    for key in range(4):
        lines = run.lines("peek", "orders", "--key", f"key-{key}", "--limit", "100")
        numbers = range(key, 40, 4)
        assert bodies(lines) == [f"{tag}-{number}" for tag in ("before", "behind") for number in numbers]


def test_a_follower_sees_what_comes_and_crosses_a_split(world: World, run: Commands) -> None:
    world.publish(5, tag="old")
    relayed(world)
    found: list[StoredMessage] = []
    with Database(world.dsn) as database:
        runtime = runtime_of(database, world.key_prefix)
        with TopicReader(runtime, "orders", start="latest") as reader:

            def follow() -> int:
                reader.refresh()
                found.extend(reader.read())
                return len(found)

            assert follow() == 0
            world.publish(40, keys=4, tag="new")
            relayed(world)
            wait_until(lambda: follow() == 40, what="the new ones")
            split(runtime, "orders", 1)
            world.publish(40, keys=4, tag="newer")
            relayed(world)
            wait_until(lambda: follow() == 80, what="those behind the split")
    for key in range(4):
        of_key = [one.body.decode() for one in found if one.key == f"key-{key}"]
        assert of_key == [f"{tag}-{number}" for tag in ("new", "newer") for number in range(key, 40, 4)]


def test_tail_prints_until_it_is_interrupted(world: World, tmp_path: Path) -> None:
    world.publish(3, keys=1, tag="old")
    relayed(world)
    output = tmp_path / "tail"
    with output.open("wb") as writes:
        words = ("tail", "orders", "--json", "--since", "2020-01-01T00:00:00+00:00")
        process = start_python("mqlayer", *words, env=world.environment(), stdout=writes)
    try:
        wait_until(lambda: len(output.read_text().splitlines()) == 3, timeout_s=60, what="the old ones")
        world.publish(2, keys=1, tag="new")
        relayed(world)
        wait_until(lambda: len(output.read_text().splitlines()) == 5, what="the new ones")
        process.send_signal(2)
        assert process.wait(30) in (0, 130)
    finally:
        process.kill()
    shown = [json.loads(line)["body"] for line in output.read_text().splitlines()]
    assert shown == ["old-0", "old-1", "old-2", "new-0", "new-1"]


def test_a_viewer_peeks_and_a_publisher_publishes(world: World, run: Commands, use_stores: UseStores) -> None:
    """Each with its one right; neither can do the other's."""
    world.publish(1)
    relayed(world)
    world.right = Right.VIEW
    use_stores(world.environment())
    assert len(run.lines("peek", "orders")) == 1
    assert "publish" in run.failure("publish", "orders", "--body", "x")
    world.right = Right.PUBLISH
    use_stores(world.environment())
    run.text("publish", "orders", "--body", "x")


def test_reading_disturbs_no_consumer_and_no_reader(world: World) -> None:
    world.publish(2_000, keys=50)
    relayed(world)
    counts: list[int] = []

    def look() -> None:
        with (
            Database(world.dsn) as database,
            TopicReader(runtime_of(database, world.key_prefix), "orders") as reader,
        ):
            seen = 0
            while not reader.at_end:
                seen += len(list(reader.read()))
            counts.append(seen)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [2_000] * 3
