"""Who owns what, sampled while owners come, go and are cut off: cases 33, 41, 42 and 44 with whole members."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from psycopg.conninfo import conninfo_to_dict
from pydantic import SecretStr

from mqlayer import Context
from mqlayer.consuming.engine.clock import clock
from mqlayer.consuming.ordered.member import OrderedMember
from mqlayer.consuming.ordered.owned_partitions import OwnershipState
from mqlayer.domain.routing import lp_of
from mqlayer.groups import rebalance_groups
from mqlayer.redis.node_connection import Command, NodeConnection
from mqlayer.redis.partition_scripts import LockHolder, acquire_command, release_command, settle_command
from mqlayer.stack import RedisServer
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.wait import wait_until
from tests.proof.proxy import TcpProxy
from tests.proof.route_ranges import range_of

OPERATIONS, MANY_OPERATIONS = 24_000, 100_000
"""How many calls race in the suite, and in its long form."""
SAMPLE_EVERY_S = 0.0005
MEMBERS = 3


@pytest.fixture
def proxies(database_dsn: str) -> Iterator[list[TcpProxy]]:
    """A way to Postgres for each member, to be broken one by one."""
    port = int(str(conninfo_to_dict(database_dsn)["port"]))
    with ExitStack() as cleanup:
        yield [cleanup.enter_context(TcpProxy("127.0.0.1", port)) for _ in range(MEMBERS)]


def through(stage: Stage, proxy: TcpProxy) -> SecretStr:
    """Return the stage's database, reached through a proxy."""
    port = str(conninfo_to_dict(stage.dsn)["port"])
    return SecretStr(stage.dsn.replace(f":{port}/", f":{proxy.port}/"))


def valid_epoch(member: OrderedMember, partition: int) -> int | None:
    """Return the epoch under which a member would start a message of a partition now."""
    for owned in member.ownership.all():
        if (
            owned.partition == partition
            and owned.state is OwnershipState.OPEN
            and clock() < member._heartbeat.lease.until
        ):
            return owned.epoch
    return None


def two_owners(members: list[OrderedMember], partition: int) -> bool:
    """Say whether two members hold a partition: one before and after the other was seen to."""
    for one, other in itertools.permutations(members, 2):
        before = valid_epoch(one, partition)
        if before is not None and valid_epoch(other, partition) is not None and valid_epoch(one, partition) == before:
            return True
    return False


@pytest.mark.full
@pytest.mark.slow
def test_no_two_members_ever_hold_a_partition_while_they_are_cut_off_and_come_back(
    stage: Stage, proxies: list[TcpProxy]
) -> None:
    """Case 33: sampled all the time, while each member in turn loses its database for longer than its lease."""
    recorders = [Recorder() for _ in range(MEMBERS)]
    members = [
        member_of(stage.consume(recorder, settings=stage.settings(lease_s=1.0, dsn=through(stage, proxy))))
        for recorder, proxy in zip(recorders, proxies, strict=True)
    ]
    found: list[int] = []
    samples = itertools.count()
    ended = threading.Event()

    def sample() -> None:
        # Without a pause it would take the members' time, more than it saw.
        while not ended.wait(SAMPLE_EVERY_S):
            found.extend(partition for partition in stage.partitions if two_owners(members, partition))
            next(samples)

    rng, sent = random.Random(7), 1
    with ThreadPoolExecutor(1) as pool:
        sampler = pool.submit(sample)
        try:
            for proxy in [*proxies, *proxies]:
                proxy.blackhole()
                until = time.monotonic() + rng.uniform(1.2, 1.8)
                while time.monotonic() < until:
                    stage.send_numbers(keys=10, each=2, first=sent)
                    sent += 2
                proxy.heal()
                proxy.reset_all()
            stage.wait_settled(timeout_s=30)
        finally:
            ended.set()
        sampler.result()
    assert found == []
    assert next(samples) > 300
    assert max(epoch for _, _, epoch, _ in stage.assignments()) > 6
    first: dict[str | None, list[int]] = {}
    for handled in sorted(itertools.chain(*(recorder.ended for recorder in recorders)), key=lambda h: h.offset):
        first.setdefault(handled.key, []).append(int(handled.body))
    assert all(sorted(set(numbers)) == list(range(1, sent)) for numbers in first.values())


