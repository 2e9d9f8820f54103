"""Blue and green in one group: partitions pass in order between members of two deployments, and back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from mqlayer import App, Context, Receiver
from mqlayer.errors import AlreadyApplied, Conflict, InvalidInput
from mqlayer.groups.deployments import apply_deploy, planned_deploy, planned_return, wait_deployed
from mqlayer.groups.group import find_group
from mqlayer.inspect import group_statuses
from mqlayer.redelivery import DeadFilter, start_redrive, work_on
from mqlayer.runtime.runtime import Runtime
from tests.fixtures.commands import Commands
from tests.fixtures.consumers import Recorder, Stage, StartStage, member_of
from tests.fixtures.wait import wait_until
from tests.proof.parking_shop import parked, release, rows
from tests.proof.route_steps import split
from tests.proof.runtimes import runtime_of

pytestmark = pytest.mark.usefixtures("as_consumer")


@pytest.fixture
def four(start_stage: StartStage, redis_url: str) -> Stage:
    """A topic of four partitions."""
    return start_stage(redis_url, partitions=4)


def operator(stage: Stage) -> Runtime:
    return runtime_of(stage.database, stage.prefix, actor="a test")


def start(stage: Stage, handler: Callable[..., Any], deployment: str, **options: Any) -> App:
    return stage.consume(handler, settings=stage.settings(deployment=deployment), **options)


def deploy(stage: Stage, to: str, *, wait: bool = True, **options: Any) -> None:
    plan = planned_deploy(operator(stage), stage.topic, "g", to, **options)
    apply_deploy(operator(stage), plan)
    assert not wait or not wait_deployed(stage.database, plan.group, timeout_s=20)


def back(stage: Stage) -> None:
    plan = planned_return(operator(stage), stage.topic, "g")
    apply_deploy(operator(stage), plan)
    assert not wait_deployed(stage.database, plan.group, timeout_s=20)


def owned(app: App) -> int:
    return len(member_of(app).owned())


def owners(stage: Stage, *apps: App) -> list[int]:
    """Return how many partitions each member has, by Postgres."""
    found = Counter(stage.owners().values())
    return [found[member_of(app).member_id] for app in apps]


def test_a_bad_deploy_is_rolled_back_without_a_repeat(four: Stage) -> None:
    """Green stands by, gets all, fails and parks a key; blue goes on with what is parked, at the next attempt.

    No message is handled twice but by a failing handler, in order per key, and effects are there once.
    """
    effects: Counter[tuple[str | None, bytes]] = Counter()
    lock = threading.Lock()

    def effect(body: bytes, ctx: Context) -> None:
        with psycopg.connect(four.dsn) as connection:
            ctx.fence(connection)
        with lock:
            effects[ctx.key, body] += 1

    def bad(body: bytes, ctx: Context) -> None:
        if ctx.key == "key-1":
            raise ValueError
        effect(body, ctx)

    rules = {"backoff_s": (0.01,), "attempt_limit": 2, "policy": "park"}
    blue_seen, green_seen = Recorder(effect), Recorder(bad)
    four.send_numbers(8, 4)
    blue = start(four, blue_seen, "blue", **rules)
    green = start(four, green_seen, "green", **rules)
    four.wait_settled()
    assert owners(four, blue, green) == [4, 0]
    assert green_seen.begun == []

    deploy(four, "green")
    assert owners(four, blue, green) == [0, 4]
    four.send_numbers(8, 4, first=5)
    wait_until(lambda: len(parked(four).get("key-1", [])) == 4, what="green parked the key it can't handle")

    back(four)
    assert owners(four, blue, green) == [4, 0]
    four.send_numbers(8, 4, first=9)
    four.wait_settled()
    release(four)
    wait_until(lambda: len(effects) == 96, what="all have their effect")
    assert set(effects.values()) == {1}
    assert blue_seen.count() + green_seen.count() == 96
    for recorder in (blue_seen, green_seen):
        recorder.assert_in_order()
    assert sorted(blue_seen.bodies("key-1"), key=int) == blue_seen.bodies("key-1")


@pytest.mark.full
def test_failed_attempts_are_counted_on(stage: Stage) -> None:
    failing = threading.Event()

    def fail(body: bytes, ctx: Context) -> None:
        if ctx.attempt == 2:
            failing.set()
        raise ValueError

    rules = {"backoff_s": (0.05, 0.05, 0.05), "policy": "block", "attempt_limit": 9}
    seen = Recorder()
    stage.send([("k", b"1"), ("k", b"2")])
    start(stage, Recorder(fail), "blue", **rules)
    start(stage, seen, "green", **rules)
    assert failing.wait(20)
    deploy(stage, "green")
    stage.wait_settled()
    assert seen.bodies() == [b"1", b"2"]
    assert seen.attempts(b"1")[0] >= 3


def test_each_partition_passes_when_what_is_in_hand_ended(stage: Stage) -> None:
    """Green begins no message of a partition before blue's handler there returned, and repeats none."""
    hold, held = threading.Event(), threading.Event()

    def act(body: bytes, ctx: Context) -> None:
        if body == b"1" and ctx.key == "key-0":
            held.set()
            assert hold.wait(20)

    blue_seen, green_seen = Recorder(act), Recorder()
    stage.send_numbers(2, 1)
    blue = start(stage, blue_seen, "blue")
    green = start(stage, green_seen, "green")
    assert held.wait(20)
    stage.send_numbers(2, 4, first=2)
    deploy(stage, "green", wait=False)
    wait_until(lambda: owned(green) == 1, what="the other partition passed")
    assert "key-0" not in {one.key for one in green_seen.begun}
    hold.set()
    stage.wait_settled()
    wait_until(lambda: owners(stage, blue, green) == [0, 2], what="all passed")
    assert (blue_seen.bodies("key-0") + green_seen.bodies("key-0")) == [b"1", b"2", b"3", b"4", b"5"]
    assert len(blue_seen.begun) + len(green_seen.begun) == 10


