"""What an application's tests may rely on: the same tests on TestApp and on real servers.

The names of these tests are the list in `docs/how-to/test-handlers.md`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any

import msgspec
import pytest
from pydantic import SecretStr

import mqlayer
from mqlayer import Batch, BatchOf, Context, MemberOptions, PauseKey, Reject, RetryLater, Settings, Skip, outbox
from mqlayer.domain.retry_rules import Policy
from mqlayer.errors import BodyMismatch
from mqlayer.postgres.database import Database
from mqlayer.stack import AnyRedis
from mqlayer.testing import RealApp, TestApp, engine_for
from mqlayer.topics import register_node
from tests.fixtures.servers import DatabaseMaker
from tests.fixtures.variants import some_of
from tests.proof.runtimes import runtime_of

# One engine for all of them, and so one worker.
pytestmark = pytest.mark.xdist_group("behaviours")

Engine = TestApp | RealApp
ATTEMPT_LIMIT = 3
BACKOFF_S = (0.05,)
QUICK = MemberOptions(concurrency=2)


@dataclass
class Work:
    """A message that says what its handler does at each attempt; then it succeeds."""

    name: str
    acts: list[str] = field(default_factory=list)


@dataclass
class Effect:
    name: str


effects = mqlayer.Topic("effects", body=Effect, key=lambda effect: effect.name)
policies: tuple[Policy, ...] = ("park", "block", "dead_letter", "skip")
by_policy = {policy: mqlayer.Topic(f"work-{policy}", body=Work) for policy in policies}
work = by_policy["park"]
tagged = mqlayer.Topic("tagged", body=str)
loose = mqlayer.Topic("loose", body=str)
many = mqlayer.Topic("many", body=str)
asynchronous = mqlayer.Topic("asynchronous", body=Work)


class World:
    """The engine in use, and what handlers saw of each key."""

    def __init__(self) -> None:
        self.engine: Engine
        self.seen: dict[str | None, list[tuple[str, int]]] = defaultdict(list)
        self.order: list[str] = []
        self.batches: list[list[str]] = []
        self.facts: dict[str, Any] = {}


world = World()


def act(name: str) -> None:
    """Do what a message says."""
    match name:
        case "fail":
            raise ValueError("as the message says")
        case "later":
            raise RetryLater(0.05)
        case "reject":
            raise Reject("as the message says")
        case "skip":
            raise Skip("as the message says")
        case "pause":
            raise PauseKey(0.05)


def handle(body: Work, ctx: Context) -> None:
    """Note the attempt, do what the message says for it."""
    number = sum(name == body.name for name, _ in world.seen[ctx.key])
    world.seen[ctx.key].append((body.name, ctx.attempt))
    name = body.acts[number] if number < len(body.acts) else "succeed"
    with world.engine.session() as session:
        ctx.fence(session)
        effects.publish(session, Effect(body.name))
        if name != "fail after commit":
            act(name)
        world.order.append(body.name)
        world.facts[body.name] = (dict(ctx.headers), ctx.tags)
    if name == "fail after commit":
        raise ValueError("as the message says")


def seen_of_key(ctx: Context) -> list[tuple[str, int]]:
    """Return the notes on a message's key: what a handler depends on."""
    return world.seen[ctx.key]


def application() -> mqlayer.App:
    """Return an application with a group of each kind."""
    app = mqlayer.App()
    for policy, topic in by_policy.items():
        app.consumer(topic, group="g", policy=policy, attempt_limit=ATTEMPT_LIMIT, backoff_s=BACKOFF_S, options=QUICK)(
            handle
        )

    @app.consumer(tagged, group="g", tag_filter=mqlayer.any_of("eu"), options=QUICK)
    def filtered(body: str, ctx: Context, seen: Annotated[list[Any], mqlayer.Depends(seen_of_key)]) -> None:
        seen.append((body, ctx.attempt))

    @app.consumer(loose, group="g", batch=BatchOf("distinct"), backoff_s=BACKOFF_S, options=QUICK)
    def distinct(bodies: list[str], batch: Batch[str]) -> None:
        world.batches.append(bodies)
        for message in batch:
            if message.value == "bad" and message.attempt == 1:
                batch.fail(message, "as the test says")

    @app.consumer(many, group="g", batch=BatchOf("key"), backoff_s=BACKOFF_S, options=QUICK)
    def of_one_key(batch: Batch[str]) -> None:
        with world.engine.session() as session:
            fresh = batch.fence(session)
            world.batches.append([message.value for message in fresh])

    @app.consumer(asynchronous, group="g", attempt_limit=3, backoff_s=BACKOFF_S, options=QUICK)
    async def ahandle(body: Work, ctx: Context) -> None:
        world.seen[ctx.key].append((body.name, ctx.attempt))
        async with world.engine.asession() as session:
            await ctx.afence(session)
            await effects.apublish(session, Effect(body.name))
            if ctx.attempt == 1:
                act(*body.acts)

    return app


