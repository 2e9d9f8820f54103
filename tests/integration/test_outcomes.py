"""What becomes of messages of archived topics is in the archive, once, whoever dies and whatever comes again."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import SecretStr

from mqlayer import Context, Receiver
from mqlayer.archive import archive_outcomes, archive_pass, archive_status
from mqlayer.doctor import diagnose
from mqlayer.domain.message import records_of
from mqlayer.errors import Reject, Skip
from mqlayer.failpoints import arm
from mqlayer.groups import apply_seek, planned_seek
from mqlayer.redelivery import (
    DeadFilter,
    dead_messages,
    discard_dead,
    discard_parked,
    new_worker,
    release_parked,
    skip_head,
    start_redrive,
    work_on,
)
from mqlayer.redis.keys import outcomes_key
from mqlayer.redis.node_connection import NodeConnection
from mqlayer.redis.outcomes import OutcomeId, encode_outcome
from mqlayer.redis.partition_scripts import LockHolder, acquire_command, settle_command
from mqlayer.routes import retire_partitions
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.settings import Settings
from mqlayer.topics import list_nodes, set_archived
from tests.fixtures.archived_outcomes import ArchivedOutcomes, OutcomePlace
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import run_python
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of

LATER_S: Final = 3600.0
HANDLED: Final = [("handled", 1)]


@pytest.fixture
def told(stage: Stage) -> ArchivedOutcomes:
    """What the groups of a topic of two partitions tell."""
    return ArchivedOutcomes(stage.database, stage.topic, stage.prefix)


class Fault(Exception):
    """What a handler fails with."""


def spots(stage: Stage) -> dict[bytes, OutcomePlace]:
    """Return where each body is."""
    found: dict[bytes, OutcomePlace] = {}
    with stage.connection() as connection:
        for partition in stage.partitions:
            for record in records_of(connection.call([("XRANGE", stage.keys(partition).log, "-", "+")])[0]):
                found[record.body] = (partition, record.offset)
    return found


def failing(*bodies: bytes, times: int = 10**6, error: Exception | None = None) -> Recorder:
    """Return a handler that fails so many times for each of some bodies."""

    def act(body: bytes, ctx: Context) -> None:
        if body in bodies and len([one for one in recorder.begun if one.body == body]) <= times:
            raise error or Fault("no stock")

    recorder = Recorder(act)
    return recorder


# -- what is told ------------------------------------------------------------------------------------------------------


def test_each_handled_message_is_told_once_by_whom_and_when(stage: Stage, told: ArchivedOutcomes) -> None:
    """Case 79: with the times at which the member was given it and settled it."""
    stage.send_numbers(4, 25)
    app = stage.consume(Recorder())
    stage.wait_settled()
    report = told.fetch()
    assert report.archived == {stage.topic: report.total}
    outcomes = told.all()
    assert sorted(outcomes) == sorted(
        (partition, offset) for partition, at in stage.positions().items() for offset in range(1, at.next)
    )
    assert {spot: words for spot, words in told.words().items() if words != HANDLED} == {}
    for (one,) in outcomes.values():
        assert one.actor == member_of(app).member_id
        assert one.delivered_at is not None
        assert one.delivered_at <= one.settled_at
    assert told.fetch().total == 0
    assert told.rows("SELECT count(*), max(batch) FROM mqlayer_archive.outcome") == [(report.total, 1)]


def test_a_topic_that_is_not_archived_tells_nothing(stage: Stage) -> None:
    stage.send_numbers(2, 10)
    told = ArchivedOutcomes(stage.database, stage.topic, stage.prefix, archived=False)
    stage.consume(failing(b"3", error=Skip("no")), policy="skip")
    stage.wait_settled()
    assert stage.redis.keys(f"{stage.prefix}:*:outcomes") == []
    assert told.rows("SELECT count(*) FROM mqlayer_archive.outcome_queue") == [(0,)]


def test_a_topic_that_becomes_archived_tells_from_then_on_without_a_restart(stage: Stage) -> None:
    """And back: members hear of it by their heartbeats."""
    told = ArchivedOutcomes(stage.database, stage.topic, stage.prefix, archived=False)
    app = stage.consume(Recorder())
    member = member_of(app)
    for archived in (True, False, True):
        set_archived(runtime_of(stage.database), stage.topic, archived=archived)
        wait_until(lambda now=archived: member.settings.archived is now, what="heard of it")  # type: ignore[misc]
        before, count = set(told.all()), len(spots(stage))
        new = {b"%d" % number for number in range(count, count + 5)}
        stage.send(("k", body) for body in sorted(new))
        stage.wait_settled()
        if archived:
            told.fetch()
            assert {spots(stage)[body] for body in new} == set(told.all()) - before
    assert (len(spots(stage)), len(told.all())) == (15, 10)


def test_what_failed_and_then_was_handled_tells_all_its_attempts(stage: Stage, told: ArchivedOutcomes) -> None:
    """Cases 61, 79."""
    stage.send([("k", b"a"), ("k", b"b"), ("other", b"c")])
    stage.consume(failing(b"a", times=2), backoff_s=(0.02,))
    stage.wait_settled()
    told.fetch()
    at = spots(stage)
    assert told.words() == {at[b"a"]: [("handled", 3)], at[b"b"]: HANDLED, at[b"c"]: HANDLED}


def test_what_is_parked_and_released_is_told_from_postgres(stage: Stage, told: ArchivedOutcomes) -> None:
    """Case 64: two attempts in the stream, one more after the release, and what waited behind it."""
    stage.send([("k", b"a"), ("k", b"b"), ("other", b"c")])
    stage.consume(failing(b"a", times=3), backoff_s=(0.02,), attempt_limit=2, policy="park")
    stage.wait_settled()
    told.fetch()
    at = spots(stage)
    parked = {at[b"a"]: [("parked", 2)], at[b"b"]: [("parked", 0)]}
    assert told.words() == parked | {at[b"c"]: HANDLED}
    release_parked(runtime_of(stage.database, actor="olga"), stage.topic, "g", key="k")
    wait_until(lambda: told.rows("SELECT count(*) FROM mqlayer.parked_key") == [(0,)], what="in line again")
    told.fetch()
    assert told.words()[at[b"a"]] == [("parked", 2), ("handled", 4)]
    assert told.words()[at[b"b"]] == [("parked", 0), ("handled", 1)]
    assert told.final() == {at[b"a"]: ("handled", 4), at[b"b"]: ("handled", 1), at[b"c"]: ("handled", 1)}
    outcomes = told.all()[at[b"a"]]
    assert outcomes[1].delivered_at is not None
    assert outcomes[1].delivered_at <= outcomes[1].settled_at


def test_what_is_parked_beside_what_finds_no_room_is_not_told_as_handled(stage: Stage, told: ArchivedOutcomes) -> None:
    """Case 64: its offset is settled by the call that folds the rest."""
    stage.send([("k", b"a"), ("k", b"b")])
    stage.consume(failing(b"a", times=1), backoff_s=(LATER_S,), key_messages_limit=1)
    at = spots(stage)
    (partition, offset) = at[b"a"]
    wait_until(lambda: stage.position(partition).committed == offset + 1, what="the first one is settled")
    told.fetch()
    assert told.words() == {at[b"a"]: [("parked", 1)]}
    release_parked(runtime_of(stage.database, actor="olga"), stage.topic, "g", key="k")
    stage.wait_settled()
    told.fetch()
    assert told.words() == {at[b"a"]: [("parked", 1), ("handled", 2)], at[b"b"]: HANDLED}


@pytest.mark.parametrize(
    ("policy", "error", "word", "attempts"),
    some_of(
        [
            ("dead_letter", Fault("no stock"), "exhausted", 2),
            ("dead_letter", Reject("not for us"), "rejected", 1),
            ("skip", Fault("no stock"), "skipped", 2),
            ("park", Skip("old"), "skipped", 0),
        ],
        2,
    ),
)
def test_what_leaves_without_effect_tells_why(
    stage: Stage, told: ArchivedOutcomes, policy: Any, error: Exception, word: str, attempts: int
) -> None:
    """Cases 65, 69: and it is not told as handled, though its offset is settled."""
    stage.send([("k", b"a"), ("k", b"b")])
    app = stage.consume(failing(b"a", error=error), backoff_s=(0.02,), attempt_limit=2, policy=policy)
    stage.wait_settled()
    told.fetch()
    at = spots(stage)
    assert told.words() == {at[b"a"]: [(word, attempts)], at[b"b"]: HANDLED}
    (one,) = told.all()[at[b"a"]]
    assert one.actor == member_of(app).member_id
    assert str(error) in (one.reason or "")


def test_a_redrive_is_told_and_how_it_ended(stage: Stage, told: ArchivedOutcomes) -> None:
    """Case 68."""
    stage.send([("k", b"a"), ("k", b"b")])
    stage.consume(failing(b"a", times=2), backoff_s=(0.02,), attempt_limit=2, policy="dead_letter")
    stage.wait_settled()
    (dead,) = dead_messages(stage.database)
    discard_dead(runtime_of(stage.database, actor="olga"), dead.dead_id, reason="nobody wants it")
    worker = new_worker()
    redrive = start_redrive(runtime_of(stage.database, actor="otto"), stage.topic, "g", DeadFilter(), worker=worker)
    work_on(stage.database, redrive, worker=worker)
    wait_until(lambda: told.rows("SELECT count(*) FROM mqlayer.parked_key") == [(0,)], what="handled")
    told.fetch()
    at = spots(stage)[b"a"]
    told_of_a = told.all()[at]
    assert told.words()[at] == [("exhausted", 2), ("discarded", 2), ("redriven", 2), ("handled", 1)]
    assert [one.actor for one in told_of_a[1:3]] == ["olga", "otto"]
    assert told_of_a[1].reason == "nobody wants it"
    assert told.final()[at] == ("handled", 1)


def test_what_operators_let_die_is_told_with_reason_and_actor(stage: Stage, told: ArchivedOutcomes) -> None:
    """Case 67: the head of a key in the stream, and what waits in a parked one."""
    stage.send([("k", b"a"), ("k", b"b"), ("p", b"c"), ("p", b"d")])
    held = threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        if body == b"a" and not held.is_set():
            raise Fault("for some seconds")
        if body == b"c":
            raise Reject("never")

    stage.consume(Recorder(act), backoff_s=(5.0,), policy="park")
    wait_until(lambda: told.rows("SELECT count(*) FROM mqlayer.parked_message") == [(2,)], what="one key is parked")
    skip_head(runtime_of(stage.database, stage.prefix, actor="olga"), stage.topic, "g", "k", reason="broken")
    held.set()
    discard_parked(runtime_of(stage.database, actor="otto"), stage.topic, "g", key="p", reason="all of it")
    stage.wait_settled()
    told.fetch()
    at = spots(stage)
    words = {body: [word for word, _ in told.words()[spot]] for body, spot in at.items()}
    assert words == {
        b"a": ["discarded"], b"b": ["handled"], b"c": ["parked", "discarded"], b"d": ["parked", "discarded"],
    }  # fmt: skip
    ends = {body: (told.all()[spot][-1].actor, told.all()[spot][-1].reason) for body, spot in at.items()}
    assert ends[b"a"] == ("olga", "broken")
    assert ends[b"c"] == ends[b"d"] == ("otto", "all of it")


def test_what_a_filter_leaves_out_is_told_as_unmatched(stage: Stage, told: ArchivedOutcomes) -> None:
    """Case 62."""
    stage.send_numbers(3, 5)
    stage.consume(Recorder(), tag_filter="any:eu")
    stage.wait_settled()
    told.fetch()
    assert set(told.final().values()) == {("unmatched", 0)}
    assert len(told.final()) == 15


def test_what_comes_again_after_a_seek_is_told_again(stage: Stage, told: ArchivedOutcomes) -> None:
    """Case 31: a row for each time, the last one counts; also where it died before, and where clocks differ."""
    stage.send([("k", b"a"), ("k", b"b")])
    app = stage.consume(failing(b"b", times=1, error=Reject("once")), policy="park")
    stage.wait_settled()
    app.stop(5.0)
    with closing(RouteCache(stage.database)) as routes:
        plan = planned_seek(stage.runtime, routes, topic=stage.topic, name="g", to="earliest")
    told.fetch()
    told.rows("UPDATE mqlayer_archive.outcome SET settled_at = settled_at + interval '1 hour' RETURNING 1")
    apply_seek(runtime_of(stage.database, stage.prefix, actor="a test"), plan)
    stage.consume(failing(b"b", times=0))
    stage.wait_settled()
    release_parked(runtime_of(stage.database, actor="olga"), stage.topic, "g", key="k")
    wait_until(lambda: told.rows("SELECT count(*) FROM mqlayer.parked_key") == [(0,)], what="handled")
    told.fetch()
    at = spots(stage)
    # The key is parked: what comes of it again joins its line, in front of what waits there.
    assert [word for word, _ in told.words()[at[b"a"]]] == ["handled", "parked", "handled"]
    assert [word for word, _ in told.words()[at[b"b"]]] == ["parked", "handled"]
    assert told.final() == {at[b"a"]: ("handled", 1), at[b"b"]: ("handled", 2)}


def test_a_seek_over_the_stream_gives_a_second_row_behind_the_first(stage: Stage, told: ArchivedOutcomes) -> None:
    stage.send_numbers(2, 20)
    for _ in range(2):
        recorder = Recorder()
        app = stage.consume(recorder)
        # Until it takes its partitions, what it was sent back from counts as settled.
        wait_until(lambda: len(recorder.ended) == 40, what="all handled")  # noqa: B023
        stage.wait_settled()
        app.stop(5.0)
        with closing(RouteCache(stage.database)) as routes:
            plan = planned_seek(stage.runtime, routes, topic=stage.topic, name="g", to="earliest")
        apply_seek(runtime_of(stage.database, stage.prefix, actor="a test"), plan)
    told.fetch()
    assert set(map(tuple, told.words().values())) == {(("handled", 1), ("handled", 1))}
    assert len(told.final()) == 40


def test_receivers_tell_what_they_acknowledge_and_how_often_it_was_given(
    start_stage: StartStage, redis_url: str
) -> None:
    """Cases 51, 58."""
    stage = start_stage(redis_url, partitions=1)
    told = ArchivedOutcomes(stage.database, stage.topic, stage.prefix)
    stage.send([("k", b"1"), ("k", b"2"), ("other", b"3"), ("third", b"4")])
    with Receiver(stage.topic, group="g", settings=stage.settings()) as receiver:
        first = receiver.receive(4, wait_s=5)
        receiver.nack(first[0])
        again = receiver.receive(4, wait_s=5)
        receiver.ack([*again, first[2], first[3]])
        receiver.ack([first[3]])
        told.fetch()
        assert told.words() == {
            (1, 1): [("handled", 2)], (1, 2): [("handled", 2)], (1, 3): HANDLED, (1, 4): HANDLED,
        }  # fmt: skip
        outcomes = told.all()
        assert len({one.actor for (one,) in outcomes.values()}) == 1
        for (one,) in outcomes.values():
            assert one.delivered_at is not None
            assert one.delivered_at <= one.settled_at
        set_archived(runtime_of(stage.database), stage.topic, archived=False)
        wait_until(lambda: not _tells(stage, receiver), what="heard of it")


def _tells(stage: Stage, receiver: Receiver) -> bool:
    stage.send([("k", b"more")])
    receiver.ack(receiver.receive(1, wait_s=5))
    key = outcomes_key(stage.prefix, 1, stage.group_id())
    return bool(stage.redis.xlen(key) and not stage.redis.delete(key))


# -- crashes, and what comes again -------------------------------------------------------------------------------------

PROGRAM: Final = """
import sys
from mqlayer.archive import archive_outcomes
from mqlayer.postgres.database import Database
from mqlayer.runtime import Runtime
from mqlayer.settings import Settings
archive_outcomes(Runtime(Database(sys.argv[1]), Settings(key_prefix=sys.argv[2])))
"""


@pytest.mark.parametrize(
    "place",
    some_of(
        ["outcomes.after_fetch", "outcomes.before_commit", "outcomes.after_commit", "outcomes.before_acts_commit"], 2
    ),
)
def test_an_archiver_that_is_killed_loses_and_repeats_nothing(stage: Stage, told: ArchivedOutcomes, place: str) -> None:
    """Case 80."""
    stage.send_numbers(3, 20)
    stage.consume(failing(b"7", error=Reject("never")), policy="dead_letter")
    stage.wait_settled()
    killed = os.environ | armed(f"{place}=kill")
    assert run_python("-c", PROGRAM, stage.dsn, stage.prefix, env=killed, timeout=60) == -9
    told.fetch()
    words = told.words()
    assert len(words) == 60
    assert sorted(map(tuple, words.values())).count((("rejected", 1),)) == 3
    assert {len(one) for one in words.values()} == {1}
    assert all(stage.redis.xlen(key) == 0 for key in stage.redis.keys(f"{stage.prefix}:*:outcomes"))


def test_two_archivers_at_once_archive_each_outcome_once(stage: Stage, told: ArchivedOutcomes, tmp_path: Path) -> None:
    """The one that comes second writes nothing, and drops from the node only what is in the archive."""
    stage.send_numbers(3, 20)
    app = stage.consume(Recorder())
    stage.wait_settled()
    gate, mark = tmp_path / "gate", tmp_path / "mark"
    arm("outcomes.after_fetch", f"mark:{mark}")
    arm("outcomes.after_fetch", f"wait:{gate}")
    slow = threading.Thread(target=archive_outcomes, args=(stage.runtime,))
    slow.start()
    wait_until(mark.exists, what="it has read")
    told.fetch()
    stage.send_numbers(3, 5, first=21)
    wait_until(lambda: member_of(app).stats.settled == 75, what="more settled")
    gate.touch()
    slow.join(10)
    told.fetch()
    assert len(told.words()) == 75
    assert set(map(tuple, told.words().values())) == {(("handled", 1),)}


def test_entries_that_a_node_gives_back_are_not_archived_again(stage: Stage, told: ArchivedOutcomes) -> None:
    """A node that fell back has them again; they are below the place that Postgres has."""
    stage.send_numbers(3, 20)
    stage.consume(Recorder())
    stage.wait_settled()
    keys = stage.redis.keys(f"{stage.prefix}:*:outcomes")
    before: dict[Any, Any] = {key: stage.redis.xrange(key) for key in keys}
    told.fetch()
    for key, entries in before.items():
        stage.redis.delete(key)
        for entry_id, fields in entries[: len(entries) // 2 + 1]:
            stage.redis.xadd(key, fields, id=entry_id)
    assert told.fetch().total == 0
    assert {len(one) for one in told.words().values()} == {1}
    assert all(stage.redis.xlen(key) == 0 for key in keys)


@pytest.mark.parametrize(
    "place", some_of(["ack.before_send@3", "ack.after_send@3", "parking.before_commit", "parking.after_commit"], 4)
)
def test_a_member_that_is_killed_leaves_one_end_for_each_message(
    stage: Stage, told: ArchivedOutcomes, place: str
) -> None:
    """Cases 53, 64, 71: what it settled is told, what it did not is told by the next one."""
    stage.send_numbers(4, 100)
    name, _, nth = place.partition("@")
    environment = os.environ | {
        "MQLAYER_DSN": stage.dsn, "MQLAYER_KEY_PREFIX": stage.prefix, "MQLAYER_LEASE_S": "1",
        **armed(f"{name}=kill@{nth or 1}"),
    }  # fmt: skip
    assert run_python("-c", MEMBER, env=environment, timeout=60) == -9
    told.fetch()
    parked_before = bool(told.rows("SELECT FROM mqlayer.parked_key"))
    stage.consume(failing(b"50", error=Reject("never")), policy="park", backoff_s=None)
    stage.wait_settled()
    told.fetch()
    words = told.words()
    assert len(words) == 400
    ends = [one[-1][0] for one in words.values()]
    handled, parked = ends.count("handled"), ends.count("parked")
    assert handled + parked == 400
    # Killed behind a commit that parked a key, it may have told of nothing that it handled of this key before: that
    # comes again, and joins the parked ones.
    assert parked_before or place != "parking.after_commit"
    assert parked >= 204 if parked_before else parked == 204
    # An offset that is settled is settled once; and what is parked, parked once.
    assert {len(one) for one in words.values()} == {1}
    assert set(told.final()) == set(words)


MEMBER: Final = """
import time
import mqlayer
from tests.fixtures.variants import some_of
app = mqlayer.App(mqlayer.Settings())
@app.consumer("orders", group="g", policy="park")
def handle(body, ctx):
    if body == b"50":
        raise mqlayer.Reject("never")