def test_a_canary_gets_the_first_lps_also_after_a_split(four: Stage) -> None:
    blue, green = start(four, Recorder(), "blue"), start(four, Recorder(), "green")
    deploy(four, "green", percent=30)
    assert owners(four, blue, green) == [2, 2]
    deploy(four, "green", partitions=1)
    assert owners(four, blue, green) == [3, 1]
    assert four.owners()[four.partitions[0]] == member_of(green).member_id
    # [0, 256) is green's; of its halves both begin below LP 256.
    runtime = operator(four)
    split(runtime, four.topic, four.partitions[0], at=[100])
    wait_until(lambda: owners(four, blue, green) == [3, 2], what="both successors are green's")
    back(four)
    assert owners(four, blue, green) == [5, 0]
    with pytest.raises(Conflict, match="--to DEPLOYMENT"):
        back(four)


def test_partitions_wait_for_their_deployment_and_say_so(stage: Stage) -> None:
    blue = start(stage, Recorder(), "blue")
    green = start(stage, Recorder(), "green")
    deploy(stage, "green")
    green.stop()
    stage.send_numbers(4, 2)
    wait_until(lambda: set(stage.owners().values()) == {None}, what="nobody owns them")
    (status,) = group_statuses(operator(stage), stage.topic, "g")
    stalls = {one.stall.detail for one in status.partitions if one.stall is not None}
    assert any("no member of deployment green lives, of blue some do" in detail for detail in stalls), stalls
    assert owned(blue) == 0
    start(stage, Recorder(), "green")
    stage.wait_settled()


@pytest.mark.full
def test_a_group_falls_back_once_if_no_member_of_the_newer_one_lives(stage: Stage) -> None:
    """By the consumer's right, with an audit row; a green that comes back stands by."""
    seen = Recorder()
    blue = start(stage, seen, "blue")
    green = start(stage, Recorder(), "green")
    deploy(stage, "green", fallback=True)
    stage.send_numbers(4, 2)
    stage.wait_settled()
    green.stop()
    wait_until(lambda: owned(blue) == 2, what="blue has all again")
    again = start(stage, Recorder(), "green")
    stage.send_numbers(4, 2, first=3)
    stage.wait_settled()
    assert seen.count() == 8
    assert owners(stage, blue, again) == [2, 0]
    with stage.database.connection() as connection:
        rows = connection.execute("SELECT actor, object, facts FROM mqlayer.audit WHERE actor = 'fallback'").fetchall()
    assert rows == [("fallback", "orders/g", {"from": "green", "to": "blue"})]


@pytest.mark.full
def test_a_shared_group_reads_with_the_deployment_in_force_only(stage: Stage) -> None:
    seen = {"blue": Recorder(), "green": Recorder()}
    for name, recorder in seen.items():
        app = stage.app(settings=stage.settings(deployment=name))
        app.consumer(stage.topic, group="g", mode="shared")(recorder)
        app.start()
    stage.send_numbers(4, 5)
    wait_until(lambda: seen["blue"].count() == 20, what="blue handled all")
    assert seen["green"].begun == []
    with pytest.raises(InvalidInput, match="leave the fallback out"):
        deploy(stage, "green", fallback=True)
    deploy(stage, "green")

    def green_reads() -> bool:
        """Blue hears of it within a second; from then on it reads nothing."""
        before = seen["blue"].count() + seen["green"].count(), seen["blue"].count()
        stage.send_numbers(2, 5, first=before[0] + 1)
        wait_until(lambda: seen["blue"].count() + seen["green"].count() == before[0] + 10, what="all handled")
        return seen["blue"].count() == before[1]

    wait_until(green_reads, what="green alone reads")


