"""Versions of entities: events are applied as 1, 2, 3 …, once each; what comes early is held, what is missing told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

from mqlayer import Context, Event, Receiver, VersionedEvent, VersionGap, Versions
from mqlayer.domain.message import Identity
from mqlayer.errors import InvalidInput, InvalidName, TransactionConflict, VersionsFull
from mqlayer.events import on_event, remove_hook
from mqlayer.idempotency import held_versions, set_version, version_gaps, watch_versions
from mqlayer.postgres.database import Database
from tests.fixtures.consumers import StartStage
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

Connection = psycopg.Connection[Any]


class Message(NamedTuple):
    """An event as a receiver or a handler would bring it."""

    body: bytes
    identity: Identity
    headers: dict[str, str] = {}  # noqa: RUF012 - nobody writes to it


def event(version: int, body: bytes | None = None, **headers: str) -> Message:
    return Message(b"v%d" % version if body is None else body, Identity(3, 512, version), headers)


class Entity:
    """One entity whose events are taken, each in a transaction of its own, and what was applied."""

    def __init__(self, dsn: str, name: str = "e", **limits: Any) -> None:
        self.dsn, self.name = dsn, name
        self.versions = Versions("orders", **limits)
        self.applied: list[int] = []

    def bring(self, version: int, body: bytes | None = None, **headers: str) -> list[int]:
        """Take an event; return what was applied with it."""
        with kept_session(self.dsn) as connection:
            due = self.versions.take(connection, event(version, body, **headers), entity=self.name, version=version)
        found = [one.version for one in due]
        self.applied += found
        return found


@pytest.fixture
def entity(database_dsn: str) -> Entity:
    return Entity(database_dsn)


@pytest.fixture
def events() -> Iterator[list[Event]]:
    found: list[Event] = []
    hook = on_event(found.append)
    yield found
    remove_hook(hook)


def make_late(database: Database, seconds: float) -> None:
    """Let the database's clock be so much later, for all that is held."""
    with database.connection() as connection:
        connection.execute(
            "UPDATE mqlayer_app.entity_version SET alarm_at = alarm_at - make_interval(secs => %s), "
            "missing_since = missing_since - make_interval(secs => %s)",
            (seconds, seconds),
        )


def test_two_one_three_is_applied_as_one_two_three(entity: Entity) -> None:
    """Case 78."""
    assert entity.bring(2) == []
    assert entity.bring(1) == [1, 2]
    assert entity.bring(3) == [3]


def test_repeated_versions_are_dropped_whether_applied_or_held(entity: Entity) -> None:
    """Case 78."""
    assert [entity.bring(version) for version in (2, 2, 1, 1, 2, 3, 3, 0)] == [[], [], [1, 2], [], [], [3], [], []]


@pytest.mark.parametrize("seed", range(3))
def test_any_arrival_is_applied_in_order_and_once(entity: Entity, seed: int) -> None:
    """Case 78: shuffled, repeated, and with several holes at a time."""
    rng = random.Random(seed)
    arrival = [*range(1, 21), *rng.choices(range(1, 21), k=10)]
    rng.shuffle(arrival)
    for version in arrival:
        entity.bring(version)
    assert entity.applied == list(range(1, 21))
    with kept_session(entity.dsn) as connection:
        assert connection.execute("SELECT sum(messages), sum(bytes) FROM mqlayer_app.held_total").fetchone() == (0, 0)
        row = connection.execute(
            "SELECT version, held_messages, held_bytes, missing_since, alarm_at FROM mqlayer_app.entity_version"
        ).fetchone()
    assert row == (20, 0, 0, None, None)


def test_what_was_held_comes_as_it_was_sent(entity: Entity, database_dsn: str) -> None:
    entity.bring(2, b"\x00\xff", colour="blue")
    with kept_session(database_dsn) as connection:
        first, second = entity.versions.take(connection, event(1), entity="e", version=1)
    assert first == VersionedEvent("e", 1, b"v1", {}, "3:512:1", held=False)
    assert second == VersionedEvent("e", 2, b"\x00\xff", {"colour": "blue"}, "3:512:2", held=True)


def test_a_transaction_that_rolls_back_took_nothing(entity: Entity, database_dsn: str) -> None:
    entity.bring(2)
    with kept_session(database_dsn) as connection:
        assert len(entity.versions.take(connection, event(1), entity="e", version=1)) == 2
        entity.versions.take(connection, event(4), entity="e", version=4)
        connection.rollback()
    assert entity.bring(1) == [1, 2]
    assert entity.bring(3) == [3]