@pytest.fixture(scope="module")
def settings(database_maker: DatabaseMaker, migrated_template: str, redis_server: AnyRedis) -> Iterator[Settings]:
    """A database and a node for all of these tests."""
    with database_maker.copy_of(migrated_template) as dsn:
        with Database(dsn) as database:
            register_node(runtime_of(database), name="n1", url=redis_server.url)
        yield Settings(dsn=SecretStr(dsn), key_prefix="behaviours", lease_s=5.0)


@pytest.fixture(scope="module", params=["memory", "real"])
def shared_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The same application on either engine."""
    settings = request.getfixturevalue("settings") if request.param == "real" else None
    with engine_for(application(), request.param, settings, topics=(effects,)) as engine:
        world.engine = engine
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    """The engine, with nothing seen yet; each test has keys of its own."""
    world.seen.clear()
    world.order.clear()
    world.batches.clear()
    return shared_engine


def names(key: str) -> list[str]:
    return [name for name, _ in world.seen[key]]


def dead(engine: Engine, topic: mqlayer.Topic[Any], key: str) -> list[str]:
    return [Work(**msgspec.json.decode(m.body)).name for m in engine.dead(topic) if m.key == key]


def test_messages_of_a_key_are_handled_in_order(engine: Engine) -> None:
    for number in range(20):
        engine.publish(work, Work(f"{number}"), key=f"order-{number % 2}")
    engine.run()
    assert names("order-0") == [str(number) for number in range(0, 20, 2)]
    assert names("order-1") == [str(number) for number in range(1, 20, 2)]


def test_a_failing_key_waits_and_other_keys_go_on(engine: Engine) -> None:
    # Together: "bad" would be through with its retries before a late one came.
    with engine.session() as session:
        for one, key in (
            (Work("bad", ["fail", "fail"]), "waits"),
            (Work("behind"), "waits"),
            (Work("free"), "goes-on"),
        ):
            work.publish(session, one, key=key)
    engine.run_until_idle(raises=False)
    assert world.seen["waits"] == [("bad", 1), ("bad", 2), ("bad", 3), ("behind", 1)]
    assert world.order.index("free") < world.order.index("bad") < world.order.index("behind")


def test_an_error_of_a_handler_is_raised_in_the_test(engine: Engine) -> None:
    engine.publish(work, Work("raises", ["fail"]), key="raises")
    with pytest.raises(ValueError, match="as the message says"):
        engine.run_until_idle()
    engine.run_until_idle()
    assert world.seen["raises"] == [("raises", 1), ("raises", 2)]
    assert [failure.attempt for failure in engine.failures if failure.message.key == "raises"] == [1]


def test_retry_later_counts_an_attempt_and_raises_nothing(engine: Engine) -> None:
    engine.publish(work, Work("late", ["later"]), key="later")
    engine.publish(work, Work("behind"), key="later")
    engine.run_until_idle()
    assert world.seen["later"] == [("late", 1), ("late", 2), ("behind", 1)]


def test_pause_key_counts_no_attempt(engine: Engine) -> None:
    engine.publish(work, Work("paused", ["pause"]), key="pause")
    engine.run_until_idle()
    assert world.seen["pause"] == [("paused", 1), ("paused", 1)]


def test_skip_passes_a_message_over_and_its_key_goes_on(engine: Engine) -> None:
    engine.publish(work, Work("skipped", ["skip"]), key="skip")
    engine.publish(work, Work("behind"), key="skip")
    engine.run_until_idle()
    assert names("skip") == ["skipped", "behind"]
    assert dead(engine, work, "skip") == ["skipped"]


@pytest.mark.parametrize("acts", [["reject"], ["fail", "fail", "fail"]], ids=["rejected", "exhausted"])
def test_policy_park_keeps_the_key_until_it_is_released(engine: Engine, acts: list[str]) -> None:
    key = f"park-{len(acts)}"
    engine.publish(work, Work("bad", acts), key=key)
    engine.run_until_idle(raises=False)
    engine.publish(work, Work("behind"), key=key)
    engine.run_until_idle(raises=False)
    assert (names(key), engine.parked(work)) == (["bad"] * len(acts), [key])
    engine.release(work, key)
    engine.run()
    assert world.seen[key][len(acts) :] == [("bad", 1), ("behind", 1)]
    assert [message.key for message in engine.handled(work)].count(key) == 2
    assert engine.parked(work) == []


def test_policy_dead_letter_lets_the_key_go_on_without_the_message(engine: Engine) -> None:
    topic = by_policy["dead_letter"]
    engine.publish(topic, Work("bad", ["fail", "fail", "fail"]), key="dead")
    engine.publish(topic, Work("behind"), key="dead")
    engine.publish(topic, Work("rejected", ["reject"]), key="dead")
    engine.run_until_idle(raises=False)
    assert names("dead") == ["bad", "bad", "bad", "behind", "rejected"]
    assert dead(engine, topic, "dead") == ["bad", "rejected"]


def test_policy_skip_lets_the_key_go_on(engine: Engine) -> None:
    topic = by_policy["skip"]
    engine.publish(topic, Work("bad", ["fail", "fail", "fail"]), key="policy-skip")
    engine.publish(topic, Work("behind"), key="policy-skip")
    engine.run_until_idle(raises=False)
    assert names("policy-skip") == ["bad", "bad", "bad", "behind"]
    assert dead(engine, topic, "policy-skip") == ["bad"]


def test_policy_block_tries_for_ever(engine: Engine) -> None:
    topic = by_policy["block"]
    engine.publish(topic, Work("bad", ["fail"] * 5), key="block")
    engine.publish(topic, Work("behind"), key="block")
    engine.run_until_idle(raises=False)
    assert names("block") == ["bad"] * 6 + ["behind"]
    assert engine.parked(topic) == dead(engine, topic, "block") == []


def test_a_body_that_does_not_fit_is_final(engine: Engine) -> None:
    engine.publish("work-dead_letter", b'{"nome": 1}', key="mismatch")
    with pytest.raises(BodyMismatch):
        engine.run_until_idle()
    engine.run_until_idle()
    assert [message.key for message in engine.dead(by_policy["dead_letter"])].count("mismatch") == 1
    assert names("mismatch") == []


def test_what_a_handler_publishes_commits_with_its_fenced_transaction(engine: Engine) -> None:
    engine.publish(work, Work("effect-of-two", ["fail"]), key="effects")
    engine.run_until_idle(raises=False)
    assert names("effects") == ["effect-of-two", "effect-of-two"]
    engine.assert_published(effects, key="effect-of-two", body={"name": "effect-of-two"}, count=1)


def test_a_fence_applies_a_redelivered_message_once(engine: Engine) -> None:
    engine.publish(work, Work("once", ["fail after commit"]), key="once")
    engine.run_until_idle(raises=False)
    assert world.seen["once"] == [("once", 1), ("once", 2)]
    assert world.order.count("once") == 1
    engine.assert_published(effects, body=Effect("once"), count=1)
    assert [message.key for message in engine.handled(work)].count("once") == 1


def test_headers_and_tags_reach_the_handler(engine: Engine) -> None:
    engine.publish(work, Work("with-facts"), key="facts", headers={"trace": "7"}, tags=("b", "a"))
    engine.run()
    assert world.facts["with-facts"] == ({"trace": "7"}, ("a", "b"))
    engine.assert_published(work, headers={"trace": "7"}, tags=("a",))


def test_a_tag_filter_leaves_other_messages_out(engine: Engine) -> None:
    engine.publish(tagged, "one", key="tags", tags=("eu",))
    engine.publish(tagged, "two", key="tags", tags=("us",))
    engine.publish(tagged, "three", key="tags")
    engine.publish(tagged, "four", key="tags", tags=("eu", "us"))
    engine.run()
    assert names("tags") == ["one", "four"]


def test_a_handler_gets_its_dependencies(engine: Engine) -> None:
    engine.publish(tagged, "mine", key="depends", tags=["eu"])
    engine.run()
    assert world.seen["depends"] == [("mine", 1)]


def test_a_dedup_id_is_stored_once(engine: Engine) -> None:
    with engine.session() as session:
        first, second = (work.publish_once(session, Work("dedup"), key="dedup", dedup_id="1") for _ in range(2))
    engine.publish(work, Work("dedup"), key="dedup", dedup_id="1")
    engine.run()
    assert (first.duplicate, second.duplicate, second.seq) == (False, True, first.seq)
    assert names("dedup") == ["dedup"]


def test_a_delayed_message_comes_when_it_is_due(engine: Engine) -> None:
    # Longer than a busy machine takes for a run; the real engine waits so long.
    engine.publish(work, Work("delayed"), key="delay", delay_s=5.0)
    engine.publish(work, Work("at once"), key="delay")
    engine.run()
    assert names("delay") == ["at once"]
    engine.clock.advance(5.0)
    engine.run()
    assert names("delay") == ["at once", "delayed"]


def test_nothing_is_published_by_a_transaction_that_rolls_back(engine: Engine) -> None:
    with suppress(ZeroDivisionError), engine.session() as session:
        work.publish(session, Work("never"), key="never")
        raise ZeroDivisionError
    with engine.session() as session, outbox.transaction(session) as tx:
        tx.publish("work-park", key="never", body=Work("kept"))
        with suppress(ZeroDivisionError), session.transaction():
            work.publish(session, Work("savepoint"), key="never")
            raise ZeroDivisionError
    engine.run()
    assert names("never") == ["kept"]


def test_a_batch_of_distinct_keys_fails_single_messages(engine: Engine) -> None:
    with engine.session() as session:
        for body in ("good", "bad", "fine"):
            loose.publish(session, body, key=f"distinct-{body}")
    engine.run_until_idle(raises=False)
    assert sorted(chain(*world.batches)) == ["bad", "bad", "fine", "good"]
    assert ["bad"] in world.batches


def test_a_batch_of_one_key_is_in_order_and_fenced(engine: Engine) -> None:
    with engine.session() as session:
        for number in range(10):
            many.publish(session, str(number), key="run")
    engine.run()
    assert list(chain(*world.batches)) == [str(number) for number in range(10)]


def test_async_handlers_fence_publish_and_retry(engine: Engine) -> None:
    engine.publish(asynchronous, Work("async", ["fail"]), key="async")
    engine.run_until_idle(raises=False)
    assert world.seen["async"] == [("async", 1), ("async", 2)]
    engine.assert_published(effects, key="async", count=1)
    engine.assert_not_published(effects, key="unknown")


@dataclass
class Course:
    """What the rules say of one key's messages under a policy."""

    policy: str
    seen: list[tuple[str, int]] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)

    def follow(self, works: list[Work]) -> list[Work]:
        """Handle messages until one is parked; return the rest with it, its acts so far left out."""
        for at, one in enumerate(works):
            attempts, acts = 0, list(one.acts)
            while True:
                self.seen.append((one.name, attempts + 1))
                name = acts.pop(0) if acts else "succeed"
                attempts += name in ("fail", "later", "reject")
                final = name == "reject" or (name in ("fail", "later") and attempts >= ATTEMPT_LIMIT)
                if final and self.policy == "park":
                    return [Work(one.name, acts), *works[at + 1 :]]
                left_out = name == "skip" or (final and self.policy in ("dead_letter", "skip"))
                if left_out:
                    self.dead.append(one.name)
                if left_out or name == "succeed":
                    break
        return []


