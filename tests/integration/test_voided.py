"""Case 76 in topics of the strategy best_effort: a row that can never be sent holds nothing, and nobody loses it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mqlayer import App, PopMessage, Receiver, any_of
from mqlayer.archive import archive_pass
from mqlayer.domain.names import BODY_LIMIT, KEY_LIMIT
from mqlayer.domain.routing import lp_of
from mqlayer.errors import KeyTooLarge, NotFound
from mqlayer.groups.group import Scope
from mqlayer.inspect import group_statuses
from mqlayer.outbox import adopt, discard_quarantined, list_quarantined, renew, retry_quarantined
from mqlayer.outbox.quarantine import QuarantinedRow
from mqlayer.postgres.database import Database
from mqlayer.redelivery import ReplayFilter, new_worker, start_replay, work_on_replay
from mqlayer.relay import relay_once
from tests.fixtures.consumers import Recorder
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.partition_values import fall_back, snapshot
from tests.proof.runtimes import runtime_of
from tests.proof.world import QUICK, World

LONG = "x" * (KEY_LIMIT + 1)
LP = lp_of(b"key-1")

pytestmark = pytest.mark.world(partitions=0)


@pytest.fixture(autouse=True)
def _row_that_is_too_long(world: World) -> None:
    """An archived best_effort topic of one partition, and in it a row with a key that is too long."""
    world.add_topic("loose", partitions=1, strategy="best_effort", archived=True)
    world.publish(3, topic="loose", keys=3, tag="before")
    spoil(world, LONG, b"kept")
    world.publish(3, topic="loose", keys=3, tag="behind")


def spoil(world: World, key: str, body: bytes) -> None:
    """Put a row into the outbox past the functions, which would refuse it: next in the LP of key-1."""
    world.rows(
        "WITH c AS (UPDATE mqlayer_app.counter SET seq = seq + 1 WHERE topic = 'loose' AND lp = %s RETURNING *) "
        "INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, headers, body) "
        "SELECT nextval('mqlayer_app.outbox_number'), topic_id, lp, 0, seq, now(), %s, '{\"h\": \"v\"}', %s FROM c",
        LP, key, body,
    )  # fmt: skip


def relay(world: World) -> int:
    """Relay what is there; return how many records that made."""
    return relay_once(world.settings(), limits=QUICK)


def chain(world: World) -> list[tuple[int, str | None, str]]:
    """Return seq, key and body of what the partition holds of the row's LP."""
    return world.relayed()["loose", LP]


PASSED_OVER = [(1, "key-1", "before-1"), (2, None, ""), (3, "key-1", "behind-1")]


@contextmanager
def consumed(world: World, **said: Any) -> Iterator[Recorder]:
    """Run a member that handles what comes."""
    recorder, app = Recorder(), App(world.settings(lease_s=10.0))
    app.consumer("loose", group="g", backoff_s=None, **said)(recorder)
    app.start()
    try:
        yield recorder
    finally:
        app.stop(5.0)


def settled(world: World, database: Database) -> bool:
    (status,) = group_statuses(runtime_of(database, world.key_prefix), "loose", "g")
    return status.lag == 0


def test_its_lp_goes_on_and_the_row_is_quarantined_with_its_reason(world: World, database: Database) -> None:
    """Case 76, with bodies too, which nobody reads."""
    spoil(world, "key-1", bytes(BODY_LIMIT + 1))
    assert relay(world) == 8
    assert chain(world) == [*PASSED_OVER, (4, None, "")]
    key, body = list_quarantined(database)
    assert (key.topic, key.lp, key.seq, key.reason) == (
        "loose",
        LP,
        2,
        f"key of {KEY_LIMIT + 1} bytes, the limit is 512",
    )
    assert (body.seq, str(BODY_LIMIT) in body.reason) == (4, True)
    assert relay(world) == 0
    assert len(list_quarantined(database)) == 2


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
@pytest.mark.parametrize("tag_filter", some_of([None, any_of("eu")], 2))
def test_no_handler_of_a_member_sees_the_void_record(
    world: World, database: Database, tag_filter: str | None, mode: str
) -> None:
    """Case 62: nor does it leave a gap in the bitmap."""
    relay(world)
    with consumed(world, tag_filter=tag_filter, mode=mode) as recorder:
        wait_until(lambda: settled(world, database), timeout_s=20, what="all settled")
    handled = sorted(recorder.bodies())
    assert handled == (
        [] if tag_filter else [b"before-0", b"before-1", b"before-2", b"behind-0", b"behind-1", b"behind-2"]
    )


@pytest.mark.parametrize("scope", some_of(["key", "partition"], 2))
def test_no_receiver_is_given_the_void_record(world: World, database: Database, scope: Scope) -> None:
    """In batches of one, a batch may be the void record alone."""
    relay(world)
    found: list[PopMessage] = []
    with Receiver("loose", group="g", settings=world.settings(), scope=scope) as receiver:
        until = time.monotonic() + 20
        while not settled(world, database) and time.monotonic() < until:
            batch = receiver.receive(1, wait_s=0.1)
            receiver.ack(batch)
            found += batch
    assert [message.body for message in found if message.key == "key-1"] == [b"before-1", b"behind-1"]
    assert len(found) == 6
    assert settled(world, database)