def test_a_member_stops_by_its_own_clock_before_the_database_frees_its_partitions(
    stage: Stage, proxies: list[TcpProxy]
) -> None:
    """Case 41: the margin, measured by the database at the moment when the member has stopped."""
    # So large a margin that this process may stand still before it asks.
    lease_s, margin = 10.0, 0.6
    settings = stage.settings(lease_s=lease_s, lease_margin=margin, dsn=through(stage, proxies[0]))
    member = member_of(stage.consume(Recorder(), settings=settings))
    wait_until(lambda: len(member.owned()) == 2, what="it holds partitions")
    with stage.database.connection() as connection:
        proxies[0].blackhole()
        wait_until(lambda: not member._heartbeat.lease.holds(), timeout_s=20, what="it stopped by itself")
        row = connection.execute(
            "SELECT extract(epoch FROM lease_until - clock_timestamp()) FROM mqlayer.member"
        ).fetchone()
    assert row is not None
    assert 0 < row[0] <= lease_s * margin + 0.1
    assert set(stage.owners().values()) == {member.member_id}
    proxies[0].heal()


@pytest.mark.full
def test_members_without_their_database_for_longer_than_their_leases_keep_what_they_had(
    start_stage: StartStage, redis_url: str, proxies: list[TcpProxy]
) -> None:
    """Nothing changes hands but epochs, each once at the most; a worker's scan leaves them the time."""
    stage = start_stage(redis_url, partitions=6)
    recorders = [Recorder() for _ in range(MEMBERS)]
    settings = stage.settings(lease_s=4.0, dsn=through(stage, proxies[0]))
    members = [member_of(stage.consume(recorder, settings=settings)) for recorder in recorders]
    wait_until(lambda: sorted(Counter(stage.owners().values()).values()) == [2, 2, 2], timeout_s=20, what="two each")
    owners, before = stage.owners(), {partition: epoch for partition, _, epoch, _ in stage.assignments()}
    proxies[0].blackhole()
    with stage.database.connection() as connection:
        living = "SELECT FROM mqlayer.member WHERE lease_until >= now()"
        wait_until(lambda: not connection.execute(living).rowcount, timeout_s=20, what="all leases to run out")
        drawn = connection.execute("SELECT last_value FROM mqlayer.epoch").fetchone()
    assert not any(member._heartbeat.lease.holds() for member in members)
    assert rebalance_groups(stage.database) == 0
    proxies[0].heal()
    proxies[0].reset_all()
    stage.send_numbers(keys=30, each=2)
    stage.wait_settled(timeout_s=20)
    wait_until(lambda: all(member._heartbeat.lease.holds() for member in members), timeout_s=20, what="all to be back")
    assert stage.owners() == owners
    assert drawn is not None
    raised = [epoch for partition, _, epoch, _ in stage.assignments() if epoch != before[partition]]
    with stage.database.connection() as connection:
        row = connection.execute("SELECT last_value - %s FROM mqlayer.epoch", drawn).fetchone()
    assert row == (len(raised),), "no partition was under an epoch in between"
    assert len(raised) >= len(stage.partitions) // MEMBERS


def test_a_member_that_could_not_say_that_it_leaves_says_so_with_its_next_heartbeat(
    stage: Stage, proxies: list[TcpProxy], caplog: pytest.LogCaptureFixture
) -> None:
    """Its database was away for a moment, while a handler ran: what it had is not given back to it then."""
    go_on = threading.Event()

    def act(_body: bytes, _ctx: Context) -> None:
        go_on.wait(60)

    busy = Recorder(act)
    leaving = stage.consume(busy, settings=stage.settings(lease_s=20.0, dsn=through(stage, proxies[0])))
    other = member_of(stage.consume(Recorder(), settings=stage.settings(lease_s=20.0)))
    wait_until(lambda: len(set(stage.owners().values())) == 2, timeout_s=20, what="one partition each")
    stage.send_numbers(keys=10, each=1)
    wait_until(lambda: bool(busy.begun), what="a handler to run")
    proxies[0].refuse_new()
    proxies[0].reset_all()
    with ThreadPoolExecutor(1) as pool, stage.database.connection() as connection:
        stopped = pool.submit(leaving.stop)
        wait_until(lambda: "left_to_lease" in caplog.text, timeout_s=10, what="it to fail")
        proxies[0].heal()
        said = "SELECT FROM mqlayer.member WHERE leaving"
        wait_until(lambda: connection.execute(said).rowcount == 1, timeout_s=10, what="it to say so")
        go_on.set()
        wait_until(lambda: set(stage.owners().values()) == {other.member_id}, timeout_s=10, what="the other has all")
        assert stopped.result(10)


