"""The page of the audit trail: filtered, paged by place, quick on many rows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from mqlayer.groups.pauses import pause_topic
from mqlayer.postgres.audit import Actor
from mqlayer.postgres.queries import query
from tests.fixtures.console import console_client
from tests.fixtures.console_pages import VIEWER, text_of, words
from tests.fixtures.kept_connections import kept_session
from tests.proof.world import World

ROWS = 20_000


@pytest.fixture
def browser(world: World) -> Iterator[TestClient]:
    with console_client(world, VIEWER) as client:
        yield client


def acts(page: str) -> list[str]:
    return re.findall(r"<p class=\"quiet\">Act ([^,<]*), object", page)


@pytest.mark.world(partitions=1)
def test_acts_are_shown_newest_first_with_reason_and_filtered(world: World, browser: TestClient) -> None:
    world.rows("DELETE FROM mqlayer.audit")
    assert "No person did anything yet" in words(text_of(browser, "/audit"))
    pause_topic(world.runtime(actor=Actor("ann@console", "a <drill>")), "orders")
    page = text_of(browser, "/audit")
    assert acts(page) == ["topic pause"]
    assert "a &lt;drill&gt;" in page
    assert "role " in words(page)
    assert '<a href="/topics/orders">See orders</a>' in page
    assert "paused topic orders: running → paused." in words(page)
    world.rows(
        "INSERT INTO mqlayer.audit (at, actor, act, object, facts) SELECT now() - make_interval(mins => n), "
        "'bea@host', 'act ' || n, 'orders/g' || n %% 2, jsonb_build_object('n', n) FROM generate_series(1, 120) AS n"
    )
    seen, path = list[str](), "/audit?actor=bea%40host"
    while path:
        page = browser.get(path).text
        seen += acts(page)
        found = re.search(r'rel="next" href="([^"]*)"', page)
        path = found[1].replace("&amp;", "&") if found else ""
    assert seen == [f"act {n}" for n in range(1, 121)], "each once over all pages"
    assert acts(text_of(browser, "/audit", object="orders/g0", act="act 4")) == ["act 4"]
    assert "No act fits" in words(text_of(browser, "/audit", actor="be"))
    ((since, until),) = world.rows(
        "SELECT to_char(min(at) AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS'), "
        "to_char((min(at) + interval '90 s') AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS') FROM mqlayer.audit"
    )
    assert acts(text_of(browser, "/audit", since=since, until=until)) == ["act 119", "act 120"]
    world.rows("INSERT INTO mqlayer.audit (actor, act, object) VALUES ('relay', 'act of a relay', 'orders')")
    for who, heading, there in (
        ("", "What people did", False), ("machines", "What relays, workers, members and programs did", True),
        ("all", "What people and machines did", True),
    ):  # fmt: skip
        page = text_of(browser, "/audit", who=who)
        assert (heading in page, "act of a relay" in acts(page)) == (True, there), who
        assert ("topic pause" in acts(page)) == (who != "machines"), who
    assert acts(text_of(browser, "/audit", actor="relay")) == ["act of a relay"], "a named actor may be either"
    for query_ in ({"who": "me"}, {"since": "soon"}, {"before": "x"}, {"before": "2026-01-01_x"}):
        assert browser.get("/audit", params=query_).status_code == 400


@pytest.mark.world(partitions=0)
def test_each_filter_reads_an_index_of_a_long_trail(world: World) -> None:
    world.rows(
        "INSERT INTO mqlayer.audit (at, actor, act, object) SELECT now() - make_interval(secs => n), "
        "'a' || n %% 500, 'act ' || n %% 300, 'o' || n %% 700 FROM generate_series(1, %s) AS n", ROWS
    )  # fmt: skip
    world.rows(
        "INSERT INTO mqlayer.audit (at, actor, act, object) SELECT now() - make_interval(hours => n), "
        "'p' || n || '@host', 'act ' || n, 'o' || n FROM generate_series(1, 60) AS n"
    )
    world.rows("ANALYZE mqlayer.audit")
    nothing = dict.fromkeys(("actor", "act", "object", "since", "until", "before_at", "before", "who"))
    people = {"who": "people"}
    with kept_session(world.dsn, autocommit=True) as connection:
        for chosen in ({}, {"actor": "a7"}, {"act": "act 7"}, {"object": "o7"}, {"actor": "none"}, {"act": "none"},
                       people, {"who": "machines"}, people | {"object": "o7"}, people | {"act": "act 7"}):  # fmt: skip
            facts = {**nothing, **chosen, "limit": 51}
            lines = connection.execute(
                b"EXPLAIN (ANALYZE, FORMAT JSON) " + query("audit_list").encode(), facts, prepare=False
            ).fetchone()
            assert lines is not None
            plan = str(lines[0])
            assert "Seq Scan" not in plan
            assert max(float(one) for one in re.findall(r"'Actual Rows': ([\d.]+)", plan)) <= 70, "those that fit"
            assert sum(map(float, re.findall(r"'Rows Removed by Filter': ([\d.]+)", plan))) <= 70, (chosen, plan)
        kinds = connection.execute(query("audit_acts"), {"limit": 400}).fetchall()
    assert len(kinds) == 301, "the node's registration is one"
