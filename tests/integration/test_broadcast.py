"""Broadcast: every instance gets every message, in order, and keeps its position while it is away, up to a limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import SecretStr

from mqlayer import App, Context, Event, MemberOptions, Settings
from mqlayer.doctor import diagnose
from mqlayer.errors import Conflict, GroupRetired, InstanceTaken, InvalidInput, InvalidName, NotFound, StoreUnavailable
from mqlayer.failpoints import arm
from mqlayer.groups import find_group, planned_seek, rebalance_groups
from mqlayer.groups import join as join_group
from mqlayer.groups.admin import pause_group, resume_group, set_group
from mqlayer.groups.broadcast_instances import ensure_instance, host_instance
from mqlayer.groups.pauses import pause_partitions, running_partitions, wait_paused
from mqlayer.groups.retirement import forget_instances, forget_retired, retire_absent, retire_group
from mqlayer.inspect import explain_key, group_statuses
from mqlayer.maintenance import trim_pass
from mqlayer.redelivery.key_pause import pause_key
from mqlayer.runtime.route_cache import RouteCache, load_route
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Recorder, Stage, member_of
from tests.fixtures.failpoints import armed
from tests.fixtures.forked_programs import ask_python
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of

pytestmark = pytest.mark.usefixtures("as_consumer")

SHORT_S = 0.05
KEYS = 8


def join(
    stage: Stage,
    recorder: Any,
    instance: str | None,
    *,
    instance_expiry_s: float | None = None,
    start: Any = None,
    lease_s: float = 2.0,
    hook: Any = None,
    settings: dict[str, Any] | None = None,
    **rules: Any,
) -> App:
    """Start a process that is an instance of the broadcast group `cache`."""
    app = stage.app(**{"lease_s": lease_s} | (settings or {}))
    if hook is not None:
        app.on_event(hook)
    register = app.consumer(
        "orders",
        group="cache",
        mode="broadcast",
        instance=instance,
        instance_expiry_s=instance_expiry_s,
        start=start,
        options=MemberOptions(concurrency=4),
        **rules,
    )
    register(recorder)
    app.start()
    return app


def states(stage: Stage) -> dict[str, tuple[str, int]]:
    """State and seek of each group, by its name."""
    with stage.database.connection() as connection:
        rows = connection.execute("SELECT name, state, seek FROM mqlayer.consumer_group ORDER BY name").fetchall()
    return {name: (state, seek) for name, state, seek in rows}


def first_kept(stage: Stage, partition: int) -> int:
    return int(stage.redis.hget(stage.keys(partition).meta, "first") or 1)


def test_every_instance_gets_every_message_in_order_over_a_split(stage: Stage) -> None:
    """A route change gates each instance by what it drained itself; the sealed parent goes when all of them have."""
    ones, twos = Recorder(), Recorder()
    join(stage, ones, "web-1")
    join(stage, twos, "web-2")
    stage.send_numbers(KEYS, 20)
    parent = stage.partitions[0]
    split(stage.runtime, "orders", parent, at=[100])
    stage.route = load_route(stage.database, "orders")
    stage.send_numbers(KEYS, 20, first=21)
    wait_until(lambda: ones.count() == twos.count() == KEYS * 40, what="all messages of both", timeout_s=20)
    ones.assert_in_order()
    twos.assert_in_order()
    stage.wait_retired(parent)
    assert states(stage) == {"cache": ("live", 0), "cache@web-1": ("live", 0), "cache@web-2": ("live", 0)}


def test_an_instance_that_is_killed_goes_on_where_it_was(stage: Stage) -> None:
    """Its position is its own: what it has not settled is kept for it, though another instance is through."""
    other = Recorder()
    join(stage, other, "web-2")
    program = (
        "import os, sys, mqlayer\n"
        "app = mqlayer.App()\n"
        "seen = []\n"
        "@app.consumer('orders', group='cache', mode='broadcast', instance='web-1')\n"
        "def note(body: bytes) -> None:\n"
        "    if body == b'6':\n"
        "        import time; time.sleep(600)\n"
        "app.start()\n"
        "print('joined', flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = os.environ | {
        "MQLAYER_DSN": stage.dsn, "MQLAYER_KEY_PREFIX": stage.prefix, "MQLAYER_LEASE_S": "1"
    }  # fmt: skip
    stage.send_numbers(1, 5)
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"joined\n"
        stage.wait_settled("cache@web-1")
        process.send_signal(signal.SIGKILL)
    stage.send_numbers(1, 5, first=6)
    recorder = Recorder()
    # The lease of the process that died runs out first: an instance is never two processes.
    join(stage, recorder, "web-1")
    stage.wait_settled("cache@web-1")
    assert recorder.bodies() == [b"6", b"7", b"8", b"9", b"10"]
    wait_until(lambda: other.count() == 10, what="the other instance")


def test_a_second_process_of_an_instance_is_refused_with_a_clear_error(stage: Stage) -> None:
    """Each of two members would get a part of the messages."""
    first = Recorder()
    # The second waits for a lease of its own length; the first's must not run out meanwhile.
    app = join(stage, first, "web-1", lease_s=10.0)
    with pytest.raises(InstanceTaken, match=r"consumes for 'cache@web-1'.*MQLAYER_INSTANCE"):
        join(stage, Recorder(), "web-1", lease_s=0.5)
    stage.send_numbers(KEYS, 5)
    wait_until(lambda: first.count() == KEYS * 5, what="all messages by the first")
    assert app.health().ready


def test_a_process_waits_for_the_one_that_is_leaving(stage: Stage) -> None:
    """Of a rolling restart: the old one ends its handler, the new one goes on behind it."""
    go_on, begun = threading.Event(), threading.Event()

    def act(_body: bytes, _ctx: Context) -> None:
        begun.set()
        go_on.wait(20)

    old, new = Recorder(act), Recorder()
    app = join(stage, old, "web-1", lease_s=10.0)
    stage.send([("k", b"1"), ("k", b"2")])
    wait_until(begun.is_set, what="the handler")
    stopping = threading.Thread(target=app.stop)
    stopping.start()
    wait_until(lambda: not member_of(app).running if app.members else True, what="the stop")
    starting = threading.Thread(target=join, args=(stage, new, "web-1"), kwargs={"lease_s": 0.5})
    starting.start()
    # Longer than its lease, for which it would wait for a process that is not leaving.
    starting.join(2.0)
    assert starting.is_alive()
    go_on.set()
    stopping.join()
    starting.join()
    stage.wait_settled("cache@web-1")
    assert (old.bodies(), new.bodies()) == ([b"1"], [b"2"])


def test_an_instance_away_beyond_the_limit_begins_anew_and_trimming_is_freed(stage: Stage) -> None:
    """Its position holds trimming up until it is dropped; it says that it begins anew."""
    here, gone, events = Recorder(), Recorder(), list[Event]()
    join(stage, here, "web-2", start="latest")
    app = join(stage, gone, "web-1", hook=events.append)
    stage.send_numbers(KEYS, 5)
    wait_until(lambda: gone.count() == KEYS * 5, what="all messages")
    app.stop()
    stage.send_numbers(KEYS, 60, first=6)
    stage.wait_settled("cache@web-2")
    stage.wait_settled("cache@web-2")
    trim_pass(stage.runtime)
    before = {partition: first_kept(stage, partition) for partition in stage.partitions}
    assert retire_absent(runtime_of(stage.database)) == [], "an hour is not over"
    set_group(runtime_of(stage.database, actor="a test"), "orders", "cache", instance_expiry_s=SHORT_S)
    assert wait_until(lambda: retire_absent(runtime_of(stage.database)), what="its position to be dropped") == [
        "cache@web-1"
    ]
    trim_pass(stage.runtime)
    assert any(first_kept(stage, partition) > before[partition] for partition in stage.partitions)
    assert states(stage)["cache@web-1"] == ("retired", 0)
    anew = Recorder()
    join(stage, anew, "web-1", hook=events.append)
    stage.send_numbers(KEYS, 1, first=66)
    wait_until(lambda: len(anew.bodies()) >= KEYS, what="what is published from then on")
    assert set(anew.bodies()) == {b"66"}, "by the rule of its group: latest"
    assert states(stage)["cache@web-1"] == ("live", 1)
    assert [(event.kind, event.group, event.cause) for event in events] == [("instance_reset", "cache@web-1", "latest")]


@pytest.mark.full
def test_the_limit_holds_for_one_that_comes_back_while_no_worker_ran(stage: Stage) -> None:
    """Whoever comes first drops the position: the job, or the instance itself; so both give the same."""
    stage.send_numbers(1, 3)
    recorder, events = Recorder(), list[Event]()
    join(stage, recorder, "web-1", instance_expiry_s=SHORT_S, start="latest").stop()
    stage.send_numbers(1, 3, first=4)
    wait_until(lambda: away(stage) > SHORT_S, what="the limit")
    join(stage, recorder, "web-1", hook=events.append)
    stage.send_numbers(1, 1, first=7)
    wait_until(lambda: recorder.bodies() == [b"7"], what="the last one")
    assert [event.kind for event in events] == ["instance_reset"]


def away(stage: Stage) -> float:
    (status,) = group_statuses(stage.runtime, "orders", "cache@web-1")
    return status.facts.absent_s or 0.0


@pytest.mark.full
def test_a_process_that_slept_through_its_retirement_begins_anew_by_itself(stage: Stage) -> None:
    """Case 41's sleeper, of an instance: the same process, no restart; its old epochs are void."""
    recorder, events = Recorder(), list[Event]()
    app = join(stage, recorder, "web-1", hook=events.append, start="latest")
    stage.send_numbers(1, 2)
    stage.wait_settled("cache@web-1")
    wait_until(lambda: recorder.count() == 2, what="the first ones")
    member = member_of(app)
    epochs = {epoch for epoch, _ in member.owned().values()}
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.consumer_group SET instance_expiry_s = 0.001 WHERE mode = 'broadcast'")
        # What the scan and the job do while it sleeps, in one step: it must not beat in between.
        with connection.transaction():
            connection.execute("SELECT FROM mqlayer.consumer_group FOR UPDATE")
            connection.execute("UPDATE mqlayer.member SET lease_until = now() - interval '1 minute'")
            connection.execute("UPDATE mqlayer.consumer_group SET absent_since = now() - interval '1 minute' "
                               "WHERE instance IS NOT NULL")  # fmt: skip
    retire_absent(runtime_of(stage.database))
    wait_until(lambda: [event.kind for event in events] == ["instance_reset"], what="it to begin anew")
    set_group(runtime_of(stage.database, actor="a test"), "orders", "cache", instance_expiry_s=60)
    stage.send_numbers(1, 1, first=3)
    wait_until(lambda: recorder.bodies()[-1:] == [b"3"], what="what comes next")
    assert min(epoch for epoch, _ in member.owned().values()) > max(epochs)
    assert app.running


