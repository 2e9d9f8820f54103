"""`mqlayer verify`: silent about a system that is whole, also while it runs; each thing that can differ is named."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import redis

import mqlayer
from mqlayer.archive import archive_pass
from mqlayer.doctor import Finding
from mqlayer.doctor.verify import verify
from mqlayer.domain.routing import lp_of
from mqlayer.errors import NotFound
from mqlayer.redis.keys import group_keys, partition_keys
from mqlayer.relay import relay_once
from mqlayer.topics import set_archived
from tests.fixtures.commands import Commands
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of
from tests.proof.world import World

KEY = next(f"key-{n}" for n in range(20) if lp_of(f"key-{n}".encode()) >= 512)
LP = lp_of(KEY.encode())
RULES = {"partition", "stream", "seal", "marks", "outbox", "archive", "group", "chain"}


class Whole:
    """A system after some life: a split, two sources, a group that settled what there was, an archive of it."""

    def __init__(self, world: World) -> None:
        self.world, self.database = world, world.database
        self.client = redis.Redis.from_url(world.urls[0], decode_responses=True)
        self.settings = world.settings(lease_s=5.0)

    def live(self) -> None:
        """Let it live: partition 1 of [0, 512) becomes 3 and 4, partition 2 stays."""
        set_archived(runtime_of(self.database, actor="test"), "orders", archived=True)
        self.world.publish(40)
        relay_once(self.settings)
        self.send(20)
        split(runtime_of(self.database, self.world.key_prefix), "orders", 1)
        self.world.publish(40, tag="later")
        self.send(20)
        relay_once(self.settings)
        app = mqlayer.App(self.settings)
        seen: list[bytes] = []
        app.consumer("orders", group="g")(seen.append)
        app.start()
        wait_until(lambda: len(seen) == 120, what="all handled")
        app.stop()
        archive_pass(runtime_of(self.database, self.world.key_prefix))

    def send(self, count: int) -> None:
        """Publish past the outbox."""
        with mqlayer.Producer(self.settings, name="direct") as producer:
            for number in range(count):
                producer.send("orders", key=f"direct-{number % 7}", body=b"%d" % number)

    def verify(self) -> list[Finding]:
        """Return what is said."""
        return verify(runtime_of(self.database, self.world.key_prefix, application=self.database), "orders", deep=True)

    def wrong(self) -> list[Finding]:
        """Return what is said of differences."""
        return [finding for finding in self.verify() if finding.verdict != "ok"]

    def meta(self, partition: int) -> str:
        """Return a key's name."""
        return partition_keys(self.world.key_prefix, partition).meta.decode()

    def log(self, partition: int) -> str:
        """Return a key's name."""
        return partition_keys(self.world.key_prefix, partition).log.decode()

    def marks(self, partition: int) -> str:
        """Return a key's name."""
        return partition_keys(self.world.key_prefix, partition).marks.decode()

    def lock(self, partition: int) -> str:
        """Return a key's name."""
        return group_keys(self.world.key_prefix, partition, 1).lock.decode()

    def sql(self, text: str) -> None:
        """Do it as nobody should."""
        with kept_session(self.world.dsn, autocommit=True) as connection:
            connection.execute(text.encode())


@pytest.fixture
def whole(database_dsn: str, redis_url: str, key_prefix: str) -> Whole:
    world = World(database_dsn, key_prefix, [redis_url])
    world.add_topic("orders", partitions=2)
    whole = Whole(world)
    whole.live()
    return whole


def test_a_system_that_is_whole_has_no_difference(whole: Whole) -> None:
    found = whole.verify()
    assert {finding.check for finding in found} == RULES
    assert [finding for finding in found if finding.verdict != "ok"] == []


Break = Callable[[Whole], object]


def behind(whole: Whole) -> None:
    """Let the archive forget what was trimmed."""
    whole.client.xtrim(whole.log(4), minid="4-0", approximate=False)
    whole.sql("UPDATE mqlayer_archive.progress SET upto_offset = 2 WHERE partition_id = 4")


def undrain(whole: Whole) -> None:
    """Put a group back behind what it drained, on a node that was armed long before."""
    whole.sql("UPDATE mqlayer.drained SET drained_at = clock_timestamp() + interval '5 seconds'")
    whole.client.hset(whole.lock(1), "committed", 2)


