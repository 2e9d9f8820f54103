"""A topic's time to live: no handler is given an older message, each is counted once, and keys stay in order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest

from mqlayer import App, Batch, BatchOf, Context, Receiver, expires_after, outbox
from mqlayer.errors import InvalidInput, Reject
from mqlayer.events import Event, on_event, remove_hook
from mqlayer.exporter.samples import control_samples
from mqlayer.groups import ensure_group
from mqlayer.groups.group import GroupSettings
from mqlayer.maintenance import trim_pass
from mqlayer.parking.pop_store import ENDED_AT_ONCE
from mqlayer.redelivery import (
    DeadFilter,
    dead_messages,
    failure_counts,
    new_worker,
    release_parked,
    start_redrive,
    work_on,
)
from mqlayer.relay import relay_once
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.topics import set_stream_retention
from tests.fixtures.archived_outcomes import ArchivedOutcomes
from tests.fixtures.commands import Commands, facts_of
from tests.fixtures.consumers import QUICK_BACKOFF_S, Recorder, Stage, StartStage, member_of
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.shared_members import share
from tests.fixtures.wait import wait_until

HOUR_S = 3600.0
TTL_S = 600


class Aging:
    """A topic of one partition whose messages have the ages that a test says."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.partition = stage, stage.partitions[0]
        self.key = stage.key_in(self.partition)

    def send(self, *bodies: bytes, age_s: float = 0.0, key: str | None = None) -> None:
        """Append messages that were published so long ago."""
        self.stage.clock = lambda: time.time() - age_s
        self.stage.send((key or self.key, body) for body in bodies)

    def live(self, ttl_s: int = TTL_S, **rule: Any) -> None:
        """Set the topic's time to live."""
        set_stream_retention(self.stage.runtime, "orders", message_ttl_s=ttl_s, **rule)

    def group(self, name: str = "g") -> None:
        """Create a group that begins with the first record."""
        settings = GroupSettings(start="earliest", backoff_s=QUICK_BACKOFF_S)
        with closing(RouteCache(self.stage.database)) as routes:
            ensure_group(self.stage.runtime, routes, topic="orders", name=name, settings=settings)

    def counts(self, group: str = "g") -> dict[str, int]:
        """Return what Postgres counts, once nodes were asked."""
        trim_pass(self.stage.runtime)
        (counts,) = failure_counts(self.stage.database, "orders", group)
        return dict(counts.totals)

    def dead(self) -> list[tuple[bytes | None, str, str]]:
        """Return the dead messages: body, cause, reason."""
        rows = "SELECT body, cause, reason FROM mqlayer.dead_message WHERE redriven_at IS NULL ORDER BY log_offset"
        with self.stage.database.connection() as connection:
            return [(body, cause, reason) for body, cause, reason in connection.execute(rows.encode()).fetchall()]


@pytest.fixture
def aging(start_stage: StartStage, redis_url: str) -> Aging:
    return Aging(start_stage(redis_url, partitions=1))


def mixed(aging: Aging) -> None:
    """Send 1 to 6 to one key, and 7 to another: 1, 2, 3, 5 and 7 are old."""
    aging.send(b"1", b"2", b"3", age_s=HOUR_S)
    aging.send(b"4")
    aging.send(b"5", age_s=HOUR_S)
    aging.send(b"6")
    aging.send(b"7", age_s=HOUR_S, key="other")


FULL = pytest.mark.full


