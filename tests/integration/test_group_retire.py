"""A group that is retired holds nothing up, and leaves nothing: case 28, and what dies on the way."""

from __future__ import annotations

import os
from typing import Any

import pytest
import redis

from mqlayer import App, Context, Receiver
from mqlayer.archive import archive_outcomes
from mqlayer.errors import Conflict, GroupRetired, MqlayerError
from mqlayer.groups import find_group
from mqlayer.groups.pop_partitions import pop_partitions
from mqlayer.groups.retirement import forget_retired, retire_group
from mqlayer.inspect import group_statuses
from mqlayer.maintenance import trim_pass
from mqlayer.redis.keys import group_keys
from mqlayer.redis.partition_scripts import Fenced, LockKept, LockTaken
from mqlayer.redis.pop_scripts import PopGroupPartition, ReceiveRequest, receive_command, receive_reply
from mqlayer.redis.retirement_script import group_forget_command
from mqlayer.routes import retire_partitions
from mqlayer.topics import rearm_node, set_archived
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Recorder, Stage, member_of
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.partition_harness import PartitionHarness
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of

KEYS = 8


def keys_of(stage: Stage, group_id: int) -> list[bytes]:
    return sorted(stage.redis.scan_iter(f"{stage.prefix}:*:g{group_id}:*"))


def retire(stage: Stage, group: str = "g", **facts: Any) -> None:
    retire_group(runtime_of(stage.database, actor="a test"), "orders", group, **facts)


def rows(stage: Stage, statement: str, *values: object) -> list[tuple[Any, ...]]:
    with stage.database.connection() as connection:
        return connection.execute(statement, values).fetchall()


def poison(body: bytes, _ctx: Context) -> None:
    if body == b"bad":
        raise ValueError


def park_one(stage: Stage, group: str = "g") -> App:
    """Have a key of a group parked."""
    app = stage.consume(Recorder(poison), group=group, attempt_limit=1, backoff_s=(600.0,), policy="park")
    stage.send([("k", b"bad"), ("k", b"1")])
    wait_until(lambda: member_of(app).stats.parked >= 1, what="the key to be parked")
    stage.wait_settled(group)
    return app


def test_a_retired_group_holds_neither_records_nor_sealed_partitions(stage: Stage) -> None:
    """Case 28: a sealed partition stays while a group has not passed its command, and goes once that is retired."""
    stage.consume(Recorder(), group="slow").stop()
    fast = Recorder()
    stage.consume(fast, group="fast")
    stage.send_numbers(KEYS, 60)
    parent, other = stage.partitions
    split(stage.runtime, "orders", parent, at=[100])
    wait_until(lambda: fast.count() == KEYS * 60, what="all messages")
    stage.wait_settled("fast")

    def drained() -> list[tuple[Any, ...]]:
        return rows(stage, "SELECT FROM mqlayer.drained WHERE group_id = %s", stage.group_id("fast"))

    wait_until(drained, what="the parent drained")
    assert retire_partitions(stage.runtime) == []
    trim_pass(stage.runtime)
    assert stage.redis.xlen(stage.keys(other).log) == int(stage.redis.hget(stage.keys(other).meta, "next") or 0) - 1
    retire(stage, "slow")
    stage.wait_retired(parent)
    trim_pass(stage.runtime)
    assert int(stage.redis.hget(stage.keys(other).meta, "first") or 1) > 1


def test_a_group_is_refused_while_it_lives_and_its_members_afterwards(stage: Stage) -> None:
    app = stage.consume(Recorder())
    with pytest.raises(Conflict, match=r"has 1 living members, one is 'm-.*stop them"):
        retire(stage)
    app.stop()
    retire(stage)
    with pytest.raises(GroupRetired, match=r"group 'g' of topic 'orders' is retired: .*use another group"):
        stage.consume(Recorder())
    with pytest.raises(Conflict, match="is retired already"):
        retire(stage)
    (status,) = group_statuses(stage.runtime, "orders", "g")
    assert (status.facts.state, status.partitions) == ("retired", [])
    assert rows(stage, "SELECT act, object FROM mqlayer.audit WHERE act = 'group retire'") == [
        ("group retire", "orders/g")
    ]


