"""TestApp and contexts, where no server is asked; what both engines share is in integration/test_behaviours.py."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool

import mqlayer
from mqlayer import Context, PauseKey, RetryLater, Versions, expires_after, outbox
from mqlayer.consuming.engine import clock as engine_clock
from mqlayer.consuming.ordered import workers
from mqlayer.domain.names import check_headers
from mqlayer.errors import (
    AlreadyApplied,
    BatchUndone,
    BodyTooLarge,
    Conflict,
    HandlerFault,
    InvalidInput,
    MqlayerError,
    NotFound,
    ReservedHeader,
    StaleOwner,
)
from mqlayer.testing import RealApp, TestApp, assert_published, batch, context, in_memory


@dataclass
class Order:
    customer: str
    amount: int = 0


orders = mqlayer.Topic("orders", body=Order, key=lambda order: order.customer)


def app_with(handler: Any, **settings: Any) -> mqlayer.App:
    app = mqlayer.App()
    app.consumer(orders, group="ledger", **settings)(handler)
    return app


def test_hours_of_retries_pass_at_once_when_the_clock_is_turned() -> None:
    seen: list[tuple[int, float]] = []

    def book(order: Order, ctx: Context) -> None:
        seen.append((ctx.attempt, round(test.clock.seconds() - began)))
        if ctx.attempt < 4 and order.amount:
            raise RetryLater(3600) if ctx.attempt == 1 else ValueError("not yet")

    with TestApp(app_with(book, backoff_s=(5, 60, 120))) as test:
        began = test.clock.seconds()
        test.publish(orders, Order("ann", 1))
        test.run()
        test.publish(orders, Order("ann"))
        test.clock.advance(3599)
        test.run()
        assert (seen, test.parked(orders)) == ([(1, 0)], ["ann"])
        test.clock.advance(1)
        test.run_until_idle(raises=False)
        assert seen == [(1, 0), (2, 3600), (3, 3660), (4, 3780), (1, 3780)]
        assert test.parked(orders) == []


@pytest.mark.parametrize("rule", ["settle", "dead"])
def test_messages_expire_when_the_clock_is_turned_also_behind_a_failing_one(rule: Any) -> None:
    seen: list[int] = []

    def book(order: Order) -> None:
        seen.append(order.amount)
        if order.amount == 1:
            raise ValueError("not yet")

    with TestApp(app_with(book, backoff_s=(5,))) as test:
        test.set_time_to_live(orders, 60, expired=rule)
        test.publish(orders, Order("ann", 1))
        test.publish(orders, Order("ann", 2))
        test.run(raises=False)
        test.clock.advance(59.9)
        test.publish(orders, Order("ann", 3))
        test.run(raises=False)
        assert seen == [1, 1]
        test.clock.advance(5)
        test.run()
        assert seen == [1, 1, 3]
        assert [message.value(orders).amount for message in test.handled(orders)] == [3]
        assert [message.value(orders).amount for message in test.dead(orders)] == [1, 2]
        test.publish(orders, Order("bob", 4))
        test.clock.advance(60)
        test.run()
        assert (seen, len(test.dead(orders))) == ([1, 1, 3], 3 if rule == "dead" else 2)
        with pytest.raises(InvalidInput, match="live for 0"):
            test.set_time_to_live(orders, -1)


def test_a_message_has_an_end_of_its_own_which_counts_where_it_is_the_first() -> None:
    seen: list[tuple[int, dict[str, str]]] = []
    with TestApp(app_with(lambda order, ctx: seen.append((order.amount, dict(ctx.headers))))) as test:
        for amount, ttl_s in enumerate((10.0, 0.001, 100, 3600)):
            test.publish(orders, Order("ann", amount), headers={**expires_after(ttl_s), "a": "b"})
        test.clock.advance(60)
        test.set_time_to_live(orders, 60, expired="dead")
        test.run()
        assert (seen, len(test.dead(orders))) == ([], 4)
        test.set_time_to_live(orders, 0)
        for amount, ttl_s in enumerate((59.999, 60.001)):
            test.publish(orders, Order("ann", amount), headers={**expires_after(ttl_s), "a": "b"})
        test.clock.advance(60)
        test.run()
        assert seen == [(1, {"a": "b"})]
    for wrong in (0, -1, 1e10):
        with pytest.raises(InvalidInput, match="lives for"):
            expires_after(wrong)
    for text in ("0", "x", "-5", "9" * 14, "٣"):
        with pytest.raises(ReservedHeader, match="number of ms"):
            check_headers({"mq-ttl": text})


def test_the_engine_has_its_clock_back_and_other_threads_never_lost_it() -> None:
    real, elsewhere = engine_clock.clock, list[float]()
    with TestApp(app_with(lambda order: None)) as test:
        test.clock.advance(1_000_000)
        thread = threading.Thread(target=lambda: elsewhere.append(vars(workers)["clock"]()))
        thread.start()
        thread.join()
        assert vars(workers)["clock"]() == test.clock.seconds()
        assert elsewhere[0] < test.clock.seconds() - 900_000
    assert vars(workers)["clock"] is engine_clock.clock is real


def test_a_paused_key_and_a_limit_of_time_stay_in_sight() -> None:
    left: list[float] = []

    def book(order: Order, ctx: Context) -> None:
        left.append(ctx.remaining_s)
        test.clock.advance(10)
        left.append(ctx.remaining_s)
        if len(left) == 2:
            raise PauseKey(86_400 * 2)

    with TestApp(app_with(book, time_limit_s=30)) as test:
        test.publish(orders, Order("ann"))
        test.run_until_idle()
        assert left == [30, 20], "the pause is longer than what run_until_idle turns the clock by"
        test.run_until_idle(limit_s=86_400 * 2)
        assert left == [30, 20, 30, 20]


def test_producers_of_the_program_send_to_the_test() -> None:
    handled: list[Order] = []
    before = mqlayer.Producer.send
    with TestApp(app_with(handled.append)) as test, mqlayer.Producer() as producer:
        first = orders.send(producer, Order("ann"), dedup_id="1")
        again = orders.send_async(producer, Order("ann"), dedup_id="1").result(0)
        producer.send_oneway("orders", key="bob", body={"customer": "bob"})
        receipts = producer.send_many("orders", [mqlayer.Message("cat", Order("cat"))])
        assert (first.offset, again.duplicate, receipts[0].offset, producer.stats.stored) == (1, True, 3, 3)
        asyncio.run(send_async())
        test.run()
        with pytest.raises(InvalidInput, match="bodies of type Order"):
            orders.send(producer, "no order")  # type: ignore[arg-type]
        with pytest.raises(BodyTooLarge):
            producer.send("orders", body=b"x" * 300_000)
    assert [order.customer for order in handled] == ["ann", "bob", "cat", "dan", "eve"]
    assert mqlayer.Producer.send is before


async def send_async() -> None:
    async with mqlayer.AsyncProducer() as producer:
        await orders.asend(producer, Order("dan"))
        await producer.send_many("orders", [mqlayer.Message("eve", Order("eve"))])
        assert await producer.flush() == 0


def test_bodies_are_encoded_and_decoded() -> None:
    handled: list[Order] = []
    with TestApp(app_with(handled.append)) as test:
        order = Order("ann")
        test.publish(orders, order)
        test.run()
        with pytest.raises(InvalidInput):
            test.publish("orders", object())
    assert handled == [order]
    assert handled[0] is not order


def test_async_tests_await_the_run() -> None:
    seen: list[object] = []
    app = mqlayer.App()

    @app.consumer(orders, group="ledger", backoff_s=(60,))
    async def book(order: Order, ctx: Context) -> None:
        seen.append(asyncio.get_running_loop())
        if ctx.attempt == 1:
            raise RetryLater(60)

    async def run() -> object:
        with TestApp(app) as test:
            async with test.asession() as session, session.transaction():
                await orders.apublish(session, Order("ann"))
            with pytest.raises(InvalidInput):
                orders.publish(test.asession(), Order("bob"))  # type: ignore[arg-type]
            await test.arun_until_idle()
        return asyncio.get_running_loop()

    loop = asyncio.run(run())
    assert seen == [loop, loop]


def test_a_stale_owner_comes_back_under_the_next_epoch() -> None:
    epochs: list[int] = []

    def book(order: Order, ctx: Context) -> None:
        epochs.append(ctx.epoch)
        if order.amount and ctx.epoch == 1:
            raise StaleOwner("ledger", "orders", 1, 1, 2)

    with TestApp(app_with(book)) as test:
        test.publish(orders, Order("ann"))
        test.run()
        test.publish(orders, Order("bob", 1))
        test.run()
        assert epochs == [1, 1, 2]
        assert len(test.handled(orders)) == 2


def test_a_delayed_message_is_cancelled_or_comes_at_its_time() -> None:
    handled: list[Order] = []
    with TestApp(app_with(handled.append)) as test:
        with test.session() as session:
            number = orders.publish_delayed(session, Order("gone"), delay_s=60)
            orders.publish_delayed(session, Order("stays"), at=test.clock.now() + timedelta(hours=1))
        with test.session() as session:
            assert outbox.cancel_delayed(session, number)
            assert not outbox.cancel_delayed(session, number)
        test.assert_published(orders, key="stays")
        test.run_until_idle()
    assert [order.customer for order in handled] == ["stays"]


def test_a_failing_assertion_lists_the_nearest_misses() -> None:
    with TestApp() as test:
        test.publish(orders, Order("ann", 7), headers={"trace": "1"})
        test.publish(orders, Order("bob", 8), tags=("eu",))
        with pytest.raises(AssertionError) as missed:
            test.assert_published(orders, key="ann", body={"amount": 8}, headers={"trace": "1"})
        with pytest.raises(AssertionError, match=r"1 messages match, not 2: orders: key 'bob'"):
            test.assert_published(orders, key="bob", count=2)
        with pytest.raises(AssertionError, match="none should"):
            test.assert_not_published(orders, tags=["eu"])
        with pytest.raises(AssertionError, match="nothing was published to audit; to others: orders"):
            test.assert_published("audit")
        assert test.assert_published(orders, body=lambda order: order.amount > 7).key == "bob"
        assert test.assert_published("orders", body={"customer": "bob"}).value(orders) == Order("bob", 8)
    assert str(missed.value).splitlines() == [
        "no message matches: orders: key 'ann', headers {'trace': '1'}, body {'amount': 8}",
        "published to orders, the nearest first:",
        """  orders: key 'ann', {"customer":"ann","amount":7}, headers {'trace': '1'}""",
        "    body.amount is 7",
        """  orders: key 'bob', {"customer":"bob","amount":8}, tags eu""",
        "    key is 'bob'; header 'trace' is None",
    ]


def test_misuse_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_with(lambda order: None)
    with pytest.raises(InvalidInput, match="with TestApp"):
        TestApp(app).run()
    with TestApp(app) as test:
        with pytest.raises(Conflict, match="both applications"):
            TestApp(app).__enter__()
        with pytest.raises(Conflict, match="TestApp handles its messages, without members"):
            app.start()
        with pytest.raises(NotFound, match="orders/ledger"):
            test.handled("unknown")
        with pytest.raises(NotFound, match="ann"):
            test.release(orders, "ann")
        with pytest.raises(InvalidInput, match="runs no SQL"):
            test.session().execute("SELECT 1")
        with pytest.raises(InvalidInput, match="Versions"):
            Versions("orders").take_released(test.session())
        with pytest.raises(InvalidInput, match="goes forward"):
            test.clock.advance(-1)
    monkeypatch.setattr(in_memory, "MOST_TURNS", 10)
    with TestApp(app_with(lambda order: test.publish(orders, order))) as test:
        test.publish(orders, Order("ann"))
        with pytest.raises(MqlayerError, match="no end after 10 turns"):
            test.run()


def test_fenced_sessions_are_the_tests_own_and_run_no_sql() -> None:
    """No pool is opened; what is published on them commits with the handler, or not at all."""
    receipts = mqlayer.Topic("receipts", body=str, key=lambda receipt: receipt)

    def book(order: Order, ctx: Context, session: Any) -> None:
        receipts.publish(session, order.customer)
        if order.amount < 0:
            raise LookupError

    async def mail(receipt: str, ctx: Context, session: Any) -> None:
        await orders.apublish(session, Order("never"))
        session.add(receipt)

    book.__annotations__["session"] = Annotated[Any, mqlayer.fenced(ConnectionPool("", open=False))]
    mail.__annotations__["session"] = Annotated[Any, mqlayer.fenced(AsyncConnectionPool("", open=False))]
    app = app_with(book)
    app.consumer(receipts, group="mail")(mail)
    with TestApp(app) as test:
        test.publish(orders, Order("ann"))
        test.publish(orders, Order("bob", -1))
        test.run(raises=False)
        assert [order.key for order in test.published(orders)] == ["ann", "bob"]
        assert [receipt.key for receipt in test.published(receipts)] == ["ann"]
        assert [type(failure.error) for failure in test.failures] == [LookupError, AttributeError]
        assert "'add': a session of TestApp runs no SQL" in str(test.failures[1].error)


def test_a_handler_is_called_as_a_function() -> None:
    published: list[str] = []

    def book(order: Order, ctx: Context) -> None:
        ctx.fence(None)
        ctx.inbox(None, name=f"{ctx.identity}/mail")
        published.append(f"{ctx.topic} {ctx.group} {ctx.key} {ctx.attempt} {ctx.tags} {ctx.headers['trace']}")

    order = Order("ann", 7)
    book(order, context(order, topic=orders, group="ledger", attempt=3, tags=("eu",), headers={"trace": "1"}))
    assert published == ["orders ledger ann 3 ('eu',) 1"]
    assert context(order, topic=orders).body == b'{"customer":"ann","amount":7}'
    assert context(order, topic=orders).identity != context(order, topic=orders).identity
    with pytest.raises(AlreadyApplied):
        book(order, context(order, answer="applied"))
    with pytest.raises(StaleOwner):
        book(order, context(order, answer="stale"))
    twice = context(order)
    twice.fence(None)
    with pytest.raises(HandlerFault, match="twice"):
        asyncio.run(twice.afence(None))
    asyncio.run(twice.ainbox(None))
    with pytest.raises(InvalidInput, match="first attempt is 1"):
        context(order, attempt=0)


def test_a_batch_handler_is_called_as_a_function() -> None:
    def book(bodies: list[Order], ctx: mqlayer.Batch[Order]) -> None:
        applied = ctx.fence(None)
        assert [message.value for message in applied] == bodies
        ctx.fail(ctx[1:], "no stock") if bodies[0].amount < 0 else ctx.done(*applied)

    one = batch([Order("ann"), Order("bob")], topic=orders)
    book(one.values, one)
    assert [message.key for message in one] == ["ann", "bob"]
    with pytest.raises(BatchUndone):
        book([Order("ann", -1), Order("bob")], batch([Order("ann", -1), Order("bob")], topic=orders))
    of_key = batch(["1", "2"], topic="notes", key="ann", kind="key")
    assert ([message.key for message in of_key], of_key.values) == (["ann", "ann"], [b"1", b"2"])
    assert asyncio.run(of_key.afence(None)) == list(of_key)


def test_both_engines_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        public = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
        return {name: list(inspect.signature(getattr(kind, name)).parameters) for name in public}

    assert methods(TestApp) == methods(RealApp)


def test_a_published_message_makes_a_context_too() -> None:
    with TestApp() as test, test.session() as session:
        orders.publish(session, Order("ann"), tags=("eu",))
        found = assert_published(orders, on=session)
        assert test.published() == []
    ctx = context(found, topic=orders)
    assert (ctx.key, ctx.tags, orders.decode(ctx.body)) == ("ann", ("eu",), Order("ann"))


def test_the_page_lists_what_both_engines_do() -> None:
    root = Path(__file__).parents[2]
    tests = (root / "tests" / "integration" / "test_behaviours.py").read_text("utf-8")
    page = (root / "docs" / "how-to" / "test-handlers.md").read_text("utf-8")
    listed = page.partition("## The same on both\n")[2].partition("\n## ")[0]
    names = [name.replace("_", " ") for name in re.findall(r"^def test_(\w+)", tests, re.MULTILINE)]
    assert re.findall(r"^- (.*)$", listed, re.MULTILINE) == names