def test_events_of_one_entity_that_come_at_once_take_turns(entity: Entity, database_dsn: str) -> None:
    """Twice each, from many connections: every version is applied once, in order."""
    with kept_session(database_dsn) as connection:
        connection.execute("CREATE TABLE sink (position bigserial, version int)")

    def bring(version: int) -> None:
        with kept_session(database_dsn) as connection:
            for due in entity.versions.take(connection, event(version), entity="e", version=version):
                connection.execute("INSERT INTO sink (version) VALUES (%s)", (due.version,))

    arrival = [*range(1, 31)] * 2
    random.Random(7).shuffle(arrival)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(bring, arrival))
    with kept_session(database_dsn) as connection:
        rows = connection.execute("SELECT version FROM sink ORDER BY position").fetchall()
    assert [version for (version,) in rows] == list(range(1, 31))


def test_entities_and_names_stand_apart(database_dsn: str) -> None:
    a, b = Entity(database_dsn, "a"), Entity(database_dsn, "b")
    other = Entity(database_dsn, "a")
    other.versions = Versions("invoices", first=0)
    assert a.bring(2) == []
    assert b.bring(1) == [1]
    assert other.bring(1) == []
    assert other.bring(0) == [0, 1]
    assert a.bring(1) == [1, 2]


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_one_entity_holds_no_more_than_it_may(database_dsn: str) -> None:
    """Case 78: what finds no room is refused and stays where it is; what is missing always has room."""
    entity = Entity(database_dsn, held_messages=3)
    for version in (5, 3, 4):
        entity.bring(version)
    with pytest.raises(VersionsFull, match="version 6 came while 1 is missing: see `mqlayer versions gaps orders`"):
        entity.bring(6)
    assert entity.bring(3) == []
    assert entity.bring(1) == [1]
    assert entity.bring(2) == [2, 3, 4, 5]
    assert entity.bring(6) == [6]


def test_bytes_are_bounded_as_well(database_dsn: str) -> None:
    entity = Entity(database_dsn, held_bytes=1_000)
    entity.bring(2, b"x" * 900)
    with pytest.raises(VersionsFull) as refused:
        entity.bring(3, b"x" * 200)
    assert refused.value.scope == "entity"
    entity.bring(4, b"x" * 50)
    assert entity.bring(1) == [1, 2]


@pytest.mark.parametrize("limits", [{"all_messages": 4}, {"all_bytes": 4 * len(b"v2{}")}])
def test_all_entities_together_are_bounded(database_dsn: str, limits: dict[str, int]) -> None:
    entities = [Entity(database_dsn, f"e{number}", **limits) for number in range(5)]
    for entity in entities[:4]:
        entity.bring(2)
    with pytest.raises(VersionsFull) as refused:
        entities[4].bring(2)
    assert refused.value.scope == "all"
    assert entities[0].bring(1) == [1, 2]
    assert entities[4].bring(2) == []


# -- the alarm ---------------------------------------------------------------------------------------------------------


def test_a_missing_version_is_an_alarm_after_the_limit(entity: Entity, database: Database, events: list[Event]) -> None:
    """Case 78: by the database's clock; told once, and again after an hour while it lasts."""
    entity.bring(2)
    entity.bring(3)
    make_late(database, 30)
    assert watch_versions(database) == 0
    make_late(database, 31)
    assert watch_versions(database) == 1
    assert events == [Event("version_gap", topic="", group="", cause="orders", count=2)]
    assert watch_versions(database) == 0
    make_late(database, 3500)
    assert watch_versions(database) == 0
    make_late(database, 101)
    assert watch_versions(database) == 1
    assert entity.bring(1) == [1, 2, 3]
    make_late(database, 1e6)
    assert watch_versions(database) == 0
    assert len(events) == 2


def test_the_next_hole_is_as_old_as_what_waits_behind_it(
    entity: Entity, database: Database, events: list[Event]
) -> None:
    entity.bring(2)
    entity.bring(4)
    with database.connection() as connection:
        connection.execute("UPDATE mqlayer_app.held_version SET held_at = held_at - interval '2 minutes'")
    # Taking 1 finds that 3 has been missing for two minutes.
    assert entity.bring(1) == [1, 2]
    assert [one.cause for one in events] == ["orders"]
    (gap,) = version_gaps(database, "orders")
    assert (gap.missing, gap.first_held, gap.held, gap.overdue) == (3, 4, 1, True)
    assert gap.missing_s > 119