def _has(recorder: Recorder, body: bytes) -> bool:
    return body in recorder.bodies()


@pytest.mark.full
def test_the_job_and_an_instance_that_comes_back_do_not_both_win(stage: Stage) -> None:
    """Whichever is first under the lock: no member is in a retired instance, and none is retired under a member."""
    join(stage, Recorder(), "web-1", instance_expiry_s=SHORT_S).stop()
    stop = threading.Event()

    def retire() -> None:
        while not stop.is_set():
            retire_absent(runtime_of(stage.database))
            stop.wait(0.002)

    retiring = threading.Thread(target=retire)
    retiring.start()
    try:
        for number in range(1, 6):
            recorder = Recorder()
            app = join(stage, recorder, "web-1")
            stage.send([("k", b"%d" % number)])
            wait_until(partial(_has, recorder, b"%d" % number), what="the message")
            assert states(stage)["cache@web-1"][0] == "live"
            app.stop()
    finally:
        stop.set()
        retiring.join()


def test_nobody_joins_an_instance_whose_start_is_not_stored_yet(stage: Stage, tmp_path: Path) -> None:
    """Whoever slept through its retirement would begin anywhere, while another process brings it back."""
    recorder = Recorder()
    app = join(stage, recorder, "web-1", start="latest")
    group_id = stage.group_id("cache@web-1")
    # The sleeper would bring the instance back before the late member asks.
    arm("instance.after_insert", f"wait:{tmp_path / 'go'}")
    with stage.database.connection() as connection, connection.transaction():
        connection.execute("SELECT FROM mqlayer.consumer_group FOR UPDATE")
        connection.execute("UPDATE mqlayer.member SET lease_until = now() - interval '1 minute'")
        connection.execute("DELETE FROM mqlayer.group_start")
        connection.execute("UPDATE mqlayer.consumer_group SET state = 'creating', seek = 1 WHERE instance IS NOT NULL")
        connection.execute("UPDATE mqlayer.assignment SET member_id = NULL, epoch = nextval('mqlayer.epoch')")
        connection.execute("DELETE FROM mqlayer.member")
    with pytest.raises(GroupRetired):
        join_group(stage.database, group_id=group_id, member_id="late", lease_s=2.0)
    (tmp_path / "go").touch()
    wait_until(lambda: states(stage)["cache@web-1"] == ("live", 1), what="the one that slept to bring it back itself")
    stage.send_numbers(KEYS, 1)
    wait_until(lambda: recorder.count() == KEYS, what="all messages")
    assert app.running