def test_a_member_that_slept_through_the_retirement_of_its_group_ends_and_says_so(stage: Stage) -> None:
    """Its calls are refused, its lease is over; only another group can go on."""
    app = stage.consume(Recorder())
    member = member_of(app)
    stage.send_numbers(KEYS, 2)
    stage.wait_settled()
    group_id = stage.group_id()
    # It wakes up, from what looked like its death, while the retirement is under way.
    with stage.database.connection() as connection, connection.transaction():
        connection.execute("SELECT FROM mqlayer.consumer_group FOR UPDATE")
        connection.execute("UPDATE mqlayer.member SET lease_until = now() - interval '1 minute'")
        connection.execute("UPDATE mqlayer.consumer_group SET state = 'retired', retired_at = now()")
        connection.execute("UPDATE mqlayer.assignment SET member_id = NULL, epoch = nextval('mqlayer.epoch')")
        connection.execute("DELETE FROM mqlayer.member")
    wait_until(lambda: not app.running, what="it to end")
    assert "group 'g' of topic 'orders' is retired" in str(app.health())
    assert member.owned() == {}
    # A call that was under way comes to its end: that is what `grace_s` is for.
    app.stop()
    forget_retired(stage.runtime, grace_s=0)
    assert keys_of(stage, group_id) == []


def test_a_receiver_of_a_retired_group_is_told(stage: Stage) -> None:
    """Nobody knows receivers: they are refused by the lock that stays, and told with their next look."""
    stage.send([("k", b"1"), ("k", b"2")])
    with Receiver("orders", group="pops", settings=stage.settings()) as receiver:
        (message,) = receiver.receive(1, wait_s=5)
        retire(stage, "pops")
        forget_retired(stage.runtime)

        def told() -> bool:
            try:
                assert receiver.receive(1, wait_s=0.1) == []
            except GroupRetired:
                return True
            return False

        wait_until(told, what="the receiver to be told")
        with pytest.raises(MqlayerError):
            receiver.ack([message])


def test_a_receiver_that_postgres_does_not_reach_is_refused_however_late_it_asks(stage: Stage) -> None:
    """It has no lease that would run out; without the lock it would be given all from the start again."""
    stage.send([("k", b"1"), ("k", b"2")])
    with Receiver("orders", group="pops", settings=stage.settings()) as receiver:
        receiver.ack(receiver.receive(1, wait_s=5))
    group_id = stage.group_id("pops")
    late = pop_partitions(stage.database, group_id)
    retire(stage, "pops")
    assert forget_retired(stage.runtime, grace_s=0) == len(stage.partitions)
    assert rows(stage, "SELECT count(*) FROM mqlayer.assignment") == [(0,)]
    assert [key.rsplit(b":", 1)[1] for key in keys_of(stage, group_id)] == [b"lock"] * len(stage.partitions)
    with stage.connection() as connection:
        for one in late:
            place = PopGroupPartition(stage.prefix, one.partition, group_id, "key", one.epoch or 0, one.start, one.seek)
            (reply,) = connection.call([receive_command(connection, place, ReceiveRequest("late", 1, 1_000, 1_000))])
            assert isinstance(receive_reply(reply, "the node"), Fenced)


def test_a_retired_shared_group_leaves_no_native_group(stage: Stage) -> None:
    handled: list[bytes] = []
    app = stage.app()
    app.consumer("orders", group="s", mode="shared", start="earliest")(handled.append)
    app.start()
    stage.send([("k", b"1"), ("k", b"2")])
    wait_until(lambda: len(handled) == 2, what="both messages")
    app.stop()
    logs = [stage.keys(partition).log for partition in stage.partitions]
    assert any(stage.redis.xinfo_groups(log) for log in logs)
    retire(stage, "s")
    forget_retired(stage.runtime)
    assert [stage.redis.xinfo_groups(log) for log in logs if stage.redis.exists(log)] in ([[], []], [[]])
    with pytest.raises(GroupRetired):
        app.start()


