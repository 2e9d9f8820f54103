"""Pages of topics: rates, settings, heat, the route over time; pauses and limits by an operator alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from mqlayer.console.charts import level, nice
from mqlayer.postgres.audit import Actor
from mqlayer.relay import relay_once
from mqlayer.stack import RedisServer
from tests.fixtures.console import console_client
from tests.fixtures.console_pages import OPERATOR, VIEWER, act, audited, sample, text_of
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import merge, split
from tests.proof.world import QUICK, World


@pytest.fixture
def browser(world: World) -> Iterator[TestClient]:
    with console_client(world, OPERATOR) as client:
        yield client


@pytest.mark.world(partitions=0)
def test_without_topics_the_list_says_how_to_create_one(browser: TestClient) -> None:
    assert "mqlayer topic create orders" in text_of(browser, "/topics")
    assert "No topic's name contains x" in text_of(browser, "/topics", contains="x").replace("&#39;", "'")
    assert browser.get("/topics/none").status_code == 404


@pytest.mark.world(partitions=2, relayed=20)
def test_topics_show_rates_of_samples_and_pages_hold_fifty(world: World, browser: TestClient) -> None:
    sample(world, "topic", 1, "stored", [100, 160, 220])
    sample(world, "topic", 1, "committed", [100, 160, 225])
    sample(world, "topic", 1, "relayed", [100, 160, 220])
    page = text_of(browser, "/topics")
    row = re.search(r"<tr> <td[^>]*><a href=\"/topics/orders\">.*?</tr>", page)
    assert row is not None
    assert re.findall(r'class="number">([^<]*)</td>', row[0])[:3] == ["60", "no group", "5"]
    world.rows(
        "INSERT INTO mqlayer.topic (name, strategy, body_limit, backlog_limit) "
        "SELECT 'a' || to_char(n, 'fm000'), 'strict', 1000, 0 FROM generate_series(1, 60) AS n"
    )
    page = text_of(browser, "/topics")
    assert page.count('href="/topics/a') == 2 * 50
    row = re.search(r'<a href="/topics/a001">.*?</tr>', page)
    assert row is not None
    assert re.findall(r'class="number">([^<]*)</td>', row[0])[:3] == ["unknown", "no group", "unknown"], (
        "without samples"
    )
    (more,) = re.findall(r'rel="next" href="([^"]*)"', page)
    assert "/topics/orders" in text_of(browser, more)
    assert text_of(browser, "/topics", contains="rder").count("<tr>") == 2


@pytest.mark.world(partitions=2, relayed=20)
def test_a_topic_shows_settings_curves_and_the_heat_of_its_partitions(world: World, browser: TestClient) -> None:
    sample(world, "topic", 1, "stored", [100, 160, 280])
    first = text_of(browser, "/topics/orders")
    assert "strict: order per key" in first
    assert "No group consumes this topic" in first
    assert "stored: 120 at the end" in text_of(browser, "/topics/orders", last="hour")
    assert "Rates need two looks" in first
    world.publish(50, keys=1)
    relay_once(world.settings(), limits=QUICK)

    def hot() -> bool:
        page = text_of(browser, "/topics/orders")
        return (
            "by this process" in page and "heat4" not in page and re.search(r'class="key heat[23]"', page) is not None
        )

    wait_until(hot, what="the rate of the partition with the key")


@pytest.mark.world(partitions=1, own_node=True)
def test_a_dead_node_is_a_line_and_no_error(world: World, browser: TestClient, node: RedisServer) -> None:
    node.kill()
    assert "Node node-1 does not answer" in text_of(browser, "/topics/orders")
    assert "Node node-1 does not answer" in text_of(browser, "/topics/orders/route")
    assert "/topics/orders" in text_of(browser, "/topics")


@pytest.mark.world(partitions=2)
def test_the_route_is_a_picture_and_a_table_of_who_when_and_why(world: World, browser: TestClient) -> None:
    page = text_of(browser, "/topics/orders/route")
    assert "Nothing changed this route" in page
    split(world.runtime(actor=Actor("bea@console", "a <b>hot</b> key")), "orders", 1)
    merge(world.runtime(actor="cleo"), "orders", [3, 4])
    page = text_of(browser, "/topics/orders/route")
    assert re.findall(r"<title>partition (\d+) on node-1: LPs (\d+) to (\d+)", page) == [
        ("1", "0", "511"), ("3", "0", "255"), ("5", "0", "511"), ("4", "256", "511"), ("2", "512", "1023")
    ]  # fmt: skip
    assert page.count('<rect class="past"') == 3
    assert page.count('<rect class="heat') == 2
    rows = re.findall(r"/changes/\d\">(\d)</a></td><td[^>]*>(split|merge)</td><td[^>]*>([^<]*)</td>", page)
    assert rows == [("3", "merge", "3, 4 → 5"), ("2", "split", "1 → 3, 4")]
    assert "a &lt;b&gt;hot&lt;/b&gt; key" in page
    assert "bea@console" in page
    assert "no reason given" in page
    assert re.search(r">v3 merge \d\d-\d\d \d\d:\d\d<", page)
    world.rows(
        "INSERT INTO mqlayer.route_change (topic_id, version, kind, actor) VALUES (1, 4, 'move', 'dan') RETURNING 1"
    )
    assert ">v4 move planned<" in text_of(browser, "/topics/orders/route")
    older = text_of(browser, "/topics/orders/route", upto="2")
    assert "partition 5" not in older
    assert 'class="heat' not in older.split('class="legend"')[0]


@pytest.mark.world(partitions=1)
def test_an_operator_pauses_and_limits_a_topic_and_a_viewer_does_not(world: World, browser: TestClient) -> None:
    told = act(browser, "topic-pause", topic="orders")
    assert "Publishing goes on" in told
    assert "Topic orders is paused." in told
    assert "Paused by ann@console" in text_of(browser, "/topics/orders")
    assert "paused already" in act(browser, "topic-pause", topic="orders")
    assert "is resumed" in act(browser, "topic-resume", topic="orders")
    assert audited(world, "topic pause") == [("ann@console", "orders", "drill")]
    told = act(browser, "topic-limits", topic="orders", body_limit=2000, backlog_limit=7)
    assert "may keep 7 records, now any number of records" in told
    assert world.rows("SELECT body_limit, backlog_limit FROM mqlayer.topic") == [(2000, 7)]
    assert audited(world, "topic set") == [("ann@console", "orders", "drill")]
    assert browser.get("/actions/topic-limits", params={"topic": "orders", "body_limit": "x"}).status_code == 400
    with console_client(world, VIEWER) as viewer:
        assert "/actions/" not in viewer.get("/topics/orders").text
        for name in ("topic-pause", "topic-resume", "topic-limits"):
            fields = {"topic": "orders", "token": "token", "reason": "x", "body_limit": "9", "backlog_limit": "9"}
            assert viewer.post(f"/actions/{name}", data=fields).status_code == 403
    assert world.rows("SELECT paused_at, body_limit FROM mqlayer.topic") == [(None, 2000)]


def test_a_scale_ends_at_a_round_number_and_heat_is_relative_to_the_mean() -> None:
    assert [nice(value) for value in (0, 0.03, 1, 1.1, 7, 5_001)] == [1, 0.05, 1, 2, 10, 10_000]
    assert [level(rate, 10) for rate in (None, 0, 1, 10, 20, 40)] == [0, 0, 1, 2, 3, 4]