@pytest.mark.parametrize("kind", ["plain", pytest.param("async", marks=FULL), pytest.param("batch", marks=FULL)])
def test_expired_messages_are_settled_told_and_counted_and_their_keys_go_on(aging: Aging, kind: str) -> None:
    events: list[Event] = []
    hook = on_event(events.append)
    told = ArchivedOutcomes(aging.stage.database, "orders", aging.stage.prefix)
    aging.live()
    mixed(aging)
    handled: list[bytes] = []
    app = aging.stage.consume(handler_of(kind, handled), batch=BatchOf("key", limit=10) if kind == "batch" else None)
    aging.stage.wait_settled()
    assert handled == [b"4", b"6"]
    stats = member_of(app).stats
    wait_until(lambda: (stats.handled, stats.expired, stats.settled) == (2, 5, 7), what="it counted them")
    assert aging.counts() == {"expired": 5}
    assert aging.counts() == {"expired": 5}, "a pass counts none twice"
    wait_until(lambda: sum(one.count for one in events if one.kind == "expired") == 5, what="hooks told of all")
    told.fetch()
    words = {offset: said for (_, offset), said in told.words().items()}
    assert words == {n: [("handled", 1)] if n in (4, 6) else [("expired", 0)] for n in range(1, 8)}
    assert aging.dead() == []
    remove_hook(hook)


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=FULL), pytest.param("async", marks=FULL), "batch"])
def test_expired_messages_die_where_the_topic_says_so_and_live_again_when_they_are_redriven(
    aging: Aging, kind: str
) -> None:
    told = ArchivedOutcomes(aging.stage.database, "orders", aging.stage.prefix)
    aging.live(expired="dead")
    mixed(aging)
    handled: list[bytes] = []
    app = aging.stage.consume(handler_of(kind, handled), batch=BatchOf("key", limit=10) if kind == "batch" else None)
    aging.stage.wait_settled()
    assert handled == [b"4", b"6"]
    expected = [(b"%d" % n, "expired", "its time to live ended") for n in (1, 2, 3, 5, 7)]
    assert aging.dead() == expected
    stats = member_of(app).stats
    wait_until(lambda: (stats.expired, stats.dead) == (5, 5), what="it counted them")
    assert aging.counts() == {"dead": 5, "expired": 5}
    assert len(dead_messages(aging.stage.database, DeadFilter(cause="expired"), group="g")) == 5
    told.fetch()
    assert {said for said, _ in told.final().values()} == {"handled", "expired"}
    worker = new_worker()
    redrive = start_redrive(aging.stage.runtime, "orders", "g", DeadFilter(), worker=worker)
    work_on(aging.stage.database, redrive, worker=worker)
    wait_until(lambda: len(handled) == 7, what="all are handled")
    assert [body for body in handled[2:] if body != b"7"] == [b"1", b"2", b"3", b"5"]
    assert aging.dead() == []


def handler_of(kind: str, handled: list[bytes]) -> Callable[..., Any]:
    """Return a plain, an async, or a batch handler."""

    async def handle(body: bytes) -> None:
        handled.append(body)

    def handle_batch(batch: Batch[bytes]) -> None:
        handled.extend(message.value for message in batch)

    handlers: dict[str, Callable[..., Any]] = {"plain": handled.append, "async": handle, "batch": handle_batch}
    return handlers[kind]


@pytest.mark.parametrize("rule", ["settle", pytest.param("dead", marks=FULL)])
def test_messages_of_a_parked_key_expire_when_it_is_their_turn(aging: Aging, rule: str) -> None:
    told = ArchivedOutcomes(aging.stage.database, "orders", aging.stage.prefix)
    failing = [True]

    def act(_body: bytes, _ctx: Context) -> None:
        if failing[0]:
            raise Reject("no stock")

    recorder = Recorder(act)
    aging.send(b"1", b"2", age_s=HOUR_S)
    aging.send(b"3")
    app = aging.stage.consume(recorder, policy="park", attempt_limit=2)
    aging.stage.wait_settled()
    assert recorder.attempts(b"1") == [1]
    failing[0] = False
    aging.live(expired=rule)
    wait_until(lambda: ttl_ms_of(app) == TTL_S * 1000, what="the member heard of it")
    release_parked(aging.stage.runtime, "orders", "g", key=aging.key)
    wait_until(lambda: recorder.bodies() == [b"3"], what="the young one is handled")
    bodies = [b"1", b"2"] if rule == "dead" else [None, None]
    assert aging.dead() == [(body, "expired", "its time to live ended") for body in bodies]
    counts = aging.counts()
    assert (counts["expired"], counts.get("dead", 0), counts.get("skipped", 0)) == (2, 2 if rule == "dead" else 0, 0)
    waiting = "SELECT FROM mqlayer.parked_message"
    wait_until(lambda: not told.rows(waiting), what="the young one is noted as handled")
    told.fetch()
    assert [said[-1] for _, said in sorted(told.words().items())] == [("expired", 1), ("expired", 0), ("handled", 1)]


