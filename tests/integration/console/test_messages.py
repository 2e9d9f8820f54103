"""The console's pages of messages: bounded pages and searches, masks, an export, the life of one."""

from __future__ import annotations

import html
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from starlette.testclient import TestClient

from mqlayer import outbox
from mqlayer.console import User
from mqlayer.inspect import partition_pages
from mqlayer.postgres.rights import Right
from mqlayer.relay import relay_once
from mqlayer.topics.schemas import store_schema
from tests.fixtures.console import OPERATOR, VIEWER, console_client
from tests.fixtures.kept_connections import kept_session
from tests.proof.world import QUICK, World

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SECRET = "4711-secret"
BODY = json.dumps({"note": "<img src=x onerror=alert(1)>", "card": SECRET})
SCHEMA = {"type": "object", "properties": {"note": {"type": "string"}, "card": {"type": "integer"}},
          "required": ["note", "total"]}  # fmt: skip


@pytest.fixture
def told(world: World) -> World:
    """Sixty messages of three keys, one with headers and a dedup id."""
    with kept_session(world.dsn, autocommit=True) as connection:
        for number in range(60):
            outbox.publish(connection, "orders", key=f"key-{number % 3}", body=b"%d" % number)
        headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "customer": SECRET}
        outbox.publish_once(connection, "orders", dedup_id="d-1", key="<i>k</i>", body=BODY.encode(), headers=headers)
    assert relay_once(world.settings(), limits=QUICK) == 61
    store_schema(world.database, "orders", SCHEMA, actor="test")
    return world


@pytest.fixture
def ann(told: World) -> Iterator[TestClient]:
    with console_client(told, OPERATOR) as browser:
        yield browser


def shown(browser: TestClient, path: str = "/messages", **query: Any) -> str:
    page = browser.get(path, params={"topic": "orders"} | query)
    assert page.status_code == 200, page.text
    return page.text


def exported(browser: TestClient, **query: Any) -> list[dict[str, Any]]:
    answer = browser.get("/messages/export", params={"topic": "orders"} | query)
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert answer.headers["content-disposition"] == 'attachment; filename="messages.jsonl"'
    return [json.loads(line) for line in answer.text.splitlines()]


def test_pages_of_a_partition_have_each_message_once_and_searches_find_theirs(told: World, ann: TestClient) -> None:
    found: list[str] = []
    for _, partition, _ in told.partitions("orders"):
        following: int | None = 1
        while following is not None:
            part = partition_pages.partition_page(told.runtime(), "orders", partition, offset=following, limit=7)
            rows = exported(ann, partition=partition, offset=following)
            assert [one["message"] for one in rows][:7] == [one.message for one in part.messages]
            found += [one.message for one in part.messages]
            following = part.later
    assert len(found) == len(set(found)) == 61
    # The newest of all, by key, time, header, trace, dedup id, and id.
    assert len(exported(ann)) == 50
    assert {one["key"] for one in exported(ann, key="key-1")} == {"key-1"}
    since = (datetime.now(UTC) - timedelta(minutes=10)).isoformat()
    assert len(exported(ann, since=since)) == 50
    assert exported(ann, since=(datetime.now(UTC) + timedelta(hours=1)).isoformat()) == []
    (partition,) = {one["partition"] for one in exported(ann, key="key-1")}
    assert exported(ann, partition=partition, since=since)[0]["offset"] == 1
    for query in ({"header": "customer", "value": SECRET}, {"trace_id": TRACE}, {"dedup_id": "d-1", "key": "<i>k</i>"}):
        (one,) = exported(ann, **query)
        assert (one["body"], one["headers"]["customer"]) == (BODY, SECRET)
        (same,) = exported(ann, message=one["message"])
        assert same == one
    page = shown(ann, trace_id=TRACE)
    assert html.escape(BODY[:40]) in page.replace("&#34;", "&quot;")
    assert "<img" not in page
    assert "<i>k</i>" not in page
    assert "looked at" in page
    # Going on where a page ends.
    page = shown(ann, partition=partition, offset=1)
    assert ('rel="next"' in page) == (len([one for one in told.records("orders") if one.partition == partition]) > 50)