def test_whoever_takes_a_later_event_tells_too(database_dsn: str, database: Database, events: list[Event]) -> None:
    gaps: list[VersionGap] = []

    def hear(gap: VersionGap) -> None:
        gaps.append(gap)
        raise RuntimeError("a hook's own")

    entity = Entity(database_dsn, gap_s=10.0, on_gap=hear)
    entity.bring(2)
    make_late(database, 11)
    assert entity.bring(3) == []
    ((name, missing, held),) = [(gap.entity, gap.missing, gap.held) for gap in gaps]
    assert (name, missing, held) == ("e", 1, 2)
    assert [one.kind for one in events] == ["version_gap"]
    entity.bring(4)
    assert watch_versions(database) == 0
    assert len(gaps) == 1


def test_two_watches_at_once_tell_each_gap_once(database_dsn: str, database: Database, events: list[Event]) -> None:
    for number in range(40):
        Entity(database_dsn, f"e{number}").bring(2)
    make_late(database, 61)
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda _: watch_versions(database), range(4))) == 40
    assert len(events) == 40


# -- what operators say ------------------------------------------------------------------------------------------------


def say(database: Database, version: int | None, **more: Any) -> int:
    return set_version(
        runtime_of(database, application=database, actor="test"),
        name="orders",
        entity="e",
        version=version,
        reason="lost",
        **more,
    )


def test_a_version_that_will_never_come_is_passed_over(entity: Entity, database: Database, database_dsn: str) -> None:
    """The next event takes what is due by that; or a program that asks."""
    for version in (3, 4, 6):
        entity.bring(version)
    assert [(one.version, one.origin, one.size) for one in held_versions(database, "orders", "e")] == [
        (3, "3:512:3", 4), (4, "3:512:4", 4), (6, "3:512:6", 4),
    ]  # fmt: skip
    assert say(database, 2) == 0
    assert version_gaps(database)[0].released
    assert entity.bring(8) == [3, 4]
    assert say(database, 5) == 0
    with kept_session(database_dsn) as connection:
        assert [one.version for one in entity.versions.take_released(connection)] == [6]
        assert entity.versions.take_released(connection) == []
    assert entity.bring(7) == [7, 8]
    with database.connection() as connection:
        rows = connection.execute("SELECT actor, object, facts->>'reason' FROM mqlayer.audit").fetchall()
    assert rows[-1] == ("test", "orders/e", "lost")


@pytest.mark.parametrize("again", [3, 4])
def test_a_released_event_that_comes_again_is_applied_once(entity: Entity, database: Database, again: int) -> None:
    entity.bring(3)
    entity.bring(4)
    say(database, 2)
    assert entity.bring(again) == [3, 4]
    assert entity.bring(5) == [5]


def test_held_events_can_be_dropped_and_entities_forgotten(entity: Entity, database: Database) -> None:
    for version in (2, 3, 9):
        entity.bring(version)
    assert say(database, 2) == 1
    assert entity.bring(4) == [3, 4]
    assert say(database, 4, drop_held=True) == 1
    assert version_gaps(database) == []
    assert entity.bring(5) == [5]
    entity.bring(7)
    assert say(database, None) == 1
    assert entity.bring(1) == [1]
    with database.connection() as connection:
        total = connection.execute("SELECT sum(messages), sum(bytes) FROM mqlayer_app.held_total").fetchone()
    assert total == (0, 0)


def test_an_entity_may_begin_in_the_middle(entity: Entity, database_dsn: str) -> None:
    with kept_session(database_dsn) as connection:
        assert entity.versions.set(connection, entity="e", version=41) == 0
    assert entity.bring(41) == []
    assert entity.bring(42) == [42]


# -- arguments and connections -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [-1, 2**63, True, 1.5, "1", None])
def test_what_is_no_version_is_refused(version: Any) -> None:
    with pytest.raises(InvalidInput, match="whole number"):
        Versions("orders").take(None, event(1), entity="e", version=version)


@pytest.mark.parametrize("limits", [{"held_messages": 0}, {"held_messages": 10_001}, {"all_bytes": 0}, {"gap_s": 0}])
def test_bounds_that_can_not_be_kept_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Versions("orders", **limits)


