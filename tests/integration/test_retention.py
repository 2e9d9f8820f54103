"""Limits of a topic's streams: what is kept of settled records, and what becomes of unsettled ones."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from mqlayer import Context, Receiver
from mqlayer.doctor.health import system_health
from mqlayer.errors import InvalidInput
from mqlayer.events import Event, on_event, remove_hook
from mqlayer.exporter.samples import control_samples
from mqlayer.groups import ensure_group
from mqlayer.groups.group import GroupSettings
from mqlayer.inspect.audit_trail import AuditFilter, audited_acts
from mqlayer.maintenance import trim_pass
from mqlayer.redelivery import failure_counts
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.topics import set_stream_retention
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import QUICK_BACKOFF_S, Recorder, Stage, StartStage
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.shared_members import pending, share
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import split

COUNT = 1000


class Kept:
    """A topic of one partition whose groups and limits a test sets."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.partition = stage, stage.partitions[0]
        self.key = stage.key_in(self.partition)

    def send(self, first: int, last: int, *, keys: tuple[str, ...] = ()) -> None:
        """Append numbered bodies, to each of the keys in turn."""
        names = keys or (self.key,)
        self.stage.send((names[n % len(names)], b"%d" % n) for n in range(first, last + 1))

    def group(self, name: str = "g") -> int:
        """Create a group that begins with the first record."""
        settings = GroupSettings(start="earliest", backoff_s=QUICK_BACKOFF_S)
        with closing(RouteCache(self.stage.database)) as routes:
            ensure_group(self.stage.runtime, routes, topic="orders", name=name, settings=settings)
        return self.stage.group_id(name)

    def limit(self, **limits: Any) -> None:
        """Set the topic's limits."""
        set_stream_retention(self.stage.runtime, "orders", **limits)

    def trim(self) -> int:
        """Run a pass; return how many unsettled messages it dropped."""
        return sum(trim_pass(self.stage.runtime).unsettled.counts.values())

    def first(self) -> int:
        """Return the lowest offset that is there."""
        keys = self.stage.keys(self.partition)
        entries: Any = self.stage.redis.xrange(keys.log, count=1)
        following: Any = self.stage.redis.hget(keys.meta, "next")
        return int(entries[0][0].split(b"-")[0]) if entries else int(following)

    def dropped(self, group: str = "g") -> int:
        """Return what Postgres counts."""
        (counts,) = failure_counts(self.stage.database, "orders", group)
        return counts.totals.get("dropped", 0)


@pytest.fixture
def kept(start_stage: StartStage, redis_url: str) -> Kept:
    return Kept(start_stage(redis_url, partitions=1))


@pytest.fixture
def events() -> Iterator[list[Event]]:
    found: list[Event] = []
    hook = on_event(found.append)
    yield found
    remove_hook(hook)


def test_settled_records_stay_up_to_each_limit_and_unsettled_ones_beyond_them(kept: Kept) -> None:
    kept.send(1, COUNT)
    kept.limit(retain_messages=400)
    kept.group("slow")
    kept.trim()
    assert kept.first() == 1, "nothing is settled"
    recorder = Recorder()
    kept.stage.consume(recorder, group="slow")
    kept.stage.wait_settled("slow")
    kept.trim()
    assert 501 <= kept.first() <= 601
    kept.limit(retain_messages=0, retain_s=3600)
    kept.trim()
    before = kept.first()
    assert 501 <= before <= 601, "all of it is young"
    # Records of two hours ago are beyond; those behind them are not.
    kept.stage.clock = lambda: time.time() - 7200
    kept.send(COUNT + 1, COUNT + 2)
    kept.stage.wait_settled("slow")
    kept.trim()
    assert kept.first() == before, "a young record keeps what is behind it"
    kept.limit(retain_s=1)
    wait_until(lambda: kept.trim() == 0 and kept.first() > COUNT - 100, what="the young ones are old too")
    assert kept.dropped("slow") == 0


def test_a_stream_is_cut_to_its_bytes_without_groups_too(kept: Kept) -> None:
    kept.stage.send((kept.key, b"x" * 1000) for _ in range(COUNT))
    kept.trim()
    assert kept.first() == 1, "a topic without groups and limits keeps everything"
    kept.limit(retain_bytes=500_000)
    kept.trim()
    size: Any = kept.stage.redis.memory_usage(kept.stage.keys(kept.partition).log)
    assert 400_000 < size < 510_000