@pytest.mark.full
def test_a_message_given_back_to_a_shared_group_is_of_the_deployment_in_force(stage: Stage) -> None:
    """Green died on it; given back, it goes to blue, though green looks for such messages as often."""

    def fail(body: bytes, ctx: Context) -> None:
        raise ValueError

    seen = {"green": Recorder(fail), "blue": Recorder()}
    for name, recorder in seen.items():
        app = stage.app(settings=stage.settings(deployment=name))
        app.consumer(stage.topic, group="g", mode="shared", attempt_limit=1)(recorder)
        app.start()
    stage.send((None, b"%d" % number) for number in range(5))
    wait_until(lambda: len(rows(stage, "SELECT FROM mqlayer.dead_message")) == 5, what="all are dead")
    deploy(stage, "blue")
    redrive = start_redrive(runtime_of(stage.database, actor="test"), stage.topic, "g", DeadFilter(), worker="w")
    assert work_on(stage.database, redrive, worker="w").done == 5
    wait_until(lambda: seen["blue"].count() == 5, what="blue handled them")
    assert len(seen["green"].begun) == 5


@pytest.mark.full
def test_receivers_of_another_deployment_get_nothing(stage: Stage) -> None:
    stage.send_numbers(2, 2)
    blue, green = (
        Receiver(stage.topic, group="g", settings=stage.settings(deployment=name)) for name in ("blue", "green")
    )
    with blue, green:
        first = blue.receive(wait_s=5.0)
        assert first
        assert green.receive(wait_s=0.2) == []
        deploy(stage, "green", wait=False)

        def blue_gets_nothing() -> bool:
            got = blue.receive(wait_s=0.1)
            blue.ack(got)
            return not got

        wait_until(blue_gets_nothing, what="blue gets nothing")
        stage.send([("key-0", b"3")])
        assert blue.receive(wait_s=0.2) == []
        # What was given stays its receiver's: nothing of the key passes it.
        assert not [one for one in green.receive(wait_s=0.5) if one.key in {given.key for given in first}]
        blue.ack(first)
        wait_until(lambda: [one.body for one in green.receive(wait_s=1.0)] == [b"3"], what="green gets what follows")


def test_the_command_plans_deploys_and_goes_back(stage: Stage, run: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    words = ("group", "deploy", "orders", "g")
    blue = start(stage, Recorder(), "blue", member_id="b1")
    assert "mqlayer consume MODULE:APP --deployment green" in str(run(*words, "--to", "green", "--yes").stderr)
    green = start(stage, Recorder(), "green", member_id="g1")
    wait_until(lambda: owned(blue) == 2, what="blue has all")
    assert run.text(*words, "--to", "green", "--partitions", "1").splitlines() == [
        "group g of topic orders: deployment green below LP 512, blue above; living members: blue 1, green 1",
        "  partition 1, LPs [0, 512): from blue (b1) to green",
        "nothing was changed: --yes does this",
    ]
    assert owned(green) == 0
    assert run.text(*words, "--to", "green", "--yes", "--wait", "20").endswith("is deployed\n")
    assert owners(stage, blue, green) == [0, 2]
    (row,) = run.lines("group", "show", "orders", "g")
    assert (row["deployment"], row["previous_deployment"], row["canary"]) == ("green", "blue", None)
    members = {
        one["member"]: (one["deployment"], one["partitions"]) for one in run.lines("group", "members", "orders", "g")
    }
    assert members == {"b1": ("blue", 0), "g1": ("green", 2)}
    run.text(*words, "--back", "--yes", "--wait", "20")
    assert owners(stage, blue, green) == [2, 0]
    assert "where to?" in run.failure(*words)
    assert "choose one" in run.failure(*words, "--to", "green", "--back")
    assert "0 and up to 100" in run.failure(*words, "--to", "green", "--percent", "0")
    assert "say 1 to 2" in run.failure(*words, "--to", "green", "--partitions", "3")
    assert "deployment" in run.failure(*words, "--to", "Green!")


@pytest.mark.full
def test_a_plan_is_refused_after_another_deploy(stage: Stage) -> None:
    start(stage, Recorder(), "blue")
    start(stage, Recorder(), "green")
    plan = planned_deploy(operator(stage), stage.topic, "g", "green")
    apply_deploy(operator(stage), plan)
    with pytest.raises(Conflict, match="changed meanwhile"):
        apply_deploy(operator(stage), plan)


@pytest.mark.full
def test_an_effect_of_blue_is_applied_for_green(stage: Stage) -> None:
    """Blue committed the effect and did not settle: green, which gets the message, finds it applied."""
    answers: list[str] = []
    gone = threading.Event()

    def act(name: str) -> Callable[[bytes, Context], None]:
        def handle(body: bytes, ctx: Context) -> None:
            try:
                with psycopg.connect(stage.dsn) as connection:
                    ctx.fence(connection)
                answers.append(f"{name} current")
            except AlreadyApplied:
                answers.append(f"{name} applied")
                return
            if name == "blue":
                gone.wait(20)

        return handle

    stage.send([("k", b"1")])
    blue = start(stage, act("blue"), "blue", drain_timeout_s=0.2)
    green = start(stage, act("green"), "green")
    wait_until(lambda: answers == ["blue current"], what="blue applied it")
    deploy(stage, "green")
    wait_until(lambda: answers == ["blue current", "green applied"], what="green got it")
    stage.wait_settled()
    gone.set()
    assert owners(stage, blue, green)[1] == 2
    assert find_group(stage.database, stage.topic, "g").deployments.in_force == "green"