def ttl_ms_of(app: App) -> int:
    """Return the time to live that a member heard of."""
    expiry = member_of(app).settings.expiry
    return 0 if expiry is None else expiry.ttl_ms


def test_what_waits_behind_a_failing_message_expires_with_it(aging: Aging) -> None:
    """The head fails in place; then its time ends: it is not tried again, and its key goes on."""
    recorder = Recorder(fails)
    aging.live(5)
    app = aging.stage.consume(recorder, policy="block", backoff_s=(0.2,))
    wait_until(lambda: member_of(app).owned(), what="it reads")
    aging.send(b"1", b"2")
    wait_until(lambda: len(recorder.attempts(b"1")) >= 2, what="it fails")
    aging.stage.wait_settled()
    tries = len(recorder.attempts(b"1"))
    aging.send(b"3")
    aging.stage.wait_settled()
    assert (recorder.bodies(), len(recorder.attempts(b"1"))) == ([b"3"], tries)
    assert aging.counts()["expired"] == 2


def fails(body: bytes, _ctx: Context) -> None:
    if body == b"1":
        raise ValueError("no stock")


@pytest.mark.parametrize(
    ("rule", "place"),
    [
        ("settle", "ack.after_send"),
        pytest.param("settle", "ack.before_send", marks=FULL),
        pytest.param("dead", "parking.before_commit", marks=FULL),
        ("dead", "parking.after_commit"),
        pytest.param("dead", "ack.after_send", marks=FULL),
    ],
)
def test_a_member_that_is_killed_leaves_each_expired_message_counted_once(aging: Aging, rule: str, place: str) -> None:
    aging.live(expired=rule)
    mixed(aging)
    aging.group()
    assert killed_member(aging, f"{place}=kill") == -9
    recorder = Recorder()
    aging.stage.consume(recorder)
    aging.stage.wait_settled()
    assert [body for body in recorder.bodies() if body not in (b"4", b"6")] == []
    assert aging.counts()["expired"] == 5
    assert len(aging.dead()) == (5 if rule == "dead" else 0)


def killed_member(aging: Aging, failpoints: str) -> int:
    """Run a member."""
    program = (
        "import sys, time\nfrom mqlayer import App, Settings\n"
        "app = App(Settings(dsn=sys.argv[1], key_prefix=sys.argv[2], lease_s=2.0))\n"
        "app.consumer('orders', group='g', start='earliest')(lambda body: None)\n"
        "app.start()\ntime.sleep(60)\n"
    )
    return killed(aging, program, failpoints)


def killed(aging: Aging, program: str, failpoints: str) -> int:
    """Run a program until it dies at a failpoint; return its end."""
    run = ask_python("-c", program, aging.stage.dsn, aging.stage.prefix, env=os.environ | armed(failpoints))
    return run.returncode


@pytest.mark.parametrize("rule", ["settle", pytest.param("dead", marks=FULL)])
def test_expired_messages_of_a_shared_group_are_settled_or_die(aging: Aging, rule: str) -> None:
    told = ArchivedOutcomes(aging.stage.database, "orders", aging.stage.prefix, archived=rule == "settle")
    aging.live(expired=rule)
    mixed(aging)
    recorder = Recorder()
    app = share(aging.stage, recorder, concurrency=2)
    aging.stage.wait_settled()
    assert sorted(recorder.bodies()) == [b"4", b"6"]
    assert app.counts()["orders", "g"].expired == 5
    assert aging.counts()["expired"] == 5
    bodies = [b"1", b"2", b"3", b"5", b"7"]
    assert aging.dead() == ([(body, "expired", "its time to live ended") for body in bodies] if rule == "dead" else [])
    if rule == "settle":
        told.fetch()
        words = {offset: said for (_, offset), said in told.words().items()}
        assert words == {n: [("handled", 1)] if n in (4, 6) else [("expired", 0)] for n in range(1, 8)}