def test_what_is_parked_is_dropped_only_when_that_is_said(stage: Stage) -> None:
    """Its dead messages stay for people, also then; nothing of them can be given back."""
    park_one(stage).stop()
    with pytest.raises(Conflict, match=r"2 messages are parked .*--drop-parked"):
        retire(stage)
    assert find_group(stage.database, "orders", "g").state == "live"
    retire(stage, drop_parked=True)
    forget_retired(stage.runtime)
    assert rows(stage, "SELECT count(*) FROM mqlayer.parked_key") == [(0,)]
    assert rows(stage, "SELECT sum(messages) FROM mqlayer.parked_total") in ([(0,)], [(None,)])
    assert rows(stage, "SELECT facts ->> 'parked' FROM mqlayer.audit WHERE act = 'group retire'") == [("2",)]


@pytest.mark.parametrize(
    "place",
    some_of(
        [
            "group_retire.before_commit",
            "group_retire.after_commit",
            "group_retire.after_parked",
            "group_retire.after_forget",
        ],
        9,
    ),
)
def test_a_retirement_that_is_killed_is_done_or_not_at_all_and_the_job_does_the_rest(stage: Stage, place: str) -> None:
    """A row of each assignment stays until its node has said that nothing is left there."""
    park_one(stage).stop()
    group_id = stage.group_id()
    words = ("group", "retire", "orders", "g", "--yes", "--drop-parked")
    facts = {"MQLAYER_DSN": stage.dsn, "MQLAYER_KEY_PREFIX": stage.prefix}
    done = ask_python("mqlayer", *words, env=os.environ | facts | armed(f"{place}=kill"))
    assert done.returncode == -9, done.stderr
    state = find_group(stage.database, "orders", "g").state
    if place == "group_retire.before_commit":
        assert state == "live"
        assert rows(stage, "SELECT count(*) FROM mqlayer.parked_message") == [(2,)]
        retire(stage, drop_parked=True)
    else:
        assert state == "retired"
    forget_retired(stage.runtime, grace_s=0)
    assert keys_of(stage, group_id) == []
    assert rows(stage, "SELECT count(*) FROM mqlayer.assignment") == [(0,)]
    assert rows(stage, "SELECT count(*) FROM mqlayer.parked_message") == [(0,)]
    assert len(rows(stage, "SELECT FROM mqlayer.audit WHERE act = 'group retire'")) == 1


def test_a_late_owner_is_refused_and_a_group_that_came_back_is_not_touched(every_stage: Stage) -> None:
    """Epochs only grow: what a pass was told before a group came back drops nothing of its new life."""
    stage = every_stage
    stage.send([("k", b"1")])
    partition = next(p for p in stage.partitions if stage.redis.exists(stage.keys(p).log))
    client: redis.Redis = stage.redis
    lock = group_keys(stage.prefix, partition, 77).lock

    with stage.connection() as connection:
        harness = PartitionHarness(connection, stage.prefix, partition, group_id=77)

        def take(epoch: int) -> object:
            return harness.member("m", epoch).acquire()

        def forget(*, for_good: bool) -> list[Any]:
            words = connection.call(
                [group_forget_command(connection, stage.prefix, partition, 77, 10, for_good=for_good, archived=False)]
            )[0]
            return list(words)

        assert isinstance(take(9), LockTaken)
        assert harness.member("m", 9).settle([(1, 1)]) == LockKept(2)
        assert forget(for_good=False) == [b"lock_only"]
        assert client.hgetall(lock) == {b"owner": b"", b"epoch": b"9"}
        assert take(9) == Fenced(9)
        assert harness.member("m", 9).settle([(1, 1)]) == Fenced(9)
        assert isinstance(take(11), LockTaken)
        for for_good in (False, True):
            assert forget(for_good=for_good) == [b"unchanged", 11]
        assert client.hget(lock, "epoch") == b"11"
        client.delete(lock)
        assert isinstance(take(9), LockTaken)
        assert forget(for_good=True) == [b"forgotten"]
        assert not client.exists(lock)
        # Of a partition that is retired nothing but the tombstone may be left.
        client.hset(stage.keys(partition).meta, "state", "deleted")
        client.hset(lock, "epoch", "3")
        assert forget(for_good=False) == [b"forgotten"]
        assert not client.exists(lock)