def test_it_is_told_that_it_begins_anew_though_the_one_who_brought_it_back_could_not_go_on(stage: Stage) -> None:
    """A node that is away fails the storing of its start; what it has built misses messages all the same."""
    join(stage, Recorder(), "web-1", start="latest").stop()
    stage.send_numbers(1, 3)
    retire_group(runtime_of(stage.database, actor="a test"), "orders", "cache@web-1")
    group = find_group(stage.database, "orders", "cache")
    with closing(RouteCache(stage.database)) as routes, stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.node SET url = 'redis://127.0.0.1:1/0'")
        with pytest.raises(StoreUnavailable):
            ensure_instance(stage.runtime, routes, group, "web-1")
        connection.execute("UPDATE mqlayer.node SET url = %s", [stage.url])
    assert states(stage)["cache@web-1"] == ("creating", 1)
    events = list[Event]()
    join(stage, Recorder(), "web-1", hook=events.append)
    assert [(event.kind, event.group) for event in events] == [("instance_reset", "cache@web-1")]


@pytest.mark.parametrize(
    "place",
    some_of(
        [
            "instance.after_insert",
            "instance.after_revive",
            "instance_retire.before_commit",
            "instance_retire.after_commit",
        ],
        9,
    ),
)
def test_an_instance_that_dies_while_it_begins_anew_does_so_the_next_time(stage: Stage, place: str) -> None:
    """A crash leaves it live, retired or creating: all three are away, and go on from there."""
    join(stage, Recorder(), "web-1", instance_expiry_s=SHORT_S).stop()
    stage.send_numbers(1, 3)
    wait_until(lambda: away(stage) > SHORT_S, what="the limit")
    program = (
        "import mqlayer\napp = mqlayer.App()\n"
        "app.consumer('orders', group='cache', mode='broadcast', instance='web-1')(lambda body: None)\n"
        "app.start()\n"
    )
    environment = {
        "MQLAYER_DSN": stage.dsn,
        "MQLAYER_KEY_PREFIX": stage.prefix,
        **armed(f"{place}=kill"),
    }
    done = ask_python("-c", program, env=os.environ | environment)
    assert done.returncode == -9
    if place == "instance.after_revive":
        assert states(stage)["cache@web-1"] == ("creating", 1)
        # One that never comes back holds nothing up for ever.
        assert wait_until(lambda: retire_absent(runtime_of(stage.database)), what="the limit") == ["cache@web-1"]
    recorder = Recorder()
    join(stage, recorder, "web-1")
    wait_until(lambda: recorder.bodies() == [b"1", b"2", b"3"], what="all that is kept")


