"""Faults in a user's own tests: an effect behind the fence or the inbox survives them, a plain one is found out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import psycopg
import pytest

from mqlayer import App, Context
from mqlayer.errors import InvalidInput, NotFound
from mqlayer.stack import GivenAddresses
from mqlayer.testing.fault_exercise import EffectsDiffer, exercise
from mqlayer.testing.servers import TestServers
from mqlayer.testing.stack import TestStack
from tests.fixtures.servers import Postgres
from tests.fixtures.variants import some_of
from tests.fixtures.wait import wait_until

pytestmark = pytest.mark.xdist_group("test_stack")

Book = Callable[[int, Context], None]
ADD = (
    "INSERT INTO balance AS b VALUES (%s, %s) ON CONFLICT (customer) DO UPDATE SET amount = b.amount + excluded.amount"
)


@pytest.fixture(scope="session")
def mqlayer_schema() -> Callable[[str], None]:
    def make(dsn: str) -> None:
        with psycopg.connect(dsn) as connection:
            connection.execute("CREATE TABLE balance (customer text PRIMARY KEY, amount int NOT NULL)")

    return make


@pytest.fixture(scope="module")
def mqlayer_servers(postgres_server: Postgres, mqlayer_schema: Callable[[str], None]) -> Iterator[TestServers]:
    """Nodes of its own, on the Postgres that tests share."""
    with TestServers(mqlayer_schema, given=GivenAddresses(postgres_server.dsn("postgres"))) as servers:
        yield servers


@pytest.fixture
def connect(mqlayer_stack: TestStack) -> Callable[[], psycopg.Connection]:
    return lambda: psycopg.connect(mqlayer_stack.dsn)


@pytest.fixture
def plain(connect: Callable[[], psycopg.Connection]) -> Book:
    def book(amount: int, ctx: Context) -> None:
        with connect() as connection:
            connection.execute(ADD, (ctx.key, amount))

    return book


@pytest.fixture
def fenced(connect: Callable[[], psycopg.Connection]) -> Book:
    def book(amount: int, ctx: Context) -> None:
        with connect() as connection:
            ctx.fence(connection)
            connection.execute(ADD, (ctx.key, amount))

    return book


@pytest.fixture
def with_inbox(connect: Callable[[], psycopg.Connection]) -> Book:
    async def book(amount: int, ctx: Context) -> None:
        connection = await psycopg.AsyncConnection.connect(mqlayer_dsn())
        async with connection:
            await ctx.ainbox(connection)
            await connection.execute(ADD, (ctx.key, amount))

    def mqlayer_dsn() -> str:
        with connect() as connection:
            return connection.info.dsn

    return book  # type: ignore[return-value]


def balance_after(stack: TestStack, book: Book, fault: str) -> int:
    app = App()
    app.consumer("orders", group="ledger")(book)
    stack.start(app)
    strike = getattr(stack.faults, fault)(app, at=2)
    for _ in range(3):
        stack.publish("orders", 10, key="ann")
    stack.drain(app)
    assert strike.struck
    stack.stop(app)
    ((amount,),) = stack.execute("SELECT amount FROM balance")
    return int(amount)


@pytest.mark.parametrize("fault", some_of(["kill", "stop_past_lease", "deliver_again"], 3))
def test_a_fault_repeats_a_plain_effect_and_no_fenced_one(
    mqlayer_stack: TestStack, plain: Book, fenced: Book, fault: str
) -> None:
    assert balance_after(mqlayer_stack, plain, fault) > 30
    mqlayer_stack.execute("TRUNCATE balance")
    assert balance_after(mqlayer_stack, fenced, fault) == 30


def test_partitions_split_and_nodes_come_back_under_an_application(mqlayer_stack: TestStack, fenced: Book) -> None:
    app = App()
    app.consumer("orders", group="ledger")(fenced)
    with mqlayer_stack.run(app):
        made = mqlayer_stack.faults.split("orders")
        wait_until(lambda: set(made) & app.members[0].owned().keys(), what="a new partition has an owner")
        with mqlayer_stack.faults.node_lost("node-1"), mqlayer_stack.faults.node_lost("node-2"):
            mqlayer_stack.publish("orders", 10, key="ann")
        mqlayer_stack.drain(app)
    assert mqlayer_stack.execute("SELECT amount FROM balance") == [(10,)]


@pytest.mark.full
def test_two_applications_that_read_a_group_as_other_bodies_are_named(
    mqlayer_stack: TestStack, plain: Book, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = App(), App()
    one.consumer("orders", group="ledger")(plain)
    other.consumer("orders", group="ledger")(lambda body: None)
    with mqlayer_stack.run(one), mqlayer_stack.run(one.another()):
        assert "group_has_two_bodies" not in caplog.text
        with mqlayer_stack.run(other):
            assert "group_has_two_bodies topic=orders group=ledger" in caplog.text


def test_drain_raises_what_a_handler_raises_and_says_what_waits(mqlayer_stack: TestStack) -> None:
    app = App()

    @app.consumer("orders", group="ledger")
    def failing(amount: int) -> None:
        raise ValueError("no such amount")

    with mqlayer_stack.run(app):
        mqlayer_stack.publish("orders", 10, key="ann")
        with pytest.raises(ValueError, match="no such amount"):
            mqlayer_stack.drain(app)
        with pytest.raises(TimeoutError, match="group ledger of topic orders has 1 messages to handle"):
            mqlayer_stack.drain(app, timeout_s=0.1, raise_errors=False)


def test_a_failing_key_is_parked_and_released_and_an_effect_elsewhere_is_refused(
    mqlayer_stack: TestStack, postgres_server: Postgres
) -> None:
    app, places = App(), [postgres_server.dsn("postgres")]

    @app.consumer("orders", group="ledger", attempt_limit=1)
    def book(amount: int, ctx: Context) -> None:
        with psycopg.connect(places[0]) as connection:
            ctx.fence(connection)
            connection.execute(ADD, (ctx.key, amount))

    with mqlayer_stack.run(app):
        for amount in (10, 5):
            mqlayer_stack.publish("orders", amount, key="ann")
        with pytest.raises(InvalidInput, match=r"to database 'postgres' on port \d+, but the test's is"):
            mqlayer_stack.drain(app)
        mqlayer_stack.drain(app, raise_errors=False)
        assert (mqlayer_stack.parked("orders"), mqlayer_stack.dead("orders")) == (["ann"], [])
        with pytest.raises(NotFound, match="ann"):
            mqlayer_stack.release("orders", "bob")
        places[0] = app.settings.application_dsn()
        mqlayer_stack.release("orders", "ann")
        mqlayer_stack.drain(app)
    assert mqlayer_stack.execute("SELECT amount FROM balance") == [(15,)]


def test_a_fault_says_where_it_cannot_strike(mqlayer_stack: TestStack, plain: Book) -> None:
    app = App()
    app.consumer("orders", group="ledger", mode="shared")(plain)
    with pytest.raises(InvalidInput, match=r"is shared.*use deliver_again"):
        mqlayer_stack.faults.kill(app)
    with pytest.raises(InvalidInput, match="the first run of a handler is 1"):
        mqlayer_stack.faults.deliver_again(app, at=0)
    with pytest.raises(InvalidInput, match=r"no node is called 'node-3': there are node-1, node-2"):
        mqlayer_stack.faults.stop_node("node-3")


MESSAGES = [("ann", 10), ("bob", 5)]


@pytest.mark.full
@pytest.mark.slow
def test_exercise_finds_a_handler_without_fence_and_the_shortest_list(mqlayer_stack: TestStack, plain: Book) -> None:
    with pytest.raises(EffectsDiffer) as found:
        exercise(plain, MESSAGES, stack=mqlayer_stack, effects="SELECT * FROM balance", reset="TRUNCATE balance",
                 faults=["kill"], examples=1)  # fmt: skip
    (message,) = found.value.messages
    assert (found.value.fault, found.value.at) == ("kill", 1)
    assert "under the fault kill, at the handler's run 1 of" in str(found.value)
    assert found.value.found == [(message[0], 2 * message[1])]


@pytest.mark.full
def test_exercise_passes_an_async_handler_with_an_inbox(mqlayer_stack: TestStack, with_inbox: Book) -> None:
    report = exercise(with_inbox, MESSAGES, stack=mqlayer_stack, effects="SELECT * FROM balance",
                      reset="TRUNCATE balance", faults=["deliver_again", "stop_past_lease"], examples=1)  # fmt: skip
    assert min(report.runs.values()) >= 1


def test_exercise_says_what_to_install(mqlayer_stack: TestStack, plain: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match=r"pip install 'mqlayer\[testing\]'"):
        exercise(plain, MESSAGES, stack=mqlayer_stack, effects="SELECT 1", reset="SELECT 1")
