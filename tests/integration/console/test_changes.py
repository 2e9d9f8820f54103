"""Pages of route changes, plans with their effect on load, and acts."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from mqlayer.groups import GroupSettings, ensure_group
from mqlayer.relay import relay_once
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.stack import RedisServer
from tests.fixtures.console import console_client
from tests.fixtures.console_pages import OPERATOR, VIEWER, act, audited, text_of, words
from tests.fixtures.failpoints import broken_off_at
from tests.fixtures.wait import wait_until
from tests.proof.route_steps import split
from tests.proof.world import QUICK, World


@pytest.fixture
def browser(world: World) -> Iterator[TestClient]:
    with console_client(world, OPERATOR) as client:
        yield client


@pytest.mark.world(partitions=1, relayed=40)
def test_a_split_shows_its_effect_is_applied_and_watched_until_groups_have_drained(
    world: World, browser: TestClient
) -> None:
    said = words(text_of(browser, "/changes"))
    assert "No change is open" in said
    assert "No route change yet" in said
    ensure_group(
        world.runtime(), RouteCache(world.database), topic="orders", name="ledger",
        settings=GroupSettings(start="earliest"),
    )  # fmt: skip
    said = words(act(browser, "route-split", topic="orders", partition=1, at="100, 600"))
    assert "Loads are of all messages ever published to it." in said
    assert "All parts stay on node-1" in said
    assert "Many keys make the load: the busiest, " in said
    assert "Before: partition 1, LPs 0 to 1023 on node-1: 40 messages (100%). It ends." in said
    assert "After: a new partition, LPs 0 to 99 on node-1:" in said
    assert "After: a new partition, LPs 600 to 1023 on node-1:" in said
    assert "Route version 2 of topic orders is in force" in said
    assert "Go on to Route change 1" in said
    assert audited(world, "route split") == [("ann@console", "orders", "drill")]
    told = words(text_of(browser, "/audit"))
    assert "split partition 1 of topic orders → LPs 0 to 99 on node-1, LPs 100 to 599 on node-1" in told
    assert "planned to split" not in told
    said = words(text_of(browser, "/changes"))
    assert "split 1 orders 1 → 2, 3, 4 ledger (1)" in said
    said = words(text_of(browser, "/changes/1"))
    assert "ledger 1 40" in said
    assert "Successors open" in said
    assert "ann@console" in said
    halves = words(browser.get("/actions/route-split", params={"topic": "orders", "partition": 3}).text)
    assert "(50%)" in halves or "(4" in halves, "where the load halves"
    said = words(act(browser, "route-merge", topic="orders", partitions="3 4"))
    assert "LPs 100 to 1023 on node-1" in said
    assert browser.get("/actions/route-merge", params={"topic": "orders", "partitions": "x"}).status_code == 400
    stale = browser.post(
        "/actions/route-split",
        data={"topic": "orders", "partition": "2", "at": "50", "version": "2", "token": "token", "reason": "drill"},
    )
    assert stale.status_code == 409
    assert "at route version 3, not 2" in stale.text
    assert browser.get("/changes/99").status_code == 404
    assert "split 1" not in words(text_of(browser, "/changes", before=1)).partition("History")[2]


@pytest.mark.world(partitions=1, nodes=2)
def test_a_plan_of_a_split_names_the_key_that_makes_the_load_and_the_form_says_how_to_name_nodes(
    world: World, browser: TestClient
) -> None:
    form = text_of(browser, "/changes", topic="orders", partition="1")
    assert re.search(r'<option value="10">the last 10 s.*?<option value="0">all messages', form), "10 s by default"
    assert "Nodes of the parts, in order, such as node-1, node-2;" in form
    assert '<option value="node-2, node-1">' in form
    world.publish(40, keys=1)
    world.publish(4, keys=4)
    relay_once(world.settings(), limits=QUICK)
    plan = words(
        text_of(browser, "/actions/route-split", topic="orders", partition=1, measure=1, to="node-2 node-1", at="512")
    )
    assert "Loads are of all messages ever published to it, since none came while it was measured." in plan
    assert re.search(r"A split does not help: one key, [^ ]+, has 9\d% of the newest 44 messages", plan)
    assert "All parts stay" not in plan
    assert "LPs 512 to 1023 on node-1" in plan


@pytest.mark.world(partitions=1, nodes=2, relayed=4)
def test_an_open_change_tells_what_it_waits_for_and_goes_on_or_is_dropped(
    world: World, browser: TestClient, node: RedisServer
) -> None:
    with broken_off_at("change.after_plan"):
        split(world.runtime(), "orders", 1, at=[100])
    said = words(text_of(browser, "/changes"))
    assert "split 1 orders planned" in said
    assert "its driver" in said
    assert "; not begun yet" in words(text_of(browser, "/audit", who="all"))
    said = words(act(browser, "route-drop", topic="orders"))
    assert "Change 1 is dropped; the route is as before." in said
    assert audited(world, "route drop") == [("ann@console", "orders", "drill")]
    assert "Nothing was sealed: the old partitions are in force" in words(text_of(browser, "/changes/1"))
    home = {place for _, _, place in world.partitions()}
    other = "node-2" if home == {1} else "node-1"
    said = words(act(browser, "route-move", topic="orders", partition=1))
    assert f"on {other}" in said
    ((partition,),) = world.rows("SELECT partition_id FROM mqlayer.partition WHERE state = 'open'")
    with broken_off_at("change.after_plan"):
        split(world.runtime(), "orders", partition, at=[100])
    if other == "node-2":
        node.kill()
        wait_until(
            lambda: "node-2 is unreachable" in words(text_of(browser, "/changes")), what="the node that it waits for"
        )
        assert "It waits for node node-2 is unreachable" in words(text_of(browser, "/changes/3"))
        said = words(act(browser, "route-repair", topic="orders"))
        assert "change 3: " in said
        assert "not available" in said
    with console_client(world, VIEWER) as viewer:
        for name in ("route-split", "route-merge", "route-move", "route-drop", "route-repair"):
            fields = {"topic": "orders", "partition": "1", "partitions": "1 2", "token": "token", "reason": "drill"}
            assert viewer.get(f"/actions/{name}", params=fields).status_code == 403
            assert viewer.post(f"/actions/{name}", data=fields).status_code == 403
        assert "/actions/" not in text_of(viewer, "/changes")
