"""CloudEvents attributes as headers: on each way of publishing, as handlers read them."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import psycopg
import pytest

import mqlayer
from mqlayer.errors import InvalidInput
from mqlayer.relay import relay_once
from tests.fixtures.wait import wait_until
from tests.proof.world import QUICK, World


class Placed(msgspec.Struct):
    customer: str


SAID = mqlayer.CloudEvents(
    source="/shop", type="shop.order.placed", dataschema="/schemas/placed", extensions={"tenant": "eu"}
)
orders = mqlayer.Topic("orders", body=Placed, key=lambda order: order.customer, cloudevents=SAID)


class Message:
    def __init__(self, **headers: str) -> None:
        self.headers = headers


def headers_of(topic: mqlayer.Topic[Any], body: Any, **said: Any) -> dict[str, str]:
    facts = {"key": None, "headers": None, "tags": ()} | said
    return dict(topic._facts(body, **facts)["headers"])


def test_messages_of_every_way_of_publishing_are_events(world: World) -> None:
    seen: list[mqlayer.CloudEvent | None] = []
    raw: list[dict[str, str]] = []
    app = mqlayer.App(world.settings(lease_s=10.0))

    @app.consumer(orders, group="g")
    def handle(order: Placed, ctx: mqlayer.Context) -> None:
        seen.append(mqlayer.cloud_event(ctx))
        raw.append(dict(ctx.headers))

    async def asynchronously() -> None:
        async with await psycopg.AsyncConnection.connect(world.dsn) as connection:
            await orders.apublish(connection, Placed("ann"))
        async with mqlayer.AsyncProducer(world.settings(), name="async") as producer:
            await orders.asend(producer, Placed("ann"), headers={"ce_id": "mine", "trace": "7"})

    with psycopg.connect(world.dsn) as connection:
        orders.publish(connection, Placed("ann"))
        orders.publish_once(connection, Placed("ann"), dedup_id="once")
    with mqlayer.Producer(world.settings(), name="shop") as producer:
        orders.send(producer, Placed("ann"))
        orders.send_async(producer, Placed("ann")).result(10)
    asyncio.run(asynchronously())
    relay_once(world.settings(), limits=QUICK)
    app.start()
    try:
        wait_until(lambda: len(seen) == 6, what="all are handled")
    finally:
        app.stop()
    events = [event for event in seen if event is not None]
    assert len({event.id for event in events}) == 6
    assert "mine" in {event.id for event in events}
    for event in events:
        assert (event.source, event.type, event.specversion) == ("/shop", "shop.order.placed", "1.0")
        assert (event.subject, event.datacontenttype, event.dataschema) == (
            "ann",
            "application/json",
            "/schemas/placed",
        )
        assert event.extensions == {"tenant": "eu"}
        assert event.time is not None
        assert abs(datetime.now(UTC) - event.time) < timedelta(minutes=1)
        assert event.id == "mine" or str(uuid.UUID(event.id)) == event.id
    assert any(headers.get("trace") == "7" for headers in raw)
    assert all(headers["ce_specversion"] == "1.0" for headers in raw)


def test_the_type_may_be_the_bodys_and_the_content_type_the_codecs() -> None:
    class Packed:
        content_type = "application/msgpack"
        encode = staticmethod(msgspec.msgpack.encode)

        def decode(self, data: bytes) -> Placed:
            return msgspec.msgpack.decode(data, type=Placed)

    said = mqlayer.CloudEvents(source="/shop", type=lambda order: f"shop.{type(order).__name__.lower()}")
    packed = mqlayer.Topic("orders", body=Placed, codec=Packed(), cloudevents=said)
    found = headers_of(packed, Placed("ann"))
    assert (found["ce_type"], found["content-type"]) == ("shop.placed", "application/msgpack")
    assert "ce_subject" not in found
    assert headers_of(mqlayer.Topic("orders", body=str, cloudevents=SAID), "x")["content-type"].startswith("text/plain")
    assert headers_of(mqlayer.Topic("orders", body=Placed), Placed("ann"), headers={"a": "b"}) == {"a": "b"}


def test_a_message_without_the_attributes_is_no_event() -> None:
    assert mqlayer.cloud_event(Message()) is None
    assert mqlayer.cloud_event(Message(ce_id="1", ce_source="/s", ce_specversion="1.0")) is None
    odd = mqlayer.cloud_event(Message(ce_id="1", ce_source="/s", ce_specversion="1.0", ce_type="t", ce_time="soon"))
    assert odd == mqlayer.CloudEvent("1", "/s", "t", "1.0")


@pytest.mark.parametrize(
    "said",
    [
        {"source": ""},
        {"type": ""},
        {"extensions": {"Big": "x"}},
        {"extensions": {"id": "x"}},
        {"extensions": {"": "x"}},
    ],
)
def test_attributes_that_no_event_may_have_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"CloudEvent|extension"):
        mqlayer.CloudEvents(**{"source": "/shop", "type": "t", **said})