def test_unsettled_messages_of_an_absent_group_go_are_counted_and_it_begins_behind_them(
    kept: Kept, events: list[Event]
) -> None:
    kept.send(1, COUNT)
    kept.group()
    go_on = threading.Event()
    first = Recorder(_hangs_at(go_on, b"51"))
    app = kept.stage.consume(first)
    wait_until(lambda: kept.stage.position(kept.partition).committed == 51, what="50 are settled")
    app.stop(0.1)
    with pytest.raises(InvalidInput, match="beyond a limit"):
        kept.limit(retain_unsettled="drop")
    kept.limit(retain_messages=300, retain_unsettled="drop")
    assert kept.trim() == 650
    assert kept.trim() == 0
    assert kept.dropped() == 650
    assert [(one.kind, one.group, one.count) for one in events if one.kind == "dropped"] == [("dropped", "g", 650)]
    acts = audited_acts(kept.stage.database, AuditFilter(act="retention drop"))
    assert [one.facts for one in acts] == [{"messages": 650}]
    later = Recorder()
    kept.stage.consume(later)
    kept.stage.wait_settled()
    assert later.bodies() == [b"%d" % n for n in range(701, COUNT + 1)]
    go_on.set()


def test_an_owner_goes_on_behind_what_went_under_its_handlers(kept: Kept) -> None:
    """Settled messages above them don't count, and later messages of their keys wait for the handlers."""
    go_on = threading.Event()
    recorder = Recorder(_hangs_at(go_on, b"1", b"2"))
    kept.stage.consume(recorder, concurrency=3)
    kept.stage.send([("one", b"1"), ("two", b"2")])
    wait_until(lambda: len(recorder.begun) == 2, what="both handlers hang")
    kept.send(3, COUNT, keys=("k0", "k1", "k2"))
    acks = kept.stage.group_keys(kept.partition).acks
    wait_until(lambda: kept.stage.redis.bitcount(acks) == COUNT - 2, what="all others are settled")
    kept.limit(retain_messages=100, retain_unsettled="drop")
    assert kept.trim() == 2
    assert kept.stage.position(kept.partition).committed == COUNT + 1
    kept.stage.send([("one", b"1001"), ("two", b"1002"), ("k0", b"1003")])
    wait_until(lambda: b"1003" in recorder.bodies(), what="other keys go on")
    assert recorder.bodies("one") == recorder.bodies("two") == []
    go_on.set()
    kept.stage.wait_settled()
    assert (recorder.bodies("one"), recorder.bodies("two")) == ([b"1", b"1001"], [b"2", b"1002"])
    assert recorder.overlaps == []


def test_the_commands_set_limits_and_show_what_they_dropped(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQLAYER_DSN", kept.stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", kept.stage.prefix)
    run = Commands()
    kept.send(1, 300)
    kept.group()
    said = run.text("topic", "set", "orders", "--retain-age", "7d", "--retain-messages", "100")
    assert (
        said == "streams of topic orders keep settled records for 7 d or 100 messages per partition, what comes first\n"
    )
    assert "is no age" in run.failure("topic", "set", "orders", "--retain-age", "soon")
    run.text("topic", "set", "orders", "--retain-unsettled", "drop")
    (shown,) = run.lines("topic", "show", "orders")
    assert (shown["retain_s"], shown["retain_messages"], shown["retain_unsettled"]) == (604_800, 100, "drop")
    assert "beyond a limit" in run.failure("topic", "set", "orders", "--retain-age", "none", "--retain-messages", "0")
    run.text("trim")
    (group,) = run.lines("group", "show", "orders", "g")
    assert group["failures"]["totals"]["dropped"] == 200
    alerts = {one.alert.name: one for one in system_health(kept.stage.runtime).problems}
    assert "200 unsettled messages" in alerts["MqlayerMessagesDropped"].text
    measured = control_samples(kept.stage.runtime)["mqlayer.group.events"]
    assert [value for value, labels in measured if labels["outcome"] == "dropped"] == [200]