def test_settings_and_rest_of_the_group_are_those_of_all_instances(stage: Stage) -> None:
    """Case 63, of instances: there is one place to set them, also for those that come later."""
    app = join(stage, Recorder(), "web-1", attempt_limit=5)
    set_group(runtime_of(stage.database, actor="a test"), "orders", "cache", attempt_limit=7, instance_expiry_s=90)
    wait_until(lambda: member_of(app).settings.rules.attempt_limit == 7, what="the member to know")
    assert find_group(stage.database, "orders", "cache").instance_expiry_s == 90
    with pytest.raises(Conflict, match="mqlayer group set of its group"):
        set_group(runtime_of(stage.database, actor="a test"), "orders", "cache@web-1", attempt_limit=8)
    with pytest.raises(Conflict, match="attempt_limit = 7"):
        join(stage, Recorder(), "web-2", attempt_limit=5)
    wait_until(
        lambda: running_partitions(stage.database, "orders", "cache") == len(stage.partitions), what="what it has"
    )
    with pytest.raises(InvalidInput, match="cache@INSTANCE"):
        pause_partitions(runtime_of(stage.database, actor="a test"), "orders", "cache", stage.partitions)
    with pytest.raises(InvalidInput, match="cache@INSTANCE"):
        pause_key(runtime_of(stage.database, actor="a test"), "orders", "cache", "k0")
    assert pause_group(runtime_of(stage.database, actor="a test"), "orders", "cache")
    late = Recorder()
    other = join(stage, late, "web-2")
    assert member_of(other).settings.rules.attempt_limit == 7
    stage.send_numbers(KEYS, 3)
    wait_until(lambda: not member_of(app).owned(), what="it to release")
    assert late.bodies() == []
    assert resume_group(runtime_of(stage.database, actor="a test"), "orders", "cache")
    wait_until(lambda: late.count() == KEYS * 3, what="all messages")
    stage.wait_settled("cache@web-1")