@pytest.mark.full
def test_a_handler_of_many_leases_is_left_alone_until_its_member_goes_offline(
    stage: Stage, proxies: list[TcpProxy]
) -> None:
    """Case 70: heartbeats renew while it runs, one delivery; cut off from Postgres, another has the message soon."""
    lease_s, hang = 2.0, threading.Event()

    def act(body: bytes, _ctx: Context) -> None:
        hang.wait(3.5 * lease_s if body == b"1" else 60)

    first, second = Recorder(act), Recorder()
    member = member_of(stage.consume(first, settings=stage.settings(lease_s=lease_s, dsn=through(stage, proxies[0]))))
    stage.consume(second, settings=stage.settings(lease_s=lease_s))
    wait_until(lambda: len(set(stage.owners().values())) == 2, timeout_s=20, what="one partition each")
    [(partition, epoch)] = [(p, epoch) for p, owner, epoch, _ in stage.assignments() if owner == member.member_id]
    names = (f"key-{number}" for number in itertools.count())
    key = next(name for name in names if range_of(stage.route, lp_of(name.encode())).partition == partition)

    stage.send([(key, b"1")])
    wait_until(lambda: stage.position(partition) == (2, 2), timeout_s=20, what="the long one settled")
    assert [(h.epoch, h.attempt) for h in first.begun] == [(epoch, 1)]
    assert second.begun == []

    stage.send([(key, b"2")])
    wait_until(lambda: len(first.begun) == 2, what="the next one begun")
    proxies[0].blackhole()
    wait_until(lambda: second.bodies() == [b"2"], timeout_s=5 * lease_s, what="the other to have it")
    assert second.begun[0].epoch > epoch
    hang.set()
    wait_until(lambda: first.bodies() == [b"1", b"2"], what="the old handler ended")
    proxies[0].heal()
    wait_until(lambda: stage.position(partition) == (3, 3), what="it settled by the other")


def operate(connection: NodeConnection, owner: LockHolder, rng: random.Random) -> list[tuple[int, int, str]]:
    """Take a partition and use it for a while; return what was accepted, with its number in the node's order."""
    take = acquire_command(connection, owner, start=1, afresh=True)
    settle = settle_command(connection, owner, [(rng.randint(1, 100), 150)])
    uses = rng.choices(
        [settle, acquire_command(connection, owner, start=1), release_command(connection, owner)], [20, 20, 1], k=24
    )
    # One transaction each: what the script answers, and which number that has in the order of the node.
    commands: list[Command] = []
    for command in [take, *uses]:
        commands += [("MULTI",), command, ("INCR", f"{owner.prefix}:{{{owner.partition}}}:order"), ("EXEC",)]
    accepted = []
    for done in connection.call(commands)[3::4]:
        answer, number = done
        if answer[0] in {b"acquired", b"unchanged", b"settled", b"released"}:
            accepted.append((number, owner.epoch, owner.member))
    return accepted


@pytest.mark.slow
def test_under_any_race_only_the_highest_epoch_so_far_is_ever_accepted(
    request: pytest.FixtureRequest, start_stage: StartStage, every_redis: RedisServer
) -> None:
    """Case 33 at the node: many owners race with random pauses; the node's own order of what it accepted is judged."""
    operations = MANY_OPERATIONS if request.config.getoption("--long", default=False) else OPERATIONS
    stage = start_stage(every_redis.url, partitions=1)
    stage.send_numbers(keys=1, each=200)
    stage.consume(Recorder()).stop()
    group_id, epochs, lock = stage.group_id(), itertools.count(1_000), threading.Lock()
    accepted: list[tuple[int, int, str]] = []

    def race(number: int) -> None:
        rng, seen = random.Random(number), []
        with stage.connection() as connection:
            for turn in range(operations // 8 // 25):
                with lock:
                    epoch = next(epochs)
                if rng.random() < 0.3:
                    time.sleep(rng.uniform(0, 0.004))  # a pause between being told and acting, as long as any
                owner = LockHolder(stage.prefix, stage.partitions[0], group_id, f"m{number}-{turn}", epoch)
                seen += operate(connection, owner, rng)
        with lock:
            accepted.extend(seen)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(race, range(8)))
    accepted.sort()
    assert len(accepted) > operations / 20
    highest = 0
    owner_of: dict[int, str] = {}
    for _, epoch, member in accepted:
        assert epoch >= highest
        assert owner_of.setdefault(epoch, member) == member
        highest = epoch
