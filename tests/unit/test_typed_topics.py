"""Typed topics: what they encode, decode and refuse, and what type checkers find.

`mypy` reports an ignore that ignores nothing, so each ignored line below is a mistake that it finds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import psycopg
import pydantic
import pytest

import mqlayer
from mqlayer import outbox
from mqlayer.consuming.api.registration import ConsumerOptions
from mqlayer.errors import BodyMismatch, InvalidInput
from mqlayer.producing.message import lp_and_key
from mqlayer.testing import TestApp

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session


class Placed(msgspec.Struct):
    customer: str
    amount: int


class Model(pydantic.BaseModel):
    customer: str
    amount: int


@dataclasses.dataclass
class Data:
    customer: str
    amount: int


class Dict(TypedDict):
    customer: str
    amount: int


class Reversing:
    """A codec of the user's."""

    def encode(self, body: Placed) -> bytes:
        return f"{body.amount}:{body.customer}".encode()[::-1]

    def decode(self, data: bytes) -> Placed:
        amount, _, customer = data[::-1].decode().partition(":")
        return Placed(customer, int(amount))


placed = mqlayer.Topic("orders", body=Placed, key=lambda order: order.customer)

BODIES: list[tuple[Any, Any]] = [
    (Placed, Placed("ann", 10)),
    (Model, Model(customer="ann", amount=10)),
    (Data, Data("ann", 10)),
    (Dict, Dict(customer="ann", amount=10)),
    (bytes, b"\x00\xff"),
    (str, "gr\u00fc\u00df"),
    (list[Placed], [Placed("ann", 10)]),
    (int, 7),
]


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=lambda value: getattr(value, "__name__", "body"))
def test_each_kind_of_body_comes_back_as_it_was(kind: Any, body: Any) -> None:
    topic = mqlayer.Topic("orders", body=kind)
    assert topic.decode(topic.encode(body)) == body
    assert topic.key_of(body) is None


def test_a_codec_of_the_users_stands_for_json() -> None:
    topic = mqlayer.Topic("orders", body=Placed, codec=Reversing())
    assert topic.encode(Placed("ann", 10)) == b"nna:01"
    assert topic.decode(b"nna:01") == Placed("ann", 10)
    with pytest.raises(BodyMismatch, match="body does not fit Placed: Reversing raised ValueError"):
        topic.decode(b"odd")


def test_a_codec_that_fails_or_returns_no_bytes_publishes_nothing() -> None:
    class Odd(Reversing):
        def encode(self, body: Placed) -> bytes:
            return "text"  # type: ignore[return-value]

    class Broken(Reversing):
        def encode(self, body: Placed) -> bytes:
            raise KeyError("secret")

    with pytest.raises(InvalidInput, match="Odd encodes to str: let it return bytes"):
        mqlayer.Topic("orders", body=Placed, codec=Odd()).encode(Placed("ann", 10))
    with pytest.raises(InvalidInput, match="Broken can't encode a body of topic 'orders'") as raised:
        mqlayer.Topic("orders", body=Placed, codec=Broken()).encode(Placed("ann", 10))
    assert "secret" not in str(raised.value)


def test_a_body_of_another_type_is_refused_before_it_is_published() -> None:
    with pytest.raises(InvalidInput, match="topic 'orders' has bodies of type Placed, not Data"):
        placed.encode(Data("ann", 10))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="has bodies of type Dict, not Placed"):
        mqlayer.Topic("orders", body=Dict).encode(Placed("ann", 10))  # type: ignore[arg-type]


def test_the_key_is_the_bodys() -> None:
    assert placed.key_of(Placed("ann", 10)) == "ann"
    assert repr(placed) == "Topic('orders', body=Placed)"


def test_a_name_or_a_type_that_can_t_be_used_is_refused_at_once() -> None:
    with pytest.raises(InvalidInput, match="Orders"):
        mqlayer.Topic("Orders", body=Placed)
    several: Any = Placed | Data
    with pytest.raises(InvalidInput, match="can't be read from JSON"):
        mqlayer.Topic("orders", body=several)


