"""Stores that go away, come back, forget or run full while members consume: nothing is lost, all goes on by itself."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from mqlayer import Context
from mqlayer.domain.routing import lp_of
from mqlayer.errors import NodeOutOfMemory, NotFound, Reject, StoreUnavailable
from mqlayer.failpoints import arm
from mqlayer.logs import event_of
from mqlayer.redis.partition_scripts import (
    Fenced,
    LockHolder,
    MessageRun,
    acquire_command,
    acquire_reply,
    append_command,
    append_reply,
    attempt_command,
    attempt_reply,
    settle_command,
    settle_reply,
)
from mqlayer.stack import RedisProgram, RedisServer
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of, migrated
from tests.fixtures.servers import StartPostgres, StartRedis, different_redis_programs
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.proxy import TcpProxy

as_consumer = pytest.mark.usefixtures("as_consumer")
"""Where no node restarts: members that may only consume leave arming to a relay or a worker."""

PASSWORD = "s3cr3t"


@pytest.fixture(params=some_of(different_redis_programs(), 9), ids=str)
def own_redis(request: pytest.FixtureRequest, start_redis: StartRedis) -> RedisServer:
    """A Redis of each version that a test may kill."""
    program: RedisProgram = request.param
    return start_redis(program=program)


@pytest.fixture
def proxy(redis_url: str) -> Iterator[TcpProxy]:
    """A way to the shared Redis that a test may break."""
    port = int(redis_url.rsplit(":", 1)[1].split("/", maxsplit=1)[0])
    with TcpProxy("127.0.0.1", port) as way:
        yield way


def events(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {event_of(record) for record in caplog.records}


# -- Postgres ----------------------------------------------------------------------------------------------------------


@as_consumer
def test_with_postgres_down_a_start_is_refused_with_its_address_and_without_its_password(
    stage: Stage, start_postgres: StartPostgres
) -> None:
    server = start_postgres()
    dsn = migrated(server).replace("postgres@", f"postgres:{PASSWORD}@")
    server.kill()
    app = stage.app(settings=stage.settings(dsn=SecretStr(dsn)))
    app.consumer("orders", group="g")(lambda body: None)
    with pytest.raises(StoreUnavailable) as caught:
        app.start()
    assert f"postgres at 127.0.0.1:{server.port}/consuming is not available" in str(caught.value)
    assert PASSWORD not in repr(caught.value) + str(caught.value)
    server.start()
    with pytest.raises(NotFound, match="unknown topic"):
        app.start()


@as_consumer
def test_while_postgres_is_away_for_less_than_the_lease_consumption_goes_on(
    start_stage: StartStage, redis_url: str, start_postgres: StartPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 43, first half."""
    server = start_postgres()
    stage = start_stage(redis_url, dsn=migrated(server))
    recorder = Recorder()
    stage.send_numbers(keys=5, each=2)
    app = stage.consume(recorder, settings=stage.settings(lease_s=30.0))
    stage.wait_settled()
    holdings = member_of(app).owned()
    server.kill()
    wait_until(lambda: "heartbeat_failed" in caplog.text, timeout_s=20, what="it noticed")
    stage.send_numbers(keys=5, each=20, first=3)
    wait_until(lambda: recorder.count() == 110, timeout_s=10, what="consumption goes on")
    assert not any(record.__dict__.get("paused") for record in caplog.records)
    server.start()
    deadline = member_of(app)._heartbeat.lease.until
    wait_until(lambda: member_of(app)._heartbeat.lease.until > deadline, timeout_s=20, what="heartbeats go on")
    assert member_of(app).owned() == holdings
    stage.wait_settled()
    assert len(recorder.begun) == 110


