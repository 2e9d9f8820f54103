"""How fast a limited group begins messages: over members, partitions, deaths, retries, and changes of the limit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from mqlayer import App, Context, Receiver, RetryLater
from mqlayer.consuming.engine.options import MemberOptions
from mqlayer.domain.rates import RateLimit, RateShare
from mqlayer.errors import Conflict, InvalidInput
from mqlayer.groups import find_group
from mqlayer.groups.admin import set_group
from mqlayer.redelivery import release_parked
from mqlayer.redis.keys import rate_key
from mqlayer.redis.rate_script import RateGrant, rate_command, rate_reply
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.due_keys import try_now
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

GROUP_ID: Final = 7
PARTITION: Final = 1


class Clocked(Recorder):
    """A recorder that notes when each message was begun."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.at: list[float] = []

    def __call__(self, body: bytes, ctx: Context) -> None:
        self.at.append(time.monotonic())
        super().__call__(body, ctx)


def begun_in(recorders: list[Clocked], since: float, seconds: float) -> int:
    """Wait for the end of a time, and return how many messages were begun in it."""
    until = since + seconds
    wait_until(lambda: time.monotonic() >= until, timeout_s=seconds + 5, what="the end of the time")
    return sum(since <= at < until for recorder in recorders for at in list(recorder.at))


def assert_rate(recorders: list[Clocked], seconds: float, *, low: float, high: float) -> None:
    """Fail unless so many messages are begun in one of five stretches that follow each other.

    A process that the machine holds up begins fewer, and makes up for them behind that.
    """
    counts: list[int] = []
    while not counts or not low <= counts[-1] <= high:
        assert len(counts) < 5, f"{counts} messages in {seconds:g} s each, not {low:g} to {high:g}"
        counts.append(begun_in(recorders, time.monotonic(), seconds))


# -- the bucket ------------------------------------------------------------------------------------------------------


class Bucket:
    """One partition's bucket on a real node."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.key = stage, rate_key(stage.prefix, PARTITION, GROUP_ID)
        self.connection = stage.connection()

    def take(self, wanted: float, *, per_s: float = 0.001, size: float = 10.0, first: float = 1.0) -> RateGrant:
        share = RateShare(per_s, size, first)
        command = rate_command(self.connection, self.stage.prefix, PARTITION, GROUP_ID, share, wanted=wanted)
        return rate_reply(self.connection.call([command])[0], "the node")

    def shift(self, seconds: float) -> None:
        """Let the node's clock be so much further on than when the bucket was filled; less than 0: it went back."""
        at = int(self.stage.redis.hget(self.key, "at_us") or 0)
        self.stage.redis.hset(self.key, "at_us", at - int(seconds * 1e6))


@pytest.fixture
def bucket(every_stage: Stage) -> Iterator[Bucket]:
    bucket = Bucket(every_stage)
    yield bucket
    bucket.connection.close()


def test_a_bucket_gives_what_flowed_into_it_and_no_more_than_it_holds(bucket: Bucket) -> None:
    assert bucket.take(5.0).granted == pytest.approx(1.0, abs=0.01)
    assert bucket.take(5.0).granted == pytest.approx(0.0, abs=0.01)
    bucket.shift(3000)
    given, left = bucket.take(2.0)
    assert given == pytest.approx(2.0, abs=0.01)
    assert left == pytest.approx(1.0, abs=0.01)
    bucket.shift(10**6)
    assert bucket.take(100.0) == (10.0, 0.0)


def test_a_clock_that_goes_back_neither_starves_a_bucket_nor_fills_it(bucket: Bucket) -> None:
    """Case 41 in the manner of rates: a step of the node's clock costs a burst at the most."""
    bucket.take(1.0)
    bucket.shift(-3600)
    assert bucket.take(5.0).granted == pytest.approx(0.0, abs=0.01)
    bucket.shift(2000)
    assert bucket.take(5.0).granted == pytest.approx(2.0, abs=0.01)