def test_receivers_and_shared_members_go_on_behind_it(kept: Kept) -> None:
    kept.send(1, COUNT)
    go_on = threading.Event()
    shared = Recorder(_hangs_at(go_on, *(b"%d" % n for n in range(1, COUNT + 1))))
    with Receiver("orders", group="pop", settings=kept.stage.settings(), start="earliest") as receiver:
        share(kept.stage, shared, group="shared", concurrency=2, prefetch_count=4)
        (out, *others) = receiver.receive(3)
        wait_until(lambda: len(shared.begun) == 2, what="both handlers are at work")
        kept.limit(retain_messages=100, retain_unsettled="drop")
        assert kept.trim() == 1800
        assert kept.trim() == 0
        assert receiver.receive(10, wait_s=0) == [], "the key's message is out"
        go_on.set()
        receiver.ack([out, *others])
        wait_until(lambda: kept.stage.all_settled("shared"), what="the shared group is done")
        assert pending(kept.stage, kept.partition, "shared") == {}
        found: list[Any] = []
        while len(found) < 100:
            found += _acked(receiver)
        assert [message.body for message in found] == [b"%d" % n for n in range(901, COUNT + 1)]
        assert (kept.dropped("pop"), kept.dropped("shared")) == (900, 900)


def _hangs_at(go_on: threading.Event, *bodies: bytes) -> Callable[[bytes, Context], None]:
    def act(body: bytes, _ctx: Context) -> None:
        if body in bodies:
            go_on.wait(30)

    return act


def _acked(receiver: Receiver) -> list[Any]:
    found = receiver.receive(50, wait_s=5)
    receiver.ack(found)
    return list(found)


def test_successors_of_a_split_do_not_wait_for_an_absent_group(kept: Kept) -> None:
    kept.send(1, 200)
    group_id = kept.group()
    split(kept.stage.runtime, "orders", kept.partition)
    kept.limit(retain_s=1, retain_unsettled="drop")
    readable = "SELECT partition_id FROM mqlayer.readable WHERE group_id = %s ORDER BY 1"

    def passed() -> list[int]:
        kept.trim()
        with kept.stage.database.connection() as connection:
            return [row[0] for row in connection.execute(readable, [group_id]).fetchall()]

    wait_until(lambda: passed() == [2, 3], what="the group passed the parent")
    assert kept.dropped() == 200


PLACES = ("retention.after_bound", "retention.after_drop", "retention.before_count", "retention.after_commit")


@pytest.mark.parametrize(
    "place", [PLACES[1], *(pytest.param(p, marks=pytest.mark.full) for p in (*PLACES[:1], *PLACES[2:]))]
)
def test_a_pass_that_is_killed_counts_each_drop_once(kept: Kept, place: str) -> None:
    kept.send(1, COUNT)
    kept.group()
    kept.limit(retain_messages=300, retain_unsettled="drop")
    assert _killed(kept, f"{place}=kill") == -9
    kept.trim()
    assert (kept.dropped(), kept.trim()) == (700, 0)
    assert 601 <= kept.first() <= 701


def test_a_pass_that_is_killed_before_an_absent_group_has_drained_leaves_that_to_the_next(kept: Kept) -> None:
    kept.send(1, 200)
    kept.group()
    split(kept.stage.runtime, "orders", kept.partition)
    kept.limit(retain_s=1, retain_unsettled="drop")
    wait_until(lambda: _killed(kept, "retention.before_drained=kill") == -9, what="the records are old")
    drained = "SELECT count(*) FROM mqlayer.drained"
    with kept.stage.database.connection() as connection:
        assert connection.execute(drained).fetchone() == (0,)
        kept.trim()
        assert connection.execute(drained).fetchone() == (1,)


def _killed(kept: Kept, failpoints: str) -> int:
    program = (
        "import sys; from mqlayer.postgres.database import Database; from mqlayer.maintenance import trim_pass; "
        "from mqlayer.runtime import Runtime; from mqlayer.settings import Settings; "
        "trim_pass(Runtime(Database(sys.argv[1]), Settings(key_prefix=sys.argv[2])))"
    )
    run = ask_python("-c", program, kept.stage.dsn, kept.stage.prefix, env=os.environ | armed(failpoints))
    return run.returncode