@pytest.mark.parametrize("policy", some_of(by_policy, 2))
def test_random_messages_go_as_the_rules_say(engine: Engine, policy: Policy) -> None:
    topic, rng = by_policy[policy], random.Random(policy)
    kinds = ("succeed", "fail", "fail", "later", "reject", "skip", "pause")
    works = {
        f"random-{policy}-{key}": [Work(f"{key}-{n}", rng.choices(kinds, k=rng.randrange(4))) for n in range(4)]
        for key in range(5)
    }
    courses = {key: Course(policy) for key in works}
    rest = {key: course.follow(works[key]) for key, course in courses.items()}
    with engine.session() as session:
        for number in range(4):
            for key, of_key in works.items():
                topic.publish(session, of_key[number], key=key)
    engine.run_until_idle(raises=False)
    while parked := sorted(key for key, left in rest.items() if left):
        assert sorted(map(str, engine.parked(topic))) == parked
        assert world.seen == {key: course.seen for key, course in courses.items()}
        rest = {key: courses[key].follow(left) for key, left in rest.items()}
        engine.release(topic)
        engine.run_until_idle(raises=False)
    assert world.seen == {key: course.seen for key, course in courses.items()}
    assert engine.parked(topic) == []
    assert {key: dead(engine, topic, key) for key in works} == {key: course.dead for key, course in courses.items()}