def test_a_bucket_that_nobody_asks_goes_by_itself_and_gives_no_flood_when_it_is_new(bucket: Bucket) -> None:
    bucket.take(1.0, per_s=10.0)
    assert 0 < bucket.stage.redis.pttl(bucket.key) <= 62_000
    bucket.stage.redis.delete(bucket.key)
    assert bucket.take(10.0, per_s=0.001, first=0.25).granted == pytest.approx(0.25, abs=0.01)


# -- members ---------------------------------------------------------------------------------------------------------


def test_two_members_with_four_partitions_keep_to_the_rate_of_their_group_over_a_kill(
    start_stage: StartStage, redis_url: str
) -> None:
    """N messages/s within a tenth, over seconds; a member that dies, and its successor, change nothing in that."""
    stage = start_stage(redis_url, partitions=4)
    # Enough for every stretch, however long the member's death takes.
    stage.send_numbers(keys=40, each=120)
    rate = 150.0
    recorders = [Clocked(), Clocked()]
    apps = [limited(stage, recorders[0], rate), limited(stage, recorders[1], None)]
    wait_until(lambda: len(set(stage.owners().values())) == 2, what="both members own something")
    wait_until(lambda: all(len(recorder.at) > 40 for recorder in recorders), what="both handle messages")
    # Time to be done with what the start had given.
    began = time.monotonic()
    assert_rate(recorders, 2.0, low=0.9 * 2 * rate, high=1.1 * 2 * rate)
    # No word to anybody: its lease has to run out.
    member_of(apps[1])._heartbeat._session = None
    apps[1].stop(0.0)
    wait_until(lambda: len(set(stage.owners().values())) == 1, what="one member owns all")
    # Nobody took from the buckets of half of the partitions meanwhile: they give their half of a burst besides.
    assert_rate(recorders, 1.5, low=0.9 * 1.5 * rate, high=1.1 * 1.5 * rate + rate / 2)
    # From first to last: at no time was more begun than the rate and one burst allow.
    assert begun_in(recorders, began, time.monotonic() - began) <= 1.1 * rate * (time.monotonic() - began) + rate
    for recorder in recorders:
        recorder.assert_in_order()


def limited(stage: Stage, recorder: Clocked, rate: float | None) -> App:
    """Start a member of a group whose rate is this."""
    app = stage.app()
    app.consumer(stage.topic, group="g", rate_limit=rate)(recorder)
    app.start()
    return app


def test_a_shared_group_keeps_to_its_rate_whoever_of_its_members_handles(
    start_stage: StartStage, redis_url: str
) -> None:
    stage = start_stage(redis_url, partitions=2)
    stage.send_numbers(keys=40, each=60)
    rate, recorders, apps = 150.0, [Clocked(), Clocked()], [stage.app(), stage.app()]
    for app, recorder in zip(apps, recorders, strict=True):
        app.consumer(stage.topic, group="s", mode="shared", rate_limit=rate)(recorder)
        app.start()
    wait_until(lambda: all(len(recorder.at) > 40 for recorder in recorders), what="both handle messages")
    assert_rate(recorders, 2.0, low=0.9 * 2 * rate, high=1.1 * 2 * rate)
    set_group(runtime_of(stage.database, actor="a test"), stage.topic, "s", rate_limit=math.inf)
    # A message may come again, to the other member.
    wait_until(
        lambda: len({(one.key, one.body) for recorder in recorders for one in list(recorder.ended)}) == 2400,
        timeout_s=30, what="the rest, without a limit",
    )  # fmt: skip


@pytest.mark.full
def test_a_busy_partition_has_the_share_of_those_that_are_quiet_beside_it(
    start_stage: StartStage, redis_url: str
) -> None:
    stage = start_stage(redis_url, partitions=8)
    key = stage.key_in(stage.partitions[3])
    stage.send((key, b"%d" % number) for number in range(1000))
    recorder = Clocked()
    limited(stage, recorder, 80.0)
    wait_until(lambda: len(recorder.at) > 20, what="some are handled")
    assert_rate([recorder], 1.5, low=0.88 * 120, high=1.12 * 120)