BREAKS: dict[str, tuple[str, str, Break]] = {
    "seal moved": ("seal", "it ends at offset", lambda w: w.sql(
        "UPDATE mqlayer.seal SET next_offset = next_offset + 1")),
    "seal's marks": ("seal", "recorded with the seal is 999", lambda w: w.sql(
        "UPDATE mqlayer.seal SET marks = (SELECT jsonb_object_agg(key, 999) FROM jsonb_each(marks))")),
    "other seal": ("seal", "recorded is", lambda w: w.client.hset(w.meta(1), "seal", "another")),
    "phantom": ("marks", "its database lost commits", lambda w: w.sql(
        f"UPDATE mqlayer_app.counter SET seq = seq - 1 WHERE lp = {LP}")),
    "fell back": ("marks", "recorded as relayed: its node fell back", lambda w: w.client.hset(
        w.marks(2), f"1:{LP}", 1)),
    "hole in a stream": ("stream", "records at offsets", lambda w: w.client.xdel(w.log(2), "9-0")),
    "beginning cut": ("stream", "begins at offset 4, trimming came to 1", lambda w: w.client.xtrim(
        w.log(2), minid="4-0", approximate=False)),
    "given up": ("stream", "given up by an operator", lambda w: w.client.hset(w.meta(2), "lost", "3")),
    "outbox row gone": ("outbox", "0 rows behind seq", lambda w: w.sql(
        f"UPDATE mqlayer_app.relayed SET seq = seq - 2 WHERE lp = {LP}; "
        f"DELETE FROM mqlayer_app.outbox WHERE lp = {LP}")),
    "archive behind": ("archive", "neither has the records between", behind),
    "archived beyond": ("archive", "the stream ends at", lambda w: w.sql(
        "UPDATE mqlayer_archive.progress SET upto_offset = 9999 WHERE partition_id = 2")),
    "archive ahead": ("archive", "is archived up to 9999", lambda w: w.sql(
        f"UPDATE mqlayer_archive.mark SET last_seq = 9999 WHERE lp = {LP}")),
    "archive's row gone": ("archive", "records for seqs", lambda w: w.sql(
        f"DELETE FROM mqlayer_archive.record WHERE lp = {LP} AND seq = 2")),
    "settled beyond": ("group", "it settled up to offset 998", lambda w: w.client.hset(w.lock(2), "committed", 999)),
    "not drained": ("group", "Postgres says that it drained it", undrain),
    "acks lost": ("group", "its node fell back since", lambda w: w.sql(
        "UPDATE mqlayer.node SET armed_at = clock_timestamp() + interval '5 seconds'")),
    "epoch ahead": ("group", "epoch 99999 is in force", lambda w: w.client.hset(w.lock(2), "epoch", 99999)),
    "unsettled gone": ("group", "it has not settled them", lambda w: (
        w.client.hset(w.lock(2), "committed", 2), w.client.xtrim(w.log(2), minid="4-0", approximate=False))),
    "partition closed": ("partition", "open in Postgres, sealed", lambda w: w.client.hset(
        w.meta(2), "state", "sealed")),
    "other range": ("partition", "[0, 512) under its number", lambda w: w.client.hset(
        w.meta(2), mapping={"lp_from": 0, "lp_to": 512})),
    "partition gone": ("partition", "nothing on its node", lambda w: w.client.delete(w.meta(2))),
}  # fmt: skip


def test_what_differs_is_named_with_what_to_do(whole: Whole) -> None:
    """One after the other, in an order in which no break hides a later one."""
    before: list[Finding] = []
    for name, (check, seen, break_it) in BREAKS.items():
        break_it(whole)
        found = whole.wrong()
        said = [one for one in found if one not in before and one.check == check and seen in one.seen]
        assert said, f"{name}: {found}"
        assert all(one.fix for one in said), name
        before = found


def test_a_chain_that_breaks_inside_a_stream_is_found_by_its_records(whole: Whole) -> None:
    """A record written by hand, with a seq that does not follow; all sums are right otherwise."""
    following = int(whole.client.hget(whole.meta(2), "next") or 0)
    mark = int(whole.client.hget(whole.marks(2), f"1:{LP}") or 0)
    whole.client.xadd(whole.log(2), {"m": f"1:{LP}:{mark + 5}:0", "k": KEY, "b": "x"}, id=f"{following}-0")
    whole.client.hset(whole.meta(2), "next", following + 1)
    whole.client.hset(whole.marks(2), f"1:{LP}", mark + 5)
    assert [f"offset {following}: 1:{LP} goes from {mark} to {mark + 5}"] == [
        finding.seen for finding in whole.wrong() if finding.check == "chain"
    ]


def test_nothing_differs_while_everything_runs(whole: Whole) -> None:
    """Published, relayed, handled, archived and split meanwhile: the order of asking alone keeps the numbers apart."""
    over, app = threading.Event(), mqlayer.App(whole.settings)
    app.consumer("orders", group="g")(lambda body: None)

    def publish() -> None:
        while not over.is_set():
            whole.world.publish(20, tag="busy")

    def archive() -> None:
        while not over.is_set():
            archive_pass(runtime_of(whole.world.database, whole.world.key_prefix))

    threads = [threading.Thread(target=work) for work in (publish, archive)]
    app.start()
    with whole.world.relay():
        for thread in threads:
            thread.start()
        try:
            found = [finding for _ in range(5) for finding in whole.wrong()]
            split(runtime_of(whole.database, whole.world.key_prefix), "orders", 2)
            found += [finding for _ in range(5) for finding in whole.wrong()]
        finally:
            over.set()
            for thread in threads:
                thread.join()
    app.stop()
    assert [finding for finding in found if finding.verdict != "unknown"] == []


@pytest.mark.full
def test_a_node_that_is_not_armed_is_told_and_not_judged(whole: Whole) -> None:
    whole.sql("UPDATE mqlayer.node SET armed_run_id = 'another'")
    (said,) = whole.wrong()
    assert (said.check, said.verdict) == ("node", "unknown")


def test_the_command_exits_with_one_where_something_differs(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in whole.world.environment().items():
        monkeypatch.setenv(name, value)
    run = Commands()
    assert run("verify", "--deep").exit_code == 0
    whole.client.delete(whole.meta(2))
    failed = run("verify", "orders", "--json")
    assert failed.exit_code == 1
    assert '"check": "partition"' in failed.stdout
    # What could not be asked is not the same as what agrees.
    whole.sql("UPDATE mqlayer.node SET armed_run_id = 'another'")
    untold = run("verify", "orders", "--json")
    assert untold.exit_code == 3
    assert '"verdict": "unknown"' in untold.stdout


@pytest.mark.full
def test_a_topic_that_is_not_there_is_an_error(whole: Whole) -> None:
    with pytest.raises(NotFound, match="topic list"):
        verify(runtime_of(whole.database, whole.world.key_prefix, application=whole.database), "nothing")