def test_few_long_searches_run_at_once_and_other_pages_go_on(
    told: World, ann: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = threading.BoundedSemaphore(1)
    monkeypatch.setattr("mqlayer.console.views.messages._searches", room)
    monkeypatch.setattr("mqlayer.console.views.messages.QUICK_S", 0.05)
    search = {"topic": "orders", "key": "a"}
    with room:
        assert "searches run for others" in ann.get("/messages", params=search).text
        assert "searches run for others" not in ann.get("/messages", params={"topic": "orders"}).text
    for _ in range(2):
        assert "looked at" in ann.get("/messages", params=search).text, "a search gives its place back"


def test_wrong_questions_and_empty_topics_are_answered_in_words(told: World, ann: TestClient) -> None:
    told.add_topic("empty", partitions=1)
    assert "No message is here" in shown(ann, topic="empty")
    assert "Name a topic" in ann.get("/messages").text
    for query, said in (
        ({"topic": "none"}, "unknown topic"),
        ({"offset": "5"}, "name the partition"),
        ({"partition": "999"}, "unknown partition"),
        ({"partition": "x"}, "is no number"),
        ({"since": "yesterday"}, "is no time"),
        ({"until": "2026-11-26T00:00"}, "needs its beginning"),
        ({"value": "1"}, "name the header"),
        ({"key": "a", "partition": "1"}, "leave partition and offset out"),
        ({"trace_id": "zz"}, "is no trace id"),
        ({"message": "nothing"}, "names no message"),
    ):
        assert said in html.unescape(shown(ann, **query)), query
    assert ann.get("/messages/export").status_code == 400
    assert ann.get("/messages/orders/9:9:9").status_code == 404


def test_who_may_not_see_bodies_sees_searches_and_exports_none(told: World) -> None:
    with console_client(told, OPERATOR) as ann:
        (one,) = exported(ann, dedup_id="d-1", key="<i>k</i>")
    path = f"/messages/orders/{one['message']}"
    # By the user, and by the Postgres role.
    for user, right in ((VIEWER, None), (User("bea", OPERATOR.level, bodies=False), None), (OPERATOR, Right.VIEW)):
        told.right = right
        with console_client(told, user) as browser:
            for text in (shown(browser), shown(browser, key="<i>k</i>"), browser.get(path).text):
                assert SECRET not in text
                assert TRACE not in text
                assert "hidden" in text.lower()
            for row in exported(browser, key="<i>k</i>"):
                assert (row["headers"], row["body"], row["body_is"]) == (None, None, "hidden")
                assert row["bytes"] == len(BODY)
            for value in (SECRET, "a guess"):
                refused = shown(browser, header="customer", value=value)
                assert "headers can" in refused
                assert one["message"] not in refused
                answer = browser.get(
                    "/messages/export", params={"topic": "orders", "header": "customer", "value": value}
                )
                assert answer.status_code == 400
                assert one["message"] not in answer.text
            assert "headers can" in shown(browser, trace_id=TRACE)
    told.right = None


def test_a_message_has_its_life_its_state_and_its_fields_by_the_schema(told: World, ann: TestClient) -> None:
    (one,) = exported(ann, dedup_id="d-1", key="<i>k</i>")
    page = ann.get(f"/messages/orders/{one['message']}").text
    for text in ("committed", "stored", "Its life", "customer", "missing, and the schema requires it",
                 "the schema says integer", "2 fields don"):  # fmt: skip
        assert text in page, text
    assert "<img" not in page
    assert "<i>k</i>" not in page
    # By its place, whose name has a slash.
    assert one["message"] in ann.get(f"/messages/orders/{one['partition']}/{one['offset']}").text


@pytest.mark.full
@pytest.mark.world(own_node=True)
def test_a_dead_node_is_a_line_of_the_page(told: World, node: Any) -> None:
    partition = told.partitions("orders")[0][1]
    node.kill()
    with console_client(told, OPERATOR) as browser:
        for query in ({}, {"key": "key-1"}, {"partition": partition}, {"trace_id": TRACE}):
            assert "not available" in shown(browser, **query), query