def test_a_rate_that_is_changed_while_members_run_is_in_force_at_once(stage: Stage) -> None:
    """A rate of less than a message a second works too, and nobody spins for it."""
    stage.send_numbers(keys=10, each=200)
    recorder = Clocked()
    app = limited(stage, recorder, 0.1)
    wait_until(lambda: len(recorder.at) == 1, timeout_s=10, what="the first message")
    turns = time.thread_time(), time.process_time()
    assert begun_in([recorder], time.monotonic(), 1.0) == 0
    assert time.process_time() - turns[1] < 0.6
    set_group(runtime_of(stage.database, actor="test"), stage.topic, "g", rate_limit=200, rate_burst=10)
    app.members[0].wake()
    wait_until(lambda: len(recorder.at) > 50, timeout_s=20, what="the higher rate")
    set_group(runtime_of(stage.database, actor="test"), stage.topic, "g", rate_limit=float("inf"))
    stage.wait_settled()
    assert find_group(stage.database, stage.topic, "g").rate is None
    recorder.assert_in_order()


@pytest.mark.full
def test_other_attempts_count_as_messages(stage: Stage) -> None:
    def fail(body: bytes, ctx: Context) -> None:
        raise RetryLater(0.01)

    stage.send((f"key-{number}", b"1") for number in range(20))
    recorder = Clocked(act=fail)
    limited(stage, recorder, 50.0)
    wait_until(lambda: len(recorder.at) > 30, what="each was tried")
    assert_rate([recorder], 1.2, low=0.85 * 60, high=1.15 * 60)


def test_what_is_parked_and_due_keeps_to_the_rate_as_well(stage: Stage) -> None:
    """Fails once, is parked for a second, and comes back with all the rest of its key: 600 messages out of Postgres."""

    def fail_first(body: bytes, ctx: Context) -> None:
        if ctx.attempt == 1 and body == b"0":
            raise RetryLater(11.0)

    stage.send(("key", b"%d" % number) for number in range(600))
    recorder = Clocked(act=fail_first)
    limited(stage, recorder, None)
    wait_until(lambda: parked(stage) == 600, what="the key is parked")
    set_group(runtime_of(stage.database, actor="test"), stage.topic, "g", rate_limit=60, rate_burst=1)
    try_now(stage.database, stage.group_id("g"), keep_attempts=True)
    wait_until(lambda: len(recorder.at) > 20, what="some came back")
    assert_rate([recorder], 1.2, low=0.8 * 72, high=1.2 * 72)
    recorder.assert_in_order()


def test_keys_that_wait_for_another_attempt_take_nothing_of_what_a_limited_member_reads_ahead(
    start_stage: StartStage, redis_url: str
) -> None:
    """Case 64: failing keys delay no other one, however little may be in hand by the rate."""

    def fail_bad(body: bytes, ctx: Context) -> None:
        if body == b"bad":
            raise RetryLater(60.0)

    stage = start_stage(redis_url, partitions=1)
    stage.send((f"bad-{number}", b"bad") for number in range(4))
    recorder = Clocked(act=fail_bad)
    app = stage.app()
    options = MemberOptions(concurrency=1)
    app.consumer(stage.topic, group="g", rate_limit=8.0, rate_burst=1, policy="block", options=options)(recorder)
    app.start()
    wait_until(lambda: len(recorder.at) >= 4, what="all of them failed")
    stage.send([("good", b"good")])
    wait_until(lambda: b"good" in recorder.bodies(), what="the other key is handled")