@pytest.mark.parametrize("rule", ["settle", "dead"])
@pytest.mark.parametrize("scope", ["key", pytest.param("partition", marks=FULL)])
def test_receivers_are_given_no_expired_message(aging: Aging, rule: str, scope: Any) -> None:
    told = ArchivedOutcomes(aging.stage.database, "orders", aging.stage.prefix, archived=rule == "settle")
    aging.live(expired=rule)
    mixed(aging)
    with receiver_of(aging, scope) as receiver:
        found = receiver.receive(10, wait_s=20)
        assert [message.body for message in found] == [b"4", b"6"]
        receiver.ack(found)
        assert receiver.receive(10, wait_s=0) == []
    assert aging.stage.all_settled()
    assert aging.counts()["expired"] == 5
    assert [body for body, _, _ in aging.dead()] == ([b"1", b"2", b"3", b"5", b"7"] if rule == "dead" else [])
    if rule == "settle":
        told.fetch()
        words = {offset: said for (_, offset), said in told.words().items()}
        assert words == {n: [("handled", 1)] if n in (4, 6) else [("expired", 0)] for n in range(1, 8)}


def receiver_of(aging: Aging, scope: Any = "key", **rules: Any) -> Receiver:
    """Return a receiver of the group, that begins with the first record."""
    settings = aging.stage.settings()
    return Receiver("orders", group="g", settings=settings, start="earliest", scope=scope, **rules)


RECEIVE = (
    "import sys\nfrom mqlayer import Receiver, Settings\n"
    "settings = Settings(dsn=sys.argv[1], key_prefix=sys.argv[2])\n"
    "with Receiver('orders', group='g', settings=settings, start='earliest') as receiver:\n"
    "    receiver.receive(10, wait_s=30, visibility_timeout_s=1.0)\n"
)


@pytest.mark.parametrize(
    ("rule", "place"),
    [
        pytest.param("settle", "pop.before_settle", marks=FULL),
        ("settle", "pop.after_settle"),
        ("dead", "pop.after_park"),
        pytest.param("dead", "parking.before_commit", marks=FULL),
    ],
)
def test_a_receiver_that_is_killed_leaves_each_expired_message_counted_once(
    aging: Aging, rule: str, place: str
) -> None:
    aging.live(expired=rule)
    mixed(aging)
    assert killed(aging, RECEIVE, f"{place}=kill") == -9
    with receiver_of(aging) as second:
        found: list[Any] = []
        while len(found) < 2:
            some = second.receive(10, wait_s=5)
            second.ack(some)
            found += some
        assert [message.body for message in found] == [b"4", b"6"]
        wait_until(lambda: second.receive(10, wait_s=0) == [] and aging.stage.all_settled(), what="all is settled")
    assert aging.counts()["expired"] == 5
    assert len(aging.dead()) == (5 if rule == "dead" else 0)


def test_a_parked_key_of_receivers_goes_on_past_expired_messages(aging: Aging) -> None:
    """At once: a key that lost one message per look would be held up for hours. Some end per transaction: it locks."""
    aging.send(*[b"old"] * 40, age_s=HOUR_S)
    aging.send(b"young")
    with receiver_of(aging, policy="park", attempt_limit=1) as receiver:
        (first, *_) = receiver.receive(1, wait_s=20)
        receiver.nack(first)
        wait_until(lambda: receiver.receive(10, wait_s=0) == [] and aging.stage.all_settled(), what="it is parked")
        aging.live()
        release_parked(aging.stage.runtime, "orders", "g", key=aging.key)
        assert killed(aging, RECEIVE, "pop.before_claim=kill@2") == -9
        assert len(aging.dead()) == ENDED_AT_ONCE, "the first transaction's"
        found: list[Any] = []
        deadline = time.monotonic() + 60
        while not found and time.monotonic() < deadline:
            found += receiver.receive(10, wait_s=1)
        assert [message.body for message in found] == [b"young"]
        receiver.ack(found)
    assert aging.dead() == [(None, "expired", "its time to live ended")] * 40
    assert aging.counts()["expired"] == 40


