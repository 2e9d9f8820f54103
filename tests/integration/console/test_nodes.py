"""Pages of nodes, processes, jobs and the doctor; acts on nodes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest
from starlette.testclient import TestClient

from mqlayer.console.node_reads import NODE_S, SILENT
from mqlayer.groups import GroupSettings, ensure_group
from mqlayer.runtime.route_cache import RouteCache
from mqlayer.stack import RedisServer
from tests.fixtures.console import console_client
from tests.fixtures.console_pages import OPERATOR, VIEWER, act, audited, sample, text_of, words
from tests.fixtures.wait import awake_s, wait_until
from tests.proof.world import World


@pytest.fixture
def browser(world: World) -> Iterator[TestClient]:
    with console_client(world, OPERATOR) as client:
        yield client


def shows(browser: TestClient, path: str, text: str) -> str:
    """Wait until a page says this; what it says then."""
    return wait_until(lambda: said if text in (said := words(text_of(browser, path))) else "", what=text)


@pytest.mark.world(partitions=2, relayed=3)
def test_nodes_and_processes_show_their_last_signs_of_life(world: World, browser: TestClient) -> None:
    said = words(text_of(browser, "/nodes"))
    assert "node-1 serving" in said
    assert "master, 0 replicas" in said
    assert "No relay ran within the last hour" in said
    assert re.search(r"1 outbox mqlayer_test_\w+ \w+ (?:[\d.]+ \w+ ago|just now)", said)
    assert "No member is known" in said
    world.rows(
        "INSERT INTO mqlayer.consumer_group (topic_id, name, state, start, backoff_s) "
        "VALUES (1, 'ledger', 'live', 'earliest', '{1}')"
    )
    world.rows(
        "INSERT INTO mqlayer.member (group_id, member_id, host, pid, lease_until, most) "
        "SELECT 1, 'm' || n, '<i>host</i>', n, now() + interval '1 min' * (n - 1), 99 FROM generate_series(1, 60) AS n"
    )
    world.rows(
        "INSERT INTO mqlayer.job (name, last_at, next_at, ended_at, error) VALUES "
        "('trim', now() - interval '10 s', now(), now() - interval '8 s', NULL), "
        "('archive', now(), now(), now() + interval '1 s', 'Conflict: why'), ('relay', now(), now(), NULL, NULL)"
    )
    page = text_of(browser, "/nodes")
    said = words(page)
    assert "orders / ledger m1 silent" in said
    assert "&lt;i&gt;host&lt;/i&gt;" in page
    assert re.search(r"trim done 1\d s ago 2 s", said)
    assert "archive failed" in said
    assert "Conflict: why" in said
    assert "relay running" in said
    assert "sample never ran" in said
    assert "m9 running" not in said, "on the next page, in the order of ids"
    more = words(text_of(browser, "/nodes", group=1, member="m54"))
    assert "m9 running" in more
    assert browser.get("/nodes", params={"group": "x"}).status_code == 400


@pytest.mark.world(partitions=1, own_node=True, relayed=3)
def test_a_node_shows_its_partitions_and_curves_and_is_armed_again_by_an_operator(
    world: World, browser: TestClient, node: RedisServer
) -> None:
    assert "no sample was taken in this time" in text_of(browser, "/nodes/node-1")
    sample(world, node={"memory_bytes": [1_000_000, 2_000_000]})
    said = words(text_of(browser, "/nodes/node-1", last="hour"))
    assert "memory: 2.0 MB at the end" in said
    assert "0 to 1023" in said
    assert browser.get("/nodes/none").status_code == 404
    node.kill()
    said = shows(browser, "/nodes/node-1", "It does not answer")
    assert "unreachable since" in said
    assert "First start the Redis at" in said
    assert "Only if …" in said
    shows(browser, "/nodes", "node-1 unreachable")
    node.start()
    shows(browser, "/nodes/node-1", "Another run than the armed one answers")
    said = words(act(browser, "node-rearm", node="node-1"))
    assert "Node node-1 at" in said
    assert "Node node-1 is armed; 0 assignments got a new epoch." in said
    assert audited(world, "node rearm") == [("ann@console", "node-1", "drill")]
    said = shows(browser, "/nodes/node-1", "State serving")
    assert re.search(r"Armed again at .* by ann@console: ", said)
    assert "Topics with partitions there: orders; their groups: none." in words(
        text_of(browser, "/actions/node-rearm", node="node-1")
    )


@pytest.mark.world(partitions=1, nodes=2, relayed=3)
def test_a_lost_node_is_given_up_and_an_address_changes(world: World, browser: TestClient, node: RedisServer) -> None:
    (name,) = {f"node-{place}" for _, _, place in world.partitions()}
    other = next(one for one in ("node-1", "node-2") if one != name)
    refused = browser.post("/actions/node-lost", data={"node": other, "token": "token", "reason": "drill"})
    assert refused.status_code == 409
    assert "answers" in refused.text
    url = world.urls[1]
    said = words(act(browser, "node-set", node="node-2", url=url.replace("127.0.0.1", "localhost")))
    assert "Its address changes from redis://127.0.0.1" in said
    assert audited(world, "node set") == [("ann@console", "node-2", "drill")]
    node.kill()
    plan = browser.get("/actions/node-lost", params={"node": "node-2"})
    assert "can't be taken back" in words(plan.text).replace("&#39;", "'")
    said = words(act(browser, "node-lost", node="node-2"))
    assert "Node node-2 is given up" in said
    assert audited(world, "node lost") == [("ann@console", "node-2", "drill")]
    shows(browser, "/nodes/node-2", "This node was given up")
    with console_client(world, VIEWER) as viewer:
        for act_name in ("node-lost", "node-rearm", "node-set"):
            fields = {"node": "node-1", "url": url, "token": "token", "reason": "drill"}
            assert viewer.get(f"/actions/{act_name}", params=fields).status_code == 403
            assert viewer.post(f"/actions/{act_name}", data=fields).status_code == 403
        assert "/actions/" not in text_of(viewer, "/nodes/node-1")


@pytest.mark.world(partitions=1)
def test_the_doctor_runs_on_demand_only(world: World, browser: TestClient) -> None:
    assert "Findings" not in text_of(browser, "/doctor")
    said = words(text_of(browser, "/doctor", run=1))
    assert "no relay lives" in said
    assert "run one: mqlayer relay" in said
    assert "Fine: " in said


@pytest.mark.world(partitions=4, nodes=2)
def test_a_silent_node_holds_up_one_page_and_not_each_of_its_groups(
    world: World, browser: TestClient, node: RedisServer
) -> None:
    with closing(RouteCache(world.database)) as routes:
        for number in range(6):
            ensure_group(world.runtime(), routes, topic="orders", name=f"g{number}", settings=GroupSettings())
    pid = node.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        began = awake_s()
        said = [text_of(browser, "/keys", topic="orders", key="k"), text_of(browser, "/topics/orders"),
                text_of(browser, "/messages", topic="orders"), text_of(browser, "/groups/orders/g1")]  # fmt: skip
        # Six groups would take six times as long.
        assert awake_s() - began < NODE_S + 4.5
        assert "does not answer" in said[1]
    finally:
        os.kill(pid, signal.SIGCONT)
    SILENT.forget(world.urls[1])
    shows(browser, "/topics/orders", "4 partitions. Rates")
    assert "does not answer" not in text_of(browser, "/topics/orders")