def test_a_handler_takes_what_the_topic_has() -> None:
    app = mqlayer.App(mqlayer.Settings())
    with pytest.raises(InvalidInput, match="handler 'wrong' takes Data, but the bodies of topic 'orders' are Placed"):

        @app.consumer(placed, group="one")  # type: ignore[arg-type]
        def wrong(order: Data) -> None: ...

    with pytest.raises(InvalidInput, match="topic 'orders' says what its bodies are: leave `body` out"):
        app.consumer(placed, group="two", body=bytes)  # type: ignore[call-overload]

    @app.consumer(placed, group="three")
    def unsaid(order, ctx):  # type: ignore[no-untyped-def]
        ...

    @app.consumer(placed, group="four", batch=mqlayer.BatchOf("distinct"), ordered=False)
    def several(orders: list[Placed]) -> None: ...

    assert [consumer.topic for consumer in app.consumers] == ["orders", "orders"]
    assert all(consumer.body_type is Placed for consumer in app.consumers)


def test_the_options_of_typed_and_untyped_topics_are_the_same() -> None:
    implemented = inspect.signature(mqlayer.App.consumer).parameters
    named = {name for name in implemented if name not in ("self", "topic", "group", "body", "rules")}
    rules = set(mqlayer.App.consumer.__annotations__) - set(implemented)
    assert not rules - {"return"}
    assert named <= set(ConsumerOptions.__annotations__)


if TYPE_CHECKING:
    # Nothing of this runs.
    def right_uses(session: Session, connection: psycopg.Connection[Any], producer: mqlayer.Producer) -> None:
        placed.publish(session, Placed("ann", 10))
        placed.publish(connection, Placed("ann", 10), key="bob", tags=("vip",))
        placed.publish("default", Placed("ann", 10))
        placed.send(producer, Placed("ann", 10)).partition.bit_length()

    def wrong_uses(session: AsyncSession, connection: psycopg.Connection[Any], producer: mqlayer.Producer) -> None:
        placed.publish(connection, "ann")  # type: ignore[arg-type]
        placed.publish(session, Placed("ann", 10))  # type: ignore[arg-type]
        placed.publish(7, Placed("ann", 10))  # type: ignore[arg-type]
        placed.send(producer, Data("ann", 10))  # type: ignore[arg-type]
        asyncio.run(placed.apublish(connection, Placed("ann", 10)))  # type: ignore[arg-type]
        asyncio.run(placed.asend(producer, Placed("ann", 10)))  # type: ignore[arg-type]
        mqlayer.Topic("orders", body=Placed, key=lambda order: order.amount)  # type: ignore[arg-type, return-value]
        mqlayer.Topic("orders", body=Data, codec=Reversing())  # type: ignore[misc]

    def handlers(app: mqlayer.App) -> None:
        @app.consumer(placed, group="a")
        def one(order: Placed, ctx: mqlayer.Context) -> None: ...

        @app.consumer(placed, group="b")
        async def two(order: Placed) -> None: ...

        @app.consumer(placed, group="c", batch=mqlayer.BatchOf("key"))
        def three(orders: list[Placed], batch: mqlayer.Batch[Placed]) -> None: ...

        @app.consumer(placed, group="d", batch=mqlayer.BatchOf("key"))
        def four(batch: mqlayer.Batch[Placed]) -> None: ...

        @app.consumer(placed, group="e")  # type: ignore[arg-type]
        def five(order: Data, ctx: mqlayer.Context) -> None: ...

        @app.consumer(placed, group="f")  # type: ignore[arg-type]
        def six(order: Placed, ctx: str) -> None: ...

        app.consumer(placed, group="h", odd=1)  # type: ignore[call-overload]


def test_a_key_is_a_text_on_all_ways_of_publishing() -> None:
    """Customers' ids are often numbers, which another program might write otherwise."""
    by_number = mqlayer.Topic("orders", body=Placed, key=lambda order: order.amount)  # type: ignore[arg-type,return-value]
    refused = pytest.raises(InvalidInput, match=r"a message key is a str, not int: give str\(customer_id\)")
    with TestApp() as test, mqlayer.Producer(name="shop") as producer:
        with refused:
            by_number.publish(test.session(), Placed("ann", 5))
        with refused:
            outbox.publish(test.session(), "orders", key=5)  # type: ignore[arg-type]
        with refused:
            outbox.publish_delayed(test.session(), "orders", key=5, delay_s=1)  # type: ignore[arg-type]
        with refused:
            producer.send("orders", key=5, body=b"")  # type: ignore[arg-type]
    with refused:
        lp_and_key(5)