@pytest.mark.full
def test_many_parked_keys_of_receivers_hold_no_transaction_for_long(aging: Aging) -> None:
    """16 keys at once: locks are held for a bounded number of messages, and a receiver sees the next keys at once."""
    keys = [f"key-{number}" for number in range(20)]
    for key in keys:
        aging.send(b"first", key=key)
    with receiver_of(aging, policy="park", attempt_limit=1) as receiver:
        for _ in keys:
            (first,) = receiver.receive(1, wait_s=20)
            receiver.nack(first)
        for key in keys:
            aging.send(*[b"old"] * 5, age_s=HOUR_S, key=key)
            aging.send(b"young", key=key)
        wait_until(lambda: receiver.receive(10, wait_s=0) == [] and aging.stage.all_settled(), what="all are parked")
        aging.live()
        for key in keys:
            release_parked(aging.stage.runtime, "orders", "g", key=key)
        found: list[Any] = []
        deadline = time.monotonic() + 60
        while len(found) < 2 * len(keys) and time.monotonic() < deadline:
            some = receiver.receive(20, wait_s=1)
            receiver.ack(some)
            found += some
    assert sorted(message.body for message in found) == [b"first"] * 20 + [b"young"] * 20
    with aging.stage.database.connection() as connection:
        ends = connection.execute("SELECT count(*) FROM mqlayer.dead_message GROUP BY xmin").fetchall()
    assert sum(count for (count,) in ends) == 5 * len(keys)
    assert max(count for (count,) in ends) <= ENDED_AT_ONCE


def test_a_message_of_an_outbox_may_have_an_end_of_its_own(aging: Aging) -> None:
    publish = "SELECT mqlayer_app.publish_v1('orders', %s, %s, %s)"
    with kept_session(aging.stage.dsn) as connection:
        outbox.publish(connection, "orders", key=aging.key, body=b"1", headers=expires_after(0.001))
        outbox.publish(connection, "orders", key=aging.key, body=b"2", headers=expires_after(HOUR_S))
        connection.execute(publish, [aging.key, b"3", '{"mq-ttl": "1"}'])
        connection.execute(publish, [aging.key, b"4", '{"mq-ttl": "3600000", "kind": "offer"}'])
        connection.commit()
        for text in ("0", "-1", "1s", "", "9" * 14):
            with pytest.raises(psycopg.Error, match="no number of milliseconds"):
                connection.execute(publish, [aging.key, b"5", f'{{"mq-ttl": "{text}"}}'])
            connection.rollback()
    assert relay_once(aging.stage.settings()) == 4
    headers: list[dict[str, str]] = []
    recorder = Recorder(lambda _, ctx: headers.append(dict(ctx.headers)))
    aging.stage.consume(recorder)
    aging.stage.wait_settled()
    assert (recorder.bodies(), headers) == ([b"2", b"4"], [{}, {"kind": "offer"}])
    assert aging.counts() == {"expired": 2}


def test_the_commands_set_a_time_to_live_and_show_what_expired(aging: Aging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQLAYER_DSN", aging.stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", aging.stage.prefix)
    run = Commands()
    said = run.text("topic", "set", "orders", "--message-ttl", "10m")
    assert said == "messages of topic orders live for 10 min, then are settled\n"
    with pytest.raises(InvalidInput, match="settle or dead"):
        aging.live(0, expired="drop")
    (shown,) = run.lines("topic", "show", "orders")
    assert (shown["message_ttl_s"], shown["expired"]) == (600, "settle")
    mixed(aging)
    recorder = Recorder()
    aging.stage.consume(recorder)
    aging.stage.wait_settled()
    run.text("trim")
    (group,) = run.lines("group", "show", "orders", "g")
    assert group["failures"]["totals"] == {"expired": 5}
    assert facts_of(run.text("group", "show", "orders", "g"))["ever"] == "expired 5"
    measured = control_samples(aging.stage.runtime)["mqlayer.group.events"]
    assert [value for value, labels in measured if labels["outcome"] == "expired"] == [5]
    assert "live for ever" in run.text("topic", "set", "orders", "--message-ttl", "none")