@as_consumer
def test_while_postgres_is_away_for_longer_a_member_pauses_and_says_so_then_goes_on(
    start_stage: StartStage, redis_url: str, start_postgres: StartPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 43, second half: its own clock stops it before the database could have given its partitions away."""
    server = start_postgres()
    stage = start_stage(redis_url, dsn=migrated(server))
    recorder = Recorder()
    stage.send_numbers(keys=5, each=2)
    app = stage.consume(recorder)
    stage.wait_settled()
    before = member_of(app).owned()
    server.kill()
    wait_until(
        lambda: any(record.__dict__.get("paused") for record in caplog.records), timeout_s=20, what="it says that"
    )
    handled = len(recorder.begun)
    stage.send_numbers(keys=5, each=20, first=3)
    assert not member_of(app)._heartbeat.lease.holds()
    server.start()
    wait_until(lambda: recorder.count() == 110, timeout_s=40, what="it goes on")
    stage.wait_settled()
    assert handled == 10
    recorder.assert_in_order()
    after = member_of(app).owned()
    assert all(after[partition][0] > before[partition][0] for partition in before)


@as_consumer
def test_a_key_that_still_runs_when_its_partition_comes_back_is_not_started_beside_it(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """A lease that ran out and a member that joins again: its own handler may still be at the message."""
    go_on = threading.Event()

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"1":
            go_on.wait(30)

    recorder = Recorder(act)
    stage.send([("slow", b"1"), ("slow", b"2"), ("quick", b"7")])
    app = stage.consume(recorder)
    wait_until(lambda: recorder.bodies("quick"), what="the other key handled")
    epochs = member_of(app).owned()
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.member SET lease_until = '-infinity'")
    wait_until(
        lambda: (
            all(epoch > epochs[p][0] for p, (epoch, _) in member_of(app).owned().items())
            and {state for _, state in member_of(app).owned().values()} == {"open"}
            and len(member_of(app).owned()) == 2
        ),
        timeout_s=20,
        what="it holds all again",
    )
    stage.send([("quick", b"8")])
    wait_until(lambda: b"8" in recorder.bodies("quick"), timeout_s=20, what="other keys go on")
    assert len([h for h in recorder.begun if h.key == "slow"]) == 1
    go_on.set()
    stage.wait_settled()
    assert recorder.bodies("slow") == [b"1", b"1", b"2"]
    assert recorder.overlaps == []
    assert "member_lease_expired" in caplog.text


# -- Redis -------------------------------------------------------------------------------------------------------------


def test_with_redis_down_a_member_starts_says_so_and_begins_when_it_is_back(
    start_stage: StartStage, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    stage = start_stage(own_redis.url)
    stage.send_numbers(keys=5, each=5)
    own_redis.kill()
    recorder = Recorder()
    stage.consume(recorder)
    wait_until(lambda: "reading_waits" in caplog.text, what="it says so")
    told = str([record.__dict__.get("reason") for record in caplog.records])
    assert f"127.0.0.1:{own_redis.port}" in told
    own_redis.start()
    stage.wait_settled(timeout_s=30)
    recorder.assert_in_order()
    assert len(recorder.begun) == 25


def test_a_redis_that_restarts_is_armed_again_under_new_epochs_and_all_goes_on(
    start_stage: StartStage, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 17. What was in hand comes again, in order; what was settled does not."""
    stage = start_stage(own_redis.url)
    recorder = Recorder()
    stage.send_numbers(keys=10, each=20)
    app = stage.consume(recorder)
    stage.wait_settled()
    before = member_of(app).owned()
    for first in (21, 41, 61):
        own_redis.kill()
        own_redis.start()
        stage.send_numbers(keys=10, each=20, first=first)
    stage.wait_settled(timeout_s=30)
    recorder.assert_in_order()
    assert recorder.count() == 800
    assert all(epoch > before[p][0] for p, (epoch, _) in member_of(app).owned().items())
    assert {"node_rearmed", "reading_waits"} <= events(caplog)
    assert {h.body for h in recorder.begun if h.epoch > before[h.partition][0]} >= {b"80"}


def test_a_redis_that_restarts_while_postgres_is_away_is_armed_when_that_is_back(
    start_stage: StartStage, own_redis: RedisServer, start_postgres: StartPostgres, caplog: pytest.LogCaptureFixture
) -> None:
    """Both gone at once: no thread dies of it."""
    postgres = start_postgres()
    stage = start_stage(own_redis.url, dsn=migrated(postgres))
    recorder = Recorder()
    stage.send_numbers(keys=10, each=5)
    stage.consume(recorder)
    stage.wait_settled()
    postgres.kill()
    own_redis.kill()
    own_redis.start()
    wait_until(lambda: "node_not_armed" in events(caplog), timeout_s=20, what="it can not arm it")
    stage.send_numbers(keys=10, each=5, first=6)
    postgres.start()
    wait_until(lambda: recorder.count() == 100, timeout_s=40, what="all handled")
    recorder.assert_in_order()


def test_what_fails_while_a_node_is_armed_ends_no_thread(
    start_stage: StartStage, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only what is known to fail: whatever it is, the next pass tries again."""
    stage = start_stage(own_redis.url)
    recorder = Recorder()
    stage.send_numbers(keys=5, each=2)
    stage.consume(recorder)
    stage.wait_settled()
    for occurrence in (1, 2, 3):
        arm("rearm.before_fence", "raise", occurrence=occurrence)
    own_redis.kill()
    own_redis.start()
    wait_until(lambda: events(caplog) & {"reading_failed", "settling_failed"}, timeout_s=20, what="the failure told")
    stage.send_numbers(keys=5, each=2, first=3)
    stage.wait_settled(timeout_s=30)
    recorder.assert_in_order()


@pytest.mark.full
def test_a_user_that_may_not_scan_is_told_so_and_goes_on_when_it_may(
    start_stage: StartStage,
    start_redis: StartRedis,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that restarted without its partitions is looked through for another prefix before they are made again."""
    server = start_redis(options={"user": f"limited on >{PASSWORD} ~* +@all -scan"})
    stage = start_stage(server.url)
    # Who registers a node is asked for all that arming needs.
    monkeypatch.setenv("MQLAYER_REDIS_USER", "limited")
    monkeypatch.setenv("MQLAYER_REDIS_PASSWORD", PASSWORD)
    recorder = Recorder()
    stage.consume(recorder)
    stage.send_numbers(keys=5, each=2)
    stage.wait_settled()
    stage.redis.flushall()
    server.kill()
    server.start()
    wait_until(lambda: "node_not_armed" in events(caplog), timeout_s=20, what="the refusal told")
    told = " ".join(str(record.__dict__.get("reason")) for record in caplog.records)
    assert "scan" in told.lower()
    assert PASSWORD not in told
    stage.redis.acl_setuser("limited", enabled=True, commands=["+scan"])
    stage.wait_made_again()
    stage.forget_numbers()
    stage.send_numbers(keys=5, each=2, first=3)
    wait_until(lambda: recorder.count() == 20, timeout_s=20, what="it goes on")


def test_two_members_of_a_redis_that_restarts_share_it_as_before(
    start_stage: StartStage, own_redis: RedisServer
) -> None:
    stage = start_stage(own_redis.url)
    first, second = Recorder(), Recorder()
    stage.consume(first)
    stage.consume(second)
    wait_until(lambda: len(set(stage.owners().values())) == 2, timeout_s=20, what="one partition each")
    stage.send_numbers(keys=10, each=10)
    stage.wait_settled()
    own_redis.kill()
    own_redis.start()
    stage.send_numbers(keys=10, each=10, first=11)
    stage.wait_settled(timeout_s=30)
    assert len({(h.key, h.body) for h in first.ended + second.ended}) == 200


class FallBack:
    """A Redis that is set back to what it held at a moment."""

    def __init__(self, server: RedisServer, place: Path) -> None:
        self.server, self._place = server, place

    def remember(self) -> None:
        shutil.copytree(self.server.directory, self._place)

    def fall_back(self) -> None:
        self.server.kill()
        for path in self._place.iterdir():
            if path.name.startswith("appendonly"):
                target = self.server.directory / path.name
                if path.is_dir():
                    shutil.rmtree(target)
                    shutil.copytree(path, target)
                else:
                    shutil.copyfile(path, target)
        self.server.start()


def test_what_died_before_a_fall_back_is_passed_over_wherever_it_comes_again(
    start_stage: StartStage, own_redis: RedisServer, tmp_path: Path
) -> None:
    """Case 67: also behind its former offset, for an owner that took over when the group had come past that."""
    stage = start_stage(own_redis.url, partitions=1)
    back = FallBack(own_redis, tmp_path / "then")

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"bad":
            raise Reject("no")

    stage.send([("k", b"first")])
    app = stage.consume(Recorder(act), policy="dead_letter")
    stage.wait_settled()
    back.remember()
    stage.send([("k", b"bad")])
    stage.wait_settled()
    app.stop()
    back.fall_back()
    again = Recorder()
    app = stage.consume(again, policy="dead_letter")
    wait_until(
        lambda: [state for _, state in member_of(app).owned().values()] == ["open"],
        timeout_s=20,
        what="it is armed and owned",
    )
    stage.send([(f"other-{number}", b"new") for number in range(5)])
    stage.wait_settled()
    app.stop()
    stage.consume(again, policy="dead_letter")
    # Sent again, under its number.
    stage._seqs[int(lp_of(b"k"))] = 1
    stage.send([("k", b"bad"), ("k", b"last")])
    stage.wait_settled()
    assert again.bodies("k") == [b"last"]


def test_after_a_fall_back_no_old_ack_settles_a_new_message(
    start_stage: StartStage, own_redis: RedisServer, tmp_path: Path
) -> None:
    """Offsets are given out again to other messages; the acks of those that had them before are refused."""
    stage = start_stage(own_redis.url, partitions=1)
    [partition] = stage.partitions
    back = FallBack(own_redis, tmp_path / "then")
    old_go_on, new_go_on = threading.Event(), threading.Event()

    def act(body: bytes, _ctx: Context) -> None:
        if body == b"old-8":
            old_go_on.wait(60)
        if body.startswith(b"new"):
            new_go_on.wait(60)

    recorder = Recorder(act)
    stage.send((f"k{number}", b"old-%d" % number) for number in range(1, 6))
    app = stage.consume(recorder, concurrency=16)
    stage.wait_settled()
    back.remember()
    stage.send((f"k{number}", b"old-%d" % number) for number in range(6, 11))
    wait_until(lambda: member_of(app).stats.settled == 9, what="all settled but one that runs")
    [(old_epoch, _)] = member_of(app).owned().values()
    old = LockHolder(stage.prefix, partition, stage.group_id(), member_of(app).member_id, old_epoch)

    back.fall_back()
    stage.forget_numbers()
    stage.send(((f"n{number}", b"new-%d" % number) for number in range(6, 11)), source=2)
    assert stage.position(partition) == (6, 11)
    wait_until(
        lambda: len([h for h in recorder.begun if h.body.startswith(b"new")]) == 5, timeout_s=20, what="new ones"
    )
    with stage.connection() as connection:
        replies = connection.call(
            [
                settle_command(connection, old, [(6, 10)]),
                attempt_command(connection, old, 8, 3),
                acquire_command(connection, old, start=1, afresh=True),
            ]
        )
    [(new_epoch, _)] = member_of(app).owned().values()
    assert new_epoch > old_epoch
    assert settle_reply(replies[0], "") == attempt_reply(replies[1], "") == acquire_reply(replies[2], "")
    assert settle_reply(replies[0], "") == Fenced(new_epoch)

    # The old handler ends only now: its ack has the number of a message that is under way.
    handled = member_of(app).stats.handled
    old_go_on.set()
    wait_until(lambda: member_of(app).stats.handled == handled + 1, what="the old handler ended")
    stage.send([("z", b"last")], source=2)
    wait_until(lambda: recorder.bodies("z"), timeout_s=20, what="a later message handled")
    wait_until(lambda: member_of(app).stats.settled >= 10, what="and settled")
    assert stage.position(partition) == (6, 12)
    new_go_on.set()
    stage.wait_settled()
    assert sorted(recorder.bodies()[-5:]) == [b"new-10", b"new-6", b"new-7", b"new-8", b"new-9"]


def test_a_redis_that_was_flushed_is_made_again_and_consumed_from_its_new_beginning(
    start_stage: StartStage, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """FLUSHALL: same run, no partitions. A missing meta means "refuse", never "new"; re-arming makes them again."""
    stage = start_stage(own_redis.url)
    recorder = Recorder()
    stage.send_numbers(keys=10, each=5)
    app = stage.consume(recorder)
    stage.wait_settled()
    before = member_of(app).owned()
    own = stage.redis
    own.flushall()
    wait_until(lambda: "partition_refused" in events(caplog), what="it is told")
    stage.wait_made_again()
    stage.forget_numbers()
    stage.send_numbers(keys=10, each=5, first=6)
    wait_until(lambda: recorder.count() == 100, timeout_s=20, what="what is sent now is handled")
    stage.wait_settled()
    assert all(epoch > before[p][0] for p, (epoch, _) in member_of(app).owned().items())


@as_consumer
def test_when_redis_is_out_of_memory_settling_goes_on(start_stage: StartStage, own_redis: RedisServer) -> None:
    """Publishing is refused, and everything that consumers do works: taking, failing, settling, handing over."""
    stage = start_stage(own_redis.url)
    stage.send_numbers(keys=10, each=100)

    def act(body: bytes, ctx: Context) -> None:
        if body == b"50" and ctx.attempt < 3:
            raise ValueError

    stage.redis.config_set("maxmemory", 1)
    with stage.connection() as connection:
        partition = stage.partitions[0]
        command = append_command(connection, stage.prefix, partition, 9, [MessageRun(0, 1, 1, [b"0", b"k", b"b"])])
        with pytest.raises(NodeOutOfMemory):
            append_reply(connection.call([command])[0], connection.node.address)
    first, second = Recorder(act), Recorder(act)
    app = stage.consume(first)
    wait_until(lambda: first.count() > 300, timeout_s=20, what="some handled")
    assert app.stop()
    stage.consume(second)
    stage.wait_settled()
    assert len({(h.key, h.body) for h in first.ended + second.ended}) == 1_000
    assert len(first.ended) + len(second.ended) == 1_000
    stage.redis.config_set("maxmemory", 0)
    stage.send_numbers(keys=10, each=5, first=101)
    stage.wait_settled()


# -- lines -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@as_consumer
def test_connections_that_are_cut_in_the_middle_of_reads_and_acks_cost_nothing(
    start_stage: StartStage, redis_url: str, proxy: TcpProxy
) -> None:
    """Replies and requests lost at any byte: asked again, answered again, and nothing is handled twice or never."""
    stage = start_stage(f"redis://127.0.0.1:{proxy.port}/0")
    recorder = Recorder()
    stage.consume(recorder)
    for number, after in enumerate((0, 1, 50, 700, 4_000)):
        proxy.cut_after(server_bytes=after)
        direct_send(stage, redis_url, first=1 + 40 * number)
        proxy.wait_for_cut(2 * number + 1, timeout_s=20)
        proxy.cut_after(client_bytes=after)
        direct_send(stage, redis_url, first=21 + 40 * number)
        proxy.wait_for_cut(2 * number + 2, timeout_s=20)
    wait_until(lambda: recorder.count() == 5 * 400, timeout_s=40, what="all handled")
    stage.wait_settled()
    recorder.assert_in_order()
    assert len(recorder.begun) == 5 * 400


def direct_send(stage: Stage, redis_url: str, *, first: int) -> None:
    """Send 200 messages past the proxy."""
    with stage.sending_to(redis_url):
        stage.send_numbers(keys=10, each=20, first=first)


@as_consumer
def test_acks_wait_while_the_node_can_not_be_reached(
    start_stage: StartStage, redis_url: str, proxy: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection breaks with acks to be sent, and no new one can be made for a while."""
    stage = start_stage(f"redis://127.0.0.1:{proxy.port}/0")
    go_on = threading.Event()

    def act(_body: bytes, _ctx: Context) -> None:
        go_on.wait(30)

    recorder = Recorder(act)
    stage.send_numbers(keys=8, each=10)
    stage.consume(recorder)
    wait_until(lambda: len(recorder.begun) == 8, what="all keys begun")
    proxy.refuse_new()
    proxy.reset_all()
    go_on.set()
    wait_until(lambda: recorder.count() == 80, what="all in hand handled")
    wait_until(lambda: [event_of(r) for r in caplog.records].count("settling_waits") >= 2, what="acks wait")
    proxy.heal()
    wait_until(stage.all_settled, timeout_s=20, what="settled")
    assert len(recorder.begun) == 80


@as_consumer
def test_a_connection_that_goes_silent_is_given_up_after_the_timeout(
    start_stage: StartStage, redis_url: str, proxy: TcpProxy, caplog: pytest.LogCaptureFixture
) -> None:
    stage = start_stage(f"redis://127.0.0.1:{proxy.port}/0")
    recorder = Recorder()
    stage.consume(recorder, settings=stage.settings(socket_timeout_s=0.5))
    stage.send_numbers(keys=5, each=2)
    stage.wait_settled()
    proxy.blackhole()
    direct_send(stage, redis_url, first=3)
    wait_until(lambda: "reading_waits" in caplog.text, timeout_s=20, what="it gave the line up")
    proxy.reset_all()
    proxy.heal()
    wait_until(lambda: recorder.count() == 210, timeout_s=20, what="all handled")
    recorder.assert_in_order()


def test_settings_that_void_the_promise_are_refused_while_running_too(
    start_stage: StartStage, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """After a restart with another eviction policy the member says what to change, lives, and goes on when it is."""
    stage = start_stage(own_redis.url)
    recorder = Recorder()
    stage.consume(recorder)
    stage.send_numbers(keys=5, each=2)
    stage.wait_settled()
    stage.redis.config_set("maxmemory-policy", "allkeys-lru")
    with caplog.at_level(logging.WARNING):
        stage.redis.client_kill_filter(_type="normal", skipme=True)
        wait_until(
            lambda: any("maxmemory-policy noeviction" in str(r.__dict__.get("reason")) for r in caplog.records),
            timeout_s=20,
            what="it says what to change",
        )
    stage.redis.config_set("maxmemory-policy", "noeviction")
    stage.send_numbers(keys=5, each=2, first=3)
    wait_until(lambda: recorder.count() == 20, timeout_s=20, what="it goes on")