def test_a_pause_of_the_group_waits_for_its_instances_and_parts_of_it_are_refused(stage: Stage) -> None:
    """What an instance still does counts; a pause that nothing would follow is not taken."""
    go_on, begun = threading.Event(), threading.Event()

    def wait(_body: bytes, _ctx: Context) -> None:
        begun.set()
        assert go_on.wait(30)

    join(stage, Recorder(act=wait), "web-1")
    stage.send_numbers(1, 1)
    assert begun.wait(10)
    assert pause_group(runtime_of(stage.database, actor="a test"), "orders", "cache")
    assert running_partitions(stage.database, "orders", "cache") >= 1
    assert wait_paused(stage.database, "orders", "cache", timeout_s=0.1) >= 1
    with pytest.raises(InvalidInput, match="cache@INSTANCE"):
        pause_partitions(runtime_of(stage.database, actor="a test"), "orders", "cache", stage.partitions[:1])
    with pytest.raises(InvalidInput, match="cache@INSTANCE"):
        pause_key(runtime_of(stage.database, actor="a test"), "orders", "cache", "key")
    go_on.set()
    assert wait_paused(stage.database, "orders", "cache", timeout_s=10) == 0


def test_names_of_instances(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's name, the setting, or what the program says; nobody can name a group so."""
    with pytest.raises(InvalidName, match="bad instance name 'Web 1'"):
        App(stage.settings()).consumer("orders", group="cache", mode="broadcast", instance="Web 1")
    with pytest.raises(InvalidName, match="bad group name"):
        App(stage.settings()).consumer("orders", group="cache@web-1")
    with pytest.raises(InvalidInput, match="only a broadcast group has instances"):
        App(stage.settings()).consumer("orders", group="cache", instance="web-1")
    for wrong in ({"balance": "rate"}, {"from_archive": True}, {"instance_expiry_s": 0}):
        with pytest.raises(InvalidInput):
            App(stage.settings()).consumer("orders", group="cache", mode="broadcast", **wrong)
    monkeypatch.setattr("socket.gethostname", lambda: "Web_7.example.COM")
    assert host_instance() == "web_7.example.com"
    join(stage, Recorder(), None)
    join(stage, Recorder(), None, settings={"instance": "10-0-0-7"})
    assert [name for name in states(stage) if "@" in name] == ["cache@10-0-0-7", "cache@web_7.example.com"]
    with kept_session(stage.dsn) as connection, pytest.raises(psycopg.errors.CheckViolation):
        connection.execute("UPDATE mqlayer.consumer_group SET name = 'web@1' WHERE mode = 'broadcast'")


def test_a_group_is_broadcast_or_not(stage: Stage) -> None:
    """The mode is said once; a broadcast group itself has no position to send anywhere."""
    join(stage, Recorder(), "web-1")
    with pytest.raises(Conflict, match="mode broadcast, not exclusive"):
        stage.consume(Recorder(), group="cache")
    stage.consume(Recorder(), group="g")
    app = stage.app()
    app.consumer("orders", group="g", mode="broadcast", instance="web-1")(lambda body: None)
    with pytest.raises(Conflict, match="mode exclusive, not broadcast"):
        app.start()
    routes = RouteCache(stage.database)
    try:
        with pytest.raises(InvalidInput, match="name one as cache@INSTANCE"):
            planned_seek(stage.runtime, routes, topic="orders", name="cache", to="latest")
        planned_seek(stage.runtime, routes, topic="orders", name="cache@web-1", to="latest")
        with pytest.raises(InvalidInput, match="cache@INSTANCE"):
            explain_key(stage.runtime, "orders", "k", "cache")
        explain_key(stage.runtime, "orders", "k", "cache@web-1")
    finally:
        routes.close()
    with pytest.raises(NotFound):
        find_group(stage.database, "orders", "cache@web-2")


def test_instances_stand_below_their_group_and_the_doctor_names_those_that_are_away(stage: Stage) -> None:
    """What is away holds trimming up: for how long, and until when, is told."""
    join(stage, Recorder(), "web-1").stop()
    join(stage, Recorder(), "web-2")
    stage.consume(Recorder(), group="cache-x")
    found = group_statuses(stage.runtime)
    assert [one.facts.name for one in found] == ["cache", "cache@web-1", "cache@web-2", "cache-x"]
    assert [one.facts.alive for one in found] == [1, 0, 1, 1]
    assert (found[0].partitions, found[0].facts.instance_expiry_s, found[1].facts.instance_expiry_s) == ([], 3600, 3600)
    (finding,) = [one for one in diagnose(stage.settings()) if one.check == "groups"]
    assert "instance cache@web-1 of topic orders has been away for" in finding.seen


def test_a_retired_broadcast_group_ends_its_instances(stage: Stage) -> None:
    """Refused while one lives; then all of them are, and none comes back."""
    app = join(stage, Recorder(), "web-1")
    with pytest.raises(Conflict, match="1 living members"):
        retire_group(runtime_of(stage.database, actor="a test"), "orders", "cache")
    group = find_group(stage.database, "orders", "cache")
    app.stop()
    assert retire_group(runtime_of(stage.database, actor="a test"), "orders", "cache").instances == 1
    assert forget_retired(stage.runtime, grace_s=0) == len(stage.partitions)
    with pytest.raises(GroupRetired, match="group 'cache' of topic 'orders' is retired"):
        join(stage, Recorder(), "web-1")
    routes = RouteCache(stage.database)
    try:
        for instance in ("web-1", "web-2"):
            with pytest.raises(GroupRetired):
                ensure_instance(stage.runtime, routes, group, instance)
    finally:
        routes.close()
    assert states(stage) == {"cache": ("retired", 0), "cache@web-1": ("retired", 0)}


@pytest.mark.full
def test_an_instance_that_was_dropped_long_ago_is_forgotten(stage: Stage) -> None:
    """Names of hosts may be new ones every day: what is left of each must not pile up. Nobody else's row goes."""
    for instance in ("web-1", "web-2"):
        app = join(stage, Recorder(fail_once()), instance, instance_expiry_s=SHORT_S, backoff_s=(0.01,))
        stage.send_numbers(1, 1)
        stage.wait_settled(f"cache@{instance}")
        app.stop()

    def dropped() -> int:
        retire_absent(runtime_of(stage.database))
        return [state for state, _ in states(stage).values()].count("retired")

    wait_until(lambda: dropped() == 2, what="both to be dropped")
    assert forget_instances(stage.database, horizon_s=0) == 0, "nodes hold something of them yet"
    forget_retired(stage.runtime, grace_s=0)
    assert forget_instances(stage.database) == 0
    join(stage, Recorder(), "web-2")
    assert forget_instances(stage.database, horizon_s=0) == 1
    assert states(stage) == {"cache": ("live", 0), "cache@web-2": ("live", 1)}
    recorder = Recorder()
    join(stage, recorder, "web-1")
    wait_until(lambda: recorder.count() == 1, what="all that is kept, as a new one")
    assert states(stage)["cache@web-1"] == ("live", 0)


def fail_once() -> Any:
    failed = threading.Event()

    def act(_body: bytes, _ctx: Context) -> None:
        if not failed.is_set():
            failed.set()
            raise ValueError

    return act


def test_commands_take_names_of_instances(
    run: Commands, redis_url: str, empty_database_dsn: str, key_prefix: str
) -> None:
    """What is done to any group is done to an instance; the group of it says where to look."""
    run.text("migrate")
    run.text("node", "register", "n1", redis_url)
    run.text("topic", "create", "orders", "--partitions", "2")
    app = App(Settings(dsn=SecretStr(empty_database_dsn), key_prefix=key_prefix, lease_s=10.0, instance="web"))
    app.process_number = 2
    app.consumer("orders", group="cache", mode="broadcast", instance_expiry_s=7)(lambda body: None)
    app.start()
    try:
        assert [row["group"] for row in run.lines("group", "list")] == ["cache", "cache@web-2"]
        assert len(run.lines("group", "members", "orders", "cache@web-2")) == 1
        for named in ("cache@web-2", "cache"):
            assert [row["group"] for row in run.lines("group", "lag", "orders", named)] == ["cache@web-2"]
        shown = run.lines("group", "show", "orders", "cache@web-2")[0]
        assert (shown["instance"], shown["instance_expiry_s"], shown["absent_s"]) == ("web-2", 7, None)
        assert run.lines("group", "show", "orders", "cache")[0]["lag"] is None
        assert "positions kept for 9 s" in run.text("group", "set", "orders", "cache", "--instance-expiry", "9")
        for act in ("pause", "resume"):
            run.text("group", act, "orders", "cache@web-2")
        run.text("group", "seek", "orders", "cache@web-2", "--to", "earliest", "--yes")
        run.text("parked", "list", "orders", "cache@web-2")
        run.text("dead", "list", "orders", "cache@web-2")
        run.text("key", "explain", "orders", "k", "--group", "cache@web-2")
        assert "name one as cache@INSTANCE" in run.failure(
            "group", "seek", "orders", "cache", "--to", "latest", "--plan"
        )
        assert "living members" in run.failure("group", "retire", "orders", "cache@web-2", "--yes")
    finally:
        app.stop()
    run.text("group", "retire", "orders", "cache@web-2", "--yes")
    assert "with 0 instances" in run.text("group", "retire", "orders", "cache", "--yes")


def test_an_instance_without_a_word_counts_as_away_from_the_scan_on(stage: Stage, tmp_path: Path) -> None:
    """A lease that ran out is noted by the scan of the worker; a broadcast group has nobody else to see it."""
    join(stage, Recorder(), "web-1")
    assert away(stage) == 0
    # It would be back within a heartbeat.
    arm("member.before_join", f"wait:{tmp_path / 'go'}")
    with stage.database.connection() as connection:
        connection.execute("UPDATE mqlayer.consumer_group SET paused_at = NULL")
        connection.execute("UPDATE mqlayer.member SET session = nextval('mqlayer.member_session'), "
                           "lease_until = now() - interval '1 minute'")  # fmt: skip

    def noted() -> float:
        rebalance_groups(stage.database)
        return away(stage)

    wait_until(noted, what="the scan to note it")
    (tmp_path / "go").touch()


def test_a_lease_that_others_noted_as_run_out_does_not_drop_the_position(stage: Stage, tmp_path: Path) -> None:
    """A worker of the time before instances notes the lease, not the absence: nothing is known of how long that was."""
    join(stage, Recorder(), "web-1")
    # It would be back within a heartbeat.
    arm("member.before_join", f"wait:{tmp_path / 'go'}")
    with stage.database.connection() as connection, connection.transaction():
        connection.execute("SELECT FROM mqlayer.consumer_group FOR UPDATE")
        connection.execute("UPDATE mqlayer.member SET session = nextval('mqlayer.member_session'), "
                           "lease_until = '-infinity'")  # fmt: skip
        connection.execute("UPDATE mqlayer.assignment SET member_id = NULL, target = NULL")
    assert retire_absent(runtime_of(stage.database)) == []
    rebalance_groups(stage.database)
    assert 0 < away(stage) < 60
    (tmp_path / "go").touch()
