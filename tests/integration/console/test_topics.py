"""Pages of topics: rates, settings, heat, the route over time; pauses and limits by an operator alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from mqlayer.autopilot import set_policy
from mqlayer.console.charts import heats, nice
from mqlayer.doctor.hot_partitions import hot_partitions, is_hot
from mqlayer.inspect import busiest_keys
from mqlayer.postgres.audit import Actor
from mqlayer.relay import relay_once
from mqlayer.stack import RedisServer
from mqlayer.topics import set_stream_retention
from tests.fixtures.auto_scenes import one_pass, put_load
from tests.fixtures.console import console_client
from tests.fixtures.console_pages import OPERATOR, VIEWER, act, audited, sample, text_of, words
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
    sample(world, topic={"stored": [100, 160, 220], "committed": [100, 160, 225], "relayed": [100, 160, 220]})
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


@pytest.mark.world(partitions=2)
def test_a_topic_shows_its_automatic_routes_and_their_last_decisions(world: World, browser: TestClient) -> None:
    assert "mqlayer route auto orders --report" in text_of(browser, "/topics/orders")
    set_policy(world.runtime(), "orders", mode="on", capacity_per_s=100.0)
    assert "No decision yet" in text_of(browser, "/topics/orders")
    put_load(world, {1: 1, 2: 1})
    assert one_pass(world).changed == ("orders",)
    page = words(text_of(browser, "/topics/orders"))
    assert "1 to 64 partitions of 100 messages/s, as set; 19 changes left this hour." in page
    assert "merge changed 1, 2 at most 2 messages/s together, 2% of a partition done" in page


@pytest.mark.world(partitions=2, relayed=20)
def test_a_topic_shows_settings_curves_and_the_heat_of_its_partitions(world: World, browser: TestClient) -> None:
    sample(world, topic={"stored": [100, 160, 280]})
    first = text_of(browser, "/topics/orders")
    assert "strict: order per key" in first
    assert "No group consumes this topic" in first
    assert "Messages live for ever" in words(first)
    set_stream_retention(world.runtime(), "orders", message_ttl_s=5400, expired="dead")
    assert "Messages live for 5400 s, then they die" in words(text_of(browser, "/topics/orders"))
    assert "stored: 120 at the end" in text_of(browser, "/topics/orders", last="hour")
    assert "Rates need two looks" in first
    world.publish(300, keys=1)
    relay_once(world.settings(), limits=QUICK)

    def hot() -> bool:
        page = text_of(browser, "/topics/orders")
        return "by this process" in page and re.search(r'class="key heat3">hot</span> takes 100 %', page) is not None

    wait_until(hot, what="the rate of the partition with the key")
    found = re.search(r'href="/topics/orders/keys\?partition=(\d)">its keys', text_of(browser, "/topics/orders"))
    assert found is not None
    partition = int(found[1])
    page = words(text_of(browser, "/topics/orders/keys", partition=partition))
    assert "One key has 9" in page, "without asking for bodies"
    assert "a split does not help" in page
    busiest, *_ = busiest_keys(world.runtime(), "orders", partition).busiest
    assert busiest.messages >= 300
    assert f"{busiest.messages} {100 * busiest.share:.1f} %" in page
    with console_client(world, VIEWER) as viewer:
        assert "One key has 9" in words(text_of(viewer, "/topics/orders/keys", partition=partition))
    assert "unknown partition 99" in words(text_of(browser, "/topics/orders/keys", partition=99))
    assert browser.get("/topics/none/keys").status_code == 404


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


@pytest.mark.world(partitions=4)
def test_the_list_marks_a_topic_with_a_hot_partition_by_the_rates_of_the_overview(
    world: World, browser: TestClient
) -> None:
    def rates(*per_s: float) -> None:
        world.rows("DELETE FROM mqlayer.partition_rate")
        world.rows(
            "INSERT INTO mqlayer.partition_rate (partition_id, next_offset, per_s, measured_at) "
            "SELECT n, 1, rate, now() FROM unnest(%s::float8[]) WITH ORDINALITY AS u (rate, n)", list(per_s),
        )  # fmt: skip

    rates(1, 1, 17, 1)
    assert "hot: partition 3 takes 85 %" in words(text_of(browser, "/topics"))
    rates(5, 6, 9, 5)
    assert "hot: " not in words(text_of(browser, "/topics"))
    assert hot_partitions(world.database) == {}
    shares = (0.45, 0.55, 0.6, 0.9)
    assert [is_hot(share, 0.25) for share in shares] == [False, True, True, True]
    for share, expected in zip(shares, (False, True, True, True), strict=True):
        rates(100 * share, *[100 * (1 - share) / 3] * 3)
        assert bool(hot_partitions(world.database)) is expected, "the rule of the pages is the query's"
    split(world.runtime(), "orders", 1, at=[10])
    rates(0, 10, 10, 10, 18, 12)
    assert hot_partitions(world.database) == {}, "it has few LPs, and an equal share"
    assert "hot: " not in words(text_of(browser, "/topics")), "but no more of the load than an equal share twice"


def test_a_scale_ends_at_a_round_number_and_heat_needs_a_rate_and_a_share() -> None:
    assert [nice(value) for value in (0, 0.03, 1, 1.1, 7, 5_001)] == [1, 0.05, 1, 2, 10, 10_000]
    assert [one.word for one in heats({1: (None, 512), 2: (0.0, 512)}).values()] == ["unknown", "idle"]
    assert {one.word for one in heats(dict.fromkeys(range(4), (3.0, 256))).values()} == {"cool"}
    assert heats({1: (4.0, 512), 2: (0.0, 512)})[1].word == "cool", "too few a second"
    found = heats({1: (60.0, 256), 2: (16.0, 256), 3: (16.0, 256), 4: (8.0, 256)})
    assert [one.word for one in found.values()] == ["hot", "cool", "cool", "cool"]
    assert heats({1: (40.0, 256), 2: (20.0, 256), 3: (20.0, 256), 4: (20.0, 256)})[1].word == "warm"
    halves = {n: (20.0, lps) for n, lps in enumerate((256, 256, 256, 250, 6))}
    assert {one.word for one in heats(halves).values()} == {"cool"}, "after a split that divided the load"
    assert heats({1: (90.0, 1024)})[1].word == "cool", "a partition alone has its share"