@pytest.mark.full
def test_parked_keys_go_on_beside_a_stream_that_takes_all_of_the_rate(start_stage: StartStage, redis_url: str) -> None:
    """Both have a share of it: what is read, and what comes back from Postgres."""
    failed: list[bytes] = []

    def fail_first(body: bytes, ctx: Context) -> None:
        if not failed:
            failed.append(body)
            raise RetryLater(11.0)

    stage = start_stage(redis_url, partitions=1)
    stage.send(("key", b"%d" % number) for number in range(100))
    recorder = Clocked(act=fail_first)
    member = member_of(limited(stage, recorder, None))
    wait_until(lambda: parked(stage) == 100, what="the key is parked")
    set_group(runtime_of(stage.database, actor="test"), stage.topic, "g", rate_limit=20, rate_burst=1)
    wait_until(lambda: member.settings.rate_limiter.limit is not None, what="the rate is known")
    stage.send((f"other-{number}", b"1") for number in range(400))
    wait_until(lambda: recorder.count() > 5, what="the stream takes all of the rate")
    others = recorder.count()
    release_parked(runtime_of(stage.database, actor="test"), stage.topic, "g", key="key")
    wait_until(lambda: len(recorder.bodies("key")) > 10, timeout_s=15, what="the key goes on")
    assert recorder.count() - len(recorder.bodies("key")) >= others + 3
    assert recorder.bodies("other-399") == []
    recorder.assert_in_order()


def parked(stage: Stage) -> int:
    with stage.database.connection() as connection:
        row = connection.execute("SELECT count(*) FROM mqlayer.parked_message").fetchone()
    return int(row[0]) if row else 0


def test_a_member_that_brings_another_rate_is_refused_and_no_group_has_a_rate_of_nothing(stage: Stage) -> None:
    """Case 63."""
    limited(stage, Clocked(), 50.0)
    with pytest.raises(Conflict, match=r"rate_limit = 50\.0.*brings 60"):
        limited(stage, Clocked(), 60.0)
    for wrong in ({"rate_limit": 0}, {"rate_limit": -1}, {"rate_burst": 0.5}, {"rate_limit": float("nan")}):
        with pytest.raises(InvalidInput):
            set_group(runtime_of(stage.database, actor="test"), stage.topic, "g", **wrong)


# -- ordered pop -----------------------------------------------------------------------------------------------------


def test_receivers_are_given_no_more_than_the_rate_and_redelivery_counts(
    start_stage: StartStage, redis_url: str
) -> None:
    """What is given again under the same attempt was counted before; what comes again by its time counts again."""
    stage = start_stage(redis_url, partitions=1)
    stage.send((f"key-{number}", b"1") for number in range(300))
    with Receiver(stage.topic, group="g", settings=stage.settings()) as receiver:
        set_group(runtime_of(stage.database, actor="test"), stage.topic, "g", rate_limit=50, rate_burst=1)
        listing = receiver._opened().fetcher._cache

        def known() -> bool:
            listing.refresh()
            return all(spot.group_partition.rate for spot in listing.views)

        wait_until(known, what="the rate is known")
        given, before = list[int](), time.monotonic()
        # A machine that holds this process up makes a stretch longer, or shorter.
        while not given or not 0.8 * 75 <= given[-1] <= 1.2 * 75:
            assert len(given) < 5, given
            given.append(0)
            began = time.monotonic()
            while time.monotonic() - began < 1.5:
                # The inflow begins with the former grant, some time before its call has returned.
                asked, since = time.monotonic(), before
                messages, before = receiver.receive(100, wait_s=0.2, visibility_timeout_s=0.3), asked
                assert len(messages) <= 2 + 50 * (time.monotonic() - since)
                given[-1] += len(messages)


def test_the_shares_of_partitions_are_the_rate() -> None:
    limit = RateLimit.of(100.0, None, 8)
    assert limit is not None
    assert limit.share == RateShare(12.5, 12.5, 0.125)
    assert RateLimit(0.1, 1.0, 8).whole_share == RateShare(0.0125, 1.0, 1.0)
    assert RateLimit.of(None, 5.0) is None
    # Members fetch a quarter of a second's at a time.
    assert RateLimit.of(100.0, 1.0) == RateLimit(100.0, 25.0)