def test_what_became_of_messages_is_fetched_before_it_goes(stage: Stage) -> None:
    """Invariant 20, of a group that is retired before the archiver came by."""
    set_archived(runtime_of(stage.database, actor="a test"), "orders", archived=True)
    app = stage.consume(Recorder())
    wait_until(lambda: member_of(app).settings.archived, what="the member to know")
    stage.send_numbers(KEYS, 3)
    stage.wait_settled()
    app.stop()
    group_id = stage.group_id()
    retire(stage)
    assert forget_retired(stage.runtime, grace_s=0) == 0
    assert any(key.endswith(b":outcomes") for key in keys_of(stage, group_id))
    archive_outcomes(stage.runtime)
    assert rows(stage, "SELECT sum(last_offset - first_offset + 1) FROM mqlayer_archive.outcome") == [(KEYS * 3,)]
    assert forget_retired(stage.runtime, grace_s=0) == len(stage.partitions)
    assert keys_of(stage, group_id) == []


@pytest.mark.full
def test_a_node_that_is_away_is_passed_by_and_asked_again(stage: Stage) -> None:
    """Arming its next run raises the epochs of retired groups too; what that leaves goes with the rest."""
    stage.consume(Recorder()).stop()
    stage.send_numbers(KEYS, 1)
    group_id = stage.group_id()
    retire(stage)
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.node SET armed_run_id = 'another'")
    assert forget_retired(stage.runtime, grace_s=0) == 0
    rearm_node(runtime_of(stage.database, stage.prefix, application=stage.database, actor="a test"), "node-1")
    assert keys_of(stage, group_id)
    assert forget_retired(stage.runtime, grace_s=0) == len(stage.partitions)
    assert keys_of(stage, group_id) == []


@pytest.mark.full
def test_an_epoch_that_was_given_out_in_the_moment_of_the_retirement_is_raised_above(stage: Stage) -> None:
    """A receiver asks for epochs beside the group's lock: what it takes with one must not stay for ever."""
    stage.send_numbers(KEYS, 1)
    stage.consume(Recorder(), group="pops").stop()
    group_id = stage.group_id("pops")
    retire(stage, "pops")
    for partition, _, epoch, _ in stage.assignments("pops"):
        stage.redis.hset(group_keys(stage.prefix, partition, group_id).lock, mapping={"owner": "pop", "epoch": epoch})
    assert forget_retired(stage.runtime, grace_s=0) == 0
    assert forget_retired(stage.runtime, grace_s=0) == len(stage.partitions)
    assert keys_of(stage, group_id) == []


def test_the_command_asks_first(run: Commands, redis_url: str) -> None:
    run.text("migrate")
    run.text("node", "register", "n1", redis_url)
    run.text("topic", "create", "orders", "--partitions", "2")
    run.text("group", "create", "orders", "old")
    assert "nothing was changed: --yes does this" in run.text("group", "retire", "orders", "old")
    assert run.lines("group", "list")[0]["state"] == "live"
    assert run.text("group", "retire", "orders", "old", "--yes") == "group old of topic orders is retired\n"
    assert run.lines("group", "list")[0]["state"] == "retired"
    assert "is retired already" in run.failure("group", "retire", "orders", "old", "--yes")
    assert "is retired" in run.failure("group", "create", "orders", "old")