@pytest.mark.full
def test_the_archive_has_a_whole_chain_and_a_replay_leaves_the_void_record_out(
    world: World, database: Database
) -> None:
    relay(world)
    with consumed(world):
        wait_until(lambda: settled(world, database), timeout_s=20, what="all settled")
    archive_pass(runtime_of(database, world.key_prefix))
    rows = world.rows("SELECT seq, key, headers FROM mqlayer_archive.record WHERE lp = %s ORDER BY seq", LP)
    assert [(seq, key) for seq, key, _ in rows] == [(1, b"key-1"), (2, None), (3, b"key-1")]
    assert "mq-void" in str(rows[1][2])
    assert world.rows("SELECT count(*)::int FROM mqlayer_archive.gap") == [(0,)]
    worker = new_worker()
    replay_id = start_replay(
        runtime_of(database, world.key_prefix, actor="a test"), "loose", "g", ReplayFilter(), worker=worker
    )
    done = work_on_replay(database, replay_id, worker=worker)
    assert (done.state, done.results) == ("done", {"sent": 6, "unmatched": 1})


# -- what an operator makes of it --------------------------------------------------------------------------------------


def passed_over(world: World, database: Database) -> QuarantinedRow:
    """Relay, and return the row that was passed over."""
    relay(world)
    (row,) = list_quarantined(database)
    return row


def test_what_is_repaired_is_published_anew_at_the_end_and_once(world: World, database: Database) -> None:
    row = passed_over(world, database)
    with pytest.raises(KeyTooLarge):
        retry_quarantined(database)
    assert list_quarantined(database) == [row]
    world.rows("UPDATE mqlayer_app.voided SET key = 'key-1' WHERE id = %s", row.number)
    acts = [threading.Thread(target=retry_quarantined, args=(database,)) for _ in range(3)]
    for act in acts:
        act.start()
    for act in acts:
        act.join()
    assert retry_quarantined(database) == list_quarantined(database) == []
    assert relay(world) == 1
    assert chain(world) == [*PASSED_OVER, (4, "key-1", "kept")]
    assert world.rows("SELECT headers FROM mqlayer_app.outbox WHERE lp = %s AND seq = 4", LP) == [('{"h": "v"}',)]


def test_what_is_discarded_leaves_a_word_and_nothing_else(world: World, database: Database) -> None:
    row = passed_over(world, database)
    assert row.number is not None
    discard_quarantined(database, row.number)
    assert list_quarantined(database) == []
    assert world.rows("SELECT ended, key, body FROM mqlayer_app.voided") == [("discarded", None, None)]
    with pytest.raises(NotFound, match="quarantine list"):
        discard_quarantined(database, row.number)


def test_a_node_that_falls_back_has_the_row_passed_over_again_and_told_no_second_time(
    world: World, database: Database
) -> None:
    before = snapshot(world)
    row = passed_over(world, database)
    world.rows("UPDATE mqlayer_app.voided SET key = 'key-1' WHERE id = %s", row.number)
    retry_quarantined(database)
    fall_back(world, before)
    assert relay(world) == 8
    assert chain(world) == [*PASSED_OVER, (4, "key-1", "kept")]
    assert list_quarantined(database) == []


def test_an_adopted_outbox_numbers_the_row_anew_and_keeps_it_once(world: World, database: Database) -> None:
    row = passed_over(world, database)
    # As in a copy that was made before this was recorded, but for the first message.
    world.rows("UPDATE mqlayer_app.relayed SET seq = least(seq, 1)")
    world.rows("UPDATE mqlayer_app.lp_set SET relay_id = NULL, lease_until = '-infinity'")
    adopt(database)
    relay(world)
    (again,) = list_quarantined(database)
    assert (again.number, again.seq) == (row.number, 1)
    world.rows("UPDATE mqlayer_app.lp_set SET relay_id = NULL, lease_until = '-infinity'")
    renew(database)
    assert list_quarantined(database) == [], "the original's to decide"


# -- kills -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some_of(["relay.before_voided", "relay.after_voided"], 2))
def test_a_relay_killed_around_keeping_the_row_leaves_that_to_the_next_one(
    world: World, database: Database, name: str
) -> None:
    """Kept before its void record can be anywhere, since the outbox is emptied behind that."""
    with world.relay_process(failpoints=f"{name}=kill@1") as process:
        assert process.wait(timeout=60) == -signal.SIGKILL
    assert (2, None, "") not in chain(world)
    assert len(list_quarantined(database)) == (name == "relay.after_voided")
    wait_until(
        lambda: (relay(world), chain(world) == PASSED_OVER)[1], timeout_s=20, what="the lease of the dead to end"
    )
    assert len(list_quarantined(database)) == 1