app.start()
time.sleep(25)
"""


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_what_no_archiver_fetches_is_dropped_at_a_bound_and_counted(stage: Stage, told: ArchivedOutcomes) -> None:
    """The oldest goes first; settling goes on; how much was lost travels with what stays."""
    stage.consume(Recorder()).stop(5.0)
    stage.send([("k", b"%d" % number) for number in range(10)])
    partition = next(partition for partition, offset in spots(stage).values())
    node = list_nodes(stage.database)[0]
    holder = LockHolder(stage.prefix, partition, stage.group_id(), "m", 10**6)
    with NodeConnection(node) as connection:
        connection.call([acquire_command(connection, holder, start=1, afresh=True)])
        for first in range(1, 10, 2):
            one = encode_outcome("h", [(first + 1, 5)], max_entries=2)
            connection.call([settle_command(connection, holder, [(first, first + 1)], encoded_outcome=one)])
    key = outcomes_key(stage.prefix, partition, stage.group_id())
    assert stage.redis.xlen(key) == 2
    report = told.fetch()
    assert report.dropped == 6
    assert told.rows("SELECT dropped FROM mqlayer_archive.outcome_progress WHERE dropped > 0") == [(6,)]
    (status,) = archive_status(stage.runtime)
    assert status.outcomes_dropped == 6
    settings = Settings(dsn=SecretStr(stage.dsn), key_prefix=stage.prefix)

    def seen() -> list[str]:
        return [one.seen for one in diagnose(settings) if one.check == "archive" and "dropped" in one.seen]

    assert "6 messages" in seen()[0]
    told.rows("UPDATE mqlayer_archive.outcome_progress SET dropped_at = now() - interval '2 days' RETURNING 1")
    assert seen() == [], "no finding for ever"
    assert sorted(told.words()) == [(partition, offset) for offset in range(7, 11)]
    assert OutcomeId(0, 0) < OutcomeId(1, 0)


def test_a_partition_is_not_dead_lettered_before_its_outcomes_are_archived(
    stage: Stage, told: ArchivedOutcomes
) -> None:
    """Case 80: nor with what died of it in Postgres."""
    stage.send_numbers(4, 10)
    stage.consume(failing(b"3", error=Reject("never")), policy="dead_letter")
    stage.wait_settled()
    old = stage.partitions[0]
    lps = stage.route.ranges[0]
    split(stage.runtime, stage.topic, old, at=[(lps.lp_from + lps.lp_to) // 2])
    sql = "SELECT count(*) FROM mqlayer.drained WHERE partition_id = %s"
    wait_until(lambda: told.rows(sql, old) == [(1,)], what="drained")
    archive_pass(stage.runtime)
    key = outcomes_key(stage.prefix, old, stage.group_id())
    if stage.redis.xlen(key):
        assert retire_partitions(stage.runtime) == []
    told.fetch()
    stage.wait_retired(old)
    assert stage.redis.keys(f"{stage.prefix}:{{{old}}}:*") == [stage.keys(old).meta]
    assert len(told.final()) == 40
