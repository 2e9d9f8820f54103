"""Ordered Celery tasks in one process: calls, what they refuse, bodies, failures, results; no broker anywhere."""

from __future__ import annotations

import datetime as dt
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery import Celery, chain, chord, current_app, signals
from celery.exceptions import Ignore, Reject, Retry
from celery.result import AsyncResult

from mqlayer import RetryLater, outbox
from mqlayer.errors import BodyTooLarge, Conflict, InvalidInput, MessageTimeout, NotFound
from mqlayer.logs import event_of
from mqlayer.relay import relay_once
from mqlayer.workers import connections
from mqlayer.workers.ordered_tasks import OrderedTask, consume_tasks, ordered_task
from tests.fixtures.consumers import QUICK_BACKOFF_S, Recorder, Stage
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.wait import wait_until
from tests.proof.world import QUICK

NO_BROKER = "redis://127.0.0.1:1/0"


@pytest.fixture
def celery(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """An application whose broker is not there, with results in files."""
    monkeypatch.setenv("MQLAYER_DSN", stage.dsn)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", stage.prefix)
    connections.close()
    app = Celery("shop", broker=NO_BROKER, backend=(tmp_path / "results").as_uri(), set_as_current=False)
    (tmp_path / "results").mkdir()
    app.conf.result_extended = True
    yield app
    connections.close()
    app.close()


# Celery gives a task to all applications of a process by default, so one test's would be in the next one's.
ordered = partial(ordered_task, shared=False)


class Bodies:
    """What bodies were given, in the order in which they ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, int]] = []

    def of(self, key: str) -> list[int]:
        return [number for name, number in self.ended if name == key]


@pytest.fixture
def bodies() -> Bodies:
    return Bodies()


Run = Callable[[], None]


@pytest.fixture
def run(stage: Stage, celery: Celery) -> Run:
    """Start what runs the calls of the topic."""

    def start() -> None:
        consumers = stage.app()
        consume_tasks(consumers, celery, topic=stage.topic, group="g", backoff_s=QUICK_BACKOFF_S)
        consumers.start()

    return start


@contextmanager
def heard(signal: Any) -> Iterator[list[dict[str, Any]]]:
    """Note what a signal of Celery's says."""
    said: list[dict[str, Any]] = []

    def hear(**facts: Any) -> None:
        said.append(facts)

    signal.connect(hear, weak=False)
    try:
        yield said
    finally:
        signal.disconnect(hear)


def test_calls_run_in_order_per_key_with_celerys_context_and_give_results(
    stage: Stage, celery: Celery, bodies: Bodies, run: Run
) -> None:
    requests: dict[str, Any] = {}

    @ordered(celery, topic=stage.topic, key="account", bind=True, name="shop.book")
    def book(self: OrderedTask, account: str, number: int, *, note: str = "") -> str:
        assert celery.current_task.name == "shop.book"
        request = self.request
        requests[request.id] = (request.args, request.kwargs, request.retries, request.headers, request.called_directly)
        assert self.message is not None
        assert self.message.key == account
        bodies.ended.append((account, number))
        return f"{account}/{number}{note}"

    results = [book.delay(f"a-{number % 5}", number) for number in range(40)]
    results.append(book.apply_async(("a-0", 40), {"note": "!"}, task_id="chosen", headers={"trace": "t-1"}))
    results.append(book.s("a-1").apply_async((), {"number": 41}))
    run()
    assert [result.get(timeout=20, interval=0.02) for result in results[:2]] == ["a-0/0", "a-1/1"]
    assert results[40].get(timeout=20, interval=0.02) == "a-0/40!"
    stage.wait_settled()
    assert all(isinstance(result, AsyncResult) and result.state == "SUCCESS" for result in results)
    for key in range(5):
        assert bodies.of(f"a-{key}") == [number for number in range(42) if number % 5 == key]
    assert results[40].id == "chosen"
    assert requests["chosen"] == (["a-0", 40], {"note": "!"}, 0, {"trace": "t-1"}, False)
    assert (results[40].name, results[40].kwargs) == ("shop.book", {"note": "!"})


def test_arguments_come_back_as_celerys_json_carries_them(stage: Stage, celery: Celery, run: Run) -> None:
    got: list[Any] = []

    @ordered(celery, topic=stage.topic, key=lambda order, **_: order)
    def ship(order: UUID, at: dt.datetime, price: Decimal, **rest: Any) -> None:
        got.append((order, at, price, rest))

    sent = (UUID(int=7), dt.datetime(2026, 11, 21, tzinfo=dt.UTC), Decimal("1.10"), {"lines": [1, None, {"x": 2.5}]})
    ship.delay(order=sent[0], at=sent[1], price=sent[2], lines=[1, None, {"x": 2.5}])
    run()
    wait_until(lambda: got == [sent], what="the call")


def test_a_failing_call_is_tried_again_in_its_place_and_other_keys_go_on(
    stage: Stage, celery: Celery, bodies: Bodies, run: Run
) -> None:
    attempts: list[int] = []

    @ordered(celery, topic=stage.topic, key="key", bind=True)
    def step(self: OrderedTask, key: str, number: int) -> int:
        if (key, number) == ("bad", 1):
            attempts.append(self.request.retries)
            # Until another key has overtaken it.
            if len(attempts) < 3 or not bodies.of("good"):
                raise RuntimeError("not yet")
        bodies.ended.append((key, number))
        return number

    with heard(signals.task_retry) as retried, heard(signals.task_failure) as failed:
        results = [step.delay(key, number) for number in range(3) for key in ("bad", "good")]
        run()
        assert results[2].get(timeout=20, interval=0.02) == 1
        stage.wait_settled()
    assert bodies.of("bad") == bodies.of("good") == [0, 1, 2]
    assert attempts == list(range(len(attempts)))
    assert len(attempts) >= 3
    assert len(retried) == len(attempts) - 1
    assert {str(said["reason"].exc) for said in retried} == {"not yet"}
    assert "not yet" not in str(retried[0]["reason"]), "what is logged has no text of the error's"
    assert failed == [], "a call that will run again has not failed"


def test_a_body_that_takes_longer_than_its_group_allows_is_ended_and_runs_again(
    stage: Stage, celery: Celery, bodies: Bodies
) -> None:
    @ordered(celery, topic=stage.topic, key="key", bind=True)
    def step(self: OrderedTask, key: str, number: int) -> None:
        until = time.monotonic() + (30 if self.request.retries == 0 and number == 0 else 0)
        while time.monotonic() < until:
            time.sleep(0.005)
        bodies.ended.append((key, number))

    for number in range(2):
        step.delay("a", number)
    consumers = stage.app()
    consume_tasks(consumers, celery, topic=stage.topic, group="g", backoff_s=QUICK_BACKOFF_S, time_limit_s=2.0)
    with heard(signals.task_retry) as retried:
        consumers.start()
        stage.wait_settled()
    assert bodies.of("a") == [0, 1]
    (said,) = retried
    assert isinstance(said["reason"].exc, MessageTimeout)
    assert said["reason"].exc.limit_s == 2.0


def test_a_body_may_say_when_it_is_tried_again(stage: Stage, celery: Celery, bodies: Bodies, run: Run) -> None:
    @ordered(celery, topic=stage.topic, key="key")
    def step(key: str) -> None:
        bodies.ended.append((key, len(bodies.ended)))
        if len(bodies.ended) == 1:
            raise RetryLater(0.05, "not yet")

    step.delay("a")
    run()
    stage.wait_settled()
    assert bodies.of("a") == [0, 1]


def test_whoever_waits_for_a_failing_call_sees_a_retry(stage: Stage, celery: Celery, run: Run) -> None:
    may: list[bool] = []

    @ordered(celery, topic=stage.topic, key="key", bind=True)
    def step(self: OrderedTask, key: str) -> str:
        if not may:
            raise self.retry(countdown=3600, exc=RuntimeError("not yet"), max_retries=0)
        return key

    result = step.delay("a")
    run()
    wait_until(lambda: result.state == "RETRY", what="a first attempt")
    assert not result.ready()
    may.append(True)
    assert result.get(timeout=20, interval=0.02) == "a"


def test_a_retry_with_other_arguments_is_a_failed_attempt_that_says_why(stage: Stage, celery: Celery, run: Run) -> None:
    refused: list[str] = []

    @ordered(celery, topic=stage.topic, key="key", bind=True)
    def step(self: OrderedTask, key: str) -> None:
        if not refused:
            try:
                self.retry(args=("b",))
            except InvalidInput as error:
                refused.append(str(error))
                raise

    step.delay("a")
    run()
    stage.wait_settled()
    assert "keeps its arguments" in refused[0]


def test_signals_and_hooks_of_celery_come(stage: Stage, celery: Celery, run: Run) -> None:
    hooks: list[str] = []

    class Hooked(OrderedTask):
        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            hooks.append("before_start")

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            hooks.append("on_success")

        def after_return(self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            hooks.append(f"after_return {status}")

    @celery.task(shared=False, base=Hooked, topic=stage.topic, key="key", ignore_result=True)  # type: ignore[untyped-decorator]
    def step(key: str) -> str:
        hooks.append("body")
        return key

    with (
        heard(signals.task_prerun) as before,
        heard(signals.task_success) as well,
        heard(signals.task_postrun) as after,
    ):
        result = step.delay("a")
        run()
        stage.wait_settled()
        wait_until(lambda: after, what="the end")
    assert [said["task_id"] for said in before] == [said["task_id"] for said in after] == [result.id]
    assert [said["result"] for said in well] == ["a"]
    assert hooks == ["before_start", "body", "on_success", "after_return SUCCESS"]
    assert result.state == "PENDING", "ignore_result is kept"


def test_an_ignored_call_is_done_and_a_rejected_one_is_not(stage: Stage, celery: Celery, run: Run) -> None:
    runs: list[str] = []

    @ordered(celery, topic=stage.topic, key="key")
    def step(key: str) -> None:
        runs.append(key)
        if key == "ignored":
            raise Ignore
        if runs.count("rejected") < 2:
            raise Reject("no", requeue=False)

    step.delay("ignored")
    step.delay("rejected")
    run()
    stage.wait_settled()
    assert sorted(runs) == ["ignored", "rejected", "rejected"]


def test_a_result_that_cannot_be_stored_does_not_repeat_the_body(
    stage: Stage, celery: Celery, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it is nothing to store, or the backend is away."""
    runs: list[str] = []

    @ordered(celery, topic=stage.topic, key="key")
    def step(key: str) -> object:
        runs.append(key)
        if key == "b" and runs.count("b") == 1:
            raise RuntimeError("a failed attempt is one without a backend too")
        return object() if key == "a" else key

    def lost() -> int:
        return [event_of(record) for record in caplog.records].count("task_result_lost")

    with caplog.at_level(logging.ERROR, "mqlayer.workers.ordered_tasks"):
        step.delay("a")
        run()
        stage.wait_settled()
        assert (runs, lost()) == (["a"], 1)
        shutil.rmtree(tmp_path / "results")
        step.delay("b")
        stage.wait_settled()
        assert (runs, lost()) == (["a", "b", "b"], 2)


def test_a_body_that_passes_the_fence_has_its_effect_once(stage: Stage, celery: Celery, run: Run) -> None:
    attempts: list[int] = []
    with kept_session(stage.dsn) as connection:
        connection.execute("CREATE TABLE booked (account text, amount int)")

    @ordered(celery, topic=stage.topic, key="account", bind=True)
    def book(self: OrderedTask, account: str, amount: int) -> None:
        attempts.append(self.request.retries)
        with kept_session(stage.dsn) as connection:
            self.fence(connection)
            connection.execute("INSERT INTO booked VALUES (%s, %s)", (account, amount))
        if amount == 1 and len(attempts) == 1:
            raise RuntimeError("after the commit")

    book.delay("a", 1)
    book.delay("a", 2)
    run()
    stage.wait_settled()
    assert attempts == [0, 1, 0]
    with kept_session(stage.dsn) as connection:
        assert connection.execute("SELECT * FROM booked").fetchall() == [("a", 1), ("a", 2)]
    book("a", 3)


def test_calls_in_a_transaction_run_if_it_commits_in_its_order(
    stage: Stage, celery: Celery, bodies: Bodies, run: Run
) -> None:
    @ordered(celery, topic=stage.topic, key="key")
    def step(key: str, number: int) -> int:
        bodies.ended.append((key, number))
        return number

    with kept_session(stage.dsn) as connection:
        connection.execute("CREATE TABLE business (number int)")
    results = []
    with kept_session(stage.dsn, autocommit=True) as connection:
        for number in range(10):
            try:
                with outbox.transaction(connection):
                    connection.execute("INSERT INTO business VALUES (%s)", (number,))
                    results.append(step.delay_in(connection, "a", number))
                    results.append(step.apply_async_in(connection, ("b", number), task_id=f"b-{number}"))
                    if number % 3 == 0:
                        raise RuntimeError("rolled back")
            except RuntimeError:
                pass
        committed = [number for (number,) in connection.execute("SELECT number FROM business").fetchall()]
    run()
    assert relay_once(stage.settings(), limits=QUICK) == 12
    wait_until(lambda: len(bodies.ended) >= 12, what="the calls")
    stage.wait_settled()
    assert committed == bodies.of("a") == bodies.of("b") == [1, 2, 4, 5, 7, 8]
    assert results[3].get(timeout=10, interval=0.02) == 1
    assert results[3].id == "b-1"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"countdown": 5}, "let an ordinary task with that delay make this call"),
    ({"eta": dt.datetime(2030, 1, 1, tzinfo=dt.UTC)}, "let an ordinary task"),
    ({"expires": 60}, "look at the time in the body"),
    ({"priority": 3}, "behind the earlier calls of its key"),
    ({"queue": "fast"}, "give topic= to the decorator"),
    ({"routing_key": "fast"}, "give topic= to the decorator"),
    ({"time_limit": 5}, "time_limit_s="),
    ({"link": "something"}, "make the next call in the body"),
    ({"serializer": "pickle"}, "means nothing to a message"),
    ({"compression": "zlib"}, "means nothing to a message"),
    ({"headers": ["a"]}, "headers of a call"),
    ({"headers": {"a": object()}}, "headers of a call"),
]


def test_a_member_of_an_enum_has_the_key_of_its_value(stage: Stage, celery: Celery, run: Run) -> None:
    class Desk(str, Enum):  # noqa: UP042  # text of its own, as many still are
        FIRST = "first"

    class Level(int, Enum):
        TOP = 7

    keys: list[str | None] = []

    @ordered(celery, topic=stage.topic, key="key", bind=True)
    def step(self: OrderedTask, key: str | int) -> None:
        assert self.message is not None
        keys.append(self.message.key)

    for key in (Desk.FIRST, "first", Level.TOP, 7):
        step.delay(key)
    run()
    wait_until(lambda: len(keys) == 4, what="the calls")
    assert sorted(map(str, keys)) == ["7", "7", "first", "first"]


def test_an_unordered_group_does_not_run_ordered_tasks(stage: Stage, run: Run) -> None:
    """Whoever made it unordered may be another program: its members would run calls of a key side by side."""
    stage.consume(Recorder(), ordered=False).stop()
    with pytest.raises(Conflict, match=r"ordered = False.*brings True"):
        run()


def test_a_group_with_a_filter_does_not_run_ordered_tasks(stage: Stage, run: Run) -> None:
    """Calls have no tags: they would be settled, and nobody would run them."""
    stage.consume(Recorder(), tag_filter="any:eu").stop()
    with pytest.raises(Conflict, match=r"tag_filter = any:eu.*brings none"):
        run()


def test_options_that_order_cannot_keep_are_refused_and_nothing_is_sent(stage: Stage, celery: Celery) -> None:
    @ordered(celery, topic=stage.topic, key="key", name="shop.step")
    def step(key: str) -> None:
        raise AssertionError

    for option, hint in REFUSED:
        with pytest.raises(InvalidInput, match=hint) as caught:
            step.apply_async(("a",), **option)
        assert "'shop.step'" in str(caught.value)
    assert sum(stage.redis.xlen(stage.keys(partition).log) for partition in stage.partitions) == 0


def test_a_chain_may_end_with_an_ordered_call_and_not_go_on_after_it(
    stage: Stage, celery: Celery, bodies: Bodies, run: Run
) -> None:
    @ordered(celery, topic=stage.topic, key="key")
    def step(number: int, key: str = "a") -> None:
        bodies.ended.append((key, number))

    @celery.task(shared=False)  # type: ignore[untyped-decorator]
    def ordinary(number: int) -> int:
        return number + 1

    # Canvas asks for a way to the broker before it looks at what it sends.
    celery.conf.broker_url = "memory://"
    for refused in (chain(step.s(1), ordinary.s()), step.s(1) | ordinary.s(), chord([step.s(1)], ordinary.s())):
        with pytest.raises(InvalidInput, match="the last one of a chain"):
            refused.apply_async()
    for at_once in (step.map, step.starmap, step.chunks):
        with pytest.raises(InvalidInput, match="once for each item"):
            at_once([1, 2])
    # What Celery's tracer does with the last link.
    step.s().apply_async((5,), chain=[], parent_id="p", root_id="r", priority=None)
    run()
    wait_until(lambda: bodies.ended == [("a", 5)], what="the last link")


def test_bad_calls_are_refused_where_they_are_made(stage: Stage, celery: Celery) -> None:
    @ordered(celery, topic=stage.topic, key="key")
    def step(key: Any, body: Any = None) -> None:
        raise AssertionError

    for args in ((), ("a", "b", "c")):
        with pytest.raises(TypeError):
            step.delay(*args)
    for bad_key in (None, True, 1.5, ["a"]):
        with pytest.raises(InvalidInput, match="text, a whole number or a UUID"):
            step.delay(bad_key)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    # The last ones can be written and not be read back: their key would wait for ever.
    claims = ({"__type__": name, "__value__": "x"} for name in ("uuid", "decimal", "datetime", "unknown"))
    for bad in (object(), float("nan"), {"x": {1, 2}}, deep, *claims):
        with pytest.raises(InvalidInput, match="can't be JSON"):
            step.delay("a", bad)
    with pytest.raises(BodyTooLarge):
        step.delay("a", "x" * 3_000_000)

    @ordered(celery, topic="nowhere", key="key")
    def lost(key: str) -> None:
        raise AssertionError

    with pytest.raises(NotFound, match="unknown topic 'nowhere'"):
        lost.delay("a")


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"key": "order"}, "no parameter 'order'"),
        ({"key": 5}, "needs key="),
        ({"key": ""}, "needs key="),
        ({"key": "key", "topic": "No Topic"}, "bad topic name"),
        ({"key": "key", "queue": "fast"}, "takes no queue"),
        ({"key": "key", "priority": 5}, "takes no priority"),
        ({"key": "key", "rate_limit": "1/s"}, "concurrency bounds"),
        ({"key": "key", "max_retries": 5}, "attempt_limit="),
        ({"key": "key", "soft_time_limit": 5}, "time_limit_s="),
    ],
)
def test_tasks_whose_options_would_be_without_effect_are_refused(options: dict[str, Any], hint: str) -> None:
    celery = Celery("shop", broker=NO_BROKER, set_as_current=False)
    with pytest.raises(InvalidInput, match=hint):

        @ordered(celery, **options)
        def step(key: str) -> None:
            raise AssertionError


def test_tasks_made_with_the_base_class_are_checked_too() -> None:
    celery = Celery("shop", broker=NO_BROKER, set_as_current=False)
    with pytest.raises(InvalidInput, match="needs key="):

        @celery.task(shared=False, base=OrderedTask, lazy=False)  # type: ignore[untyped-decorator]
        def without(key: str) -> None:
            raise AssertionError

    with pytest.raises(InvalidInput, match="plain function"):

        @ordered(celery, key="key")
        async def coroutine(key: str) -> None:
            raise AssertionError


def test_a_body_is_called_directly_and_eagerly_as_any_other(stage: Stage, celery: Celery, bodies: Bodies) -> None:
    @ordered(celery, topic=stage.topic, key="key", bind=True, max_retries=None)
    def step(self: OrderedTask, key: str, number: int) -> int:
        assert self.message is None
        self.fence(None)
        bodies.ended.append((str(self.request.id), number))
        if number < 0:
            raise self.retry(exc=ValueError("negative"))
        return 2 * number

    assert step("a", 1) == 2
    assert step.apply(("a", 2), task_id="two").get() == 4
    with pytest.raises(ValueError, match="negative"):
        step("a", -1)
    celery.conf.task_always_eager = True
    result = step.delay("a", 3)
    assert (result.get(), result.state) == (6, "SUCCESS")
    assert step.apply_async(("a", 4), task_id="four").id == "four"
    with pytest.raises(InvalidInput, match="takes no countdown"):
        step.apply_async(("a", 4), countdown=5)
    assert [name for name, _ in bodies.ended] == ["None", "two", "None", result.id, "four"]
    assert sum(stage.redis.xlen(stage.keys(partition).log) for partition in stage.partitions) == 0


def test_messages_that_are_no_calls_wait_and_say_why(
    stage: Stage, celery: Celery, bodies: Bodies, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody who can write to the topic can run anything else than ordered tasks."""

    @ordered(celery, topic=stage.topic, key="key", name="shop.step")
    def step(key: str, number: int) -> None:
        bodies.ended.append((key, number))

    @celery.task(shared=False, name="shop.ordinary")  # type: ignore[untyped-decorator]
    def ordinary() -> None:
        raise AssertionError

    stage.send([
        ("one", b"no call"),
        ("two", b'{"task": "shop.ordinary", "id": "1", "arguments": "[[], {}]"}'),
        ("three", b'{"task": "shop.unknown", "id": "1", "arguments": "[[], {}]"}'),
        ("four", b'{"task": "shop.step", "id": "1", "arguments": "{}"}'),
        ("five", b'{"task": "shop.step", "id": "1", "arguments": "no"}'),
    ])  # fmt: skip
    step.delay("good", 1)
    with caplog.at_level(logging.WARNING, "mqlayer"):
        run()
        wait_until(lambda: bodies.ended == [("good", 1)], what="the call")

        def told() -> bool:
            faults: dict[str, int] = defaultdict(int)
            for record in caplog.records:
                faults[str(getattr(record, "error", ""))] += 1
            text = " ".join(faults)
            return all(word in text for word in ("not JSON", "not ordered", "NotFound", "not a list and names"))

        wait_until(told, what="the reasons")
    assert not stage.all_settled("g")


def test_a_shared_task_belongs_to_the_current_application(stage: Stage, celery: Celery, run: Run) -> None:
    got: list[str] = []

    @ordered_task(topic=stage.topic, key="key", name=f"shared.{stage.prefix}")
    def step(key: str) -> None:
        got.append(key)

    before = current_app._get_current_object()
    celery.set_current()
    try:
        step.delay("a")
    finally:
        before.set_current()
    run()
    wait_until(lambda: got == ["a"], what="the call")


def test_a_retry_outside_of_a_message_is_celerys(stage: Stage, celery: Celery) -> None:
    @ordered(celery, topic=stage.topic, key="key", bind=True)
    def step(self: OrderedTask, key: str) -> None:
        raise self.retry()

    with pytest.raises(Retry):
        step("a")
