"""Tags of messages that go through an outbox: every way in, and all the way to the handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sqlalchemy.orm import Session

from mqlayer import outbox
from mqlayer.domain.tags import tags_text
from mqlayer.errors import InvalidInput, ReservedHeader
from mqlayer.postgres.database import translate
from mqlayer.relay import relay_once
from tests.fixtures.consumers import Recorder, Stage
from tests.fixtures.kept_connections import kept_session
from tests.fixtures.roles import grant_application
from tests.fixtures.sqlalchemy_engines import engine_of
from tests.fixtures.variants import some_of

ROLE = "shop_of_tag_tests"
TAGS = ("vip", "eu")
HEADERS = {"kind": "placed", "é": 'mq-tags": "'}

Publish = Callable[[str], None]


def by_psycopg(dsn: str) -> None:
    with kept_session(dsn) as connection:
        outbox.publish(connection, "orders", key="k", body=b"1", headers=HEADERS, tags=TAGS)


def by_collecting(dsn: str) -> None:
    with kept_session(dsn) as connection, outbox.transaction(connection) as transaction:
        transaction.publish("orders", key="k", body=b"1", headers=HEADERS, tags=TAGS)


def by_asyncio(dsn: str) -> None:
    async def publish() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection, outbox.atransaction(connection) as tx:
            await tx.apublish("orders", key="k", body=b"1", headers=HEADERS, tags=TAGS)
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await outbox.apublish(connection, "orders", key="other", body=b"2", tags=["us"])

    asyncio.run(publish())


def by_sqlalchemy(dsn: str) -> None:
    engine = engine_of(dsn)
    with Session(engine) as session, session.begin():
        outbox.publish(session, "orders", key="k", body=b"1", headers=HEADERS, tags=TAGS)
    engine.dispose()


def by_sql(dsn: str) -> None:
    with kept_session(dsn) as connection:
        connection.execute(
            "SELECT mqlayer_app.publish_v1('orders', 'k', '1', %s::jsonb || mqlayer_app.tags_v1('vip', 'eu', 'vip'))",
            [psycopg.types.json.Jsonb(HEADERS)],
        )


def by_sql_in_bulk(dsn: str) -> None:
    with kept_session(dsn) as connection:
        connection.execute(
            "SELECT mqlayer_app.publish_many_v1(ARRAY['orders', 'orders', 'orders'], ARRAY['k', 'a', 'b'],"
            " ARRAY['1', '2', '3']::bytea[], ARRAY[%s::jsonb || mqlayer_app.tags_v1(VARIADIC %s), NULL,"
            " mqlayer_app.tags_v1('us')])",
            [psycopg.types.json.Jsonb(HEADERS), list(TAGS)],
        )


@pytest.mark.parametrize(
    "way", some_of([by_psycopg, by_collecting, by_asyncio, by_sqlalchemy, by_sql, by_sql_in_bulk], 2)
)
def test_tags_come_through_the_outbox(stage: Stage, way: Publish) -> None:
    """Case 62, from where a message begins; its headers come as they were given."""
    got: list[tuple[str | None, bytes, tuple[str, ...], dict[str, str]]] = []
    way(stage.dsn)
    assert relay_once(stage.settings()) >= 1
    stage.consume(
        Recorder(lambda body, ctx: got.append((ctx.key, body, ctx.tags, dict(ctx.headers)))), tag_filter="all:eu,vip"
    )
    stage.wait_settled()
    assert got == [("k", b"1", ("eu", "vip"), HEADERS)]


@pytest.mark.parametrize("tags", ["eu", ["Eu"], [""], [f"t{number}" for number in range(9)]])
def test_bad_tags_are_refused_where_they_are_said(connection: psycopg.Connection[Any], tags: Any) -> None:
    with pytest.raises(InvalidInput, match="tag"):
        outbox.publish(connection, "orders", key="a", body=b"1", tags=tags)
    with pytest.raises(InvalidInput, match="tag"), outbox.transaction(connection) as transaction:
        transaction.publish("orders", key="a", body=b"1", tags=tags)


@pytest.mark.parametrize(
    "arguments",
    ["'Eu'", "''", "NULL", "'a,b'", "'é'", "'" + "a" * 64 + "'", "'eu', NULL", ",".join(f"'t{n}'" for n in range(9))],
)
def test_sql_refuses_what_python_refuses(connection: psycopg.Connection[Any], arguments: str) -> None:
    with pytest.raises(psycopg.Error) as refused:
        connection.execute(f"SELECT mqlayer_app.tags_v1({arguments})".encode())
    assert isinstance(translate(refused.value, "here"), ReservedHeader)


def test_sql_makes_the_same_text_as_python(connection: psycopg.Connection[Any]) -> None:
    """Nodes and members go by what Python makes."""
    for tags in (
        ["eu"],
        ["vip", "eu", "a.b-c_d", "eu"],
        [f"t{number}" for number in range(8)],
        ["b_", "b-", "b.", "b0"],
    ):
        row = connection.execute("SELECT mqlayer_app.tags_v1(VARIADIC %s)", [tags]).fetchone()
        assert row == ({"mq-tags": tags_text(tags)},)
    assert connection.execute("SELECT mqlayer_app.tags_v1(VARIADIC '{}')").fetchone() == ({},)


@pytest.mark.parametrize("text", ["eu", "", ":", "00000000:eu", tags_text(["eu"]) + ",vip", tags_text(["eu"]) + " "])
def test_the_header_is_what_tags_v1_makes_or_refused(connection: psycopg.Connection[Any], text: str) -> None:
    """A message whose hashes are not those of its names would be passed over by groups that want it."""
    with pytest.raises(psycopg.Error) as refused:
        connection.execute(
            "SELECT mqlayer_app.publish_v1('orders', 'k', '1', jsonb_build_object('mq-tags', %s::text))", [text]
        )
    assert isinstance(translate(refused.value, "here"), ReservedHeader)
    connection.rollback()
    with pytest.raises(psycopg.Error, match="reserved"):
        connection.execute("SELECT mqlayer_app.publish_v1('orders', 'k', '1', '{\"mq-other\": \"1\"}')")


def test_tags_take_no_room_from_headers(connection: psycopg.Connection[Any]) -> None:
    """The limits are those of the headers alone, in Python and in SQL."""
    headers = {f"h{number:02}": "x" * 253 for number in range(32)}
    outbox.publish(
        connection, "orders", key="k", body=b"1", headers=headers, tags=[f"t{number}" for number in range(8)]
    )
    with pytest.raises(InvalidInput, match="headers"):
        outbox.publish(connection, "orders", key="k", body=b"1", headers={**headers, "one": "more"}, tags=["eu"])


def test_a_role_that_may_publish_may_make_tags(outbox_dsn: str) -> None:
    role = sql.Identifier(ROLE)
    with psycopg.connect(outbox_dsn, autocommit=True) as owner:
        if not owner.execute("SELECT FROM pg_roles WHERE rolname = %s", (ROLE,)).rowcount:
            owner.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
        grant_application(outbox_dsn, ROLE)
        with psycopg.connect(make_conninfo(outbox_dsn, user=ROLE)) as shop:
            shop.execute("SELECT mqlayer_app.publish_v1('orders', 'k', '1', mqlayer_app.tags_v1('eu'))")
            outbox.publish(shop, "orders", key="k", body=b"2", tags=["eu"])
        owner.execute(sql.SQL("DROP OWNED BY {}").format(role))