def test_names_are_checked_and_a_transaction_is_asked_for(entity: Entity, database_dsn: str) -> None:
    with pytest.raises(InvalidName):
        Versions("No Name")
    with kept_session(database_dsn, autocommit=True) as connection:
        with pytest.raises(InvalidInput, match="no transaction is open"):
            entity.versions.take(connection, event(1), entity="e", version=1)
        with connection.transaction(), pytest.raises(InvalidInput, match="1 to 512 bytes"):
            entity.versions.take(connection, event(1), entity="", version=1)


def test_a_conflict_under_a_snapshot_asks_for_the_whole_transaction(entity: Entity, database_dsn: str) -> None:
    with psycopg.connect(database_dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1")
        entity.bring(1)
        with pytest.raises(TransactionConflict):
            entity.versions.take(connection, event(2), entity="e", version=2)
    assert entity.bring(2) == [2]


def test_sqlalchemy_and_async_connections_will_do(entity: Entity, database_dsn: str) -> None:
    url = sqlalchemy.make_url(database_dsn).set(drivername="postgresql+psycopg")
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as core:
        assert entity.versions.take(core, event(2), entity="e", version=2) == []
    engine.dispose()

    async def bring() -> list[VersionedEvent]:
        async with await psycopg.AsyncConnection.connect(database_dsn) as connection:
            assert await entity.versions.atake(connection, event(3), entity="e", version=3) == []
        engine = create_async_engine(url)
        async with engine.begin() as core:
            due = await entity.versions.atake(core, event(1), entity="e", version=1)
        await engine.dispose()
        return due

    assert [(one.version, one.body) for one in asyncio.run(bring())] == [(1, b"v1"), (2, b"v2"), (3, b"v3")]


# -- in consumers ------------------------------------------------------------------------------------------------------


def test_an_unordered_group_applies_each_entity_in_order(start_stage: StartStage, redis_url: str) -> None:
    """Case 78: whatever fails, is repeated and comes side by side; a message that is held is settled."""
    stage = start_stage(redis_url)
    with kept_session(stage.dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE sink (position bigserial, entity text, version int)")
    versions = Versions("orders")

    def handle(body: bytes, ctx: Context) -> None:
        entity, version = body.decode().split(":")
        with kept_session(stage.dsn) as connection:
            for due in versions.take(connection, ctx, entity=entity, version=int(version)):
                row = due.body.decode().split(":")
                connection.execute("INSERT INTO sink (entity, version) VALUES (%s, %s)", row)
                assert due.origin.startswith("orders/")
        if ctx.attempt == 1 and int(version) % 3 == 0:
            raise RuntimeError

    sent = [(None, b"e%d:%d" % (entity, version)) for version in range(1, 11) for entity in range(4)]
    random.Random(3).shuffle(sent)
    stage.send([*sent, *sent[:10]])
    stage.consume(handle, ordered=False, concurrency=8)
    stage.wait_settled()
    with kept_session(stage.dsn) as connection:
        rows = connection.execute("SELECT entity, version FROM sink ORDER BY position").fetchall()
    assert {entity: [v for e, v in rows if e == entity] for entity, _ in rows} == {
        f"e{entity}": list(range(1, 11)) for entity in range(4)
    }


def test_what_finds_no_room_comes_again_once_there_is_some(start_stage: StartStage, redis_url: str) -> None:
    stage = start_stage(redis_url)
    versions, applied, refused = Versions("orders", held_messages=2), list[int](), list[bytes]()

    def handle(body: bytes, ctx: Context) -> None:
        try:
            with kept_session(stage.dsn) as connection:
                due = versions.take(connection, ctx, entity="e", version=int(body))
        except VersionsFull:
            refused.append(body)
            raise
        applied.extend(one.version for one in due)

    stage.send([(None, b"%d" % version) for version in (5, 4, 3, 2)])
    stage.consume(handle, ordered=False)
    wait_until(lambda: len(set(refused)) == 2, what="two of four to find no room")
    assert not applied
    stage.send([(None, b"1")])
    stage.wait_settled()
    assert sorted(applied) == [1, 2, 3, 4, 5]


def test_receivers_take_versions_too(start_stage: StartStage, redis_url: str) -> None:
    stage = start_stage(redis_url, partitions=1)
    stage.send([("k", b"2"), ("k", b"1")])
    versions = Versions("orders")
    applied: list[int] = []
    with Receiver(stage.topic, group="g", settings=stage.settings()) as receiver:
        for message in receiver.receive():
            with kept_session(stage.dsn) as connection:
                due = versions.take(connection, message, entity="e", version=int(message.body))
            applied += [one.version for one in due]
            receiver.ack([message])
    assert applied == [1, 2]
    assert stage.all_settled()
